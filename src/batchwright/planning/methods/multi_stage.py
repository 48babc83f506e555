"""Plans of several rows or two groups of workers, laid out in one way whatever tells the times.

The cluster and the batch at the highest resolution are chosen as for `plain`; what is added is
timed by `time_models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.algorithms.dual_batch import PAPER
from batchwright.algorithms.rebalancing import DEAD_BAND
from batchwright.errors import PlanError
from batchwright.planning.candidates.table import SECONDS_PER_HOUR, mebibytes
from batchwright.planning.chosen import Chosen
from batchwright.planning.learning_rates import rate_at_top
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.methods.two_groups import (
    Level,
    group_reasons,
    large_batches_of,
    served_in_time,
    served_level,
)
from batchwright.planning.resolution import (
    Schedule,
    cycle_batches,
    resolution_reason,
    schedule_of,
    sides,
)
from batchwright.planning.validation import check_goal
from batchwright.records import (
    DataFacts,
    Estimate,
    Job,
    LearningRateRule,
    Reason,
    ServerRule,
    Source,
    Stage,
)

YE = "Ye et al. 2020, arXiv 2007.11831"


@dataclass(frozen=True)
class Layout:
    """What a plan is made of.

    Attributes:
        stages: The table.
        rule: The learning rate.
        reasons: For what was added to the choice.
        server: Of the parameter server; `None` without.
    """

    stages: tuple[Stage, ...]
    rule: LearningRateRule
    reasons: tuple[Reason, ...] = ()
    server: ServerRule | None = None


def searched(job: Job, data: DataFacts) -> Job:
    """The job whose cluster and batch are chosen as for `plain`, at a batch given for the top."""
    if job.method_spec.cycles:
        schedule_of(job)  # refuses what cannot be laid out, before anything is searched
    batches = cycle_batches(job, data)
    return job if batches is None else job.model_copy(update={"global_batch": batches.value[-1]})


def laid_out(
    job: Job, rule: LearningRateRule, levels: Sequence[Level], schedule: Schedule | None = None
) -> tuple[Stage, ...]:
    """The table: each sub-stage of the schedule with what holds at its resolution.

    ``levels`` are for each resolution, low to high; without a schedule there is one row.
    """
    usual = {"dropout": job.dropout, "augmentation": job.augmentation}
    if schedule is None:
        (level,) = levels
        return (Stage(epochs=job.epochs, learning_rate=rule.peak, **usual, **level),)
    return tuple(
        Stage(
            epochs=part.epochs,
            learning_rate=rule.peak * schedule.rates[part.rate_stage],
            augmentation_strength=schedule.strengths[part.level],
            rate_stage=part.rate_stage,
            **(usual | {"dropout": schedule.dropouts[part.level]}),
            **levels[part.level],
        )
        for part in schedule.parts
    )


def lay_out(job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...] = ()) -> Layout:
    """The plan's table.

    Args:
        job: Resolved, its workers settled.
        times: What a step takes, and what was chosen for `plain`.
        optimizer: Reason for it, where that stands beside the rate's.

    Raises:
        PlanError: No pair of batches exists, stages do not add up, or a limit is missed.
    """
    schedule = schedule_of(job) if job.method_spec.cycles else None
    if job.method_spec.served:
        made = _served(job, times, schedule, optimizer)
        check_goal(job)
    else:
        assert schedule is not None  # noqa: S101 - cyclic, as it has no server
        made = _cycled(job, times, schedule, optimizer)
    total = _total_seconds(made.stages, times.other_seconds)
    _check_limits(job, total.high, times.hourly)
    scheduled: tuple[Reason, ...] = (resolution_reason(max(sides(job)), times.data),)
    if schedule is not None:
        scheduled = schedule.reasons(job, times.data)
    found = (
        *method_reason(job),
        *scheduled,
        *made.reasons,
        *_training_time(job, made.stages, total),
        *link_reason(job),
    )
    return Layout(made.stages, made.rule, found, made.server)


def _cycled(
    job: Job, times: Measured | Stated, schedule: Schedule, optimizer: tuple[Reason, ...]
) -> Layout:
    """All workers alike, resolution by resolution."""
    resolutions = schedule.resolutions
    batches = cycle_batches(job, times.data) or Chosen(
        (times.batch,) * len(resolutions),
        "The same at all: the one chosen at the highest.",
        "assumed",
    )
    levels = [times.level(*each) for each in zip(resolutions, batches.value, strict=True)]
    rule, rates = rate_at_top(job, batches.value[-1], times.network)
    stages = laid_out(job, rule, levels, schedule)
    of_batch, of_time = times.batch_reasons(stages[-1])
    values = [f"{n} at {side} px" for n, side in zip(batches.value, resolutions, strict=True)]
    each = batches.reason("batch at each resolution", ", ".join(values))
    return Layout(stages, rule, (*of_batch, each, *of_time, *optimizer, *rates))


def _served(
    job: Job, times: Measured | Stated, schedule: Schedule | None, optimizer: tuple[Reason, ...]
) -> Layout:
    """Two groups at each resolution."""
    samples = times.data.train_samples
    levels = sides(job) if schedule is not None else (max(sides(job)),)
    top = times.large_batch()
    large = large_batches_of(job, levels, top, samples / times.workers, times.fitting)
    pace = times.pace(large.value[-1])
    found = served_in_time(
        job,
        pace,
        sides=levels,
        large_batches=large,
        samples=samples,
        epochs=(job.epochs,) if schedule is None else schedule.epochs_of_levels,
        other_seconds=times.other_seconds,
    )
    rows = []
    for side, groups, batch in zip(levels, found.groups, large.value, strict=True):
        micro = times.micro_batch(side, groups.local_batch_sizes)
        # Without large-batch workers the largest is the small one.
        peak = times.peak(side, micro, max(groups.local_batch_sizes))
        ends = pace.spread(side, batch)
        rows.append(served_level(groups, found.rule, side, micro_batch=micro, ends=ends, peak=peak))
    rule, rates = rate_at_top(job, large.value[-1], times.network)
    stages = laid_out(job, rule, rows, schedule)
    why = (
        *group_reasons(
            found,
            pace,
            levels,
            samples=samples,
            measured=times.measured,
            rounding=job.dual.rounding,
        ),
        *_memory(stages, times.limit),
        *_round_time(job, stages),
        *optimizer,
        *rates,
    )
    return Layout(stages, rule, why, found.rule)


def _total_seconds(stages: Sequence[Stage], other: float) -> Estimate:
    """Of the whole training, with ``other`` seconds besides the rows'; those predicted count."""
    rows = [(stage.epochs, stage.predicted_epoch_seconds) for stage in stages]
    ends = {
        end: other + sum(n * getattr(one, end) for n, one in rows if one is not None)
        for end in ("value", "low", "high")
    }
    return Estimate(**ends)


def _check_limits(job: Job, high: float, hourly: float | None) -> None:
    """Refuse rows that together miss a deadline or cost, as they may where `plain` keeps both."""
    advice = "train fewer epochs"
    if job.method_spec.served:
        advice += ", or leave dual.extra_time to the plan"
    for limit, verb, value, unit in (
        ("deadline", "take", high, " s"),
        ("max_cost", "cost", (hourly or 0.0) * high / SECONDS_PER_HOUR, ""),
    ):
        most = getattr(job.goal, limit)
        if most is not None and value > most:
            raise PlanError(
                f"method={job.method} may {verb} {value:.4g}{unit}, goal.{limit}={most:g}: raise "
                f"goal.{limit}, {advice}"
            )


# -------------------------------------------------------------------------------------- in words


def method_reason(job: Job) -> tuple[Reason, ...]:
    """What the method does; nothing to say of `plain`."""
    if job.method_spec.why:
        why = f"Asked for. {job.method_spec.why}"
        return (Chosen(job.method, why, "published", PAPER).reason("method"),)
    if not job.method_spec.follows_speed:
        return ()
    when = "at the end of each epoch"
    if job.rebalance == "published":
        how = "each worker's share becomes its samples over its time in that epoch"
    else:
        how = (
            "each worker's share is made to follow its measured speed, if any would change by more "
            f"than {DEAD_BAND:.0%}"
        )
        if job.rebalance_steps:
            when = f"every {job.rebalance_steps} steps and {when}"
    why = f"Asked for. Local batches are where it starts: {when} {how}; the global batch stays."
    return (Chosen(job.method, why, "published", YE).reason("method"),)


def link_reason(job: Job) -> tuple[Reason, ...]:
    """The network of a virtual cluster."""
    if not job.launcher.simulated or job.link.latency is None or job.link.bandwidth is None:
        return ()
    value = f"{1e3 * job.link.latency:g} ms and {job.link.bandwidth / 1e6:g} MB/s"
    why = (
        "Of the virtual cluster, whose times are simulated; unless link.latency and "
        "link.bandwidth say otherwise, Ethernet of 1 Gb/s as in the dual-batch paper."
    )
    return (Chosen(value, why, "assumed").reason("link"),)


def _training_time(job: Job, stages: Sequence[Stage], total: Estimate) -> tuple[Reason, ...]:
    """The whole training over all rows; nothing where nothing is predicted."""
    if any(stage.predicted_epoch_seconds is None for stage in stages):
        return ()
    simulated = " of the simulated clock" if job.launcher.simulated else ""
    why = f"{sum(stage.epochs for stage in stages)} epochs, and the evaluations among them."
    if job.goal.deadline is not None:
        why += f" goal.deadline={job.goal.deadline:g} s holds for the upper end."
    value = f"{total.value:.3g} s{simulated} ({total.low:.3g} to {total.high:.3g})"
    return (Chosen(value, why, "predicted").reason("training time"),)


def _round_time(job: Job, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """A round at the highest resolution."""
    top = max(stages, key=lambda stage: stage.resolution)
    one = top.predicted_epoch_seconds
    if one is None:
        return ()
    value = f"{one.value:.3g} s ({one.low:.3g} to {one.high:.3g})"
    why = (
        f"At {top.resolution} px, until the last worker has ended its samples, the exchange with "
        "the server included."
    )
    source: Source = "assumed" if job.launcher.simulated else "predicted"
    return (Chosen(value, why, source).reason("round time"),)


def _memory(stages: Sequence[Stage], limit: int) -> tuple[Reason, ...]:
    """The largest predicted peak of a worker against the limit."""
    peaks = [stage.predicted_bytes for stage in stages if stage.predicted_bytes is not None]
    if not peaks:
        return ()
    peak = max(peaks, key=lambda one: one.high)
    why = (
        f"At most {mebibytes(peak.high)} predicted, on a large-batch worker; the limit is "
        f"{mebibytes(limit)}."
    )
    return (Chosen(f"{mebibytes(peak.value)} per worker", why, "predicted").reason("memory"),)
