"""What becomes of summed gradients: measured, clipped, applied at the planned rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from batchwright.planning.learning_rate import rate_factor
from batchwright.records import Plan, Stage
from batchwright.reduction import sqr_norms


class Updater:
    """Steps an optimizer.

    The plan's rate is a factor on each parameter group's own initial rate.

    Args:
        parameters: What is trained, whether the optimizer has it or not.
        optimizer: Of most of them.
        plan: Its learning rate rule is followed.
        first_rates: Of each of the optimizer's parameter groups, as its builder set it.
        clip_norm: Largest global gradient norm; ``None``: no limit.
        own_rates: Whether the optimizer's rates are left alone.
        samples_per_epoch: Size of the data set.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        first_rates: Sequence[float],
        clip_norm: float | None,
        own_rates: bool,
        samples_per_epoch: int,
    ) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._plan, self._clip_norm, self._own_rates = plan, clip_norm, own_rates
        self._samples_per_epoch = samples_per_epoch
        self._first_rates = first_rates

    @property
    def rate(self) -> float:
        """Of the optimizer's first parameter group, per step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def rescale(self, factor: float) -> float:
        """Multiply all gradients; returns their squared norm after that."""
        if factor != 1:
            torch._foreach_mul_(self._gradients(), factor)
        return float(sqr_norms(self._parameters).sum())

    def apply(self, sqr_norm: float, samples_seen: float, stage: Stage) -> bool:
        """Set the rate and, where the gradient is finite, clip and step.

        Args:
            sqr_norm: Squared norm of the gradient.
            samples_seen: Training samples before this step, all workers.
            stage: The plan's row.

        Returns:
            Whether the weights were updated.
        """
        self._set_rates(samples_seen, stage)
        if not math.isfinite(sqr_norm):
            return False
        norm = math.sqrt(sqr_norm)
        if self._clip_norm is not None and norm > self._clip_norm:
            torch._foreach_mul_(self._gradients(), self._clip_norm / norm)
        self._optimizer.step()
        return True

    def clear(self) -> None:
        """Drop all gradients, those too that the optimizer does not have."""
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _set_rates(self, samples_seen: float, stage: Stage) -> None:
        if self._own_rates:
            return
        rule = self._plan.learning_rate
        factor = rate_factor(
            samples_seen,
            rule=rule,
            samples_per_epoch=self._samples_per_epoch,
            epochs=self._plan.epochs,
        )
        relative = factor * stage.learning_rate / rule.base
        for group, first in zip(self._optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = first * relative
