"""Running statistics of normalization layers: kept before a step, put back where it failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class Statistics:
    """Means, variances and counts of a model's normalization layers, as they were before a step.

    A forward pass over values that are not finite leaves NaN in them, and each later average of NaN
    and anything is NaN again. So a step that does not change the weights must not change these.

    Args:
        model: Holds the layers. Where several workers take turns with it, each has put its own
            buffers in place before `keep`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, _NormBase)]
        self._kept: dict[Tensor, list[tuple[list[Tensor], Tensor]]] = {}  # by worker's first buffer
        self._counts: dict[_NormBase, tuple[Tensor, Tensor]] = {}  # count (), and its view (1,)

    @property
    def synchronized(self) -> bool:
        """Whether workers exchange statistics in each pass; layers in evaluation mode do not."""
        return any(isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in self._layers)

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the statistics before a forward pass; only a step's first call counts, by worker."""
        averages: list[Tensor] = []
        counts: list[Tensor] = []
        for layer in self._layers:
            if layer.training:
                # Ten times as fast as through the module's attributes.
                mean, variance, count = map(layer._buffers.get, _NAMES)
                if mean is not None and variance is not None and count is not None:
                    averages += [mean, variance]
                    known = self._counts.get(layer)
                    if known is None or known[0] is not count:
                        known = self._counts[layer] = count, count.view(1)
                    counts.append(known[1])
        if averages and averages[0] not in self._kept:
            # Two copies however many layers there are: a GPU launches a kernel for each.
            self._kept[averages[0]] = [
                (averages, torch.cat(averages)),
                (counts, torch.cat(counts)),
            ]

    def end(self, *, updated: bool) -> None:
        """End a step; put the statistics back unless it has ``updated`` the weights."""
        if not updated:
            _put(chain.from_iterable(self._kept.values()))
        self._kept.clear()

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Inside, the statistics are those before the step in progress; then as they were again."""
        kept = list(chain.from_iterable(self._kept.values()))
        passed = [(tensors, torch.cat(tensors)) for tensors, _ in kept]
        _put(kept)
        try:
            yield
        finally:
            if self._kept:  # else the step was ended meanwhile
                _put(passed)


@torch.no_grad()
def _put(kept: Iterable[tuple[Sequence[Tensor], Tensor]]) -> None:
    """Give tensors the numbers that were kept of them, one behind the other."""
    for tensors, flat in kept:
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            # Its data: autograd would refuse the backward pass of a batch that is still open.
            tensor.data.copy_(part)
