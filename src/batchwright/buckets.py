"""Fixed buckets that gradients are summed over the workers in, and squared norms of gradients."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from batchwright.group import Group


class Bucket:
    """A flat tensor that holds several gradients and, in the last bucket, the tail.

    Args:
        parameters: Whose gradients.
        tail: Numbers behind them.
        dtype: Of the flat tensor.
        group: The workers.

    Attributes:
        parameters: As given.
        flat: What is sent.
        tail: Its end.
        views: Its pieces, shaped like the parameters.
        missing: Parameters whose gradient the last backward pass has not made yet.
        squares: Squared norms of the gradients that were put in last, without what was there
            before: (parameters,).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tail: int,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        self.parameters = parameters
        self._group = group
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes) + tail, dtype=dtype, device=group.device)
        *pieces, self.tail = self.flat.split([*sizes, tail])
        self.views = [_shaped_like(p, piece) for p, piece in zip(parameters, pieces, strict=True)]
        self.missing = len(parameters)
        self.squares = torch.zeros(len(parameters), device=group.device)
        self._work: dist.Work | None = None

    def fill(self, kept: Container[nn.Parameter]) -> None:
        """Put the gradients in; to those of ``kept`` parameters, which are there, they are added.

        Summed in the order in which autograd accumulates, so to the same bits.
        """
        if self.parameters:
            self.squares = sqr_norms(self.parameters)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                if parameter not in kept:
                    view.zero_()
            elif parameter in kept:
                view.add_(parameter.grad)
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)

    def send(self) -> None:
        """Start summing over the workers."""
        self._work = dist.all_reduce(self.flat, group=self._group.handle, async_op=True)

    def wait(self) -> None:
        """Wait until the sum is there."""
        if self._work is not None:
            self._work.wait()
        self._work, self.missing = None, len(self.parameters)

    def hand_over(self) -> None:
        """Make the sums the parameters' gradients."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


def sqr_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Squared norm of each parameter's gradient, 0 where there is none: float32 (parameters,)."""
    result = torch.zeros(len(parameters), device=parameters[0].device)
    present = [index for index, p in enumerate(parameters) if p.grad is not None]
    if present:
        norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
        squares = torch.stack(norms).float().square()
        if len(present) == len(parameters):  # the usual case, spared the scattering
            return squares
        result[present] = squares
    return result


def make_buckets(
    parameters: Sequence[nn.Parameter], group: Group, bucket_bytes: int, tail: int
) -> list[Bucket]:
    """Buckets for these parameters, in the order in which they are sent.

    Args:
        parameters: In the model's order.
        group: The workers.
        bucket_bytes: Size at which a bucket is sent.
        tail: Numbers behind the gradients in the last one, at least float32.
    """
    groups = grouped(parameters, bucket_bytes)
    tails = [0] * (len(groups) - 1) + [tail]
    return [
        Bucket(members, size, dtype_of(members), group)
        for members, size in zip(groups, tails, strict=True)
    ]


def grouped(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters, last first as the backward pass reaches them, by number format and size."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if not groups or groups[-1][0].dtype != parameter.dtype or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    if not groups or groups[-1][0].dtype.itemsize < 4:
        groups.append([])  # counts and norms need at least float32
    return groups


def dtype_of(members: Sequence[nn.Parameter]) -> torch.dtype:
    """The number format of a bucket of these parameters."""
    return members[0].dtype if members else torch.float32


def _shaped_like(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """A view of a flat piece with the parameter's shape and, where dense, its memory format.

    Same strides for weights and gradients keep the optimizer's passes over them dense.
    """
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset())
    return piece.view(parameter.size())
