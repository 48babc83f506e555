"""Seconds of an all-reduce at a few message sizes."""

from __future__ import annotations

from statistics import mean

import torch

from batchwright.group import Group
from batchwright.probing.timing import follow, now, spread
from batchwright.records import CollectiveTime

SIZES = (40_000, 4_000_000)  # bytes; the gradient's own size is measured beside them
_WARM_UP_CALLS = 3
_MOST_CALLS, _LEAST_CALLS = 20, 3


def measure_collectives(
    group: Group, gradient_bytes: int, *, seconds: float
) -> tuple[CollectiveTime, ...]:
    """All-reduce times among all workers; none with one worker.

    Args:
        group: The workers.
        gradient_bytes: Size of the gradients, measured too.
        seconds: Time to spend.
    """
    if group.size == 1:
        return ()
    sizes = sorted({*SIZES, gradient_bytes})
    return tuple(_measure(group, size, seconds / len(sizes)) for size in sizes)


def _measure(group: Group, size: int, seconds: float) -> CollectiveTime:
    message = torch.zeros(max(1, size // 4), device=group.device)  # float32
    start = now(group.device)
    for _ in range(_WARM_UP_CALLS):
        group.sum(message)
    each = (now(group.device) - start) / _WARM_UP_CALLS
    calls = min(_MOST_CALLS, max(_LEAST_CALLS, int(seconds / each)))
    calls = follow(group, calls)
    everyone = group.gather([_time_call(group, message) for _ in range(calls)])
    low, middle, high = spread([mean(call) for call in zip(*everyone, strict=True)])
    return CollectiveTime(
        bytes=size, workers=group.size, seconds=middle, low=low, high=high, repeats=calls
    )


def _time_call(group: Group, message: torch.Tensor) -> float:
    start = now(group.device)
    group.sum(message)
    return now(group.device) - start
