"""Unequal shares of a global batch: each kind of worker gets what it finishes in the same time.

Nothing here goes through single workers: a share is a kind's total, spread evenly within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from batchwright.algorithms.partition import apportion
from batchwright.algorithms.solving import solve_rising
from batchwright.planning.candidates.cluster_options import ClusterOption


def local_batches(cluster: ClusterOption, totals: Sequence[int]) -> tuple[int, ...]:
    """Samples per step of each worker, in rank order, from the kinds' totals."""
    sizes: list[int] = []
    for (_, count), total in zip(cluster.members, totals, strict=True):
        part, larger = divmod(total, count)
        sizes += [part + 1] * larger + [part] * (count - larger)
    return tuple(sizes)


def largest_shares(cluster: ClusterOption, totals: Sequence[int]) -> tuple[int, ...]:
    """Largest local batch of each kind."""
    return tuple(
        -(-total // count) for (_, count), total in zip(cluster.members, totals, strict=True)
    )


def memory_caps(cluster: ClusterOption, resolution: int) -> tuple[int, ...]:
    """Most samples that a worker of each kind takes in one pass; any number if cut as asked."""
    workers = cluster.workers
    return tuple(
        kind.most if kind.micro_batch is not None else kind.largest(workers, resolution)
        for kind, _ in cluster.members
    )


def equal_time(
    cluster: ClusterOption, resolution: int, seconds: float, caps: Sequence[int]
) -> list[float]:
    """Local batch of each kind that takes ``seconds``, within its least and its cap, as a float."""
    found: list[float] = []
    for (kind, _), cap in zip(cluster.members, caps, strict=True):
        at = partial(kind.seconds, cluster.workers, resolution)
        low, high = solve_rising(at, seconds, kind.least, max(cap, kind.least))
        part = 0.0 if low == high else (seconds - at(low)) / (at(high) - at(low))
        found.append(low + part)
    return found


def split(cluster: ClusterOption, resolution: int, batch: int) -> tuple[int, ...] | None:
    """Total of each kind in a global batch, so that all kinds take equal time.

    Memory bounds each kind's share, unless the batch does not fit the cluster at once: then the
    parts are cut into micro-batches.

    Returns:
        Totals in the order of the kinds, their sum is ``batch``; `None` if that is too small.
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
    """Local batches of equal time that come nearest to a global batch."""
    workers = cluster.workers
    counts = [count for _, count in cluster.members]
    times = [
        kind.seconds(workers, resolution, cap)
        for (kind, _), cap in zip(cluster.members, caps, strict=True)
    ]
    slowest = max(range(len(caps)), key=times.__getitem__)

    def total(local: int) -> float:
        seconds = cluster.members[slowest][0].seconds(workers, resolution, local)
        shares = equal_time(cluster, resolution, seconds, caps)
        return sum(n * share for n, share in zip(counts, shares, strict=True))

    low, high = solve_rising(total, batch, cluster.members[slowest][0].least, caps[slowest])
    kind = cluster.members[slowest][0]
    first, last = (kind.seconds(workers, resolution, n) for n in (low, high))
    part = 0.0 if low == high else (batch - total(low)) / (total(high) - total(low))
    return equal_time(cluster, resolution, first + part * (last - first), caps)
