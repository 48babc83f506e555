"""The rows of a plan over the epochs: resolution, batches, rate and dropout as lines in steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from batchwright.records import Plan, Stage
from batchwright.reporting.data.round_curves import large_workers

Line = list[tuple[float, float]]  # (epochs since the start, value), two places for each row


@dataclass(frozen=True)
class StepCurve:
    """One quantity over the epochs; ``name`` tells it from others of the same chart."""

    name: str
    line: Line


@dataclass(frozen=True)
class StageChart:
    """Quantities of one unit over the epochs.

    ``exact``: whether the values themselves are what one reads, not where they lie between others.
    """

    title: str
    label: str
    curves: tuple[StepCurve, ...]
    logarithmic: bool = False
    exact: bool = False


@dataclass(frozen=True)
class RateStage:
    """A stage of the learning rate: zero-based, from and until so many epochs."""

    index: int
    start: int
    end: int


def stage_charts(plan: Plan) -> list[StageChart]:
    """Resolution, batches and rate of the rows, and dropout if there is any."""
    charts = [
        StageChart("Resolution", "pixels", (_curve(plan, "resolution", _resolution),), exact=True),
        StageChart("Local batch", "samples per step", tuple(_batches(plan))),
        StageChart("Learning rate", "per step", (_curve(plan, "planned", _rate),), True),
    ]
    if any(row.dropout for row in plan.stages):
        curve = _curve(plan, "dropout", lambda row: row.dropout)
        charts.append(StageChart("Dropout", "share", (curve,)))
    return charts


def rate_stages(plan: Plan) -> list[RateStage]:
    """The stages of the learning rate, each a part of the plan's rows."""
    found, start = [], 0
    for index, rows in groupby(plan.stages, key=lambda row: row.rate_stage):
        end = start + sum(row.epochs for row in rows)
        found.append(RateStage(index, start, end))
        start = end
    return found


def _batches(plan: Plan) -> list[StepCurve]:
    """The local batches: of large and of small workers, or of all if they have the same."""
    large = large_workers(plan)
    if plan.server is not None and 0 < large < plan.workers:
        return [
            _curve(plan, "large", lambda row: row.local_batch_sizes[0]),
            _curve(plan, "small", lambda row: row.local_batch_sizes[large]),
        ]
    most = _curve(plan, "largest", lambda row: max(row.local_batch_sizes))
    least = _curve(plan, "smallest", lambda row: min(row.local_batch_sizes))
    if most.line == least.line:
        return [StepCurve("each worker", most.line)]
    return [most, least]


def _curve(plan: Plan, name: str, value: Callable[[Stage], float]) -> StepCurve:
    line: Line = []
    start = 0
    for row in plan.stages:
        line += [(start, value(row)), (start + row.epochs, value(row))]
        start += row.epochs
    return StepCurve(name, line)


def _resolution(row: Stage) -> float:
    return row.resolution


def _rate(row: Stage) -> float:
    return row.learning_rate


def values_of(chart: StageChart) -> Sequence[float]:
    """All values of a chart."""
    return [value for curve in chart.curves for _, value in curve.line]
