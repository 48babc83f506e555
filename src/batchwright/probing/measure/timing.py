"""Honest clocks: wait for the device, discard the first steps, report medians and quartiles."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median, quantiles

import torch

from batchwright.distributed.group import Group


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


def follow(group: Group, number: int) -> int:
    """Rank 0's ``number``: its clock decides for all, so that nobody waits for a lost step."""
    return _summed(group, number if group.rank == 0 else 0)


def on_any(group: Group, here: bool) -> bool:
    """Whether something is so on any worker."""
    return bool(_summed(group, int(here)))


def _summed(group: Group, number: int) -> int:
    """Over the workers; where they compute, as a group of the user's own may be NCCL's alone."""
    return int(group.sum(torch.tensor([number], device=group.device)).item())
