"""What becomes of summed gradients: measured, scaled, clipped, applied at the planned rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batchwright.algorithms.learning_rate import rate_factor
from batchwright.distributed.reducer import Tally
from batchwright.records import Plan, Stage
from batchwright.training.step.gradient_scaling import Adaptation, multiply

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

    @property
    def per_tensor(self) -> bool:
        """Whether weights come to depend on norms of gradients: by clipping, factors or the rate.

        Then a `Reducer` is to give those of single tensors. They sum to the same bits however
        tensors are put into buckets.
        """
        gaining = self._plan.learning_rate.scaling == "gain" and not self.own_rates
        return self._plan.ags is not None or self._clip_norm is not None or gaining

    def follow(self, trained: Sequence[nn.Parameter]) -> None:
        """From now on these of the parameters are those that a `Reducer` has."""
        self._trained = list(trained)

    def rescale(self, tally: Tally, factor: float) -> Tensor:
        """Multiply all summed gradients.

        Args:
            tally: Of their sum.
            factor: By which they are multiplied.

        Returns:
            The squared norms after that, on the CPU, as `Tally.sqr_norms` has them.
        """
        assert tally.sqr_norms is not None  # noqa: S101 - every reducer gives them
        if factor != 1:
            torch._foreach_mul_(self._gradients(), factor)
        return tally.sqr_norms.cpu() * factor**2

    def apply(
        self,
        norms: Tensor,
        samples_seen: float,
        stage: Stage,
        adaptation: Adaptation = _AS_PLANNED,
    ) -> bool:
        """Set the rate and, where the gradient is finite, scale, clip and step.

        Args:
            norms: Squared norms of the gradients of what is trained, as `rescale` gives them: of
                each, (trained,), where the adaptation has factors.
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
        norms, factors = norms.double(), adaptation.factors
        sqr_norm = float(norms.sum())
        if not math.isfinite(sqr_norm):
            return False
        if factors is not None:
            sqr_norm = float((factors.square() * norms).sum())
        norm, clip = math.sqrt(sqr_norm), 1.0
        if self._clip_norm is not None and norm > self._clip_norm:
            clip = self._clip_norm / norm
        if factors is not None:
            multiply([p.grad for p in self._trained], (clip * factors).tolist())
        elif clip != 1:
            torch._foreach_mul_(self._gradients(), clip)
        self._optimizer.step()
        return True

    def clear(self) -> None:
        """Drop all gradients, those too that the optimizer does not have."""
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained if p.grad is not None]

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
