"""A plan that trains as asked, where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.algorithms.learning_rate import rule_for
from batchwright.algorithms.partition import apportion
from batchwright.errors import PlanError
from batchwright.planning.assembly import assemble, stage_of
from batchwright.planning.candidates.optimizer import chosen_optimizer, optimizer_reason
from batchwright.planning.candidates.worker_types import cut
from batchwright.planning.gradient_scaling import step_split_of
from batchwright.planning.methods.multi_stage import (
    check_limits,
    cycle_batches,
    rate_rule,
)
from batchwright.planning.methods.round_times import stated_pace
from batchwright.planning.methods.rows import (
    Level,
    laid_out,
    large_batches_of,
    served_in_time,
    served_level,
)
from batchwright.planning.methods.simulated import stated_line, usual_times
from batchwright.planning.reasons import cycle_reasons, group_reasons, reasons
from batchwright.planning.resolution import Schedule, schedule_of
from batchwright.planning.validation import (
    check_batch,
    check_bounds,
    check_goal,
    check_micro_batches,
    check_open_method,
    check_side,
    least_local,
    resolved,
    sides,
)
from batchwright.records import DataFacts, Job, NetworkFacts, Plan, Reason


def plan_without_profile(
    job: Job,
    data: DataFacts,
    network: NetworkFacts,
    *,
    local_batch_sizes: Sequence[int] | None = None,
) -> Plan:
    """A plan that trains as asked, where nothing was measured: it predicts nothing.

    What the job leaves open is assumed: one worker, float32, the base batch or, where the data is
    too small for it, the largest batch that leaves ``goal.least_steps`` steps per epoch.

    Two groups of workers need to know what a step takes: a virtual cluster says so in
    ``virtual.sample_seconds`` and ``virtual.step_seconds``, and its rounds are predicted by them.

    Args:
        job: What to train; its ``workers`` must fit ``local_batch_sizes`` if both are given.
        data: The data set.
        network: The network.
        local_batch_sizes: Samples per step of each worker, in rank order; unset: equal shares of
            the global batch.

    Raises:
        PlanError: Batches, workers and data do not fit together, or a limit is missed.
        JobError: The warm-up asked for is longer than the training.
    """
    check_open_method(job)
    if job.method == "auto":  # nothing tells of another
        job = job.model_copy(update={"method": "plain"})
    local = tuple(local_batch_sizes or ())
    workers = len(local) if job.workers == "auto" and local else job.workers
    workers = 1 if workers == "auto" else workers
    if local and len(local) != workers:
        raise PlanError(f"{len(local)} local batches {list(local)} for workers={workers}")
    precision = job.precision if job.precision != "auto" else "float32"
    job = resolved(job, data, precision=precision, workers=workers, least_side=network.least_side)
    for side in sides(job) if job.method_spec.cycles else (max(sides(job)),):
        check_side(side, network)
    if job.method_spec.served:
        if local:
            raise PlanError(
                f"method={job.method} finds the small batch itself: give dual.large_batches "
                "instead of local batches"
            )
        return _served(job, data, network, workers)
    return _reduced(job, data, network, local, given=local_batch_sizes is not None)


def _reduced(
    job: Job, data: DataFacts, network: NetworkFacts, local: tuple[int, ...], *, given: bool
) -> Plan:
    """Workers that exchange gradients."""
    assert job.workers != "auto"  # noqa: S101 - settled above
    workers, least = job.workers, least_local(network)
    batches, batch_source = cycle_batches(job, data)
    if job.global_batch != "auto":
        batch = job.global_batch
    elif batches is not None and not local:
        batch = batches[-1]
    else:
        most = data.train_samples // job.goal.least_steps
        batch = sum(local) or max(workers * least, min(job.base_batch, most))
    if local and sum(local) != batch:
        raise PlanError(f"local batches {list(local)} do not add up to global_batch={batch}")
    local = local or tuple(apportion([1] * workers, batch))
    rows = [_level(job, data, max(sides(job)), local, least)]
    check_bounds(job, local)
    if job.method_spec.same_steps:
        update = chosen_optimizer(job, batch)
        rule = rule_for(job, batch, data, network, update)
        stage = stage_of(job, max(sides(job)), rule, local, **_without_side(rows[0]))
        return assemble(
            job,
            data,
            network,
            rule,
            (stage,),
            reasons=(
                reasons.unmeasured_batch(job, stage, given=given),
                reasons.resolution(max(sides(job)), data),
                *reasons.method(job),
                *optimizer_reason(job, batch),
                *reasons.learning_rate(job, rule, stage, update),
                *cycle_reasons.link(job),
            ),
        )
    schedule = schedule_of(job)
    each = batches or (batch,) * len(sides(job))
    rows = [
        _level(job, data, side, tuple(apportion(list(local), size)), least)
        for side, size in zip(sides(job), each, strict=True)
    ]
    rule = rate_rule(job, each[-1], network)
    stages = laid_out(job, rule, rows, schedule)
    return assemble(
        job,
        data,
        network,
        rule,
        stages,
        reasons=(
            cycle_reasons.method(job),
            *_scheduled(job, schedule, data),
            reasons.unmeasured_batch(job, stages[-1], given=given or batches is not None),
            cycle_reasons.cycle_batches(each, sides(job), batch_source),
            *optimizer_reason(job, batch),
            *cycle_reasons.rate(job, rule, each[-1], schedule),
            *cycle_reasons.link(job),
        ),
    )


def _level(job: Job, data: DataFacts, side: int, local: tuple[int, ...], least: int) -> Level:
    """What holds at one resolution; each local batch in one pass unless asked otherwise."""
    check_batch(sum(local), len(local), least, data)
    if min(local) < least:
        raise PlanError(f"local batches {list(local)}: each worker needs at least {least}")
    micro = max(local)
    if job.micro_batch != "auto":
        check_micro_batches(micro, job.micro_batch, least)
        micro = max(cut(micro, job.micro_batch))
    parting = step_split_of(job)
    if parting is not None:
        micro = min(micro, parting.most_at_once(local, least))
    line = stated_line(job, side)
    # Stated times are a usual worker's, unlike measured ones, which are the slowest one's.
    usual = job.model_copy(update={"launch": "local"})
    alone = usual_times(usual, line, max(local)) if line else {}
    return {"resolution": side, "local_batch_sizes": local, "micro_batch_size": micro, **alone}


def _without_side(level: Level) -> dict[str, object]:
    return {
        key: value for key, value in level.items() if key not in ("resolution", "local_batch_sizes")
    }


def _scheduled(job: Job, schedule: Schedule | None, data: DataFacts) -> tuple[Reason, ...]:
    if schedule is None:
        return (reasons.resolution(max(sides(job)), data),)
    return (
        *cycle_reasons.preset(job, schedule, data),
        cycle_reasons.resolutions(job, schedule, data),
        cycle_reasons.stages(job, schedule),
        *cycle_reasons.dropouts(schedule),
    )


def _served(job: Job, data: DataFacts, network: NetworkFacts, workers: int) -> Plan:
    """Two groups of workers, whose times the job states."""
    least, samples = least_local(network), data.train_samples
    pace = stated_pace(job, network, workers, least)
    if pace is None:
        raise PlanError(
            f"method={job.method} needs to know what a step takes, and nothing was measured: probe "
            "first, or with launch=virtual give virtual.sample_seconds and virtual.step_seconds"
        )
    schedule = schedule_of(job) if job.method_spec.cycles else None
    levels = sides(job) if schedule is not None else (max(sides(job)),)
    most = max(least, samples // workers // job.goal.least_steps)
    top = min(job.base_batch, most)
    if job.global_batch != "auto":
        top = -(-job.global_batch // workers)
    large, source = large_batches_of(job, levels, top, samples / workers, None)
    found = served_in_time(
        job,
        pace,
        workers,
        sides=levels,
        large_batches=large,
        samples=samples,
        epochs=(job.epochs,) if schedule is None else schedule.epochs_of_levels,
        other_seconds=0.0,
    )
    rows, parting = [], step_split_of(job)
    for side, groups in zip(levels, found.groups, strict=True):
        micro = max(groups.local_batch_sizes)
        if job.micro_batch != "auto":
            check_micro_batches(min(groups.local_batch_sizes), job.micro_batch, least)
            micro = max(cut(micro, job.micro_batch))
        if parting is not None:
            micro = min(micro, parting.most_at_once(groups.local_batch_sizes, least))
        rows.append(
            served_level(groups, found.rule, side, micro_batch=micro, ends=(1.0, 1.0), peak=None)
        )
    rule = rate_rule(job, large[-1], network)
    stages = laid_out(job, rule, rows, schedule)
    hourly = None if job.goal.price is None else workers * job.goal.price
    check_goal(job)
    check_limits(job, stages, 0.0, hourly)
    asked = job.global_batch != "auto"
    return assemble(
        job,
        data,
        network,
        rule,
        stages,
        server=found.rule,
        reasons=(
            cycle_reasons.method(job),
            *_scheduled(job, schedule, data),
            *group_reasons.groups(
                job,
                found,
                pace,
                levels,
                samples=samples,
                large_source=source if source != "one" else "asked" if asked else "base",
                measured=False,
            ),
            *cycle_reasons.round_time(job, stages),
            *optimizer_reason(job, sum(large)),
            *cycle_reasons.rate(job, rule, large[-1], schedule),
            *cycle_reasons.training_time(job, stages, 0.0),
            *cycle_reasons.link(job),
        ),
    )
