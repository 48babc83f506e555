"""Unequal shares of a global batch: each kind of worker gets what it finishes in the same time.

A share is the total of a kind of worker, which its workers split evenly; so the cost of computing
shares does not grow with the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from batchwright.algorithms.partition import apportion, split_evenly
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.worker_types import WorkerType


def local_batches(cluster: ClusterOption, totals: Sequence[int]) -> tuple[int, ...]:
    """Samples per step of each worker, in rank order, from the kinds' totals."""
    return tuple(
        size
        for (_, count), total in zip(cluster.members, totals, strict=True)
        for size in split_evenly(total, count)
    )


def shares_by_kind(cluster: ClusterOption, totals: Sequence[int]) -> list[tuple[WorkerType, int]]:
    """Each kind of worker with its largest local batch, in samples, from the kinds' totals."""
    return [
        (kind, -(-total // count))
        for (kind, count), total in zip(cluster.members, totals, strict=True)
    ]


def memory_caps(cluster: ClusterOption, resolution: int) -> tuple[int, ...]:
    """Largest local batch of each kind that fits the memory in one pass, in samples.

    A batch that is cut into micro-batches as the job asks has no such bound but the data.
    """
    workers = cluster.workers
    return tuple(
        kind.most if kind.micro_batch is not None else kind.largest(workers, resolution)
        for kind, _ in cluster.members
    )


def equal_time(
    cluster: ClusterOption, resolution: int, seconds: float, caps: Sequence[int]
) -> list[float]:
    """Local batch of each kind whose step takes ``seconds``, as a float.

    Args:
        cluster: The workers.
        resolution: Image side, in pixels.
        seconds: Seconds of a step.
        caps: Upper bound of each kind's local batch, in samples; the lower one is its least batch.
    """
    found: list[float] = []
    for (kind, _), cap in zip(cluster.members, caps, strict=True):
        at = partial(kind.seconds, cluster.workers, resolution)
        low, high = solve_rising(at, seconds, kind.least, max(cap, kind.least))
        part = 0.0 if low == high else (seconds - at(low)) / (at(high) - at(low))
        found.append(low + part)
    return found


def split(cluster: ClusterOption, resolution: int, batch: int) -> tuple[int, ...] | None:
    """Total of each kind in a global batch, so that all kinds take equal time.

    Memory bounds each kind's share, unless the batch does not fit the cluster in one pass: then
    shares are cut into micro-batches, and only the batch itself bounds them.

    Returns:
        Totals in the order of the kinds, whose sum is ``batch``; `None` if the batch is too small.
    """
    if batch < cluster.least:
        return None
    if len(cluster.members) == 1:
        return (batch,)
    counts = [count for _, count in cluster.members]
    caps = [
        max(c, k.least)
        for c, (k, _) in zip(memory_caps(cluster, resolution), cluster.members, strict=True)
    ]
    if sum(n * cap for n, cap in zip(counts, caps, strict=True)) < batch:
        caps = [batch] * len(counts)
    shares = _shares_of(cluster, resolution, batch, caps)
    return tuple(
        apportion(
            [n * share for n, share in zip(counts, shares, strict=True)],
            batch,
            least=[n * kind.least for kind, n in cluster.members],
            most=[n * cap for n, cap in zip(counts, caps, strict=True)],
        )
    )


def _shares_of(
    cluster: ClusterOption, resolution: int, batch: int, caps: Sequence[int]
) -> list[float]:
    """Local batches of equal time, one for each kind, that together come nearest to ``batch``."""
    workers = cluster.workers
    counts = [count for _, count in cluster.members]
    times = [
        kind.seconds(workers, resolution, cap)
        for (kind, _), cap in zip(cluster.members, caps, strict=True)
    ]
    slowest = max(range(len(caps)), key=times.__getitem__)
    kind = cluster.members[slowest][0]

    def total(local: int) -> float:
        shares = equal_time(cluster, resolution, kind.seconds(workers, resolution, local), caps)
        return sum(n * share for n, share in zip(counts, shares, strict=True))

    low, high = solve_rising(total, batch, kind.least, caps[slowest])
    first, last = (kind.seconds(workers, resolution, n) for n in (low, high))
    part = 0.0 if low == high else (batch - total(low)) / (total(high) - total(low))
    return equal_time(cluster, resolution, first + part * (last - first), caps)


def solve_rising(
    function: Callable[[int], float], target: float, low: int, high: int
) -> tuple[int, int]:
    """Neighbouring whole numbers between which a rising function passes ``target``.

    It uses regula falsi, which solves a line at once, and bisection in every third iteration, as
    regula falsi alone may converge slowly on a curve.

    Args:
        function: The function, rising or nearly so.
        target: The value to reach.
        low: Smallest argument.
        high: Largest argument.

    Returns:
        n and n + 1 with f(n) <= target < f(n + 1). Twice ``low`` if f(``low``) is above the target,
        and twice ``high`` if f(``high``) is not.
    """
    at_low = function(low)
    if at_low > target or low >= high:
        return low, low
    at_high = function(high)
    if at_high <= target:
        return high, high
    turn = 0
    while high - low > 1:
        turn += 1
        share = (target - at_low) / (at_high - at_low) if turn % 3 else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        value = function(middle)
        if value <= target:
            low, at_low = middle, value
        else:
            high, at_high = middle, value
    return low, high
