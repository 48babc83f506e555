"""Sends a run folder to a service: the run's introduction, each line once, advice and the end.

The service's answers say which line it wants next, and that alone decides what is sent: after a
restart on either side, or with two senders at once, no line is lost and none is counted twice.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchwright.client.http import Backoff, Service, ServiceError, object_in
from batchwright.client.outbox import (
    METRICS,
    Lines,
    Report,
    can_be_sent,
    new_report,
    read_report,
    write_report,
)
from batchwright.errors import FileError, both_ends, printable

MAX_LINES = 1000  # in a message; `records.service.MAX_RECORDS`, without importing all records
MAX_BYTES = 2**20  # of a message
ATTEMPTS = 4  # failures in a row after which `send` gives up
ADVICE = "advice.json"  # where training looks for advice
UNREADABLE = "advice-unreadable.json"  # advice that training could not read, as of a newer version
_MAX_ERROR = 2000  # characters of an error
_MAX_CORRECTIONS = 5  # answers in a row that want another line than the one sent


class Sender:
    """Sends one run to a service.

    Args:
        folder: The run folder.
        report: Where the run is reported, and how much of it the service has.
        service: The service at `report.url`.
        tell: Called with each line for the person who watches.

    Attributes:
        report: The report, kept up to date; the caller writes it into the run folder.
        last_contact: When the service answered last, by `time.monotonic`.
    """

    def __init__(
        self, folder: Path, report: Report, service: Service, tell: Callable[[str], None]
    ) -> None:
        self.report, self.last_contact = report, 0.0
        self._folder, self._service, self._tell = folder, service, tell
        self._lines = Lines(folder / METRICS)
        self._max_lines, self._corrections = MAX_LINES, 0
        self._replacing = False  # whether the next lines replace all that the service has
        self._replaced_once = False
        self._refused: dict[int, str] = {}  # by line that the service refuses: why
        # Numbers of advice: the newest at the service, the last one fetched, the last one written
        # for training.
        self._newest_advice = self._advice_seen = self._advice_left = 0
        self._plan_version: tuple[int, int] | None = None  # of the plan.json that was sent

    @property
    def waiting(self) -> bool:
        """Whether there is something to send, be it half a line."""
        return self._lines.waiting

    @property
    def left(self) -> int:
        """Number of lines that the service has not confirmed."""
        return max(0, self._lines.count() - self.report.next)

    def introduce(self) -> None:
        """Send plan and profile, and learn how many lines the service has.

        Raises:
            ServiceError: The service cannot be reached, or refuses.
            FileError: The folder holds no plan.
        """
        info = self._send_introduction(with_profile=True)
        if "digest" not in info:
            raise ServiceError(
                f"{self._service.url} is of an earlier version, which does not take this run's "
                "records: update it there",
                status=400,
            )
        self._go_to(_count_in(info, "records") or 0, info["digest"])

    def send_some(self) -> bool:
        """Send the next lines, if there are any.

        Returns:
            Whether there may be more to send at once.

        Raises:
            ServiceError: The service cannot be reached, or refuses.
        """
        lines = self._lines.ahead(self._max_lines, MAX_BYTES)
        if not lines:
            return False
        first = self._lines.next
        sent = [self._sendable(first + place, line) for place, line in enumerate(lines)]
        head = {
            "first": first,
            "before": self._lines.digest(),
            "after": self._lines.digest(lines),
            "anew": self._replacing and first == 0,
        }
        body = json.dumps(head)[:-1].encode() + b',"records":[' + b",".join(sent) + b"]}"
        try:
            taken = self._service.post(f"/v1/runs/{self.report.run}/records", body)
            answer = object_in(taken, self._service.url)
        except ServiceError as error:
            self._after_refusal(error, first, lines)
            return True
        self._max_lines, self._corrections, self._replacing = MAX_LINES, 0, False
        self._lines.take(lines)
        self._take_answer(answer)
        return self._lines.waiting

    def alive(self) -> None:
        """Tell the service that the run goes on, without new lines."""
        self._take_answer(self._service.put(f"/v1/runs/{self.report.run}/alive"))

    def end(self, outcome: str, error: str | None) -> None:
        """Send how the run ended, with its summary if it finished."""
        path = self._folder / "summary.json"
        summary = _json_in(path) if outcome == "finished" and path.exists() else b"null"
        line = both_ends(printable(" ".join((error or "").split())), _MAX_ERROR)
        end = json.dumps({"outcome": outcome, "error": line or None})
        address = f"/v1/runs/{self.report.run}/end"
        try:
            self._service.put(address, end[:-1].encode() + b',"summary":' + summary + b"}")
        except ServiceError as refusal:
            if refusal.status not in (413, 422) or summary == b"null":
                raise
            self._tell(f"the service does not take the summary: {refusal}")
            self._service.put(address, end.encode())
        self.report = self.report.to(state=outcome, error=error, told=True)

    def exchange_advice(self) -> None:
        """Report advice that training has taken, and fetch new advice for it."""
        if self._replacing:  # it may still turn out to be another run
            return
        self.report_taken_advice()
        left = self._advice_left
        # Advice that was written and is neither there, handled nor unreadable was removed by
        # training together with older advice.
        removed = not (
            left == 0
            or (self._folder / ADVICE).exists()
            or self._handled_advice(left) is not None
            or _count_in(self._advice_in(UNREADABLE), "number") == left
        )
        if self._newest_advice > self._advice_seen or removed:
            self._fetch_advice()

    def report_taken_advice(self) -> None:
        """Report advice that training has taken, and the plan that it follows since."""
        numbers = (path.stem.partition("-")[2] for path in self._folder.glob("advice-*.json"))
        for number in sorted(int(text) for text in numbers if text.isdecimal()):
            advice = self._handled_advice(number) if number > self.report.advice_told else None
            if advice is None:
                continue
            epoch = _count_in(advice, "taken")
            if epoch is not None:
                address = f"/v1/runs/{self.report.run}/advice/{number}/taken"
                try:
                    self._service.put(address, {"epoch": epoch})
                    self._plan_version = (0, 0)  # no file's version: the new plan is sent
                except ServiceError as error:  # it would refuse it again, and the rest matters more
                    if error.status not in (404, 422):
                        raise
                    text = f"advice {number} was taken, which the service does not note: {error}"
                    self._tell(text)
            self.report = self.report.to(advice_told=number)
        newest = _version_of(self._folder / "plan.json")
        if self._plan_version is not None and self._plan_version != newest:
            self._send_introduction(with_profile=False)

    # ------------------------------------------------------------------------------------ in here

    def _send_introduction(self, *, with_profile: bool) -> dict[str, Any]:
        """Introduce the run; returns the service's answer, a `RunInfo`."""
        plan, profile = self._folder / "plan.json", self._folder / "profile.json"
        head = {
            "name": self.report.name,
            "follows_advice": self.report.follows_advice,
            "job": self.report.job,
        }
        body = json.dumps(head)[:-1].encode() + b',"plan":' + _json_in(plan)
        if with_profile and profile.exists():
            body += b',"profile":' + _json_in(profile)
        try:
            info = self._service.put(f"/v1/runs/{self.report.run}", body + b"}")
        except ServiceError as error:
            if error.status == 413 and with_profile and profile.exists():
                return self._send_introduction(with_profile=False)
            raise
        self._plan_version, self.last_contact = _version_of(plan), time.monotonic()
        return info

    def _sendable(self, number: int, line: bytes) -> bytes:
        """A line, or the note that replaces a refused or damaged one: all lines after it keep their
        numbers.
        """
        if number in self._refused:
            text = f"line {number + 1} of {METRICS} was not taken: {self._refused[number]}"
        elif can_be_sent(line):
            return line
        else:
            text = f"line {number + 1} of {METRICS} is damaged"
        return json.dumps({"kind": "note", "text": text}).encode()

    def _after_refusal(self, error: ServiceError, first: int, lines: list[bytes]) -> None:
        """Prepare the next attempt to send ``lines``, or raise ``error`` again."""
        if error.status == 409 and error.next_sequence is not None:
            self._corrections += 1
            if self._corrections > _MAX_CORRECTIONS:
                raise error
            if error.next_sequence == first:
                self._send_anew()
            else:
                self._go_to(error.next_sequence)
        elif error.status == 409 and self._replacing:
            self._report_as_another()
        elif error.status in (413, 422) and len(lines) > 1:
            self._max_lines = len(lines) // 2
        elif error.status in (413, 422) and first not in self._refused:
            self._refused[first] = str(error)
            self._tell(f"line {first + 1} of {METRICS} is not taken: {error}")
        else:
            raise error

    def _take_answer(self, answer: dict[str, Any]) -> None:
        """Go on as an answer says, a `RecordsTaken`."""
        self.last_contact = time.monotonic()
        self._newest_advice = max(self._newest_advice, _count_in(answer, "advice") or 0)
        wanted = _count_in(answer, "next")
        if not self._replacing:
            self._go_to(self._lines.next if wanted is None else wanted, answer.get("digest"))

    def _go_to(self, number: int, digest: str | None = None) -> None:
        """Go on with the line that the service wants, if the lines that it has are the folder's."""
        if self._lines.go_to(number) and digest in (None, self._lines.digest()):
            self.report = self.report.to(next=number)
        else:
            self._send_anew()

    def _send_anew(self) -> None:
        """Replace the service's lines, which differ from the folder's; only once.

        A machine that went down may have lost lines that were sent, and written others since. Where
        the lines differ a second time, another sender reports a copy of the folder.
        """
        if self._replaced_once:
            self._report_as_another()
            return
        self._tell(
            f"the service has other lines of this run than {self._folder}, as after a machine went "
            "down that had not kept its newest ones: they are sent anew"
        )
        self._replacing = self._replaced_once = True
        self._refused = {}
        self._lines.go_to(0)
        self.report = self.report.to(next=0)

    def _report_as_another(self) -> None:
        """Report the folder as another run: a copy of it is reported as this one, or this one has
        finished at the service.
        """
        self._tell(
            f"the service has other lines of this run than {self._folder}, which is another copy: "
            "it is reported as a run of its own"
        )
        self._replacing = self._replaced_once = False
        self._lines.go_to(0)
        self.report = self.report.to(run=str(uuid.uuid4()), next=0, told=False, advice_told=0)
        self._newest_advice = self._advice_seen = self._advice_left = 0
        self._refused = {}
        self._send_introduction(with_profile=True)

    # -------------------------------------------------------------------------------------- advice

    def _fetch_advice(self) -> None:
        """Fetch the newest advice, and write it for training if the run follows advice."""
        try:
            answer = self._service.get(f"/v1/runs/{self.report.run}/advice")
        except ServiceError as error:
            if error.passing or error.status == 401:
                raise
            self._advice_seen, self._advice_left = self._newest_advice, 0
            self._tell(f"there is advice, and it cannot be read: {error}")
            return
        listed = answer if isinstance(answer, list) else []
        advice = (one for one in listed if isinstance(one, dict))
        newest = max(advice, key=lambda one: _count_in(one, "number") or 0, default={})
        number = _count_in(newest, "number") or 0
        self._advice_seen = max(self._newest_advice, number)
        old = newest.get("taken") is not None or self._handled_advice(number) is not None
        if not newest or old or number <= self.report.advice_told:
            return
        reason = " ".join(str(newest.get("reason", "")).split())
        if not self.report.follows_advice:
            self._tell(f"advice of the service: {reason} (--follow-advice would take it)")
            return
        path, aside = self._folder / ADVICE, self._folder / f".{ADVICE}.writing"
        self._advice_left = number  # also where it cannot be written: then it is fetched again
        try:
            aside.write_text(json.dumps({**newest, "run": self.report.run}), encoding="utf-8")
            aside.replace(path)
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}") from None
        self._tell(f"advice of the service, for the end of an epoch: {reason}")

    def _handled_advice(self, number: int) -> dict[str, Any] | None:
        """Advice that training has taken or passed over, which it renames to ``advice-N.json``;
        ``None`` where it has not.
        """
        return self._advice_in(f"advice-{number}.json")

    def _advice_in(self, name: str) -> dict[str, Any] | None:
        """Advice to this run in a file of the run folder.

        Returns:
            ``None`` where there is no such file, it is damaged, or it is of another run: the folder
            may have been reported elsewhere before, and each run counts its advice from 1.
        """
        path = self._folder / name
        try:
            advice = json.loads(_json_in(path)) if path.exists() else None
        except FileError:
            return None  # damaged advice must not keep the end of the run from being sent
        ours = isinstance(advice, dict) and advice.get("run") == self.report.run
        return advice if ours else None


def _json_in(path: Path) -> bytes:
    """The content of a file, if it is JSON.

    Raises:
        FileError: The file cannot be read, or is not JSON.
    """
    try:
        content = path.read_bytes()
        json.loads(content)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise FileError(f"{path} is not JSON") from None
    return content


def _version_of(path: Path) -> tuple[int, int] | None:
    """Inode and time of the last change, which differ once the file is replaced; `None` without a
    file.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _count_in(values: Any, key: str) -> int | None:
    """A whole number of 0 or more in a JSON object; `None` where there is none."""
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, int) and value >= 0 and not isinstance(value, bool) else None


def report_to_send(folder: Path, url: str | None) -> Report:
    """The report of a run that is to be sent.

    Args:
        folder: The run folder.
        url: Address of the service; ``None``: that to which the run was reported before.

    Raises:
        FileError: The folder holds no run, or the run was never reported and ``url`` is missing.
    """
    if not (folder / "plan.json").exists() or not (folder / METRICS).exists():
        raise FileError(f"{folder} holds no run that has begun: name a run folder")
    report = read_report(folder)
    if report is None or (url is not None and url != report.url):
        if url is None:
            raise FileError(f"{folder} never reported anywhere: name the service with --server URL")
        report = new_report(folder, url)
    if (folder / "summary.json").exists():
        report = report.to(state="finished", error=None)
    return report


def send(folder: Path, report: Report, service: Service, tell: Callable[[str], None]) -> Report:
    """Send all that the service does not have, and how the run ended if that is known.

    Args:
        folder: The run folder.
        report: The run's report, from `report_to_send`.
        service: The service at `report.url`.
        tell: Called with each line for the person who watches.

    Returns:
        The report after that; ``report.json`` holds it too.

    Raises:
        ServiceError: The service cannot be reached for a while, or refuses; ``report.json`` says
            how much was sent.
        FileError: The folder cannot be read or written.
    """
    sender, backoff = Sender(folder, report, service, tell), Backoff(0.5, 5.0)
    introduced, left = False, ATTEMPTS
    while True:
        try:
            if not introduced:
                sender.introduce()
                introduced = True
            while sender.send_some():
                left = ATTEMPTS
            sender.report_taken_advice()
            if report.state != "running":
                sender.end(report.state, report.error)
            break
        except ServiceError as error:
            left -= 1
            if not error.passing or not left:
                error.args = (f"{error}; {sender.left} lines are left to send",)
                raise
            time.sleep(backoff.seconds(error))
        finally:
            write_report(folder, sender.report)
    return sender.report
