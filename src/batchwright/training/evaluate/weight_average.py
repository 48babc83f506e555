"""An average of the weights, whose held-out accuracy is higher while the rate is high."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_UPDATES = 32  # in what it looks back on: more would cost more, and tell the same


class WeightAverage:
    r"""Exponential average of a model's weights and floating-point statistics.

    .. math:: \bar w \leftarrow \bar w + \max\left(\tfrac{1}{k}, \tfrac{1}{n + 1}\right)
        (w - \bar w)

    after every few steps, n being the updates so far and k those of ``epochs`` epochs. It goes by
    steps, not by samples, as its weights do (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992,
    in the exponential form).

    Args:
        model: On its device; trained elsewhere.
        epochs: That it looks back on.
    """

    def __init__(self, model: nn.Module, epochs: float) -> None:
        self._model, self._epochs = model, epochs
        named = chain(model.named_parameters(), model.named_buffers())  # shared ones once
        self._live = {
            name: one
            for name, one in named
            if one.is_floating_point() and (one.requires_grad or not isinstance(one, nn.Parameter))
        }  # what is frozen stays as it is
        self._means = {name: one.detach().clone() for name, one in self._live.items()}
        self.updates, self._steps = 0, 0

    @property
    def lasting_bytes(self) -> int:
        """That it takes on the device."""
        return sum(mean.numel() * mean.element_size() for mean in self._means.values())

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
        now = [one.detach() for one in self._live.values()]
        weight = max(apart / back, 1 / (self.updates + 1))
        torch._foreach_lerp_(list(self._means.values()), now, weight)
        self.updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averages, if there are any yet; nothing is copied.

        The tensors stay the objects that optimizer and hooks know, and a backward pass of an open
        batch finds its own numbers again.
        """
        own = {name: one.data for name, one in self._live.items()}
        try:
            if self.updates:
                for name, one in self._live.items():
                    one.data = self._means[name]
            yield
        finally:
            for name, one in self._live.items():
                one.data = own[name]

    def values(self) -> dict[str, Any]:
        """What is this worker's own of it, for a checkpoint: statistics, and counts."""
        own = {name: self._means[name] for name, _ in self._buffers()}
        return {"buffers": own, "updates": self.updates, "steps": self._steps}

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
        if same_workers:
            for name, _ in self._buffers():
                self._means[name].copy_(values["buffers"][name])

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [one for one in self._model.named_buffers() if one[0] in self._means]
