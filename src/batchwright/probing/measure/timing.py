"""Honest clocks: wait for the device, discard the first steps, say how far times are apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median, quantiles, stdev
from typing import NamedTuple

import torch

from batchwright.distributed.group import Group

_MOST_MEDIANS = 3.0  # that a step counts for: a suspended process says nothing about steps


class MeanStep(NamedTuple):
    """A step as a training has it, which takes the sum of its steps, not their median."""

    compute: float
    """Seconds of computing."""
    sync: float
    """Seconds of waiting for the exchange that computing did not hide."""
    error: float
    """Standard error of the whole, as a share of it, by how the steps scatter."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.sync


def now(device: torch.device) -> float:
    """Wall-clock seconds once everything given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of one value, three times that value."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return low, median(seconds), high


def mean_step(steps: Sequence[tuple[float, float]]) -> MeanStep:
    """Mean of a visit's steps, each of seconds of computing and of waiting.

    It lies above the median, the more the longer the tail: by 1 % with one worker, by up to 18 %
    where short steps of two wait for each other. A step that takes much longer than the median
    counts as if it took three times as long.
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


def follow(group: Group, number: int) -> int:
    """Rank 0's ``number``: its clock decides for all, so that nobody waits for a lost step."""
    return _summed(group, number if group.rank == 0 else 0)


def on_any(group: Group, here: bool) -> bool:
    """Whether something is so on any worker."""
    return bool(_summed(group, int(here)))


def _summed(group: Group, number: int) -> int:
    """Over the workers; where they compute, as a group of the user's own may be NCCL's alone."""
    return int(group.sum(torch.tensor([number], device=group.device)).item())
