"""Gradients summed over the workers while the backward pass still runs.

Each worker's gradient arrives already weighted by its samples, so the sum over the workers is the
gradient of the mean loss over the union of their batches, whatever the local batch sizes are:

    g = sum_i (b_i / B) g_i

Gradients are copied into fixed buckets, and each full bucket is all-reduced at once. The first step
is sent as a whole after its backward pass, and records in which order the gradients came; the
buckets of all later steps follow that order. The last message also carries `Tally`: loss, weight,
the sample-weighted squared norms of the gradients of all parts of the step (each micro-batch of
each worker is one), flags, and what each worker says of itself. Nothing needs a message of its own.

To see each micro-batch's own gradient, those before a worker's last are taken out of ``.grad`` and
added up here, in the order in which autograd would have added them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from batchwright.distributed.buckets import (
    Bucket,
    dtype_of,
    grouped,
    sqr_norms,
    squares_of,
    with_room_for_tail,
)
from batchwright.distributed.group import Group, naming_the_lost
from batchwright.distributed.tally import QueuedWork, Tally, WorkerNote
from batchwright.distributed.transports import nothing
from batchwright.errors import TrainingError
from batchwright.records.text.formatting import counted

BUCKET_BYTES = 8 * 2**20  # large enough that latency is small, small enough to overlap
_ATTEMPTS = 3  # steps in which some worker saw no backward pass, before buckets go unordered

# The tail behind the gradients of the last message holds, in this order:
#   _SCALARS numbers   weight, loss, stop, checkpoint, missing, uncompiled, parts
#   1 per parameter    workers that have a gradient of it, in the order of the buckets
#   1 per parameter    S, the weighted squared norms, in the same order; or 1 for all together
#   4 per worker       its `WorkerNote`; every other worker adds 0 there
_SCALARS = 7
_LOSS, _MISSING = 1, 4  # places among the scalars
_DIGEST = WorkerNote._fields.index("digest")


class Reducer:
    """Sums gradients over a step's micro-batches and over a group, bucket by bucket.

    A restarted run must sum in the same order, since rounding depends on it: checkpoints keep
    `order`.

    Args:
        parameters: All parameters, in the model's order; frozen ones are left out until
            `add_unfrozen`.
        group: The workers. With one worker nothing is copied or sent.
        bucket_bytes: Size at which a bucket is sent.
        order: The order that another reducer of these parameters has recorded; empty: none yet.
        per_tensor: Whether to compute the norms of each parameter's gradients, which takes time.

    Attributes:
        parameters: Those that are or were trained, in the model's order.
        order: Indices of these among all parameters: those whose gradients came in the backward
            pass of every worker, in the order in which they came on worker 0, and then the others.
            Empty until a step has recorded them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Group,
        bucket_bytes: int = BUCKET_BYTES,
        order: Sequence[Sequence[int]] = (),
        *,
        per_tensor: bool = True,
    ) -> None:
        self._per_tensor = per_tensor
        self._all, self._group, self._bucket_bytes = list(parameters), group, bucket_bytes
        self.parameters: list[nn.Parameter] = []
        self.order = [list(part) for part in order]
        self._trained: set[int] = set()  # indices of `parameters` among all
        self._watched: set[int] = set()  # indices of those that have not been frozen all the time
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._next = 0  # first bucket not sent yet
        self._armed = False
        self._arrived: list[int] = []  # in the step in progress, while its order is recorded
        self._arrivals: Counter[int] | None = None  # of each gradient in one backward pass
        # The micro-batches taken so far in the step in progress:
        self._sums: list[Tensor | None] = []  # gradients; of a single worker, else in the buckets
        self._norms: Tensor | None = None  # their part of S
        self._parts = 0
        self._include({index for part in self.order for index in part})
        self.add_unfrozen()

    def add_unfrozen(self) -> bool:
        """Include parameters that were unfrozen since the last call; before a backward pass.

        One that is frozen again keeps its place, and has no gradient.

        Returns:
            Whether there were any.

        Raises:
            RuntimeError: Gradients of the step in progress are on their way already.
        """
        if len(self._watched) == len(self._all):
            return False
        unfrozen = {
            index
            for index, p in enumerate(self._all)
            if index not in self._watched and p.requires_grad
        }
        added = unfrozen - self._trained  # the others were trained before a resume
        if added and (self._parts or self._next):
            raise RuntimeError(
                f"{counted(len(added), 'parameter')} unfrozen between the micro-batches of a step: "
                "unfreeze layers between epochs, before session.batches()"
            )
        self._watched |= unfrozen
        if self._group.size > 1:
            self._hooks += [
                self._all[index].register_post_accumulate_grad_hook(self._arrival_of(index))
                for index in sorted(unfrozen)
            ]
        self._include(added)
        return bool(added)

    def _include(self, added: set[int]) -> None:
        """Give parameters, by their indices, a place among the sums."""
        if not added:
            return
        self._trained |= added
        self.parameters = [self._all[index] for index in sorted(self._trained)]
        if self._group.size > 1:
            self._lay_out()
        self._reset()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buckets; 0 with one worker."""
        return sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets)

    @property
    def empty(self) -> bool:
        """Whether no parameter has got a gradient in the step in progress."""
        held = any(any(bucket.held) for bucket in self._buckets)
        held = held or any(total is not None for total in self._sums)
        return not held and all(p.grad is None for p in self.parameters)

    def take(self, share: float) -> None:
        """Add up the gradients of a micro-batch that is not this worker's last, and clear them.

        Args:
            share: Its part of the step's weight, by which its gradients are multiplied already.
        """
        self._parts += share > 0
        gradients = [p.grad for p in self.parameters]
        if all(gradient is None for gradient in gradients):
            return
        if self._buckets:
            for bucket in self._buckets:
                bucket.add()
            squares = self._added_squares(share)
        else:
            squares = self._own_sqr_norms() / (share or 1.0)
            self._sums = summed(self._sums, gradients)
        self._norms = squares if self._norms is None else self._norms + squares
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self) -> None:
        """Send buckets as they fill during the next backward pass: it is the step's last one."""
        self._armed = bool(self._buckets)
        self._arrived = []
        if self._armed and self._arrivals is not None:
            # A bucket waits for each gradient that may come: also for one that did not come in
            # the recorded pass, but not for those of frozen parameters.
            for bucket in self._buckets:
                bucket.missing = 0
            for index, bucket in self._bucket_of.items():
                if self._all[index].requires_grad:
                    bucket.missing += self._arrivals[index] or 1

    def finish(self, tally: Tally, share: float, queued: QueuedWork | None = None) -> Tally:
        """Wait for all buckets; then every worker holds the sum of all gradients in ``.grad``.

        A parameter that got a gradient on no worker keeps ``None``.

        Args:
            tally: This worker's own figures; its parts are counted here.
            share: Part of the step's weight of this worker's last micro-batch, whose gradients are
                in ``.grad``; 0 for a worker that has none.
            queued: What the device goes on with while the host waits.

        Returns:
            The figures summed over all workers.

        Raises:
            LostWorkerError: Another worker is gone or silent.
            TrainingError: A gradient is sparse.
        """
        if tally.missing:
            self._reset()
        tally = replace(tally, parts=self._parts + (share > 0), notes=(tally.note,))
        if self._buckets:
            total = self._exchange(tally, share, queued)
            self._record_order(total)
        else:
            if self._norms is not None:  # of the micro-batches before the last
                self.take(share)
                for parameter, gradient in zip(self.parameters, self._sums, strict=True):
                    parameter.grad = gradient
            total = self._read_norms(tally, self._norms, self._own_sqr_norms(), queued)
        self._reset()
        return total

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _reset(self) -> None:
        """Forget the micro-batches taken so far."""
        self._norms, self._parts = None, 0
        self._sums = []
        for bucket in self._buckets:
            bucket.forget()

    # ---------------------------------------------------------------------------- several workers

    def _lay_out(self) -> None:
        """Make the buckets: in the recorded order, else last layers first."""
        if sorted(index for part in self.order for index in part) == sorted(self._trained):
            parts = self.order
        else:
            self.order, parts = [], [sorted(self._trained, reverse=True)]
        self._arrivals, self._attempts = None, 0
        # Gradients that do not come on all workers share no bucket with those before them.
        groups = [
            members
            for part in parts
            for members in grouped([self._all[index] for index in part], self._bucket_bytes)
        ]
        tail = _tail_numbers(len(self.parameters), self._group.size, per_tensor=self._per_tensor)
        members = with_room_for_tail(groups)
        tails = [0] * (len(members) - 1) + [tail]
        self._buckets = [
            Bucket(number, own, numbers, self._group, per_tensor=self._per_tensor)
            for number, (own, numbers) in enumerate(zip(members, tails, strict=True))
        ]
        in_buckets = [index for part in parts for index in part]
        owners = [bucket for bucket in self._buckets for _ in bucket.parameters]
        self._bucket_of = dict(zip(in_buckets, owners, strict=True))
        places = {index: place for place, index in enumerate(in_buckets)}
        self._places = torch.tensor([places[index] for index in sorted(self._trained)])
        # The host writes its part of the tail here first: only from pinned memory a copy to a
        # device does not make the host wait.
        pinned = self._group.device.type != "cpu"
        dtype = self._buckets[-1].tail.dtype
        self._host_tail = torch.zeros(tail, dtype=dtype, pin_memory=pinned)
        self._host_numbers = self._host_tail.numpy()

    def _arrival_of(self, index: int) -> Callable[[Tensor], None]:
        """The hook that autograd calls whenever it has accumulated a gradient of a parameter."""

        def arrived(parameter: Tensor) -> None:
            if not self._armed:
                return
            if self._arrivals is None:
                self._arrived.append(index)
                return
            bucket = self._bucket_of[index]
            if bucket.number < self._next:
                self._armed = False
                raise TrainingError(
                    f"a gradient of shape {tuple(parameter.shape)} came once more after it had "
                    "been sent to the other workers: reentrant activation checkpointing of layers "
                    "that share weights does this; use checkpoint(..., use_reentrant=False)"
                )
            bucket.missing -= 1
            if bucket.missing > 0:
                return
            # Buckets are sent in the same order on all workers. The last one waits for `finish`,
            # which knows what rides in its tail.
            while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing <= 0:
                full = self._buckets[self._next]
                full.add()
                with naming_the_lost():
                    full.send()
                self._next += 1

        return arrived

    def _exchange(self, tally: Tally, share: float, queued: QueuedWork | None) -> Tally:
        """Send what the backward pass has not sent yet, and wait for the sums."""
        self._armed = False
        for bucket in self._buckets[self._next :]:
            bucket.add()
            if bucket is self._buckets[-1]:
                self._fill_tail(tally, share)
            with naming_the_lost():
                bucket.send()
        with naming_the_lost():
            for bucket in self._buckets:
                bucket.wait()
        self._next = 0
        return self._read_tail(queued)

    def _record_order(self, tally: Tally) -> None:
        """After the first whole step, agree with the others on the order in which gradients come.

        That step has sent its buckets only at its end. From here on a backward pass sends each
        bucket once it is full, so the buckets are laid out anew in that order.
        """
        if self._arrivals is not None or tally.missing:
            return
        if not self.order:
            everyone = self._group.gather(list(dict.fromkeys(self._arrived)))
            self._attempts += 1
            if all(everyone):
                always = set[int].intersection(*map(set, everyone))
                came = [index for index in everyone[0] if index in always]
                self.order = [came, sorted(self._trained - always, reverse=True)]
                self._lay_out()
            elif self._attempts == _ATTEMPTS:  # the loop never gives `step` the whole loss
                self.order = [sorted(self._trained, reverse=True), []]
        if self.order and self._arrived:
            self._arrivals = Counter(self._arrived)

    def _fill_tail(self, tally: Tally, share: float) -> None:
        """Write this worker's figures into the tail, as laid out at the head of this module."""
        count, fields = len(self.parameters), len(WorkerNote._fields)
        squares = self._added_squares(share)
        squares = squares if self._norms is None else self._norms + squares
        numbers, tail = self._host_numbers, self._buckets[-1].tail  # others' notes stay 0
        own_note = len(numbers) - fields * (self._group.size - self._group.rank)
        loss, digest = tally.loss, tally.note.digest
        numbers[:_SCALARS] = (
            *(tally.weight, 0 if isinstance(loss, Tensor) else loss, tally.stop, tally.checkpoint),
            *(tally.missing, tally.uncompiled, tally.parts),
        )
        numbers[_SCALARS : _SCALARS + count] = [h for bucket in self._buckets for h in bucket.held]
        known = 0 if isinstance(digest, Tensor) else digest
        numbers[own_note : own_note + fields] = tally.note._replace(digest=known)
        tail.copy_(self._host_tail, non_blocking=True)
        tail[_SCALARS + count :][: len(squares)].copy_(squares)
        for place, number in ((_LOSS, loss), (own_note + _DIGEST, digest)):
            if isinstance(number, Tensor):  # known to the device alone so far
                tail[place : place + 1].copy_(number)

    def _added_squares(self, share: float) -> Tensor:
        """Squared norms of the gradients that were added last, over a part's share of the step.

        Returns:
            As `Tally.local_sqr_norms`, in the order of the buckets.
        """
        norms = [norm for bucket in self._buckets for norm in bucket.norms]
        squares = squares_of(norms) / (share or 1.0)
        return squares if self._per_tensor else squares.sum(0, keepdim=True)

    def _read_tail(self, queued: QueuedWork | None) -> Tally:
        """Give the parameters their summed gradients, and read the summed figures.

        Here alone a step makes the host wait for the device, which has the ``queued`` work to do.
        """
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        tail, count = self._buckets[-1].tail, len(self.parameters)
        squares = squares_of([norm for bucket in self._buckets for norm in bucket.sum_norms()])
        expected, flag = None if queued is None else queued.expected_weight, None
        if expected is not None:
            unusual = (tail[0] != expected) | (tail[_MISSING] != 0) | _infinite(squares)
            unusual = unusual | (tail[_SCALARS : _SCALARS + count].amin() <= 0)
            flag = unusual.float()
        meanwhile = nothing if queued is None else partial(queued.queue, flag)
        read = self._group.read(torch.cat([tail.double(), squares]), meanwhile)
        tail_read, squares = read.split([len(tail), len(squares)])
        numbers = tail_read.tolist()
        weight, loss, stop, checkpoint, missing, uncompiled, parts = numbers[:_SCALARS]
        present = numbers[_SCALARS : _SCALARS + count]
        whole = all(present)
        if not whole:
            in_buckets = [p for bucket in self._buckets for p in bucket.parameters]
            for parameter, workers in zip(in_buckets, present, strict=True):
                if not workers:
                    parameter.grad = None
        # What the device has decided, from the same numbers.
        went_ahead = weight == expected and whole and not missing and not _infinite(squares)
        fields = len(WorkerNote._fields)
        notes = numbers[-fields * self._group.size :]
        norms = tail_read[_SCALARS + count : -len(notes)].to(tail.dtype)  # as they were sent
        return Tally(
            weight,
            loss,
            stop,
            checkpoint,
            missing,
            uncompiled,
            parts=round(parts),
            local_sqr_norms=norms[self._places] if self._per_tensor else norms,
            sqr_norms=squares[self._places] if self._per_tensor else squares.sum(0, keepdim=True),
            notes=tuple(
                WorkerNote(*notes[first : first + fields]) for first in range(0, len(notes), fields)
            ),
            whole=whole,
            went_ahead=bool(went_ahead),
        )

    # --------------------------------------------------------------------------------- one worker

    def _read_norms(
        self, tally: Tally, local: Tensor | None, squares: Tensor, queued: QueuedWork | None
    ) -> Tally:
        """The tally with S (``local``) and the sum's ``squares``, read from the device at once."""
        loss = tally.loss if isinstance(tally.loss, Tensor) else squares.new_zeros(1)
        numbers = [loss if loss.dim() else loss.view(1), squares]
        numbers += [] if local is None else [local.double()]
        flag = None
        if queued is not None and tally.weight == queued.expected_weight and not tally.missing:
            flag = _infinite(squares).float()
        meanwhile = nothing if queued is None else partial(queued.queue, flag)
        read = self._group.read(torch.cat(numbers), meanwhile)
        loss, squares, local_read = read.split([1, len(squares), len(read) - 1 - len(squares)])
        went_ahead = flag is not None and not _infinite(squares)  # as the device has decided
        return replace(
            tally,
            loss=float(loss) if isinstance(tally.loss, Tensor) else tally.loss,
            local_sqr_norms=None if local is None else local_read.to(local.dtype),
            sqr_norms=squares,
            went_ahead=bool(went_ahead),
        )

    def _own_sqr_norms(self) -> Tensor:
        return sqr_norms(self.parameters, per_tensor=self._per_tensor)


def _infinite(squares: Tensor) -> Tensor:
    """Whether the sum of some numbers is not finite, a scalar; it less itself is then NaN."""
    total = squares[0] if len(squares) == 1 else squares.sum()
    return total - total != 0


def summed(
    totals: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Add gradients, one for each parameter, to totals in place.

    Args:
        totals: Sums so far; empty: the gradients become totals themselves.
        gradients: ``None`` where a parameter has none.

    Returns:
        The totals; ``None`` where there is neither a total nor a gradient.
    """
    if not totals:
        return list(gradients)
    both = [
        (total, gradient)
        for total, gradient in zip(totals, gradients, strict=True)
        if total is not None and gradient is not None
    ]
    if both:
        torch._foreach_add_([total for total, _ in both], [gradient for _, gradient in both])
    return [g if t is None else t for t, g in zip(totals, gradients, strict=True)]


def buffer_bytes(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    per_tensor: bool = True,
) -> int:
    """Bytes of the buckets that a `Reducer` of two workers keeps for these parameters."""
    trained = [p for p in parameters if p.requires_grad]
    groups = with_room_for_tail(grouped(trained[::-1], bucket_bytes))
    numbers = _tail_numbers(len(trained), 2, per_tensor=per_tensor)
    tail = numbers * dtype_of(groups[-1]).itemsize
    return sum(p.numel() * p.element_size() for p in trained) + tail


def _tail_numbers(parameters: int, workers: int, *, per_tensor: bool) -> int:
    """Numbers behind the gradients in the last message, as laid out at the head of this module."""
    norms = parameters if per_tensor else 1
    return _SCALARS + parameters + norms + workers * len(WorkerNote._fields)
