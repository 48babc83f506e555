"""Seconds per training step against the local batch, at one resolution and worker count.

A line describes many devices, but not all: caches, allocators and kernel choices bend it. So a line
where it is good, and the measured medians with straight lines between them where it is not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median

from batchwright.prediction.fit import Line, fit_line, interval
from batchwright.records import Estimate, StepTime

LINE_TOLERANCE = 0.05
"""A line whose relative residuals are all within this is used; else the points themselves."""

REPEATABILITY = 0.03
"""Assumed relative standard deviation of the same step's median from one run to the next."""

_QUARTILES_PER_DEVIATION = 1.349  # distance between the quartiles of a normal distribution
_Z_975 = 1.96


@dataclass(frozen=True)
class Curve:
    """Seconds against the local batch.

    Attributes:
        batches: Measured local batches, rising, in samples.
        seconds: Measured medians, in seconds.
        line: The line through them.
        linear: Whether the line is good enough to be used between them.
        deviation: Relative standard deviation of one measured median, fit error aside.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    line: Line
    linear: bool
    deviation: float

    def extrapolates(self, batch: float) -> bool:
        """Whether ``batch`` lies outside what was measured."""
        return not self.batches[0] <= batch <= self.batches[-1]

    def at(self, batch: float) -> float:
        """Seconds for a step of ``batch`` samples."""
        if self.linear:
            return self.line.at(batch)
        if self.extrapolates(batch):
            # Go on as the line does, from the nearest measured point.
            edge = 0 if batch < self.batches[0] else -1
            return self.seconds[edge] * self.line.at(batch) / self.line.at(self.batches[edge])
        return self._between(batch)

    def predict(self, batch: float) -> Estimate:
        """Seconds for a step of ``batch`` samples, with a 95 % interval."""
        return interval(self.at(batch), self.relative_half_width(batch))

    def relative_half_width(self, batch: float) -> float:
        """Half the 95 % interval at ``batch``, relative to the value.

        Run-to-run variation, and beside it the line's own prediction interval or, where the
        points are used, how far the line is from them: between points this gauges the bend.
        """
        if self.linear:
            error = self.line.relative_half_width(batch)
        elif batch in self.batches:
            error = 0.0
        else:
            error = abs(self.line.at(batch) - self.at(batch)) / self.at(batch)
            error = max(error, self.line.largest_residual)
        return hypot(error, _Z_975 * self.deviation)

    def _between(self, batch: float) -> float:
        right = bisect_left(self.batches, batch)
        if self.batches[right] == batch:
            return self.seconds[right]
        x0, x1 = self.batches[right - 1], self.batches[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)


@dataclass(frozen=True)
class StepTimeModel:
    """Step times at one resolution: the whole step, and computing alone."""

    step: Curve
    compute: Curve

    def predict(self, local_batch_size: int, micro_batch_sizes: Sequence[int]) -> Estimate:
        """Seconds per step of ``local_batch_size`` samples, with a 95 % interval.

        A step is one micro-batch with the exchange of gradients, and the others without:

        .. math:: t(m_1) + t_{comp}(m_2) + ... + t_{comp}(m_k)

        Args:
            local_batch_size: Samples of the busiest worker.
            micro_batch_sizes: How they are cut; their sum is ``local_batch_size``.
        """
        first, *others = micro_batch_sizes
        if first + sum(others) != local_batch_size:
            raise ValueError(f"micro-batches {list(micro_batch_sizes)} for {local_batch_size}")
        seconds = self.step.at(first) + sum(self.compute.at(size) for size in others)
        return interval(seconds, self.step.relative_half_width(first))

    def extrapolates(self, micro_batch_size: int) -> bool:
        """Whether a micro-batch lies outside what was measured."""
        return self.step.extrapolates(micro_batch_size)


def fit_step_time(points: Sequence[StepTime]) -> StepTimeModel:
    """Model of points at one resolution and worker count, at least one, in any order."""
    ordered = sorted(points, key=lambda point: point.local_batch_size)
    spread = median((p.step_high - p.step_low) / p.step_seconds for p in ordered)
    deviation = hypot(REPEATABILITY, spread / _QUARTILES_PER_DEVIATION)
    batches = tuple(point.local_batch_size for point in ordered)
    return StepTimeModel(
        step=_curve(batches, tuple(p.step_seconds for p in ordered), deviation),
        compute=_curve(batches, tuple(p.compute_seconds for p in ordered), deviation),
    )


def _curve(batches: tuple[int, ...], seconds: tuple[float, ...], deviation: float) -> Curve:
    line = fit_line(batches, seconds)
    linear = line.largest_residual <= LINE_TOLERANCE
    return Curve(batches, seconds, line, linear, deviation)
