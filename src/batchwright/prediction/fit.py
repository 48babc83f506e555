"""Fits a line through measured points, with its error and with a note on what they do not identify.

Measured times and bytes span powers of ten, so errors are relative: a batch of 16 counts as much as
one of 512. Whether a line is good enough, or straight pieces between the points are better, is
decided by leaving one point out at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, sqrt

from batchwright.records import Estimate

UNKNOWN_RELATIVE_ERROR = 0.2
"""Assumed relative standard error of a time that was not measured."""

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom.
_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
Z_975 = 1.96
"""97.5 % quantile of the normal distribution: half of a 95 % interval, in standard errors."""
_Z_975_EXACT = 1.959964
_Z_999 = 3.090232

_CLEARLY = 0.8
"""Largest error of the line at points left out, over that of the pieces, with which the line is
clearly better: of pure noise about a line one ratio in ten is smaller (simulated)."""


def student_t_975(degrees: int) -> float:
    """97.5 % quantile of Student's t: a table up to 10 degrees of freedom, then a series.

    The series in 1 / ``degrees`` is Cornish and Fisher's (Abramowitz and Stegun 26.7.5), right to
    four digits here. It spares the import of SciPy.

    Raises:
        ValueError: ``degrees`` is below 1.
    """
    if degrees < 1:
        raise ValueError(f"Student's t has no quantile with {degrees} degrees of freedom")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = _Z_975_EXACT
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


@dataclass(frozen=True)
class Line:
    """``y = intercept + slope x`` with both at least 0, and its error.

    The variance of the line at x is :math:`1 / m + (x - c)^2 / q`, with mass m, center c and
    spread q, if the scales of the fit are the standard errors of the points.
    """

    intercept: float  # y at x = 0, in the unit of y
    slope: float  # y per unit of x
    # Standard deviation of (measured - line) / scale around a true line; `None` if there are no
    # more points than parameters.
    relative_error: float | None
    degrees: int  # degrees of freedom behind ``relative_error``
    caveat: str  # what the points do not identify, in words; empty if nothing
    _mass: float
    _center: float
    _spread: float

    def at(self, x: float) -> float:
        """Y on the line at ``x``."""
        return self.intercept + self.slope * x

    def scaled(self, factor: float) -> Line:
        """The line through points with ``factor`` times y."""
        square = factor**2
        return replace(
            self,
            intercept=factor * self.intercept,
            slope=factor * self.slope,
            _mass=self._mass / square,
            _spread=self._spread / square,
        )

    def own_error(self, x: float) -> float:
        r"""Standard error of the line at ``x``, as a share of it: :math:`\sqrt{v(x)} / \hat y(x)`.

        The scales of the fit are taken for the standard errors of the points.
        """
        return sqrt(1 / self._mass + (x - self._center) ** 2 / self._spread) / self.at(x)

    def ratio_error(self, x: float, other: float) -> float:
        r"""Standard error of the ratio of the line at two places, as a share of it.

        It is smaller than that of two independent values, since errors of the line move both.
        The scales of the fit are taken for the standard errors of the points.
        """
        first, second = self.at(x), self.at(other)
        level = (1 / first - 1 / second) ** 2 / self._mass
        tilt = (x - self._center) / first - (other - self._center) / second
        return sqrt(level + tilt**2 / self._spread)


WIDEST = 14.0
"""Largest half width of an interval, as a logarithm: a factor of a million. Nothing is known then,
and a larger one would overflow."""


def interval_in_ratio(value: float, error: float) -> Estimate:
    """``value`` with the interval from ``value / exp(error)`` to ``value * exp(error)``."""
    error = min(error, WIDEST)
    return Estimate(value=value, low=value * exp(-error), high=value * exp(error))


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation at ``x``, which lies within the rising ``xs``."""
    right = bisect_left(xs, x)
    if xs[right] == x:
        return ys[right]
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def fit_line(
    xs: Sequence[float], ys: Sequence[float], scales: Sequence[float] | None = None
) -> Line:
    r"""Least squares of relative errors with neither parameter below 0.

    .. math:: \min_{c_0, c_1 \ge 0} \sum_i \big( (y_i - c_0 - c_1 x_i) / s_i \big)^2

    Where the best intercept would be negative, the line goes through the origin; where the best
    slope would be negative, it is constant: neither time nor memory falls. Points at a single x do
    not identify intercept and slope; the line then goes through the origin.

    Args:
        xs: Positive, for example samples.
        ys: Not negative, for example seconds or bytes; as many as ``xs``.
        scales: The scale s of each error, positive; unset: ``ys``, so that errors are relative.

    Raises:
        ValueError: No points, unequal numbers of values, or a value out of range.
    """
    scales = ys if scales is None else scales
    if not xs or len(xs) != len(ys):
        raise ValueError(f"a line needs as many x as y and at least one: {len(xs)} and {len(ys)}")
    for x, y, scale in zip(xs, ys, scales, strict=True):
        if not (0 < x < inf and 0 <= y < inf and 0 < scale < inf):
            raise ValueError(f"the point ({x}, {y}) is not positive and finite")
    weights = [1 / scale**2 for scale in scales]
    mass = sum(weights)
    center = sum(w * x for w, x in zip(weights, xs, strict=True)) / mass
    mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / mass
    spread = sum(w * (x - center) ** 2 for w, x in zip(weights, xs, strict=True))
    if len(set(xs)) == 1:
        caveat = f"only x = {xs[0]:g} was measured: taken as proportional to x"
        return _proportional(xs, ys, scales, weights, caveat)
    slope = (
        sum(w * (x - center) * (y - mean) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    )
    intercept = mean - slope * center
    if intercept < 0:
        return _proportional(
            xs, ys, scales, weights, "no fixed part found: taken as proportional to x"
        )
    if slope < 0:
        caveat = "no growth with x found: taken as constant"
        return _line(xs, ys, scales, mean, 0.0, 1, caveat, (mass, center, inf))
    caveat = "two points show no error: the interval is assumed" if len(xs) == 2 else ""
    return _line(xs, ys, scales, intercept, slope, 2, caveat, (mass, center, spread))


def _proportional(
    xs: Sequence[float],
    ys: Sequence[float],
    scales: Sequence[float],
    weights: list[float],
    caveat: str,
) -> Line:
    """The best line through the origin."""
    spread = sum(w * x**2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    return _line(xs, ys, scales, 0.0, slope, 1, caveat, (inf, 0.0, spread))


def _line(
    xs: Sequence[float],
    ys: Sequence[float],
    scales: Sequence[float],
    intercept: float,
    slope: float,
    parameters: int,
    caveat: str,
    shape: tuple[float, float, float],
) -> Line:
    """The line with the error by its residuals; ``shape`` is mass, center, spread."""
    residuals = [
        (y - intercept - slope * x) / scale for x, y, scale in zip(xs, ys, scales, strict=True)
    ]
    degrees = len(xs) - parameters
    error = sqrt(sum(r**2 for r in residuals) / degrees) if degrees else None
    return Line(intercept, slope, error, degrees, caveat, *shape)


@dataclass(frozen=True)
class CrossValidation:
    """Relative errors at the inner points, each predicted from the others; empty below 3 points."""

    line: tuple[float, ...]  # (predicted - y) / y by the line through the other points
    pieces: tuple[float, ...]  # (predicted - y) / y by the straight piece between the neighbours


def leave_one_out(
    xs: Sequence[float], ys: Sequence[float], scales: Sequence[float]
) -> CrossValidation:
    """How well a line and pieces predict points that were left out; ``xs`` rise."""
    line, pieces = [], []
    for left_out in range(1, len(xs) - 1):
        seen = [i for i in range(len(xs)) if i != left_out]
        x, y = xs[left_out], ys[left_out]
        others = [xs[i] for i in seen], [ys[i] for i in seen]
        line.append(fit_line(*others, [scales[i] for i in seen]).at(x) / y - 1)
        pieces.append(between(*others, x) / y - 1)
    return CrossValidation(tuple(line), tuple(pieces))


def choose_line(line: Line, points: int, errors: CrossValidation) -> bool:
    """Whether the line is used, rather than the pieces between the points.

    It is used if its residuals are within the standard errors of the points, which are the scales
    of the fit (chi-squared at 99.9 %, as slow stretches make tails longer than normal ones). Else
    it is used only if it predicts points left out clearly better than the pieces do: it may do a
    little better by chance, and leaving points out does not show a jump at the last point. With
    three points both predict the middle one alike.

    Args:
        line: The line.
        points: Number of points.
        errors: Errors at points left out.
    """
    if not line.degrees or line.relative_error is None:
        return True
    # 99.9 % quantile of chi-squared (Wilson and Hilferty 1931), right to 4 % here.
    spread = 2 / (9 * line.degrees)
    most = line.degrees * (1 - spread + _Z_999 * sqrt(spread)) ** 3
    if line.relative_error**2 * line.degrees <= most:
        return True
    return points > 3 and root_mean_square(errors.line) < _CLEARLY * root_mean_square(errors.pieces)


def root_mean_square(values: Sequence[float]) -> float:
    """Root of the mean square; 0 without values."""
    return sqrt(sum(v * v for v in values) / len(values)) if values else 0.0
