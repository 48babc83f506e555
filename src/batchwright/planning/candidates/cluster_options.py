"""Clusters to compare: some workers of one kind, or workers of several kinds together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from batchwright.errors import PlanError
from batchwright.planning.candidates.worker_types import WorkerType, link_given
from batchwright.planning.resolution import sides
from batchwright.records import Job, KindCount
from batchwright.records.job import as_written


@dataclass(frozen=True)
class ClusterOption:
    """Workers of one or several kinds, in rank order."""

    # Each kind of worker with the number of workers of it.
    members: tuple[tuple[WorkerType, int], ...]

    @cached_property
    def workers(self) -> int:
        """Number of workers over all kinds."""
        return sum(count for _, count in self.members)

    @property
    def kinds(self) -> tuple[KindCount, ...]:
        """The members as records."""
        return tuple(KindCount(kind=kind.name, count=count) for kind, count in self.members)

    @property
    def hourly(self) -> float | None:
        """Price of all workers for an hour; `None` if a kind has no price."""
        total = 0.0
        for kind, count in self.members:
            if kind.price is None:
                return None
            total += count * kind.price
        return total

    @property
    def preemptions(self) -> float:
        """Preemptions of any of the workers in an hour, mean."""
        return sum(count * kind.preemptions for kind, count in self.members)

    @property
    def least(self) -> int:
        """Smallest global batch, in samples."""
        return sum(count * kind.least for kind, count in self.members)

    @property
    def assumed(self) -> bool:
        """Whether its times rest on stated figures: a link, a speed, or kinds measured apart."""
        workers = self.workers
        apart = len(self.members) > 1 and not all(kind.together for kind, _ in self.members)
        return apart or any(kind.stated or kind.times.assumed(workers) for kind, _ in self.members)

    def __str__(self) -> str:
        """Such as ``4 a100 + 8 t4``."""
        return " + ".join(f"{count} {kind.name}" for kind, count in self.members)


def cluster_options_of(kinds: Sequence[WorkerType], job: Job) -> tuple[ClusterOption, ...]:
    """Clusters to compare, by number of workers.

    Of each kind alone: the measured numbers of workers, powers of two, and all workers. Of several
    kinds together: all workers of the first two kinds, of the first three, and so on, with kinds
    ordered by speed and, where all have prices, by speed per price. ``goal.max_workers`` bounds
    their number. A number of workers that the job asks for is among them.

    Raises:
        PlanError: More workers asked for than there are, or than can be predicted; or fewer allowed
            than were measured together.
    """
    asked = 1 if job.launcher.one_worker else job.workers
    _check_asked(kinds, job, asked)
    found = [ClusterOption(((kind, n),)) for kind in kinds for n in _sizes(kind, job)]
    if may_mix(kinds, job):
        for cap in (job.goal.max_workers, *([asked] if isinstance(asked, int) else [])):
            speeds = {kind.name: _speed(kind, job) for kind in kinds}
            found += _prefixes(sorted(kinds, key=lambda one: (-speeds[one.name], one.name)), cap)
            if all(kind.price for kind in kinds):
                found += _prefixes(
                    sorted(kinds, key=lambda one: (-speeds[one.name] / (one.price or 1), one.name)),
                    cap,
                )
    if isinstance(asked, int):
        found += [
            ClusterOption(((kind, asked),))
            for kind in kinds
            if kind.measured[0] <= asked <= kind.count
        ]
        if all(cluster.workers != asked for cluster in found):
            raise PlanError(
                f"workers={asked}: no kind was measured with or has so many, and kinds are mixed "
                "only over a stated network: give link.latency and link.bandwidth, or probe with "
                f"workers={asked}"
            )
    if job.method_spec.served and all(kind.together for kind in kinds):
        # Groups are consecutive ranks, so kinds stay in the order in which they were measured.
        found = [
            ClusterOption(tuple(sorted(cluster.members, key=lambda one: kinds.index(one[0]))))
            for cluster in found
        ]
    # Times of kinds that were measured together do not hold for fewer workers.
    found = [
        cluster
        for cluster in found
        if all(cluster.workers >= kind.measured[0] for kind, _ in cluster.members if kind.together)
    ]
    if not found:
        least = max(kind.measured[0] for kind in kinds)
        raise PlanError(
            f"goal.max_workers={job.goal.max_workers}: the times of kinds of workers that were "
            f"measured together do not hold for fewer than these {least}: give {least} or more, or "
            "probe again with fewer workers"
        )
    unique = {
        frozenset((kind.name, count) for kind, count in cluster.members): cluster
        for cluster in found
    }
    return tuple(sorted(unique.values(), key=lambda cluster: (cluster.workers, str(cluster))))


def may_mix(kinds: Sequence[WorkerType], job: Job) -> bool:
    """Whether clusters may have several kinds: over a stated link, or as they were measured."""
    known = link_given(job.link) or all(kind.together for kind in kinds)
    return len(kinds) > 1 and known


def _check_asked(kinds: Sequence[WorkerType], job: Job, asked: int | str) -> None:
    together = sum(kind.count for kind in kinds)
    for kind in kinds:
        if job.goal.kinds and (together if kind.together else kind.count) < kind.measured[0]:
            raise PlanError(
                f"goal.kinds: {kind.count} of {kind.name!r}, but the profile was measured with "
                f"{kind.measured[0]} workers at least: probe with workers={kind.count}"
            )
    counts = sorted({count for kind in kinds for count in kind.measured})
    if isinstance(asked, int):
        if job.launcher.one_worker and counts[0] > 1:
            raise PlanError(
                f"launch=in-process runs one worker, the profile was measured with {counts[0]}: "
                "probe again with workers=1, or give launch=local"
            )
        if asked > together:
            raise PlanError(
                f"workers={asked}, but goal.kinds holds {together}: give at most that"
                if job.goal.kinds
                else f"workers={asked}, but the profiles measured {together}: say in goal.kinds "
                "how many there are of each kind"
            )
        beyond = asked > counts[-1] and not link_given(job.link)
        if beyond or asked < counts[0]:
            raise PlanError(
                f"the profile was measured with workers={as_written(tuple(counts))}, the job says "
                f"workers={asked}: probe again with that"
                + (", or state the network with link.latency and link.bandwidth" if beyond else "")
            )
    most, measured = max(kind.count for kind in kinds), counts[-1]
    most = min(most, job.goal.max_workers or most)
    if most > measured and not link_given(job.link):
        bounded = job.goal.max_workers == most or not job.goal.kinds
        name = "goal.max_workers" if bounded else "goal.kinds"
        raise PlanError(
            f"{name} allows {most} workers, at most {measured} were measured together: probe with "
            f"workers={most}, give goal.max_workers={measured}, or state the network with "
            "link.latency and link.bandwidth"
        )


def _sizes(kind: WorkerType, job: Job) -> list[int]:
    """Numbers of workers of one kind to compare."""
    top = kind.count
    if job.goal.max_workers is not None and top > job.goal.max_workers:
        top = max(job.goal.max_workers, kind.measured[0])
    sizes = {n for n in kind.measured if n <= kind.count}
    if kind.count > kind.measured[-1] or job.goal.kinds:
        power = 1
        while power <= top:
            sizes.add(power)
            power *= 2
        sizes.add(top)
    return sorted(n for n in sizes if n >= kind.measured[0])


def _speed(kind: WorkerType, job: Job) -> float:
    """Samples per second of one worker at its largest measured batch."""
    side = max(sides(job))
    batch = max(point.local_batch_size for point in kind.profile.steps)
    return batch / kind.seconds_at_once(kind.measured[-1], side, batch)


def _prefixes(kinds: Iterable[WorkerType], cap: int | None) -> list[ClusterOption]:
    """Clusters of the first two kinds, the first three, and so on, of ``cap`` workers at most."""
    found, members, left = [], [], cap
    for kind in kinds:
        count = kind.count if left is None else min(kind.count, left)
        if not count:
            break
        members.append((kind, count))
        left = None if left is None else left - count
        if len(members) > 1:
            found.append(ClusterOption(tuple(members)))
    return found
