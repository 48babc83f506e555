"""Charts of a run that goes on: rate, resolution and batch over the epochs, and the workers now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchwright.records import EpochRecord, Plan, RateSchedule
from batchwright.records.text.formatting import duration, number, percent
from batchwright.reporting.data.axes import Axis, evenly, linear_axis
from batchwright.reporting.data.live_run import Line, RunLines, WorkerNow, amount, whole
from batchwright.reporting.data.plan_words import range_words
from batchwright.reporting.data.worker_curves import spread
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Point, Series, bar_chart, swatch

_MOST_POINTS = 120  # of one line
_MOST_ROWS = 100  # of a table
_MOST_BARS = 16  # workers of a chart


def over_time_part(
    plan: Plan, schedule: RateSchedule, epochs: Sequence[EpochRecord], lines: RunLines
) -> str:
    """Learning rate, resolution and batches over the epochs: planned, and as trained.

    Args:
        plan: What is followed.
        schedule: Its rate over the epochs.
        epochs: Those that are finished.
        lines: What the run has told.
    """
    table = _epochs_table(epochs)
    rate = _rate_chart(plan, schedule, epochs, lines, table)
    batch = _planned_chart(
        plan,
        ("Global batch", "samples per step"),
        [float(stage.global_batch_size) for stage in plan.stages],
        [(one.epoch, float(one.global_batch_size)) for one in epochs],
        (lambda value: f"{value:,.0f} samples per step", table),
    )
    side = _planned_chart(
        plan,
        ("Resolution", "pixels"),
        [float(stage.resolution) for stage in plan.stages],
        [(one.epoch, float(one.resolution)) for one in epochs],
        (lambda value: f"{value:,.0f} px", table),
    )
    speed = _speed_chart(plan, epochs, lines)
    return markup.pair(rate, batch) + markup.pair(side, speed)


def _axis(plan: Plan) -> Axis:
    ticks = tuple((float(at), str(at)) for at in evenly(range(plan.epochs + 1), 8))
    return Axis("epochs", 0.0, plan.epochs, ticks)


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(points[index] for index in spread(len(points), _MOST_POINTS))


def _inside(plan: Plan, line: Line) -> float | None:
    """Epochs since the start of the run at a line inside one."""
    epoch, step, steps = (whole(line, key) for key in ("epoch", "step", "steps"))
    if epoch is None or step is None or not steps or epoch >= plan.epochs:
        return None
    return epoch + min(1.0, step / steps)


def _over_steps(plan: Plan, lines: RunLines, key: str, say: Callable[[float], str]) -> list[Point]:
    """A value of the step lines over the epochs."""
    found = []
    for line in lines.steps:
        at, value = _inside(plan, line), amount(line, key)
        if at is not None and value is not None:
            words = f"epoch {int(whole(line, 'epoch') or 0) + 1}, step {line['step']}: {say(value)}"
            found.append(Point(at, value, words))
    return found


def _rate_chart(
    plan: Plan,
    schedule: RateSchedule,
    epochs: Sequence[EpochRecord],
    lines: RunLines,
    table: str,
) -> str:
    planned = tuple(Point(one.epoch, one.learning_rate, "") for one in schedule.points)
    told = [one for one in schedule.points if one.what]
    happens = tuple(
        Point(one.epoch, one.learning_rate, f"{one.what}: rate {one.learning_rate:.4g} planned")
        for one in told
    )
    trained = _over_steps(plan, lines, "lr", lambda value: f"rate {value:.4g}")
    trained += [
        Point(one.epoch + 1, one.learning_rate, f"end of epoch {one.epoch + 1}: rate {_rate(one)}")
        for one in epochs
    ]
    trained.sort(key=lambda point: point.x)
    series = [
        Series("planned", "blue", planned, "none"),
        Series("planned", "blue", happens, "circle", line=False),
        Series("as trained", "red", _thinned(trained), "diamond", line=False),
    ]
    heights = [point.y for one in series for point in one.points]
    return markup.xy_figure(
        "Learning rate", _axis(plan), linear_axis("per step", heights), series, [], table
    )


def _rate(one: EpochRecord) -> str:
    return f"{one.learning_rate:.4g}"


def _planned_chart(
    plan: Plan,
    names: tuple[str, str],
    planned: Sequence[float],
    trained: Sequence[tuple[int, float]],
    told: tuple[Callable[[float], str], str],
) -> str:
    """A quantity of the plan's rows: planned as steps, trained as a mark for each epoch.

    ``names`` are the chart's and its axis's, ``told`` a value in words and the table behind.
    """
    title, label = names
    say, table = told
    line: list[Point] = []
    start = 0
    for stage, value in zip(plan.stages, planned, strict=True):
        line += [Point(start, value, ""), Point(start + stage.epochs, value, "")]
        start += stage.epochs
    marks = [Point(at + 0.5, value, f"epoch {at + 1}: {say(value)}") for at, value in trained]
    series = [
        Series("planned", "blue", tuple(line), "none"),
        Series("as trained", "red", _thinned(marks), "diamond", line=False),
    ]
    heights = [*planned, *(value for _, value in trained)]
    return markup.xy_figure(title, _axis(plan), linear_axis(label, heights), series, [], table)


def _speed_chart(plan: Plan, epochs: Sequence[EpochRecord], lines: RunLines) -> str:
    """Images per second, of the steps where they are told, and of whole epochs."""
    of_steps = _over_steps(
        plan, lines, "throughput/samples_per_sec", lambda value: f"{number(value)} images/s"
    )
    of_epochs = [
        Point(
            one.epoch + 0.5,
            one.samples / one.training_seconds,
            f"epoch {one.epoch + 1}: {number(one.samples / one.training_seconds)} images/s",
        )
        for one in epochs
        if one.training_seconds
    ]
    if not of_steps and not of_epochs:
        return ""
    series = [
        Series("so far in the epoch", "grey", _thinned(of_steps), "circle", line=False),
        Series("whole epochs", "green", _thinned(of_epochs), "square"),
    ]
    heights = [point.y for one in series for point in one.points]
    table = markup.table(
        "Images per second",
        ["epoch", "images / s"],
        [[str(int(p.x + 0.5)), number(p.y)] for p in _some(of_epochs)],
    )
    return markup.xy_figure(
        "Speed", _axis(plan), linear_axis("images per second", heights), series, [], table
    )


def _some(points: Sequence[Point]) -> list[Point]:
    return [points[index] for index in spread(len(points), _MOST_ROWS)]


def _epochs_table(epochs: Sequence[EpochRecord]) -> str:
    kept = [epochs[index] for index in spread(len(epochs), _MOST_ROWS)]
    more = f" ({len(kept)} of {len(epochs):,})" if len(kept) < len(epochs) else ""
    return markup.table(
        f"Rate, batches and resolution by epoch{more}",
        ["epoch", "learning rate at its end", "global batch", "local batch", "resolution"],
        [
            [
                str(one.epoch + 1),
                _rate(one),
                f"{one.global_batch_size:,}",
                range_words(w.local_batch_size for w in one.workers) if one.workers else "-",
                f"{one.resolution} px",
            ]
            for one in kept
        ],
    )


# ------------------------------------------------------------------------------------ the workers


def workers_now_part(workers: Sequence[WorkerNow], clock: str = "") -> str:
    """The workers at the newest line: a bar of each one's step, and a table; empty without any.

    Args:
        workers: By rank.
        clock: ``simulated `` before seconds that are.
    """
    if not workers:
        return ""
    table = markup.table(
        f"Workers now, {clock}seconds per step",
        ["worker", "place", "local batch", "share", "compute (s)", "wait (s)"],
        [
            [
                str(one.rank),
                one.place or "-",
                f"{one.local_batch_size:,}",
                percent(one.share),
                markup.or_dash(one.compute_seconds),
                markup.or_dash(one.wait_seconds),
            ]
            for one in _shown(workers, _MOST_ROWS)
        ],
    )
    if all(one.compute_seconds is None for one in workers):
        return table
    rows = [
        (
            str(one.rank),
            [
                (name, f"part-{name}", seconds, f"worker {one.rank}, {name}: {duration(seconds)}")
                for name, seconds in (
                    ("compute", one.compute_seconds or 0.0),
                    ("wait", one.wait_seconds or 0.0),
                )
            ],
        )
        for one in _shown(workers, _MOST_BARS)
    ]
    title = "A step now, worker by worker"
    names = markup.legend([(part, swatch(f"part-{part}", "bar")) for part in ("compute", "wait")])
    chart = bar_chart(title, f"{clock}seconds per step", rows)
    return markup.pair(markup.figure(title, names, chart, table), f"<div>{table}</div>")


def _shown(workers: Sequence[WorkerNow], most: int) -> list[WorkerNow]:
    """All workers; of many, evenly from the one that computes least to the one that does most."""
    ordered = sorted(workers, key=lambda one: (one.compute_seconds or 0.0, one.rank))
    kept = [ordered[index] for index in spread(len(ordered), most)]
    return sorted(kept, key=lambda one: one.rank)
