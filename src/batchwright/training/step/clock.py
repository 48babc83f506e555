"""Books where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch

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

    def passing(self, work: Callable[..., None]) -> Callable[..., None]:
        """Gives a device ``work`` for which the host is not going to wait in this lap."""
        return work

    def computed(self) -> float:
        """Seconds of computing since this was last asked."""
        seconds, self._busy = self._busy, 0.0
        return seconds


class Moment(Protocol):
    """A mark in what a device has to do, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Behind all that is queued."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds until a later one; of two that the device has passed."""


class DeviceClock(StepClock):
    """The same beside a device that works off what the host has queued.

    The host is through with a backward pass long before the device, and next waits for it where the
    exchange is read: there it looks wholly like exchange. The device tells how long it computed.
    What is told is known after the exchange, so `computed` is that of the step before.

    Args:
        moment: Makes marks.
    """

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._began, self._ready, self._read = moment(), moment(), moment()
        self._goes_on = False
        super().__init__()
        self._begin()

    def leave_out(self, seconds: float) -> None:
        """As `StepClock.leave_out`, for seconds at whose end the host has waited for the device."""
        super().leave_out(seconds)
        self._begin()

    def lap(self, meter: EpochMeter, part: Literal["input", "compute", "communication"]) -> float:
        """As `StepClock.lap`; exchange is what is left of it once the device has computed."""
        handed = self._mark
        if part == "compute":
            self._ready.record()
        seconds = super().lap(meter, part)
        if part != "communication":
            return seconds
        computed = self._began_at + self._began.elapsed_time(self._ready) / 1000
        late = min(seconds, max(0.0, computed - handed))
        meter.communication -= late
        meter.compute += late
        self._busy += late
        self._begin()
        return seconds - late

    def passing(self, work: Callable[..., None]) -> Callable[..., None]:
        """As `StepClock.passing`; its time on the device is that of the next lap."""

        def marked(*given: Any) -> None:
            self._read.record()
            self._goes_on = True
            work(*given)

        return marked

    def _begin(self) -> None:
        """Where the host has waited for the device: their clocks are compared from here on.

        The device has nothing to do, or goes on behind what the host has waited for.
        """
        if self._goes_on:
            self._began, self._read, self._goes_on = self._read, self._began, False
        else:
            self._began.record()
        self._began_at = time.perf_counter()


def clock_for(device: torch.device) -> StepClock:
    """Books the time of steps on a device."""
    if device.type == "cuda":
        return DeviceClock(partial(torch.cuda.Event, enable_timing=True))
    return StepClock()


def book_waiting(meter: EpochMeter, exchange: float, computed: Sequence[float], rank: int) -> None:
    """Tell waiting for slower workers from the exchange itself, in a lap that held both.

    All begin to compute when the exchange before is over, so this worker has waited as much longer
    as the slowest one computed.
    """
    waited = min(exchange, max(computed) - computed[rank])
    meter.communication -= waited
    meter.wait += waited
