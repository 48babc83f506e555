"""The page's part on a plan of several rows: resolution, batches and rate over the epochs."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import EpochRecord, Plan
from batchwright.records.text.formatting import number
from batchwright.reporting.data.axes import Axis, evenly, linear_axis, log_axis
from batchwright.reporting.data.plan_words import split_rows
from batchwright.reporting.data.stage_curves import StageChart, rate_stages, stage_charts, values_of
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Band, Point, Series

_STYLES = ("blue", "orange")


def stages_part(plan: Plan, epochs: Sequence[EpochRecord] = ()) -> str:
    """A chart for each quantity that the rows change; empty for a plan of one row.

    Args:
        plan: Any.
        epochs: Those that were trained; their rates are drawn on the planned one.
    """
    if len(plan.stages) < 2:
        return ""
    charts = [_chart(plan, epochs, one) for one in stage_charts(plan)]
    pairs = (markup.pair(*charts[at : at + 2], *[""] * (at + 1 == len(charts))) for at in (0, 2))
    return "<h3>Over the epochs</h3>" + "".join(pairs)


def _chart(plan: Plan, epochs: Sequence[EpochRecord], one: StageChart) -> str:
    ticks = tuple((float(at), str(at)) for at in evenly(range(plan.epochs + 1), 8))
    x = Axis("epochs", 0.0, plan.epochs, ticks)
    values = list(values_of(one))
    series = [
        Series(curve.name, style, tuple(Point(at, value, "") for at, value in curve.line), "none")
        for curve, style in zip(one.curves, _STYLES, strict=False)
    ]
    for curve, style in zip(one.curves, _STYLES, strict=False):
        starts = tuple(
            Point(at, value, f"{curve.name}: {number(value)} from epoch {int(at) + 1}")
            for at, value in curve.line[::2]
        )
        series.append(Series(curve.name, style, starts, "circle", line=False))
    if one.logarithmic:
        told = tuple(
            Point(epoch.epoch + 1, epoch.learning_rate, f"epoch {epoch.epoch + 1}: {_rate(epoch)}")
            for epoch in epochs
            if epoch.learning_rate > 0
        )
        series.append(Series("at the end of each epoch", "red", told, "diamond", line=False))
        values += [point.y for point in told]
    y = log_axis(one.label, values) if one.logarithmic else linear_axis(one.label, values)
    bands = [
        Band(f"stage {stage.index + 1} of the rate", "grey", _band(stage.start, stage.end, y))
        for stage in rate_stages(plan)
        if stage.index % 2
    ]
    return markup.xy_figure(one.title, x, y, series, bands, _table(plan))


def _rate(epoch: EpochRecord) -> str:
    return f"rate {epoch.learning_rate:.4g}"


def _band(start: float, end: float, y: Axis) -> tuple[tuple[float, float, float], ...]:
    return ((start, y.low, y.high), (end, y.low, y.high))


def _table(plan: Plan) -> str:
    _, (head, *rows) = split_rows(plan)
    return markup.table("What differs between the stages", head, rows)
