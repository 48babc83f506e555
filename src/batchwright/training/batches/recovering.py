"""Memory that runs out in somebody else's loop: a batch in smaller parts, on the worker concerned.

The parts' gradients are computed one after the other, and enter the loss that is handed back as

    loss + sum(g p) - detached(sum(g p))

whose value is the loss and whose gradient is :math:`g`. So whatever the trainer does with a loss
(scaling, accumulation, the exchange of gradients in its backward pass) holds for all parts, and the
other workers need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.workload.host import is_out_of_memory, release_memory

Compute = Callable[[Any], Any]  # a batch to its mean loss, or a dict that holds it


class Recovering:
    """Computes a batch's loss, in smaller parts once memory has run out in a forward pass.

    Args:
        parameters: That are trained.
        told: Called with a line where parts become smaller.

    Attributes:
        most: Samples of a part; ``None``: a batch as it comes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], told: Callable[[str], None]) -> None:
        self._trained = [one for one in parameters if one.requires_grad]
        self._told, self.most = told, None

    most: int | None

    def loss(
        self,
        compute: Compute,
        batch: Any,
        *,
        apart: Callable[[], AbstractContextManager[Any]] = nullcontext,
        summed: bool = False,
    ) -> Any:
        """What ``compute(batch)`` gives, or the same from its parts, with the same gradient.

        Args:
            compute: A batch to its mean loss, or a dict with that as ``loss``.
            batch: Tensors whose first dimension is the samples, in tuples, lists and dicts.
            apart: Context for all parts but the last, in which no gradients are exchanged.
            summed: Whether parts' losses add up to the batch's, in place of their mean.
        """
        samples = samples_in(batch)
        while True:
            cut = samples if self.most is None else min(self.most, samples)
            try:
                if cut >= samples:
                    return compute(batch)
                parts = parts_of(batch, samples, cut)
                scales = [1.0 if summed else samples_in(one) / samples for one in parts]
                return self._in_parts(compute, apart, parts, scales)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or cut < 2:  # nothing to halve
                    raise
            release_memory(self._trained[0].device)
            self.most = cut // 2
            self._told(
                f"memory ran out with {cut} samples: they are computed again in parts of "
                f"{self.most}, and so from here on"
            )

    def _in_parts(
        self,
        compute: Compute,
        apart: Callable[[], AbstractContextManager[Any]],
        parts: list[Any],
        scales: list[float],
    ) -> Any:
        *others, last = parts
        gradients: list[Tensor | None] = [None] * len(self._trained)
        value: Tensor | float = 0.0
        for part, scale in zip(others, scales, strict=False):
            with apart():
                loss = _loss_of(compute(part)) * scale
            with torch.autocast(loss.device.type, enabled=False):
                found = torch.autograd.grad(loss, self._trained, allow_unused=True)
            gradients = [
                new if old is None else old if new is None else old + new
                for old, new in zip(gradients, found, strict=True)
            ]
            value = value + loss.detach()
        output = compute(last)
        loss = _loss_of(output) * scales[-1]
        with torch.autocast(loss.device.type, enabled=False):
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                if gradient is not None:
                    carried = (gradient * parameter).sum()
                    loss = loss + (carried - carried.detach()).to(loss.dtype)
        loss = loss + value
        return {**output, "loss": loss} if isinstance(output, dict) else loss


def _loss_of(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output
    return loss


def samples_in(batch: Any) -> int:
    """The first dimension of the first tensor in a batch; 1 of one without."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    values: Sequence[Any] = ()
    if hasattr(batch, "values"):
        values = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        values = batch
    return next((samples_in(v) for v in values if _holds_tensor(v)), 1)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, list, tuple)) or hasattr(value, "values")


def parts_of(batch: Any, samples: int, cut: int) -> list[Any]:
    """A batch in parts of at most ``cut`` samples, as even as can be."""
    count = -(-samples // cut)
    edges = [samples * at // count for at in range(count + 1)]
    return [_rows(batch, low, high, samples) for low, high in pairwise(edges)]


def _rows(value: Any, low: int, high: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[low:high] if value.ndim and len(value) == samples else value
    if isinstance(value, dict) or hasattr(value, "items"):
        return type(value)({key: _rows(one, low, high, samples) for key, one in value.items()})
    if isinstance(value, (list, tuple)):
        if len(value) == samples and not any(isinstance(one, Tensor) for one in value):
            return value[low:high]  # texts, names, one for each sample
        rows = [_rows(one, low, high, samples) for one in value]
        return type(value)(*rows) if hasattr(value, "_fields") else type(value)(rows)
    return value
