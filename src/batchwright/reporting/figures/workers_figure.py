"""The figure of the workers: a small panel for each, its local batch above, its times below.

Every panel shows the local batches of all, grey, behind its own, so that two workers and sixteen
are read in the same way. The times of an epoch stand where the local batches of that epoch do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING, Any

from batchwright.reporting.data.worker_curves import (
    PARTS,
    Part,
    Step,
    WorkerCurve,
    WorkerEpoch,
    most_different,
    step_lines,
)
from batchwright.reporting.figures.colours import BLUE, PALE, PART_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 16
MOST_COLUMNS = 4
RESUMED = 0.45  # opacity of an epoch of which part ran before a resume


def workers_figure_data(curves: Sequence[WorkerCurve]) -> dict[str, Any]:
    """What the figure shows, as plain numbers, of all workers.

    Returns:
        The fields of each `worker_curves.WorkerCurve`, with a ``format``.
    """
    return {
        "format": "batchwright-workers-figure/1",
        "workers": [asdict(one) for one in curves],
    }


def draw_workers(curves: Sequence[WorkerCurve], *, clock: str = "") -> Figure:
    """Local batch and times of each worker over the epochs; of many those that differ most.

    Args:
        curves: One worker at least, each with an epoch at least.
        clock: What to say of the seconds: ``simulated ``, or nothing.
    """
    from matplotlib.figure import Figure

    shown = most_different(curves, MOST_PANELS)
    rows = ceil(len(shown) / MOST_COLUMNS)
    columns = ceil(len(shown) / rows)
    figure = Figure(figsize=(11, 1.5 + 2.9 * rows), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[2, 3] * rows)
    lines = [step_lines(one.shares) for one in curves]
    ends = _ends(curves)
    first: dict[bool, Axes] = {}
    for index, one in enumerate(shown):
        row, column = divmod(index, columns)
        for below in (False, True):
            axes = figure.add_subplot(grid[2 * row + below, column], sharey=first.get(below))
            first.setdefault(below, axes)
            if below:
                _times(axes, one)
            else:
                _batches(axes, lines, lines[one.number])
                axes.set_title(one.label, fontsize=11, parse_math=False)
            lowest = below and index + columns >= len(shown)
            _frame(axes, ends, left=not column, lowest=lowest)
            if not column:
                axes.set_ylabel(f"{clock}s / epoch" if below else "local batch", fontsize=11)
    for axes in first.values():  # last: a limit that is set ends the scaling to what is drawn
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    if len(shown) < len(curves):
        words = f"{len(shown)} of {len(curves)} workers, from the fewest samples to the most"
        figure.suptitle(words, fontsize=12)
    _legend(figure, [epoch for one in shown for epoch in one.epochs])
    return figure


def _batches(axes: Axes, lines: Sequence[list[list[Step]]], own: list[list[Step]]) -> None:
    for line in (line for worker in lines for line in worker):
        axes.plot(*zip(*line, strict=True), color=PALE, linewidth=1, zorder=2)
    for line in own:
        axes.plot(*zip(*line, strict=True), color=BLUE, linewidth=2.2, zorder=3)


def _times(axes: Axes, one: WorkerCurve) -> None:
    """Bars an epoch wide, stacked; paler where part of the epoch ran before a resume.

    A collection for each part: a rectangle for each bar takes seconds to draw in a long run.
    """
    from matplotlib.collections import PolyCollection

    for whole in (True, False):
        epochs = [epoch for epoch in one.epochs if epoch.whole is whole]
        foot = [0.0] * len(epochs)
        for part in PARTS:
            top = [low + epoch.seconds(part) for low, epoch in zip(foot, epochs, strict=True)]
            bars = [
                _bar(epoch.epoch, low, high)
                for epoch, low, high in zip(epochs, foot, top, strict=True)
            ]
            look: dict[str, Any] = {"alpha": 1 if whole else RESUMED, "linewidth": 0, "snap": False}
            axes.add_collection(PolyCollection(bars, color=PART_COLOURS[part], **look))
            foot = top
    axes.autoscale_view()


def _bar(epoch: int, low: float, high: float) -> list[tuple[float, float]]:
    left, right = epoch + 0.03, epoch + 0.97
    return [(left, low), (left, high), (right, high), (right, low)]


def _ends(curves: Sequence[WorkerCurve]) -> tuple[int, int]:
    epochs = [epoch.epoch for one in curves for epoch in one.epochs]
    return min(epochs), max(epochs) + 1


def _frame(axes: Axes, ends: tuple[int, int], *, left: bool, lowest: bool) -> None:
    """Numbers on the outer panels alone: all have the same axes."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(*ends)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(labelsize=10, labelleft=left, labelbottom=lowest)
    axes.grid(color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if lowest:
        axes.set_xlabel("epochs", fontsize=11)


def _legend(figure: Figure, epochs: Sequence[WorkerEpoch]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    told = any(epoch.wait_seconds is not None for epoch in epochs)
    names: dict[Part, str] = {
        part: part for part in PARTS if any(epoch.seconds(part) for epoch in epochs)
    }
    if not told and "communication" in names:
        names["communication"] = "communication and wait"
    resumed = Patch(color=PART_COLOURS["compute"], alpha=RESUMED, label="resumed inside")
    handles = [
        Line2D([], [], color=BLUE, linewidth=2.2, label="local batch"),
        Line2D([], [], color=PALE, linewidth=1.5, label="of the others"),
        *(Patch(color=PART_COLOURS[part], label=name) for part, name in names.items()),
        *([] if all(epoch.whole for epoch in epochs) else [resumed]),
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=11,
        columnspacing=1.4,
        handletextpad=0.5,
    )
