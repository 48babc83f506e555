"""An optimizer's learning rates, set from the plan's schedule before each step."""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.algorithms.learning_rate import rate_factor
from batchwright.records import Plan, Stage
from batchwright.records.text.formatting import counted


class Rates:
    """Sets an optimizer's rates: the plan's schedule is a factor on each group's initial rate.

    Args:
        optimizer: Still has the rates that it was built with.
        plan: Its learning-rate rule is followed.
        own: Whether the optimizer's rates are left alone.
        samples_per_epoch: Size of the data set.

    Attributes:
        own: Whether the optimizer's rates are left alone.
        changed: A rate that the loop had given the optimizer before the last `set`, which took its
            place; ``None``: none, or it was known before that a scheduler sets rates.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, plan: Plan, *, own: bool, samples_per_epoch: int
    ) -> None:
        self._optimizer, self._plan, self.own = optimizer, plan, own
        self._samples_per_epoch = samples_per_epoch
        self._given = [group["lr"] for group in optimizer.param_groups]
        self._first = [float(rate) for rate in self._given]
        self._now: float | Tensor = self._first[0]
        self._last: list[float] = []  # as this object has set them
        self._scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        self.changed: float | None = None

    @property
    def now(self) -> float:
        """Rate of the first parameter group at the last `set`, before the optimizer's own step."""
        return float(self._now)

    def set(self, samples_seen: float, stage: Stage, gain: float) -> None:
        """Set the rates for the next step.

        Args:
            samples_seen: Training samples before this step, all workers.
            stage: The plan's row that the step belongs to.
            gain: Measured factor on the rate; 1 where the plan has none.

        Raises:
            RuntimeError: Parameter groups were added or removed since the session was made.
        """
        groups, before = len(self._optimizer.param_groups), len(self._first)
        if groups != before:
            raise RuntimeError(
                f"the optimizer has {counted(groups, 'parameter group')} and had {before} when the "
                "session was made: give it all groups before, those of layers to be unfrozen later "
                "too; frozen ones just have no gradient"
            )
        if not self.own:
            rule = self._plan.learning_rate
            factor = rate_factor(
                samples_seen,
                rule=rule,
                samples_per_epoch=self._samples_per_epoch,
                epochs=self._plan.epochs,
            )
            relative = gain * factor * stage.learning_rate / rule.base
            rates = [group["lr"] for group in self._optimizer.param_groups]
            others = (one for one, last in zip(rates, self._last, strict=False) if one != last)
            self.changed = None if self._scheduled else next(map(float, others), None)
            self._last = [first * relative for first in self._first]
            for group, rate in zip(self._optimizer.param_groups, self._last, strict=True):
                group["lr"] = rate
        now = self._optimizer.param_groups[0]["lr"]
        if isinstance(now, Tensor):  # copied while the host does not wait for the device yet
            now = now.detach().to("cpu", non_blocking=True, copy=True)
        self._now = now

    def close(self) -> None:
        """Give the optimizer its initial rates back: another run takes them for its base."""
        if not self.own:
            for group, rate in zip(self._optimizer.param_groups, self._given, strict=False):
                group["lr"] = rate
