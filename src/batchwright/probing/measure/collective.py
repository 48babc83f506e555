"""Seconds of exchanging a message between workers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import torch
import torch.distributed as dist

from batchwright.distributed.group import Group
from batchwright.prediction.collective import Operation
from batchwright.probing.measure.timing import from_rank_0, now, spread
from batchwright.records import CollectiveTime

SIZES = (40_000, 4_000_000)
"""Message sizes in bytes; the size of the gradient is measured besides."""

_WARM_UP_CALLS = 2
_MAX_CALLS, _MIN_CALLS = 20, 3


def time_exchange(
    group: Group, operation: Operation, size: int, *, seconds: float
) -> CollectiveTime:
    """Seconds of one exchange of ``size`` bytes: quartiles, over the calls, of the workers' mean.

    ``operation`` is a sum over all workers (all-reduce), or sending to rank 0 and back (push-pull).
    About ``seconds`` are spent.
    """
    call = _exchange(group, operation, size)
    start = now(group.device)
    for _ in range(_WARM_UP_CALLS):
        call()
    each = (now(group.device) - start) / _WARM_UP_CALLS
    calls = from_rank_0(group, min(_MAX_CALLS, max(_MIN_CALLS, int(seconds / each))))
    everyone = group.gather([_time(group, call) for _ in range(calls)])
    low, middle, high = spread([mean(one) for one in zip(*everyone, strict=True)])
    return CollectiveTime(
        operation=operation,
        bytes=size,
        workers=group.size,
        seconds=middle,
        low=low,
        high=high,
        repeats=calls,
    )


def _time(group: Group, call: Callable[[], None]) -> float:
    start = now(group.device)
    call()
    return now(group.device) - start


def _exchange(group: Group, operation: Operation, size: int) -> Callable[[], None]:
    message = torch.zeros(max(1, size // 4), device=group.device)  # float32

    def all_reduce() -> None:
        group.sum(message)

    if operation == "all-reduce":
        return all_reduce
    received = [torch.empty_like(message) for _ in range(group.size - 1 if group.rank == 0 else 0)]

    def messages() -> None:
        if group.rank:
            dist.send(message, 0, group=group.handle)
            dist.recv(message, 0, group=group.handle)
            return
        others = range(1, group.size)
        for rank, buffer in zip(others, received, strict=True):
            dist.recv(buffer, rank, group=group.handle)
            message.add_(buffer)
        sent = [dist.isend(message, rank, group=group.handle) for rank in others]
        for work in sent:
            if work is not None:
                work.wait()

    first = True

    def push_pull() -> None:
        nonlocal first
        group.exchange(messages, first=first)
        first = False

    return push_pull
