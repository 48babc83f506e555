"""Seconds of a step against the batch, at one resolution and number of workers.

Step times of many devices are a line, but caches, allocators and kernel choices may bend it. So the
curve is a line where the measured medians allow one, and else linear pieces between them. Beyond
the largest measured batch it goes on as its upper half does, and as the curve of another number of
workers that was measured further; the two are weighted by how well each is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import hypot, log, log2, sqrt

from batchwright.prediction.fit import (
    Line,
    between,
    choose_line,
    fit_line,
    leave_one_out,
    root_mean_square,
)

DOUBLING_ERROR = 0.05
"""Assumed relative standard error that each doubling beyond the measured batches adds."""

UNSEEN_BEND = 0.05
"""Assumed relative standard error midway between two points without a third that shows a bend."""

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Curve:
    """Seconds of a step against the batch; all errors are shares of the seconds."""

    batches: tuple[int, ...]  # measured batches, rising, in samples
    seconds: tuple[float, ...]  # median seconds of each
    errors: tuple[float, ...]  # standard error of each median
    line: Line  # the line through the medians, weighted by their errors
    linear: bool  # whether the line is used, rather than the pieces between the medians
    misfit: float  # standard error of the line beyond scatter, or of a piece in its middle
    caveat: str  # what the points do not identify, in words; empty if nothing
    measured: tuple[int, int]  # smallest and largest batch that were measured here, in samples
    # Standard error of a whole borrowed curve: that of the point that it was moved to, of its shape
    # there, and of an unseen bend.
    level: float = 0.0
    # A curve of another number of workers that was measured further, moved through this curve's
    # value at its largest batch; `None`: there is none.
    further: Curve | None = None

    def at(self, batch: float) -> float:
        """Seconds for ``batch`` samples."""
        own = self._own(batch)
        if self.further is None or batch <= self.batches[-1]:
            return own
        share = self._own_share
        return float(own**share * self.further.at(batch) ** (1 - share))

    @property
    def largest_miss(self) -> float:
        """Largest distance of the line from a median, as a share of the median."""
        pairs = zip(self.batches, self.seconds, strict=True)
        return max(abs(self.line.at(batch) / seconds - 1) for batch, seconds in pairs)

    def standard_error(self, batch: float) -> float:
        """Standard error of the curve at ``batch``, as a share of it.

        It contains the scatter of the medians and the misfit, beyond the measured batches
        `DOUBLING_ERROR` for each doubling, and where the curve goes on by two shapes, their
        distance. It does not contain the drift of a new measurement.
        """
        last = self.batches[-1]
        if self.further is None or batch <= last:
            return self._own_error(batch)
        share, (own, other) = self._own_share, self._growth_errors(batch, self.further)
        apart = log(self._own(batch) / self.further.at(batch))
        doubt = sqrt(share * (1 - share)) * apart
        return hypot(self._own_error(last), share * own, (1 - share) * other, doubt)

    @cached_property
    def _own_share(self) -> float:
        """Weight of the curve's own shape beyond its largest batch, by inverse variances.

        The variances are those at the largest batch of the other shape. The weight is the same for
        all batches: if it changed, a larger batch might seem quicker than a smaller one.
        """
        if self.further is None:
            return 1.0
        own, other = self._growth_errors(self.further.batches[-1], self.further)
        return other**2 / (own**2 + other**2)

    def _growth_errors(self, batch: float, further: Curve) -> tuple[float, float]:
        """Standard errors of both shapes beyond the largest batch, without that of the value there.

        The error of the other shape grows to its full size over the first doubling.
        """
        last = self.batches[-1]
        known = self._own_error(last)
        own, other = (
            sqrt(max(0.0, error**2 - known**2))
            for error in (self._own_error(batch), further.standard_error(batch))
        )
        return own, min(1.0, log2(batch / last)) * other

    def _own(self, batch: float) -> float:
        """Seconds for ``batch`` samples by the points of this curve alone."""
        if self.linear:
            return self.line.intercept + self.line.slope * batch
        batches = self.batches
        if batches[0] <= batch <= batches[-1]:
            return between(batches, self.seconds, batch)
        if batch > batches[-1]:
            half = self._half
            rise = self.seconds[-1] - self.seconds[half]
            if rise > 0:
                slope = rise / (batches[-1] - batches[half])
                return self.seconds[-1] + slope * (batch - batches[-1])
        # In proportion to the line, from the nearest measured point.
        edge = 0 if batch < batches[0] else -1
        return self.seconds[edge] * self.line.at(batch) / self.line.at(batches[edge])

    @property
    def _half(self) -> int:
        """Index of the largest batch that is at most half the largest one: the upper half begins.

        The curve goes on with the slope of that half. Below it, a step may take as long for fewer
        samples, as on a GPU that waits for its host, so that a line through all points is too flat.
        """
        batches = self.batches
        return max((i for i, one in enumerate(batches) if 2 * one <= batches[-1]), default=0)

    def _own_error(self, batch: float) -> float:
        smallest, largest = self.measured
        beyond = DOUBLING_ERROR * log2(max(smallest / batch, batch / largest, 1.0))
        own = self._scatter(batch), self._bend(batch), self._tilt(batch)
        return hypot(self.level, *own, beyond)

    def extrapolates(self, batch: float) -> bool:
        """Whether ``batch`` lies outside what was measured."""
        return not self.measured[0] <= batch <= self.measured[1]

    def _scatter(self, batch: float) -> float:
        if self.linear:
            return self.line.own_error(batch)
        nearest = min(max(batch, self.batches[0]), self.batches[-1])
        return between(self.batches, self.errors, nearest)

    def _tilt(self, batch: float) -> float:
        """Error of the slope beyond the largest batch; for a line that is part of its scatter."""
        if batch <= self.batches[-1] or (self.linear and self.line.slope > 0):
            return 0.0
        half = self._half
        steps = (batch - self.batches[-1]) / (self.batches[-1] - self.batches[half])
        rise = hypot(*(self.errors[i] * self.seconds[i] for i in (half, -1)))
        return steps * rise / self._own(batch)

    def _bend(self, batch: float) -> float:
        """Error of a bend: a line's misfit everywhere, a piece's misfit most in its middle."""
        few = len(self.batches) == 2
        if self.linear and not few:
            return self.misfit
        right = next((x for x in self.batches if x >= batch), None)
        left = next((x for x in reversed(self.batches) if x <= batch), None)
        if left is None or right is None or left == right:
            return 0.0
        share = (batch - left) / (right - left)
        return 4 * share * (1 - share) * self.misfit


def fit_curve(batches: Sequence[int], seconds: Sequence[float], errors: Sequence[float]) -> Curve:
    """Curve through medians.

    Args:
        batches: Batches, rising, at least two, in samples.
        seconds: Median seconds of each.
        errors: Standard error of each, as a share of the seconds.
    """
    scales = [max(error, _SMALLEST) * y for error, y in zip(errors, seconds, strict=True)]
    line = fit_line(batches, seconds, scales)
    validation = leave_one_out(batches, seconds, scales)
    linear = choose_line(line, len(batches), validation)
    if len(batches) == 2:
        misfit = UNSEEN_BEND
    elif linear:  # the part of the residuals that scatter does not explain
        misses = [line.at(x) / y - 1 for x, y in zip(batches, seconds, strict=True)]
        explained = line.degrees / len(batches) * sum(e * e for e in errors)
        misfit = sqrt(max(0.0, sum(m * m for m in misses) - explained) / len(misses))
    else:
        # Leaving a point out makes a gap twice as wide, so about twice the error, noise included.
        misfit = root_mean_square(validation.pieces) / 2
    caveat = line.caveat
    if not linear:
        caveat = "bent: a line misses the medians by more than they scatter"
    elif len(batches) == 2:
        caveat = "two points cannot show a bend: one is assumed in the interval"
    return Curve(
        tuple(batches),
        tuple(seconds),
        tuple(errors),
        line,
        linear,
        misfit,
        caveat,
        (batches[0], batches[-1]),
    )


def borrow_curve(shape: Curve, batch: int, seconds: float, error: float, whence: str) -> Curve:
    """The shape of another curve, moved through one point.

    Args:
        shape: The other curve.
        batch: The batch of the point, in samples.
        seconds: Seconds at the point.
        error: Standard error of these, as a share.
        whence: Where the shape comes from, in words.
    """
    factor = seconds / shape.at(batch)
    return replace(
        shape,
        seconds=tuple(factor * y for y in shape.seconds),
        line=shape.line.scaled(factor),
        caveat=f"only batch {batch} was measured: the shape is that of {whence}",
        measured=(batch, batch),
        level=hypot(error, shape.standard_error(batch), UNSEEN_BEND),
    )
