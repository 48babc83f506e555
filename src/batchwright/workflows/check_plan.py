"""Compares a plan's predictions with later measurements, and adds these to its profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from batchwright.errors import PlanError
from batchwright.planning.candidates.optimizer import extra_seconds
from batchwright.planning.merging import kind_of, merge_profiles
from batchwright.planning.validation import planning_job
from batchwright.prediction.contradictions import Key, grouped, key_of
from batchwright.records import (
    Check,
    CheckPoint,
    Cluster,
    Estimate,
    HeldOut,
    Job,
    KindTimes,
    Plan,
    Profile,
    RoundCheck,
    StepTime,
)

if TYPE_CHECKING:
    from batchwright.probing.probe import Measured

_PREDICTED = ("workers", "resolution", "local_batch_size", "step_seconds", "peak_bytes")


def own_steps(plan: Plan) -> tuple[HeldOut, ...]:
    """The steps that the plan itself takes, in the order of its stages, as points to measure.

    Only stages whose step equal workers on this machine can take: not with a parameter server,
    several kinds of workers, stated times, unequal local batches, or several passes in a step.
    """
    found: dict[Key, HeldOut] = {}
    for stage in plan.stages:
        sizes = stage.local_batch_sizes
        alike = max(sizes) - min(sizes) <= 1 and stage.accumulation_steps == 1
        if plan.server is not None or len(plan.kinds) > 1 or not alike:
            continue
        for one in plan.considered:
            same = (one.workers, one.resolution, one.global_batch_size)
            planned = (stage.workers, stage.resolution, stage.global_batch_size)
            if same == planned and not one.assumed:
                point = HeldOut(**{name: getattr(one, name) for name in _PREDICTED})
                found.setdefault(key_of(point), point)
    return tuple(found.values())


def chosen_points(plan: Plan, count: int) -> tuple[HeldOut, ...]:
    """At most ``count`` points to measure: the plan's own steps first, then held-out ones.

    The held-out points are divided evenly among the pairs of workers and resolution, and within a
    pair they are evenly spaced over the batches.

    Raises:
        PlanError: The plan predicts no step that can be measured here, or ``count`` is below 1.
    """
    if plan.job.launcher.simulated:
        raise PlanError(
            "the plan's times are those of a simulated cluster (launch=virtual), of which steps "
            "measured here say nothing: plan with launch=local, and check that plan"
        )
    own = own_steps(plan)
    known = {key_of(point) for point in own}
    held_out = [point for point in plan.held_out if key_of(point) not in known]
    if not (own or held_out):
        raise PlanError(
            "the plan predicts no step between two measured ones, so nothing can be checked: "
            "probe at more batches (a larger probe.budget) and plan again"
        )
    if count < 1:
        raise PlanError(f"points={count}: give 1 or more")
    groups = grouped(held_out)
    quotas = dict.fromkeys(groups, 0)
    for _ in range(min(count - len(own), len(held_out))):
        open_ = [key for key in groups if quotas[key] < len(groups[key])]
        quotas[min(open_, key=quotas.__getitem__)] += 1
    spread = (
        points[index]
        for key, points in groups.items()
        for index in _evenly(len(points), quotas[key])
    )
    return (*own[:count], *spread)


def _evenly(count: int, wanted: int) -> list[int]:
    """``wanted`` different indices below ``count``, evenly spaced and away from both ends.

    >>> _evenly(5, 1), _evenly(5, 2), _evenly(6, 3)
    ([2], [1, 3], [1, 3, 5])
    """
    return [int((2 * index + 1) * count / (2 * wanted)) for index in range(wanted)]


def compare(
    plan: Plan,
    points: Sequence[HeldOut],
    measured: Measured | None,
    profile: Profile | None = None,
    *,
    rounds: tuple[RoundCheck, ...] = (),
    apart: Measured | None = None,
) -> Check:
    """Compare predictions and measurements, for every quantity that has both.

    Args:
        plan: The plan with the predictions.
        points: The points that were to be measured.
        measured: Measurements at these points with the profile's optimizer.
        profile: A profile to which the new points are added.
        rounds: The plan's rounds, if it has two batch sizes and they were measured.
        apart: Measurements at the plan's own steps with the plan's optimizer, where that is not the
            profile's. The profile gets their times minus the seconds that the plan's update takes
            longer, if these are known. At least one of ``measured`` and ``apart`` is given.

    Raises:
        PlanError: The profile is of another workload, hardware or version.
    """
    sources = [one for one in (apart, measured) if one is not None]
    if profile is not None and apart is not None:
        steps = _by_usual_update(apart.steps, plan, profile)
        if steps:
            profile = with_points(profile, cluster=_named_as(profile, apart.cluster), steps=steps)
    if profile is not None and measured is not None:
        profile = with_points(
            profile,
            cluster=_named_as(profile, measured.cluster),
            steps=measured.steps,
            memory=measured.memory,
            out_of_memory=measured.out_of_memory,
        )
        profile = profile.model_copy(update={"kinds": _with_steps(profile.kinds, measured.kinds)})
    own = {key_of(point) for point in own_steps(plan)}
    return Check(
        points=tuple(
            one.model_copy(update={"planned": key_of(point) in own})
            for point in points
            for source in sources
            for one in _compared(plan.network.name, point, source)
        ),
        rounds=rounds,
        tolerance=plan.job.goal.tolerance,
        cluster=sources[0].cluster,
        out_of_memory=tuple(lost for source in sources for lost in source.out_of_memory),
        profile=profile,
    )


def _by_usual_update(
    steps: Sequence[StepTime], plan: Plan, profile: Profile
) -> tuple[StepTime, ...]:
    """The plan's own steps with the times that they would take with the profile's optimizer.

    Planning adds the difference between the optimizers' updates again. Steps are left out where the
    probe timed no updates, and where a visit is shorter than that difference.
    """
    found = []
    for step in steps:
        extra = extra_seconds(plan.job, profile, plan.update, step.workers)
        visits = step.visits or (step.step_seconds,)
        if extra is None or extra.value >= min(*visits, step.compute_seconds, step.step_low):
            continue
        names = ("compute_seconds", "step_seconds", "step_low", "step_high")
        less = {name: getattr(step, name) - extra.value for name in names}
        less["visits"] = tuple(one - extra.value for one in visits)
        if step.visit_error is not None:
            less["visit_error"] = step.visit_error * step.step_seconds / less["step_seconds"]
        found.append(step.model_copy(update=less))
    return tuple(found)


def _with_steps(kinds: Sequence[KindTimes], measured: Sequence[KindTimes]) -> tuple[KindTimes, ...]:
    """Kinds of workers with new measured steps added, at batches that they did not have."""
    new = {one.kind: one.steps for one in measured}
    found = []
    for one in kinds:
        known = {key_of(step): step for step in (*new.get(one.kind, ()), *one.steps)}
        steps = tuple(known[key] for key in sorted(known))
        found.append(one.model_copy(update={"steps": steps}))
    return tuple(found)


def _compared(network: str, point: HeldOut, measured: Measured) -> Iterator[CheckPoint]:
    step = next((one for one in measured.steps if key_of(one) == key_of(point)), None)
    bytes_ = next((one for one in measured.memory if key_of(one) == key_of(point)), None)
    if step is not None:
        visits = step.visits or (step.step_seconds,)
        yield _point(network, point, "step_seconds", step.step_seconds, visits)
    if bytes_ is not None:
        yield _point(network, point, "peak_bytes", bytes_.peak_bytes)
    if bytes_ is not None and bytes_.resident_bytes and point.resident_bytes:
        yield _point(network, point, "resident_bytes", bytes_.resident_bytes)


def _point(
    network: str,
    point: HeldOut,
    quantity: Literal["step_seconds", "peak_bytes", "resident_bytes"],
    measured: float,
    visits: tuple[float, ...] = (),
) -> CheckPoint:
    predicted: Estimate = getattr(point, quantity)
    return CheckPoint(
        quantity=quantity,
        network=network,
        local_batch_size=point.local_batch_size,
        resolution=point.resolution,
        workers=point.workers,
        predicted=predicted.value,
        low=predicted.low,
        high=predicted.high,
        measured=measured,
        visits=visits,
    )


def refuse_other_machine(profile: Profile, cluster: Cluster) -> None:
    """Refuse a cluster whose measurements could not be added to the profile.

    Raises:
        PlanError: Hardware or versions differ.
    """
    with_points(profile, cluster=_named_as(profile, cluster))


def _named_as(profile: Profile, cluster: Cluster) -> Cluster:
    return cluster.model_copy(update={"kind": profile.cluster.kind})


def with_points(profile: Profile, **points: object) -> Profile:
    """The profile with more measured points; measurements of the same point are pooled.

    Args:
        profile: The profile.
        **points: Fields of a profile with the new points, and its ``cluster``.

    Raises:
        PlanError: The points were measured on other hardware or with other versions.
    """
    lists = ("steps", "pairs", "memory", "out_of_memory", "collectives")
    bare = {**dict.fromkeys(lists, ()), "noise": None, "load": None}
    together = profile.model_copy(update={"kinds": ()})  # points are measured on all kinds at once
    merged, *others = merge_profiles([together, together.model_copy(update={**bare, **points})])
    if others:
        raise PlanError(
            f"the profile was measured on {kind_of(profile)}, and this is {kind_of(others[0])}: "
            "what is measured here does not go into it; check there, or without the profile"
        )
    return merged.model_copy(
        update={"probe_seconds": profile.probe_seconds, "kinds": profile.kinds}
    )


def open_again(plan: Plan, profile: Profile) -> Job:
    """The job to plan again, with the choices open that the user left to the plan.

    These are the number of workers and, on the way to a target, the epochs: the plan's job has
    those that were chosen.
    """
    job = plan.job.model_copy(update={"epochs": plan.max_epochs or plan.job.epochs})
    asked = any(one.choice == "workers" and one.source == "asked" for one in plan.reasons)
    if asked:
        return job
    return job.model_copy(update={"workers": planning_job(profile).workers})
