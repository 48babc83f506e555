"""Names in the figure of a plan: its title, its clusters, and what the marks mean."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING, Any

from batchwright.records.text.formatting import counted
from batchwright.reporting.data.accuracy_curves import accuracy_picture
from batchwright.reporting.data.plan_curves import PlanCurves, top_of
from batchwright.reporting.data.plan_words import range_words
from batchwright.reporting.figures.colours import SHADE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKS = ("o", "s", "^", "D", "v")
_MOST_ABREAST = 6  # names in a row of the legend


def title(curves: PlanCurves, resolutions: Iterable[int]) -> str:
    """Network, data, resolutions and epochs."""
    sides, epochs = range_words(resolutions), counted(curves.epochs, "epoch")
    told = f"{curves.network} on {curves.data}, {sides} px, {epochs}"
    if curves.clusters and sides != range_words([curves.resolution]):
        panels = "a to c" if accuracy_picture(curves) else "a, b"
        return f"{told}; {panels}: all epochs at {curves.resolution} px"
    return told


def name_marks(figure: Figure, curves: PlanCurves, words: str, *, shaded: bool) -> None:
    """Clusters above the panels, what the marks mean below, those that are there.

    Args:
        figure: Whose panels are drawn.
        curves: What is in them.
        words: The title.
        shaded: Whether every other stage of the learning rate is.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey, points, picture = "#555555", points_of(curves), accuracy_picture(curves)
    hollow: dict[str, Any] = {"marker": "s", "markersize": 5.5, "markerfacecolor": "none"}
    ring: dict[str, Any] = {"marker": "o", "markersize": 12, "markerfacecolor": "none"}
    clusters = [
        Line2D([], [], color=COLOURS[index], marker=MARKS[index], markersize=6, label=one.label)
        for index, one in enumerate(curves.clusters)
    ]
    marks = [
        (True, Patch(color=COLOURS[0], alpha=0.25, linewidth=0, label="95 % interval")),
        (
            any(one.extrapolated or one.assumed for one in points),
            Line2D([], [], color=grey, linestyle=(0, (4, 2)), label="beyond what was measured"),
        ),
        (
            any(
                getattr(one, quantity)[0] <= top_of(curves, quantity)
                for quantity in ("seconds", "cost")
                for cluster in curves.clusters
                for one in cluster.measured
            ),
            Line2D([], [], color=grey, marker="o", linestyle="", label="measured"),
        ),
        (
            any(one.knee for one in curves.clusters),
            Line2D([], [], color=grey, marker="*", linestyle="", markersize=12, label="knee"),
        ),
        (
            any(one.chosen for one in points),
            Line2D([], [], color="black", linestyle="", label="chosen", **ring),
        ),
        (picture is not None, Line2D([], [], color=grey, linestyle=":", label="most in that time")),
        (
            picture is not None
            and any(one.candidate.refused for line in picture.lines for one in line),
            Line2D([], [], color=grey, linestyle="", label="refused", **hollow),
        ),
        (shaded, Patch(color=SHADE, linewidth=0, label="every other stage of the rate")),
    ]
    shown = [mark for there, mark in marks if there]
    places: tuple[tuple[list[Any], Any, str | None], ...] = (
        (clusters, "outside upper center", words),
        (shown, "outside lower center", None),
    )
    for handles, place, head in places:
        figure.legend(
            handles=handles,
            title=head,
            title_fontsize=12,
            loc=place,
            ncols=ceil(len(handles) / ceil(len(handles) / _MOST_ABREAST)),
            frameon=False,
            fontsize=10,
            columnspacing=1.6,
            handletextpad=0.5,
        )


def points_of(curves: PlanCurves) -> list[Any]:
    """The points of all clusters."""
    return [one for cluster in curves.clusters for one in cluster.points]
