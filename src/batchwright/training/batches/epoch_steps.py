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
    ) -> None:
        self.taken = shares.first - 1
        self.table = [shares]
        self.order, self._sizes = order, sizes
        self._starts = list(accumulate(sizes, initial=start))
        self._first = shares.first
        self._ranks, self._least = ranks, least

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
        for all, which only a change of the number of workers can leave, goes to some of them.
        """
        sizes = self.shares_at(index).local_batch_sizes
        wanted = self._sizes[index - self._first]
        if wanted != sum(sizes):
            least = self._least if wanted >= self._least * len(sizes) else 0
            sizes = tuple(apportion(sizes, wanted, least=least))
        return Step(self._starts[index - self._first], sizes)

    def parts(self, index: int) -> list[tuple[int, Tensor]]:
        """(rank, indices) of each of this process's micro-batches at a step, in rank order."""
        return self.cut(self.step(index), self.shares_at(index).micro_batch_size)

    def cut(self, step: Step, micro_batch_size: int) -> list[tuple[int, Tensor]]:
        """`parts` of a step with micro-batches of another size."""
        found: list[tuple[int, Tensor]] = []
        for rank in self._ranks:
            first, last = step.span(rank)
            if sizes := micro_batches(last - first, micro_batch_size, self._least):
                found += [(rank, part) for part in self.order[first:last].split(sizes)]
        return found

    def ahead(self) -> Iterator[Tensor]:
        """Micro-batches for the feed, which may ask for them long before they are trained on."""
        for index in range(self._first, len(self)):
            self.taken = index
            yield from (part for _, part in self.parts(index))
