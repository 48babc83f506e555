"""Figures: how each is declared, and what was measured of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, quantiles, stdev
from typing import Any

THIS_RUN = "measured in this run"


@dataclass(frozen=True)
class Value:
    """What was measured of a figure, as a report has it.

    Attributes:
        name: Of the figure.
        value: In ``unit``.
        unit: ``ratio``, ``images/s``, ``s``, ``share``, ``points`` (hundredths of a share), or what
            was counted.
        low: Lower end of the spread, which is that of the figure's statistic.
        high: Upper end.
        repeats: Measurements behind it.
        goal: The value to reach, if there is one.
        met: Whether it is reached; ``None`` without a goal.
        source: Where the value is from; ``from`` in JSON.
    """

    name: str
    value: float
    unit: str
    low: float
    high: float
    repeats: int
    goal: float | None = None
    met: bool | None = None
    source: str = THIS_RUN

    def as_json(self) -> dict[str, Any]:
        """Plain values; six significant digits say all that such measurements can."""
        values = asdict(self)
        values["from"] = values.pop("source")
        return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Value:
        """What `as_json` gave."""
        values = dict(values)
        return cls(source=values.pop("from"), **values)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; all the same for a single value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean between the ends of Student's 95 % interval; a single value has none."""
    from scipy.special import stdtrit  # processes of arms import this module, too, and not SciPy

    mean, half = fmean(values), 0.0
    if len(values) > 1:
        half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean, mean + half


STATISTICS: Mapping[str, Callable[[Sequence[float]], tuple[float, float, float]]] = {
    "median": quartiles,  # the quartiles are the spread
    "mean": lambda values: (min(values), fmean(values), max(values)),  # the range
    "interval": interval,  # the mean, and its interval
    "largest": lambda values: (median(values), max(values), max(values)),  # from the median to it
    "least": lambda values: (min(values), min(values), median(values)),
    "worst": lambda values: (min(values), max(values), max(values)),  # from the least to it
    "share": lambda values: (fmean(values),) * 3,  # of cases that hold
}
"""By name: lower end of the spread, value, upper end."""
SPREADS_AROUND = frozenset({"median", "mean", "interval"})
"""Statistics whose spread says how far the value itself may be off."""


@dataclass(frozen=True)
class Figure:
    """What is measured, and the goal that was set for it.

    Attributes:
        name: In reports.
        unit: As of `Value`.
        statistic: Of `STATISTICS`.
        words: What it is, for the documents, which go by the name without; the name of another
            figure in braces stands for that one's value.
        at_least: The value is to be no less.
        at_most: The value is to be no more.
        above: The lower end of the interval is to be above; a single value is not judged.
        near: The value is to be within the second of the first.
        full: Whether it is measured with --full alone, and --quick copies it.
    """

    name: str
    unit: str
    statistic: str
    words: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    near: tuple[float, float] | None = None
    full: bool = False

    @property
    def has_goal(self) -> bool:
        """Whether there is a value that it is to reach."""
        return (self.at_least, self.at_most, self.above, self.near) != (None,) * 4

    def of(
        self,
        values: Sequence[float],
        *,
        goal: float | None = None,
        repeats: int | None = None,
        suffix: str = "",
    ) -> Value:
        """The figure of some measurements.

        Args:
            values: In the figure's unit.
            goal: In place of the declared one, where it depends on the run.
            repeats: Measurements behind them, where they are not one each.
            suffix: Of the name, where it is a check of the figure.
        """
        low, value, high = STATISTICS[self.statistic](values)
        made = self.made(value, low, high, repeats or len(values), goal=goal, suffix=suffix)
        if self.above is not None and len(values) > 1:
            return Value(**{**asdict(made), "goal": self.above, "met": low > self.above})
        return made

    def made(
        self,
        value: float,
        low: float,
        high: float,
        repeats: int,
        *,
        goal: float | None = None,
        suffix: str = "",
    ) -> Value:
        """The figure with a value that no statistic gives, held against its goal."""
        met = None
        if self.at_least is not None:
            goal = self.at_least if goal is None else goal
            met = value >= goal
        elif self.at_most is not None:
            goal = self.at_most if goal is None else goal
            met = value <= goal
        elif self.near is not None:
            goal, within = self.near
            met = abs(value - goal) <= within
        return Value(self.name + suffix, value, self.unit, low, high, repeats, goal, met)


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """``over / under`` round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """``values - reference`` pair by pair."""
    return [a - b for a, b in zip(values, reference, strict=True)]


def errors(predicted: Iterable[float], measured: Iterable[float]) -> list[float]:
    """How far predictions are off, as shares of what was measured."""
    return [abs(a - b) / b for a, b in zip(predicted, measured, strict=True)]


def print_values(values: Iterable[Value]) -> None:
    """A table for a person."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title in ("figure", "value", "spread", "unit", "repeats", "goal", "met", "from"):
        table.add_column(title, justify="left" if title in ("figure", "from") else "right")
    for one in values:
        table.add_row(
            one.name,
            f"{one.value:.4g}",
            f"{one.low:.4g} to {one.high:.4g}",
            one.unit,
            str(one.repeats),
            "" if one.goal is None else f"{one.goal:g}",
            "" if one.met is None else "yes" if one.met else "NO",
            one.source,
        )
    Console(width=None if os.isatty(1) else 140).print(table)
