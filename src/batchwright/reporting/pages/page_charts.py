"""The page's charts of a run, each with the table of numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchwright.records import EpochRecord, Estimate, Prediction, RunSummary
from batchwright.records.text.formatting import in_bytes, in_seconds, number, shares_between
from batchwright.records.text.plan_text import is_chosen, rivals
from batchwright.reporting.data.axes import Axis, batch_axis, epochs_axis, evenly, linear_axis
from batchwright.reporting.data.live_run import EpochNow
from batchwright.reporting.data.reading import (
    Comparison,
    accounting,
    accuracy,
    comparisons,
    epoch_accuracies,
    measured_word,
    simulated_word,
    training_clock,
    training_words,
    worker_rows,
)
from batchwright.reporting.data.worker_curves import worker_curves
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Band, Marker, Point, Series, bar_chart, swatch


def candidates_chart(summary: RunSummary) -> str:
    """Predicted seconds of the plan's own cluster, the measured point on top; or nothing."""
    plan = summary.plan
    considered = rivals(plan)
    if not considered:
        return ""
    chosen = [one for one in considered if is_chosen(plan, one)]
    measured = [one for one in comparisons(summary) if one.measured is not None]
    sides = sorted({one.resolution for one in considered})
    series = [
        *(_by_batch(considered, side, _SIDES[at % len(_SIDES)]) for at, side in enumerate(sides)),
        Series(
            "chosen",
            "ink",
            tuple(
                Point(one.global_batch_size, one.epoch_seconds.value, "chosen") for one in chosen
            ),
            marker="ring",
            line=False,
        ),
        Series(
            f"{measured_word(summary)} (median)",
            "red",
            tuple(
                Point(
                    plan.stages[one.stage].global_batch_size,
                    one.measured or 0.0,
                    f"{number(one.measured or 0.0)} s {measured_word(summary)}",
                )
                for one in measured
            ),
            marker="diamond",
            line=False,
        ),
    ]
    bands = [
        Band(
            "95 % interval",
            _SIDES[at % len(_SIDES)][0],
            tuple(
                (float(one.global_batch_size), one.epoch_seconds.low, one.epoch_seconds.high)
                for one in considered
                if one.resolution == side
            ),
        )
        for at, side in enumerate(sides)
    ]
    table = markup.table(
        "Candidates",
        ["global batch", "side", "workers", "steps", "s / step", "s / epoch", "peak memory", ""],
        [
            [
                f"{one.global_batch_size:,}",
                f"{one.resolution} px",
                str(one.workers),
                f"{one.steps_per_epoch:,}",
                in_seconds(one.step_seconds),
                in_seconds(one.epoch_seconds),
                in_bytes(one.peak_bytes),
                ("chosen " if is_chosen(plan, one) else "")
                + ("extrapolated" if one.extrapolated else ""),
            ]
            for one in considered
        ],
    )
    planned = [stage.global_batch_size for stage in plan.stages]
    batches = [*(one.global_batch_size for one in considered), *planned]
    return markup.xy_figure(
        "Epoch time against global batch",
        batch_axis("global batch (samples per step)", batches, planned),
        linear_axis(f"{simulated_word(summary)}seconds per epoch", _heights(series, bands)),
        series,
        bands,
        table,
    )


_SIDES: tuple[tuple[str, Marker], ...] = (
    ("blue", "circle"),
    ("orange", "square"),
    ("green", "diamond"),
    ("purple", "circle"),
)


def _by_batch(considered: Sequence[Prediction], side: int, look: tuple[str, Marker]) -> Series:
    """The candidates of one resolution; its name says which, where there are several."""
    several = len({one.resolution for one in considered}) > 1
    points = tuple(
        Point(
            one.global_batch_size,
            one.epoch_seconds.value,
            f"batch {one.global_batch_size}{f', {side} px' if several else ''}: "
            f"{in_seconds(one.epoch_seconds)} s predicted",
        )
        for one in considered
        if one.resolution == side
    )
    return Series(f"predicted{f', {side} px' if several else ''}", look[0], points, look[1])


def epochs_chart(summary: RunSummary, now: EpochNow | None = None) -> str:
    """Measured seconds of each epoch over the predicted interval; empty without epochs.

    The one in progress, ``now``, is drawn as long as it would take at its pace so far.
    """
    expected = now.expected_seconds if now else None
    if not summary.epochs and expected is None:
        return ""
    measured, clock = measured_word(summary), simulated_word(summary)
    points = {
        whole: tuple(
            Point(
                epoch.epoch + 1,
                epoch.training_seconds,
                f"epoch {epoch.epoch + 1}: {number(epoch.training_seconds)} {clock}s",
            )
            for epoch in summary.epochs
            if epoch.whole is whole
        )
        for whole in (True, False)
    }
    series = [
        Series(measured, "red", points[True], marker="diamond", line=False),
        Series(f"{measured}, resumed inside", "grey", points[False], marker="diamond", line=False),
    ]
    if now and expected is not None:
        words = f"epoch {now.epoch + 1}: {number(expected)} {clock}s at its pace so far"
        going = (Point(now.epoch + 1, expected, words),)
        series.append(Series("in progress, by its pace", "ink", going, "ring", line=False))
    bands, first = [], 0.5
    for stage in summary.plan.stages:
        predicted, last = stage.predicted_epoch_seconds, first + stage.epochs
        if predicted is not None:
            span = ((first, predicted.low, predicted.high), (last, predicted.low, predicted.high))
            bands.append(Band("predicted, 95 % interval", "blue", span))
            ends = tuple(Point(at, predicted.value, "") for at in (first, last))
            series.insert(0, Series("predicted", "blue", ends, marker="none"))
        first = last
    table = markup.table(
        "Seconds of each epoch",
        [
            "epoch",
            "steps",
            "skipped",
            f"{clock}training",
            "evaluation",
            "checkpoints",
            "learning rate",
        ],
        [
            [
                str(epoch.epoch + 1),
                f"{epoch.steps:,}",
                f"{epoch.skipped_steps:,}",
                number(epoch.training_seconds),
                number(epoch.evaluation_seconds),
                number(epoch.checkpoint_seconds),
                f"{epoch.learning_rate:.4g}",
            ]
            for epoch in summary.epochs
        ],
    )
    x = epochs_axis(summary.plan.epochs)
    y = linear_axis(f"{clock}seconds per epoch", _heights(series, bands))
    return markup.xy_figure("Epoch by epoch", x, y, series, bands, table)


def learning_charts(summary: RunSummary) -> tuple[str, str]:
    """Loss and held-out accuracy over the epochs; at least one was finished.

    What was predicted of accuracy is drawn up to the plan's end, as far as it was.
    """
    epochs, clock, word = summary.epochs, training_clock(summary), simulated_word(summary)
    told = epoch_accuracies(summary)
    head = ["epoch", f"training ({word}s)", "training loss", "held-out loss", "held-out accuracy"]
    table = markup.table(
        "Epochs",
        [*head, *(["predicted (95 %)", "the prediction was"] if told else [])],
        [
            [
                str(epoch.epoch + 1),
                number(seconds),
                markup.or_dash(epoch.train_loss),
                markup.or_dash(epoch.val_loss),
                accuracy(epoch),
                *(_predicted_cells(told.get(epoch.epoch)) if told else []),
            ]
            for epoch, seconds in zip(epochs, clock, strict=True)
        ],
    )
    labels = [f"{e.epoch + 1}\n{number(s)} s" for e, s in zip(epochs, clock, strict=True)]
    x = Axis(
        f"epoch, and {word}seconds of training by its end",
        min(0.5, epochs[0].epoch + 0.5),
        epochs[-1].epoch + 1.5,
        tuple((epochs[i].epoch + 1.0, labels[i]) for i in evenly(range(len(epochs)), 6)),
    )
    losses = [
        _over_epochs(epochs, "training loss", "blue", "circle", [e.train_loss for e in epochs]),
        _over_epochs(epochs, "held-out loss", "orange", "square", [e.val_loss for e in epochs]),
    ]
    shares = [None if e.top1 is None else 100 * e.top1 for e in epochs]
    right = [_over_epochs(epochs, "held-out accuracy (%)", "green", "square", shares)]
    bands, wide = [], x
    if predicted := _predicted_accuracy(summary.plan.epoch_accuracy):
        edges = tuple((at, low, high) for at, _, low, high in predicted)
        line = tuple(Point(at, value, "") for at, value, _, _ in predicted)
        bands = [Band("predicted, 95 % interval", "blue", edges)]
        right.insert(0, Series("predicted", "blue", line, "none"))
        last = float(summary.plan.epochs)
        if epochs[-1].epoch + 1 < last:
            room = max(1, 6 * len(epochs) // summary.plan.epochs)
            ticks = tuple(
                (epochs[i].epoch + 1.0, labels[i])
                for i in evenly(range(len(epochs)), room)
                if epochs[i].epoch + 1 < 0.85 * last
            )
            wide = replace(x, high=last + 0.5, ticks=(*ticks, (last, str(summary.plan.epochs))))
    best = summary.best_epoch
    if best is not None and best.top1 is not None:
        point = Point(best.epoch + 1, 100 * best.top1, f"best: {accuracy(best)}")
        right.append(Series("best", "ink", (point,), marker="ring", line=False))
    return (
        markup.xy_figure("Loss", x, linear_axis("mean loss", _heights(losses)), losses, [], table),
        markup.xy_figure(
            "Held-out accuracy",
            wide,
            linear_axis("accuracy (%)", _heights(right, bands), from_zero=False),
            right,
            bands,
            table,
        ),
    )


def _predicted_accuracy(
    told: Sequence[Estimate | None],
) -> list[tuple[float, float, float, float]]:
    """Epoch, counted from one, value and ends in percent, of those that are predicted."""
    return [
        (epoch, 100 * one.value, 100 * one.low, 100 * one.high)
        for epoch, one in enumerate(told, 1)
        if one is not None
    ]


def _predicted_cells(one: Comparison | None) -> list[str]:
    if one is None or one.predicted is None:
        return ["-", "-"]
    return [shares_between(one.predicted), one.verdict.replace("the 95 % interval", "the interval")]


def worker_chart(summary: RunSummary) -> str:
    """Where each worker's time went, a bar as long as the wall time for each."""
    workers = worker_curves(summary)
    head, *told = worker_rows(summary)
    by_worker = markup.table(f"Workers{', simulated time' * summary.simulated}", head, told)
    rows = [
        (
            str(one.number),
            [
                (
                    name,
                    _part_class(name),
                    seconds,
                    f"{one.label}, {name}: {training_words(summary, seconds)}",
                )
                for name, seconds in accounting(summary, one)
            ],
        )
        for one in workers
    ]
    clock = simulated_word(summary)
    title = "Simulated time by worker" if clock else "Wall time by worker"
    legend = markup.legend(
        [(name, swatch(_part_class(name), "bar")) for name, _ in accounting(summary)]
    )
    return markup.figure(
        title, legend, bar_chart(title, f"{clock or 'wall '}time (s)", rows), by_worker
    )


def _part_class(part: str) -> str:
    return f"part-{part}"


def _over_epochs(
    epochs: Sequence[EpochRecord],
    name: str,
    style: str,
    marker: Marker,
    values: Sequence[float | None],
) -> Series:
    points = tuple(
        Point(epoch.epoch + 1, value, f"epoch {epoch.epoch + 1}: {name} {number(value)}")
        for epoch, value in zip(epochs, values, strict=True)
        if value is not None
    )
    return Series(name, style, points, marker)


def _heights(series: Sequence[Series], bands: Sequence[Band] = ()) -> list[float]:
    heights = [point.y for one in series for point in one.points]
    return heights + [end for band in bands for edge in band.edges for end in edge[1:]]
