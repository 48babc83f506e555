"""The process that feeds trackers beside a training: stopped, continued, and observed.

It costs the training time only while it works. So in a turn without it, it is stopped, in the same
training process; and a turn with it begins when it has no work left, and ends when it has no work
left again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from batchwright.client.trackers.following import LOOK_SECONDS, State
from batchwright.records.lines.line_files import METRICS
from benchmarks.harness.loads import children, command_line

QUIET_SECONDS = 1.5 * LOOK_SECONDS  # in which it has looked at the run folder at least once
QUIET_SHARE = 0.03  # of a core, for looking at a folder without anything new
LIMIT_SECONDS = 60.0  # to wait until it has no work left
_TICKS = os.sysconf("SC_CLK_TCK")


class Beside:
    """The process, with all processes that it has started.

    Args:
        trainer: Process number of the training.
        folder: The run folder.
        clock: Returns seconds; tests replace it and ``sleep``.
        sleep: Waits for seconds.

    Raises:
        RuntimeError: By any method: the process has ended, or does not come to rest.
    """

    def __init__(
        self,
        trainer: int,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._trainer, self._folder = trainer, folder
        self._clock, self._sleep = clock, sleep

    def stand_still(self) -> None:
        """Stop the process, so that it takes no processor time until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the process."""
        self._signal(signal.SIGCONT)

    def rest(self) -> None:
        """Wait until the tracker has all lines of the run, and the process has no work left."""
        end = self._clock() + LIMIT_SECONDS
        before = self.seconds()
        while True:
            self._sleep(QUIET_SECONDS)
            now = self.seconds()
            if self.has_all() and now - before <= QUIET_SHARE * QUIET_SECONDS:
                return
            if self._clock() > end:
                raise RuntimeError(
                    f"the tracker of {self._folder.name} does not come to rest within "
                    f"{LIMIT_SECONDS:.0f} s"
                )
            before = now

    def has_all(self) -> bool:
        """Whether each tracker has all lines that the run has written."""
        written = (self._folder / METRICS).read_bytes().count(b"\n")
        noted = State(self._folder).lines.values()
        return bool(noted) and min(noted) >= written

    def seconds(self) -> float:
        """Processor seconds of all its processes so far, ended ones included."""
        ticks = 0
        for pid in self._processes():
            with suppress(OSError):  # it has just ended
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # user, system, and of children waited for
        return ticks / _TICKS

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _processes(self) -> list[int]:
        found = [p for p in children(self._trainer) if b"trackers.following" in command_line(p)]
        if not found:
            raise RuntimeError(f"nothing feeds a tracker of {self._folder.name} any more")
        for pid in found:  # grows meanwhile
            found += children(pid)
        return found
