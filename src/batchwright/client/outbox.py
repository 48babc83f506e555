"""A run folder as a reporter sees it: numbered lines, and ``report.json`` about where they go.

The number of a record is that of its line in ``metrics.jsonl``, from 0. The file is only ever
appended to, so the folder is all the memory that a reporter needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from batchwright.client.http import checked_url
from batchwright.errors import BatchwrightError, FileError

REPORT = "report.json"
FORMAT = "batchwright-report/1"
METRICS = "metrics.jsonl"
_MAX_NAME = 120  # characters
_MAX_LINE = 4 * 2**20  # bytes of a line that are worth sending
_PIECE = 2**20


@dataclass(frozen=True)
class Report:
    """Where a run reports to, and how far.

    Attributes:
        url: The service.
        run: The run's identifier there.
        name: For people.
        job: Job of the service that it carries out.
        follows_advice: Whether it takes a new plan at the end of an epoch.
        next: First line that the service has not said it has.
        state: ``running``, ``finished``, ``stopped`` or ``failed``.
        error: The line that the user saw, if it failed.
        told: Whether the service knows of that end.
        advice_told: Number of the last advice that the service knows to be taken.
        seal: `seal_of` the service and the token that it was reported with.
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
    """A run that has not been reported yet; its name is that of the folder unless given."""
    plain = "".join(c if c.isprintable() else " " for c in name or folder.resolve().name)
    return Report(url, str(uuid.uuid4()), plain.strip()[:_MAX_NAME] or "run", **more)


def seal_of(url: str, token: str | None) -> str:
    """Shows that a token was meant for a service; who does not know the token cannot make it.

    A run folder may come from anybody. Without this, the address in it would get whatever token is
    at hand.
    """
    return hashlib.sha256(f"{url} {token or ''}".encode()).hexdigest()


def read_report(folder: Path) -> Report | None:
    """Where the run of a folder reports to; ``None`` if it never did.

    Raises:
        FileError: ``report.json`` cannot be read, or is something else.
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
        uuid.UUID(report.run)
        sound = isinstance(report.next, int) and checked_url(report.url) == report.url
    except (BatchwrightError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise FileError(f"{path} is damaged; remove it to report anew")
    return report


def write_report(folder: Path, report: Report) -> None:
    """Write ``report.json``, whole or not at all; not synced, since the service knows better.

    Raises:
        FileError: It cannot be written.
    """
    path, aside = folder / REPORT, folder / f".{REPORT}.{os.getpid()}"
    text = json.dumps({"format": FORMAT, **asdict(report)}, indent=1) + "\n"
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from None


class Lines:
    """The whole lines of a file that grows, by their number.

    Args:
        path: The file; it may not be there yet.

    Attributes:
        next: Number of the line that comes next.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.next = 0
        self._offset = 0
        self._digest = hashlib.sha256()

    def digest(self, ahead: Sequence[bytes] = ()) -> str:
        """SHA-256 over all lines before this place, and then lines `ahead`, in hex."""
        found = self._digest.copy()
        for line in ahead:
            found.update(line + b"\n")
        return found.hexdigest()

    @property
    def waiting(self) -> bool:
        """Whether there is something after the place where this stands."""
        try:
            return self._path.stat().st_size > self._offset
        except OSError:
            return False

    def go_to(self, number: int) -> bool:
        """Stand before the line of this number; whether there are so many lines before it."""
        if number < self.next:
            self.next = self._offset = 0
            self._digest = hashlib.sha256()
        while self.next < number:
            found = self.ahead(number - self.next)
            if not found:
                return False
            self.take(found)
        return True

    def ahead(self, most: int, most_bytes: int = _PIECE) -> list[bytes]:
        """Whole lines from here on, without their ends: some, or none if there are none.

        Args:
            most: How many, at most.
            most_bytes: About how long together; a longer line comes alone.
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
        """Go on behind lines that were `ahead`."""
        self.next += len(lines)
        for line in lines:
            self._offset += len(line) + 1
            self._digest.update(line + b"\n")

    def count(self) -> int:
        """How many whole lines there are in all."""
        other = Lines(self._path)
        other.next, other._offset = self.next, self._offset
        while found := other.ahead(10**6):
            other.take(found)
        return other.next


def sound(line: bytes) -> bool:
    """Whether a line is a JSON object as others can read it, and no longer than is sensible."""
    if len(line) > _MAX_LINE:
        return False
    try:
        value = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
