"""Figures of benchmarks: their declarations, and their measured values."""

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
    """The measured value of a figure, as in a report.

    Attributes:
        name: Name of the figure.
        value: The value, in ``unit``.
        unit: ``ratio``, ``images/s``, ``s``, ``share``, ``points`` (hundredths of a share), or what
            was counted.
        low: Lower end of the spread, which depends on the figure's statistic.
        high: Upper end of the spread.
        repeats: Number of measurements.
        goal: The value to reach, if there is one.
        met: Whether the goal is reached; ``None`` without a goal.
        source: Source of the value; ``from`` in JSON.
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
        """JSON values, with six significant digits, more than such measurements have."""
        values = asdict(self)
        values["from"] = values.pop("source")
        return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Value:
        """A value from the result of `as_json`."""
        values = dict(values)
        return cls(source=values.pop("from"), **values)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower end of Student's 95 % interval, mean, upper end; a single value is all three."""
    from scipy.special import stdtrit  # here, as arms' processes import this module without SciPy

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
"""By name, a function that returns lower end of the spread, value and upper end."""
SPREADS: Mapping[str, str] = {
    "median": "quartiles",
    "mean": "range",
    "interval": "95 % interval",
    "largest": "from the median",
    "least": "up to the median",
    "worst": "range",
    "share": "",
}
"""By name of a statistic, what its spread is, in words."""
SPREADS_AROUND = frozenset({"median", "interval"})
"""Statistics whose spread tells how uncertain the value is: a range does not."""


@dataclass(frozen=True)
class Figure:
    """The declaration of a figure, with its goal.

    Attributes:
        name: Name in reports.
        unit: As for `Value`.
        statistic: A name in `STATISTICS`.
        words: Description for the documents, which otherwise show the name; the name of another
            figure in braces stands for that figure's value.
        at_least: Goal: the value is at least this.
        at_most: Goal: the value is at most this.
        above: Goal: the lower end of the interval is above this; a single value is not judged.
        near: Goal: the value is within the second number of the first.
        full: Whether the figure is measured with --full alone, and copied by --quick.
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
        """Whether a goal is declared."""
        return (self.at_least, self.at_most, self.above, self.near) != (None,) * 4

    def of(
        self,
        values: Sequence[float],
        *,
        goal: float | None = None,
        repeats: int | None = None,
        suffix: str = "",
    ) -> Value:
        """The value of the figure by its statistic.

        Args:
            values: Measurements, in the figure's unit.
            goal: A goal in place of the declared one, where it depends on the run.
            repeats: Number of measurements, if they are not one for each value.
            suffix: Suffix of the name, for a check of the figure.
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
        """The figure with a value and a spread from elsewhere, judged by its goal."""
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
    """``over / under``, round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """``values - reference``, pair by pair."""
    return [a - b for a, b in zip(values, reference, strict=True)]


def errors(predicted: Iterable[float], measured: Iterable[float]) -> list[float]:
    """Absolute errors of predictions, as shares of the measured values."""
    return [abs(a - b) / b for a, b in zip(predicted, measured, strict=True)]


def print_values(values: Iterable[Value]) -> None:
    """Print a table of figures."""
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
