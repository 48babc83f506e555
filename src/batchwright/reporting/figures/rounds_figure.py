"""The figure of rounds: a lane for each worker, the first rounds above, the whole run below.

Above, every round is drawn: training (small batches lower and hatched, with the batch in the bar),
wait, exchange, evaluation. Below, each lane shows for equal stretches of the run which share of the
time went into what, so that ten rounds and thousands are read in the same way. A run whose rounds
all fit above has no second panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchwright.records import RunSummary
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.round_curves import (
    ROUND_PARTS,
    Lane,
    RoundPart,
    bin_count,
    bins,
    first_seconds,
    lanes,
    last_seconds,
    marks,
    parts_of,
)
from batchwright.reporting.figures.colours import ROUND_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TALL = 0.8  # of the room of a lane
_SMALL = 0.5  # height of a small batch's bar, in large ones
_MOST_MARKS = 16
_MOST_BINS = 160
_NAMES = {"large": "training, large batch", "small": "training, small batch"}
_HATCH: dict[str, Any] = {"hatch": "//", "edgecolor": "white"}


def draw_rounds(summary: RunSummary) -> Figure:
    """The timeline of a run that has rounds."""
    from matplotlib.figure import Figure

    told = lanes(summary)
    until, over = first_seconds(told), last_seconds(told)
    panels = 2 if until < over else 1
    height = 1.5 + panels * (0.75 + 0.36 * len(told))
    figure = Figure(figsize=(11, height), dpi=110, layout="constrained")
    first = figure.add_subplot(panels, 1, 1)
    there: set[RoundPart] = set()
    for row, lane in enumerate(told):
        there |= _rounds(first, row, lane, until)
    _frame(first, summary, told, until)
    if panels == 2:
        first.set_title("the first rounds", fontsize=12, loc="left", pad=20)
        whole = figure.add_subplot(panels, 1, 2)
        for row, lane in enumerate(told):
            there |= _shares(whole, row, lane, over, bin_count(told, _MOST_BINS))
        _frame(whole, summary, told, over)
        whole.set_title("the whole run: shares of the time", fontsize=12, loc="left", pad=20)
    _legend(figure, there)
    return figure


def _rounds(axes: Axes, row: int, lane: Lane, until: float) -> set[RoundPart]:
    """The rounds of one worker that begin before ``until``; returns what they have."""
    there: set[RoundPart] = set()
    foot = row + _TALL / 2
    for one in lane.rounds:
        start = one.start
        for part, seconds in parts_of(one, small=lane.small):
            end = min(start + seconds, until)
            if end > start:
                there.add(part)
                tall = _TALL * (_SMALL if part == "small" else 1.0)
                axes.barh(
                    foot - tall / 2,
                    end - start,
                    left=start,
                    height=tall,
                    color=ROUND_COLOURS[part],
                    linewidth=0,
                    **(_HATCH if part == "small" else {}),
                )
                if part in _NAMES and end - start > 0.04 * until:
                    _batch(axes, (start + end) / 2, foot - tall / 2, one.local_batch_size)
            start += seconds
    return there


def _batch(axes: Axes, x: float, y: float, size: int) -> None:
    """The local batch inside a bar, readable on a hatch."""
    box: dict[str, Any] = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
    axes.text(x, y, f"{size:,}", ha="center", va="center", fontsize=9, bbox=box)


def _shares(axes: Axes, row: int, lane: Lane, until: float, count: int) -> set[RoundPart]:
    """Where one worker's time went, stretch by stretch, as heights."""
    from matplotlib.collections import PolyCollection

    told = bins(lane, until, count)
    foot = [row + _TALL / 2] * len(told)
    there: set[RoundPart] = set()
    for part in ROUND_PARTS:
        top = [low - _TALL * one.shares.get(part, 0.0) for low, one in zip(foot, told, strict=True)]
        boxes = [
            [(one.start, low), (one.start, high), (one.end, high), (one.end, low)]
            for one, low, high in zip(told, foot, top, strict=True)
            if high < low
        ]
        if boxes:
            there.add(part)
            colour = ROUND_COLOURS[part]
            hatch: dict[str, Any] = _HATCH if part == "small" else {"edgecolor": colour}
            axes.add_collection(PolyCollection(boxes, facecolor=colour, linewidth=0, **hatch))
        foot = top
    return there


def _frame(axes: Axes, summary: RunSummary, told: Sequence[Lane], until: float) -> None:
    """Names of the lanes, and lines where an epoch's samples are there or a stage begins."""
    axes.set_xlim(0, until)
    axes.set_ylim(len(told) - 0.4, -0.6)
    axes.set_yticks(range(len(told)), [lane.label for lane in told])
    axes.tick_params(labelsize=11)
    axes.set_xlabel(f"{simulated_word(summary)}seconds since training began", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    shown = [one for one in marks(summary) if one.seconds <= until]
    epochs = len(shown) <= _MOST_MARKS
    taken = -1.0
    for one in shown:
        if not (one.row or epochs):
            continue
        axes.axvline(one.seconds, color="black", linewidth=1 if one.row else 0.7, linestyle=":")
        words = one.row or str(one.epoch)
        half = 0.0045 * len(words) * until
        if one.seconds - half > taken:
            axes.text(one.seconds, -0.62, words, ha="center", va="bottom", fontsize=10)
            taken = one.seconds + half


def _legend(figure: Figure, there: set[RoundPart]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(
            facecolor=ROUND_COLOURS[part],
            label=_NAMES.get(part, part),
            linewidth=0,
            **(_HATCH if part == "small" else {}),
        )
        for part in ROUND_PARTS
        if part in there
    ]
    handles.append(
        Line2D([], [], color="black", linewidth=1, linestyle=":", label="epochs done, next stage")
    )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=11,
        columnspacing=1.2,
        handlelength=1.5,
        handletextpad=0.5,
    )
