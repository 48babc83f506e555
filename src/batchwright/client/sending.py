"""Sends what a run folder holds to a service: each line once, and what belongs around them.

The service says which line it wants next, and that alone decides what is sent: after a restart on
either side, or with two senders at once, nothing is lost and nothing counted twice.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchwright.client.http import Backoff, Service, ServiceError
from batchwright.client.outbox import (
    METRICS,
    Lines,
    Report,
    new_report,
    read_report,
    sound,
    write_report,
)
from batchwright.errors import FileError

MAX_LINES = 1000  # of a message; `records.service.MAX_RECORDS`, without importing all records
MAX_BYTES = 2**20
ATTEMPTS = 4  # of `send`, in a row that come to nothing, before it gives up
ADVICE = "advice.json"  # where training looks for advice
_MAX_ERROR = 2000  # characters of an error
_MAX_CORRECTIONS = 5  # in a row, of the line that comes next


class Sender:
    """Everything that a reporter has to say of one run.

    Args:
        folder: The run folder.
        report: Where it reports to, and how far it is.
        service: That place.
        tell: Takes a line for whoever watches.

    Attributes:
        report: As it is now; whoever calls keeps it in the run folder.
        heard: When the service was told last that the run goes on, by `time.monotonic`.
    """

    def __init__(
        self, folder: Path, report: Report, service: Service, tell: Callable[[str], None]
    ) -> None:
        self.report, self.heard = report, 0.0
        self._folder, self._service, self._tell = folder, service, tell
        self._lines = Lines(folder / METRICS)
        self._most, self._corrections = MAX_LINES, 0
        self._anew = self._was_anew = False  # the next lines replace all; some did already
        self._refused: dict[int, str] = {}  # lines that the service does not want, and why
        self._newest_advice = self._advice_seen = self._advice_left = 0
        self._plan: tuple[int, int] | None = None  # which plan.json was told of

    @property
    def waiting(self) -> bool:
        """Whether there is something to send, be it half a line."""
        return self._lines.waiting

    @property
    def left(self) -> int:
        """Lines that the service does not have yet, as far as is known."""
        return max(0, self._lines.count() - self.report.next)

    def introduce(self) -> None:
        """Tell of the run, and learn how much of it is known.

        Raises:
            ServiceError: The service cannot be reached, or refuses.
            FileError: The folder holds no plan.
        """
        info = self._introduced(with_profile=True)
        if "digest" not in info:
            raise ServiceError(
                f"{self._service.url} is of an earlier version, which does not take this run's "
                "records: update it there",
                status=400,
            )
        self._go_to(_count_in(info, "records") or 0, info["digest"])

    def send_some(self) -> bool:
        """Send the next lines, if there are any; returns whether it may go on at once.

        Raises:
            ServiceError: The service cannot be reached, or refuses.
        """
        lines = self._lines.ahead(self._most, MAX_BYTES)
        if not lines:
            return False
        first = self._lines.next
        sent = [self._sendable(first + place, line) for place, line in enumerate(lines)]
        head = {
            "first": first,
            "before": self._lines.digest(),
            "after": self._lines.digest(lines),
            "anew": self._anew and first == 0,
        }
        body = json.dumps(head)[:-1].encode() + b',"records":[' + b",".join(sent) + b"]}"
        try:
            taken = self._service.post(f"/v1/runs/{self.report.run}/records", body)
        except ServiceError as error:
            self._after_refusal(error, first, lines)
            return True
        self._most, self._corrections, self._anew = MAX_LINES, 0, False
        self._lines.take(lines)
        self._take_answer(taken, self._lines.next)
        return self._lines.waiting

    def alive(self) -> None:
        """Say that the run goes on, with nothing new to tell."""
        answer = self._service.put(f"/v1/runs/{self.report.run}/alive")
        self._take_answer(answer, self._lines.next)

    def end(self, outcome: str, error: str | None) -> None:
        """Tell how the run ended; with its summary, if it finished."""
        path = self._folder / "summary.json"
        summary = _json_in(path) if outcome == "finished" and path.exists() else b"null"
        told = json.dumps({"outcome": outcome, "error": error[:_MAX_ERROR] if error else None})
        place = f"/v1/runs/{self.report.run}/end"
        try:
            self._service.put(place, told[:-1].encode() + b',"summary":' + summary + b"}")
        except ServiceError as refusal:
            if refusal.status not in (413, 422) or summary == b"null":
                raise
            self._tell(f"the service does not take the summary: {refusal}")
            self._service.put(place, told.encode())
        self.report = self.report.to(state=outcome, error=error, told=True)

    def exchange_advice(self) -> None:
        """Fetch new advice for training to find, and tell of advice that training has taken."""
        if self._anew:  # whether it is this run is not settled
            return
        self.tell_taken()
        left = self._advice_left
        there = left == 0 or (self._folder / ADVICE).exists() or self._put_aside(left) is not None
        # Where it is neither there nor put aside, training removed what came before it.
        if self._newest_advice > self._advice_seen or not there:
            self._fetch_advice()

    def tell_taken(self) -> None:
        """Tell of advice that training has put aside as taken, and of the plan that came of it."""
        numbers = (path.stem.partition("-")[2] for path in self._folder.glob("advice-*.json"))
        for number in sorted(int(one) for one in numbers if one.isdecimal()):
            advice = self._put_aside(number) if number > self.report.advice_told else None
            if advice is None:
                continue
            epoch = _count_in(advice, "taken")
            if epoch is not None:
                self._tell_taken(number, epoch)
            self.report = self.report.to(advice_told=number)
        if self._plan is not None and _mark_of(self._folder / "plan.json") != self._plan:
            self._introduced(with_profile=False)

    # ------------------------------------------------------------------------------------ in here

    def _introduced(self, *, with_profile: bool) -> dict[str, Any]:
        """What the service knows of the run, from its answer to the introduction."""
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
                return self._introduced(with_profile=False)
            raise
        self._plan, self.heard = _mark_of(plan), time.monotonic()
        return info if isinstance(info, dict) else {}

    def _sendable(self, number: int, line: bytes) -> bytes:
        """The line, or what takes its place: the numbers of all others must stay."""
        if number in self._refused:
            text = f"line {number + 1} of {METRICS} was not taken: {self._refused[number]}"
        elif sound(line):
            return line
        else:
            text = f"line {number + 1} of {METRICS} is damaged"
        return json.dumps({"kind": "note", "text": text}).encode()

    def _after_refusal(self, error: ServiceError, first: int, lines: list[bytes]) -> None:
        """Do what helps, or raise the error again."""
        if error.status == 409 and error.next_sequence is not None:
            self._corrections += 1
            if self._corrections > _MAX_CORRECTIONS:
                raise error  # it cannot decide
            if error.next_sequence == first:
                self._send_anew()
            else:
                self._go_to(error.next_sequence)
        elif error.status == 409 and self._anew:
            self._report_as_another()
        elif error.status in (413, 422) and len(lines) > 1:
            self._most = len(lines) // 2
        elif error.status in (413, 422) and first not in self._refused:
            self._refused[first] = str(error)
            self._tell(f"line {first + 1} of {METRICS} is not taken: {error}")
        else:
            raise error

    def _take_answer(self, answer: Any, expected: int) -> None:
        self.heard = time.monotonic()
        self._newest_advice = max(self._newest_advice, _count_in(answer, "advice") or 0)
        known = _count_in(answer, "next")
        if not self._anew:
            self._go_to(expected if known is None else known, answer.get("digest"))

    def _go_to(self, number: int, digest: str | None = None) -> None:
        """Go on with the line that the service wants, if it has the same ones before it."""
        if self._lines.go_to(number) and digest in (None, self._lines.digest()):
            self.report = self.report.to(next=number)
        else:
            self._send_anew()

    def _send_anew(self) -> None:
        """The service has other lines than the folder: they are replaced, though only once.

        A machine that went down may have lost lines that were sent, and written others since. Who
        finds other lines again has met somebody else who sends a copy of the folder.
        """
        if self._was_anew:
            self._report_as_another()
            return
        self._tell(
            f"the service has other lines of this run than {self._folder}, as after a machine went "
            "down that had not kept its newest ones: they are sent anew"
        )
        self._anew = self._was_anew = True
        self._refused = {}
        self._lines.go_to(0)
        self.report = self.report.to(next=0)

    def _report_as_another(self) -> None:
        """Another copy of the folder is reported as this run, or it has finished there."""
        self._tell(
            f"the service has other lines of this run than {self._folder}, which is another copy: "
            "it is reported as a run of its own"
        )
        self._anew = self._was_anew = False
        self._lines.go_to(0)
        self.report = self.report.to(run=str(uuid.uuid4()), next=0, told=False, advice_told=0)
        self._newest_advice = self._advice_seen = self._advice_left = 0
        self._refused = {}
        self._introduced(with_profile=True)

    # -------------------------------------------------------------------------------------- advice

    def _fetch_advice(self) -> None:
        """The newest advice, for training to find if it follows any."""
        try:
            found = self._service.get(f"/v1/runs/{self.report.run}/advice")
        except ServiceError as error:
            if error.passing or error.status == 401:
                raise
            self._advice_seen, self._advice_left = self._newest_advice, 0
            self._tell(f"there is advice, and it cannot be read: {error}")
            return
        advice = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        numbered = [(_count_in(one, "number") or 0, one) for one in advice]
        number, newest = max(numbered, key=lambda pair: pair[0], default=(0, {}))
        self._advice_seen = max(self._newest_advice, number)
        old = newest.get("taken") is not None or self._put_aside(number) is not None
        if not newest or old or number <= self.report.advice_told:
            return
        reason = " ".join(str(newest.get("reason", "")).split())
        if not self.report.follows_advice:
            self._tell(f"advice of the service: {reason} (--follow-advice would take it)")
            return
        self._tell(f"advice of the service, for the end of an epoch: {reason}")
        path, aside = self._folder / ADVICE, self._folder / f".{ADVICE}.writing"
        try:
            aside.write_text(json.dumps({**newest, "run": self.report.run}), encoding="utf-8")
            aside.replace(path)
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}") from None
        self._advice_left = number

    def _put_aside(self, number: int) -> dict[str, Any] | None:
        """Advice that training is done with; ``None`` if it is another run's, or damaged.

        The folder may have been reported elsewhere before, and each run counts its advice from 1.
        """
        path = self._folder / f"advice-{number}.json"
        try:
            advice = json.loads(_json_in(path)) if path.exists() else None
        except FileError:
            return None  # the end of the run is worth more than what is in there
        ours = isinstance(advice, dict) and advice.get("run") == self.report.run
        return advice if ours else None

    def _tell_taken(self, number: int, epoch: int) -> None:
        """Tell that an advice is followed from a zero-based epoch on."""
        place = f"/v1/runs/{self.report.run}/advice/{number}/taken"
        try:
            self._service.put(place, {"epoch": epoch})
        except ServiceError as error:
            if error.status not in (404, 422):
                raise
            # It would refuse it again. What is left of the run and its end are worth more.
            self._tell(f"advice {number} was taken, which the service does not note: {error}")
            return
        self._plan = (0, 0)  # the plan that came of it is to be told


def _json_in(path: Path) -> bytes:
    """A file that other programs wrote as JSON."""
    try:
        content = path.read_bytes()
        json.loads(content)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise FileError(f"{path} is not JSON") from None
    return content


def _mark_of(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file is replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _count_in(values: Any, key: str) -> int | None:
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, int) and found >= 0 and not isinstance(found, bool) else None


def report_to_send(folder: Path, url: str | None) -> Report:
    """The state of a run's reporting, with the place that it goes to now.

    Args:
        folder: The run folder.
        url: The service; ``None``: where it reported before.

    Raises:
        FileError: The folder holds no run, or never reported anywhere and no service is given.
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
        report: From `report_to_send`.
        service: Where it goes.
        tell: Takes a line for whoever watches.

    Returns:
        The report then; ``report.json`` holds it too.

    Raises:
        ServiceError: The service cannot be reached for a while, or refuses; what is sent is noted.
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
            sender.tell_taken()
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
