r"""How repeatable the machine is: scatter between visits to the same point.

Shared machines have slow stretches of seconds, so what matters is not how single steps scatter but
how visits do that are apart in time. Two things make that up. The mean of a few steps that scatter
is itself uncertain; it differs from point to point how much, and is most where a short step waits
for an exchange. What visits scatter beyond that is drift,
pooled over all points of a number of workers: each has few visits, together they have many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import hypot, inf, log, pi, sqrt
from statistics import fmean, median
from typing import NamedTuple

from batchwright.records import StepTime

ASSUMED_DRIFT = 0.05
"""Assumed drift where too few visits show any."""

LATER_VISITS = 5
"""Visits whose median a prediction is about; `check` makes as many."""

SHARED_DRIFT = 0.5
"""Share of a visit's drift, as a variance, that all visits of that time have in common, so that a
line through many points does not average it away; measured on a shared 2-core machine: 0.35 to 0.5.
"""

HANDING_OVER = 0.3
"""Relative standard deviation, from one minute to the next, of what a step takes whatever its
batch, where cores share it. They hand each other data many times in a step, which takes several
times as long between cores of different caches; the system moves threads between cores, and the
host of a virtual machine moves its cores. One such stretch outlasts a probe, whose visits then show
nothing of it. Measured on a virtual machine of two cores: docs/decisions/0085.
"""

WELL_KNOWN_RATIO = 0.005
"""Standard error at which a ratio is known well enough: half of the 1 % to which the rounds of two
batch sizes are to agree."""

_MIN_DEGREES = 4
_DOUBTED_VISITS = 10  # slower visits at which a skew is believed by half
_MAX_TIMES_MEDIAN = 6.0  # a suspended process says nothing about drift
_MIN_DRIFT = 0.005  # no clock and no scheduler repeats a step better
_HALVINGS = 30
_GINI = sqrt(pi) / 2  # standard deviation of a normal sample over its mean difference
QUARTILES_PER_DEVIATION = 1.349
"""Distance between the quartiles of a normal distribution, in standard deviations."""


class Drift(NamedTuple):
    """What visits scatter beyond what the scatter of their steps makes."""

    share: float  # standard deviation of a visit's mean step, relative to the point's long run
    degrees: int  # of freedom behind it; 0 where it is assumed


class _Seen(NamedTuple):
    """What the visits to one point show."""

    degrees: float  # of freedom: one less than the visits, or as many of these as tell of drift
    scatter: float  # standard deviation of a visit, relative, by Gini's mean difference
    of_steps: float  # what of it the scatter of the point's steps makes, see `step_share`


def pooled_drift(points: Sequence[StepTime]) -> Drift:
    r"""Drift of all points together, by Gini's mean difference over pairs of visits.

    The drift :math:`\delta` at which visits scatter as much as they should, in the mean over the
    pairs of visits to a point and then over points, where steps make :math:`\omega` of a visit's
    scatter:

    .. math::
        \operatorname{mean} \frac{\sqrt\pi}{2}
        \frac{|\ln t_i - \ln t_j|}{\sqrt{\delta^2 + \omega^2}} = 1

    Points count by their degrees of freedom and their Fisher information about a drift, so that
    those whose steps scatter more than it tell little. Unbiased for few visits too. Slow stretches,
    which are rare, one-sided and long, count in proportion: a median of the differences would not
    see them, a mean square little else.
    """
    seen = _telling(_seen(points))
    # Rounded, not cut: the scatter of steps takes a little of each, so four tell as 3.9.
    degrees = round(sum(one.degrees for one in seen))
    if degrees < _MIN_DEGREES:
        return Drift(ASSUMED_DRIFT, 0)
    return Drift(_beyond_steps(seen), degrees)


def drift_by_workers(points: Sequence[StepTime], of_all: Drift | None = None) -> dict[int, Drift]:
    """Drift of each number of workers, by its own visits as far as these tell.

    Workers that exchange gradients wait for each other, so they drift otherwise than one does. Each
    number goes by its own visits, beside which the drift of all counts as if `_MIN_DEGREES` more
    had shown it: where there are few, it decides. ``of_all`` is the `pooled_drift` of these points,
    for who has it already.
    """
    of_all = of_all or pooled_drift(points)
    found = {}
    for workers in {point.workers: None for point in points}:
        own = [point for point in points if point.workers == workers]
        usual = [of_all.share / _GINI] * _MIN_DEGREES
        seen = [*_telling(_seen(own, usual)), _Seen(_MIN_DEGREES, of_all.share, 0.0)]
        degrees = min(of_all.degrees, round(sum(one.degrees for one in seen)))
        found[workers] = Drift(_beyond_steps(seen), degrees) if of_all.degrees else of_all
    return found


def visit_scatter(points: Sequence[StepTime]) -> float | None:
    """All that visits scatter, what their steps make of it included; `None` if too few tell."""
    seen = _seen(points)
    told = sum(one.degrees for one in seen) >= _MIN_DEGREES
    return max(_MIN_DRIFT, _mean_scatter(seen)) if told else None


def _seen(points: Sequence[StepTime], usual: Sequence[float] = ()) -> list[_Seen]:
    """What visits show; beside them, ``usual`` differences say which ones are out of all reason."""
    revisited = [point for point in points if len(point.visits) > 1]
    pairs = [pair for point in revisited for pair in combinations(point.visits, 2)]
    if not pairs:
        return []
    most = _MAX_TIMES_MEDIAN * median([*usual, *(abs(log(a / b)) for a, b in pairs)])
    # A point of n visits has n (n - 1) / 2 pairs, but n - 1 degrees of freedom.
    return [
        _Seen(len(point.visits) - 1, _scatter(point.visits, most), step_share(point))
        for point in revisited
    ]


def _mean_scatter(seen: Sequence[_Seen]) -> float:
    return sum(one.degrees * one.scatter for one in seen) / sum(one.degrees for one in seen)


def _telling(seen: Sequence[_Seen]) -> list[_Seen]:
    """What visits show, with the degrees of freedom that tell of drift: by Fisher information.

    About a drift as large as it may be: what is assumed, or all that visits scatter if that is
    more.
    """
    if not seen:
        return []
    drift = max(ASSUMED_DRIFT, _mean_scatter(seen))
    return [
        one._replace(degrees=one.degrees / (1 + (one.of_steps / drift) ** 2) ** 2) for one in seen
    ]


def _beyond_steps(seen: Sequence[_Seen]) -> float:
    """The drift at which points scatter as much as they should, in the mean over their degrees."""
    degrees = sum(one.degrees for one in seen)

    def too_small(drift: float) -> bool:
        return sum(one.degrees * one.scatter / hypot(drift, one.of_steps) for one in seen) > degrees

    low, high = _MIN_DRIFT, max(_MIN_DRIFT, *(one.scatter for one in seen))
    if not too_small(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return high


def ratio_error(ratios: Sequence[float]) -> float:
    r"""Relative standard error of the median over visits of a ratio of two times.

    That of one visit, by Gini's mean difference as in `pooled_drift`, times what a median of so
    many keeps of it. Both times saw the same state of the machine, so what visits of that time have
    in common is not in it.

    Args:
        ratios: One for each visit; fewer than two tell nothing, and the error is infinite.
    """
    if len(ratios) < 2:
        return inf
    return _scatter(ratios) * median_share(len(ratios))


def _scatter(values: Sequence[float], most: float = inf) -> float:
    """Relative standard deviation by Gini's mean difference; none counts for more than ``most``."""
    return _GINI * fmean(min(abs(log(a / b)), most) for a, b in combinations(values, 2))


def pooled_skew(points: Sequence[StepTime]) -> float:
    """How much larger the drift is upwards: 1 the same in both directions, towards 2 only up.

    Mean distance of slower visits from their point's median, over the mean of slower and faster
    ones; where few visits tell, nearer to 1. Slow stretches are rarer than others, and longer.
    """
    slower, faster = [], []
    for point in points:
        middle = log(point_seconds(point))
        distances = [log(visit) - middle for visit in point.visits if len(point.visits) > 2]
        slower += [d for d in distances if d > 0]
        faster += [-d for d in distances if d < 0]
    if not slower or not faster:
        return 1.0
    up, down = fmean(slower), fmean(faster)
    trust = len(slower) / (len(slower) + _DOUBTED_VISITS)
    return 1 + trust * (up - down) / (up + down)


def level_error(points: Sequence[StepTime], drift: float) -> float:
    """Standard error that all points have in common, as a share: see `SHARED_DRIFT`."""
    visits = median(max(1, len(point.visits)) for point in points)
    return sqrt(SHARED_DRIFT) * drift * median_share(visits)


def median_share(visits: float) -> float:
    r"""Standard deviation of a median of so many visits, as a share of that of one.

    :math:`\sqrt{(\pi / 2) / (n + \pi / 2 - 1)}`: exact for one, right to 2 % for odd n of a normal
    sample, and on the safe side for even n.
    """
    return sqrt(pi / 2 / (visits + pi / 2 - 1))


def step_share(point: StepTime) -> float:
    """What the scatter of a point's steps makes of one visit's, as a share of it.

    Quartiles tell it of a single visit alone: those of several have in them how far these are
    apart.
    """
    if point.visit_error is not None:
        return point.visit_error
    if len(point.visits) > 1:
        return 0.0
    deviation = (point.step_high - point.step_low) / QUARTILES_PER_DEVIATION / point.step_seconds
    return deviation * median_share(point.repeats)


def visit_deviation(point: StepTime, drift: float) -> float:
    """Relative standard deviation of one visit there: drift, and what its steps make."""
    return hypot(drift, step_share(point))


def point_error(point: StepTime, drift: float) -> float:
    """Relative standard error of a point's time, the median over its visits."""
    return visit_deviation(point, drift) * median_share(max(1, len(point.visits)))


def point_seconds(point: StepTime) -> float:
    """A point's whole step, in seconds: the median over its visits."""
    return median(point.visits) if point.visits else point.step_seconds
