"""What trackers show of a run: values by name at a step, and the plan's facts as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from batchwright.records.lines.flat_lines import flat_values
from batchwright.records.lines.run_lines import EpochLine, EvaluationLine, RunLine, StepLine
from batchwright.records.text.plan_facts import Fact
from batchwright.records.text.problems import printable

PREDICTED = {"plan/predicted_epoch_s": "time/epoch_s", "plan/predicted_top1": "val/top1"}
"""Names of predictions, each with the name of the measured value."""

_PLACES = {"step", "steps", "epochs"}  # `Point.step` says that


class Point(NamedTuple):
    """Values at a step of the training."""

    step: int  # updates since training began
    values: dict[str, float]  # by flat name


class Points:
    """The points of a run's lines, which are passed in order.

    A killed run writes some of its steps again once it is resumed: a name gets one value at each
    step, and none before a step that has one. Rounds with a parameter server are not steps; of such
    runs the epochs are shown.

    Attributes:
        last: The highest step so far; -1 before the first.
    """

    def __init__(self) -> None:
        self.last = -1
        self._begins = {0: 0}  # by epoch, the steps before it
        self._newest: dict[str, int] = {}  # by name, the highest step with a value

    def of(self, line: RunLine | None) -> Point | None:
        """The point of a line; ``None`` if the line has no values, or no new ones."""
        if not isinstance(line, StepLine | EpochLine | EvaluationLine):
            return None
        step = self._step(line)
        values = {
            name: float(value)
            for name, value in flat_values(line).items()
            if isinstance(value, int | float)
            and name not in _PLACES
            and self._newest.get(name, -1) < step
        }
        if not values:
            return None
        self._newest |= dict.fromkeys(values, step)
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
        """Steps before an epoch; before an unknown one as many as before the last known one."""
        return self._begins.get(epoch, max(self._begins.values()))


_MARKUP = re.compile(r"[\\`*_\[\]|<>&]")  # what Markdown would read as something else than text


def markdown_table(facts: Mapping[str, Fact]) -> str:
    r"""Facts as a table in Markdown, names and values as they are: a folder may be called ``a|b``.

    >>> markdown_table({"data": "a|b"})
    '| | |\n|---|---|\n| data | a&#124;b |\n'
    """
    rows = (f"| {_literal(name)} | {_literal(str(value))} |\n" for name, value in facts.items())
    return f"| | |\n|---|---|\n{''.join(rows)}"


def _literal(text: str) -> str:
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", printable(text))
