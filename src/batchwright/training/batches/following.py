"""Shares that follow the workers' speeds in somebody else's loop: each step's own computing timed.

`DistributedDataParallel` exchanges gradients within the backward pass, whose end therefore comes to
all workers at once. From there to its own next last gradient is what a worker needs by itself: for
the update, its input, the forward and the backward pass. What does not grow with the samples is in
it, too, or a slow worker would get too many of them and be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.graph import register_multi_grad_hook

from batchwright.algorithms.balancer import Balancer
from batchwright.records import Job
from batchwright.training.batches.unequal import Sampler
from batchwright.training.step.clock import Moment


class Follower:
    """Times the passes of an epoch, and divides the next one by what all workers measured.

    A pass is timed from the end of the one before, where `exchanged` has told it, else from
    `begin`, to its last gradient.

    Args:
        sampler: Whose shares follow.
        parameters: All that are trained, on their device.
    """

    def __init__(self, sampler: Sampler, parameters: Iterable[nn.Parameter]) -> None:
        trained = [one for one in parameters if one.requires_grad]
        self._sampler, self._device = sampler, trained[0].device
        self._times: list[tuple[Moment, Moment]] = []
        self._over: Moment | None = None  # when the pass before was
        self._computed = 0  # of these passes; not one whose loop was left with its batch at hand
        self._hook = register_multi_grad_hook(trained, self._ready, mode="all")
        self._balancer = Balancer(
            Job(rebalance_steps=0),
            [f"worker {rank}" for rank in range(sampler.workers)],
            least=1,
            speeds={},
            fixed_samples=0.0,
        )

    def begin(self) -> None:
        """A pass begins; its batch is at hand."""
        start, end = self._over or self._now(), self._now()
        self._over = None
        self._times.append((start, end))

    def exchanged(self) -> None:
        """A backward pass is over; what comes now is this worker's own."""
        self._over, self._computed = self._now(), len(self._times)

    @property
    def timed(self) -> bool:
        """Whether passes were timed since the epoch was divided."""
        return bool(self._times)

    def forget(self) -> None:
        """What was timed of the pass at hand counts nothing: another begins elsewhere."""
        self._times, self._over, self._computed = [], None, 0

    def leave_out(self) -> None:
        """What comes before the next pass, such as an evaluation, is no part of it."""
        self._over = None

    def _ready(self, *_: Any) -> None:
        if self._times:
            self._times[-1][1].record()

    def end_epoch(self) -> tuple[int, ...]:
        """Divide the next epoch, the same on all workers, who call this together.

        Returns:
            The local batches from there on.
        """
        sampler, passes = self._sampler, self._sampler.passes
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        each = [start.elapsed_time(end) / 1000 for start, end in self._times[: self._computed]]
        own = [sum(each[at : at + passes]) for at in range(0, len(each) - passes + 1, passes)]
        everyone: list[list[float]] = [own] * sampler.workers
        if sampler.workers > 1:
            distributed.all_gather_object(everyone, own)
        self.forget()
        for index, seconds in enumerate(zip(*everyone, strict=True)):
            # The first step is cold; the last may be a tail.
            usual = index > 0 and sampler.part(index * passes).total == sampler.global_batch
            self._balancer.watch(sampler.local_batch_sizes, seconds, usual=usual)
        wanted = self._balancer.look(epoch_ends=True)
        if wanted is not None:
            sampler.set_shares(wanted)
        return sampler.local_batch_sizes

    def close(self) -> None:
        """Time nothing any more."""
        self._hook.remove()

    def _now(self) -> Moment:
        cuda = self._device.type == "cuda"
        moment: Moment = torch.cuda.Event(enable_timing=True) if cuda else _HostMoment()
        moment.record()
        return moment


class _HostMoment:
    """As `torch.cuda.Event`, where the host itself computes."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        return float(1000 * (end.at - self.at))
