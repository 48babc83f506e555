"""Which samples each worker sees at each step: every sample exactly once per epoch.

One seeded permutation per epoch and one cursor for all workers: step ``j`` takes the next B
positions, and each worker its consecutive share of them. So which samples make up a step depends on
neither the number of workers nor their shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchwright.algorithms.partition import apportion


@dataclass(frozen=True)
class Step:
    """One step of an epoch.

    Attributes:
        start: Position of the step's first sample in the epoch's permutation.
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


def step_sizes(samples: int, batch: int, *, workers: int, least: int) -> list[int]:
    """Samples of each step of an epoch, or of what is left of one, over all workers.

    A tail of fewer samples than the global batch is a step of its own if every worker gets at least
    ``least`` of it; else it joins the step before, so that no sample is lost and none repeated.
    Where no whole step is left, as a change of the number of workers can leave it, it has to be a
    step of its own.

    Args:
        samples: Samples left in the epoch.
        batch: Samples per step over all workers.
        workers: Number of workers.
        least: Fewest samples a worker can train on; 2 with batch normalization.
    """
    whole, tail = divmod(samples, batch)
    sizes = [batch] * whole
    if tail and (not whole or tail >= least * workers):
        sizes.append(tail)
    elif tail:
        sizes[-1] += tail
    return sizes


def epoch_order(samples: int, epoch: int, seed: int, weights: Tensor | None = None) -> Tensor:
    """The order of an epoch: a permutation, or draws with replacement where there are weights.

    Args:
        samples: Size of the data set.
        epoch: Zero-based.
        seed: The job's seed.
        weights: How often each sample is drawn relative to the others, (samples,), not negative.

    Returns:
        Indices: int64 (samples,), on the CPU.
    """
    # Two pairs of seed and epoch share an order only if their epochs are a million apart.
    generator = torch.Generator("cpu").manual_seed((seed * 1_000_003 + epoch) % 2**63)
    if weights is None:
        return torch.randperm(samples, generator=generator, device="cpu")
    # Not torch.multinomial, which takes 2^24 weights at most.
    edges = weights.double().cumsum(0)
    draws = torch.rand(samples, generator=generator, dtype=torch.float64, device="cpu")
    return torch.searchsorted(edges, draws * edges[-1], right=True).clamp_(max=samples - 1)


def balancing_weights(labels: Tensor) -> Tensor:
    """Weights with which all classes are drawn equally often: float64, as many as labels."""
    counts = labels.bincount()
    return 1 / counts[labels].double()


def micro_batches(size: int, most: int, least: int = 1) -> list[int]:
    """Split a local batch into as few, as even micro-batches of at most ``most`` samples.

    Where that leaves parts of fewer than ``least``, there are fewer and larger ones.
    """
    if not size:
        return []
    if size <= most:
        return [size]  # the usual case, at each step
    count = max(1, min(-(-size // most), size // least))
    return apportion([1.0] * count, size)
