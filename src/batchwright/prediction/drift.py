r"""How repeatable the machine is: scatter between visits to the same point.

Shared machines have slow stretches of seconds, so what matters is not how single steps scatter but
how the medians of visits do that are apart in time. The scatter is pooled over all points: each
has few visits, together they have many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import hypot, inf, log, pi, sqrt
from statistics import fmean, median

from batchwright.records import StepTime

ASSUMED_DRIFT = 0.05
"""Assumed drift where too few visits show any."""

LATER_VISITS = 5
"""Visits whose median a prediction is about; `check` makes as many."""

SHARED_DRIFT = 0.5
"""Share of a visit's drift, as a variance, that all visits of that time have in common, so that a
line through many points does not average it away; measured on a shared 2-core machine: 0.35 to 0.5.
"""

WELL_KNOWN_RATIO = 0.005
"""Standard error at which a ratio is known well enough: half of the 1 % to which the rounds of two
batch sizes are to agree."""

_MIN_DEGREES = 4
_DOUBTED_VISITS = 10  # slower visits at which a skew is believed by half
_MAX_TIMES_MEDIAN = 6.0  # a suspended process says nothing about drift
_MIN_DRIFT = 0.005  # no clock and no scheduler repeats a step better
QUARTILES_PER_DEVIATION = 1.349
"""Distance between the quartiles of a normal distribution, in standard deviations."""


def pooled_drift(points: Sequence[StepTime]) -> tuple[float, int]:
    r"""Relative standard deviation of one visit's median, and the degrees of freedom behind it.

    Gini's mean difference over all pairs of visits to the same point,

    .. math:: \hat\sigma = \frac{\sqrt\pi}{2} \operatorname{mean} |\ln t_i - \ln t_j|

    unbiased for few visits too. Slow stretches, which are rare, one-sided and long, count in
    proportion: a median of the differences would not see them, a mean square little else.
    """
    # A point of n visits has n (n - 1) / 2 pairs, but n - 1 degrees of freedom.
    degrees = sum(max(0, len(point.visits) - 1) for point in points)
    if degrees < _MIN_DEGREES:
        return ASSUMED_DRIFT, 0
    pairs = [
        (len(point.visits) - 1, [abs(log(a / b)) for a, b in combinations(point.visits, 2)])
        for point in points
        if len(point.visits) > 1
    ]
    most = _MAX_TIMES_MEDIAN * median(difference for _, own in pairs for difference in own)
    total = sum(freedom * fmean(min(one, most) for one in own) for freedom, own in pairs)
    return max(_MIN_DRIFT, sqrt(pi) / 2 * total / degrees), degrees


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
    differences = [abs(log(a / b)) for a, b in combinations(ratios, 2)]
    return sqrt(pi) / 2 * fmean(differences) * median_share(len(ratios))


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


def point_error(point: StepTime, drift: float) -> float:
    """Relative standard error of a point's median: drift, and its own steps where not revisited."""
    if len(point.visits) > 1:
        return drift * median_share(len(point.visits))
    # Of a median of steps, from their quartiles, as of a normal sample.
    deviation = (point.step_high - point.step_low) / QUARTILES_PER_DEVIATION / point.step_seconds
    return hypot(drift, deviation * median_share(point.repeats))


def point_seconds(point: StepTime) -> float:
    """A point's whole step, in seconds: the median over its visits."""
    return median(point.visits) if point.visits else point.step_seconds
