"""Time against cost of every candidate: what no other beats in both, the knee and what was chosen.

A candidate is a cluster with a batch. Those on the frontier are joined by a line and carry their
95 % intervals both ways; the others stand pale behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import Plan
from batchwright.records.text.formatting import duration, number
from batchwright.reporting.data.axes import linear_axis
from batchwright.reporting.data.plan_curves import (
    ClusterCurve,
    CurvePoint,
    plan_curves,
    top_of,
    units_of,
)
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Marker, Point, Series
from batchwright.reporting.pages.page_plan import candidates_table

_LOOKS: tuple[tuple[str, Marker], ...] = (
    ("blue", "circle"),
    ("red", "square"),
    ("green", "diamond"),
    ("purple", "circle"),
    ("orange", "square"),
)

_Placed = tuple[ClusterCurve, CurvePoint]


def pareto_part(plan: Plan) -> str:
    """The chart with all candidates behind it, and the frontier beside it; empty without any."""
    curves = plan_curves(plan)
    if not curves.clusters:
        return ""
    (second, unit), (worth, currency) = units_of(curves)
    placed = [(cluster, one) for cluster in curves.clusters for one in cluster.points]
    best = frontier(placed)
    # What lies far out would press the foot of the curves, which matters, into a corner.
    right, top = (top_of(curves, quantity) for quantity in ("seconds", "cost"))
    drawn = [
        (cluster, one) for cluster, one in placed if one.seconds[0] <= right and one.cost[0] <= top
    ]
    inside = [one for one in drawn if one in best]
    series: list[Series] = [_line([one for _, one in sorted(inside, key=_seconds)])]
    for cluster, (style, marker) in zip(curves.clusters, _LOOKS, strict=False):
        ones = [one for of, one in drawn if of is cluster]
        for name, look, refused in ((cluster.label, style, False), ("refused", "hollow", True)):
            points = tuple(
                _point(cluster, one, best=(cluster, one) in best)
                for one in ones
                if bool(one.refused) is refused
            )
            series.append(Series(name, look, points, marker, line=False))
        series.append(Series("knee", style, _knee(cluster, ones), "star", line=False))
    chosen = tuple(
        Point(one.seconds[0], one.cost[0], f"chosen: {_words(cluster, one)}")
        for cluster, one in drawn
        if one.chosen
    )
    series.append(Series("chosen", "ink", chosen, "ring", line=False))
    scaled = [_scaled(one, second, worth) for one in series]
    ends = ([right / second], [top / worth])
    chart = markup.xy_figure(
        "Cost over time: every candidate",
        linear_axis(f"training ({unit})", ends[0]),
        linear_axis(f"cost ({currency})", ends[1]),
        scaled,
        [],
        candidates_table(plan),
    )
    return markup.pair(chart, f"<div>{_table(best, second, worth, (unit, currency))}</div>")


def frontier(placed: Sequence[_Placed]) -> list[_Placed]:
    """What no other candidate beats in both, time rising; refused ones are left out."""
    found: list[_Placed] = []
    allowed = [one for one in placed if not one[1].refused]
    for cluster, one in sorted(allowed, key=lambda at: (at[1].seconds[0], at[1].cost[0])):
        if not found or one.cost[0] < found[-1][1].cost[0]:
            found.append((cluster, one))
    return found


def _seconds(placed: _Placed) -> float:
    return placed[1].seconds[0]


def _line(points: Sequence[CurvePoint]) -> Series:
    ends = tuple(Point(one.seconds[0], one.cost[0], "") for one in points)
    return Series("frontier: none is better in both", "grey", ends, "none")


def _point(cluster: ClusterCurve, one: CurvePoint, *, best: bool) -> Point:
    words = _words(cluster, one)
    if not best:
        return Point(one.seconds[0], one.cost[0], words)
    words = f"{words}; on the frontier"
    return Point(one.seconds[0], one.cost[0], words, one.seconds[1:], one.cost[1:])


def _knee(cluster: ClusterCurve, points: Sequence[CurvePoint]) -> tuple[Point, ...]:
    found = []
    for one in points:
        if cluster.knee is not None and _is_knee(cluster, one):
            words = f"knee: {_words(cluster, one)}"
            if cluster.knee.low is not None and cluster.knee.high is not None:
                words += f"; it lies between {cluster.knee.low:,.0f} and {cluster.knee.high:,.0f}"
            found.append(Point(one.seconds[0], one.cost[0], words))
    return tuple(found)


def _words(cluster: ClusterCurve, one: CurvePoint) -> str:
    refused = f"; refused: {one.refused}" if one.refused else ""
    low, high = (duration(end) for end in one.seconds[1:])
    return (
        f"{cluster.label}, batch {one.global_batch_size:,}: {duration(one.seconds[0])} "
        f"({low} to {high}), cost {number(one.cost[0])}{refused}"
    )


def _scaled(one: Series, second: float, worth: float) -> Series:
    """The same in the chart's units."""
    points = tuple(
        Point(
            p.x / second,
            p.y / worth,
            p.title,
            p.across and (p.across[0] / second, p.across[1] / second),
            p.up and (p.up[0] / worth, p.up[1] / worth),
        )
        for p in one.points
    )
    return Series(one.name, one.style, points, one.marker, one.line)


def _table(best: Sequence[_Placed], second: float, worth: float, units: tuple[str, str]) -> str:
    unit, currency = units
    return markup.table(
        f"The frontier, with 95 % intervals; training in {unit}, cost {_in(currency)}",
        ["cluster", "batch", "training", "cost", "it is"],
        [
            [
                cluster.label,
                f"{one.global_batch_size:,}",
                _range(one.seconds, second),
                _range(one.cost, worth),
                ", ".join(
                    word
                    for word, applies in (
                        ("chosen", one.chosen),
                        ("knee", _is_knee(cluster, one)),
                        ("extrapolated", one.extrapolated),
                        ("assumed", one.assumed),
                    )
                    if applies
                ),
            ]
            for cluster, one in best
        ],
    )


def _in(currency: str) -> str:
    return currency if currency.startswith("in ") else f"in {currency}"


def _is_knee(cluster: ClusterCurve, one: CurvePoint) -> bool:
    return cluster.knee is not None and cluster.knee.global_batch_size == one.global_batch_size


def _range(ends: tuple[float, float, float], unit: float) -> str:
    value, low, high = (number(end / unit) for end in ends)
    return f"{value} ({low} to {high})"
