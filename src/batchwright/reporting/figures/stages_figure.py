"""The figure of a plan's rows: resolution, batches, rate and dropout over the epochs, as steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchwright.records import EpochRecord, Plan
from batchwright.reporting.data.stage_curves import StageChart, rate_stages, stage_charts, values_of
from batchwright.reporting.figures.colours import BLUE, ORANGE, RED, SHADE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = ((BLUE, "-"), (ORANGE, "--"))


def draw_stages(plan: Plan, epochs: Sequence[EpochRecord] = ()) -> Figure:
    """A panel for each quantity, one below the other.

    Args:
        plan: The plan.
        epochs: Those that were finished: their rates are marked.
    """
    from matplotlib.figure import Figure

    charts = stage_charts(plan)
    figure = Figure(figsize=(11, 0.9 + 1.75 * len(charts)), dpi=110, layout="constrained")
    first: Axes | None = None
    for index, one in enumerate(charts):
        axes = figure.add_subplot(len(charts), 1, index + 1, sharex=first)
        first = first or axes
        draw_chart(axes, plan, one, epochs)
        axes.tick_params(labelbottom=index == len(charts) - 1)
    _name_stages(figure.axes[0], plan)
    figure.axes[-1].set_xlabel("epochs", fontsize=12)
    return figure


def stage_panels(figure: Figure, plan: Plan, *, row: int, rows: int) -> list[Axes]:
    """Resolution and local batches side by side, in a row of a figure of two columns.

    Args:
        figure: To draw in.
        plan: The plan.
        row: Zero-based.
        rows: Of the figure.
    """
    panels = []
    for column, one in enumerate(stage_charts(plan)[:2]):
        axes = figure.add_subplot(rows, 2, 2 * row + column + 1)
        draw_chart(axes, plan, one)
        axes.set_xlabel("epochs", fontsize=11)
        panels.append(axes)
    return panels


def draw_chart(axes: Axes, plan: Plan, one: StageChart, epochs: Sequence[EpochRecord] = ()) -> None:
    """One quantity; every other stage of the learning rate is shaded."""
    from matplotlib.ticker import MaxNLocator

    for curve, (colour, style) in zip(one.curves, _LOOKS, strict=False):
        xs, ys = zip(*curve.line, strict=True)
        axes.plot(xs, ys, color=colour, linestyle=style, linewidth=2.2, label=curve.name)
    if one.logarithmic:
        axes.set_yscale("log")
        axes.margins(y=0.15)
        told = [(e.epoch + 1, e.learning_rate) for e in epochs if e.learning_rate > 0]
        if told:
            label = "at the end of each epoch"
            axes.plot(*zip(*told, strict=True), "D", color=RED, markersize=4, label=label)
    else:
        axes.set_ylim(0, 1.12 * max(values_of(one)))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if one.exact:
            axes.set_yticks(_apart(values_of(one)))
    for stage in rate_stages(plan):
        if stage.index % 2:
            axes.axvspan(stage.start, stage.end, color=SHADE, linewidth=0, zorder=0)
    axes.set_xlim(0, plan.epochs)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_ylabel(f"{one.title.lower()}\n({one.label})", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.grid(color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_lines()) > 1:
        axes.legend(
            frameon=False, fontsize=10, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98)
        )


def _apart(values: Sequence[float]) -> list[float]:
    """The values from the highest down, and 0, as far as their labels have room."""
    kept: list[float] = []
    for value in sorted({0, *values}, reverse=True):
        if all(other - value >= 0.15 * max(values) for other in kept):
            kept.append(value)
    return kept


def _name_stages(axes: Axes, plan: Plan) -> None:
    for stage in rate_stages(plan):
        axes.annotate(
            f"rate stage {stage.index + 1}",
            ((stage.start + stage.end) / 2, 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=11,
        )
