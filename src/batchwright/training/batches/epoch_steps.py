"""The steps of one epoch in one process: which samples they have, and in which micro-batches.

Loader processes prefetch, so the feed asks for samples ahead of the training. Shares change from a
step on that no worker's feed has asked for yet; steps before it stay as they were handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from batchwright.algorithms.partition import apportion
from batchwright.errors import PlanError
from batchwright.records.text.formatting import counted
from batchwright.training.batches.sampler import Step, micro_batches


@dataclass(frozen=True)
class Shares:
    """Local batches and micro-batches from one step of an epoch on.

    Attributes:
        first: The step, zero-based.
        local_batch_sizes: Samples per step of each worker, in rank order.
        micro_batch_size: Most samples that this worker puts through the network at once.
    """

    first: int
    local_batch_sizes: tuple[int, ...]
    micro_batch_size: int


class EpochSteps:
    """The steps of an epoch, divided between the workers by their shares.

    Args:
        order: Indices of all samples in the epoch's order, int64 (samples,).
        sizes: Samples of each step that is left, over all workers.
        shares: Shares from the first of these steps on.
        start: Position of that step's first sample in the order; 0 at the start of an epoch.
        ranks: The workers of this process: one, or all that are simulated.
        least: Fewest samples that a worker can train on.
        together: Whether all workers have equally many micro-batches in a step, as layers exchange
            something in each.

    Attributes:
        order: Indices of all samples in the epoch's order, int64 (samples,).
        taken: Last step whose samples the feed has asked for.
        table: The shares, in the order of their first steps.
    """

    def __init__(
        self,
        order: Tensor,
        sizes: Sequence[int],
        shares: Shares,
        *,
        start: int,
        ranks: Sequence[int],
        least: int,
        together: bool = False,
    ) -> None:
        self.taken = shares.first - 1
        self.table = [shares]
        self.order, self._sizes = order, sizes
        self._starts = list(accumulate(sizes, initial=start))
        self._first = shares.first
        self._ranks, self._least, self._together = ranks, least, together

    def __len__(self) -> int:
        """Steps of the epoch, those included that were done before."""
        return self._first + len(self._sizes)

    def change(self, shares: Shares) -> None:
        """Change the shares from step ``shares.first`` on, which the feed has not asked for yet."""
        assert shares.first > self.taken  # noqa: S101 - or samples would be lost or repeated
        self.table = [s for s in self.table if s.first < shares.first] + [shares]

    def shares_at(self, index: int) -> Shares:
        """The shares at a step."""
        return next(shares for shares in reversed(self.table) if shares.first <= index)

    def step(self, index: int) -> Step:
        """A step: which worker takes which samples.

        In a tail, or a step that a tail has joined, shares stay in proportion. A tail too small
        for all, which only a change of the number of workers can leave, goes to the first of them.
        """
        sizes = self.shares_at(index).local_batch_sizes
        wanted = self._sizes[index - self._first]
        if wanted != sum(sizes):
            count = min(len(sizes), max(1, wanted // self._least))  # of workers that take part
            least = min(self._least, wanted)
            some = apportion(sizes[:count], wanted, least=least)
            sizes = (*some, *[0] * (len(sizes) - count))
        return Step(self._starts[index - self._first], sizes)

    def parts(self, index: int) -> list[tuple[int, Tensor]]:
        """(rank, indices) of each of this process's micro-batches at a step, in rank order."""
        return self.cut(self.step(index), self.shares_at(index).micro_batch_size)

    def cut(self, step: Step, micro_batch_size: int) -> list[tuple[int, Tensor]]:
        """As `parts`, with micro-batches of another size.

        Raises:
            PlanError: The workers must have equally many micro-batches, and cannot.
        """
        parts: list[tuple[int, Tensor]] = []
        for rank in self._ranks:
            first, last = step.span(rank)
            if self._together:
                sizes = self._equally_many(step, micro_batch_size, last - first)
            else:
                sizes = micro_batches(last - first, micro_batch_size, self._least)
            if sizes:
                parts += [(rank, part) for part in self.order[first:last].split(sizes)]
        return parts

    def _equally_many(self, step: Step, most: int, samples: int) -> list[int]:
        """A worker's samples in micro-batches, as many as the worker has that needs most."""
        sizes, least = step.local_batch_sizes, min(step.local_batch_sizes)
        count = max(len(micro_batches(size, most, self._least)) for size in sizes)
        if least < count:  # on all workers alike, so that nobody waits for the others
            raise PlanError(
                f"a step has {counted(least, 'sample')} for one worker and {count} micro-batches "
                "for another, and SyncBatchNorm exchanges statistics in each: give even shares, "
                "larger micro-batches, or batch_norm=worker"
            )
        return apportion([1.0] * count, samples)

    def ahead(self) -> Iterator[Tensor]:
        """Sample indices of each micro-batch; the feed may ask long before they are trained on."""
        for index in range(self._first, len(self)):
            self.taken = index
            yield from (part for _, part in self.parts(index))
