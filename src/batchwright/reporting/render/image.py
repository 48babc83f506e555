"""Charts as matplotlib figures. matplotlib is imported only here, and only to draw.

Figures are drawn through its object interface, so that a caller's pyplot state is not touched. The
colours are those of Okabe and Ito, which people with any common colour vision can distinguish;
different lines also have different markers, for prints without colours.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from math import lcm
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from batchwright.reporting.charts.chart import Axis, Box, Chart, Lanes, Series, apart, cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#666666",
    "pale": "#BBBBBB",
    "hollow": "#666666",
    "ink": "black",
    "part-set-up": "#666666",
    "part-input": "#E69F00",
    "part-compute": "#0072B2",
    "part-large": "#0072B2",
    "part-small": "#56B4E9",
    "part-wait": "#F0E442",
    "part-communication": "#D55E00",
    "part-exchange": "#D55E00",
    "part-evaluation": "#009E73",
    "part-checkpoints": "#CC79A7",
    "part-other": "#BBBBBB",
}
_MARKS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "star": "*"}
_MARKS |= {"ring": "o", "none": ""}
# Markers that replace a shape which another colour has as well.
_PRINTED = {("purple", "circle"): "v", ("orange", "square"): "^"}
_SIZES = {"star": 13.0, "ring": 15.0, "diamond": 5.0}
_WIDTH = 11.0  # of a figure, in inches
_LETTERS, _MARK_LETTERS = 11, 7  # of a legend: letters per inch, and the width of a mark in letters
_MAX_MARKS = 40  # on one line

Row = tuple[float, Sequence[Chart | Lanes | None]]
"""Height in inches, and the charts side by side; `None` leaves a place empty."""


@contextmanager
def _plain_style() -> Iterator[None]:
    """Inside, matplotlib uses its default style, whatever the caller or their settings chose."""
    import matplotlib.style

    with matplotlib.style.context("default"), warnings.catch_warnings():
        yield


@_plain_style()
def figure(
    rows: Sequence[Row], *, title: str = "", below: str = "", lettered: bool = False, dpi: int = 110
) -> Figure:
    """Draw rows of charts with one legend below them.

    Text is drawn literally: dollar signs in names do not start formulas.

    Args:
        rows: The rows, from the top.
        title: Title of the figure.
        below: Title of the legend.
        lettered: Whether charts are labelled a, b, ... in bold.
        dpi: Pixels per inch of a PNG file.
    """
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    heights = [height for height, _ in rows]
    drawn = Figure((_WIDTH, sum(heights) + 0.8), dpi=dpi, layout="constrained")
    across = lcm(*(len(charts) for _, charts in rows))
    grid = drawn.add_gridspec(len(rows), across, height_ratios=heights)
    letters = iter("abcdefgh")
    for at, (_, charts) in enumerate(rows):
        span = across // len(charts)
        for column, chart in enumerate(charts):
            if chart is None:
                continue
            axes = drawn.add_subplot(grid[at, column * span : (column + 1) * span])
            size, room = (13, 9) if len(charts) < 3 else (11, 10)  # of letters; of them in an inch
            _draw(axes, chart, title_size=size, room=int(room * _WIDTH / len(charts)))
            left = charts[column - 1] if column else None
            under = rows[at + 1][1] if at + 1 < len(rows) else []
            same_below = any(one.x == chart.x for one in under[column : column + 1] if one)
            axes.tick_params(labelbottom=not same_below)
            axes.set_xlabel("" if same_below else chart.x.label, fontsize=12)
            if isinstance(chart, Chart) and isinstance(left, Chart) and left.y == chart.y:
                axes.tick_params(labelleft=False)
                axes.set_ylabel("")
            if lettered:
                axes.set_title(next(letters), loc="left", fontweight="bold", fontsize=13)
    if title:
        drawn.suptitle(_wrapped(title, 10 * int(_WIDTH)), fontsize=12)
    _legend(drawn, [one for _, charts in rows for one in charts if one], below)
    for text in drawn.findobj(Text):
        text.set_parse_math(False)
    return drawn


@_plain_style()
def file_bytes(drawn: Figure, kind: str = "png") -> bytes:
    """The figure as a file's content, without time or version, so that equal figures are equal.

    Args:
        drawn: The figure.
        kind: ``png``, ``pdf`` or ``svg``.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box stands for such a letter
    unsaid = {
        "png": ("Software",),
        "pdf": ("Creator", "Producer", "CreationDate"),
        "svg": ("Creator", "Date"),
    }[kind]
    content = io.BytesIO()
    if kind == "png":  # the same bytes as from `savefig`, which draws everything twice
        canvas: Any = FigureCanvasAgg(drawn)  # its methods have no types
        canvas.print_png(content, metadata=dict.fromkeys(unsaid))
        return content.getvalue()
    with mpl.rc_context({"svg.hashsalt": "batchwright", "pdf.fonttype": 42}):
        drawn.savefig(content, format=kind, metadata=dict.fromkeys(unsaid))
    return content.getvalue()


# --------------------------------------------------------------------------------------- one chart


def _wrapped(text: str, room: int) -> str:
    """The text in lines of at most ``room`` letters: names from outside may be long."""
    return "\n".join(part for line in text.splitlines() for part in wrap(line, room))


def _draw(axes: Axes, chart: Chart | Lanes, title_size: int, room: int) -> None:
    x = chart.x
    if isinstance(chart, Chart):
        _draw_chart(axes, chart)
        if x.logarithmic:  # it begins where something is drawn inside the y axis
            series = (one for one in _shown(chart) if one.style != "grey")
            inside = [point.x for one in series for point in one.points if point.y <= chart.y.high]
            low = max(x.low, min(inside, default=x.low) / 1.15)
            x = replace(x, low=low, ticks=tuple(one for one in x.ticks if one[0] >= low))
    else:
        _draw_lanes(axes, chart)
    _scale(axes.set_xscale, axes.set_xlim, axes.set_xticks, x)
    if chart.title:
        words = isinstance(chart, Lanes) and any(one.words for one in chart.marks)
        title = _wrapped(chart.title, room)
        axes.set_title(title, fontsize=title_size, pad=20 if words else 6)
    axes.tick_params(labelsize=11)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(set_scale: Any, set_limits: Any, set_ticks: Any, axis: Axis) -> None:
    if axis.logarithmic:
        set_scale("log")
    places = [place for place, _ in axis.ticks]
    set_ticks(places, [label for _, label in axis.ticks])
    set_ticks([], minor=True)
    set_limits(axis.low, axis.high)


def _shown(chart: Chart) -> list[Series]:
    return [one for one in chart.series if one.points and one.only != "page"]


def _draw_chart(axes: Axes, chart: Chart) -> None:
    from matplotlib.patheffects import withStroke

    for band in chart.bands:
        if band.edges:
            x, low, high = zip(*band.edges, strict=True)
            alpha = 0.13 if band.style == "grey" else 0.2
            colour = COLOURS[band.style]
            axes.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0, zorder=1)
    _draw_boxes(axes, [(box, box.low, box.high) for box in chart.boxes])
    for one in _shown(chart):
        axes.plot(
            [point.x for point in one.points],
            [point.y for point in one.points],
            **_look(one),
            markevery=max(1, len(one.points) // _MAX_MARKS),
        )
        for point in one.points:
            look: dict[str, Any] = {"color": COLOURS[one.style], "linewidth": 1.2, "zorder": 3}
            if point.across:
                ends = [min(max(end, chart.x.low), chart.x.high) for end in point.across]
                axes.plot(ends, [point.y] * 2, marker="|", **look)
            if point.up:
                ends = [min(max(end, chart.y.low), chart.y.high) for end in point.up]
                axes.plot([point.x] * 2, ends, marker="_", **look)
            if point.label:
                place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "zorder": 4}
                name = axes.annotate(point.label, (point.x, point.y), (6, -13), **place)
                name.set(
                    color="#444444", path_effects=[withStroke(linewidth=3, foreground="white")]
                )
    _scale(axes.set_yscale, axes.set_ylim, axes.set_yticks, chart.y)
    if not chart.y.logarithmic:  # room for half a line at the top
        axes.set_ylim(top=chart.y.high + 0.015 * (chart.y.high - chart.y.low))
    axes.set_ylabel(chart.y.label, fontsize=12)
    axes.grid(color="#E0E0E0", linewidth=0.7)


def _look(one: Series) -> dict[str, Any]:
    """Matplotlib's properties of a series, also for the legend."""
    colour, ring = COLOURS[one.style], one.marker == "ring"
    dashed = one.dashed or one.style == "grey"
    return {
        "color": colour,
        "linestyle": "none" if not one.line else (0, (4, 2)) if dashed else "-",
        "linewidth": 1.0 if one.style in ("grey", "pale") else 1.8,
        "marker": _PRINTED.get((one.style, one.marker), _MARKS[one.marker]),
        "markersize": _SIZES.get(one.marker, 5.5),
        "markerfacecolor": "none" if ring or one.style == "hollow" else colour,
        "markeredgecolor": "white" if one.marker == "star" else colour,
        "zorder": 2 if one.style in ("grey", "pale") else 6 if ring else 4,
        "clip_on": one.line,  # marks at the edge are whole
    }


def _draw_lanes(axes: Axes, chart: Lanes) -> None:
    """Draw lanes from the top; boxes take 0.8 of a lane's height."""
    boxes = []
    for at, lane in enumerate(chart.lanes):
        for one in lane.boxes:
            low, high = (at + 0.9 - 0.8 * end for end in (one.low, one.high))
            boxes.append((one, low, high))
            if one.label and one.end - one.start > 0.04 * chart.x.high:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
                place: dict[str, Any] = {"ha": "center", "va": "center", "bbox": box}
                axes.text((one.start + one.end) / 2, (low + high) / 2, one.label, **place, size=9)
    _draw_boxes(axes, boxes, edge=0.8 if chart.bars else 0.0)
    axes.set_ylim(len(chart.lanes), 0)
    names = [lane.full_name or lane.name for lane in chart.lanes]
    axes.set_yticks([at + 0.5 for at in range(len(names))], names)
    for mark in chart.marks:
        axes.axvline(mark.x, color="black", linewidth=0.8, linestyle=":")
    worded = [one for one in chart.marks if one.words]
    letter = 0.009 * (chart.x.high - chart.x.low)
    for at in apart([(one.x, letter / 2 * (len(one.words) + 1)) for one in worded]):
        place = {"textcoords": "offset points", "ha": "center", "fontsize": 10}
        axes.annotate(worded[at].words, (worded[at].x, 0), (0, 4), **place)
    axes.grid(axis="x", color="#E0E0E0", linewidth=0.7)


def _draw_boxes(
    axes: Axes, boxes: Iterable[tuple[Box, float, float]], *, edge: float = 0.0
) -> None:
    """Draw boxes as one collection for each style: single rectangles take seconds in a long run."""
    from matplotlib.collections import PolyCollection

    corners: dict[str, list[list[tuple[float, float]]]] = {}
    for one, low, high in boxes:
        places = [(one.start, low), (one.start, high), (one.end, high), (one.end, low)]
        corners.setdefault(one.style, []).append(places)
    for style, found in corners.items():
        look = _box_look(style) | {"linewidth": edge, "snap": False}
        axes.add_collection(PolyCollection(found, **look))


def _box_look(style: str) -> dict[str, Any]:
    """Matplotlib's properties of a box; small batches are hatched, for prints without colours."""
    words = style.split()
    (part,) = (word for word in words if word.startswith("part-"))
    look = {"facecolor": COLOURS[part], "edgecolor": "white", "linewidth": 0}
    look |= {"hatch": "//"} if part == "part-small" else {}
    return look | ({"alpha": 0.45} if "pale" in words else {})


# ------------------------------------------------------------------------------------- the legend


def _legend(drawn: Figure, charts: Sequence[Chart | Lanes], title: str) -> None:
    """Draw the legend: each name once, with the look of its first series.

    Series with the name of their chart are left out. A name of several series gets the line of one
    and the marker of another.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines: dict[str, dict[str, Any]] = {}
    patches: dict[str, dict[str, Any]] = {}  # by style or name
    for chart in charts:
        if isinstance(chart, Lanes):
            boxes = [box for lane in chart.lanes for box in lane.boxes]
            if chart.marks:
                look = {"color": "black", "linestyle": ":", "linewidth": 1}
                lines["epochs done, next stage"] = look
        else:
            boxes = [*chart.boxes]
            for one in (one for one in _shown(chart) if one.name.lower() != chart.title.lower()):
                look = _look(one) | ({} if len(one.points) > 1 else {"linestyle": "none"})
                known = lines.setdefault(one.name, look)
                known["marker"] = known["marker"] or look["marker"]
                if known["linestyle"] == "none":
                    known["linestyle"] = look["linestyle"]
            for band in chart.bands:
                look = {"color": COLOURS[band.style], "alpha": 0.2, "linewidth": 0}
                patches.setdefault(band.name, look | {"label": band.name})
        there = {box.style for box in boxes if box.end > box.start and box.high > box.low}
        for name, style in chart.names:
            if any(box.endswith(style) for box in there):
                patches.setdefault(style, _box_look(style) | {"label": name})
    most = 10 * int(_WIDTH) - _MARK_LETTERS  # letters of a name that is alone in its row
    handles: list[Any] = []
    for name, mark in lines.items():
        if name:
            size = min(mark.get("markersize", 0), 11)
            handles.append(Line2D([], [], label=cut(name, most), **mark | {"markersize": size}))
    handles += [Patch(**look) for look in patches.values()]
    wide = [len(one.get_label()) + _MARK_LETTERS for one in handles]
    fitting = (n for n in range(len(wide), 1, -1) if _columns(wide, n) <= _WIDTH * _LETTERS)
    drawn.legend(
        handles=handles,
        title=title,
        loc="outside lower center",
        ncols=next(fitting, 1),
        frameon=False,
        fontsize=11,
        columnspacing=1.4,
        handletextpad=0.5,
    )


def _columns(wide: Sequence[int], count: int) -> int:
    """Width in letters of a legend with ``count`` columns, which are filled one after the other."""
    rows, longer = divmod(len(wide), count)
    ends = [*accumulate([rows + 1] * longer + [rows] * (count - longer), initial=0)]
    return sum(max(wide[start:end]) for start, end in pairwise(ends))
