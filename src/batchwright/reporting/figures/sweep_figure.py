"""The figures of a sweep: accuracy epoch by epoch, and last accuracy against a key's values."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.records import Sweep
from batchwright.records.text.formatting import counted
from batchwright.reporting.data.sweep_curves import (
    MOST_PANELS,
    Line,
    Panel,
    against,
    curves,
    scale_of,
    value_label,
    varying,
)
from batchwright.reporting.figures.colours import BLUE, GREEN, ORANGE, PURPLE, RED
from batchwright.storage.files import make_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE)
_MARKS = ("o", "s", "D")
_WIDTH, _HEIGHT, _COLUMNS = 5.2, 4.2, 3
_LETTERS, _MARK_LETTERS = 11, 7  # of a legend: to the inch, and as wide as a mark is


def write_sweep_figures(sweep: Sweep, folder: Path) -> list[Path]:
    """Write ``curves_KEY.png`` and ``accuracy_KEY.png`` for each key with several values.

    Returns:
        The files written; none before a run was evaluated.

    Raises:
        FileError: One cannot be written.
    """
    figures: dict[str, Figure] = {}
    for one in varying(sweep):
        panels = curves(sweep, one.key)
        if panels:
            figures[f"curves_{one.key}.png"] = draw_curves(sweep, panels)
            figures[f"accuracy_{one.key}.png"] = draw_against(sweep, one.key)
    if figures:
        make_folder(folder)
    for name, figure in figures.items():
        content = io.BytesIO()
        figure.savefig(content, format="png", metadata={"Software": None})
        write_whole(folder / name, content.getvalue())
    return [folder / name for name in figures]


def draw_curves(sweep: Sweep, panels: list[Panel]) -> Figure:
    """Accuracy per epoch, of `curves` of a key: a panel for each setting of the other keys."""
    from matplotlib.ticker import MaxNLocator

    shown = panels[:MOST_PANELS]
    columns = 2 if len(shown) == 4 else min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = _figure(columns, rows)
    first: Axes | None = None
    for at, panel in enumerate(shown):
        axes = figure.add_subplot(rows, columns, at + 1, sharex=first, sharey=first)
        first = first or axes
        for line in panel.lines:
            _draw(axes, line, joined=True)
        _label(axes, panel.title if len(panels) > 1 else "", "epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left_out = len(panels) - len(shown)
    _legend(figure, shown, sweep, left_out)
    return figure


def draw_against(sweep: Sweep, key: str) -> Figure:
    """Last accuracy against the values of ``key``: a line for each setting of the other keys."""
    panel = against(sweep, key)
    values = next(one.values for one in sweep.keys if one.key == key)
    scale = scale_of(values)
    figure = _figure(1, 1)
    axes = figure.add_subplot()
    for line in panel.lines:
        _draw(axes, line, joined=scale.numeric)
    if scale.logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(scale.places, [value_label(value) for value in values])
    for text in axes.get_xticklabels():
        text.set_parse_math(False)
    _label(axes, "", key)
    _legend(figure, [panel], sweep, 0)
    return figure


def _figure(columns: int, rows: int) -> Figure:
    from matplotlib.figure import Figure

    size = (max(8.0, _WIDTH * columns), _HEIGHT * rows + 0.8)
    return Figure(figsize=size, dpi=110, layout="constrained")


def _draw(axes: Axes, line: Line, *, joined: bool) -> None:
    """Means with their standard errors: a band along a curve, bars at single places."""
    colour, mark = _look(line.number)
    x, means = [spot.x for spot in line.spots], [spot.mean for spot in line.spots]
    errors = [spot.error or 0.0 for spot in line.spots]
    axes.plot(
        x,
        means,
        color=colour,
        marker=mark,
        markersize=4,
        markevery=max(1, len(x) // 20),
        linewidth=1.6,
        linestyle="-" if joined else "none",
    )
    if not any(errors):
        return
    if joined and len(x) > 1:
        low = [mean - error for mean, error in zip(means, errors, strict=True)]
        high = [mean + error for mean, error in zip(means, errors, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    else:
        axes.errorbar(x, means, yerr=errors, fmt="none", ecolor=colour, capsize=3)


def _label(axes: Axes, title: str, across: str) -> None:
    axes.set_title(title, fontsize=12, parse_math=False)
    axes.set_xlabel(across, fontsize=13, parse_math=False)
    axes.set_ylabel("held-out accuracy (%)", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, panels: Sequence[Panel], sweep: Sweep, left_out: int) -> None:
    from matplotlib.lines import Line2D

    lines = {line.number: line for panel in panels for line in panel.lines}
    handles: list[Any] = []
    for line in sorted(lines.values(), key=lambda line: line.number):
        colour, mark = _look(line.number)
        handles.append(Line2D([], [], color=colour, marker=mark, label=line.label))
    several = len(sweep.seeds) > 1
    words = f"mean of {counted(len(sweep.seeds), 'seed')}, ± one standard error"
    title = words if several else f"seed {sweep.seeds[0]}"
    left_out += max(panel.left_out for panel in panels)
    if left_out:
        title += f"; {left_out} more in the table"
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=_legend_columns(figure, [line.label for line in lines.values()]),
        frameon=False,
        fontsize=11,
        title=title,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _legend_columns(figure: Figure, labels: Sequence[str]) -> int:
    """As many as have room."""
    widest = max(map(len, labels), default=0) + _MARK_LETTERS
    return max(1, min(len(labels), int(figure.get_figwidth() * _LETTERS // widest)))


def _look(index: int) -> tuple[str, str]:
    return _COLOURS[index % len(_COLOURS)], _MARKS[index // len(_COLOURS) % len(_MARKS)]
