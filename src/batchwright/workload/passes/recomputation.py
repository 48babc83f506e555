"""Activation checkpointing: blocks of a network are computed again in the backward pass.

The activations that layers keep for the backward pass are most of a step's memory. With activation
checkpointing only the input of each block is kept, and the block's forward pass is taken once more
when its gradients are due. A step takes one more forward pass, and keeps the activations of one
block in place of all (Chen et al. 2016, Training deep nets with sublinear memory cost, arXiv
1604.06174).

PyTorch's own `torch.utils.checkpoint` recomputes a block, with its number format and random
numbers. This module finds the blocks, and takes care of buffers: the second pass must neither see
nor change the running statistics that the first pass has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchwright.errors import JobError

_UNNAMED = nn.Module.forward  # of a `ModuleList`, whose parent calls its members


def recompute(network: nn.Module, *, on: bool = True) -> None:
    """Switch the recomputation of ``network``'s blocks in training on or off.

    Names, weights and buffers do not change, nor do evaluation and passes without gradients. To
    switch it on twice has no further effect. A block with a forward pass of its own, in place of
    its class's, stays as it is.

    Raises:
        JobError: The network has no blocks, or each has a forward pass of its own.
    """
    blocks = dict.fromkeys(_blocks(network))
    if on and not blocks:
        raise JobError(
            "activation_checkpointing=on: the network has no blocks of layers to compute again, "
            "such as an nn.Sequential of several; give activation_checkpointing=off"
        )
    for block in blocks:
        placed = vars(block).get("forward")
        function = getattr(placed, "__func__", placed)
        if on and function in (None, type(block).forward):  # a pickle has placed the latter
            block.forward = MethodType(forward, block)
        elif not on and function is forward:
            del block.forward
    switched = (getattr(vars(one).get("forward"), "__func__", None) for one in blocks)
    if on and forward not in switched:
        raise JobError(
            "activation_checkpointing=on: each block of the network has a forward pass of its own "
            "in place of its class's, which is never computed again; give "
            "activation_checkpointing=off"
        )


def may_recompute(network: nn.Module) -> bool:
    """Whether ``network`` has blocks for `recompute`."""
    return next(_blocks(network), None) is not None


def forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    """The forward pass of a block that keeps only its inputs.

    By its name a pickled network is loaded with its own forward passes.
    """
    own = type(block).forward
    if not (block.training and torch.is_grad_enabled()):
        return own(block, *inputs, **named)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _EarlierBuffers(block)  # for the first pass, and for later ones

    return checkpoint(own, block, *inputs, use_reentrant=False, context_fn=contexts, **named)


# ------------------------------------------------------------------------------------- the blocks


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks below ``module``: modules of layers that do not contain further blocks in a row.

    For example a residual block, a layer of a transformer, a stage of a VGG. Single layers outside
    of blocks are no blocks: recomputing a single layer would save nothing.
    """
    for child in _layers(module):
        if not _layers(child):
            continue
        if _is_row(child):
            if any(map(_layers, _layers(child))):
                yield from _blocks(child)
            elif isinstance(child, nn.Sequential):
                yield child
        elif any(
            _is_row(row)
            and sum(bool(_layers(one)) and not _is_row(one) for one in _layers(row)) > 1
            for row in child.modules()
        ):  # it contains a row of two blocks or more with forward passes of their own
            yield from _blocks(child)
        else:
            yield child


def _layers(module: nn.Module) -> list[nn.Module]:
    """The children of a module, without parametrizations of its weights."""
    return [child for name, child in module.named_children() if name != "parametrizations"]


def _is_row(module: nn.Module) -> bool:
    """Whether a module only holds others in a row: an `nn.Sequential`, or a `ModuleList`."""
    return type(module).forward in (nn.Sequential.forward, _UNNAMED)


# ---------------------------------------------------------------------------------------- buffers


class _EarlierBuffers:
    """Inside, a block's buffers have the values that they had when this object was made."""

    def __init__(self, block: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor]] = [
            (module, name, buffer.clone())
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._own: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._own = [module._buffers[name] for module, name, _ in self._kept]
        for module, name, buffer in self._kept:
            module._buffers[name] = buffer.clone()

    def __exit__(self, *_: object) -> None:
        for (module, name, _kept), own in zip(self._kept, self._own, strict=True):
            module._buffers[name] = own
        self._own = []
        # On the CPU autocast is on around all blocks, and would keep 16-bit copies of this block's
        # weights until the backward pass has ended. On a GPU the backward pass runs in a thread of
        # autograd, where `checkpoint` turns autocast on for each block, and clears the copies.
        torch.clear_autocast_cache()
