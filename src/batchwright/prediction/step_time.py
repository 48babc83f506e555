"""Seconds per training step against the local batch, at one resolution and worker count.

A line describes many devices, but not all: caches, allocators and kernel choices bend it. So a line
where it misses the measured medians by no more than they scatter, and else the medians with
straight lines between them. The exchange of gradients is a model of its own: its time jumps about,
and computing need not be judged by that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, pi, sqrt
from statistics import median

from batchwright.prediction.fit import Line, fit_line, interval
from batchwright.records import Estimate, StepTime

REPEATABILITY = 0.05
"""Assumed relative standard deviation of the same step's mean from one run to the next."""

_QUARTILES_PER_DEVIATION = 1.349  # distance between the quartiles of a normal distribution
_Z_975 = 1.96


@dataclass(frozen=True)
class Curve:
    """Seconds against the local batch.

    Attributes:
        batches: Measured local batches, rising, in samples.
        seconds: Measured medians, in seconds.
        line: The line through them.
        linear: Whether the line misses them by no more than they scatter, so that it is used.
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
        """Seconds for ``batch`` samples."""
        if self.linear:
            return self.line.at(batch)
        if self.extrapolates(batch):
            # Go on as the line does, from the nearest measured point.
            edge = 0 if batch < self.batches[0] else -1
            return self.seconds[edge] * self.line.at(batch) / self.line.at(self.batches[edge])
        return self._between(batch)

    def standard_error(self, batch: float) -> float:
        """Relative standard error at ``batch``.

        Scatter of the measured medians, and beside it the line's own error or, where the points
        are used, how far the line is from them: between points this gauges the bend.
        """
        if self.linear:
            error = self.line.standard_error(batch)
        elif batch in self.batches:
            error = 0.0
        else:
            error = abs(self.line.at(batch) - self.at(batch)) / self.at(batch)
            error = max(error, self.line.largest_residual)
        return hypot(error, self.deviation)

    def _between(self, batch: float) -> float:
        right = bisect_left(self.batches, batch)
        if self.batches[right] == batch:
            return self.seconds[right]
        x0, x1 = self.batches[right - 1], self.batches[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)


@dataclass(frozen=True)
class StepTimeModel:
    """Step times at one resolution and worker count.

    Attributes:
        compute: Input, forward and backward pass, and update.
        sync: Exchange of gradients: a latency, and a part that grows with the batch because
            workers wait for each other. Its errors are relative to the whole step.
    """

    compute: Curve
    sync: Line

    def predict(self, local_batch_size: int, micro_batch_sizes: Sequence[int]) -> Estimate:
        r"""Seconds per step of ``local_batch_size`` samples, with a 95 % interval.

        Micro-batches are computed one after the other, and gradients exchanged once:

        .. math:: t = \sum_j t_{comp}(m_j) + t_{sync}(b)

        Args:
            local_batch_size: Samples of the busiest worker.
            micro_batch_sizes: How they are cut; their sum is ``local_batch_size``.
        """
        if sum(micro_batch_sizes) != local_batch_size:
            raise ValueError(f"micro-batches {list(micro_batch_sizes)} for {local_batch_size}")
        computing = sum(self.compute.at(size) for size in micro_batch_sizes)
        seconds = computing + self.sync.at(local_batch_size)
        error = hypot(
            self.compute.standard_error(micro_batch_sizes[0]) * computing / seconds,
            self.sync.relative_error or 0.0,
        )
        return interval(seconds, _Z_975 * error)

    def extrapolates(self, micro_batch_size: int) -> bool:
        """Whether a micro-batch lies outside what was measured."""
        return self.compute.extrapolates(micro_batch_size)


def fit_step_time(points: Sequence[StepTime]) -> StepTimeModel:
    """Model of points at one resolution and worker count, at least one, in any order."""
    ordered = sorted(points, key=lambda point: point.local_batch_size)
    batches = tuple(point.local_batch_size for point in ordered)
    seconds = tuple(point.compute_seconds for point in ordered)
    deviation = hypot(REPEATABILITY, median(_median_error(point) for point in ordered))
    line = fit_line(batches, seconds)
    return StepTimeModel(
        compute=Curve(
            batches, seconds, line, line.largest_residual <= _Z_975 * deviation, deviation
        ),
        sync=fit_line(
            batches,
            [point.sync_seconds for point in ordered],
            [point.step_seconds for point in ordered],
        ),
    )


def _median_error(point: StepTime) -> float:
    """Relative standard error of a point's median, from its quartiles, as of a normal sample."""
    deviation = (point.step_high - point.step_low) / _QUARTILES_PER_DEVIATION / point.step_seconds
    return sqrt(pi / 2) * deviation / sqrt(point.repeats)
