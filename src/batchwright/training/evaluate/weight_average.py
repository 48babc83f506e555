"""An average of the weights, whose held-out accuracy is higher while the rate is high."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_UPDATES = 32  # in what it looks back on: more would cost more, and tell the same


class WeightAverage:
    r"""Exponential average of a model's trained weights and running statistics.

    .. math:: \bar w \leftarrow \bar w + \max\left(\tfrac{1}{k}, \tfrac{1}{n + 1}\right)
        (w - \bar w)

    after every few steps, n being the updates so far and k those of ``epochs`` epochs. It goes by
    steps, not by samples, as its weights do (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992,
    in the exponential form). Of buffers the means and variances of normalization layers are
    averaged: others, such as masks and tables, are what they are. Values that are not finite are
    passed over, and 16-bit weights are averaged in float32.

    Args:
        model: On its device; trained elsewhere. What is frozen stays as it is.
        epochs: That it looks back on.
    """

    def __init__(self, model: nn.Module, epochs: float) -> None:
        self._model, self._epochs = model, epochs
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._statistics = dict(_statistics(model))
        self._live: dict[str, Tensor] = {**trained, **self._statistics}
        self._means = {
            name: one.detach().to(torch.promote_types(one.dtype, torch.float32), copy=True)
            for name, one in self._live.items()
        }
        self.updates, self._steps = 0, 0

    @property
    def lasting_bytes(self) -> int:
        """That it takes on the device."""
        return sum(mean.numel() * mean.element_size() for mean in self._means.values())

    @property
    def shared(self) -> list[Tensor]:
        """Averages that are the same on all workers: of weights, not of their own statistics."""
        return [one for name, one in self._means.items() if name not in self._statistics]

    @torch.no_grad()
    def step(self, steps: int) -> None:
        """Take in the weights after a step, if it is time to.

        Args:
            steps: Of the epoch in progress.
        """
        back = max(1.0, self._epochs * steps)
        apart = max(1, int(back / _UPDATES))
        self._steps += 1
        if self.updates and self._steps < apart:
            return
        self._steps = 0
        weight = max(apart / back, 1 / (self.updates + 1))
        for mean, live in zip(self._means.values(), self._live.values(), strict=True):
            now = live.detach().to(mean.dtype)
            mean.lerp_(torch.where(torch.isfinite(now), now, mean), weight)
        self.updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averages, if there are any yet; 16-bit ones are copies.

        The tensors stay the objects that optimizer and hooks know, and a backward pass of an open
        batch finds its own numbers again.
        """
        own = {name: one.data for name, one in self._live.items()}
        try:
            if self.updates:
                for name, one in self._live.items():
                    one.data = self._means[name].to(one.dtype)
            yield
        finally:
            for name, one in self._live.items():
                one.data = own[name]

    @torch.no_grad()
    def leave(self) -> None:
        """Training is over: the model has the averages from here on."""
        if self.updates:
            for name, one in self._live.items():
                one.data.copy_(self._means[name])

    def values(self) -> dict[str, Any]:
        """What is this worker's own of it, for a checkpoint: statistics, and counts."""
        own = {name: self._means[name] for name in self._statistics}
        return {"buffers": own, "updates": self.updates, "steps": self._steps}

    @torch.no_grad()
    def restore(
        self, state: Mapping[str, Any], values: Mapping[str, Any], *, same_workers: bool
    ) -> None:
        """Go on from a checkpoint.

        Args:
            state: The model's state_dict with the averages, and all workers' statistics.
            values: `values` of this worker, or of one that stands in for it.
            same_workers: Whether they were this worker's own.
        """
        self.updates, self._steps = values["updates"], values["steps"]
        with self.in_place():
            self._model.load_state_dict(state)
            for name, one in self._live.items():
                self._means[name].copy_(one)
        if same_workers:
            for name, mean in values["buffers"].items():
                if name in self._statistics:  # else a layer has gone since
                    self._means[name].copy_(mean)


def _statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Running means and variances of normalization layers, by their names in the model."""
    for place, layer in model.named_modules():
        if isinstance(layer, _NormBase):
            for name in ("running_mean", "running_var"):
                buffer = getattr(layer, name)
                if buffer is not None:
                    yield f"{place}.{name}" if place else name, buffer
