"""Honest clocks: wait for the device, discard the first steps, report medians and quartiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch

from batchwright.distributed.group import Group


def now(device: torch.device) -> float:
    """Wall-clock seconds once everything given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def passing(device: torch.device) -> Callable[[], float]:
    """Marks all that was given to ``device`` so far, without waiting for it.

    Returns:
        Tells when the device was through with it, in seconds as `now` has them; to be asked after
        the next `now`.
    """
    if device.type != "cuda":
        at = time.perf_counter()
        return lambda: at
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))

    def when() -> float:
        end = torch.cuda.Event(enable_timing=True)
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return time.perf_counter() - float(mark.elapsed_time(end)) / 1000

    return when


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
