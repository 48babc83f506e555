"""Hands a run's lines on to trackers: a process of its own, beside the training.

    python -m batchwright.client.trackers.following RUN_FOLDER TRACKER...

started by `client.trackers.companion`. It reads what training writes into the run folder, at a low
priority; training never waits for it. How many lines a tracker has is noted in ``trackers.json``
there, so that what goes on later doubles nothing. Standard input brings the order to finish, or
ends with the process that trains; what a person should know goes to standard output, a line each.
"""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple, Protocol

from batchwright.client.http import Backoff
from batchwright.client.outbox import METRICS, Lines
from batchwright.client.reporter import NICENESS, Order, listen
from batchwright.client.trackers.points import Points
from batchwright.errors import (
    ArgumentError,
    BatchwrightError,
    FileError,
    not_installed,
    one_line,
)
from batchwright.records.documents import read_record
from batchwright.records.lines.line_files import sound_line
from batchwright.records.plan import Plan
from batchwright.records.registries.registry import listed
from batchwright.records.registries.trackers import TRACKERS, TrackerSpec
from batchwright.records.text.plan_facts import Fact, plan_facts
from batchwright.records.text.problems import printable
from batchwright.storage.locks import Busy, Lock, lock_file

STATE = "trackers.json"
FORMAT = "batchwright-trackers/1"
LOCK = "trackers.lock"
LOOK_SECONDS = 0.5  # between two looks at the run folder
LOCK_SECONDS = 30.0  # for the process of a training that was just killed
CLOSE_SECONDS = 3.0  # for trackers to end, beyond what the order gives them
_MAX_LINES = 2000  # that are handed on before it is noted
_LAST_WAIT = 2.0  # seconds between two attempts, at most, once the run has ended
_WHO = re.compile(r"://[^/?#\s]*@")  # a name and password in an address


@dataclass(frozen=True)
class Tracked:
    """A run as a tracker gets to know it.

    Attributes:
        folder: Of the run.
        name: For people.
        id: The same whenever this run goes on; no other run has it.
        facts: What is known before it trains.
        after: The last step that the tracker has; -1: it has nothing.
    """

    folder: Path
    name: str
    id: str
    facts: Mapping[str, Fact]
    after: int


class Tracker(Protocol):
    """Takes the values of one run.

    One with an attribute ``lasts_after`` may lose, with this process, what it was given in the last
    so many seconds: that is handed on again, so it has to take no step twice.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values by name after so many updates."""

    def flush(self) -> None:
        """All that was logged is to stay, however this process ends."""

    def close(self, outcome: str) -> None:
        """The run is ``finished``, ``stopped`` or ``failed``; empty: nobody knows."""


class Asked(NamedTuple):
    """A tracker that was asked for."""

    spec: TrackerSpec
    place: str  # what stands behind the colon

    @property
    def word(self) -> str:
        """The word that names this tracker and place from any folder."""
        return f"{self.spec.name}:{self.place}" if self.place else self.spec.name


def asked(words: Iterable[str]) -> list[Asked]:
    """The trackers that words name, each ``NAME`` or ``NAME:PLACE``.

    Raises:
        ArgumentError: There is none of that name, its package is not installed, or the address
            tells a password.
    """
    found = []
    for word in words:
        name, _, place = word.partition(":")
        if name not in TRACKERS:
            raise ArgumentError(f"there is no tracker {name!r}: known are {listed(TRACKERS)}")
        spec = TRACKERS[name]
        package = None
        with suppress(ImportError, ValueError):  # what it lies in is not there, either
            package = find_spec(spec.package)
        if package is None or package.origin is None:  # a folder here may have that name
            raise ArgumentError(
                f"--tracker {name}: {not_installed(spec.package, spec.extra)}"
                + (f", or {spec.package} alone" if spec.extra else "")
            )
        if _WHO.search(place):
            raise ArgumentError(
                f"--tracker {name}: an address with a name or password in it would be seen in the "
                "list of processes and kept in files: give it where the tracker itself looks for "
                f"it, as in MLFLOW_TRACKING_URI, and write --tracker {name} alone"
            )
        if spec.folder and place:
            home = place == "~" or place.startswith("~/")  # which shells leave behind a colon
            place = str((Path(place).expanduser() if home else Path(place)).resolve())
        found.append(Asked(spec, place))
    return list(dict.fromkeys(found))


class Following:
    """Hands one tracker what it does not have of a run.

    Args:
        folder: The run folder.
        wanted: The tracker.
        state: What `State` holds for all of them.
    """

    def __init__(self, folder: Path, wanted: Asked, state: State) -> None:
        self._folder, self._wanted, self._state = folder, wanted, state
        self._lines, self._points = Lines(folder / METRICS), Points()
        self._tracker: Tracker | None = None
        self._given = deque[tuple[float, int]]()  # from when on so many lines stay
        self._backoff, self._due, self.problem = Backoff(), 0.0, ""

    @property
    def word(self) -> str:
        """Names the tracker."""
        return self._wanted.word

    def turn(self) -> bool:
        """Hand on some lines; whether more are there. Whatever goes wrong is tried again later."""
        if time.monotonic() < self._due:
            return False
        try:
            had = self._had
            found = self._lines.ahead(_MAX_LINES)
            for number, text in enumerate(found, self._lines.next):
                if number == had and self._tracker is None:
                    self._open()
                point = self._points.of(sound_line(text))
                if point is not None and number >= had:
                    assert self._tracker is not None  # noqa: S101 - opened with the first line to go
                    self._tracker.log(*point)
            self._lines.take(found)
            if self._lines.next > had:
                assert self._tracker is not None  # noqa: S101 - as above
                self._tracker.flush()
                lasts = getattr(self._tracker, "lasts_after", 0.0)
                self._given.append((time.monotonic() + lasts, self._lines.next))
            self._note(time.monotonic())
            more = self._lines.waiting and bool(found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker may fail in any way
            self._fail(error)
            self._due = time.monotonic() + self._backoff.seconds()
            self._tracker = None
            self._given.clear()
            self._lines, self._points = Lines(self._folder / METRICS), Points()
            return False
        self._backoff.reset()
        self.problem = ""
        return more

    @property
    def _had(self) -> int:
        """Lines that need not be handed on again while this process lives."""
        return self._given[-1][1] if self._given else self._state.lines.get(self.word, 0)

    def _note(self, now: float) -> None:
        """Note what stays by now."""
        lines = self._state.lines.get(self.word, 0)
        wanted = self._state.stale
        while self._given and self._given[0][0] <= now:
            _, lines = self._given.popleft()
            wanted = True
        if wanted:
            self._state.note(self.word, lines)

    def hurry(self) -> None:
        """The run has ended: what waits for a later attempt is tried at once."""
        self._due, self._backoff = 0.0, Backoff(most=_LAST_WAIT)

    def _fail(self, error: BaseException) -> None:
        self.problem = f"{self.word}: {_WHO.sub('://***@', one_line(error))}"

    def _open(self) -> None:
        folder, spec = self._folder, self._wanted.spec
        # Who the run is lasts beyond an attempt that ends before its first note.
        self._state.note(self.word, self._state.lines.get(self.word, 0))
        plan = folder / "plan.json"  # a loop of somebody's own may leave none there
        facts = plan_facts(read_record(plan, Plan)) if plan.exists() else {}
        run = Tracked(folder, self._state.name, self._state.run, facts, self._points.last)
        self._tracker = resolve_name(spec.open)(self._wanted.place, run)

    def close(self, outcome: str) -> None:
        """The run has ended so."""
        if self._tracker is not None:
            try:
                self._tracker.close(outcome)
                self._note(float("inf"))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                self._fail(error)

    @property
    def left(self) -> int:
        """Lines that the tracker does not have."""
        return max(0, self._lines.count() - self._had)


class State:
    """``trackers.json``: who the run is for trackers, and how many lines each of them has.

    Args:
        folder: The run folder.

    Attributes:
        run: Its identifier.
        name: For people: what the folder was called when it was first tracked.
        lines: How many each tracker has.
        stale: Whether the file could not be written since.

    Raises:
        FileError: It cannot be read, or is something else.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._lock, self.stale = folder / STATE, threading.Lock(), False
        self.name = _plain(folder.resolve().name)
        try:
            values = json.loads(self._path.read_bytes())
            sound = values["format"] == FORMAT
            self.run = str(uuid.UUID(values["run"]))
            self.name = _plain(values.get("name", self.name))
            self.lines = {str(word): int(one) for word, one in values["lines"].items()}
            sound &= all(one >= 0 for one in self.lines.values())
        except FileNotFoundError:
            self.run, self.lines, sound = str(uuid.uuid4()), dict[str, int](), True
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise FileError(
                f"{self._path} is damaged, or none of ours ({FORMAT}); remove it to have trackers "
                "get all of the run anew"
            )

    def note(self, word: str, lines: int) -> None:
        """A tracker has so many lines; whole or not at all, and not synced.

        Raises:
            FileError: It cannot be written.
        """
        with self._lock:
            self.lines[word], self.stale = lines, True
            values = {"format": FORMAT, "run": self.run, "name": self.name, "lines": self.lines}
            aside = self._path.with_name(f".{STATE}.{os.getpid()}")
            try:
                aside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
                aside.replace(self._path)
            except OSError as error:
                with suppress(OSError):
                    aside.unlink(missing_ok=True)
                raise FileError(f"cannot write {self._path}: {error.strerror}") from None
            self.stale = False


def _plain(name: str) -> str:
    """A name that is one in any place, also as a folder's."""
    text = printable(os.fsencode(name).decode(errors="replace")).replace("/", "-")
    return text if text.strip(".") else "run"


def alone(folder: Path, seconds: float) -> Lock:
    """Be the only process that hands on this run, or two would hand on the same.

    Raises:
        BatchwrightError: Another one does.
    """
    try:
        return lock_file(folder / LOCK, seconds=seconds, waiting=lambda _: None)
    except Busy as holder:
        raise BatchwrightError(
            f"trackers of {folder} are fed by {holder}: wait until that has ended"
        ) from None
    except OSError as error:
        raise FileError(f"cannot lock {folder / LOCK}: {error.strerror}") from None


def follow(
    folder: Path, wanted: Sequence[Asked], orders: queue.Queue[Order], tell: Callable[[str], None]
) -> bool:
    """Until all is handed on after the order to finish, or its time is up; returns which.

    Each tracker has a thread of its own: one that hangs keeps neither another nor the end waiting.

    Raises:
        BatchwrightError: Another process does so, or its note is damaged.
    """
    with alone(folder, LOCK_SECONDS):
        state, ending = State(folder), Ending()
        feeders = [Feeder(Following(folder, one, state), ending, tell) for one in wanted]
        for one in feeders:
            one.start()
        order = orders.get()
        ending.give(order)
        for one in feeders:
            one.join(max(0.0, ending.time + CLOSE_SECONDS - time.monotonic()))
        return all(one.done for one in feeders)


class Ending:
    """How the run has ended, once it has.

    Attributes:
        outcome: As in `Order`.
        time: Until when trackers are fed, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.outcome, self.time = "", float("inf")
        self._given = threading.Event()

    def give(self, order: Order) -> None:
        """The run has ended."""
        self.outcome, self.time = order.outcome, time.monotonic() + order.seconds
        self._given.set()

    def there(self, seconds: float = 0.0) -> bool:
        """Whether it has; waits so long for it."""
        return self._given.wait(seconds)


class Feeder(threading.Thread):
    """Feeds one tracker until the run has ended and it has all, or its time is up.

    Attributes:
        done: Whether it has all, and knows of the end.
    """

    def __init__(self, one: Following, ending: Ending, tell: Callable[[str], None]) -> None:
        super().__init__(name=one.word, daemon=True)
        self._one, self._ending, self._tell = one, ending, tell
        self._told, self.done = "", False

    def run(self) -> None:
        """See the class."""
        one, hurried, complete = self._one, False, False
        while not complete and time.monotonic() < self._ending.time:
            more = one.turn()
            self._tell_news()
            if more:
                continue
            if not self._ending.there(0.0 if hurried else LOOK_SECONDS):
                continue
            if not hurried:  # lines may have come since it looked
                hurried = True
                one.hurry()
            elif not (complete := not one.problem and not one.left):
                time.sleep(LOOK_SECONDS / 10)
        one.close(self._ending.outcome)
        self._tell_news()
        self.done = complete and not one.problem

    def _tell_news(self) -> None:
        problem = self._one.problem
        if problem != self._told:
            self._told = problem
            self._tell(f"{problem}; training goes on" if problem else f"{self._one.word} is fed")


def send_to_trackers(folder: Path, words: Iterable[str], outcome: str) -> dict[str, int]:
    """Hand trackers what they do not have of a run, in this process.

    Args:
        folder: The run folder.
        words: Each ``NAME`` or ``NAME:PLACE``.
        outcome: How the run ended; empty: nobody knows, or it goes on.

    Returns:
        By tracker, how many lines it has.

    Raises:
        BatchwrightError: What is wrong, in one line.
    """
    if not (folder / METRICS).exists():
        raise FileError(f"{folder} holds no run that has begun: name a run folder")
    wanted = asked(words)
    with alone(folder, 0.0), redirect_stdout(sys.stderr):  # trackers print what they like
        state = State(folder)
        all_of_them = [Following(folder, each, state) for each in wanted]
        for one in all_of_them:
            while one.turn():
                pass
            if not one.problem:
                one.close(outcome)
        if problems := [one.problem for one in all_of_them if one.problem]:
            raise BatchwrightError("; ".join(problems))
        return {one.word: state.lines.get(one.word, 0) for one in wanted}


def _main() -> None:
    with suppress(OSError):
        os.nice(NICENESS)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # trackers print what they like; a person is told our lines

    def tell(text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            out.write(text + "\n")
            out.flush()

    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=listen, args=(orders, sys.stdin.buffer), daemon=True).start()
    done = False
    try:
        done = follow(Path(sys.argv[1]), asked(sys.argv[2:]), orders, tell)
    except BatchwrightError as error:
        tell(one_line(error))
    os._exit(0 if done else 1)  # a thread still reads standard input


if __name__ == "__main__":
    _main()
