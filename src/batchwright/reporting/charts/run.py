"""Charts of a run: seconds by batch and by epoch, loss and accuracy, and the workers' time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchwright.records import EpochRecord, RunSummary
from batchwright.records.lines.run_lines import EpochLine
from batchwright.records.text.formatting import in_seconds, number
from batchwright.records.text.plan_text import is_chosen, planned_sizes, rivals
from batchwright.reporting.charts.chart import (
    Axis,
    Band,
    Box,
    Chart,
    Lane,
    Lanes,
    Marker,
    Point,
    Series,
    batch_axis,
    epochs_axis,
    evenly,
    heights,
    linear_axis,
    ratio_axis,
)
from batchwright.reporting.data.accounting import accounting
from batchwright.reporting.data.live_run import EpochNow, forecast_words
from batchwright.reporting.data.reading import (
    accuracy,
    comparisons,
    held_out_loss,
    measured_word,
    simulated_word,
    training_clock,
    training_words,
)
from batchwright.reporting.data.worker_curves import most_different, spread, worker_curves

_MAX_POINTS = 200  # over the epochs: more would hide each other
_MAX_BARS = 16  # one for each worker

_SIDES: tuple[tuple[str, Marker], ...] = (  # resolutions, low to high
    ("blue", "circle"),
    ("orange", "square"),
    ("green", "diamond"),
    ("purple", "circle"),
)


def candidates_chart(summary: RunSummary) -> Chart | None:
    """Predicted seconds per epoch of the plan's cluster by batch, and the measured ones."""
    plan = summary.plan
    considered = rivals(plan)
    if len(considered) < 2:  # a single point is no curve; the table has its figures
        return None
    measured, planned = measured_word(summary), planned_sizes(plan)
    sides = sorted({one.resolution for one in considered})
    series, edges = [], []
    for at, side in enumerate(sides):
        style, marker = _SIDES[at % len(_SIDES)]
        of_side = f", {side} px" * (len(sides) > 1)
        ones = [one for one in considered if one.resolution == side]
        points = tuple(
            Point(
                one.global_batch_size,
                one.epoch_seconds.value,
                f"batch {one.global_batch_size}{of_side}: "
                f"{in_seconds(one.epoch_seconds)} s predicted",
            )
            for one in ones
        )
        series.append(Series(f"predicted{of_side}", style, points, marker))
        edges.append((style, [(one.global_batch_size, one.epoch_seconds) for one in ones]))
    picked = [one for one in considered if is_chosen(plan, one, planned)]
    chosen = tuple(
        Point(one.global_batch_size, one.epoch_seconds.value, "chosen") for one in picked
    )
    found = tuple(
        Point(
            plan.stages[one.stage].global_batch_size,
            one.measured,
            f"{number(one.measured)} s {measured}",
        )
        for one in spread(comparisons(summary), _MAX_POINTS)
        if one.measured is not None
    )
    series += [
        Series("chosen", "ink", chosen, "ring", line=False),
        Series(f"{measured} (median)", "red", found, "diamond", line=False),
    ]
    own = list(dict.fromkeys(stage.global_batch_size for stage in plan.stages))
    batches = [*(one.global_batch_size for one in considered), *own]
    # Intervals far beyond what was measured may be a hundred times as wide as the others.
    reach = [end for one in picked for end in (one.epoch_seconds.low, one.epoch_seconds.high)]
    y = ratio_axis(f"{simulated_word(summary)}seconds per epoch", [*heights(series), *reach])
    bands = [
        Band(
            "95 % interval",
            style,
            tuple((float(b), max(s.low, y.low), min(s.high, y.high)) for b, s in ones),
        )
        for style, ones in edges
    ]
    x = batch_axis("global batch (samples per step)", batches, own)
    return Chart("Epoch time against global batch", x, y, series, bands)


def epochs_chart(summary: RunSummary, now: EpochNow | None = None) -> Chart | None:
    """Measured seconds of each epoch, and the predicted median epoch of each stage.

    Single epochs may lie outside the predicted interval, which is for their median, a line across
    the stage. The epoch in progress, ``now``, is drawn with its expected seconds.
    """
    expected = now.expected_seconds if now else None
    if not summary.epochs and expected is None:
        return None
    measured, clock = measured_word(summary), simulated_word(summary)
    series = []
    for whole, style, resumed in ((True, "red", ""), (False, "grey", ", resumed inside")):
        points = tuple(
            Point(
                epoch.epoch + 1,
                epoch.training_seconds,
                f"epoch {epoch.epoch + 1}: {number(epoch.training_seconds)} {clock}s",
            )
            for epoch in spread(summary.epochs, _MAX_POINTS)
            if epoch.whole is whole
        )
        series.append(Series(f"{measured}{resumed}", style, points, "diamond", line=False))
    if now and expected is not None:
        words = f"epoch {now.epoch + 1}: {number(expected)} {clock}s at its pace so far"
        going = (Point(now.epoch + 1, expected, words),)
        series.append(Series("in progress, by its pace", "ink", going, "ring", line=False))
    bands, first = [], 0.5
    for stage, one in zip(summary.plan.stages, comparisons(summary), strict=True):
        predicted, last = stage.predicted_epoch_seconds, first + stage.epochs
        if predicted is not None:
            span = ((first, predicted.low, predicted.high), (last, predicted.low, predicted.high))
            bands.append(Band("95 % interval of the median", "blue", span))
            ends = tuple(Point(at, predicted.value) for at in (first, last))
            series.insert(0, Series("predicted median", "blue", ends, "none"))
        if one.measured is not None:
            ends = tuple(Point(at, one.measured) for at in (first, last))
            series.append(Series(f"{measured} median", "red", ends, "none"))
        first = last
    return Chart(
        "Epoch by epoch",
        epochs_axis(summary.plan.epochs),
        ratio_axis(f"{clock}seconds per epoch", heights(series, bands)),
        series,
        bands,
    )


def learning_charts(summary: RunSummary, forecast: EpochLine | None = None) -> tuple[Chart, Chart]:
    """Loss and held-out accuracy over the epochs, of which at least one is finished.

    Predicted accuracies are drawn up to the plan's end, and there the run's own ``forecast``.
    """
    timed = list(zip(summary.epochs, training_clock(summary), strict=True))
    timed = spread(timed, _MAX_POINTS)
    epochs = [epoch for epoch, _ in timed]
    labels = [f"{e.epoch + 1}\n{number(s)} s" for e, s in timed]
    # A letter is a fiftieth of the axis wide, or a little less.
    most = max(1, min(6, 54 // (1 + max(len(one.partition("\n")[2]) for one in labels))))
    x = Axis(
        f"epoch, and {simulated_word(summary)}seconds of training by its end",
        min(0.5, epochs[0].epoch + 0.5),
        epochs[-1].epoch + 1.5,
        tuple((epochs[i].epoch + 1.0, labels[i]) for i in evenly(range(len(epochs)), most)),
    )
    held_out = held_out_loss(summary.plan)
    losses = [
        _over_epochs(epochs, "training loss", "blue", "circle", [e.train_loss for e in epochs]),
        _over_epochs(epochs, held_out, "orange", "square", [e.val_loss for e in epochs]),
    ]
    shares = [None if e.top1 is None else 100 * e.top1 for e in epochs]
    right = [_over_epochs(epochs, "held-out accuracy (%)", "green", "square", shares)]
    bands, wide, ahead = [], x, _forecast_points(summary, forecast)
    predictions = [
        (at, one) for at, one in enumerate(summary.plan.epoch_accuracy, 1) if one is not None
    ]
    predictions = spread(predictions, _MAX_POINTS)
    if predictions:
        edges = tuple((at, 100 * one.low, 100 * one.high) for at, one in predictions)
        bands = [Band("predicted, 95 % interval", "blue", edges)]
        line = tuple(Point(at, 100 * one.value) for at, one in predictions)
        right.insert(0, Series("predicted", "blue", line, "none"))
        right.append(Series("likely, by the epochs so far", "purple", ahead, "diamond", line=False))
        last = float(summary.plan.epochs)
        if epochs[-1].epoch + 1 < last:
            room = max(1, most * (epochs[-1].epoch + 1) // summary.plan.epochs)
            ticks = tuple(
                (epochs[i].epoch + 1.0, labels[i])
                for i in evenly(range(len(epochs)), room)
                if epochs[i].epoch + 1 < 0.85 * last
            )
            wide = replace(x, high=last + 0.5, ticks=(*ticks, (last, str(summary.plan.epochs))))
    best = summary.best_epoch
    if best is not None and best.top1 is not None:
        point = Point(best.epoch + 1, 100 * best.top1, f"best: {accuracy(best)}")
        right.append(Series("best", "ink", (point,), "ring", line=False))
    reach = [*heights(right, bands), *(end for one in ahead for end in one.up or ())]
    y = linear_axis("accuracy (%)", reach, from_zero=False)
    return (
        Chart("Loss", x, linear_axis("mean loss", heights(losses)), losses),
        Chart("Held-out accuracy", wide, y, right, bands),
    )


def _forecast_points(summary: RunSummary, forecast: EpochLine | None) -> tuple[Point, ...]:
    """The forecast of the final accuracy, or of the epoch that reaches the target."""
    if forecast is None:
        return ()
    words, target = forecast_words(forecast), summary.plan.job.goal.target
    if (end := forecast.expected_top1) is not None:
        reach = (100 * end.low, 100 * end.high)
        return (Point(summary.plan.epochs, 100 * end.value, words, up=reach),)
    if target is None or forecast.likely_epochs is None:
        return ()
    return (Point(forecast.likely_epochs, 100 * target, words),)


def track_charts(summary: RunSummary) -> list[Chart]:
    """Gradient norm and largest eigenvalue over the epochs, those that job key ``track`` names."""
    epochs = spread(summary.epochs, _MAX_POINTS)
    drawn = []
    for name, title, label, style, values in (
        (
            "gradient norm",
            "Gradient norm",
            "norm of the gradient",
            "purple",
            [one.gradient_norm for one in epochs],
        ),
        (
            "largest eigenvalue",
            "Largest eigenvalue of the Hessian",
            "eigenvalue",
            "red",
            [one.hessian_eigenvalue for one in epochs],
        ),
    ):
        if any(value is not None for value in values):
            line = [_over_epochs(epochs, name, style, "diamond", values)]
            x = epochs_axis(summary.plan.epochs)
            drawn.append(Chart(title, x, linear_axis(label, heights(line)), line))
    return drawn


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


def time_chart(summary: RunSummary) -> Lanes:
    """How each worker spent its time, as a bar as long as the wall time."""
    lanes = []
    for one in most_different(worker_curves(summary), _MAX_BARS):
        boxes, start = [], 0.0
        for name, seconds in accounting(summary, one):
            words = f"{one.label}, {name}: {training_words(summary, seconds)}"
            boxes.append(Box(f"part-{name}", start, start + seconds, words))
            start += seconds
        lanes.append(Lane(str(one.number), boxes, one.label))
    clock = simulated_word(summary)
    return bars(
        "Simulated time by worker" if clock else "Wall time by worker",
        f"{clock or 'wall '}time (s)",
        lanes,
        [name for name, _ in accounting(summary)],
    )


def bars(title: str, label: str, lanes: Sequence[Lane], parts: Sequence[str]) -> Lanes:
    """Stacked horizontal bars from zero, of the given parts."""
    longest = max((one.boxes[-1].end for one in lanes), default=0.0)
    ticks = linear_axis(label, [longest]).ticks
    x = Axis(label, 0.0, max(longest, ticks[1][0]), tuple(t for t in ticks if t[0] <= longest))
    return Lanes(title, x, lanes, [(part, f"part-{part}") for part in parts], bars=True)
