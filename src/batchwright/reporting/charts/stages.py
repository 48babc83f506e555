"""Charts of a plan's stages over the epochs: resolution, batches, rate and dropout, as steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from batchwright.records import EpochRecord, Plan, RateSchedule
from batchwright.records.lines.run_lines import StepLine
from batchwright.records.text.formatting import number
from batchwright.reporting.charts.chart import (
    Axis,
    Band,
    Chart,
    Point,
    Series,
    heights,
    linear_axis,
    log_axis,
    plan_axis,
)
from batchwright.reporting.data.live_run import RunLines
from batchwright.reporting.data.round_curves import large_workers
from batchwright.reporting.data.worker_curves import spread

_MAX_POINTS = 120  # of one line
_MAX_SHADES = 40  # shaded rate stages
_SPAN = 30.0  # largest over smallest rate from which on the axis is logarithmic

Curves = Sequence[tuple[str, Sequence[float]]]  # name, and a value for each stage of the plan


def stage_charts(plan: Plan, epochs: Sequence[EpochRecord] = ()) -> list[Chart]:
    """Resolution, batches and rate of the stages, and dropout if there is any.

    Args:
        plan: The plan.
        epochs: Trained epochs, whose rates are drawn on the planned one.
    """
    rows = plan.stages
    charts = [
        _by_row(plan, "Resolution", "pixels", [("resolution", [row.resolution for row in rows])]),
        _by_row(plan, "Local batch", "samples per step", _local_batches(plan)),
        _rates(plan, epochs),
    ]
    if any(row.dropout for row in rows):
        dropout = [("dropout", [row.dropout for row in rows])]
        charts.append(_by_row(plan, "Dropout", "share", dropout))
    return charts


def changes(values: Iterable[float]) -> bool:
    """Whether values differ, so that a chart of them is useful."""
    listed = list(values)
    return bool(listed) and max(listed) - min(listed) > 1e-9 * abs(max(listed))


def rate_stages(plan: Plan) -> list[tuple[int, int]]:
    """The rate stages, each one stage of the plan or more: (first, last) in epochs."""
    stages = groupby(plan.stages, key=lambda row: row.rate_stage)
    lengths = [sum(row.epochs for row in rows) for _, rows in stages]
    return [(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def _local_batches(plan: Plan) -> Curves:
    """The local batches: large and small ones, or largest and smallest, or that of all workers."""
    large, sizes = large_workers(plan), [row.local_batch_sizes for row in plan.stages]
    if plan.server is not None and 0 < large < plan.workers:
        return [("large", [one[0] for one in sizes]), ("small", [one[large] for one in sizes])]
    most, least = [max(one) for one in sizes], [min(one) for one in sizes]
    if most == least:
        return [("each worker", most)]
    return [("largest", most), ("smallest", least)]


def _by_row(plan: Plan, title: str, label: str, curves: Curves) -> Chart:
    """A step line for each curve, with marks where stages begin."""
    lines = _lines(_spans(plan), curves)
    starts = [
        Series(
            one.name,
            one.style,
            tuple(
                replace(p, title=f"{one.name}: {number(p.y)} from epoch {int(p.x) + 1}")
                for p in one.points[::2]
            ),
            line=False,
            only="page",
        )
        for one in lines
    ]
    y = linear_axis(label, heights(lines))
    return Chart(title, plan_axis(plan.epochs), y, [*lines, *starts], _shades(rate_stages(plan), y))


def _rates(plan: Plan, epochs: Sequence[EpochRecord]) -> Chart:
    planned = [("planned", [row.learning_rate for row in plan.stages])]
    chart = _by_row(plan, "Learning rate", "per step", planned)
    trained = tuple(
        Point(
            one.epoch + 1,
            one.learning_rate,
            f"epoch {one.epoch + 1}: rate {one.learning_rate:.4g}",
        )
        for one in spread(epochs, _MAX_POINTS)
        if one.learning_rate > 0
    )
    marks = Series("at the end of each epoch", "red", trained, "diamond", line=False)
    series = [*chart.series, marks]
    y = log_axis("per step", heights(series))
    return replace(chart, y=y, series=series, bands=_shades(rate_stages(plan), y))


def _spans(plan: Plan) -> list[tuple[int, int]]:
    """Start and end of each stage, in epochs since the start."""
    ends = accumulate(row.epochs for row in plan.stages)
    return [(end - row.epochs, end) for row, end in zip(plan.stages, ends, strict=True)]


def _lines(spans: Sequence[tuple[int, int]], curves: Curves) -> list[Series]:
    """A step line for each curve, with two points for each stage."""
    lines = []
    for (name, values), style in zip(curves, ("blue", "orange"), strict=False):
        rows = zip(spans, values, strict=True)
        points = tuple(Point(at, value) for ends, value in rows for at in ends)
        lines.append(Series(name, style, points, "none", dashed=style == "orange"))
    return lines


def _shades(stages: Iterable[tuple[int, int]], y: Axis) -> list[Band]:
    """Every second rate stage, shaded; none if there are too many to distinguish."""
    stages = list(stages)
    if len(stages) > _MAX_SHADES:
        return []
    return [
        Band(f"stage {at} of the rate", "grey", tuple((end, y.low, y.high) for end in ends))
        for at, ends in enumerate(stages, 1)
        if at % 2 == 0
    ]


def at_own_values(chart: Chart) -> Chart:
    """The chart with ticks at 0 and at its own values that have room, the highest first."""
    values = heights(chart.series)
    kept: list[float] = []
    for value in sorted({0, *values}, reverse=True):
        if all(other - value >= 0.15 * max(values) for other in kept):
            kept.append(value)
    ticks = tuple((value, f"{value:,g}") for value in kept)
    return replace(chart, y=Axis(chart.y.label, 0.0, 1.12 * max(values), ticks))


# ------------------------------------------------------------------------------------ the schedule


def schedule_charts(schedule: RateSchedule) -> list[Chart]:
    """The rate; with several stages also resolution and batch."""
    x, rows, rule = plan_axis(schedule.epochs), schedule.rows, schedule.rule
    stages = [
        (ones[0].start, ones[-1].end)
        for ones in (list(of) for _, of in groupby(rows, key=lambda row: row.rate_stage))
    ]
    planned = tuple(Point(one.epoch, one.learning_rate) for one in schedule.points)
    rates = [one.y for one in planned]
    tops = [one.learning_rate * rows[one.row].most for one in schedule.points]
    falls = min(rates) > 0 and max(rates) > _SPAN * min(rates) and rule.decay != "one-cycle"
    y = (log_axis if falls else linear_axis)("per step", [*rates, *tops])
    bands = _shades(stages, y)
    if tops != rates:
        edges = tuple((p.x, p.y, top) for p, top in zip(planned, tops, strict=True))
        bands.append(Band("as far as measured gain and factors may raise it", "orange", edges))
    series = [Series("planned", "blue", planned, "none")]
    if 0 < rule.warmup_epochs < schedule.epochs:
        ends = tuple(Point(rule.warmup_epochs, end) for end in (y.low, y.high))
        name = "peak" if rule.decay == "one-cycle" else "end of warm-up"
        series.append(Series(name, "grey", ends, "none"))
    charts = [Chart("Learning rate", x, y, series, bands)]
    if len(rows) == 1:
        return charts
    sizes = [row.local_batch_sizes for row in rows]
    batches = [("global batch", [sum(one) for one in sizes])]
    if schedule.served:
        batches = [
            ("largest", [max(one) for one in sizes]),
            ("smallest", [min(one) for one in sizes]),
        ]
    below: list[tuple[str, str, Curves]] = [
        ("Resolution", "pixels", [("resolution", [row.resolution for row in rows])]),
        ("Local batches" if schedule.served else "Global batch", "samples per step", batches),
    ]
    for title, label, curves in below:
        lines = _lines([(row.start, row.end) for row in rows], curves)
        y = linear_axis(label, heights(lines))
        charts.append(at_own_values(Chart(title, x, y, lines, _shades(stages, y))))
    return charts


# ------------------------------------------------------------------------------ a running training


def rate_chart(
    plan: Plan, schedule: RateSchedule, epochs: Sequence[EpochRecord], lines: RunLines
) -> Chart:
    """The rate over the epochs, planned and trained."""
    planned = tuple(Point(one.epoch, one.learning_rate) for one in schedule.points)
    happens = tuple(
        Point(one.epoch, one.learning_rate, f"{one.what}: rate {one.learning_rate:.4g} planned")
        for one in schedule.points
        if one.what
    )
    trained = _over_steps(plan, lines, lambda line: line.learning_rate, "rate {:.4g}".format)
    trained += [
        Point(
            one.epoch + 1,
            one.learning_rate,
            f"end of epoch {one.epoch + 1}: rate {one.learning_rate:.4g}",
        )
        for one in epochs
    ]
    trained.sort(key=lambda point: point.x)
    series = [
        Series("planned", "blue", planned, "none"),
        Series("planned", "blue", happens, line=False),
        Series("as trained", "red", _thinned(trained), "diamond", line=False),
    ]
    y = linear_axis("per step", heights(series))
    return Chart("Learning rate", plan_axis(plan.epochs), y, series)


def planned_chart(
    plan: Plan,
    title: str,
    label: str,
    planned: Sequence[float],
    trained: Sequence[tuple[int, float]],
    unit: str,
) -> Chart:
    """A quantity of the plan's stages: planned as steps, trained as a mark for each epoch."""
    marks = [Point(at + 0.5, v, f"epoch {at + 1}: {v:,.0f} {unit}") for at, v in trained]
    series = [
        *_lines(_spans(plan), [("planned", planned)]),
        Series("as trained", "red", _thinned(marks), "diamond", line=False),
    ]
    y = linear_axis(label, [*planned, *(value for _, value in trained)])
    return Chart(title, plan_axis(plan.epochs), y, series)


def speed_chart(plan: Plan, epochs: Sequence[EpochRecord], lines: RunLines) -> Chart | None:
    """Images per second, by the lines of steps and for whole epochs; `None` if unknown."""
    of_steps = _over_steps(
        plan, lines, lambda line: line.samples_per_second, lambda value: f"{number(value)} images/s"
    )
    of_epochs = [
        Point(one.epoch + 0.5, speed, f"epoch {one.epoch + 1}: {number(speed)} images/s")
        for one in epochs
        if (speed := one.samples_per_second) is not None
    ]
    if not of_steps and not of_epochs:
        return None
    series = [
        Series("so far in the epoch", "grey", _thinned(of_steps), line=False),
        Series("whole epochs", "green", _thinned(of_epochs), "square"),
    ]
    y = linear_axis("images per second", heights(series))
    return Chart("Speed", plan_axis(plan.epochs), y, series)


def _over_steps(
    plan: Plan,
    lines: RunLines,
    value_of: Callable[[StepLine], float],
    say: Callable[[float], str],
) -> list[Point]:
    """A value of the lines of steps, over the epochs since the start of the run."""
    return [
        Point(
            line.epoch + min(1.0, line.step / line.steps),
            value_of(line),
            f"epoch {line.epoch + 1}, step {line.step}: {say(value_of(line))}",
        )
        for line in lines.steps
        if line.steps and line.epoch < plan.epochs
    ]


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(spread(points, _MAX_POINTS))
