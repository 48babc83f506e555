r"""Whole models in one vector, and the rules by which a parameter server merges them.

A worker pushes its weights :math:`w_i` with an update factor :math:`f`; the server has :math:`w`:

.. math::
   \text{journal:} \quad w \leftarrow \frac{w + f w_i}{1 + f} \qquad
   \text{compsac:} \quad w \leftarrow \frac{(2 - f) w + f w_i}{2} \qquad
   \text{bsp:} \quad w \leftarrow \frac{\sum_i f_i w_i}{\sum_i f_i}

Statistics of batch normalization are merged like weights; counters take the largest.

References:
    The dual-batch learning paper, in its conference (COMPSAC) and journal form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from batchwright.distributed.transports import fetched


@dataclass
class Weights:
    """A model's parameters and buffers.

    Attributes:
        floats: All floating-point tensors in the order of the ``state_dict``, flat.
        integers: All other tensors, int64, flat.
    """

    floats: Tensor
    integers: Tensor

    def clone(self) -> Weights:
        """A copy."""
        return Weights(self.floats.clone(), self.integers.clone())


@dataclass(frozen=True)
class Entry:
    """One entry of a model's ``state_dict``.

    Attributes:
        name: Its key in the ``state_dict``.
        shape: Shape of the tensor.
        dtype: Number format, such as ``torch.float32``.
        start: Position of its first number in the flat floats, or integers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int


@torch.no_grad()
def pack(model: nn.Module) -> Weights:
    """A model's weights on the CPU; shared ones once.

    Raises:
        ValueError: Its floating-point tensors are not all of one type.
    """
    floats, integers = _tensors(model)
    types = {tensor.dtype for tensor in floats}
    if len(types) > 1:
        raise ValueError(
            f"the model's weights are of {', '.join(sorted(map(str, types)))}: a parameter server "
            "merges weights of one type; convert the model with model.float()"
        )
    return Weights(_flat(floats, torch.float32), _flat(integers, torch.int64).to(torch.int64))


@torch.no_grad()
def unpack(weights: Weights, model: nn.Module) -> None:
    """Put weights into a model of the same structure, in place."""
    floats, integers = _tensors(model)
    for flat, tensors in ((weights.floats, floats), (weights.integers, integers)):
        if not tensors:
            continue
        near = flat.to(tensors[0].device)  # in one piece, as in `pack`
        parts = near.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def layout(model: nn.Module) -> list[Entry]:
    """Layout of a model's `pack`: position of each entry of its ``state_dict``."""
    entries: list[Entry] = []
    starts = {True: 0, False: 0}
    seen: dict[int, int] = {}
    for name, tensor in model.state_dict().items():
        key, floating = _key(tensor), tensor.is_floating_point()
        start = seen.get(key, starts[floating])
        if key not in seen:
            seen[key] = start
            starts[floating] += tensor.numel()
        entries.append(Entry(name, tuple(tensor.shape), str(tensor.dtype), start))
    return entries


def as_state_dict(weights: Weights, entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Weights as the model's plain ``state_dict``, whose tensors are views of them."""
    found = {}
    for entry in entries:
        dtype = getattr(torch, entry.dtype.removeprefix("torch."))
        flat = weights.floats if dtype.is_floating_point else weights.integers
        part = flat[entry.start : entry.start + math.prod(entry.shape)]
        found[entry.name] = part.view(entry.shape).to(dtype)
    return found


@torch.no_grad()
def merge(
    weights: Weights, pushed: Weights, factor: float, rule: Literal["journal", "compsac"]
) -> None:
    """Merge one worker's model into ``weights``, in place.

    Args:
        weights: The server's model.
        pushed: The worker's model.
        factor: Its update factor, in (0, 2] for ``compsac``.
        rule: Name of the rule.
    """
    share = factor / (1 + factor) if rule == "journal" else factor / 2
    weights.floats.mul_(1 - share).add_(pushed.floats, alpha=share)
    torch.maximum(weights.integers, pushed.integers, out=weights.integers)


@torch.no_grad()
def weighted_mean(pushed: Sequence[tuple[Weights, float]]) -> Weights:
    """The mean of the workers' models weighted by their factors, summed in the order given.

    Of a single model this is that model, bit for bit.
    """
    total = sum(factor for _, factor in pushed)
    first, factor = pushed[0]
    mean = Weights(first.floats * (factor / total), first.integers.clone())
    for weights, factor in pushed[1:]:
        mean.floats.add_(weights.floats, alpha=factor / total)
        torch.maximum(mean.integers, weights.integers, out=mean.integers)
    return mean


def _tensors(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Floating-point tensors and other tensors, each once, in the order of the ``state_dict``."""
    every = {_key(tensor): tensor for tensor in model.state_dict().values()}
    tensors = list(every.values())
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return floats, [tensor for tensor in tensors if not tensor.is_floating_point()]


def _key(tensor: Tensor) -> int:
    """A key that tensors have in common which share their memory."""
    return tensor.data_ptr() or id(tensor)  # an empty tensor has no memory to share


def _flat(tensors: Sequence[Tensor], empty: torch.dtype) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=empty)
    # Memory formats differ (channels last); `reshape` reads all in the logical order.
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    # In one piece, since each copy from a GPU takes time of its own, and into pinned memory, which
    # is quicker.
    return fetched(flat)


def layout_difference(ours: Sequence[Entry], theirs: Sequence[Entry]) -> str:
    """The first difference between two layouts, in words; empty if there is none."""
    for own, other in zip(ours, theirs, strict=False):
        if own != other:
            return f"{_named(other)} where they have {_named(own)}"
    if len(ours) != len(theirs):
        return f"{len(theirs)} tensors where they have {len(ours)}"
    return ""


def _named(entry: Entry) -> str:
    return f"{entry.name} {list(entry.shape)} {entry.dtype.removeprefix('torch.')}"
