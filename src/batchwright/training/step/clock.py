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
    its gradients are ready, the update after the exchange. Shares of the samples follow from it.
    """

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._busy = 0.0

    def restart(self) -> None:
        """Begin a lap, without booking the time since the last one."""
        self._mark = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leave out so many seconds of the lap in progress, which are booked elsewhere."""
        self._mark += seconds

    def lap(self, meter: EpochMeter, part: Literal["input", "compute", "communication"]) -> float:
        """End a lap, and book it as a part of the step.

        Args:
            meter: Takes the seconds.
            part: The field of the meter that they are added to, besides ``training``.

        Returns:
            The seconds booked under ``part``.
        """
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        setattr(meter, part, getattr(meter, part) + seconds)
        meter.training += seconds
        if part != "communication":
            self._busy += seconds
        return seconds

    def passing(self, work: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``work`` that queues on a device what the host will not wait for in this lap."""
        return work

    def computed(self) -> float:
        """Seconds of computing since the last call."""
        seconds, self._busy = self._busy, 0.0
        return seconds


class Moment(Protocol):
    """A mark in a device's queue, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Put the mark behind all that is queued."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this mark to a later one, both of which the device has passed."""


class DeviceClock(StepClock):
    """A `StepClock` beside a device that works off what the host has queued.

    The host is through with a backward pass long before the device is, and next waits for it where
    the exchange is read: by the host's clock computing would look like exchange. So the device's
    own marks say how long it computed. They are known after the exchange, so `computed` is about
    the step before.

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
        """As `StepClock.lap`; where the device computed within an exchange, it is compute."""
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
        """As `StepClock.passing`; the work's time on the device counts in the next lap."""

        def marked(*arguments: Any) -> None:
            self._read.record()
            self._goes_on = True
            work(*arguments)

        return marked

    def _begin(self) -> None:
        """Compare host's and device's clocks anew, where the host has just waited for the device.

        The device is idle, or goes on with work behind the mark that the host has waited for.
        """
        if self._goes_on:
            self._began, self._read, self._goes_on = self._read, self._began, False
        else:
            self._began.record()
        self._began_at = time.perf_counter()


def clock_for(device: torch.device) -> StepClock:
    """The clock for steps on a device."""
    if device.type == "cuda":
        return DeviceClock(partial(_Event, device))
    return StepClock()


class _Event:
    """A `Moment` of a GPU, also where a script has made another one the current one since."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def elapsed_time(self, end: _Event) -> float:
        return float(self._event.elapsed_time(end._event))


def book_waiting(meter: EpochMeter, exchange: float, computed: Sequence[float], rank: int) -> None:
    """Split a lap of exchange into waiting for slower workers and the exchange itself.

    All workers begin to compute when the exchange before is over, so this one has waited for as
    long as the slowest computed more than itself.

    Args:
        meter: Its ``communication`` is moved to ``wait`` by as much.
        exchange: Seconds of the lap.
        computed: Seconds that each worker computed, in rank order.
        rank: This worker.
    """
    waited = min(exchange, max(computed) - computed[rank])
    meter.communication -= waited
    meter.wait += waited
