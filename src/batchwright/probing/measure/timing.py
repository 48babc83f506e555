"""Clocks that wait for the device, statistics of step times, and decisions of all workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median, quantiles, stdev
from typing import NamedTuple

import torch

from batchwright.distributed.group import Group

_MOST_MEDIANS = 3.0  # medians that a step counts for at most: its process may have been suspended


class MeanStep(NamedTuple):
    """The mean step of a visit: a training takes the sum of its steps, not their median."""

    compute: float
    """Seconds of computing."""
    sync: float
    """Seconds of waiting for the part of the exchange that computing did not hide."""
    error: float
    """Standard error of the step's seconds, as a share of them, by the scatter of the steps."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.sync


def now(device: torch.device) -> float:
    """Wall-clock seconds once all work given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; a single value is all three."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return low, median(seconds), high


def mean_step(steps: Sequence[tuple[float, float]]) -> MeanStep:
    """Mean of a visit's steps, each given as seconds of computing and of waiting.

    The mean lies above the median, the more the longer the tail, most where workers with short
    steps wait for each other (docs/decisions/0084). A step that takes more than three times the
    median counts as three times the median.
    """
    whole = [compute + sync for compute, sync in steps]
    most = _MOST_MEDIANS * median(whole)
    kept = [min(1.0, most / one) for one in whole]
    compute, sync = (
        fmean(share * part for share, part in zip(kept, parts, strict=True))
        for parts in zip(*steps, strict=True)
    )
    counted = [share * one for share, one in zip(kept, whole, strict=True)]
    error = stdev(counted) / sqrt(len(counted)) / fmean(counted) if len(counted) > 1 else 0.0
    return MeanStep(compute, sync, error)


def from_rank_0(group: Group, number: int) -> int:
    """Rank 0's ``number`` on all workers, which so decide alike and take equally many steps."""
    return _sum(group, number if group.rank == 0 else 0)


def on_any_worker(group: Group, here: bool) -> bool:
    """Whether ``here`` is true on any worker."""
    return bool(_sum(group, int(here)))


def _sum(group: Group, number: int) -> int:
    """Sum over the workers, on the device: a group that the user made may have NCCL alone."""
    return int(group.sum(torch.tensor([number], device=group.device)).item())
