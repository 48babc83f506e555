"""An average of the weights: while the rate is high, its held-out accuracy is the higher one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_UPDATES = 32  # updates within the epochs looked back on: more would cost time and change little
_AT_ONCE = 2**22  # numbers averaged together on a GPU, which takes some 10 bytes of each meanwhile
_IN_CACHE = 2**16  # numbers averaged together on a CPU: several passes over them stay in its cache
_APART = 16  # numbers: each tensor begins at a multiple, aligned like a tensor of its own


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
        model: The network that is trained, on its device. Frozen weights are not averaged.
        epochs: Number of epochs that the average looks back on.
    """

    def __init__(self, model: nn.Module, epochs: float) -> None:
        self._model, self._epochs = model, epochs
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._statistics = dict(_statistics(model))
        self._live: dict[str, Tensor] = {**trained, **self._statistics}
        self._means: dict[str, Tensor] = {}
        self._parts: list[_Part] = []
        for names in _in_parts(self._live):
            part = _Part([self._live[name] for name in names])
            self._means.update(zip(names, part.means, strict=True))
            self._parts.append(part)
        self.updates, self._steps = 0, 0

    @property
    def lasting_bytes(self) -> int:
        """Bytes of the averages on the device."""
        return sum(mean.numel() * mean.element_size() for mean in self._means.values())

    @property
    def shared(self) -> list[Tensor]:
        """Averages that all workers have alike: of weights, not of their own statistics."""
        return [one for name, one in self._means.items() if name not in self._statistics]

    @torch.no_grad()
    def step(self, steps: int) -> None:
        """Update the average after a step, if it is due.

        Args:
            steps: Number of steps of the epoch in progress.
        """
        back = max(1.0, self._epochs * steps)
        apart = max(1, int(back / _UPDATES))
        self._steps += 1
        if self.updates and self._steps < apart:
            return
        self._steps = 0
        weight = max(apart / back, 1 / (self.updates + 1))
        for part in self._parts:
            part.take_in(weight)
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
        """Give the model the averages for good, at the end of training."""
        if self.updates:
            for name, one in self._live.items():
                one.data.copy_(self._means[name])

    def values(self) -> dict[str, Any]:
        """This worker's own part, for a checkpoint: averages of statistics, and counts.

        Averages of 16-bit tensors are among them, which the model's format would round.
        """
        own = {
            name: mean
            for name, mean in self._means.items()
            if name in self._statistics or mean.dtype != self._live[name].dtype
        }
        return {"buffers": own, "updates": self.updates, "steps": self._steps}

    @torch.no_grad()
    def restore(
        self, state: Mapping[str, Any], values: Mapping[str, Any], *, same_workers: bool
    ) -> None:
        """Go on from a checkpoint.

        Args:
            state: The model's ``state_dict`` with the averages and all workers' statistics.
            values: `values` of this worker, or of another in its place.
            same_workers: Whether ``values`` are this worker's own.
        """
        self.updates, self._steps = values["updates"], values["steps"]
        with self.in_place():
            self._model.load_state_dict(state)
            for name, one in self._live.items():
                self._means[name].copy_(one)
        for name, mean in values["buffers"].items():
            if name in self._means and (same_workers or name not in self._statistics):
                self._means[name].copy_(mean)  # unless its layer is gone


class _Part:
    """Averages of tensors of one number format, in one flat tensor.

    So a GPU updates all of them with as few operations as one.

    Attributes:
        means: One for each of the tensors: a view of its shape and, if it is dense, its strides.
    """

    @torch.no_grad()
    def __init__(self, live: list[Tensor]) -> None:
        self._live = live
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        end = 0
        for one in live:
            strides = torch.empty_like(one, device="meta").stride()
            self._places.append((one.size(), strides, end))
            end += -(-one.numel() // _APART) * _APART
        wide = torch.promote_types(live[0].dtype, torch.float32)
        self._flat = torch.zeros(end, dtype=wide, device=live[0].device)
        self.means = self._views(self._flat)
        torch._foreach_copy_(self.means, live)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat.as_strided(*place) for place in self._places]

    def take_in(self, weight: float) -> None:
        """Update the averages by the tensors' finite numbers, which get this ``weight``."""
        mean = self._flat
        if len(self._live) == 1:  # it needs no copy
            mean = self.means[0]
            now = self._live[0].detach().to(mean.dtype)
        else:
            now = torch.empty_like(mean)
            torch._foreach_copy_(self._views(now), self._live)
        mean.lerp_(torch.where(torch.isfinite(now), now, mean), weight)


def _in_parts(live: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors to average together: of one device and format, up to a number."""
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
    for name, one in live.items():
        alike[one.device, one.dtype].append(name)
    for (device, _), names in alike.items():
        most = _IN_CACHE if device.type == "cpu" else _AT_ONCE
        part: list[str] = []
        numbers = 0
        for name in names:
            if part and numbers + live[name].numel() > most:
                yield part
                part, numbers = [], 0
            part.append(name)
            numbers += live[name].numel()
        yield part


def _statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Running means and variances of normalization layers, by their names in the model."""
    for place, layer in model.named_modules():
        if isinstance(layer, _NormBase):
            for name in ("running_mean", "running_var"):
                buffer = getattr(layer, name)
                if buffer is not None:
                    yield f"{place}.{name}" if place else name, buffer
