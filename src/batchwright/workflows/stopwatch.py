"""Times the parts of a command besides training, for the run's summary."""

from __future__ import annotations

import time

from batchwright.records import CommandPart


class Stopwatch:
    """Times the parts of a command one after the other, from the command's start.

    Attributes:
        parts: The parts that have ended, in order.
    """

    def __init__(self) -> None:
        global _began
        self.parts: list[CommandPart] = []
        self._last = _began or time.time()
        if _began:
            _began = 0.0
            self.lap("start")

    def lap(self, name: str) -> None:
        """End the current part, called ``name``, and begin the next one."""
        self.lap_since(self._last, name)

    def lap_since(self, moment: float, name: str) -> None:
        """End a part that began at ``moment``, in seconds of Unix time, and begin the next one."""
        now = time.time()
        self.parts.append(CommandPart(name=name, seconds=max(0.0, now - moment)))
        self._last = now


_began = 0.0  # start of the process, in seconds of Unix time; 0: unknown, or counted already


def command_begins() -> None:
    """Note that this process is a command, so that its first `Stopwatch` counts its start, too."""
    global _began
    # Until now the process has only imported modules, which uses the processor all the time. The
    # kernel's start time may be that of a script which has become this process.
    _began = time.time() - time.process_time()
