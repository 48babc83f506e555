"""Feeds trackers with a run's lines: a process beside the training.

    python -m batchwright.client.trackers.following RUN_FOLDER TRACKER...

`client.trackers.companion` starts it. It reads what training writes into the run folder, at a low
priority; training never waits for it. ``trackers.json`` in the run folder says how many lines each
tracker has, so that a later process logs no value twice. The order to finish arrives on standard
input, which ends with the process that trains; messages for a person are lines on standard output.
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
from batchwright.client.reporter import Order, start_listening
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
LOCK_SECONDS = 30.0  # to wait for the process of a training that was just killed
CLOSE_SECONDS = 3.0  # for trackers to close, beyond the seconds of the order
_MAX_LINES = 2000  # lines that are logged before trackers.json is written
_LAST_WAIT = 2.0  # seconds between two attempts, at most, once the run has ended
_CREDENTIALS = re.compile(r"://[^/?#\s]*@")  # a name and password in an address


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is opened for it.

    Attributes:
        folder: The run folder.
        name: Name of the run, for people.
        id: Unique identifier of the run, which a resumed run keeps.
        facts: What is known before training: the plan's values by name.
        after: Last step that the tracker has values of; -1: it has none.
    """

    folder: Path
    name: str
    id: str
    facts: Mapping[str, Fact]
    after: int


class Tracker(Protocol):
    """Takes the values of one run.

    A tracker with an attribute ``lasts_after`` may lose, when this process ends, the values of the
    last so many seconds; of infinitely many, while it holds some that it has not written. They are
    logged again later, so it must ignore steps that it has.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values by name, after ``step`` updates."""

    def flush(self) -> None:
        """Make sure that all logged values stay, however this process ends."""

    def close(self, outcome: str) -> None:
        """End: the run is ``finished``, ``stopped`` or ``failed``; empty: not known, or it goes on
        with another tracker after an error of this one.
        """


class TrackerChoice(NamedTuple):
    """A tracker that the user chose."""

    spec: TrackerSpec
    place: str  # the text behind the colon

    @property
    def word(self) -> str:
        """The word that names this tracker and place in any working folder."""
        return f"{self.spec.name}:{self.place}" if self.place else self.spec.name


def chosen_trackers(words: Iterable[str]) -> list[TrackerChoice]:
    """The trackers that words name, each ``NAME`` or ``NAME:PLACE``.

    Raises:
        ArgumentError: There is no tracker of that name, its package is not installed, or its
            address has a password in it.
    """
    chosen = []
    for word in words:
        name, _, place = word.partition(":")
        if name not in TRACKERS:
            raise ArgumentError(f"there is no tracker {name!r}: known are {listed(TRACKERS)}")
        spec = TRACKERS[name]
        package = None
        with suppress(ImportError, ValueError):  # its parent package is missing, too
            package = find_spec(spec.package)
        if package is None or package.origin is None:  # without origin: a mere folder of that name
            raise ArgumentError(
                f"--tracker {name}: {not_installed(spec.package, spec.extra)}"
                + (f", or {spec.package} alone" if spec.extra else "")
            )
        if _CREDENTIALS.search(place):
            raise ArgumentError(
                f"--tracker {name}: an address with a name or password in it would be seen in the "
                "list of processes and kept in files: give it where the tracker itself looks for "
                f"it, as in MLFLOW_TRACKING_URI, and write --tracker {name} alone"
            )
        if spec.folder and place:
            home = place == "~" or place.startswith("~/")  # shells do not expand ~ behind a colon
            place = str((Path(place).expanduser() if home else Path(place)).resolve())
        chosen.append(TrackerChoice(spec, place))
    return list(dict.fromkeys(chosen))


class TrackerFeed:
    """Feeds one tracker with the lines of a run that it does not have.

    Args:
        folder: The run folder.
        choice: The tracker.
        state: The run folder's ``trackers.json``.

    Attributes:
        problem: The error that the next turn is to overcome; empty: none.
    """

    def __init__(self, folder: Path, choice: TrackerChoice, state: State) -> None:
        self._folder, self._choice, self._state = folder, choice, state
        self._lines, self._points = Lines(folder / METRICS), Points()
        self._tracker: Tracker | None = None
        self._failed: Tracker | None = None  # closed when the next one is opened, or at the end
        # Numbers of lines that were logged, and when.
        self._pending = deque[tuple[float, int]]()
        self._backoff, self._due, self.problem = Backoff(), 0.0, ""

    @property
    def word(self) -> str:
        """The word that names the tracker."""
        return self._choice.word

    def turn(self) -> bool:
        """Log some lines. After an error all lines since the last note are logged again, later.

        Returns:
            Whether there are more lines.
        """
        if time.monotonic() < self._due:
            return False
        try:
            first = self._handed_on
            lines = self._lines.ahead(_MAX_LINES)
            for number, text in enumerate(lines, self._lines.next):
                if number == first and self._tracker is None:
                    self._open()
                point = self._points.of(sound_line(text))
                if point is not None and number >= first:
                    assert self._tracker is not None  # noqa: S101 - opened before the first line
                    self._tracker.log(*point)
            self._lines.take(lines)
            if self._lines.next > first:
                assert self._tracker is not None  # noqa: S101 - opened before the first line
                self._tracker.flush()
                self._pending.append((time.monotonic(), self._lines.next))
            self._note(time.monotonic())
            more = self._lines.waiting and bool(lines)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker may fail in any way
            self._fail(error)
            self._due = time.monotonic() + self._backoff.seconds()
            self._failed, self._tracker = self._tracker or self._failed, None
            self._pending.clear()
            self._lines, self._points = Lines(self._folder / METRICS), Points()
            return False
        self._backoff.reset()
        self.problem = ""
        return more

    @property
    def _handed_on(self) -> int:
        """Number of lines that need not be logged again while this process lives."""
        return self._pending[-1][1] if self._pending else self._state.lines.get(self.word, 0)

    def _note(self, now: float) -> None:
        """Write how many lines the tracker can no longer lose, if that has changed."""
        lines = self._state.lines.get(self.word, 0)
        changed, lasts = self._state.stale, getattr(self._tracker, "lasts_after", 0.0)
        while self._pending and self._pending[0][0] + lasts <= now:
            _, lines = self._pending.popleft()
            changed = True
        if changed:
            self._state.note(self.word, lines)

    def hurry(self) -> None:
        """Have the next attempts follow at once: the run has ended."""
        self._due, self._backoff = 0.0, Backoff(most=_LAST_WAIT)

    def _fail(self, error: BaseException) -> None:
        self.problem = f"{self.word}: {_CREDENTIALS.sub('://***@', one_line(error))}"

    def _open(self) -> None:
        if self._failed is not None:  # it has files and threads, and may still log what it holds
            with suppress(Exception, SystemExit):
                self._failed.close("")
            self._failed = None
        # Written first: the run keeps its identifier after an attempt that ends before its first
        # note.
        self._state.note(self.word, self._state.lines.get(self.word, 0))
        plan = self._folder / "plan.json"  # a user's own loop may leave none
        facts = plan_facts(read_record(plan, Plan)) if plan.exists() else {}
        run = TrackedRun(self._folder, self._state.name, self._state.run, facts, self._points.last)
        self._tracker = resolve_name(self._choice.spec.open)(self._choice.place, run)

    def close(self, outcome: str) -> None:
        """Close the tracker: the run has ended with ``outcome``. An earlier problem stays."""
        tracker = self._tracker or self._failed  # the failed one may have had all lines
        if tracker is not None:
            try:
                tracker.close(outcome)
                self._note(float("inf"))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                if not self.problem:
                    self._fail(error)

    @property
    def left(self) -> int:
        """Number of lines that the tracker does not have."""
        return max(0, self._lines.count() - self._handed_on)


class State:
    """``trackers.json``: the run's identity for trackers, and how many lines each of them has.

    Args:
        folder: The run folder.

    Attributes:
        run: Identifier of the run.
        name: Name of the run, for people: the folder's name when it was first tracked.
        lines: By tracker, the number of lines that it has.
        stale: Whether the last write of the file failed.

    Raises:
        FileError: The file cannot be read, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._lock, self.stale = folder / STATE, threading.Lock(), False
        self.name = _plain(folder.resolve().name)
        try:
            values = json.loads(self._path.read_bytes())
            valid = values["format"] == FORMAT
            self.run = str(uuid.UUID(values["run"]))
            self.name = _plain(values.get("name", self.name))
            self.lines = {str(word): int(count) for word, count in values["lines"].items()}
            valid &= all(count >= 0 for count in self.lines.values())
        except FileNotFoundError:
            self.run, self.lines, valid = str(uuid.uuid4()), dict[str, int](), True
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            valid = False
        if not valid:
            raise FileError(
                f"{self._path} is damaged, or none of ours ({FORMAT}); remove it to have trackers "
                "get all of the run anew"
            )

    def note(self, word: str, lines: int) -> None:
        """Write that a tracker has so many lines; whole or not at all, and not synced.

        Raises:
            FileError: The file cannot be written.
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
    """A name that every tracker can show and that can name a folder."""
    text = printable(os.fsencode(name).decode(errors="replace")).replace("/", "-")
    return text if text.strip(".") else "run"


def lock_trackers(folder: Path, seconds: float) -> Lock:
    """Lock a run folder for the process that feeds its trackers: two would log values twice.

    Args:
        folder: The run folder.
        seconds: How long to wait for another process that has the lock.

    Raises:
        BatchwrightError: Another process has the lock, or the file cannot be locked.
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
    folder: Path,
    choices: Sequence[TrackerChoice],
    orders: queue.Queue[Order],
    tell: Callable[[str], None],
) -> bool:
    """Feed trackers until the order to finish is carried out, or its time is up.

    Each tracker has a thread of its own: one that hangs keeps neither another nor the end waiting.

    Args:
        folder: The run folder.
        choices: The trackers.
        orders: Queue in which the order arrives.
        tell: Called with each line for a person.

    Returns:
        Whether each tracker has all lines.

    Raises:
        BatchwrightError: Another process feeds the run's trackers, or ``trackers.json`` is damaged.
    """
    with lock_trackers(folder, LOCK_SECONDS):
        state, ending = State(folder), RunEnding()
        threads = [FeedThread(TrackerFeed(folder, each, state), ending, tell) for each in choices]
        for thread in threads:
            thread.start()
        order = orders.get()
        ending.outcome, ending.time = order.outcome, time.monotonic() + order.seconds
        ending.ordered.set()
        for thread in threads:
            thread.join(max(0.0, ending.time + CLOSE_SECONDS - time.monotonic()))
        return all(thread.done for thread in threads)


class RunEnding:
    """The end of the run, which the threads share.

    Attributes:
        ordered: Set once the order to finish has arrived.
        outcome: Outcome of the run, as in `Order`.
        time: Until when trackers are fed, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.outcome, self.time = "", float("inf")
        self.ordered = threading.Event()


class FeedThread(threading.Thread):
    """Feeds one tracker until the run has ended and the tracker has all lines, or its time is up.

    Attributes:
        done: Whether the tracker has all lines, and was closed.
    """

    def __init__(self, feed: TrackerFeed, ending: RunEnding, tell: Callable[[str], None]) -> None:
        super().__init__(name=feed.word, daemon=True)
        self._feed, self._ending, self._tell = feed, ending, tell
        self._told, self.done = "", False

    def run(self) -> None:
        """Feed the tracker, as the class says."""
        feed, hurried, complete = self._feed, False, False
        while not complete and time.monotonic() < self._ending.time:
            more = feed.turn()
            self._tell_news()
            if more:
                continue
            if not self._ending.ordered.wait(0.0 if hurried else LOOK_SECONDS):
                continue
            if not hurried:  # lines may have come since the last turn
                hurried = True
                feed.hurry()
            elif not (complete := not feed.problem and not feed.left):
                time.sleep(LOOK_SECONDS / 10)
        feed.close(self._ending.outcome)
        self._tell_news()
        self.done = complete and not feed.problem

    def _tell_news(self) -> None:
        problem = self._feed.problem
        if problem != self._told:
            self._told = problem
            self._tell(f"{problem}; training goes on" if problem else f"{self._feed.word} is fed")


def send_to_trackers(folder: Path, words: Iterable[str], outcome: str) -> dict[str, int]:
    """Feed trackers with the lines of a run that they do not have, in this process.

    Args:
        folder: The run folder.
        words: The trackers, each ``NAME`` or ``NAME:PLACE``.
        outcome: How the run ended; empty: not known, or it goes on.

    Returns:
        By tracker, the number of lines that it has.

    Raises:
        BatchwrightError: The folder holds no run, a tracker cannot be used, or fails.
    """
    if not (folder / METRICS).exists():
        raise FileError(f"{folder} holds no run that has begun: name a run folder")
    choices = chosen_trackers(words)
    with lock_trackers(folder, 0.0), redirect_stdout(sys.stderr):  # trackers print what they like
        state = State(folder)
        feeds = [TrackerFeed(folder, choice, state) for choice in choices]
        for feed in feeds:
            while feed.turn():
                pass
            feed.close("" if feed.problem else outcome)
        if problems := [feed.problem for feed in feeds if feed.problem]:
            raise BatchwrightError("; ".join(problems))
        return {feed.word: state.lines.get(feed.word, 0) for feed in feeds}


def _main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # trackers print what they like; only our lines are for a person

    def tell(text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            out.write(text + "\n")
            out.flush()

    orders = start_listening()
    done = False
    try:
        done = follow(Path(sys.argv[1]), chosen_trackers(sys.argv[2:]), orders, tell)
    except BatchwrightError as error:
        tell(one_line(error))
    os._exit(0 if done else 1)  # a thread still reads standard input


if __name__ == "__main__":
    _main()
