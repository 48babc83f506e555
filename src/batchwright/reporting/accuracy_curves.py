"""A plan's candidates as a picture of what they learn: predicted accuracy over training time.

One description for the page, the service and the figure, which only draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.reporting.plan_curves import ClusterCurve, CurvePoint, PlanCurves, Range, top_of

_MOST_NAMED = 9  # batches that are written beside their points
_NEAREST = 0.1  # between two of them, as a share of the picture


@dataclass(frozen=True)
class AccuracyPoint:
    """A candidate: seconds of training, and held-out accuracy at its end in percent.

    ``named`` says whether its batch is written beside it.
    """

    candidate: CurvePoint
    seconds: Range
    accuracy: Range
    named: bool = False


@dataclass(frozen=True)
class AccuracyPicture:
    """What is drawn.

    Attributes:
        lines: For each cluster of the curves its candidates, batches rising.
        frontier: Places (seconds, percent) of a line in steps: what can be had in that time.
        band: Lowest and highest accuracy, in percent, that `goal.accuracy_tolerance` takes for
            equal to the best.
        seconds: Where the picture ends.
    """

    lines: tuple[tuple[AccuracyPoint, ...], ...]
    frontier: tuple[tuple[float, float], ...]
    band: tuple[float, float]
    seconds: float


def accuracy_picture(curves: PlanCurves) -> AccuracyPicture | None:
    """The picture of a plan; `None` where accuracy is not known of two candidates."""
    right = top_of(curves, "seconds") if curves.clusters else 0.0
    lines = [_line(cluster, right) for cluster in curves.clusters]
    drawn = [one for line in lines for one in line]
    allowed = [one for one in drawn if not one.candidate.refused]
    if len(drawn) < 2 or not allowed:
        return None
    best = max(one.accuracy[0] for one in allowed)
    named = _named(drawn, right)
    return AccuracyPicture(
        lines=tuple(
            tuple(AccuracyPoint(*_parts(one), named=one in named) for one in line) for line in lines
        ),
        frontier=_frontier(allowed, right),
        band=(best - 100 * curves.accuracy_tolerance, best),
        seconds=right,
    )


def _line(cluster: ClusterCurve, right: float) -> list[AccuracyPoint]:
    return [
        AccuracyPoint(one, one.seconds, _percent(one.accuracy))
        for one in cluster.points
        if one.accuracy is not None and one.seconds[0] <= right
    ]


def _percent(share: Range) -> Range:
    value, low, high = (100 * end for end in share)
    return value, low, high


def _parts(one: AccuracyPoint) -> tuple[CurvePoint, Range, Range]:
    return one.candidate, one.seconds, one.accuracy


def _frontier(allowed: Sequence[AccuracyPoint], right: float) -> tuple[tuple[float, float], ...]:
    """The highest accuracy of all that take no longer, in steps up to the right end."""
    steps: list[tuple[float, float]] = []
    for one in sorted(allowed, key=lambda one: (one.seconds[0], -one.accuracy[0])):
        seconds, accuracy = one.seconds[0], one.accuracy[0]
        if not steps or accuracy > steps[-1][1]:
            steps += [(seconds, steps[-1][1])] if steps else []
            steps.append((seconds, accuracy))
    return (*steps, (right, steps[-1][1]))


def _named(drawn: Sequence[AccuracyPoint], right: float) -> list[AccuracyPoint]:
    """The chosen candidate, then the ends of the frontier, then as many others as have room."""
    values = [one.accuracy[0] for one in drawn]
    tall = (max(values) - min(values)) or 1.0
    best = max(drawn, key=lambda one: one.accuracy[0])
    quickest = min(drawn, key=lambda one: one.seconds[0])
    chosen = [one for one in drawn if one.candidate.chosen]
    named: list[AccuracyPoint] = []
    for one in (*chosen, best, quickest, *drawn):
        apart = [
            max(
                abs(one.seconds[0] - other.seconds[0]) / right,
                abs(one.accuracy[0] - other.accuracy[0]) / tall,
            )
            for other in named
        ]
        if len(named) < _MOST_NAMED and min(apart, default=1.0) >= _NEAREST:
            named.append(one)
    return named
