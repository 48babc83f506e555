"""Shares that follow the workers' speeds in another trainer's loop, where each step is timed.

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
    """Times the passes of an epoch, and divides the next epoch by all workers' times.

    A pass is timed from the end of the pass before, if `exchanged` was called there, else from
    `begin`, to its last gradient.

    Args:
        sampler: The sampler whose shares follow the speeds.
        parameters: All trained parameters, on their device.

    Attributes:
        before: Batches of the pass over the sampler that came before those that are timed.
    """

    def __init__(self, sampler: Sampler, parameters: Iterable[nn.Parameter]) -> None:
        trained = [one for one in parameters if one.requires_grad]
        self._sampler, self._device = sampler, trained[0].device
        self.before = 0
        self._times: list[tuple[Moment, Moment]] = []
        self._exchange_end: Moment | None = None  # of the pass before
        self._computed = 0  # passes that were computed: not one whose loop was left before
        self._hook = register_multi_grad_hook(trained, self._ready, mode="all")
        self._balancer = Balancer(
            Job(rebalance_steps=0),
            [f"worker {rank}" for rank in range(sampler.workers)],
            least=1,
            speeds={},
            fixed_samples=0.0,
        )

    def begin(self) -> None:
        """Begin a pass, whose batch is there."""
        start, end = self._exchange_end or self._now(), self._now()
        self._exchange_end = None
        self._times.append((start, end))

    def exchanged(self) -> None:
        """Note that a backward pass is over, and with it the exchange of its gradients."""
        self._exchange_end, self._computed = self._now(), len(self._times)

    @property
    def timed(self) -> bool:
        """Whether passes were timed since the epoch began."""
        return bool(self._times)

    def forget(self) -> None:
        """Forget the passes timed so far: another epoch begins."""
        self._times, self._exchange_end, self._computed, self.before = [], None, 0, 0

    def leave_out(self) -> None:
        """Do not count the time until the next pass, such as an evaluation's."""
        self._exchange_end = None

    def _ready(self, *_: Any) -> None:
        if self._times:
            self._times[-1][1].record()

    def end_epoch(self) -> tuple[int, ...]:
        """Divide the next epoch by speed; all workers call this together, with the same result.

        Returns:
            The local batches of the next epoch, in samples by rank.
        """
        sampler, passes = self._sampler, self._sampler.passes
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        each = [start.elapsed_time(end) / 1000 for start, end in self._times[: self._computed]]
        own = [sum(each[at : at + passes]) for at in range(0, len(each) - passes + 1, passes)]
        everyone: list[list[float]] = [own] * sampler.workers
        if sampler.workers > 1:
            distributed.all_gather_object(everyone, own)
        before = self.before
        self.forget()
        for index, seconds in enumerate(zip(*everyone, strict=True)):
            # The first step is cold; the last may be a tail.
            part = sampler.part(before + index * passes)
            usual = index > 0 and part.total == sampler.global_batch
            self._balancer.watch(sampler.local_batch_sizes, seconds, usual=usual)
        wanted = self._balancer.look(epoch_ends=True)
        if wanted is not None:
            sampler.set_shares(wanted)
        return sampler.local_batch_sizes

    def close(self) -> None:
        """Stop timing."""
        self._hook.remove()

    def _now(self) -> Moment:
        cuda = self._device.type == "cuda"
        moment: Moment = torch.cuda.Event(enable_timing=True) if cuda else _HostMoment()
        moment.record()
        return moment


class _HostMoment:
    """A `Moment` of the host's clock, where the host itself computes."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        return float(1000 * (end.at - self.at))
