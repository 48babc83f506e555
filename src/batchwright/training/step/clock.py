"""Books where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from batchwright.training.step.epoch_totals import EpochMeter


class StepClock:
    """A stopwatch whose laps are booked in the meter of the epoch in progress.

    Computing is what a worker does by itself: waiting for input, forward and backward pass until
    its gradients are ready, the update after. It is what shares are judged by.
    """

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._busy = 0.0

    def restart(self) -> None:
        """Nothing is booked of the time since the last lap."""
        self._mark = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """So many of the seconds since the last lap are booked elsewhere."""
        self._mark += seconds

    def lap(self, meter: EpochMeter, part: Literal["input", "compute", "communication"]) -> float:
        """Book the time since the last lap; returns it, in seconds."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        setattr(meter, part, getattr(meter, part) + seconds)
        meter.training += seconds
        if part != "communication":
            self._busy += seconds
        return seconds

    def computed(self) -> float:
        """Seconds of computing since this was last asked."""
        seconds, self._busy = self._busy, 0.0
        return seconds


def book_waiting(meter: EpochMeter, exchange: float, computed: Sequence[float], rank: int) -> None:
    """Tell waiting for slower workers from the exchange itself, in a lap that held both.

    All begin to compute when the exchange before is over, so this worker has waited as much longer
    as the slowest one computed.
    """
    waited = min(exchange, max(computed) - computed[rank])
    meter.communication -= waited
    meter.wait += waited
