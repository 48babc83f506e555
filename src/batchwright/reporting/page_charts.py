"""The page's charts of a run, each with the table of numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import EpochRecord, RunSummary
from batchwright.records.explaining import is_chosen, rivals
from batchwright.records.words import duration, in_bytes, in_seconds, number
from batchwright.reporting import markup
from batchwright.reporting.charts import (
    Axis,
    Band,
    Marker,
    Point,
    Series,
    bar_chart,
    batch_axis,
    linear_axis,
    swatch,
)
from batchwright.reporting.reading import (
    accounting,
    accuracy,
    comparisons,
    training_clock,
    worker_rows,
)
from batchwright.reporting.worker_curves import worker_curves


def candidates_chart(summary: RunSummary) -> str:
    """Predicted seconds of the plan's own cluster, the measured point on top; or nothing."""
    plan = summary.plan
    considered = rivals(plan)
    if not considered:
        return ""
    chosen = [one for one in considered if is_chosen(plan, one)]
    measured = [one for one in comparisons(summary) if one.measured is not None]
    by_batch = tuple(
        Point(
            one.global_batch_size,
            one.epoch_seconds.value,
            f"batch {one.global_batch_size}: {in_seconds(one.epoch_seconds)} s predicted",
        )
        for one in considered
    )
    series = [
        Series("predicted", "blue", by_batch),
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
            "measured (median)",
            "red",
            tuple(
                Point(
                    plan.stages[one.stage].global_batch_size,
                    one.measured or 0.0,
                    f"{number(one.measured or 0.0)} s measured",
                )
                for one in measured
            ),
            marker="diamond",
            line=False,
        ),
    ]
    edges = tuple(
        (float(one.global_batch_size), one.epoch_seconds.low, one.epoch_seconds.high)
        for one in considered
    )
    table = markup.table(
        "Candidates",
        ["global batch", "workers", "steps", "s / step", "s / epoch", "peak memory", ""],
        [
            [
                f"{one.global_batch_size:,}",
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
        "Candidates: epoch time over global batch",
        batch_axis("global batch (samples per step)", batches, planned),
        linear_axis("seconds per epoch", _heights(series, [Band("", "", edges)])),
        series,
        [Band("95 % interval", "blue", edges)],
        table,
    )


def epochs_chart(summary: RunSummary) -> str:
    """Measured seconds of each epoch over the predicted interval; empty without epochs."""
    if not summary.epochs:
        return ""
    points = {
        whole: tuple(
            Point(
                epoch.epoch + 1,
                epoch.training_seconds,
                f"epoch {epoch.epoch + 1}: {number(epoch.training_seconds)} s",
            )
            for epoch in summary.epochs
            if epoch.whole is whole
        )
        for whole in (True, False)
    }
    series = [
        Series("measured", "red", points[True], marker="diamond", line=False),
        Series("measured, resumed inside", "grey", points[False], marker="diamond", line=False),
    ]
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
        ["epoch", "steps", "skipped", "training", "evaluation", "checkpoints", "learning rate"],
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
    x = Axis("epoch", 0.5, summary.plan.epochs + 0.5, _every(range(1, summary.plan.epochs + 1)))
    y = linear_axis("seconds per epoch", _heights(series, bands))
    return markup.xy_figure("Epoch by epoch", x, y, series, bands, table)


def learning_charts(summary: RunSummary) -> tuple[str, str]:
    """Loss and held-out accuracy over the epochs; at least one was finished."""
    epochs, clock = summary.epochs, training_clock(summary)
    table = markup.table(
        "Epochs",
        ["epoch", "training (s)", "training loss", "held-out loss", "held-out accuracy"],
        [
            [
                str(epoch.epoch + 1),
                number(seconds),
                markup.or_dash(epoch.train_loss),
                markup.or_dash(epoch.val_loss),
                accuracy(epoch),
            ]
            for epoch, seconds in zip(epochs, clock, strict=True)
        ],
    )
    labels = [f"{e.epoch + 1}\n{number(s)} s" for e, s in zip(epochs, clock, strict=True)]
    x = Axis(
        "epoch, and seconds of training by its end",
        min(0.5, epochs[0].epoch + 0.5),
        epochs[-1].epoch + 1.5,
        tuple((epochs[i].epoch + 1.0, labels[i]) for i in _stride(len(epochs), 6)),
    )
    losses = [
        _over_epochs(epochs, "training loss", "blue", "circle", [e.train_loss for e in epochs]),
        _over_epochs(epochs, "held-out loss", "orange", "square", [e.val_loss for e in epochs]),
    ]
    shares = [None if e.top1 is None else 100 * e.top1 for e in epochs]
    right = [_over_epochs(epochs, "held-out accuracy (%)", "green", "square", shares)]
    best = summary.best_epoch
    if best is not None and best.top1 is not None:
        point = Point(best.epoch + 1, 100 * best.top1, f"best: {accuracy(best)}")
        right.append(Series("best", "ink", (point,), marker="ring", line=False))
    return (
        markup.xy_figure("Loss", x, linear_axis("mean loss", _heights(losses)), losses, [], table),
        markup.xy_figure(
            "Held-out accuracy",
            x,
            linear_axis("accuracy (%)", _heights(right), from_zero=False),
            right,
            [],
            table,
        ),
    )


def worker_chart(summary: RunSummary) -> str:
    """Where each worker's time went, a bar as long as the wall time for each."""
    workers = worker_curves(summary)
    head, *told = worker_rows(summary)
    by_worker = markup.table("Workers", head, told)
    rows = [
        (
            str(one.number),
            [
                (name, _part_class(name), seconds, f"{one.label}, {name}: {duration(seconds)}")
                for name, seconds in accounting(summary, one)
            ],
        )
        for one in workers
    ]
    title = "Wall time by worker"
    legend = markup.legend(
        [(name, swatch(_part_class(name), "bar")) for name, _ in accounting(summary)]
    )
    return markup.figure(title, legend, bar_chart(title, "wall time (s)", rows), by_worker)


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
    return heights + [high for band in bands for _, _, high in band.edges]


def _stride(count: int, most: int) -> range:
    """At most ``most`` indices below ``count``, evenly spaced, the last one among them."""
    step = -(-count // most)
    return range(count - 1, -1, -step)


def _every(epochs: range) -> tuple[tuple[float, str], ...]:
    return tuple((float(epochs[i]), str(epochs[i])) for i in _stride(len(epochs), 10))
