r"""How repeatable the machine is: the scatter between visits to the same point.

Shared machines have slow stretches of seconds. So the scatter that matters is not that of single
steps but that between visits which are apart in time. It has two parts. The mean of a few steps has
an error by the scatter of these steps; it differs from point to point, and is largest where a short
step waits for an exchange. What visits scatter beyond that is drift. Each point has few visits, so
drift is pooled over all points of a number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import hypot, inf, log, pi, sqrt
from statistics import fmean, median
from typing import NamedTuple

from batchwright.records import Profile, StepTime
from batchwright.records.text.load_text import beside_steps

ASSUMED_DRIFT = 0.05
"""Assumed drift where too few visits show it."""

LATER_VISITS = 5
"""Number of visits whose median a prediction is for; `check` makes as many."""

SHARED_DRIFT = 0.5
"""Share of a visit's drift, as a variance, that all visits of that time have in common. A line
through many points does not average it out. Assumed; see docs/log.md, what makes up the interval of
a step time.
"""

HANDING_OVER = 0.3
"""Relative standard deviation, from one minute to the next, of the fixed time of a step, where
several cores share the step. They hand each other data many times in a step, which takes several
times as long between cores with different caches; the system moves threads between cores, and the
host of a virtual machine moves its cores. One such stretch outlasts a probe, whose visits then do
not show it. Measured on a virtual machine of two cores: docs/decisions/0085.
"""

LEAST_SHARE = 0.1
"""Share of its cores below which a worker is not taken to fall: with less, nearly all of a stretch
was somebody else's, or ours waited for something else. Assumed."""

WELL_KNOWN_RATIO = 0.005
"""Standard error at which a ratio is known well enough: half of the 1 % to which the rounds of two
batch sizes are to agree."""

_MIN_DEGREES = 4
_DOUBTED_VISITS = 10  # number of slower visits with which a skew counts by half
_MAX_TIMES_MEDIAN = 6.0  # bound of a difference over the median one: a process may be suspended
_MIN_DRIFT = 0.005  # no clock and no scheduler repeats a step better
_HALVINGS = 30  # bisections
_GINI = sqrt(pi) / 2  # standard deviation of a normal sample over its mean difference
QUARTILES_PER_DEVIATION = 1.349
"""Distance between the quartiles of a normal distribution, in standard deviations."""


class Drift(NamedTuple):
    """Scatter of visits beyond that which the scatter of their steps causes."""

    share: float  # standard deviation of a visit's mean step, relative to the point's long-run mean
    degrees: int  # degrees of freedom behind it; 0 where it is assumed


class _VisitScatter(NamedTuple):
    """Scatter of the visits to one point."""

    # Degrees of freedom: one less than the visits, or the part of it that shows drift.
    degrees: float
    scatter: float  # relative standard deviation of a visit, by Gini's mean difference
    of_steps: float  # the part of it that the scatter of the point's steps causes, see `step_share`


def pooled_drift(points: Sequence[StepTime]) -> Drift:
    r"""Drift of all points together, by Gini's mean difference over pairs of visits.

    The drift :math:`\delta` is the one with which the scatter of visits has its expected value, in
    the mean over the pairs of visits to a point and then over points, where steps cause the scatter
    :math:`\omega` of a visit:

    .. math::
        \operatorname{mean} \frac{\sqrt\pi}{2}
        \frac{|\ln t_i - \ln t_j|}{\sqrt{\delta^2 + \omega^2}} = 1

    Points are weighted by their degrees of freedom and their Fisher information about a drift, so
    that points whose steps scatter more than that count little. It is unbiased for few visits, too.
    Slow stretches, which are rare, one-sided and long, count in proportion: a median of the
    differences would not see them, and a mean square would see little else.
    """
    seen = _by_information(_seen(points))
    # Rounded, not cut: the scatter of steps reduces each degree a little, so 4 come to 3.9.
    degrees = round(sum(one.degrees for one in seen))
    if degrees < _MIN_DEGREES:
        return Drift(ASSUMED_DRIFT, 0)
    return Drift(_beyond_steps(seen), degrees)


def drift_by_workers(points: Sequence[StepTime], of_all: Drift | None = None) -> dict[int, Drift]:
    """Drift of each number of workers, by its own visits and by those of all.

    Workers that exchange gradients wait for each other, so they drift otherwise than a single one.
    The drift of all points counts as `_MIN_DEGREES` further degrees of freedom, so it decides where
    there are few visits.

    Args:
        points: Measured steps.
        of_all: `pooled_drift` of these points; unset: it is computed.
    """
    of_all = of_all or pooled_drift(points)
    found = {}
    for workers in {point.workers: None for point in points}:
        own = [point for point in points if point.workers == workers]
        usual = [of_all.share / _GINI] * _MIN_DEGREES
        seen = [
            *_by_information(_seen(own, usual)),
            _VisitScatter(_MIN_DEGREES, of_all.share, 0.0),
        ]
        degrees = min(of_all.degrees, round(sum(one.degrees for one in seen)))
        found[workers] = Drift(_beyond_steps(seen), degrees) if of_all.degrees else of_all
    return found


def visit_scatter(points: Sequence[StepTime]) -> float | None:
    """Relative scatter of visits, that by their steps included; `None` with too few visits."""
    seen = _seen(points)
    enough = sum(one.degrees for one in seen) >= _MIN_DEGREES
    return max(_MIN_DRIFT, _mean_scatter(seen)) if enough else None


def _seen(points: Sequence[StepTime], usual: Sequence[float] = ()) -> list[_VisitScatter]:
    """Scatter of the visits to each point that has several.

    ``usual``: Further differences that enter the median, by which outliers are bounded.
    """
    revisited = [point for point in points if len(point.visits) > 1]
    pairs = [pair for point in revisited for pair in combinations(point.visits, 2)]
    if not pairs:
        return []
    most = _MAX_TIMES_MEDIAN * median([*usual, *(abs(log(a / b)) for a, b in pairs)])
    # A point of n visits has n (n - 1) / 2 pairs, but n - 1 degrees of freedom.
    return [
        _VisitScatter(len(point.visits) - 1, _scatter(point.visits, most), step_share(point))
        for point in revisited
    ]


def _mean_scatter(seen: Sequence[_VisitScatter]) -> float:
    return sum(one.degrees * one.scatter for one in seen) / sum(one.degrees for one in seen)


def _by_information(seen: Sequence[_VisitScatter]) -> list[_VisitScatter]:
    """The scatter of visits, with degrees of freedom reduced by Fisher information about the drift.

    The information is that about a large drift: the assumed one, or all scatter if that is more.
    """
    if not seen:
        return []
    drift = max(ASSUMED_DRIFT, _mean_scatter(seen))
    return [
        one._replace(degrees=one.degrees / (1 + (one.of_steps / drift) ** 2) ** 2) for one in seen
    ]


def _beyond_steps(seen: Sequence[_VisitScatter]) -> float:
    """The drift with which the scatter of points has its expected value, see `pooled_drift`."""
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

    It is that of one visit, by Gini's mean difference as in `pooled_drift`, times `median_share`.
    Both times of a visit saw the same state of the machine, so drift that all visits have in common
    is not in it.

    Args:
        ratios: The ratio in each visit; with fewer than two the error is infinite.
    """
    if len(ratios) < 2:
        return inf
    return _scatter(ratios) * median_share(len(ratios))


def _scatter(values: Sequence[float], most: float = inf) -> float:
    """Relative standard deviation by Gini's mean difference, with differences up to ``most``."""
    return _GINI * fmean(min(abs(log(a / b)), most) for a, b in combinations(values, 2))


def pooled_skew(points: Sequence[StepTime]) -> float:
    """Skew of the drift: 1 if it is the same in both directions, up to 2 if it is only upwards.

    It is the mean distance of slower visits from their point's median, over the mean of slower and
    faster ones; with few visits it is nearer to 1. Slow stretches are rarer than others, and last
    longer.
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
    """Relative standard error that all points have in common, see `SHARED_DRIFT`."""
    visits = median(max(1, len(point.visits)) for point in points)
    return sqrt(SHARED_DRIFT) * drift * median_share(visits)


def least_share(profile: Profile) -> float:
    """Least share of its cores that a worker got while the probe timed steps, at most 1.

    It is 1 where the machine was quiet, by `load_text.BUSY_SHARE` of the whole probe, and on GPUs,
    whose steps wait for the host by an unknown part. Older profiles have only the mean share.
    """
    load = profile.load
    if load is None or profile.cluster.device != "cpu" or not beside_steps(load):
        return 1.0
    return max(LEAST_SHARE, load.share if load.least_share is None else load.least_share)


def load_deviation(share: float) -> float:
    r"""Lasting relative standard deviation of a step's time by other programs.

    With the share f of its cores a step takes 1 / f times as long. Programs come and go for reasons
    that no probe sees, in stretches that outlast visits and whole probes: a point may have been
    visited while they took nothing and the training run beside them, or the other way round. So the
    logarithm of the ratio of the two may be anything from :math:`-\ln(1 / f)` to
    :math:`\ln(1 / f)`; if all are as likely, its standard deviation is

    .. math:: \sigma = \ln(1 / f) / \sqrt 3

    It does not fall with the number of visits. Visits that were timed beside others scatter by the
    same cause, so it is a lower bound of an interval and not added to the drift.

    Args:
        share: f, the result of `least_share`.
    """
    return log(1 / share) / sqrt(3)


def median_share(visits: float) -> float:
    r"""Standard deviation of the median of ``visits`` visits, as a share of that of one visit.

    :math:`\sqrt{(\pi / 2) / (n + \pi / 2 - 1)}`: exact for one, right to 2 % for odd n of a normal
    sample, and on the safe side for even n.
    """
    return sqrt(pi / 2 / (visits + pi / 2 - 1))


def step_share(point: StepTime) -> float:
    """Relative standard deviation of one visit that the scatter of its steps causes.

    For points without `visit_error` it follows from the quartiles of a single visit. Quartiles of
    several visits include the distance between these; then it is 0.
    """
    if point.visit_error is not None:
        return point.visit_error
    if len(point.visits) > 1:
        return 0.0
    deviation = (point.step_high - point.step_low) / QUARTILES_PER_DEVIATION / point.step_seconds
    return deviation * median_share(point.repeats)


def visit_deviation(point: StepTime, drift: float) -> float:
    """Relative standard deviation of one visit to a point: by drift and by its steps."""
    return hypot(drift, step_share(point))


def point_error(point: StepTime, drift: float) -> float:
    """Relative standard error of a point's time, the median over its visits."""
    return visit_deviation(point, drift) * median_share(max(1, len(point.visits)))


def point_seconds(point: StepTime) -> float:
    """A point's whole step, in seconds: the median over its visits."""
    return median(point.visits) if point.visits else point.step_seconds
