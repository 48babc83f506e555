"""The global batches that a cluster is compared at, as totals of each kind of worker.

Up to the first that does not fit the memory or leaves too few steps, so that the table shows what
bounds it.
"""

from __future__ import annotations

from contextlib import suppress

from batchwright.algorithms.batch_size import candidates
from batchwright.errors import PlanError
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.local_batches import (
    equal_time,
    largest_shares,
    memory_caps,
    split,
)
from batchwright.records import DataFacts, Job

Totals = tuple[int, ...]


def totals_to_compare(
    cluster: ClusterOption, resolution: int, job: Job, data: DataFacts
) -> list[Totals]:
    """Samples per step of each kind, for every global batch to compare; rising.

    Returns:
        Empty if the data are too few for the workers, or micro-batches as asked fit no batch.
    """
    if cluster.least > data.train_samples:
        return []
    most = data.train_samples // job.goal.least_steps
    if len(cluster.members) > 1:
        found = _of_equal_time(cluster, resolution, most)
    else:
        found = [(batch,) for batch in _of_one_kind(cluster, resolution, most, data.train_samples)]
    # Whole numbers can meet at one global batch in two ways.
    by_batch = {}
    for totals in found:
        with suppress(PlanError):  # micro-batches as asked leave no part too small
            for (kind, _), share in zip(
                cluster.members, largest_shares(cluster, totals), strict=True
            ):
                kind.check_parts(share)
            by_batch[sum(totals)] = totals
    return [by_batch[batch] for batch in sorted(by_batch) if batch <= data.train_samples]


def _of_one_kind(cluster: ClusterOption, resolution: int, most: int, samples: int) -> list[int]:
    """Equal local batches in powers of two, and the largest; one more that a limit leaves out.

    Batches smaller than the measured ones only where nothing else is left.
    """
    kind, workers = cluster.members[0]
    within = workers * memory_caps(cluster, resolution)[0]
    every = candidates(workers, most, least_local=max(kind.least, kind.smallest_measured))
    if not every or every[0] > within:
        every = candidates(workers, most, least_local=kind.least)
    fitting = [batch for batch in every if batch <= within]
    if len(fitting) < len(every):
        return every[: len(fitting) + 1]
    beyond = workers * max(kind.least, 1 << (most // workers).bit_length())
    if beyond > samples and not fitting:
        beyond = workers * kind.least
    return [*fitting, beyond]


def _of_equal_time(cluster: ClusterOption, resolution: int, most: int) -> list[Totals]:
    """Shares that take equal time, while the slowest kind goes through powers of two."""
    workers = cluster.workers
    caps = [max(cap, 1) for cap in memory_caps(cluster, resolution)]
    times = [  # the slowest kind leads
        kind.seconds(workers, resolution, max(min(cap, most), kind.least))
        for (kind, _), cap in zip(cluster.members, caps, strict=True)
    ]
    leader = max(range(len(times)), key=times.__getitem__)
    kind = cluster.members[leader][0]
    local = 1 << (kind.least - 1).bit_length()
    found: list[Totals] = []
    while True:
        seconds = kind.seconds_at_once(workers, resolution, local)
        shares = equal_time(cluster, resolution, seconds, caps)
        shares[leader] = local
        totals = tuple(
            count * max(round(share), kind.least)
            for (kind, count), share in zip(cluster.members, shares, strict=True)
        )
        if local > caps[leader]:
            return [*found, totals]
        if sum(totals) > most:
            largest = split(cluster, resolution, most)
            return [*found, *([largest] if largest else []), totals]
        found.append(totals)
        local *= 2
