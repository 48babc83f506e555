"""An optimizer's learning rates, as a plan has them."""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.algorithms.learning_rate import rate_factor
from batchwright.records import Plan, Stage


class Rates:
    """Sets the rates of an optimizer: the plan's is a factor on each group's own initial rate.

    Args:
        optimizer: Has the rates still that its builder set.
        plan: Its learning rate rule is followed.
        own: Whether the optimizer's rates are left alone.
        samples_per_epoch: Size of the data set.

    Attributes:
        own: Whether they are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, plan: Plan, *, own: bool, samples_per_epoch: int
    ) -> None:
        self._optimizer, self._plan, self.own = optimizer, plan, own
        self._samples_per_epoch = samples_per_epoch
        self._given = [group["lr"] for group in optimizer.param_groups]
        self._first = [float(rate) for rate in self._given]
        self._told: float | Tensor = self._first[0]

    @property
    def now(self) -> float:
        """That of the optimizer's first parameter group, per step, as it was before the step."""
        return float(self._told)

    def set(self, samples_seen: float, stage: Stage, gain: float) -> None:
        """Before a step.

        Args:
            samples_seen: Training samples before this step, all workers.
            stage: The plan's row.
            gain: What the rate is multiplied by, besides.

        Raises:
            RuntimeError: The optimizer has other parameter groups than it had.
        """
        groups, before = len(self._optimizer.param_groups), len(self._first)
        if groups != before:
            raise RuntimeError(
                f"the optimizer has {groups} parameter group(s) and had {before} when the session "
                "was made: give it all groups before, those of layers to be unfrozen later too; "
                "frozen ones just have no gradient"
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
            for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
                group["lr"] = first * relative
        told = self._optimizer.param_groups[0]["lr"]
        if isinstance(told, Tensor):  # on its way before the host waits for the step's figures
            told = told.detach().to("cpu", non_blocking=True, copy=True)
        self._told = told

    def close(self) -> None:
        """Leave the optimizer the rates that it came with: another run takes them for its own."""
        if not self.own:
            for group, rate in zip(self._optimizer.param_groups, self._given, strict=False):
                group["lr"] = rate
