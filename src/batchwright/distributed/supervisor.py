"""Stays with the processes of a run until they end: one loop, whatever it starts again.

    this process --> workers (python -m MODULE, one per rank), and others beside them

They die with this process. Signals reach this process only; it passes them on, so that the workers
can write a checkpoint before they end.
"""

from __future__ import annotations

import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from batchwright.distributed.exit_reports import forget_reports
from batchwright.distributed.processes import STOP_SIGNALS
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import Interrupted

GRACE_SECONDS = 60.0
"""From a stop signal until workers are killed: for the step in progress and a checkpoint."""


class Supervisor(ABC):
    """The processes of one run.

    Args:
        children: The workers, none of them started.
        folder: Where their logs and error reports go; it exists.
        restarts: How often any may be started again.
        poll: Called about ten times a second while they run.
        tell: Takes the line that says why some were started again.

    Attributes:
        noted: Stop signals that came.
        killed: What to add to the message of a stop; empty if all had time to end.
    """

    def __init__(
        self,
        children: Children,
        folder: Path,
        *,
        restarts: int = 0,
        poll: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    ) -> None:
        self.noted: list[int] = []
        self.killed = ""
        self._children, self._folder = children, folder
        self._restarts, self._most = 0, restarts
        self._poll, self._tell = poll, tell

    def run(self) -> None:
        """Start all, and stay until they have ended.

        Raises:
            WorkerError: A process died once more than it may, or ended by its own error, which is
                the message.
            BatchwrightError: A process refused its input.
            Interrupted: A stop signal came; all have ended.
        """
        forget_reports(self._folder)
        with noting_signals() as self.noted:
            try:
                self._start()
                while not self.noted and self._look():
                    time.sleep(POLL_SECONDS)
                if self.noted:
                    self._stop()
                self._poll()
            finally:
                self._close()
        if self.noted:
            what = f"stopped by signal {self.noted[0]}{self.killed}"
            raise Interrupted(self.noted[0], what)

    @abstractmethod
    def _start(self) -> None:
        """Start all."""

    @abstractmethod
    def _look(self) -> bool:
        """Take in what has happened since; returns whether there is more to come."""

    @abstractmethod
    def _stop(self) -> None:
        """A signal came: let all end, for `GRACE_SECONDS` at most, or until a second one comes."""

    def _close(self) -> None:
        """End whatever still runs."""
        self._children.close()

    def _again(self, what: str) -> bool:
        """Whether processes may be started again; ``what`` says that they are, and why."""
        if self._restarts == self._most:
            return False
        self._restarts += 1
        self._tell(f"{what} ({self._restarts} of {self._most})")
        return True

    def _note_killed(self, seconds: float, *, lost: bool = True) -> None:
        """Processes had to be killed.

        They were waited for so many seconds, unless a second signal was noted; ``lost`` says
        whether the model that they had is lost with them.
        """
        why = "a second one came" if len(self.noted) > 1 else f"{seconds:.0f} s had passed"
        what = ": what was done since the last checkpoint is lost" if lost else ""
        self.killed = f", and killed when {why}{what}"


@contextmanager
def noting_signals(*, once: bool = False) -> Iterator[list[int]]:
    """Inside, stop signals are noted in the list instead of ending this process.

    Outside the main thread nothing is noted: there the caller handles signals.

    Args:
        once: Whether a second signal does what it does outside.
    """
    noted: list[int] = []
    former: dict[int, Any] = {}

    def put_back() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        noted.append(number)
        if once:
            put_back()

    try:
        for number in STOP_SIGNALS:
            former[number] = signal.signal(number, note)
    except ValueError:  # not the main thread
        yield noted
        return
    try:
        yield noted
    finally:
        put_back()
