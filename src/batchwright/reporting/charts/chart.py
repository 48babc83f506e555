"""A chart as plain data: its axes, and what is drawn between them.

`render.svg` draws it on a page, where marks show their titles and a table stands behind;
`render.figures` in a file, which has neither and says with lines what a page says with words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, floor, log10
from sys import float_info
from typing import Literal

Marker = Literal["circle", "square", "diamond", "triangle", "star", "ring", "none"]

_FAR = 3.0  # largest over smallest value: on a linear axis the small ones would share a corner

LOOKS: tuple[tuple[str, Marker], ...] = (
    ("blue", "circle"),
    ("red", "square"),
    ("green", "diamond"),
    ("purple", "circle"),
    ("orange", "square"),
)
"""Style and marker of things that a chart tells apart, as many as the eye does."""


def look(number: int) -> tuple[str, Marker]:
    """Style and marker of one of many lines: neighbours differ in both, and so do twenty in one."""
    markers: tuple[Marker, ...] = ("circle", "square", "diamond", "triangle")
    return LOOKS[number % len(LOOKS)][0], markers[number % len(markers)]


@dataclass(frozen=True)
class Axis:
    """A direction of a chart: from ``low`` to ``high``, with (place, label) for each tick."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """How far along the axis ``value`` lies: 0 at the low end, 1 at the high end."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        return (value - low) / (high - low)


@dataclass(frozen=True)
class Point:
    """A mark and the words shown for it; with ``across`` or ``up`` the interval that way.

    ``label`` is written below it, to the right.
    """

    x: float
    y: float
    title: str = ""
    across: tuple[float, float] | None = None
    up: tuple[float, float] | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one meaning, joined by a line or not; without a name it is in no legend.

    Attributes:
        name: In the legend, once for all series of that name.
        style: A class of the page's style sheet, a colour in a file.
        points: In the order of the line.
        marker: Of each point.
        line: Whether they are joined.
        only: Where it is drawn: a page, a file, or (empty) both.
        dashed: In a file; on a page the style says it.
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
    """An interval along x: (x, low, high) at each place."""

    name: str
    style: str
    edges: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Box:
    """A stretch from ``start`` to ``end``: of a lane, or of a chart over two axes.

    ``low`` and ``high`` are shares of the lane's height, or places on the chart's y axis. A file
    writes ``label`` into it where that has room.
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
    """Bands, lines and marks over two axes; ``boxes``, called ``names``, in a file alone."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    boxes: Sequence[Box] = ()
    names: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Lane:
    """Boxes side by side; a file, which has more room, calls it by ``full_name`` if it has one."""

    name: str
    boxes: Sequence[Box]
    full_name: str = ""


@dataclass(frozen=True)
class Mark:
    """A line across all lanes; ``words`` stand above it where they have room."""

    x: float
    title: str
    words: str = ""


@dataclass(frozen=True)
class Lanes:
    """Lanes from the top over one axis; ``names`` are those of the boxes: (name, style).

    ``bars``: whether each lane is a bar of stacked parts rather than a stretch of time.
    """

    title: str
    x: Axis
    lanes: Sequence[Lane]
    names: Sequence[tuple[str, str]]
    marks: Sequence[Mark] = ()
    bars: bool = False


def heights(series: Iterable[Series], bands: Iterable[Band] = ()) -> list[float]:
    """All that an axis of these has to reach."""
    points = [point.y for one in series for point in one.points]
    return points + [end for band in bands for edge in band.edges for end in edge[1:]]


def linear_axis(label: str, values: Iterable[float], *, from_zero: bool = True) -> Axis:
    """An axis around ``values`` with three to eight round ticks."""
    listed = list(values)
    low, high = min(listed, default=0.0), max(listed, default=1.0)
    low = min(low, 0.0) if from_zero else low
    # 1, 2 or 5 times a power of ten, a sixth of the span or a little more.
    span = (high - low) or abs(high) or 1.0
    span = max(span, 6 * float_info.min)  # whose sixth has a logarithm
    power = 10.0 ** floor(log10(span / 6))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 6)
    first, last = floor(low / step), ceil(high / step - 1e-9)
    last = max(last, first + 1)
    decimals = max(0, -floor(log10(step)))
    ticks = tuple((n * step, f"{n * step:,.{decimals}f}") for n in range(first, last + 1))
    return Axis(label, first * step, last * step, ticks)


def batch_axis(label: str, batches: Iterable[int], first: Iterable[int] = ()) -> Axis:
    """A logarithmic axis over ``batches``, ticks at as many of them as have room.

    Those in ``first`` get theirs before the others.
    """
    listed = sorted(set(batches))
    bare = Axis(label, listed[0] / 1.15, listed[-1] * 1.15, (), logarithmic=True)
    kept: list[int] = []
    for batch in [*first, *listed]:
        if all(abs(bare.share(batch) - bare.share(other)) >= 0.09 for other in kept):
            kept.append(batch)
    ticks = tuple((float(batch), f"{batch:,}") for batch in sorted(kept))
    return Axis(label, bare.low, bare.high, ticks, logarithmic=True)


def log_axis(label: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis around positive ``values`` with a tick at every power of ten.

    Fewer than three powers are among them: 1, 2 and 5 times those.
    """
    listed = list(values)
    low, high = min(listed) / 1.25, max(listed) * 1.25
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        places = [f * 10.0**power for power in powers for f in factors]
        ticks = tuple((at, f"{at:g}") for at in places if low <= at <= high)
        if len(ticks) > 2:
            break
    return Axis(label, low, high, ticks, logarithmic=True)


def ratio_axis(label: str, values: Iterable[float]) -> Axis:
    """An axis for values of which ratios matter: logarithmic where they are far apart."""
    listed = list(values)
    if listed and min(listed) > 0 and max(listed) > _FAR * min(listed):
        return log_axis(label, listed)
    return linear_axis(label, listed)


def epochs_axis(epochs: int) -> Axis:
    """An axis of epochs counted from one, each in the middle of its unit."""
    ticks = tuple((float(at), str(at)) for at in rounded(range(1, epochs + 1), 10))
    return Axis("epoch", 0.5, epochs + 0.5, ticks)


def rounded(places: range, most: int) -> list[int]:
    """At most ``most`` of neighbouring ``places``: multiples of 1, 2, 5, 10 and so on.

    >>> rounded(range(1, 31), 10), rounded(range(21), 8), rounded(range(1, 4), 10)
    ([5, 10, 15, 20, 25, 30], [0, 5, 10, 15, 20], [1, 2, 3])
    """
    steps = (factor * 10**power for power in count() for factor in (1, 2, 5))
    found = ([at for at in places if at % step == 0] for step in steps)
    return next(ticks for ticks in found if len(ticks) <= most)


def evenly(places: range, most: int) -> list[int]:
    """At most ``most`` of ``places``, evenly spaced, the last one among them.

    >>> evenly(range(1, 10), 3)
    [9, 6, 3]
    """
    step = -(-len(places) // most)
    return [places[index] for index in range(len(places) - 1, -1, -step)] if step else []


def exact_axis(label: str, start: float, end: float) -> Axis:
    """An axis of time from ``start`` to ``end`` exactly, ticks inside."""
    ticks = linear_axis(label, [start, end], from_zero=start == 0).ticks
    end = max(end, start + 1e-6)
    return Axis(label, start, end, tuple(tick for tick in ticks if start <= tick[0] <= end))


def plan_axis(epochs: int) -> Axis:
    """An axis of epochs since the start of the run."""
    ticks = tuple((float(at), str(at)) for at in rounded(range(epochs + 1), 8))
    return Axis("epochs", 0.0, epochs, ticks)
