"""What the charts of a sweep show, as plain numbers: means over seeds with standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev

from pydantic import JsonValue

from batchwright.records import Sweep, SweptKey
from batchwright.records.text.formatting import job_value
from batchwright.records.text.problems import printable

MOST_PANELS = 12
MOST_LINES = 10
_WIDE = 8.0  # largest over smallest value, from which an axis is logarithmic


@dataclass(frozen=True)
class Spot:
    """A mean over seeds.

    Attributes:
        x: Epoch counted from one, or place of a value on its axis.
        mean: Held-out accuracy, in percent.
        error: Standard error, in points; `None` for a single run.
        count: Runs behind it.
    """

    x: float
    mean: float
    error: float | None
    count: int


@dataclass(frozen=True)
class Line:
    """Spots of one setting, or of one combination of the other keys.

    Attributes:
        number: Of the value or combination, zero-based: the same look in every panel.
        label: What it is called.
        spots: By rising x.
    """

    number: int
    label: str
    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class Panel:
    """Lines over the same axes; ``left_out`` more had no room."""

    title: str
    lines: tuple[Line, ...]
    left_out: int = 0


@dataclass(frozen=True)
class Scale:
    """Where the values of a key lie.

    Attributes:
        places: One for each value.
        logarithmic: Whether the axis is.
        numeric: Whether places are the values themselves; else 0, 1, 2, ...
    """

    places: tuple[float, ...]
    logarithmic: bool
    numeric: bool


def varying(sweep: Sweep) -> list[SweptKey]:
    """The keys with several values; if there is none, the first."""
    return [one for one in sweep.keys if len(one.values) > 1] or [sweep.keys[0]]


def curves(sweep: Sweep, key: str) -> list[Panel]:
    """Accuracy epoch by epoch: a line for each value of ``key``, a panel for all other values."""
    at, values = _place_of(sweep, key)
    panels = []
    for others in _others(sweep, at):
        lines = []
        for number, value in enumerate(values):
            chosen = (*others[:at], value, *others[at:])
            runs = [cell.accuracies for cell in sweep.runs_of(chosen)]
            spots = tuple(_spots_by_epoch(runs))
            if spots:
                lines.append(Line(number, f"{key}={value_label(value)}", spots))
        if lines:
            shown = tuple(lines[:MOST_LINES])
            panels.append(Panel(_title(sweep, others, at), shown, len(lines) - len(shown)))
    return panels


def against(sweep: Sweep, key: str) -> Panel:
    """Last accuracy against the values of ``key``: a line for all values of the others."""
    at, values = _place_of(sweep, key)
    scale = scale_of(values)
    lines = []
    for number, others in enumerate(_others(sweep, at)):
        spots = []
        for place, value in zip(scale.places, values, strict=True):
            chosen = (*others[:at], value, *others[at:])
            spot = _spot(place, (cell.accuracy for cell in sweep.runs_of(chosen)))
            spots += [spot] if spot else []
        if spots:
            ordered = tuple(sorted(spots, key=lambda spot: spot.x))
            lines.append(Line(number, _title(sweep, others, at), ordered))
    shown = tuple(lines[:MOST_LINES])
    return Panel(f"last accuracy against {key}", shown, len(lines) - len(shown))


def scale_of(values: Sequence[JsonValue]) -> Scale:
    """The places of values: numbers stand where they are, anything else side by side.

    >>> scale_of([64, 1024]), scale_of(["sqrt", "none"]).places
    (Scale(places=(64.0, 1024.0), logarithmic=True, numeric=True), (0.0, 1.0))
    """
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values):
        return Scale(tuple(map(float, range(len(values)))), logarithmic=False, numeric=False)
    wide = min(numbers) > 0 and max(numbers) / min(numbers) >= _WIDE
    return Scale(tuple(numbers), logarithmic=wide, numeric=True)


def value_label(value: JsonValue) -> str:
    """A value for a legend or a tick; names from outside cannot act in it."""
    return printable(job_value(value))


def _place_of(sweep: Sweep, key: str) -> tuple[int, tuple[JsonValue, ...]]:
    at = [one.key for one in sweep.keys].index(key)
    return at, sweep.keys[at].values


def _others(sweep: Sweep, at: int) -> list[tuple[JsonValue, ...]]:
    """Combinations of all keys' values but those of one."""
    return list(product(*(one.values for place, one in enumerate(sweep.keys) if place != at)))


def _title(sweep: Sweep, others: Sequence[JsonValue], at: int) -> str:
    """The other keys' values, those aside that are the same everywhere."""
    keys = [one for place, one in enumerate(sweep.keys) if place != at]
    told = [
        f"{one.key}={value_label(value)}"
        for one, value in zip(keys, others, strict=True)
        if len(one.values) > 1
    ]
    return ", ".join(told) or "all runs"


def _spots_by_epoch(runs: Sequence[Sequence[float | None]]) -> Iterable[Spot]:
    for epoch in range(max(map(len, runs), default=0)):
        spot = _spot(epoch + 1, (run[epoch] for run in runs if epoch < len(run)))
        if spot:
            yield spot


def _spot(x: float, shares: Iterable[float | None]) -> Spot | None:
    known = [100 * share for share in shares if share is not None]
    if not known:
        return None
    error = stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Spot(x, fmean(known), error, len(known))
