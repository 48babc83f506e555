"""Activation checkpointing: blocks of a network are computed again in the backward pass.

What a block's layers keep for the backward pass is most of a step's memory. Here only a block's
input is kept, and its forward pass is taken once more when its gradients are due: one more forward
pass a step, for the activations of one block in place of all (Chen et al. 2016, Training deep nets
with sublinear memory cost, arXiv 1604.06174).

PyTorch's own `torch.utils.checkpoint` does it, number format and random numbers included. What it
leaves to us are the blocks, and buffers: a second pass must neither see nor change running
statistics that the first one has left.
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

_UNNAMED = nn.Module.forward  # of a `ModuleList`, which its parent goes through


def recompute(network: nn.Module, *, on: bool = True) -> None:
    """Have the blocks of ``network`` recomputed while it is trained, or no longer.

    Names, weights and buffers stay as they are, and so do evaluation and passes without gradients.
    Doing it twice does nothing more.

    Raises:
        JobError: The network has no blocks.
    """
    blocks = dict.fromkeys(_blocks(network))
    if on and not blocks:
        raise JobError(
            "activation_checkpointing=on: the network has no blocks of layers to compute again, "
            "such as an nn.Sequential of several; give activation_checkpointing=off"
        )
    for block in blocks:
        if on:
            block.forward = MethodType(forward, block)
        elif getattr(block.__dict__.get("forward"), "__func__", None) is forward:
            del block.forward


def may_recompute(network: nn.Module) -> bool:
    """Whether ``network`` has blocks for `recompute`."""
    return next(_blocks(network), None) is not None


def forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    """The forward pass of a block, which keeps its inputs alone.

    It has this name so that a network which is pickled comes back with its own forward passes.
    """
    own = type(block).forward
    if not (block.training and torch.is_grad_enabled()):
        return own(block, *inputs, **named)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _Again(block)  # for the first pass, and for later ones

    return checkpoint(own, block, *inputs, use_reentrant=False, context_fn=contexts, **named)


# ------------------------------------------------------------------------------------- the blocks


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Modules below ``module`` that are made of layers, and not of further such modules in a row.

    A residual block, a layer of a transformer, a stage of a VGG. Single layers outside them are
    left as they are: to recompute one saves nothing that the next does not keep.
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
        ):  # two blocks or more, with forward passes of their own, stand in a row inside
            yield from _blocks(child)
        else:
            yield child


def _layers(module: nn.Module) -> list[nn.Module]:
    """What a module is made of; what makes its weights, such as spectral normalization, is none."""
    return [child for name, child in module.named_children() if name != "parametrizations"]


def _is_row(module: nn.Module) -> bool:
    """Whether a module only lines others up: an `nn.Sequential`, or a list for its parent."""
    return type(module).forward in (nn.Sequential.forward, _UNNAMED)


# ---------------------------------------------------------------------------------------- buffers


class _Again:
    """Inside, a block's buffers are copies of what they were when this was made."""

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
        # On the CPU autocast is on around all blocks: 16-bit copies of this one's weights would
        # stay until the backward pass is through all of them. On a GPU that is in a thread of
        # autograd's, where `checkpoint` puts autocast on for each block and clears them itself.
        torch.clear_autocast_cache()
