"""Figures of a run as PNG files.

Drawn through matplotlib's object interface, so that a caller's own pyplot state is left alone. The
same summary gives the same bytes: no date and no version goes into a file.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.records import RunSummary
from batchwright.records.text.formatting import number
from batchwright.records.text.plan_text import is_chosen, rivals
from batchwright.reporting.data.axes import batch_axis, evenly
from batchwright.reporting.data.plan_curves import plan_curves
from batchwright.reporting.data.reading import (
    accounting,
    comparisons,
    measured_word,
    simulated_word,
    training_clock,
)
from batchwright.reporting.data.worker_curves import worker_curves
from batchwright.reporting.figures.colours import BLUE, GREEN, ORANGE, PART_COLOURS, PURPLE, RED
from batchwright.reporting.figures.plan_figure import write_numbers, write_plan_figure
from batchwright.reporting.figures.rounds_figure import draw_rounds
from batchwright.reporting.figures.stages_figure import draw_stages
from batchwright.reporting.figures.workers_figure import draw_workers, workers_figure_data
from batchwright.storage.files import make_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SIDES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PURPLE, "v"))  # resolutions, low to high


def write_figures(summary: RunSummary, folder: Path) -> list[Path]:
    """Write the figures that the summary has data for into ``folder``, which is made if missing.

    ``plan.png`` (and ``plan.figure.json``): time and cost over the global batch, by cluster;
    ``epoch_seconds.png``: predicted and measured seconds per epoch, over the global batch and epoch
    by epoch; ``learning.png``: loss and held-out accuracy; ``time.png``: where each worker's time
    went; with two workers and more ``workers.png`` (and ``workers.figure.json``): local batch and
    times of each over the epochs; of a run with a parameter server ``rounds.png``: its rounds,
    worker by worker; of a plan of several stages ``stages.png``: resolution, batches and rate.

    Returns:
        The files written; empty if no epoch was finished and no candidate was considered.

    Raises:
        FileError: A file cannot be written.
    """
    figures = {}
    if summary.plan.considered or summary.epochs:
        figures["epoch_seconds.png"] = _epoch_seconds(summary)
    if summary.epochs:
        figures["learning.png"] = _learning(summary)
        figures["time.png"] = _time(summary)
    make_folder(folder)
    written = []
    if plan_curves(summary.plan).clusters:  # stages have a figure of their own
        profiles = [summary.profile] if summary.profile else []
        written = write_plan_figure(summary.plan, profiles, folder / "plan.png")
    if summary.rounds:
        figures["rounds.png"] = draw_rounds(summary)
    if len(summary.plan.stages) > 1:
        figures["stages.png"] = draw_stages(summary.plan, summary.epochs)
    curves = worker_curves(summary)
    if len(curves) > 1:
        figures["workers.png"] = draw_workers(curves, clock=simulated_word(summary))
        written.append(folder / "workers.figure.json")
        write_numbers(workers_figure_data(curves), written[-1])
    for name, figure in figures.items():
        write_whole(folder / name, _png(figure))
    return [*written, *(folder / name for name in figures)]


def _epoch_seconds(summary: RunSummary) -> Figure:
    """Candidates beside the epochs; without candidates the epochs alone."""
    if not rivals(summary.plan):
        figure, (epochs,) = _panels(1)
    else:
        figure, (candidates, epochs) = _panels()
        _candidates(candidates, summary)
    _epoch_by_epoch(epochs, summary)
    return figure


def _candidates(axes: Axes, summary: RunSummary) -> None:
    """Predicted seconds of each candidate with its interval; the measured point on top."""
    considered = rivals(summary.plan)
    batches = [one.global_batch_size for one in considered]
    sides = sorted({one.resolution for one in considered})
    for index, side in enumerate(sides):
        ones = [one for one in considered if one.resolution == side]
        places = [one.global_batch_size for one in ones]
        seconds = [one.epoch_seconds for one in ones]
        colour, mark = _SIDES[index % len(_SIDES)]
        axes.fill_between(
            places,
            [one.low for one in seconds],
            [one.high for one in seconds],
            color=colour,
            alpha=0.2,
            linewidth=0,
            label="_" * bool(index) + "95 % interval",
        )
        label = f"predicted{f', {side} px' if len(sides) > 1 else ''}"
        axes.plot(places, [one.value for one in seconds], f"{mark}-", color=colour, label=label)
    chosen = [one for one in considered if is_chosen(summary.plan, one)]
    if chosen:
        axes.plot(
            [one.global_batch_size for one in chosen],
            [one.epoch_seconds.value for one in chosen],
            "o",
            markersize=16,
            markerfacecolor="none",
            markeredgecolor="black",
            markeredgewidth=1.5,
            label="chosen",
        )
    stages = summary.plan.stages
    measured = [
        (stages[one.stage].global_batch_size, one.measured)
        for one in comparisons(summary)
        if one.measured is not None
    ]
    if measured:
        axes.plot(
            *_columns(measured),
            "D",
            color=RED,
            label=f"{measured_word(summary)} (median)",
            zorder=3,
        )
    axes.set_xscale("log", base=2)
    planned = [stage.global_batch_size for stage in stages]
    ticks = batch_axis("", [*batches, *planned], planned).ticks
    axes.set_xticks(*_columns(list(ticks)))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("global batch (samples per step)")
    axes.set_ylabel(f"{simulated_word(summary)}training time of an epoch (s)")
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.set_title("Candidates", fontsize=15)
    axes.legend(frameon=False)


def _epoch_by_epoch(axes: Axes, summary: RunSummary) -> None:
    """Measured seconds of each epoch over the predicted interval of its stage."""
    from matplotlib.ticker import MaxNLocator

    first = 0.5
    for index, stage in enumerate(summary.plan.stages):
        span, predicted = (first, first + stage.epochs), stage.predicted_epoch_seconds
        first += stage.epochs
        if predicted is None:
            continue
        hidden = "_" if index else ""  # matplotlib leaves such names out of the legend
        axes.fill_between(
            span,
            predicted.low,
            predicted.high,
            color=BLUE,
            alpha=0.2,
            linewidth=0,
            label=f"{hidden}95 % interval",
        )
        axes.plot(span, [predicted.value] * 2, color=BLUE, label=f"{hidden}predicted")
    word = measured_word(summary)
    for whole, face, label_of in ((True, RED, word), (False, "none", f"{word}, resumed")):
        points = [
            (epoch.epoch + 1, epoch.training_seconds)
            for epoch in summary.epochs
            if epoch.whole is whole
        ]
        if points:
            axes.plot(*_columns(points), "D", color=RED, markerfacecolor=face, label=label_of)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{simulated_word(summary)}training time of an epoch (s)")
    axes.margins(y=0.15)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # room for the legend above intervals
    axes.set_title("Epoch by epoch", fontsize=15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper center", ncols=4, fontsize=9, columnspacing=1)


def _learning(summary: RunSummary) -> Figure:
    """Loss and held-out accuracy over epochs, with the seconds of training below each tick."""
    figure, (loss, accuracy) = _panels()
    epochs = summary.epochs
    train = [(e.epoch + 1, e.train_loss) for e in epochs if e.train_loss is not None]
    held_out = [(e.epoch + 1, e.val_loss) for e in epochs if e.val_loss is not None]
    loss.plot(*_columns(train), "o-", color=BLUE, markersize=5, label="training")
    loss.plot(*_columns(held_out), "s--", color=ORANGE, markersize=5, label="held out")
    loss.set_ylabel("mean loss per image")
    loss.set_title("Loss", fontsize=15)
    loss.legend(frameon=False)
    right = [(e.epoch + 1, 100 * e.top1) for e in epochs if e.top1 is not None]
    told = [(at, one) for at, one in enumerate(summary.plan.epoch_accuracy, 1) if one is not None]
    if told:
        ends = [[100 * end for end in (one.value, one.low, one.high)] for _, one in told]
        values, lows, highs = zip(*ends, strict=True)
        places = [at for at, _ in told]
        accuracy.fill_between(
            places, lows, highs, color=BLUE, alpha=0.2, linewidth=0, label="95 % interval"
        )
        accuracy.plot(places, values, color=BLUE, label="predicted")
    accuracy.plot(*_columns(right), "s-", color=GREEN, markersize=5, label="measured")
    if told:
        accuracy.legend(frameon=False, loc="lower right", fontsize=10)
    best = summary.best_epoch
    if best is not None and best.top1 is not None:
        point = (best.epoch + 1, 100 * best.top1)
        accuracy.plot(*point, "o", markersize=16, markerfacecolor="none", color="black")
        accuracy.annotate(
            f"best {point[1]:.1f} %", point, (0, -26), textcoords="offset points", ha="center"
        )
    accuracy.set_ylabel("held-out accuracy (%)")
    accuracy.set_title("Accuracy", fontsize=15)
    for axes in (loss, accuracy):
        _epochs_and_seconds(axes, summary)
    return figure


def _epochs_and_seconds(axes: Axes, summary: RunSummary) -> None:
    clock = training_clock(summary)
    shown = evenly(range(len(clock)), 6)
    labels = [f"{summary.epochs[i].epoch + 1}\n{number(clock[i])} s" for i in shown]
    axes.set_xticks([summary.epochs[i].epoch + 1 for i in shown], labels)
    axes.set_xlabel(f"epoch, and {simulated_word(summary)}seconds of training by its end")


def _time(summary: RunSummary) -> Figure:
    """One bar per worker, each as long as the run's wall time."""
    from matplotlib.figure import Figure

    workers = worker_curves(summary)
    figure = Figure(figsize=(11, 2.6 + 0.45 * len(workers)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    places, left = range(len(workers)), [0.0] * len(workers)
    accounts = [dict(accounting(summary, one)) for one in workers]
    parts = [part for part in PART_COLOURS if any(account.get(part) for account in accounts)]
    for part in parts:
        seconds = [account.get(part, 0.0) for account in accounts]
        colour = PART_COLOURS[part]
        axes.barh(
            places, seconds, left=left, height=0.7, color=colour, edgecolor="white", label=part
        )
        left = [start + more for start, more in zip(left, seconds, strict=True)]
    axes.set_yticks(places, [one.label for one in workers], parse_math=False)
    axes.invert_yaxis()
    _style(axes, grid="x")
    axes.set_xlabel(f"{simulated_word(summary) or 'wall '}time (s)")
    axes.set_title("Where the time went", fontsize=15)
    figure.legend(
        loc="outside lower center",
        ncols=len(parts),
        frameon=False,
        fontsize=12,
        columnspacing=1.2,
        handlelength=1.4,
        handletextpad=0.5,
    )
    return figure


def _panels(count: int = 2) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    panels = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for axes in panels:
        _style(axes, grid="both")
    return figure, panels


def _style(axes: Axes, *, grid: Any) -> None:
    """Large letters, so that the figure is still read at half its size."""
    axes.tick_params(labelsize=12)
    axes.xaxis.label.set_fontsize(13)
    axes.yaxis.label.set_fontsize(13)
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _columns(points: list[Any]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in points], [y for _, y in points]


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
