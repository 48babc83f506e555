"""Clocks that go by what a test says, so that speeds are not the machine's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from batchwright.training.batches import following
from batchwright.training.step.clock import StepClock


class PacedClock(StepClock):
    """Books as computing what is slept; takes the place of a run's own clock.

    Waiting and exchanging are measured: the other workers really are late. Whoever steps alone,
    as between two exchanges with a server, waits for nobody.
    """

    def __init__(self, *, alone=False):
        super().__init__()
        self._slept, self._alone = 0.0, alone

    def sleep(self, seconds):
        """The step in progress takes so long."""
        time.sleep(seconds)
        self._slept += seconds

    def lap(self, meter, part):
        if part == "communication" and not self._alone:
            return super().lap(meter, part)
        seconds, self._slept = self._slept, 0.0
        self._mark = time.perf_counter()
        setattr(meter, part, getattr(meter, part) + seconds)
        meter.training += seconds
        if part != "communication":
            self._busy += seconds
        return seconds


@contextmanager
def paced_passes() -> Iterator[Callable[[float], None]]:
    """Passes of somebody else's loop take as long as what is yielded is told, and no longer."""
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    with mock.patch.object(following, "time", SimpleNamespace(perf_counter=lambda: now)):
        yield take
