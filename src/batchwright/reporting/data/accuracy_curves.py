"""A plan's candidates by predicted accuracy and training time, for page, service and figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchwright.reporting.data.plan_curves import (
    ClusterCurve,
    CurvePoint,
    PlanCurves,
    Range,
    top_of,
)

_MAX_NAMED = 9  # batches that are written beside their points
_NEAREST = 0.08  # least distance of two such points, as a share of the picture
_MIN_POINTS = 8.0  # least room for accuracies beyond the candidates' own, in points


@dataclass(frozen=True)
class AccuracyPoint:
    """A candidate: seconds of training, and held-out accuracy at its end in percent.

    ``best`` says whether no candidate is as fast and more accurate, ``named`` whether its batch is
    written beside it.
    """

    candidate: CurvePoint
    seconds: Range
    accuracy: Range
    best: bool = False
    named: bool = False


@dataclass(frozen=True)
class AccuracyPicture:
    """Accuracy against time, ready to be drawn.

    Attributes:
        lines: The candidates of each cluster, batches rising.
        frontier: Points (seconds, percent) of a step line: the best accuracy within that time.
        band: Lowest and highest accuracy, in percent, that count as equal to the best by
            `goal.accuracy_tolerance`.
        seconds: Right end of the picture.
        percents: Bottom and top of the picture. Wide intervals may exceed it: most of their width
            is common to all candidates, and the picture shows their differences.
    """

    lines: tuple[tuple[AccuracyPoint, ...], ...]
    frontier: tuple[tuple[float, float], ...]
    band: tuple[float, float]
    seconds: float
    percents: tuple[float, float]


def accuracy_picture(curves: PlanCurves) -> AccuracyPicture | None:
    """The picture of a plan; `None` if fewer than two candidates have a known accuracy."""
    right = top_of(curves, "seconds") if curves.clusters else 0.0
    lines = [_line(cluster, right) for cluster in curves.clusters]
    drawn = [one for line in lines for one in line]
    allowed = [one for one in drawn if not one.candidate.refused]
    if len(drawn) < 2 or not allowed:
        return None
    best = _best(allowed)
    named, best_ones = ({id(one) for one in ones} for ones in (_named(drawn, best, right), best))
    top = best[-1].accuracy[0]
    steps = [(best[0].seconds[0], best[0].accuracy[0])]
    for one in best[1:]:
        steps += [(one.seconds[0], steps[-1][1]), (one.seconds[0], one.accuracy[0])]
    return AccuracyPicture(
        lines=tuple(
            tuple(replace(one, best=id(one) in best_ones, named=id(one) in named) for one in line)
            for line in lines
        ),
        frontier=(*steps, (right, top)),
        band=(top - 100 * curves.accuracy_tolerance, top),
        seconds=right,
        percents=_ends(drawn),
    )


def _line(cluster: ClusterCurve, right: float) -> list[AccuracyPoint]:
    return [
        AccuracyPoint(one, one.seconds, (100 * value, 100 * low, 100 * high))
        for one in cluster.points
        if one.accuracy is not None and one.seconds[0] <= right
        for value, low, high in [one.accuracy]
    ]


def _ends(drawn: Sequence[AccuracyPoint]) -> tuple[float, float]:
    values = [one.accuracy[0] for one in drawn]
    low, high = min(values), max(values)
    room = max(_MIN_POINTS, high - low) / 2
    chosen = [one.accuracy for one in drawn if one.candidate.chosen]
    lowest = min((end for _, end, _ in chosen), default=max(0.0, low - room))
    highest = max((end for _, _, end in chosen), default=min(100.0, high + room))
    return min(low, max(lowest, low - room)), max(high, min(highest, high + room))


def _best(allowed: Sequence[AccuracyPoint]) -> list[AccuracyPoint]:
    """The Pareto frontier by rising time: each is more accurate than all faster candidates."""
    found: list[AccuracyPoint] = []
    for one in sorted(allowed, key=lambda one: (one.seconds[0], -one.accuracy[0])):
        if not found or one.accuracy[0] > found[-1].accuracy[0]:
            found.append(one)
    return found


def _named(
    drawn: Sequence[AccuracyPoint], best: Sequence[AccuracyPoint], right: float
) -> list[AccuracyPoint]:
    """The candidates to name: the chosen one, the frontier's ends, and others of it with room."""
    low, high = _ends(drawn)
    chosen = [one for one in drawn if one.candidate.chosen]
    named: list[AccuracyPoint] = []
    for one in (*chosen, best[0], best[-1], *best):
        apart = [
            max(
                abs(one.seconds[0] - other.seconds[0]) / right,
                abs(one.accuracy[0] - other.accuracy[0]) / (high - low),
            )
            for other in named
        ]
        if len(named) < _MAX_NAMED and min(apart, default=1.0) >= _NEAREST:
            named.append(one)
    return named
