"""Buckets in which gradients are summed over the workers, and squared norms of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from batchwright.distributed.group import Group
from batchwright.errors import TrainingError

_HALF = torch.float16, torch.bfloat16


class Bucket:
    """A flat tensor that holds several gradients and, in the last bucket, the tail.

    Args:
        number: Place among the buckets, in the order in which they are sent.
        parameters: The parameters whose gradients it holds.
        tail: Number of numbers that it holds behind the gradients.
        group: The workers.
        per_tensor: Whether to compute each gradient's norm, not only that of all together.

    Attributes:
        flat: The flat tensor that is sent.
        tail: View of its end, behind the gradients.
        views: Views of its gradients, shaped like the parameters.
        missing: Arrivals of gradients that the backward pass in progress still owes.
        held: For each parameter, whether the step in progress has put a gradient of it in.
        norms: Norms of the gradients that were added last, scalars: one for each parameter, or one
            for all together.
    """

    def __init__(
        self,
        number: int,
        parameters: Sequence[nn.Parameter],
        tail: int,
        group: Group,
        *,
        per_tensor: bool,
    ) -> None:
        self.number, self.parameters = number, parameters
        self._group, self._per_tensor = group, per_tensor
        sizes = [p.numel() for p in parameters]
        dtype = dtype_of(parameters)
        self.flat = torch.zeros(sum(sizes) + tail, dtype=dtype, device=group.device)
        *pieces, self.tail = self.flat.split([*sizes, tail])
        self.views = [_shaped_like(p, piece) for p, piece in zip(parameters, pieces, strict=True)]
        self._numbers = self.flat[: sum(sizes)]
        self.missing = 0
        self.norms: Sequence[Tensor] = ()
        self._zero = torch.zeros((), device=group.device)
        self._work: dist.Work | None = None
        self.forget()

    def forget(self) -> None:
        """Begin a step: nothing of it has been put in."""
        self.held = [False] * len(self.parameters)

    def add(self) -> None:
        """Add the parameters' gradients to those that the step has put in before.

        They are summed in the order in which autograd accumulates, so to the same bits.
        """
        if not self.parameters:
            return
        gradients = [p.grad for p in self.parameters]
        present = [gradient is not None for gradient in gradients]
        if all(present) and not any(self.held):  # the usual case: one call for all of them
            there = cast("list[Tensor]", gradients)
            if self._per_tensor:
                self.norms = norms_of(there)
            try:
                torch._foreach_copy_(self.views, there)
            except RuntimeError:
                _refuse_sparse(there)
                raise
            self.held = present
            if not self._per_tensor:
                self.norms = self.sum_norms()
            return
        norms = iter(norms_of([gradient for gradient in gradients if gradient is not None]))
        self.norms = [self._zero if one is None else next(norms) for one in gradients]
        for index, (view, gradient) in enumerate(zip(self.views, gradients, strict=True)):
            if gradient is None:
                if not self.held[index]:
                    view.zero_()
            elif self.held[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
                self.held[index] = True

    def send(self) -> None:
        """Start the sum over the workers."""
        self._work = dist.all_reduce(self.flat, group=self._group.handle, async_op=True)

    def wait(self) -> None:
        """Wait until the sum is there."""
        if self._work is not None:
            self._work.wait()
        self._work = None

    def sum_norms(self) -> Sequence[Tensor]:
        """Norms, as `norms`, of the gradients in the bucket."""
        if self._per_tensor or not self.views:
            return norms_of(self.views)
        accurate = max(torch.float32, self.flat.dtype, key=lambda dtype: dtype.itemsize)
        return [torch.linalg.vector_norm(self._numbers, dtype=accurate)]


def squares_of(norms: Sequence[Tensor]) -> Tensor:
    """The squares of so many scalars, at least one: float64 (norms,)."""
    return torch.stack(list(norms)).double().square()


def sqr_norms(parameters: Sequence[nn.Parameter], *, per_tensor: bool = True) -> Tensor:
    """Squared norm of each parameter's gradient, 0 where there is none: float64 (parameters,).

    Args:
        parameters: At least one.
        per_tensor: Whether to return one for each parameter; else their sum: (1,).

    Raises:
        TrainingError: A gradient is sparse.
    """
    gradients = [p.grad for p in parameters]
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return _zeros(len(parameters) if per_tensor else 1, parameters[0].device)
    squares = squares_of(norms_of(present))
    if not per_tensor:
        return squares.sum(0, keepdim=True)
    if len(present) == len(gradients):  # the usual case, spared the scattering
        return squares
    # By pieces: indices would have to travel to the device, for which the host would wait.
    nothing, norms = _zeros(1, squares.device), iter(squares.split(1))
    return torch.cat([nothing if gradient is None else next(norms) for gradient in gradients])


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, device=device, dtype=torch.float64)


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Norm of each tensor, a scalar."""
    if not tensors:
        return ()
    kinds = {tensor.dtype for tensor in tensors}
    accurate = None
    if not kinds.isdisjoint(_HALF):  # whose norms would be rounded, and soon infinite
        accurate = max(torch.float32, *kinds, key=lambda dtype: dtype.itemsize)
    if any(tensor.is_sparse for tensor in tensors):  # from PyTorch 2.14 on they have a norm
        _refuse_sparse(tensors)
    try:
        return torch._foreach_norm(list(tensors), dtype=accurate)
    except RuntimeError:  # another layout
        _refuse_sparse(tensors)
        raise


def grouped(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in the given order, cut where the number format changes or a bucket is full."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not groups or groups[-1][0].dtype != parameter.dtype or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    return groups


def with_room_for_tail(groups: Sequence[Sequence[nn.Parameter]]) -> list[Sequence[nn.Parameter]]:
    """The groups, and an empty one where the last cannot hold the tail: real 4-byte numbers."""
    if groups and (last := dtype_of(groups[-1])).itemsize >= 4 and not last.is_complex:
        return list(groups)
    return [*groups, ()]


def dtype_of(members: Sequence[nn.Parameter]) -> torch.dtype:
    """The number format of a bucket of these parameters."""
    return members[0].dtype if members else torch.float32


def _refuse_sparse(gradients: Sequence[Tensor]) -> None:
    for gradient in gradients:
        if gradient.layout != torch.strided:
            raise TrainingError(
                f"a gradient of shape {tuple(gradient.shape)} is sparse, and workers sum dense "
                "ones: build its layer with sparse=False"
            )


def _shaped_like(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """A view of a flat piece with the parameter's shape and, where it is dense, its strides.

    Same strides for weights and gradients keep the optimizer's passes over them dense; fused
    optimizers on GPUs take no others.
    """
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # dense
        return piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset())
    return piece.view(parameter.size())
