"""The steps of one epoch in one process: which samples, cut into which micro-batches.

The feed asks ahead of the training, because loader processes prefetch. So shares change from a step
on that no worker's feed has asked for yet, and until then everything stays as it was handed out.
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
    """What holds from one step of an epoch on.

    Attributes:
        first: That step, zero-based.
        local_batch_sizes: Samples per step of each worker, in rank order.
        micro_batch_size: Most samples that this worker puts through the network at once.
    """

    first: int
    local_batch_sizes: tuple[int, ...]
    micro_batch_size: int


class EpochSteps:
    """Goes through the steps of an epoch, as the shares say.

    Args:
        order: Indices of all samples in the epoch's order, int64 (samples,).
        sizes: Samples of each step that is left, over all workers.
        shares: At the first of these.
        start: Position of its first sample in the order; 0 at the start of an epoch.
        ranks: The workers of this process: one, or all that are simulated.
        least: Fewest samples that a worker can train on.
        together: Whether all workers have equally many micro-batches in a step, as layers exchange
            something in each.

    Attributes:
        order: Indices of all samples in the epoch's order, int64 (samples,).
        taken: Last step whose samples the feed has asked for.
        table: The shares, by their first step.
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
        """Steps of the epoch, those before the first that is left included."""
        return self._first + len(self._sizes)

    def change(self, shares: Shares) -> None:
        """From ``shares.first`` on, which the feed has not asked for, other shares hold."""
        assert shares.first > self.taken  # noqa: S101 - or samples would be lost or repeated
        self.table = [one for one in self.table if one.first < shares.first] + [shares]

    def shares_at(self, index: int) -> Shares:
        """What holds at a step."""
        return next(one for one in reversed(self.table) if one.first <= index)

    def step(self, index: int) -> Step:
        """Who takes what at a step.

        At a tail, or a step that a tail has joined, all get as much more or less. A tail too small
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
        """`parts` of a step with micro-batches of another size.

        Raises:
            PlanError: The workers cannot have equally many, though they have to.
        """
        found: list[tuple[int, Tensor]] = []
        for rank in self._ranks:
            first, last = step.span(rank)
            if self._together:
                sizes = self._as_many(step, micro_batch_size, last - first)
            else:
                sizes = micro_batches(last - first, micro_batch_size, self._least)
            if sizes:
                found += [(rank, part) for part in self.order[first:last].split(sizes)]
        return found

    def _as_many(self, step: Step, most: int, samples: int) -> list[int]:
        """A worker's samples in as many micro-batches as the worker has that needs most of them."""
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
        """Micro-batches for the feed, which may ask for them long before they are trained on."""
        for index in range(self._first, len(self)):
            self.taken = index
            yield from (part for _, part in self.parts(index))
