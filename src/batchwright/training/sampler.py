"""Which samples each worker sees at each step: every sample exactly once per epoch.

One seeded permutation per epoch and one cursor for all workers: step ``j`` takes the next B
positions, and each worker its consecutive share of them. So which samples make up a step depends on
neither the number of workers nor their shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchwright.errors import PlanError
from batchwright.planning.partition import apportion


@dataclass(frozen=True)
class Step:
    """One step of an epoch.

    Attributes:
        start: Position of its first sample in the epoch's permutation.
        local_batch_sizes: Samples of each worker, in rank order.
    """

    start: int
    local_batch_sizes: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Samples over all workers."""
        return sum(self.local_batch_sizes)

    def span(self, rank: int) -> tuple[int, int]:
        """Positions of ``rank``'s samples in the permutation, as (first, past the last)."""
        first = self.start + sum(self.local_batch_sizes[:rank])
        return first, first + self.local_batch_sizes[rank]


def epoch_steps(samples: int, local_batch_sizes: Sequence[int], least: int) -> list[Step]:
    """The steps of one epoch.

    A tail of fewer samples than the global batch is a step of its own if every worker gets at least
    ``least`` of it; else it joins the step before, so that no sample is lost and none repeated.

    Args:
        samples: Size of the data set.
        local_batch_sizes: Samples per step of each worker, in rank order.
        least: Fewest samples a worker can train on; 2 with batch normalization.

    Raises:
        PlanError: The global batch is larger than the data set.
    """
    batch = sum(local_batch_sizes)
    if batch > samples:
        raise PlanError(
            f"the global batch of {batch} is larger than the {samples} training samples: "
            f"choose global_batch={samples} or less"
        )
    whole, tail = divmod(samples, batch)
    sizes = [batch] * whole
    if tail >= least * len(local_batch_sizes):
        sizes.append(tail)
    else:
        sizes[-1] += tail
    steps, start = [], 0
    for size in sizes:
        shares = tuple(local_batch_sizes)
        if size != batch:
            shares = tuple(apportion(local_batch_sizes, size, least=least))
        steps.append(Step(start, shares))
        start += size
    return steps


def epoch_order(samples: int, epoch: int, seed: int) -> torch.Tensor:
    """The permutation of ``samples`` indices for one epoch: int64 (samples,), on the CPU."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(samples, generator=generator)


def micro_batches(size: int, most: int) -> list[int]:
    """Split a local batch into as few, as even micro-batches of at most ``most`` samples."""
    count = -(-size // most)
    return apportion([1.0] * count, size)
