"""Stopping on request: a signal of `STOP_SIGNALS` asks for a checkpoint and an orderly end.

A handler only notes the signal. The request rides in the next step's last message, so all workers
stop after the same step and none is left waiting in an exchange.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from batchwright.distributed.processes import stop_signals
from batchwright.errors import DeadlineReached, Interrupted, stopped_by

_AGAIN_SECONDS = 1.0
"""Seconds from a Ctrl-C to another of the same hand: `timeout` and tools that start a script send a
signal to it and to its group, so that it hears of one twice."""


class StopRequest:
    """Notes the first stop signal; restores the former handlers on `close`.

    Outside the main thread Python allows no handlers: there only `ask` can stop a run.

    Args:
        twice: Whether a second Ctrl-C, a moment later, ends the run at once: the loop's own code,
            or a disk that hangs, may keep it from its next step. Launchers pass on a signal that
            the terminal has sent to all, maybe seconds after it.

    Attributes:
        number: The signal that arrived, or 0.
    """

    def __init__(self, *, twice: bool = False) -> None:
        self.number, self._twice = 0, twice
        self._noted = 0.0  # when the first signal came, by the monotonic clock
        self._former: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._former[number] = signal.signal(number, self._note)

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Ask for a stop as the signal with this number would; any thread may."""
        self.number = self.number or number

    def close(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        second = self._twice and number == self.number == signal.SIGINT
        if second and time.monotonic() - self._noted > _AGAIN_SECONDS:
            self.close()
            raise KeyboardInterrupt
        self._noted = self._noted or time.monotonic()
        self.ask(number)


def stopped(number: int, deadline: float | None, where: str) -> Interrupted:
    """The exception that ends a run, stopped by a signal or (``number`` 0) by its deadline.

    Args:
        number: The signal.
        deadline: The job's ``goal.deadline``, in seconds.
        where: How far the run is, in words.
    """
    if number:
        return Interrupted(number, f"{stopped_by(number)} {where}")
    return DeadlineReached(
        f"goal.deadline={deadline:g} s was reached {where}: a later one lets the run go on"
    )
