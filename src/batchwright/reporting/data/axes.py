"""Axes of charts: where they begin and end, and their ticks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10


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


def linear_axis(label: str, values: Iterable[float], *, from_zero: bool = True) -> Axis:
    """An axis around ``values`` with three to eight round ticks."""
    listed = list(values)
    low, high = min(listed, default=0.0), max(listed, default=1.0)
    low = min(low, 0.0) if from_zero else low
    step = _round_step((high - low) or abs(high) or 1.0)
    first, last = floor(low / step), ceil(high / step - 1e-9)
    last = max(last, first + 1)
    decimals = max(0, -floor(log10(step)))
    ticks = tuple((n * step, f"{n * step:,.{decimals}f}") for n in range(first, last + 1))
    return Axis(label, first * step, last * step, ticks)


def _round_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, a sixth of ``span`` or a little more."""
    power = 10.0 ** floor(log10(span / 6))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 6)


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

    Fewer than two powers are among them: 1, 2 and 5 times those.
    """
    listed = list(values)
    low, high = min(listed) / 1.25, max(listed) * 1.25
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        places = [f * 10.0**power for power in powers for f in factors]
        ticks = tuple((at, f"{at:g}") for at in places if low <= at <= high)
        if len(ticks) > 1:
            break
    return Axis(label, low, high, ticks, logarithmic=True)


def epochs_axis(epochs: int) -> Axis:
    """An axis of epochs counted from one, each in the middle of its unit."""
    ticks = tuple((float(at), str(at)) for at in evenly(range(1, epochs + 1), 10))
    return Axis("epoch", 0.5, epochs + 0.5, ticks)


def evenly(places: range, most: int) -> list[int]:
    """At most ``most`` of ``places``, evenly spaced, the last one among them.

    >>> evenly(range(1, 10), 3)
    [9, 6, 3]
    """
    step = -(-len(places) // most)
    return [places[index] for index in range(len(places) - 1, -1, -step)] if step else []
