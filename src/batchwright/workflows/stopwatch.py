"""What a command spends its time on besides training."""

from __future__ import annotations

import time

from batchwright.records import CommandPart


class Stopwatch:
    """Times the parts of a command, from its start on, one after the other.

    Attributes:
        parts: Those that have ended.
    """

    def __init__(self) -> None:
        global _began
        self.parts: list[CommandPart] = []
        self._last = _began or time.time()
        if _began:
            _began = 0.0
            self.lap("start")

    def lap(self, name: str) -> None:
        """A part has ended; the next begins."""
        self.lap_since(self._last, name)

    def lap_since(self, moment: float, name: str) -> None:
        """`lap` that begins at a moment of Unix time: what came before is told elsewhere."""
        now = time.time()
        self.parts.append(CommandPart(name=name, seconds=max(0.0, now - moment)))
        self._last = now


_began = 0.0


def command_begins() -> None:
    """This process is one command and nothing else: its first stopwatch counts its start, too."""
    global _began
    # So far it has but imported, which takes the processor all along. The kernel's own start of the
    # process may be that of a script that has become this one.
    _began = time.time() - time.process_time()
