"""Charts of a plan's candidates: time, cost and accuracy, by cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from batchwright.records.text.formatting import counted_points, duration, number, percent
from batchwright.reporting.charts.chart import (
    LOOKS,
    Band,
    Chart,
    Marker,
    Point,
    Series,
    batch_axis,
    linear_axis,
    ratio_axis,
)
from batchwright.reporting.data.accuracy_curves import AccuracyPicture, AccuracyPoint
from batchwright.reporting.data.plan_curves import (
    BETWEEN,
    ClusterCurve,
    CurvePoint,
    MeasuredPoint,
    PlanCurves,
    Range,
    Row,
    smooth,
    top_of,
    units_of,
)

Quantity = Literal["seconds", "cost"]
Placed = tuple[ClusterCurve, CurvePoint]


# ------------------------------------------------------------------ time, or cost, over the batch


@dataclass(frozen=True)
class _Look:
    """How a cluster is drawn; ``scale`` is the unit, ``top`` the end of the y axis in it."""

    style: str
    marker: Marker
    quantity: Quantity
    scale: float
    top: float

    def of(self, point: CurvePoint | MeasuredPoint) -> Range:
        """Value and ends of a point, in the chart's unit."""
        value, low, high = (end / self.scale for end in getattr(point, self.quantity))
        return value, low, high


def batch_chart(curves: PlanCurves, quantity: Quantity) -> Chart:
    """Time or cost of the training over the global batch, a curve for each cluster.

    In files, parts of a curve beyond the measurements are dashed, measurements and knees have
    intervals, and the goal's limits are drawn, too.
    """
    time, cost = units_of(curves)
    if quantity == "seconds":
        (scale, unit), limit, goal = time, curves.deadline, "goal.deadline"
        title, label = "Training time against global batch", f"training ({unit})"
    else:
        (scale, unit), limit, goal = cost, curves.max_cost, "goal.max_cost"
        title, label = "Cost against global batch", f"cost ({unit})"
        limit = limit if curves.priced else None
    points = [one for cluster in curves.clusters for one in cluster.points]
    batches = [one.global_batch_size for one in points]
    chosen = [one.global_batch_size for one in points if one.chosen]
    x = batch_axis("global batch (samples per step)", batches, chosen)
    top = top_of(curves, quantity) / scale
    measured = [one for cluster in curves.clusters for one in cluster.measured]
    lows = [getattr(one, quantity)[0] for one in (*points, *measured)]
    lows += [getattr(one, quantity)[1] for one in points if one.chosen]
    y = ratio_axis(label, [min(lows) / scale, top])
    series: list[Series] = []
    bands: list[Band] = []
    for cluster, (style, marker) in zip(curves.clusters, LOOKS, strict=False):
        look = _Look(style, marker, quantity, scale, y.high)
        rows = smooth([(one.global_batch_size, *look.of(one)) for one in cluster.points])
        edges = tuple(
            (at, max(low, y.low), min(high, y.high)) for at, _, low, high in rows if low <= y.high
        )
        bands += [Band("95 % interval", style, edges)] if edges else []
        series += [*_curve(cluster, rows, look), *_marks(cluster, look)]
    if limit is not None and y.low <= limit / scale <= y.high:
        ends = tuple(Point(at, limit / scale) for at in (x.low, x.high))
        series.append(Series(goal, "grey", ends, "none", only="file"))
    return Chart(title, x, y, series, bands)


def _twice(on_page: Series, in_file: Sequence[Point]) -> list[Series]:
    """A series with other points (with intervals) in a file than on a page."""
    return [replace(on_page, only="page"), replace(on_page, points=tuple(in_file), only="file")]


def _curve(cluster: ClusterCurve, rows: Sequence[Row], look: _Look) -> list[Series]:
    """The line of a cluster; in a file dashed between candidates that are not both measured."""
    line = tuple(Point(at, value) for at, value, _, _ in rows if value <= look.top)
    if len(line) == 1:
        alone = Series(cluster.label, look.style, (replace(line[0], title=cluster.label),))
        alone = replace(alone, marker=look.marker)
        return _twice(alone, [replace(line[0], up=rows[-1][2:])]) if len(rows) == 1 else [alone]
    whole = Series(cluster.label, look.style, line, "none", only="page")
    unmeasured = [one.extrapolated or one.assumed for one in cluster.points]
    parts: list[tuple[bool, list[Point]]] = []
    for index, (left, right) in enumerate(pairwise(unmeasured)):
        some = rows[index * BETWEEN : (index + 1) * BETWEEN + 1]
        if not parts or parts[-1][0] != (left or right):
            parts.append((left or right, []))
        parts[-1][1].extend(Point(at, value) for at, value, _, _ in some)
    solid = any(points for dashed, points in parts if not dashed)
    return [whole] + [
        Series(
            "beyond what was measured" if dashed and solid else cluster.label,
            *(look.style, tuple(points), "none"),
            only="file",
            dashed=dashed,
        )
        for dashed, points in parts
    ]


def _marks(cluster: ClusterCurve, look: _Look) -> list[Series]:
    """Measured points, knee and chosen batch of a cluster, those inside the chart."""
    found = [one for one in cluster.measured if look.of(one)[0] <= look.top]
    measured = Series(
        f"measured, {cluster.label}",
        look.style,
        tuple(
            Point(
                one.global_batch_size,
                look.of(one)[0],
                f"{cluster.label}, batch {one.global_batch_size}: "
                f"{number(look.of(one)[0])} measured",
            )
            for one in found
        ),
        look.marker,
        line=False,
    )
    ends = [
        replace(point, up=look.of(one)[1:])
        for point, one in zip(measured.points, found, strict=True)
    ]
    knee, ring = [], []
    for one in cluster.points:
        value = look.of(one)[0]
        words = f"{cluster.label}, batch {one.global_batch_size}: {number(value)} predicted"
        if value <= look.top and is_knee(cluster, one):
            knee.append(Point(one.global_batch_size, value, f"knee: {words}"))
        if one.chosen:
            ring.append(Point(one.global_batch_size, value, f"chosen: {words}"))
    range_ = None
    if cluster.knee and cluster.knee.low is not None and cluster.knee.high is not None:
        first, last = (cluster.points[at].global_batch_size for at in (0, -1))
        range_ = max(cluster.knee.low, first), min(cluster.knee.high, last)
    return [
        *_twice(measured, ends),
        *_twice(
            Series("knee", look.style, tuple(knee), "star", line=False),
            [replace(one, across=range_) for one in knee],
        ),
        Series("chosen", "ink", tuple(ring), "ring", line=False),
    ]


def is_knee(cluster: ClusterCurve, one: CurvePoint) -> bool:
    """Whether a candidate is the knee of its cluster."""
    return cluster.knee is not None and cluster.knee.global_batch_size == one.global_batch_size


# ------------------------------------------------------------------------- accuracy over the time


def accuracy_chart(curves: PlanCurves, picture: AccuracyPicture) -> Chart:
    """Predicted accuracy over training time, a line for each cluster."""
    (second, unit), _ = units_of(curves)
    drawn = [one.seconds[0] / second for line in picture.lines for one in line]
    x = ratio_axis(f"training ({unit})", [*drawn, picture.seconds / second])
    low, high = picture.band
    series = []
    for cluster, (style, marker), line in zip(curves.clusters, LOOKS, picture.lines, strict=False):
        for name, colour, refused in ((cluster.label, style, False), ("refused", "hollow", True)):
            points = tuple(
                _accuracy_point(cluster, one, second)
                for one in line
                if bool(one.candidate.refused) is refused
            )
            series.append(Series(name, colour, points, marker, line=not refused))
    steps = tuple(Point(seconds / second, share) for seconds, share in picture.frontier)
    series.append(Series("most in that time", "grey", steps, "none"))
    ring = tuple(
        Point(
            one.seconds[0] / second,
            one.accuracy[0],
            "chosen",
            (one.seconds[1] / second, one.seconds[2] / second),
            one.accuracy[1:],
        )
        for line in picture.lines
        for one in line
        if one.candidate.chosen
    )
    series.append(Series("chosen, 95 % intervals", "ink", ring, "ring", line=False))
    within = f"within {counted_points(curves.accuracy_tolerance)} of the best"
    return Chart(
        "Accuracy over time: every candidate",
        x,
        linear_axis("predicted accuracy (%)", picture.percents, from_zero=False),
        series,
        [Band(within, "green", ((x.low, low, high), (x.high, low, high)))],
    )


def _accuracy_point(cluster: ClusterCurve, one: AccuracyPoint, second: float) -> Point:
    batch = f"{one.candidate.global_batch_size:,}"
    value, low, high = (percent(end / 100) for end in one.accuracy)
    words = (
        f"{cluster.label}, batch {batch}: {value} ({low} to {high}) in "
        f"{duration(one.seconds[0])}{_refused(one.candidate)}"
    )
    return Point(one.seconds[0] / second, one.accuracy[0], words, label=batch * one.named)


def _refused(one: CurvePoint) -> str:
    return f"; refused: {one.refused}" if one.refused else ""


# ------------------------------------------------------------------------------ cost over the time


def frontier(curves: PlanCurves) -> list[Placed]:
    """The Pareto frontier of time and cost, time rising, without refused candidates."""
    found: list[Placed] = []
    allowed = [
        (cluster, one) for cluster in curves.clusters for one in cluster.points if not one.refused
    ]
    for cluster, one in sorted(allowed, key=lambda at: (at[1].seconds[0], at[1].cost[0])):
        if not found or one.cost[0] < found[-1][1].cost[0]:
            found.append((cluster, one))
    return found


def pareto_chart(curves: PlanCurves) -> Chart:
    """Cost over time: the frontier as a line with intervals in both directions, and the others."""
    (second, unit), (worth, currency) = units_of(curves)
    best = frontier(curves)
    on_it = {id(one) for _, one in best}

    def at(one: CurvePoint, title: str = "") -> Point:
        return Point(one.seconds[0] / second, one.cost[0] / worth, title)

    def candidate(cluster: ClusterCurve, one: CurvePoint) -> Point:
        words = _pareto_words(cluster, one)
        if id(one) not in on_it:
            return at(one, words)
        (_, left, until), (_, low, high) = one.seconds, one.cost
        return replace(
            at(one, f"{words}; on the frontier"),
            across=(left / second, until / second),
            up=(low / worth, high / worth),
        )

    line = tuple(at(one) for _, one in best)
    series = [Series("frontier: none is better in both", "grey", line, "none")]
    chosen: list[Point] = []
    for cluster, (style, marker) in zip(curves.clusters, LOOKS, strict=False):
        ones = cluster.points
        for name, colour, refused in ((cluster.label, style, False), ("refused", "hollow", True)):
            points = tuple(candidate(cluster, o) for o in ones if bool(o.refused) is refused)
            series.append(Series(name, colour, points, marker, line=False))
        knees = tuple(at(o, _knee_words(cluster, o)) for o in ones if is_knee(cluster, o))
        series.append(Series("knee", style, knees, "star", line=False))
        chosen += [at(o, f"chosen: {_pareto_words(cluster, o)}") for o in ones if o.chosen]
    series.append(Series("chosen", "ink", tuple(chosen), "ring", line=False))
    # Candidates' times differ by large factors, so equal ratios get equal distances.
    drawn = [point for one in series for point in one.points]
    ends = [end for point in drawn for end in (point.x, *(point.across or ()))]
    x = ratio_axis(f"training ({unit})", ends)
    ends = [end for point in drawn for end in (point.y, *(point.up or ()))]
    y = ratio_axis(f"cost ({currency})", ends)
    return Chart("Cost over time: every candidate", x, y, series)


def _pareto_words(cluster: ClusterCurve, one: CurvePoint) -> str:
    low, high = (duration(end) for end in one.seconds[1:])
    return (
        f"{cluster.label}, batch {one.global_batch_size:,}: {duration(one.seconds[0])} "
        f"({low} to {high}), cost {number(one.cost[0])}{_refused(one)}"
    )


def _knee_words(cluster: ClusterCurve, one: CurvePoint) -> str:
    words, knee = f"knee: {_pareto_words(cluster, one)}", cluster.knee
    if knee is None or knee.low is None or knee.high is None:
        return words
    return f"{words}; it lies between {knee.low:,.0f} and {knee.high:,.0f}"
