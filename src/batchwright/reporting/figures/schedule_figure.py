"""The figure of a learning rate: the rate against epochs, and what the plan's rows do below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.errors import FileError
from batchwright.records import RateSchedule, ScheduleRow
from batchwright.reporting.data.schedule_words import (
    batch_words,
    decay_words,
    rate_words,
    warmup_words,
)
from batchwright.reporting.figures.colours import BLUE, GREY, ORANGE
from batchwright.reporting.figures.plan_figure import FORMATS, drawn_bytes
from batchwright.storage.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Callable[[ScheduleRow], list[int]]
"""What to draw of a row, least first."""

_MOST_TICKS = 4  # of their own values; more would run into each other

_SPAN = 30.0  # of the rates shown: beyond that the axis is logarithmic, if none is 0


def write_schedule_figure(schedule: RateSchedule, path: Path) -> Path:
    """Draw the schedule; the same one gives the same bytes.

    Args:
        schedule: What to draw.
        path: PNG, PDF or SVG, by its suffix.

    Raises:
        FileError: Another suffix, or the file cannot be written.
    """
    check_figure(path)
    kind = path.suffix.lower().removeprefix(".")
    write_whole(path, drawn_bytes(draw_schedule(schedule), kind))
    return path


def check_figure(path: Path) -> None:
    """Refuse a name that no figure can have, before anything else is done.

    Raises:
        FileError: It ends otherwise than a figure.
    """
    if path.suffix.lower() not in FORMATS:
        raise FileError(f"cannot write {path}: a figure ends in one of {', '.join(FORMATS)}")


def draw_schedule(schedule: RateSchedule) -> Figure:
    """The rate; of several rows resolution and batch below it, and what was decided above."""
    from matplotlib.figure import Figure

    panels = _panels(schedule)
    heights = [3.0, *(1.1 for _ in panels)]
    figure = Figure(figsize=(9.6, 1.2 + sum(heights)), dpi=200, layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    rate = figure.add_subplot(grid[0])
    _draw_rate(rate, schedule)
    below = []
    for index, (label, value) in enumerate(panels):
        axes = figure.add_subplot(grid[index + 1], sharex=rate)
        _draw_steps(axes, schedule, value)
        axes.set_ylabel(label, fontsize=10)
        below.append(axes)
    for axes in (rate, *below):
        _frame(axes, schedule)
        axes.tick_params(labelbottom=axes is (below or [rate])[-1])
    figure.axes[-1].set_xlabel("epochs", fontsize=11)
    figure.suptitle(_title(schedule), fontsize=10)
    return figure


def _title(schedule: RateSchedule) -> str:
    lines = (
        schedule.name,
        f"{rate_words(schedule)}; {batch_words(schedule)}",
        f"warm-up: {warmup_words(schedule)}; decay: {decay_words(schedule)}",
    )
    return "\n".join(line.replace("$", r"\$") for line in lines)


def _panels(schedule: RateSchedule) -> list[tuple[str, Values]]:
    """A label, and the values of a row; nothing for a plan of one row, whose title says it."""
    if len(schedule.rows) == 1:
        return []
    batches: tuple[str, Values] = (
        "global batch\n(samples)",
        lambda row: [row.global_batch_size],
    )
    if schedule.served:
        batches = ("local batches\n(samples)", lambda row: sorted(set(row.local_batch_sizes)))
    return [("resolution\n(pixels)", lambda row: [row.resolution]), batches]


def _draw_rate(axes: Axes, schedule: RateSchedule) -> None:
    epochs = [one.epoch for one in schedule.points]
    rates = [one.learning_rate for one in schedule.points]
    gains = [schedule.rows[one.row].most for one in schedule.points]
    axes.plot(epochs, rates, color=BLUE, linewidth=2.2, label="planned")
    tops = rates
    if max(gains) > 1:
        tops = [rate * gain for rate, gain in zip(rates, gains, strict=True)]
        label = "as far as measured gain and factors may raise it"
        axes.fill_between(epochs, rates, tops, color=ORANGE, alpha=0.25, linewidth=0, label=label)
        axes.legend(frameon=False, fontsize=10)
    low = min(rates)
    if low > 0 and max(rates) > _SPAN * low and schedule.rule.decay != "one-cycle":
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * max(tops))
    axes.set_ylabel("learning rate (per step)", fontsize=11)
    if 0 < schedule.rule.warmup_epochs < schedule.epochs:
        axes.axvline(schedule.rule.warmup_epochs, color=GREY, linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate(
            "peak" if schedule.rule.decay == "one-cycle" else "end of warm-up",
            (schedule.rule.warmup_epochs, 0.03),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=9,
            color=GREY,
        )


def _draw_steps(axes: Axes, schedule: RateSchedule, value: Values) -> None:
    """A line in steps for the least and one for the most of a row's values."""
    told = [value(row) for row in schedule.rows]
    edges = [row.start for row in schedule.rows] + [schedule.epochs]
    for end, colour, style in ((-1, BLUE, "-"), (0, ORANGE, "--")):
        heights = [values[end] for values in told]
        if end == 0 and heights == [values[-1] for values in told]:
            break
        axes.stairs(heights, edges, baseline=None, color=colour, linestyle=style, linewidth=2)
    values = sorted({one for values in told for one in values})
    axes.set_ylim(0, 1.15 * values[-1])
    if len(values) <= _MOST_TICKS:
        axes.set_yticks(values)


def _frame(axes: Axes, schedule: RateSchedule) -> None:
    from matplotlib.ticker import MaxNLocator

    for row in schedule.rows:
        if row.rate_stage % 2:
            axes.axvspan(row.start, row.end, color="#EEEEEE", linewidth=0, zorder=0)
    axes.set_xlim(0, schedule.epochs)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
