"""What workers tell each other beside the gradients of a step, and what a device does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class WorkerNote(NamedTuple):
    """What a worker tells the others of itself; each has a place of its own in the message."""

    seconds: float = 0.0
    """Seconds from the end of the last exchange until its gradients were ready."""
    ahead: float = 0.0
    """Steps after this one whose samples its loader was already asked for."""
    micro_batch: float = 0.0
    """Most samples that it puts through the network at once."""
    digest: float | Tensor = 0.0
    """A number that tells its weights from others, at steps where the workers compare them; on the
    device until it is read."""


_NO_NOTE = WorkerNote()


@dataclass(frozen=True)
class Tally:
    r"""Figures that ride in a step's last message; summed over the workers once it has arrived.

    Attributes:
        weight: Weight of the step's samples: their number, unless the caller weighs them.
        loss: Sum over the micro-batches of weight times mean loss; a float64 on the device until
            it is read.
        stop: Workers that were asked to stop.
        checkpoint: Workers that ask for a checkpoint; worker 0 does, by its clock.
        missing: Workers whose gradients are missing, because memory ran out or compiling failed:
            the sums are then to be thrown away.
        uncompiled: Workers on which compiling has failed since the last step.
        note: What this worker says of itself; not summed.
        parts: Number n of micro-batches of all workers that have a gradient.
        local_sqr_norms: :math:`S = \sum_i (b_i / B) |g_i|^2` over the parts, gradient units
            squared: of each parameter, (parameters,), or of all together, (1,). ``None`` where
            there is one part only, of which it says nothing.
        sqr_norms: Squared norm of the summed gradient, of the same shape.
        notes: What all workers say of themselves, in rank order.
        whole: Whether each parameter got a gradient on some worker; a single worker does not look.
        went_ahead: Whether the device has made the update of `QueuedWork`.
    """

    weight: float
    loss: float | Tensor
    stop: float = 0.0
    checkpoint: float = 0.0
    missing: float = 0.0
    uncompiled: float = 0.0
    note: WorkerNote = _NO_NOTE
    parts: int = 0
    local_sqr_norms: Tensor | None = None
    sqr_norms: Tensor | None = None
    notes: tuple[WorkerNote, ...] = ()
    whole: bool = True
    went_ahead: bool = False


class QueuedWork(NamedTuple):
    """What a device goes on with before the host has read the figures of a step.

    A host that reads first and then says what to do leaves the device idle meanwhile
    (docs/decisions/0081). So the device is told beforehand what follows, an update too where all is
    as usual: every gradient is there, their sum is finite, and the weight is as expected.
    """

    queue: Callable[[Tensor | None], None]
    """Queues the work on the device, once the figures are on their way. Where a weight is expected
    it is called with a flag, a float32 scalar on the device: 0 where all is as usual, else 1, and
    then no weight may change: the host has to decide. With ``None`` the host decides in any case.
    """
    expected_weight: float | None = None
    """Weight of all samples of the step; ``None``: the device does not ask if all is as usual."""
