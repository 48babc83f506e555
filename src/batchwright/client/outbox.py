"""A run folder as a reporter sees it: numbered lines, and ``report.json``, which says where the run
is reported and how much of it the service has.

The number of a record is that of its line in ``metrics.jsonl``, from 0. The file is only appended
to, so a reporter needs nothing but the folder to go on after a restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from batchwright.client.http import checked_url
from batchwright.errors import BatchwrightError, FileError
from batchwright.storage.files import end_of_lines

REPORT = "report.json"
FORMAT = "batchwright-report/1"
METRICS = "metrics.jsonl"
_MAX_NAME = 120  # characters
_MAX_LINE = 4 * 2**20  # bytes of a line; a longer one is not sent
_PIECE = 2**20  # bytes that are read at a time
_TAIL = 64 * 1024  # bytes that are read for the newest line; one of many workers has ten thousand


@dataclass(frozen=True)
class Report:
    """Where a run is reported, and how much of it the service has.

    Attributes:
        url: Address of the service.
        run: Identifier of the run at the service.
        name: Name of the run, for people.
        job: Identifier of the service's job that the run carries out.
        follows_advice: Whether the run takes a new plan at the end of an epoch.
        next: Number of the first line that the service has not confirmed.
        state: ``running``, ``finished``, ``stopped`` or ``failed``.
        error: The error's line as the user saw it, if the run failed.
        told: Whether the service knows how the run ended.
        advice_told: Number of the last advice that the service knows to be taken.
        seal: `seal_of` the address and the token with which the run was reported.
    """

    url: str
    run: str
    name: str
    job: str | None = None
    follows_advice: bool = False
    next: int = 0
    state: str = "running"
    error: str | None = None
    told: bool = False
    advice_told: int = 0
    seal: str = ""

    def to(self, **changes: Any) -> Report:
        """A copy with some fields changed."""
        return replace(self, **changes)


def new_report(folder: Path, url: str, *, name: str = "", **more: Any) -> Report:
    """The report of a run that was not reported before.

    Args:
        folder: The run folder.
        url: Address of the service.
        name: Name of the run; empty: the name of the folder.
        **more: Further fields of `Report`.
    """
    plain = plain_text(name or folder.resolve().name)
    return Report(url, str(uuid.uuid4()), plain[:_MAX_NAME] or "run", **more)


def plain_text(text: str) -> str:
    """A text without characters that a service refuses, as of a file name in another encoding."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def seal_of(url: str, token: str | None) -> str:
    """A digest of an address and a token, which nobody without the token can make.

    It shows that the user of the token has reported to this address. A run folder may come from
    anybody: without the seal, the address in it would be sent whatever token is at hand.
    """
    return hashlib.sha256(f"{url} {token or ''}".encode()).hexdigest()


def read_report(folder: Path) -> Report | None:
    """The report of a run folder; ``None`` if the run was never reported.

    Raises:
        FileError: ``report.json`` cannot be read, or is damaged.
    """
    path = folder / REPORT
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or "it is not JSON"
        raise FileError(f"cannot read {path}: {cause}; remove it to report anew") from None
    known = {field.name for field in fields(Report)}
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise FileError(f"{path} is none of ours ({FORMAT}); remove it to report anew")
    try:
        report = Report(**{key: value for key, value in values.items() if key in known})
        valid = (
            isinstance(report.next, int)
            and checked_url(report.url) == report.url
            and str(uuid.UUID(report.run)) == report.run
        )
    except (BatchwrightError, TypeError, ValueError, AttributeError):
        valid = False
    if not valid:
        raise FileError(f"{path} is damaged; remove it to report anew")
    return report


def write_report(folder: Path, report: Report) -> None:
    """Write ``report.json``, whole or not at all. It is not synced: the service knows what it has.

    Raises:
        FileError: The file cannot be written.
    """
    path, aside = folder / REPORT, folder / f".{REPORT}.{os.getpid()}"
    text = json.dumps({"format": FORMAT, **asdict(report)}, indent=1) + "\n"
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {error.strerror}") from None


class Lines:
    """A position in a file that grows line by line; a line without its end does not count yet.

    Args:
        path: The file; it may not be there yet.

    Attributes:
        next: Number of the line behind the position, from 0.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.next = 0
        self._offset = 0
        self._digest = hashlib.sha256()

    def digest(self, ahead: Sequence[bytes] = ()) -> str:
        """SHA-256 over all lines before the position and then ``ahead``, in hex."""
        digest = self._digest.copy()
        for line in ahead:
            digest.update(line + b"\n")
        return digest.hexdigest()

    @property
    def waiting(self) -> bool:
        """Whether there is text behind the position, be it half a line."""
        try:
            return self._path.stat().st_size > self._offset
        except OSError:
            return False

    def go_to(self, number: int) -> bool:
        """Go before the line of a number; returns whether there are so many lines."""
        if number < self.next:
            self.next = self._offset = 0
            self._digest = hashlib.sha256()
        while self.next < number:
            lines = self.ahead(number - self.next)
            if not lines:
                return False
            self.take(lines)
        return True

    def ahead(self, most: int, most_bytes: int = _PIECE) -> list[bytes]:
        """Some of the whole lines behind the position, without their ends.

        Args:
            most: Maximum number of lines.
            most_bytes: Maximum length of all of them together; a longer first line comes as well.

        Raises:
            FileError: The file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                read = file.read(most_bytes)
                while read and b"\n" not in read:
                    more = file.read(_PIECE)
                    if not more:
                        return []
                    read += more
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FileError(f"cannot read {self._path}: {error.strerror}") from None
        return read.split(b"\n")[:-1][:most]

    def take(self, lines: list[bytes]) -> None:
        """Go behind lines that came from `ahead`."""
        self.next += len(lines)
        for line in lines:
            self._offset += len(line) + 1
            self._digest.update(line + b"\n")

    def count(self) -> int:
        """Number of whole lines in the file."""
        other = Lines(self._path)
        other.next, other._offset = self.next, self._offset
        while lines := other.ahead(10**6):
            other.take(lines)
        return other.next


def epochs_trained(run: Path) -> float | None:
    """Epochs that a run folder holds by its newest line that tells, in fractions too.

    Returns:
        `None` where there are no lines, or the newest do not name a step.
    """
    try:
        with (run / METRICS).open("rb") as file:
            end = end_of_lines(file)
            file.seek(max(0, end - _TAIL))
            lines = file.read(end - file.tell()).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            values = json.loads(line)
            if values["kind"] == "epoch":
                epochs = float(values["record"]["epoch"] + 1)
            else:
                epochs = float(values["epoch"] + values["step"] / values["steps"])
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            continue  # a line of another kind, cut off at its begin, or of an agent that means harm
        if 0 <= epochs < inf:
            return epochs
    return None


def can_be_sent(line: bytes) -> bool:
    """Whether a line can be sent: a JSON object, without NaN and infinity, of `_MAX_LINE` bytes at
    most.
    """
    if len(line) > _MAX_LINE:
        return False
    try:
        value = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
