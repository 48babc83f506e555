"""The page's part on how a plan was chosen: curves of time and cost, knees, and the candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.records import Plan, Prediction, Profile
from batchwright.records.text.formatting import (
    between,
    counted_points,
    duration,
    in_bytes,
    in_seconds,
    number,
    percent,
    shares_between,
)
from batchwright.records.text.plan_text import (
    candidate_words,
    cluster_words,
    kept_candidates,
    knee_rows,
)
from batchwright.reporting.data.accuracy_curves import AccuracyPoint, accuracy_picture
from batchwright.reporting.data.axes import batch_axis, linear_axis
from batchwright.reporting.data.plan_curves import (
    ClusterCurve,
    PlanCurves,
    plan_curves,
    smooth,
    top_of,
    units_of,
)
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Band, Marker, Point, Series

_STYLES: tuple[tuple[str, Marker], ...] = (
    ("blue", "circle"),
    ("red", "square"),
    ("green", "diamond"),
    ("purple", "circle"),
    ("orange", "square"),
)


def choice_charts(plan: Plan, profile: Profile | None, *, learning: bool = True) -> str:
    """Time and cost of the training over the global batch, a curve for each cluster; or nothing.

    Before them, where it is known and ``learning`` is asked for, the accuracy.
    """
    curves = plan_curves(plan, [profile] if profile else [])
    if not curves.clusters:
        return ""
    (seconds, unit), (worth, currency) = units_of(curves)
    table = candidates_table(plan)
    learnt = accuracy_chart(plan) if learning else ""
    if learnt:
        learnt = f"<h3>What is learnt in the time</h3>{learnt}"
    time, cost = f"training ({unit})", f"cost ({currency})"
    charts = markup.pair(
        _chart(curves, "seconds", seconds, "Training time against global batch", time, table),
        _chart(curves, "cost", worth, "Cost against global batch", cost, table),
    )
    head = "<h3>Time and cost of the training, by cluster</h3>"
    return f"{learnt}{head}{charts}{_knees(plan)}"


def accuracy_chart(plan: Plan) -> str:
    """Predicted accuracy over training time, a line for each cluster; or nothing."""
    curves = plan_curves(plan)
    picture = accuracy_picture(curves)
    if picture is None:
        return ""
    (second, unit), _ = units_of(curves)
    x = linear_axis(f"training ({unit})", [picture.seconds / second])
    low, high = picture.band
    series = []
    for cluster, (style, marker), line in zip(
        curves.clusters, _STYLES, picture.lines, strict=False
    ):
        for name, look, refused in ((cluster.label, style, False), ("refused", "hollow", True)):
            points = tuple(
                _learnt_point(cluster, one, second)
                for one in line
                if bool(one.candidate.refused) is refused
            )
            series.append(Series(name, look, points, marker, line=not refused))
    steps = tuple(Point(seconds / second, share, "") for seconds, share in picture.frontier)
    series.append(Series("most in that time", "grey", steps, "none"))
    chosen = [one for line in picture.lines for one in line if one.candidate.chosen]
    ring = tuple(
        Point(
            one.seconds[0] / second,
            one.accuracy[0],
            "chosen",
            (one.seconds[1] / second, one.seconds[2] / second),
            one.accuracy[1:],
        )
        for one in chosen
    )
    series.append(Series("chosen, 95 % intervals", "ink", ring, "ring", line=False))
    within = f"within {counted_points(plan.job.goal.accuracy_tolerance)} of the best"
    chart = markup.xy_figure(
        "Accuracy over time: every candidate",
        x,
        linear_axis("predicted accuracy (%)", picture.percents, from_zero=False),
        series,
        [Band(within, "green", ((x.low, low, high), (x.high, low, high)))],
        candidates_table(plan),
    )
    drawn = [
        (cluster, one)
        for cluster, line in zip(curves.clusters, picture.lines, strict=True)
        for one in line
    ]
    rows = [
        [
            cluster.label,
            f"{one.candidate.global_batch_size:,}",
            duration(one.seconds[0]),
            "{:.1f} ({:.1f} to {:.1f})".format(*one.accuracy),
            "chosen" if one.candidate.chosen else "",
        ]
        for cluster, one in sorted(drawn, key=lambda pair: pair[1].seconds[0])
        if one.best or one.candidate.chosen
    ]
    table = markup.table(
        "The most accurate in the time, with 95 % intervals",
        ["cluster", "batch", "training", "accuracy (%)", "it is"],
        rows,
    )
    return markup.pair(chart, f"<div>{table}</div>")


def _learnt_point(cluster: ClusterCurve, one: AccuracyPoint, second: float) -> Point:
    batch = f"{one.candidate.global_batch_size:,}"
    value, low, high = (percent(end / 100) for end in one.accuracy)
    refused = f"; refused: {one.candidate.refused}" if one.candidate.refused else ""
    words = (
        f"{cluster.label}, batch {batch}: {value} ({low} to {high}) in "
        f"{duration(one.seconds[0])}{refused}"
    )
    return Point(one.seconds[0] / second, one.accuracy[0], words, label=batch if one.named else "")


def candidates_table(plan: Plan) -> str:
    """The candidates that a choice could fall on, a row for each."""
    return markup.table(*_candidates(plan))


def _knees(plan: Plan) -> str:
    """Where more batch stops paying, cluster by cluster; or nothing."""
    if not plan.knees:
        return ""
    gain = percent(plan.job.goal.doubling_gain)
    head, *rows = knee_rows(plan)
    table = markup.table(f"Knees: doubling the batch beyond saves at most {gain}", head, rows)
    return f"<details><summary>Where a larger batch stops paying</summary>{table}</details>"


def _candidates(plan: Plan) -> tuple[str, Sequence[str], Iterable[Sequence[str]]]:
    kept = kept_candidates(plan)
    left = len(plan.considered) - len(kept)
    caption = "Candidates" + (f" ({left:,} more in plan.json)" if left else "")
    aimed = any(one.target_seconds for one in kept)
    head = ["global batch", "cluster", "side", "steps", "s / step", "s / epoch", "s of training"]
    head += [*(["s to target"] if aimed else []), "cost"]
    told = any(one.accuracy for one in kept)
    head += [*(["accuracy"] if told else []), "peak memory", ""]
    return caption, head, [_row(plan, one, aimed=aimed, told=told) for one in kept]


def _row(plan: Plan, one: Prediction, *, aimed: bool, told: bool) -> list[str]:
    accuracy = shares_between(one.accuracy) if one.accuracy else "-"
    target = between(one.target_seconds) if one.target_seconds else "-"
    return [
        f"{one.global_batch_size:,}",
        cluster_words(one.workers, one.kinds),
        f"{one.resolution} px",
        f"{one.steps_per_epoch:,}",
        in_seconds(one.step_seconds),
        in_seconds(one.epoch_seconds),
        between(one.train_seconds) if one.train_seconds else "-",
        *([target] if aimed else []),
        between(one.cost) if one.cost else "-",
        *([accuracy] if told else []),
        in_bytes(one.peak_bytes),
        candidate_words(plan, one),
    ]


# --------------------------------------------------------------------------------------- a chart


@dataclass(frozen=True)
class _Look:
    """How one cluster is drawn; ``scale`` is the unit, ``top`` where the chart ends in it."""

    style: str
    marker: Marker
    quantity: str
    scale: float
    top: float

    def of(self, point: Any) -> tuple[float, float, float]:
        """Value and ends of a point."""
        value, low, high = (end / self.scale for end in getattr(point, self.quantity))
        return value, low, high


def _chart(
    curves: PlanCurves, quantity: str, scale: float, title: str, label: str, table: str
) -> str:
    top = linear_axis("", [top_of(curves, quantity) / scale]).high
    series: list[Series] = []
    bands: list[Band] = []
    for cluster, (style, marker) in zip(curves.clusters, _STYLES, strict=False):
        look = _Look(style, marker, quantity, scale, top)
        band, *drawn = _cluster(cluster, look)
        bands += [band] if band.edges else []
        series += drawn
    batches = [one.global_batch_size for cluster in curves.clusters for one in cluster.points]
    chosen = [
        one.global_batch_size for cluster in curves.clusters for one in cluster.points if one.chosen
    ]
    return markup.xy_figure(
        title,
        batch_axis("global batch (samples per step)", batches, chosen),
        linear_axis(label, [top]),
        series,
        bands,
        table,
    )


def _cluster(cluster: ClusterCurve, look: _Look) -> tuple[Any, ...]:
    """Band, line, measured points, knee and chosen batch of one cluster, as far as they fit."""
    rows = smooth([(one.global_batch_size, *look.of(one)) for one in cluster.points])
    line = tuple(Point(batch, value, "") for batch, value, _, _ in rows if value <= look.top)
    if len(line) == 1:
        line = (Point(line[0].x, line[0].y, cluster.label),)
    edges = tuple(
        (batch, low, min(high, look.top)) for batch, _, low, high in rows if low <= look.top
    )
    measured = tuple(
        Point(
            one.global_batch_size,
            look.of(one)[0],
            f"{cluster.label}, batch {one.global_batch_size}: {number(look.of(one)[0])} measured",
        )
        for one in cluster.measured
        if look.of(one)[0] <= look.top
    )
    knee, ring = [], []
    for one in cluster.points:
        value = look.of(one)[0]
        words = f"{cluster.label}, batch {one.global_batch_size}: {number(value)} predicted"
        at = cluster.knee.global_batch_size if cluster.knee and value <= look.top else None
        if at == one.global_batch_size:
            knee.append(Point(one.global_batch_size, value, f"knee: {words}"))
        if one.chosen:
            ring.append(Point(one.global_batch_size, value, f"chosen: {words}"))
    return (
        Band("95 % interval", look.style, edges),
        Series(cluster.label, look.style, line, "none" if len(line) > 1 else look.marker),
        Series(f"measured, {cluster.label}", look.style, measured, look.marker, line=False),
        Series("knee", look.style, tuple(knee), "star", line=False),
        Series("chosen", "ink", tuple(ring), "ring", line=False),
    )
