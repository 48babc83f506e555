"""Charts as inline SVG, with colours from the page's style sheet and a title on every mark.

A chart is 440 units wide, so that its letters are readable on a phone. It has no style or script of
its own: classes name the meaning of a mark, and the page defines its look in light and dark mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import cos, pi, sin

from batchwright.records.text.problems import printable
from batchwright.reporting.charts.chart import Axis, Chart, Lanes, Series, apart

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP = 68, 26, 12
ROW, LINE = 34, 15
LEAST = 0.8  # least width of a box: narrower ones would be invisible
MARK = 14  # height above lanes for the words of marks
LETTER = 7.0  # usual width of a letter


def drawn(chart: Chart | Lanes) -> str:
    """The chart as an ``<svg>`` element."""
    if isinstance(chart, Chart):
        return _over_two_axes(chart)
    return _bars(chart) if chart.bars else _lanes(chart)


def legend(chart: Chart | Lanes) -> list[tuple[str, str]]:
    """The legend's entries: (name, a small ``<svg>`` of the mark)."""
    if isinstance(chart, Lanes):
        return [(name, _swatch(style, "bar")) for name, style in chart.names]
    entries = {one.name: _swatch(one.style, one.marker) for one in _shown(chart) if one.name}
    return list((entries | {one.name: _swatch(one.style, "band") for one in chart.bands}).items())


def _shown(chart: Chart) -> list[Series]:
    return [one for one in chart.series if one.points and one.only != "file"]


def _over_two_axes(chart: Chart) -> str:
    x, y, series = chart.x, chart.y, _shown(chart)
    parts = _grid(x, y, HEIGHT)
    for band in chart.bands:
        edge = [(at, high) for at, _, high in band.edges]
        edge += [(at, low) for at, low, _ in reversed(band.edges)]
        parts.append(
            f'<polygon class="band {band.style}" points="{_places(edge, x, y)}">'
            f"{_title(band.name)}</polygon>"
        )
    for one in series:
        if one.line and len(one.points) > 1:
            places = _places([(p.x, p.y) for p in one.points], x, y)
            parts.append(f'<polyline class="line {one.style}" points="{places}"/>')
    for one in series:
        for point in one.points:
            flat = [(_within(end, x), point.y) for end in point.across or ()]
            steep = [(point.x, _within(end, y)) for end in point.up or ()]
            parts += [
                f'<polyline class="line thin {one.style}" points="{_places(ends, x, y)}"/>'
                for ends in (flat, steep)
                if ends
            ]
    for one in series:
        if one.marker != "none":
            parts += [
                _shape(one.marker, one.style, *_place((p.x, p.y), x, y), _title(p.title))
                for p in one.points
            ]
    for point in (point for one in series for point in one.points if point.label):
        across, down = _place((point.x, point.y), x, y)
        parts.append(_text(across + 6, down + 14, point.label, "start"))
    return _svg(chart.title, parts, HEIGHT)


def _bars(chart: Lanes) -> str:
    """Stacked horizontal bars."""
    height = TOP + ROW * len(chart.lanes) + _bottom(chart.x)
    parts = _grid(chart.x, None, height)
    for index, lane in enumerate(chart.lanes):
        top = TOP + ROW * index
        parts.append(_text(LEFT - 8, top + ROW / 2 + 4, lane.name, "end"))
        for one in lane.boxes:
            left, right = _across(chart.x, one.start), _across(chart.x, one.end)
            parts.append(
                f'<rect class="bar {one.style}" x="{left:.1f}" y="{top + 4:.1f}" '
                f'width="{right - left:.1f}" height="{ROW - 8}">{_title(one.title)}</rect>'
            )
    return _svg(chart.title, parts, height)


def _lanes(chart: Lanes) -> str:
    """Lanes of boxes, and marks that cross all lanes."""
    x, height = chart.x, TOP + MARK + ROW * len(chart.lanes) + _bottom(chart.x)
    floor_line, tall = height - _bottom(x), ROW - 6
    parts = _grid(x, None, height)
    for index, lane in enumerate(chart.lanes):
        foot = TOP + MARK + ROW * (index + 1) - 3
        parts.append(_text(LEFT - 6, foot - ROW / 2 + 8, lane.name, "end"))
        for box in lane.boxes:
            left, right = _across(x, box.start), _across(x, box.end)
            parts.append(
                f'<rect class="{box.style}" x="{left:.1f}" y="{foot - box.high * tall:.1f}" '
                f'width="{max(right - left, LEAST):.1f}" '
                f'height="{(box.high - box.low) * tall:.1f}">{_title(box.title)}</rect>'
            )
    for one in chart.marks:
        across = _across(x, one.x)
        parts.append(
            f'<line class="epoch" x1="{across:.1f}" y1="{TOP + MARK}" x2="{across:.1f}" '
            f'y2="{floor_line}">{_title(one.title)}</line>'
        )
    worded = [one for one in chart.marks if one.words]
    halves = [LETTER / 2 * (len(one.words) + 1) for one in worded]
    places = (_across(x, one.x) for one in worded)
    rooms = [(min(at, WIDTH - half), half) for at, half in zip(places, halves, strict=True)]
    parts += [_text(rooms[at][0], TOP + 10, worded[at].words, "middle") for at in apart(rooms)]
    return _svg(chart.title, parts, height)


def _swatch(style: str, marker: str) -> str:
    """A small mark for a legend."""
    if marker in ("band", "bar"):
        inner = f'<rect class="{marker} {style}" x="1" y="3" width="14" height="10"/>'
    elif marker == "none":
        inner = f'<polyline class="line {style}" points="0,8 16,8"/>'
    else:
        inner = _shape(marker, style, 8, 8, "")
    return f'<svg class="swatch" viewBox="0 0 16 16" aria-hidden="true">{inner}</svg>'


def _safe(words: str) -> str:
    return escape(words if words.isprintable() else printable(words))


def _title(words: str) -> str:
    return f"<title>{_safe(words)}</title>"


def _svg(title: str, parts: Sequence[str], height: int) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{_safe(title)}">\n{_title(title)}\n' + "\n".join(parts) + "\n</svg>"
    )


def _grid(x: Axis, y: Axis | None, height: int) -> list[str]:
    """Grid lines and labels; without ``y`` only those of ``x``."""
    floor_line = height - _bottom(x)
    drawn = []
    for place, label in x.ticks:
        across = _across(x, place)
        drawn.append(
            f'<line class="grid" x1="{across:.1f}" y1="{TOP}" x2="{across:.1f}" y2="{floor_line}"/>'
        )
        for row, words in enumerate(label.split("\n")):
            drawn.append(_text(across, floor_line + 17 + LINE * row, words, "middle"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 6, x.label, "middle", "axis"))
    for place, label in y.ticks if y else ():
        up = TOP + (1 - y.share(place)) * (floor_line - TOP) if y else 0.0
        drawn.append(
            f'<line class="grid" x1="{LEFT}" y1="{up:.1f}" x2="{WIDTH - RIGHT}" y2="{up:.1f}"/>'
        )
        drawn.append(_text(LEFT - 7, up + 4, label, "end"))
    if y:
        middle = (TOP + floor_line) / 2
        drawn.append(
            f'<text class="axis" text-anchor="middle" transform="translate(12 {middle:.1f}) '
            f'rotate(-90)">{_safe(y.label)}</text>'
        )
    return drawn


def _text(x: float, y: float, words: str, anchor: str, style: str = "tick") -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{_safe(words)}</text>"
    )


def _across(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _bottom(x: Axis) -> int:
    """Height below the chart: for the axis label, and for all lines of the tick labels."""
    return 30 + LINE * max((label.count("\n") + 1 for _, label in x.ticks), default=0)


def _place(point: tuple[float, float], x: Axis, y: Axis) -> tuple[float, float]:
    return _across(x, point[0]), TOP + (1 - y.share(point[1])) * (HEIGHT - TOP - _bottom(x))


def _places(points: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    return " ".join("{:.1f},{:.1f}".format(*_place(point, x, y)) for point in points)


def _within(value: float, axis: Axis) -> float:
    return min(max(value, axis.low), axis.high)


def _shape(marker: str, style: str, x: float, y: float, title: str) -> str:
    if marker == "square":
        return (
            f'<rect class="mark {style}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7">'
            f"{title}</rect>"
        )
    if marker == "diamond":
        corners = f"{x:.1f},{y - 5.5:.1f} {x + 5.5:.1f},{y:.1f} {x:.1f},{y + 5.5:.1f}"
        corners += f" {x - 5.5:.1f},{y:.1f}"
        return f'<polygon class="mark {style}" points="{corners}">{title}</polygon>'
    if marker == "triangle":
        corners = f"{x:.1f},{y - 5.0:.1f} {x + 5.0:.1f},{y + 4.0:.1f} {x - 5.0:.1f},{y + 4.0:.1f}"
        return f'<polygon class="mark {style}" points="{corners}">{title}</polygon>'
    if marker == "star":
        turns = [(pi * index / 5, 8.0 if index % 2 == 0 else 3.4) for index in range(10)]
        corners = " ".join(f"{x + r * sin(turn):.1f},{y - r * cos(turn):.1f}" for turn, r in turns)
        return f'<polygon class="mark star {style}" points="{corners}">{title}</polygon>'
    kind, radius = ("ring", 7.5) if marker == "ring" else ("mark", 4.0)
    return f'<circle class="{kind} {style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'
