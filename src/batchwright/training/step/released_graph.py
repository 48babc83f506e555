"""Frees the autograd graph of a loss whose backward pass ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor

from batchwright.workload.passes.recorded_passes import graph_nodes


def release_graph(loss: Tensor) -> None:
    """Free the activations that a failed backward pass still holds; the loss keeps its value.

    The user's loop may hold the loss, or outputs that it was computed from, while the step is
    repeated, and with them all activations.
    """
    for node in graph_nodes(loss):
        for saved in _saved_by(node):
            with suppress(RuntimeError):  # the backward pass has freed it already
                # What the first function returns is kept in place of the tensor.
                saved.register_hooks(lambda _: None, _refuse_released)
    with suppress(RuntimeError):  # a view has no graph of its own to be cut off from
        loss.detach_()


def _saved_by(node: Any) -> Iterator[Any]:
    """What a function of a graph has saved for its backward pass."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            # A function in Python whose backward pass is over, such as a compiled part of a
            # network, raises where PyTorch's own give what they have freed.
            with suppress(RuntimeError):
                value = getattr(node, name)
                yield from value if isinstance(value, (tuple, list)) else (value,)


def _refuse_released(_: None) -> Tensor:
    raise RuntimeError("memory ran out in the backward pass of this loss, so its graph was freed")
