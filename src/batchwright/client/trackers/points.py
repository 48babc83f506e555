"""What trackers show of a run: numbers by name at a step, and what is known before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from batchwright.records.documents import read_record
from batchwright.records.lines.flat_lines import flat_values
from batchwright.records.lines.run_lines import EpochLine, EvaluationLine, RunLine, StepLine
from batchwright.records.plan import Plan

PREDICTED = {"plan/predicted_epoch_s": "time/epoch_s", "plan/predicted_top1": "val/top1"}
"""Names of predictions, and of what they are beside."""

_PLACES = {"step", "steps", "epochs"}  # a point has its own

Fact = str | int | float


class Point(NamedTuple):
    """Numbers at a place of the training."""

    step: int  # updates since it began
    values: dict[str, float]  # by flat name


class Points:
    """The points of a run's lines, which are handed in in order.

    A killed run writes some of its steps again once it is resumed; a name that has a value at a
    step, or at a later one, gets no other there. Rounds with a parameter server have no place among
    the steps of others: of such runs the epochs are shown.

    Attributes:
        last: The highest step so far; -1 before the first.
    """

    def __init__(self) -> None:
        self.last = -1
        self._begins: dict[int, int] = {}  # by epoch, the steps before it
        self._had: dict[str, int] = {}

    def of(self, line: RunLine | None) -> Point | None:
        """The point of a line; ``None`` if it has none, or nothing new."""
        if not isinstance(line, StepLine | EpochLine | EvaluationLine):
            return None
        step = self._step(line)
        values = {
            name: float(value)
            for name, value in flat_values(line).items()
            if isinstance(value, int | float)
            and name not in _PLACES
            and self._had.get(name, -1) < step
        }
        if not values:
            return None
        self._had |= dict.fromkeys(values, step)
        self.last = max(self.last, step)
        return Point(step, values)

    def _step(self, line: StepLine | EpochLine | EvaluationLine) -> int:
        if isinstance(line, EvaluationLine):
            return self._begin(line.epoch + 1)
        epoch, steps = (
            (line.record.epoch, line.record.steps)
            if isinstance(line, EpochLine)
            else (line.epoch, line.steps)
        )
        begin = self._begin(epoch)
        self._begins[epoch + 1] = begin + steps
        return begin + (line.step if isinstance(line, StepLine) else steps)

    def _begin(self, epoch: int) -> int:
        """Steps before an epoch; of one that no line led to, those before the last known one."""
        return self._begins.get(epoch, max(self._begins.values(), default=0))


def facts_of(folder: Path) -> dict[str, Fact]:
    """What is known of a run before it trains: the plan's choices, and what it predicts.

    Raises:
        FileError: The folder holds no plan.
    """
    plan = read_record(folder / "plan.json", Plan)
    stage = plan.stages[0]
    found: dict[str, Fact | None] = {
        "network": plan.network.name,
        "data": plan.data.name,
        "method": plan.method,
        "workers": plan.workers,
        "epochs": plan.epochs,
        "global_batch": stage.global_batch_size,
        "local_batches": ", ".join(map(str, stage.local_batch_sizes)),
        "learning_rate": stage.learning_rate,
        "resolution": stage.resolution,
        "precision": plan.precision,
        "optimizer": plan.update,
        "seed": plan.job.seed,
    }
    seconds = stage.predicted_epoch_seconds
    accuracy = plan.epoch_accuracy[-1] if plan.epoch_accuracy else None
    for name, one in (("epoch_seconds", seconds), ("accuracy", accuracy)):
        if one is not None:
            found |= {f"predicted_{name}": one.value}
            found |= {f"predicted_{name}_low": one.low, f"predicted_{name}_high": one.high}
    return {name: value for name, value in found.items() if value is not None}
