"""Gradients summed over the workers while the backward pass still runs.

Each worker's gradient arrives already weighted by its samples, so the sum over the workers is the
gradient of the mean loss over the union of their batches, whatever the local batch sizes are:

    g = sum_i (b_i / B) g_i

Gradients are copied into fixed buckets, in the order in which the backward pass makes them, and
each full bucket is all-reduced at once. The last message also carries `Tally`: loss, weight, the
sample-weighted squared norms of the workers' gradients, flags, and what each worker says of itself.
Nothing needs a message of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from batchwright.group import Group, naming_the_lost

BUCKET_BYTES = 8 * 2**20  # large enough that latency is small, small enough to overlap
_SCALARS = 5  # weight, loss, stop, checkpoint, out of memory


class WorkerNote(NamedTuple):
    """What a worker tells the others of itself; each has a place of its own in the message."""

    seconds: float = 0.0
    """From the end of the last exchange until its gradients were ready, in seconds."""
    ahead: float = 0.0
    """Steps after this one whose samples its loader was already asked for."""
    micro_batch: float = 0.0
    """Most samples that it puts through the network at once."""


_NOTHING = WorkerNote()


@dataclass(frozen=True)
class Tally:
    """What rides in the last message, summed over the workers.

    Attributes:
        weight: Weight of the step's samples (their number, unless the caller weighs them).
        loss: Sum over the micro-batches of weight x mean loss.
        stop: Workers that were asked to stop.
        checkpoint: Workers that ask for a checkpoint (rank 0 does, by its clock).
        out_of_memory: Workers whose gradients are missing for want of memory: the sums are then
            to be thrown away.
        note: What this worker says of itself; not summed.
        local_sqr_norms: S = sum_i (b_i / B) |g_i|^2 for each parameter, gradient units squared;
            ``None`` with one worker, where it says nothing.
        notes: What all workers say of themselves, in rank order.
    """

    weight: float
    loss: float
    stop: float = 0.0
    checkpoint: float = 0.0
    out_of_memory: float = 0.0
    note: WorkerNote = _NOTHING
    local_sqr_norms: Tensor | None = None
    notes: tuple[WorkerNote, ...] = ()


class Reducer:
    """Sums gradients over a group, bucket by bucket.

    Buckets and their order never change, so a restarted run sums in the same order.

    Args:
        parameters: What is trained, in the model's order; frozen parameters are left out.
        group: The workers. With one worker nothing is copied or sent.
        bucket_bytes: Size at which a bucket is sent.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: Group, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._group = group
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._next = 0  # first bucket not sent yet
        self._armed = False
        if group.size > 1 and self.parameters:
            self._buckets = _make_buckets(self.parameters, group, bucket_bytes)
            self._bucket_of = {p: b for b in self._buckets for p in b.parameters}
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._arrived) for p in self.parameters
            ]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buckets; 0 with one worker."""
        return sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets)

    def arm(self) -> None:
        """Send buckets as they fill during the next backward pass: it is the step's last one."""
        self._armed = bool(self._buckets)

    def finish(self, tally: Tally, share: float) -> Tally:
        """Wait for all buckets; then every worker holds the sum of all gradients in ``.grad``.

        A parameter that got a gradient on no worker keeps ``None``.

        Args:
            tally: This worker's own figures.
            share: b_i / B, this worker's share of the step, for the squared norms; 0 for one that
                has no gradients.

        Returns:
            The figures summed over all workers.

        Raises:
            LostWorkerError: Another worker is gone or silent.
        """
        if not self._buckets:
            return replace(tally, notes=(tally.note,))
        self._fill_tail(tally, share)
        with naming_the_lost():
            for bucket in self._buckets[self._next :]:
                bucket.send()
            for bucket in self._buckets:
                bucket.wait()
        self._next, self._armed = 0, False
        return self._read_tail()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrived(self, parameter: Tensor) -> None:
        """Called by autograd when a parameter's gradient is whole."""
        if not self._armed:
            return
        self._bucket_of[cast("nn.Parameter", parameter)].missing -= 1
        # The last bucket waits for `finish`, which knows what rides in its tail.
        while self._next < len(self._buckets) - 1 and not self._buckets[self._next].missing:
            with naming_the_lost():
                self._buckets[self._next].send()
            self._next += 1

    def _fill_tail(self, tally: Tally, share: float) -> None:
        scalars = [
            *(tally.weight, tally.loss, tally.stop, tally.checkpoint),
            tally.out_of_memory,
        ]
        present = [float(p.grad is not None) for p in self.parameters]
        head, norms, notes = self._tail_parts()
        head[:] = head.new_tensor(scalars + present)
        norms[:] = sqr_norms(self.parameters).to(norms) / (share or 1.0)
        notes.zero_()
        notes.view(self._group.size, -1)[self._group.rank] = notes.new_tensor(tally.note)

    def _tail_parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scalars and whether each parameter has a gradient; squared norms; the workers' notes."""
        count, noted = len(self.parameters), self._group.size * len(WorkerNote._fields)
        head, norms, notes = self._buckets[-1].tail.split([_SCALARS + count, count, noted])
        return head, norms, notes

    def _read_tail(self) -> Tally:
        head, norms, notes = self._tail_parts()
        for bucket in self._buckets:
            bucket.hand_over()
        weight, loss, stop, checkpoint, out_of_memory, *present = head.tolist()
        for parameter, count in zip(self.parameters, present, strict=True):
            if not count:
                parameter.grad = None
        said = notes.view(self._group.size, -1).tolist()
        return Tally(
            weight,
            loss,
            stop,
            checkpoint,
            out_of_memory,
            local_sqr_norms=norms.clone(),
            notes=tuple(WorkerNote(*row) for row in said),
        )


class _Bucket:
    """A flat tensor that holds several gradients and, in the last bucket, the tail."""

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
        self._work: dist.Work | None = None

    def send(self) -> None:
        """Copy the gradients in and start summing them over the workers."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
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


def buffer_bytes(
    parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES, *, workers: int = 2
) -> int:
    """Bytes of the buckets that a `Reducer` of several workers keeps for these parameters."""
    trained = [p for p in parameters if p.requires_grad]
    groups = _grouped(trained, bucket_bytes)
    tail = _tail_numbers(len(trained), workers) * _dtype_of(groups[-1]).itemsize
    return sum(p.numel() * p.element_size() for p in trained) + tail


def _make_buckets(
    parameters: Sequence[nn.Parameter], group: Group, bucket_bytes: int
) -> list[_Bucket]:
    groups = _grouped(parameters, bucket_bytes)
    tails = [0] * (len(groups) - 1) + [_tail_numbers(len(parameters), group.size)]
    return [
        _Bucket(members, tail, _dtype_of(members), group)
        for members, tail in zip(groups, tails, strict=True)
    ]


def _tail_numbers(parameters: int, workers: int) -> int:
    """Numbers behind the gradients in the last message."""
    return _SCALARS + 2 * parameters + workers * len(WorkerNote._fields)


def _grouped(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
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


def _dtype_of(members: Sequence[nn.Parameter]) -> torch.dtype:
    return members[0].dtype if members else torch.float32


def _shaped_like(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """A view of a flat piece with the parameter's shape and, where dense, its memory format.

    Same strides for weights and gradients keep the optimizer's passes over them dense.
    """
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset())
    return piece.view(parameter.size())
