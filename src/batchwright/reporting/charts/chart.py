"""A chart as plain data: its axes, and what is drawn between them.

`render.svg` draws it on a page, where marks have titles and a table has the numbers. `render.image`
draws it in a file, which has neither, and shows with lines what a page says in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, floor, log10
from sys import float_info
from typing import Literal

Marker = Literal["circle", "square", "diamond", "triangle", "star", "ring", "none"]

_FAR = 3.0  # largest over smallest value from which on `ratio_axis` is logarithmic

LOOKS: tuple[tuple[str, Marker], ...] = (
    ("blue", "circle"),
    ("red", "square"),
    ("green", "diamond"),
    ("purple", "circle"),
    ("orange", "square"),
)
"""Styles and markers of lines that are easy to distinguish."""


def look(number: int) -> tuple[str, Marker]:
    """Style and marker of one of many lines: neighbours differ in both, twenty in at least one."""
    markers: tuple[Marker, ...] = ("circle", "square", "diamond", "triangle")
    return LOOKS[number % len(LOOKS)][0], markers[number % len(markers)]


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, with (place, label) of each tick."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Position of ``value`` on the axis: 0 at the low end, 1 at the high end."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        return (value - low) / (high - low)


@dataclass(frozen=True)
class Point:
    """A point of a series.

    Attributes:
        x: Place on the x axis.
        y: Place on the y axis.
        title: Text that a page shows for the mark.
        across: Ends of a horizontal interval; `None`: none.
        up: Ends of a vertical interval; `None`: none.
        label: Text written below the point, to the right.
    """

    x: float
    y: float
    title: str = ""
    across: tuple[float, float] | None = None
    up: tuple[float, float] | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one meaning, joined by a line or not.

    Attributes:
        name: Name in the legend, which shows equal names once; empty: not in the legend.
        style: Class of the page's style sheet, and name of a colour in files.
        points: The points, in the order of the line.
        marker: Marker of each point.
        line: Whether the points are joined.
        only: Where the series is drawn: on a ``page``, in a ``file``, or (empty) in both.
        dashed: Whether the line is dashed in files; on a page the style decides that.
    """

    name: str
    style: str
    points: tuple[Point, ...]
    marker: Marker = "circle"
    line: bool = True
    only: Literal["", "page", "file"] = ""
    dashed: bool = False


@dataclass(frozen=True)
class Band:
    """A band of intervals along x: (x, low, high) at each place."""

    name: str
    style: str
    edges: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Box:
    """A box from ``start`` to ``end`` along x, in a lane or in a chart over two axes.

    ``low`` and ``high`` are shares of the lane's height, or places on the chart's y axis. A file
    writes ``label`` into the box if it has room.
    """

    style: str
    start: float
    end: float
    title: str = ""
    low: float = 0.0
    high: float = 1.0
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """Bands, lines and marks over two axes; ``boxes`` with legend ``names`` are for files alone."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    boxes: Sequence[Box] = ()
    names: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Lane:
    """Boxes side by side; files, which have more room, show ``full_name`` if it is set."""

    name: str
    boxes: Sequence[Box]
    full_name: str = ""


@dataclass(frozen=True)
class Mark:
    """A line across all lanes, with ``words`` above it if they have room."""

    x: float
    title: str
    words: str = ""


@dataclass(frozen=True)
class Lanes:
    """Lanes over one axis, from the top; ``names`` is the legend of the boxes: (name, style).

    ``bars`` says whether a lane is a bar of stacked parts and not a stretch of time.
    """

    title: str
    x: Axis
    lanes: Sequence[Lane]
    names: Sequence[tuple[str, str]]
    marks: Sequence[Mark] = ()
    bars: bool = False


def heights(series: Iterable[Series], bands: Iterable[Band] = ()) -> list[float]:
    """All y values of series and bands, which a y axis has to include."""
    points = [point.y for one in series for point in one.points]
    return points + [end for band in bands for edge in band.edges for end in edge[1:]]


def linear_axis(label: str, values: Iterable[float], *, from_zero: bool = True) -> Axis:
    """An axis around ``values`` with three to eight round ticks."""
    listed = list(values)
    low, high = min(listed, default=0.0), max(listed, default=1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # 1, 2 or 5 times a power of ten, a sixth of the span or a little more.
    span = (high - low) or abs(high) or 1.0
    span = max(span, 6 * float_info.min)  # so that a sixth of it has a logarithm
    power = 10.0 ** floor(log10(span / 6))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 6)
    first, last = floor(low / step), ceil(high / step - 1e-9)
    last = max(last, first + 1)
    say = _tick_words(max(-first, last) * step, step)
    ticks = tuple((n * step, say(n * step)) for n in range(first, last + 1))
    return Axis(label, first * step, last * step, ticks)


def _tick_words(most: float, step: float) -> Callable[[float], str]:
    """How ticks up to ``most``, ``step`` apart, are written: short, for the room beside a chart.

    >>> [_tick_words(most, step)(2 * step) for most, step in ((6e4, 2e4), (6e5, 2e5), (6e9, 2e9))]
    ['40,000', '400k', '4e+09']
    """
    decimals = max(0, -floor(log10(step)))
    if decimals > 5 or most >= 1e9:
        digits = max(1, floor(log10(most)) - floor(log10(step)) + 1)
        return lambda value: f"{value:.{digits}g}"
    for unit, least, letter in ((1e6, 1e6, "M"), (1e3, 1e5, "k")):
        if most >= least and step >= unit / 10:
            tenths = 0 if step >= unit else 1
            return lambda value: f"{value / unit:,.{tenths}f}{letter}" if value else "0"
    return lambda value: f"{value:,.{decimals}f}"


def batch_axis(label: str, batches: Iterable[int], first: Iterable[int] = ()) -> Axis:
    """A logarithmic axis over ``batches`` with ticks at those that have room, ``first`` first."""
    listed = sorted(set(batches))
    bare = Axis(label, listed[0] / 1.15, listed[-1] * 1.15, (), logarithmic=True)
    kept: list[int] = []
    for batch in [*first, *listed]:
        # A letter is a fiftieth of the axis wide, and words are centred.
        rooms = ((one, 0.01 * (len(f"{batch:,}{one:,}") + 1)) for one in kept)
        if all(abs(bare.share(batch) - bare.share(one)) >= max(0.09, room) for one, room in rooms):
            kept.append(batch)
    ticks = tuple((float(batch), f"{batch:,}") for batch in sorted(kept))
    return Axis(label, bare.low, bare.high, ticks, logarithmic=True)


def log_axis(label: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis around positive ``values`` with ticks at powers of ten.

    With fewer than three powers in the range, ticks are also at 2 and 5 times these, or with fewer
    than three of these at evenly spaced round numbers.
    """
    listed = list(values)
    low, high = min(listed) / 1.25, max(listed) * 1.25
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks: list[tuple[float, str]] = []
    for factors in ((1,), (1, 2, 5)):
        places = [f * 10.0**power for power in powers for f in factors]
        ticks = [(at, f"{at:g}") for at in places if low <= at <= high]
        if len(ticks) > 2:
            break
    if len(ticks) < 3:
        bare, ticks = Axis(label, low, high, (), logarithmic=True), []
        for at, words in linear_axis(label, [low, high], from_zero=False).ticks:
            if low <= at <= high and all(bare.share(at) - bare.share(p) >= 0.1 for p, _ in ticks):
                ticks.append((at, words))
    return Axis(label, low, high, tuple(ticks), logarithmic=True)


def ratio_axis(label: str, values: Iterable[float], *, from_zero: bool = True) -> Axis:
    """An axis for values whose ratios matter: logarithmic if their ratio exceeds `_FAR`."""
    listed = list(values)
    if listed and min(listed) > 0 and max(listed) > _FAR * min(listed):
        return log_axis(label, listed)
    return linear_axis(label, listed, from_zero=from_zero)


def epochs_axis(epochs: int) -> Axis:
    """An axis of epochs counted from one, each in the middle of its unit."""
    ticks = tuple((float(at), str(at)) for at in rounded(range(1, epochs + 1), 10))
    return Axis("epoch", 0.5, epochs + 0.5, ticks)


def rounded(places: range, most: int) -> list[int]:
    """At most ``most`` of neighbouring ``places``: the multiples of 1, 2, 5, 10 or so on.

    >>> rounded(range(1, 31), 10), rounded(range(21), 8), rounded(range(1, 4), 10)
    ([5, 10, 15, 20, 25, 30], [0, 5, 10, 15, 20], [1, 2, 3])
    """
    steps = (factor * 10**power for power in count() for factor in (1, 2, 5))
    found = (range(-(-places.start // step) * step, places.stop, step) for step in steps)
    return next([*ticks] for ticks in found if len(ticks) <= most)


def evenly(places: range, most: int) -> list[int]:
    """At most ``most`` of ``places``, evenly spaced from the last one backwards.

    >>> evenly(range(1, 10), 3)
    [9, 6, 3]
    """
    step = -(-len(places) // most)
    return [places[index] for index in range(len(places) - 1, -1, -step)] if step else []


def cut(words: str, most: int) -> str:
    """Words of at most ``most`` letters; longer ones end in an ellipsis.

    >>> cut("horizontal", 5)
    'hori…'
    """
    return words if len(words) <= most else f"{words[: most - 1]}…"


def apart(words: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of those words that do not overlap, of (middle, half width); the longest go first.

    >>> apart([(1.0, 0.5), (3.0, 2.0), (6.0, 0.5)])
    [1, 2]
    """
    kept: list[int] = []
    for at in sorted(range(len(words)), key=lambda at: -words[at][1]):
        middle, half = words[at]
        if all(abs(middle - words[other][0]) >= half + words[other][1] for other in kept):
            kept.append(at)
    return sorted(kept)


def exact_axis(label: str, start: float, end: float) -> Axis:
    """An axis of time exactly from ``start`` to ``end``, with ticks between them."""
    ticks = linear_axis(label, [start, end], from_zero=start == 0).ticks
    end = max(end, start + 1e-6)
    return Axis(label, start, end, tuple(tick for tick in ticks if start <= tick[0] <= end))


def plan_axis(epochs: int) -> Axis:
    """An axis of epochs since the start of the run."""
    ticks = tuple((float(at), str(at)) for at in rounded(range(epochs + 1), 8))
    return Axis("epochs", 0.0, epochs, ticks)
