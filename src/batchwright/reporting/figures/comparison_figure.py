"""The figure of several runs: accuracy against epochs, against real and against simulated time."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.records.text.formatting import percent
from batchwright.reporting.data.comparison import ComparedRun, RunComparison, time_unit
from batchwright.reporting.figures.colours import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from batchwright.storage.files import make_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE)
_MARKS = ("o", "s", "D")


def write_comparison_figure(told: RunComparison, path: Path) -> None:
    """Write the figure as a PNG file; folders on the way are made.

    Raises:
        FileError: The file cannot be written.
    """
    content = io.BytesIO()
    draw_comparison(told).savefig(content, format="png", metadata={"Software": None})
    make_folder(path.parent)
    write_whole(path, content.getvalue())


def draw_comparison(told: RunComparison) -> Figure:
    """A panel for epochs and one for each kind of time that the runs have."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in (False, True) if told.of_clock(simulated=kind)]
    panels = 1 + len(kinds)
    figure = Figure(figsize=(5.5 * panels, 4.8), dpi=110, layout="constrained")
    first = figure.add_subplot(1, panels, 1)
    _panel(first, told, told.runs, "epochs", lambda at: at[0])
    for place, simulated in enumerate(kinds):
        runs = told.of_clock(simulated=simulated)
        unit, name = time_unit(max(one.seconds for one in runs))
        label = f"{'simulated ' if simulated else ''}{name} of training"
        axes = figure.add_subplot(1, panels, 2 + place, sharey=first)
        _panel(axes, told, runs, label, lambda at, unit=unit: at[1] / unit)  # type: ignore[misc]
    _legend(figure, told)
    return figure


def _panel(
    axes: Axes,
    told: RunComparison,
    runs: Sequence[ComparedRun],
    label: str,
    across: Callable[[tuple[int, float, float]], float],
) -> None:
    for one in runs:
        colour, mark = _look(one.setting)
        axes.plot(
            [across(at) for at in one.curve],
            [100 * at[2] for at in one.curve],
            color=colour,
            marker=mark,
            markersize=4,
            markevery=max(1, len(one.curve) // 20),
            linewidth=1.6,
            alpha=0.85,
        )
    if told.common is not None:
        axes.axhline(100 * told.common, color=GREY, linewidth=1, linestyle=(0, (2, 2)))
    axes.set_xlim(left=0)
    axes.set_xlabel(label, fontsize=13)
    axes.set_ylabel("held-out accuracy (%)", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, told: RunComparison) -> None:
    from matplotlib.lines import Line2D

    counts = [sum(one.setting == s for one in told.runs) for s in range(len(told.runs))]
    handles: list[Any] = []
    for one in {run.setting: run for run in reversed(told.runs)}.values():
        colour, mark = _look(one.setting)
        several = f" ({counts[one.setting]} runs)" if counts[one.setting] > 1 else ""
        label = f"{one.label}{several}"
        handles.insert(0, Line2D([], [], color=colour, marker=mark, label=label))
    if told.common is not None:
        words = f"{percent(told.common)}, reached by all"
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (2, 2)), label=words))
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(4, len(handles)),
        frameon=False,
        fontsize=11,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _look(setting: int) -> tuple[str, str]:
    return _COLOURS[setting % len(_COLOURS)], _MARKS[setting // len(_COLOURS) % len(_MARKS)]
