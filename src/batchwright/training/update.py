"""What becomes of summed gradients: measured, scaled, clipped, applied at the planned rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from batchwright.planning.learning_rate import rate_factor
from batchwright.records import Plan, Stage
from batchwright.reduction import sqr_norms
from batchwright.training.gradient_scaling import Adaptation, multiply

_AS_PLANNED = Adaptation()


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

    Attributes:
        own_rates: As given.
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
        self._plan, self._clip_norm, self.own_rates = plan, clip_norm, own_rates
        self._samples_per_epoch = samples_per_epoch
        self._first_rates = first_rates
        self.follow([p for p in parameters if p.requires_grad])

    @property
    def rate(self) -> float:
        """Of the optimizer's first parameter group, per step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def follow(self, trained: Collection[nn.Parameter]) -> None:
        """From now on these of the parameters are those that a `Reducer` has."""
        those = set(trained)
        self._trained = [index for index, p in enumerate(self._parameters) if p in those]

    def rescale(self, factor: float) -> Tensor:
        """Multiply all gradients; returns the squared norm of each after that: (parameters,)."""
        if factor != 1:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
        return sqr_norms(self._parameters).cpu()

    def of_trained(self, values: Tensor) -> Tensor:
        """Those of the parameters' values that are of trained ones, as a `Reducer` has them."""
        return values if len(self._trained) == len(values) else values[self._trained]

    def apply(
        self,
        norms: Tensor,
        samples_seen: float,
        stage: Stage,
        adaptation: Adaptation = _AS_PLANNED,
    ) -> bool:
        """Set the rate and, where the gradient is finite, scale, clip and step.

        Args:
            norms: Squared norm of each parameter's gradient: (parameters,).
            samples_seen: Training samples before this step, all workers.
            stage: The plan's row.
            adaptation: What rate and gradients are multiplied by, besides.

        Returns:
            Whether the weights were updated.

        Raises:
            RuntimeError: The optimizer has other parameter groups than it had.
        """
        groups, first = len(self._optimizer.param_groups), len(self._first_rates)
        if groups != first:
            raise RuntimeError(
                f"the optimizer has {groups} parameter group(s) and had {first} when the session "
                "was made: give it all groups before, those of layers to be unfrozen later too; "
                "frozen ones just have no gradient"
            )
        self._set_rates(samples_seen, stage, adaptation.gain)
        sqr_norm = float(norms.sum())
        if not math.isfinite(sqr_norm):
            return False
        scales = self._scales(adaptation)
        if any(scale != 1 for scale in scales):
            sqr_norm = sum(s * s * n for s, n in zip(scales, norms.tolist(), strict=True))
        norm = math.sqrt(sqr_norm)
        if self._clip_norm is not None and norm > self._clip_norm:
            scales = [scale * (self._clip_norm / norm) for scale in scales]
        multiply([p.grad for p in self._parameters], scales)
        self._optimizer.step()
        return True

    def clear(self) -> None:
        """Drop all gradients, those too that the optimizer does not have."""
        for parameter in self._parameters:
            parameter.grad = None

    def _scales(self, adaptation: Adaptation) -> list[float]:
        """Factor on each parameter's gradient."""
        scales = [1.0] * len(self._parameters)
        if adaptation.factors is not None:
            for index, factor in zip(self._trained, adaptation.factors.tolist(), strict=True):
                scales[index] = factor
        return scales

    def _set_rates(self, samples_seen: float, stage: Stage, gain: float) -> None:
        if self.own_rates:
            return
        rule = self._plan.learning_rate
        factor = rate_factor(
            samples_seen,
            rule=rule,
            samples_per_epoch=self._samples_per_epoch,
            epochs=self._plan.epochs,
        )
        relative = gain * factor * stage.learning_rate / rule.base
        for group, first in zip(self._optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = first * relative
