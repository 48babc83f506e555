"""The figure of a plan: time and cost against the global batch, for a page or for a paper.

Above them, where it is known, the accuracy of each candidate over its training time.

A curve for each cluster: solid where the steps around were measured, dashed where they were not;
its 95 % interval; the knee, with its own interval as a bar at the foot; and what was measured, on
top. Clusters differ in colour (Okabe and Ito) and in mark, so that a black print tells them apart.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchwright.errors import FileError
from batchwright.records import Plan, Profile
from batchwright.records.text.formatting import counted_points
from batchwright.reporting.data.accuracy_curves import (
    AccuracyPicture,
    AccuracyPoint,
    accuracy_picture,
)
from batchwright.reporting.data.axes import batch_axis
from batchwright.reporting.data.plan_curves import (
    BETWEEN,
    ClusterCurve,
    PlanCurves,
    Range,
    Row,
    plan_curves,
    smooth,
    top_of,
    units_of,
)
from batchwright.reporting.data.stage_curves import rate_stages
from batchwright.reporting.figures.plan_legend import COLOURS, MARKS, name_marks, points_of, title
from batchwright.reporting.figures.stages_figure import stage_panels
from batchwright.storage.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
Quantity = Literal["seconds", "cost"]
_SECONDS: Quantity = "seconds"
_COST: Quantity = "cost"


def has_figure(plan: Plan) -> bool:
    """Whether there is anything to draw: candidates, several stages, or two batches."""
    return bool(plan_curves(plan).clusters) or _shows_stages(plan)


def _shows_stages(plan: Plan) -> bool:
    return len(plan.stages) > 1 or plan.server is not None


def plan_figure_data(plan: Plan, profiles: Sequence[Profile] = ()) -> dict[str, Any]:
    """What the figure shows, as plain numbers.

    Args:
        plan: The plan.
        profiles: What was measured; their steps are the points on top.

    Returns:
        The fields of `plan_curves.PlanCurves`, with a ``format``; ``stages``, where the figure
        shows them.
    """
    data = {"format": "batchwright-plan-figure/1", **asdict(plan_curves(plan, profiles))}
    if _shows_stages(plan):
        kept = {"epochs", "resolution", "learning_rate", "rate_stage", "local_batch_sizes"}
        data["stages"] = [stage.model_dump(include=kept, mode="json") for stage in plan.stages]
    return data


def write_plan_figure(plan: Plan, profiles: Sequence[Profile], path: Path) -> list[Path]:
    """Draw the plan, and write the numbers beside it as ``NAME.figure.json``.

    The same plan and profiles give the same bytes.

    Args:
        plan: The plan.
        profiles: What was measured.
        path: PNG, PDF or SVG, by its suffix.

    Returns:
        The files written: the figure and its numbers.

    Raises:
        FileError: Another suffix, a plan without candidates, or the file cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise FileError(f"cannot write {path}: a figure ends in one of {', '.join(FORMATS)}")
    curves = plan_curves(plan, profiles)
    if not has_figure(plan):
        raise FileError(f"cannot write {path}: the plan holds no predictions to draw")
    numbers = path.with_suffix(".figure.json")
    write_whole(path, drawn_bytes(draw_plan(curves, plan), path.suffix.lower().removeprefix(".")))
    write_numbers(plan_figure_data(plan, profiles), numbers)
    return [path, numbers]


def write_numbers(data: dict[str, Any], path: Path) -> None:
    """Write what a figure shows as JSON.

    Raises:
        FileError: It cannot be written.
    """
    write_whole(path, f"{json.dumps(data, indent=2, ensure_ascii=False)}\n".encode())


def draw_plan(curves: PlanCurves, plan: Plan) -> Figure:
    """Time and cost under one legend; of several stages or batches those over the epochs, below.

    Args:
        curves: Of the plan; without a cluster there are no panels for time and cost.
        plan: One for which `has_figure` holds.
    """
    from matplotlib.figure import Figure

    picture = accuracy_picture(curves)
    above = int(picture is not None)
    rows = above + bool(curves.clusters) + _shows_stages(plan)
    figure = Figure(figsize=(9.6, 0.9 + 3.4 * rows), dpi=200, layout="constrained")
    panels = [_learnt(figure, curves, picture, rows)] if picture else []
    panels += _time_and_cost(figure, curves, rows, above) if curves.clusters else []
    if _shows_stages(plan):
        panels += stage_panels(figure, plan, row=rows - 1, rows=rows)
    for letter, axes in zip("abcdefgh", panels, strict=False):
        axes.set_title(letter, loc="left", fontweight="bold", fontsize=13)
    words = title(curves, (stage.resolution for stage in plan.stages))
    if curves.clusters:
        name_marks(figure, curves, words, shaded=len(rate_stages(plan)) > 1)
    else:
        figure.suptitle(words, fontsize=12)
    return figure


def _learnt(figure: Figure, curves: PlanCurves, picture: AccuracyPicture, rows: int) -> Axes:
    """Accuracy over time, the first row of the figure."""
    axes = figure.add_subplot(rows, 2, (1, 2))
    (scale, unit), _ = units_of(curves)
    axes.axhspan(*picture.band, color="#009E73", alpha=0.2, linewidth=0)
    axes.plot(
        [seconds / scale for seconds, _ in picture.frontier],
        [share for _, share in picture.frontier],
        color="#555555",
        linewidth=1,
        linestyle=":",
    )
    for index, line in enumerate(picture.lines):
        allowed = [one for one in line if not one.candidate.refused]
        for ones, joined, face in ((allowed, "-", COLOURS[index]), (line, "", "none")):
            axes.plot(
                [one.seconds[0] / scale for one in ones],
                [one.accuracy[0] for one in ones],
                f"{MARKS[index]}{joined}",
                color=COLOURS[index],
                markerfacecolor=face,
                markersize=5.5,
                zorder=4,
            )
        for one in line:
            _name(axes, one, scale)
    low, high = picture.percents
    axes.set_xlim(0, picture.seconds / scale)
    axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.set_xlabel(f"training time ({unit})")
    axes.set_ylabel("predicted accuracy (%)")
    words = f"within {counted_points(curves.accuracy_tolerance)} of the best"
    axes.annotate(
        words,
        (1, picture.band[1]),
        (-2, 3),
        xycoords=("axes fraction", "data"),
        ha="right",
        textcoords="offset points",
        fontsize=9,
        color="#444444",
    )
    _plain(axes)
    return axes


def _name(axes: Axes, one: AccuracyPoint, scale: float) -> None:
    """The batch of a point, and ring and intervals of the chosen one."""
    at = one.seconds[0] / scale, one.accuracy[0]
    if one.named:
        batch = f"{one.candidate.global_batch_size:,}"
        axes.annotate(batch, at, (6, -13), textcoords="offset points", fontsize=9, color="#444444")
    if one.candidate.chosen:
        across, up = (
            [[(value - low) / unit], [(high - value) / unit]]
            for (value, low, high), unit in ((one.seconds, scale), (one.accuracy, 1.0))
        )
        axes.errorbar(*at, xerr=across, yerr=up, fmt="none", color="black", elinewidth=1.2)
        _ring(axes, *at)


def _time_and_cost(figure: Figure, curves: PlanCurves, rows: int, above: int) -> list[Axes]:
    """The first row of the figure, or that below so many others."""
    time, cost = (figure.add_subplot(rows, 2, 2 * above + place) for place in (1, 2))
    (scale, unit), (worth, currency) = units_of(curves)
    for axes, quantity, factor in ((time, _SECONDS, 1 / scale), (cost, _COST, 1 / worth)):
        for index, cluster in enumerate(curves.clusters):
            _cluster(axes, cluster, quantity, factor, COLOURS[index], MARKS[index])
        top = top_of(curves, quantity)
        _frame(axes, curves, _first_batch(curves, quantity, top), top * factor)
    _limit(time, curves.deadline, 1 / scale, "goal.deadline")
    _limit(cost, curves.max_cost if curves.priced else None, 1 / worth, "goal.max_cost")
    time.set_ylabel(f"training time ({unit})")
    cost.set_ylabel(f"cost ({currency})")
    return [time, cost]


# -------------------------------------------------------------------------------------- a panel


def _frame(axes: Axes, curves: PlanCurves, first: int, top: float) -> None:
    axes.set_xscale("log", base=2)
    found = {one.global_batch_size for one in points_of(curves)}
    batches = sorted(one for one in found if one >= first)
    chosen = [one.global_batch_size for one in points_of(curves) if one.chosen]
    ticks = batch_axis("", batches, chosen).ticks
    axes.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("global batch (samples per step)")
    axes.set_xlim(left=first / 1.15)
    axes.set_ylim(0, top)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
    axes.xaxis.label.set_fontsize(11)
    axes.yaxis.label.set_fontsize(11)


def _first_batch(curves: PlanCurves, quantity: Quantity, top: float) -> int:
    """The last batch before any curve is below ``top``; the first there is, if some begins so."""
    batches: list[int] = sorted({one.global_batch_size for one in points_of(curves)})
    inside = [o.global_batch_size for o in points_of(curves) if _of(o, quantity)[1] <= top]
    return max((one for one in batches if one < min(inside)), default=batches[0])


def _limit(axes: Axes, limit: float | None, factor: float, word: str) -> None:
    """A line at one of the goal's limits, unless it lies above everything."""
    if limit is None or limit * factor > axes.get_ylim()[1]:
        return
    axes.axhline(limit * factor, color="#444444", linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        word,
        (1, limit * factor),
        (-2, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color="#444444",
    )


def _cluster(
    axes: Axes, cluster: ClusterCurve, quantity: Quantity, factor: float, colour: str, mark: str
) -> None:
    points = cluster.points
    drawn = smooth([(one.global_batch_size, *_of(one, quantity)) for one in points])
    for dashed, part in _stretches([one.extrapolated or one.assumed for one in points], drawn):
        batches, values, lows, highs = (
            [row[column] * (factor if column else 1) for row in part] for column in range(4)
        )
        axes.fill_between(batches, lows, highs, color=colour, alpha=0.18, linewidth=0)
        style = (0, (4, 2)) if dashed else "-"
        axes.plot(batches, values, color=colour, linewidth=1.8, linestyle=style)
    if len(points) == 1:
        at, (value, low, high) = points[0].global_batch_size, _of(points[0], quantity)
        error = [[factor * (value - low)], [factor * (high - value)]]
        axes.errorbar(at, factor * value, yerr=error, fmt="_", color=colour, markersize=14)
    if cluster.measured:
        ends = [[factor * end for end in _of(one, quantity)] for one in cluster.measured]
        axes.errorbar(
            [one.global_batch_size for one in cluster.measured],
            [value for value, _, _ in ends],
            yerr=[[v - low for v, low, _ in ends], [high - v for v, _, high in ends]],
            fmt=mark,
            color=colour,
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.8,
            elinewidth=1.2,
            zorder=4,
        )
    _mark_knee(axes, cluster, quantity, factor, colour)
    for one in points:
        if one.chosen:
            _ring(axes, one.global_batch_size, factor * _of(one, quantity)[0])


def _ring(axes: Axes, x: float, y: float) -> None:
    """Around the chosen candidate."""
    axes.plot(
        x,
        y,
        "o",
        markersize=15,
        markerfacecolor="none",
        markeredgecolor="black",
        markeredgewidth=1.3,
        zorder=6,
    )


def _mark_knee(
    axes: Axes, cluster: ClusterCurve, quantity: Quantity, factor: float, colour: str
) -> None:
    knee = cluster.knee
    if knee is None:
        return
    height = factor * (knee.seconds if quantity == "seconds" else knee.cost)
    at = knee.global_batch_size
    axes.plot([at, at], [0, height], color=colour, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    if knee.low is not None and knee.high is not None:
        first, last = cluster.points[0], cluster.points[-1]
        axes.plot(
            [max(knee.low, first.global_batch_size), min(knee.high, last.global_batch_size)],
            [0, 0],
            color=colour,
            linewidth=5,
            alpha=0.45,
            solid_capstyle="butt",
            clip_on=False,
            zorder=3,
        )
    axes.plot(at, height, "*", color=colour, markersize=15, markeredgecolor="white", zorder=5)


def _stretches(dashed: Sequence[bool], drawn: Sequence[Row]) -> list[tuple[bool, Sequence[Row]]]:
    """Parts of a smooth line that are all solid or all dashed.

    ``dashed`` is of the candidates; between two of them the line is dashed if either is.
    """
    found: list[tuple[bool, Sequence[Row]]] = []
    for index, (left, right) in enumerate(pairwise(dashed)):
        part = drawn[index * BETWEEN : (index + 1) * BETWEEN + 1]
        if found and found[-1][0] == (left or right):
            part = [*found.pop()[1], *part[1:]]
        found.append((left or right, part))
    return found


def _of(point: Any, quantity: Quantity) -> Range:
    found: Range = getattr(point, quantity)
    return found


# ---------------------------------------------------------------------------------- the file


def drawn_bytes(figure: Figure, kind: str) -> bytes:
    """The file's bytes, with nothing in them that tells when or by which version they were made."""
    import matplotlib as mpl

    unsaid = {
        "png": ("Software",),
        "pdf": ("Creator", "Producer", "CreationDate"),
        "svg": ("Creator", "Date"),
    }[kind]
    content = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "batchwright", "pdf.fonttype": 42}):
        figure.savefig(content, format=kind, metadata=dict.fromkeys(unsaid))
    return content.getvalue()
