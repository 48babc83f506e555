"""Gradients summed over the workers while the backward pass still runs.

Each worker's gradient arrives already weighted by its samples, so the sum over the workers is the
gradient of the mean loss over the union of their batches, whatever the local batch sizes are:

    g = sum_i (b_i / B) g_i

Gradients are copied into fixed buckets, in the order in which the backward pass makes them, and
each full bucket is all-reduced at once. The last message also carries `Tally`: loss, weight, the
sample-weighted squared norms of the gradients of all parts of the step (each micro-batch of each
worker is one), flags, and what each worker says of itself. Nothing needs a message of its own.

To see each micro-batch's own gradient, those before a worker's last are taken out of ``.grad`` and
added up here, in the order in which autograd would have added them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from batchwright.buckets import Bucket, dtype_of, grouped, make_buckets, sqr_norms
from batchwright.group import Group, naming_the_lost

__all__ = ["Reducer", "Tally", "WorkerNote", "buffer_bytes", "sqr_norms"]

BUCKET_BYTES = 8 * 2**20  # large enough that latency is small, small enough to overlap
_SCALARS = 6  # weight, loss, stop, checkpoint, out of memory, parts


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
        parts: n, micro-batches of all workers that have a gradient.
        local_sqr_norms: S = sum_i (b_i / B) |g_i|^2 over the parts, for each parameter, gradient
            units squared; ``None`` where there is one part only, as it says nothing.
        notes: What all workers say of themselves, in rank order.
    """

    weight: float
    loss: float
    stop: float = 0.0
    checkpoint: float = 0.0
    out_of_memory: float = 0.0
    note: WorkerNote = _NOTHING
    parts: int = 0
    local_sqr_norms: Tensor | None = None
    notes: tuple[WorkerNote, ...] = ()


class Reducer:
    """Sums gradients over a step's micro-batches and over a group, bucket by bucket.

    Buckets and their order follow from what is trained alone, so a restarted run sums in the same
    order.

    Args:
        parameters: All, in the model's order; frozen ones are left out until `take_up`.
        group: The workers. With one worker nothing is copied or sent.
        bucket_bytes: Size at which a bucket is sent.

    Attributes:
        parameters: Those that are or were trained, in the same order.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: Group, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._given, self._group, self._bucket_bytes = list(parameters), group, bucket_bytes
        self.parameters: list[nn.Parameter] = []
        self._frozen = self._given
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._views: dict[nn.Parameter, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._next = 0  # first bucket not sent yet
        self._armed = False
        self._kept: dict[nn.Parameter, Tensor] = {}  # sums over the micro-batches taken so far
        self._norms: Tensor | None = None  # their part of S, (parameters,)
        self._parts = 0
        self.take_up()

    def take_up(self) -> bool:
        """Sum the gradients of parameters, too, that were unfrozen since; before a backward pass.

        One that is frozen again keeps its place, and has no gradient.

        Returns:
            Whether there were any.

        Raises:
            RuntimeError: Gradients of the step in progress are on their way already.
        """
        unfrozen = [p for p in self._frozen if p.requires_grad]
        if not unfrozen:
            return False
        if self._kept or self._parts or self._next:
            raise RuntimeError(
                f"{len(unfrozen)} parameter(s) were unfrozen between the micro-batches of a step: "
                "unfreeze layers between epochs, before session.batches()"
            )
        trained = {*self.parameters, *unfrozen}
        self.parameters = [p for p in self._given if p in trained]
        self._frozen = [p for p in self._given if p not in trained]
        if self._group.size > 1:
            self._lay_out()
            self._hooks += [p.register_post_accumulate_grad_hook(self._arrived) for p in unfrozen]
        return True

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buckets; 0 with one worker."""
        return sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets)

    @property
    def empty(self) -> bool:
        """Whether no parameter has got a gradient in the step in progress."""
        return not self._kept and all(p.grad is None for p in self.parameters)

    def take(self, share: float) -> None:
        """Keep the gradients of a micro-batch that is not this worker's last, and clear them.

        Args:
            share: Its part of the step's weight, by which its gradients are multiplied already.
        """
        self._parts += share > 0
        present = [p for p in self.parameters if p.grad is not None]
        if not present:
            return
        squares = sqr_norms(self.parameters) / (share or 1.0)
        self._norms = squares if self._norms is None else self._norms + squares
        seen = [p for p in present if p in self._kept]
        if seen:
            torch._foreach_add_(
                [self._kept[p] for p in seen], [cast("Tensor", p.grad) for p in seen]
            )
        for parameter in present:
            if parameter not in self._kept:
                self._kept[parameter] = self._keep(parameter)
            parameter.grad = None

    def arm(self) -> None:
        """Send buckets as they fill during the next backward pass: it is the step's last one."""
        self._armed = bool(self._buckets)

    def finish(self, tally: Tally, share: float) -> Tally:
        """Wait for all buckets; then every worker holds the sum of all gradients in ``.grad``.

        A parameter that got a gradient on no worker keeps ``None``.

        Args:
            tally: This worker's own figures; its parts are counted here.
            share: Part of the step's weight of this worker's last micro-batch, whose gradients are
                in ``.grad``; 0 for a worker that has none.

        Returns:
            The figures summed over all workers.

        Raises:
            LostWorkerError: Another worker is gone or silent.
        """
        if tally.out_of_memory:
            self._drop()
        tally = replace(tally, parts=self._parts + (share > 0))
        if self._buckets:
            found = self._exchange(tally, share)
        else:
            found = replace(tally, local_sqr_norms=self._sum_up(share), notes=(tally.note,))
        self._drop()
        return found

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _lay_out(self) -> None:
        """Make the buckets."""
        tail = _tail_numbers(len(self.parameters), self._group.size)
        self._buckets = make_buckets(self.parameters, self._group, self._bucket_bytes, tail)
        self._bucket_of, self._views = {}, {}
        for bucket in self._buckets:
            self._bucket_of |= dict.fromkeys(bucket.parameters, bucket)
            self._views |= dict(zip(bucket.parameters, bucket.views, strict=True))
        places = {p: place for place, p in enumerate(self._views)}
        order = [places[p] for p in self.parameters]
        self._order = torch.tensor(order, device=self._group.device)

    def _keep(self, parameter: nn.Parameter) -> Tensor:
        """Where a parameter's first gradient of the step now is: in its bucket if it has one."""
        gradient = cast("Tensor", parameter.grad)
        view = self._views.get(parameter)
        if view is None:
            return gradient
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        return view

    def _drop(self) -> None:
        """Forget what was taken."""
        self._kept, self._norms, self._parts = {}, None, 0

    def _sum_up(self, share: float) -> Tensor | None:
        """One worker: ``.grad`` gets the sums; returns S of each parameter, if there are parts."""
        if self._norms is None:
            return None
        norms = self._norms + sqr_norms(self.parameters) / (share or 1.0)
        both = [p for p in self._kept if p.grad is not None]
        if both:
            torch._foreach_add_(
                [self._kept[p] for p in both], [cast("Tensor", p.grad) for p in both]
            )
        for parameter, total in self._kept.items():
            parameter.grad = total
        return norms

    def _arrived(self, parameter: Tensor) -> None:
        """Called by autograd when a parameter's gradient is whole."""
        if not self._armed:
            return
        self._bucket_of[cast("nn.Parameter", parameter)].missing -= 1
        # The last bucket waits for `finish`, which knows what rides in its tail.
        while self._next < len(self._buckets) - 1 and not self._buckets[self._next].missing:
            self._buckets[self._next].fill(self._kept)
            with naming_the_lost():
                self._buckets[self._next].send()
            self._next += 1

    def _exchange(self, tally: Tally, share: float) -> Tally:
        """Several workers: all gradients and figures are summed over them."""
        present = [float(p.grad is not None or p in self._kept) for p in self.parameters]
        for bucket in self._buckets[self._next :]:
            bucket.fill(self._kept)
            if bucket is self._buckets[-1]:
                self._fill_tail(tally, present, share)
            with naming_the_lost():
                bucket.send()
        with naming_the_lost():
            for bucket in self._buckets:
                bucket.wait()
        self._next, self._armed = 0, False
        return self._read_tail()

    def _fill_tail(self, tally: Tally, present: list[float], share: float) -> None:
        scalars = [
            *(tally.weight, tally.loss, tally.stop, tally.checkpoint),
            *(tally.out_of_memory, float(tally.parts)),
        ]
        head, norms, notes = self._tail_parts()
        head[:] = head.new_tensor(scalars + present)
        squares = torch.cat([bucket.squares for bucket in self._buckets])[self._order]
        squares = squares / (share or 1.0)
        norms[:] = squares if self._norms is None else self._norms + squares
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
        weight, loss, stop, checkpoint, out_of_memory, parts, *present = head.tolist()
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
            parts=round(parts),
            local_sqr_norms=norms.clone(),
            notes=tuple(WorkerNote(*row) for row in said),
        )


def buffer_bytes(
    parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES, *, workers: int = 2
) -> int:
    """Bytes of the buckets that a `Reducer` of several workers keeps for these parameters."""
    trained = [p for p in parameters if p.requires_grad]
    groups = grouped(trained, bucket_bytes)
    tail = _tail_numbers(len(trained), workers) * dtype_of(groups[-1]).itemsize
    return sum(p.numel() * p.element_size() for p in trained) + tail


def _tail_numbers(parameters: int, workers: int) -> int:
    """Numbers behind the gradients in the last message."""
    return _SCALARS + 2 * parameters + workers * len(WorkerNote._fields)
