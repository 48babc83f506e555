"""The global batches that a cluster is compared at, as totals of each kind of worker.

The last one is the first that does not fit the memory or leaves too few steps an epoch, so that the
table shows which limit bounds the batch.
"""

from __future__ import annotations

from contextlib import suppress

from batchwright.algorithms.batch_size import candidates
from batchwright.errors import PlanError
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.local_batches import (
    equal_time,
    memory_caps,
    shares_by_kind,
    split,
)
from batchwright.planning.validation import local_bounds
from batchwright.records import DataFacts, Job

Totals = tuple[int, ...]
"""Samples per step of each kind of worker, in the cluster's order."""


def totals_to_compare(
    cluster: ClusterOption, resolution: int, job: Job, data: DataFacts
) -> list[Totals]:
    """Every global batch to compare, rising, as samples per step of each kind.

    Returns:
        Totals; empty if there are fewer training samples than the workers need, or if the
        `micro_batch` that the job gives suits no batch.
    """
    if cluster.least > data.train_samples:
        return []
    most = data.train_samples // job.goal.least_steps
    least_local, most_local = local_bounds(job)
    if most_local is not None:
        most = min(most, cluster.workers * most_local)
    if len(cluster.members) > 1:
        found = _of_equal_time(cluster, resolution, most)
    else:
        batches = _of_one_kind(cluster, resolution, least_local, most, data.train_samples)
        found = [(batch,) for batch in batches]
    by_batch = {}  # rounding may give one global batch by two different totals
    for totals in found:
        with suppress(PlanError):  # leaves out batches that the job's micro_batch cuts too small
            for kind, share in shares_by_kind(cluster, totals):
                kind.check_parts(share)
            by_batch[sum(totals)] = totals
    return [by_batch[batch] for batch in sorted(by_batch) if batch <= data.train_samples]


def _of_one_kind(
    cluster: ClusterOption, resolution: int, least: int, most: int, samples: int
) -> list[int]:
    """Global batches of equal local ones: powers of two, the largest, and one beyond a limit.

    Batches below the smallest measured one are compared only where no larger one fits.
    """
    kind, workers = cluster.members[0]
    within = workers * memory_caps(cluster, resolution)[0]
    usual = max(kind.least, kind.smallest_measured, least)
    every = candidates(workers, most, least_local=usual)
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
    """Shares of equal time, for local batches of the slowest kind in powers of two."""
    workers = cluster.workers
    caps = [max(cap, 1) for cap in memory_caps(cluster, resolution)]
    times = [
        kind.seconds(workers, resolution, max(min(cap, most), kind.least))
        for (kind, _), cap in zip(cluster.members, caps, strict=True)
    ]
    leader = max(range(len(times)), key=times.__getitem__)  # the slowest kind
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
