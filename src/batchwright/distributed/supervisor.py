"""Supervision of a run's processes until they end, in one loop that may start them again.

    this process --> workers (python -m MODULE, one per rank), and others beside them

The processes die with this one. Signals reach this process only; it passes them on, so that workers
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

from batchwright.distributed.exit_reports import forget_reports, stopped_where
from batchwright.distributed.processes import stop_signals
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import Interrupted, stopped_by

GRACE_SECONDS = 60.0
"""Seconds between a stop signal and the kill, for the step in progress and a checkpoint."""


class Supervisor(ABC):
    """Supervises the processes of one run.

    Args:
        children: The workers, which are not started yet.
        folder: Where their logs and error reports go; it exists.
        restarts: Most restarts, of all processes together.
        poll: Called about ten times a second while they run.
        tell: Takes a line of text on why processes were started again.

    Attributes:
        noted: Stop signals that have come, in order.
        killed: Addition to the message of a stop, if processes were killed; else empty.
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
        """Start all processes, and wait until they have ended.

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
            where = "" if self.killed else stopped_where(self._folder)
            what = f"{stopped_by(self.noted[0])}{where}{self.killed}"
            raise Interrupted(self.noted[0], what)

    @abstractmethod
    def _start(self) -> None:
        """Start all processes."""

    @abstractmethod
    def _look(self) -> bool:
        """Handle what has happened since the last call; returns whether the run goes on."""

    @abstractmethod
    def _stop(self) -> None:
        """End all after a signal, within `GRACE_SECONDS` or until a second signal comes."""

    def _close(self) -> None:
        """Kill processes that still run."""
        self._children.close()

    def _again(self, what: str) -> bool:
        """Count a restart, and tell ``what`` happened; ``False`` if none is left."""
        if self._restarts == self._most:
            return False
        self._restarts += 1
        self._tell(f"{what} ({self._restarts} of {self._most})")
        return True

    def _note_killed(self, seconds: float, *, lost: bool = True) -> None:
        """Note that processes had to be killed.

        This process has waited so many seconds for them, unless a second signal came; ``lost`` says
        whether their model is lost with them.
        """
        why = "a second one came" if len(self.noted) > 1 else f"{seconds:.0f} s had passed"
        what = ": what was done since the last checkpoint is lost" if lost else ""
        self.killed = f", and killed when {why}{what}"


@contextmanager
def noting_signals(*, once: bool = False) -> Iterator[list[int]]:
    """Inside, stop signals are noted in the list instead of ending this process.

    Outside the main thread nothing is noted: there the caller handles signals. With ``once`` a
    second signal has its former effect.
    """
    noted: list[int] = []
    former: dict[int, Any] = {}

    def put_back() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP and noted:  # a closed terminal sends several, and hastens none
            return
        noted.append(number)
        if once:
            put_back()
            if number == signal.SIGHUP:
                signal.signal(number, note)

    try:
        for number in stop_signals():
            former[number] = signal.signal(number, note)
    except ValueError:  # not the main thread
        yield noted
        return
    try:
        yield noted
    finally:
        put_back()
