"""Merges profiles of one workload into one profile for each kind of worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from statistics import median
from typing import TypeVar

from batchwright.errors import PlanError
from batchwright.planning.resolution import sides
from batchwright.planning.validation import PLANNING_KEYS
from batchwright.prediction.drift import step_share
from batchwright.prediction.loading import pooled_loading
from batchwright.records import (
    CollectiveTime,
    Job,
    MachineLoad,
    MemoryPoint,
    PairTime,
    Profile,
    StepLoading,
    StepTime,
)
from batchwright.records.profile import JOINED

Point = TypeVar("Point")

_MAY_DIFFER = PLANNING_KEYS | {"data", "device", "probe", "cuda_graphs"}
"""Job keys that may differ between profiles. They do not change what a measured point takes, except
`cuda_graphs`, which may differ between kinds of workers. Data are compared by their digest."""

_HARDWARE = ("device", "device_name", "cores", "python", "torch", "allocator", "arithmetic")


def kind_of(profile: Profile) -> str:
    """Name of the kind of worker that a profile measured."""
    return profile.cluster.kind or profile.cluster.device_name


def merge_profiles(profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """One profile for each kind of worker, in order of appearance.

    Points of one kind with the same workers, resolution and batch are pooled: the merged point has
    the visits of all of them. Settings and memory parts are taken from the first profile, the free
    memory is the least of all, and the seconds of evaluation are those at the highest resolution,
    from which plans for lower ones are scaled.

    Args:
        profiles: Profiles of the same data, network and settings; at least one.

    Raises:
        PlanError: No profile, or two of other workloads, settings, hardware or versions; the
            message names the first difference.
    """
    if not profiles:
        raise PlanError("a plan needs at least one profile: `batchwright probe` makes one")
    profiles = [kind for profile in profiles for kind in kinds_apart(profile)]
    first = profiles[0]
    for other in profiles[1:]:
        facts = [("data", first.data.digest, other.data.digest)]
        facts += [
            (key, getattr(first.job, key), getattr(other.job, key))
            for key in Job.model_fields
            if key not in _MAY_DIFFER
        ]
        facts += [
            (f"network {key}", getattr(first.network, key), getattr(other.network, key))
            for key in type(first.network).model_fields
        ]
        _refuse_difference(facts, "give profiles of one workload and the same settings")
    return tuple(_merged(group) for group in _grouped(profiles, kind_of))


def kinds_apart(profile: Profile) -> Sequence[Profile]:
    """A profile for each kind of worker, of a profile whose kinds were measured together."""
    if len(profile.kinds) < 2:
        return [profile]
    return [
        profile.model_copy(
            update={
                "kinds": (one,),
                "steps": one.steps,
                "cluster": profile.cluster.model_copy(
                    update={
                        "kind": one.kind,
                        "device_name": one.device_name,
                        "memory_bytes": one.memory_bytes,
                    }
                ),
                "evaluation_seconds_per_image": one.pace * profile.evaluation_seconds_per_image,
            }
        )
        for one in profile.kinds
    ]


def _refuse_difference(facts: Iterable[tuple[str, object, object]], advice: str) -> None:
    for name, one, other in facts:
        if one != other:
            raise PlanError(
                f"two profiles do not go together: {name} is {one} in one and {other} in the "
                f"other: {advice}"
            )


def _set_up_alike(first: Profile, other: Profile) -> bool:
    """Whether allocators are alike, apart from settings that only launched processes can have."""
    one, another = (profile.cluster.allocator.removesuffix(JOINED) for profile in (first, other))
    return one == another


def _merged(profiles: Sequence[Profile]) -> Profile:
    first = profiles[0]
    if len(profiles) == 1:
        return first
    for other in profiles[1:]:
        graphs = "cuda_graphs", first.job.cuda_graphs, other.job.cuda_graphs
        _refuse_difference([graphs], "probe both with the same")
        _refuse_difference(
            (
                (f"{kind_of(first)}'s {key}", getattr(first.cluster, key), value)
                for key in _HARDWARE
                if key != "allocator" or not _set_up_alike(first, other)
                if (value := getattr(other.cluster, key)) != getattr(first.cluster, key)
            ),
            "probe both in one environment, or name the kinds with probe.kind",
        )
    key = attrgetter("workers", "resolution", "local_batch_size")
    steps = _pooled((p.steps for p in profiles), key, _step)
    compared = next((p for p in profiles if p.precisions), first)
    noises = [p.noise for p in profiles if p.noise and p.noise.noise_scale] or [
        p.noise for p in profiles if p.noise
    ]
    return first.model_copy(
        update={
            "job": _job(profiles, steps),
            "cluster": max((p.cluster for p in profiles), key=attrgetter("workers")).model_copy(
                update={"memory_bytes": min(p.cluster.memory_bytes for p in profiles)}
            ),
            "precisions": compared.precisions,
            "precision_ratio": compared.precision_ratio,
            "recomputation": next((p.recomputation for p in profiles if p.recomputation), None),
            "compilation": next((p.compilation for p in profiles if p.compilation), None),
            "graphs": next((p.graphs for p in profiles if p.graphs), None),
            "steps": steps,
            "pairs": _pooled(
                (p.pairs for p in profiles),
                attrgetter(
                    *("resolution", "large_workers", "small_workers"), "large_batch", "small_batch"
                ),
                _pair,
            ),
            "memory": _pooled((p.memory for p in profiles), key, _memory),
            "memory_parts": next((p.memory_parts for p in profiles if p.memory_parts), None),
            "out_of_memory": tuple(dict.fromkeys(x for p in profiles for x in p.out_of_memory)),
            "collectives": _pooled(
                (p.collectives for p in profiles),
                attrgetter("operation", "workers", "bytes"),
                _collective,
            ),
            "updates": tuple(
                {
                    (one.optimizer, one.workers): one
                    for profile in reversed(profiles)
                    for one in profile.updates
                }.values()
            ),
            "load": _load([p.load for p in profiles if p.load]),
            "noise": max(noises, key=lambda one: one.parts * one.repeats) if noises else None,
            "evaluation_seconds_per_image": _evaluation(profiles),
            "probe_seconds": sum(p.probe_seconds for p in profiles),
        }
    )


def _evaluation(profiles: Sequence[Profile]) -> float:
    """Seconds of evaluating an image, by the profiles that evaluated at the highest resolution."""
    tops = [max((*sides(p.job), *(point.resolution for point in p.steps))) for p in profiles]
    return median(
        p.evaluation_seconds_per_image
        for p, top in zip(profiles, tops, strict=True)
        if top == max(tops)
    )


def _job(profiles: Sequence[Profile], steps: Sequence[StepTime]) -> Job:
    sides = {point.resolution for point in steps}
    several = len({point.workers for point in steps}) > 1
    job = profiles[0].job
    named = {side for p in profiles if p.job.resolutions != "auto" for side in p.job.resolutions}
    return job.model_copy(
        update={
            "workers": "auto" if several else job.workers,
            "resolutions": tuple(sorted(named & sides)) or job.resolutions,
        }
    )


def _load(loads: Sequence[MachineLoad]) -> MachineLoad | None:
    """Means weighted by the seconds observed; the largest scatter, and the least share."""
    if not loads:
        return None
    seconds = sum(load.seconds for load in loads)
    scatters = [load.scatter for load in loads if load.scatter is not None]
    shares = [load.least_share for load in loads if load.least_share is not None]
    means = {
        name: sum(load.seconds * getattr(load, name) for load in loads) / seconds
        for name in ("ours", "others", "stolen", "idle", "throttled")
    }
    more = {
        "seconds": seconds,
        "scatter": max(scatters, default=None),
        "least_share": min(shares, default=None),
    }
    return loads[0].model_copy(update={**means, **more})


def _grouped(items: Iterable[Point], key: Callable[[Point], Hashable]) -> list[list[Point]]:
    groups: dict[Hashable, list[Point]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _pooled(
    lists: Iterable[Sequence[Point]],
    key: Callable[[Point], Hashable],
    pool: Callable[[Sequence[Point]], Point],
) -> tuple[Point, ...]:
    groups = _grouped((item for items in lists for item in items), key)
    return tuple(pool(group) if len(group) > 1 else group[0] for group in groups)


def _step(points: Sequence[StepTime]) -> StepTime:
    # As in a probe, visits beside other programs count only where there are no others.
    given, points = points, [p for p in points if not p.disturbed] or points
    left_out = [v for p in given if p not in points for v in p.visits or (p.step_seconds,)]
    left_out += [p.beside_seconds for p in given if p.beside_seconds is not None]
    visits = tuple(v for p in points for v in p.visits or (p.step_seconds,))
    middle = median(visits)
    # Without `visit_error` the quartiles of several visits include how far these are apart.
    with_error = [p for p in points if p.visit_error is not None or len(p.visits) < 2]
    times = [name for name in StepLoading.model_fields if name.endswith("_seconds")]
    loadings = [  # scaled to the median step
        one.model_copy(update={n: middle / p.step_seconds * getattr(one, n) for n in times})
        for p in points
        if (one := p.loading)
    ]

    def part(name: str) -> float:
        """Seconds of one part of the median step, by its mean share of the step over all visits."""
        shares = ((getattr(p, name) / p.step_seconds, max(1, len(p.visits))) for p in points)
        return float(middle * sum(share * count for share, count in shares) / len(visits))

    return points[0].model_copy(
        update={
            "compute_seconds": part("compute_seconds"),
            "sync_seconds": part("sync_seconds"),
            "step_seconds": middle,
            "step_low": min(middle, _mean([p.step_low for p in points], points)),
            "step_high": max(middle, _mean([p.step_high for p in points], points)),
            "repeats": sum(p.repeats for p in points),
            "visits": visits,
            "visit_error": (
                _mean([step_share(p) for p in with_error], with_error) if with_error else None
            ),
            "beside_seconds": max(left_out, default=None),
            "loading": pooled_loading(loadings),
        }
    )


def _pair(points: Sequence[PairTime]) -> PairTime:
    """The pooled pair, with the ratios of all visits: drift of the machine cancels in a ratio."""
    ratios = tuple(r for p in points for r in p.ratios or (p.small_seconds / p.large_seconds,))
    large = _mean([p.large_seconds for p in points], points)
    return points[0].model_copy(
        update={
            "large_seconds": large,
            "small_seconds": large * median(ratios),
            "repeats": sum(p.repeats for p in points),
            "ratios": ratios,
        }
    )


def _memory(points: Sequence[MemoryPoint]) -> MemoryPoint:
    resident = [p.resident_bytes for p in points if p.resident_bytes is not None]
    return points[0].model_copy(
        update={
            "peak_bytes": max(p.peak_bytes for p in points),
            "resident_bytes": max(resident, default=None),
        }
    )


def _collective(points: Sequence[CollectiveTime]) -> CollectiveTime:
    return points[0].model_copy(
        update={
            "seconds": _mean([p.seconds for p in points], points),
            "low": min(p.low for p in points),
            "high": max(p.high for p in points),
            "repeats": sum(p.repeats for p in points),
        }
    )


def _mean(
    values: Sequence[float],
    points: Sequence[StepTime] | Sequence[CollectiveTime] | Sequence[PairTime],
) -> float:
    """Mean weighted by how often each point was timed."""
    weights = [point.repeats for point in points]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
