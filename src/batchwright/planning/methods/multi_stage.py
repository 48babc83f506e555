"""Plans of several rows or two groups of workers, laid out in one way whatever tells the times.

The cluster and the batch at the highest resolution are chosen as for `plain`; what is added is laid
out by `rows`, timed by `time_models`, and explained by `cycle_reasons` and `group_reasons`.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.algorithms.learning_rate import make_rule
from batchwright.errors import PlanError
from batchwright.planning.candidates.optimizer import chosen_optimizer
from batchwright.planning.candidates.table import SECONDS_PER_HOUR
from batchwright.planning.methods.rows import (
    laid_out,
    large_batches_of,
    served_in_time,
    served_level,
)
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.reasons import cycle_reasons, group_reasons, reasons
from batchwright.planning.resolution import (
    CYCLED,
    Schedule,
    cycle_batches,
    preset_of,
    schedule_of,
    sides,
)
from batchwright.planning.validation import SERVED, check_goal
from batchwright.records import (
    DataFacts,
    Job,
    LearningRateRule,
    NetworkFacts,
    Reason,
    ServerRule,
    Stage,
)

COMPOSED = (*CYCLED, "dual-batch")
"""Methods whose plans are laid out here."""


@dataclass(frozen=True)
class Layout:
    """What a plan is made of.

    Attributes:
        stages: The table.
        rule: The learning rate.
        server: Of the parameter server; `None` without.
        reasons: For what was added to the choice.
    """

    stages: tuple[Stage, ...]
    rule: LearningRateRule
    server: ServerRule | None
    reasons: tuple[Reason, ...]


def searched(job: Job, data: DataFacts) -> Job:
    """The job whose cluster and batch are chosen as for `plain`, at a batch given for the top."""
    if job.method in CYCLED:
        schedule_of(job)  # refuses what cannot be laid out, before anything is searched
    batches, _ = cycle_batches(job, data)
    return job if batches is None else job.model_copy(update={"global_batch": batches[-1]})


def rate_rule(job: Job, batch: int, network: NetworkFacts) -> LearningRateRule:
    """The rate at a batch; a cycle's stages stand in the table, so nothing decays it but they.

    Args:
        job: Resolved.
        batch: Samples in a step: over all workers, or of one under a parameter server.
        network: Its normalization matters to Muon's default rate.

    Raises:
        JobError: The warm-up asked for is longer than the training.
    """
    preset = preset_of(job)
    if preset is not None and job.learning_rate == "auto":
        job = job.model_copy(update={"learning_rate": preset.rates[0], "scaling": "none"})
    if job.method in CYCLED:
        job = job.model_copy(update={"decay": "none"})
    update = chosen_optimizer(job, batch)
    return make_rule(job, batch, job.epochs, update, batch_norm=network.batch_norm)


def lay_out(job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...] = ()) -> Layout:
    """The plan's table.

    Args:
        job: Resolved, its workers settled.
        times: What a step takes, and what was chosen for `plain`.
        optimizer: Reason for it, where that stands beside the rate's.

    Raises:
        PlanError: No pair of batches exists, stages do not add up, or a limit is missed.
    """
    schedule = schedule_of(job) if job.method in CYCLED else None
    if job.method in SERVED:
        made = _served(job, times, schedule, optimizer)
        check_goal(job)
    else:
        assert schedule is not None  # noqa: S101 - cyclic, as it has no server
        made = _cycled(job, times, schedule, optimizer)
    _check_limits(job, made, times)
    if schedule is not None:
        scheduled = cycle_reasons.scheduled(job, schedule, times.data)
    else:
        scheduled = (reasons.resolution(max(sides(job)), times.data),)
    found = (
        cycle_reasons.method(job),
        *scheduled,
        *made.reasons,
        *cycle_reasons.training_time(job, made.stages, times.other_seconds),
        *cycle_reasons.link(job),
    )
    return Layout(made.stages, made.rule, made.server, found)


def _cycled(
    job: Job, times: Measured | Stated, schedule: Schedule, optimizer: tuple[Reason, ...]
) -> Layout:
    """All workers alike, resolution by resolution."""
    given, source = cycle_batches(job, times.data)
    batches = given or (times.batch,) * len(schedule.resolutions)
    levels = [times.level(*each) for each in zip(schedule.resolutions, batches, strict=True)]
    rule = rate_rule(job, batches[-1], times.network)
    stages = laid_out(job, rule, levels, schedule)
    of_batch, of_time = times.batch_reasons(stages[-1])
    found = (
        *of_batch,
        cycle_reasons.cycle_batches(batches, schedule.resolutions, source),
        *of_time,
        *optimizer,
        *cycle_reasons.rate(job, rule, batches[-1], schedule),
    )
    return Layout(stages, rule, None, found)


def _served(
    job: Job, times: Measured | Stated, schedule: Schedule | None, optimizer: tuple[Reason, ...]
) -> Layout:
    """Two groups at each resolution."""
    samples, workers = times.data.train_samples, times.workers
    levels = sides(job) if schedule is not None else (max(sides(job)),)
    top, whence = times.large_batch()
    large, source = large_batches_of(job, levels, top, samples / workers, times.fitting)
    pace = times.pace(large[-1])
    found = served_in_time(
        job,
        pace,
        workers,
        sides=levels,
        large_batches=large,
        samples=samples,
        epochs=(job.epochs,) if schedule is None else schedule.epochs_of_levels,
        other_seconds=times.other_seconds,
    )
    rows = []
    for side, groups, batch in zip(levels, found.groups, large, strict=True):
        micro = times.micro_batch(side, groups.local_batch_sizes)
        # Without large-batch workers the largest is the small one.
        peak = times.peak(side, micro, max(groups.local_batch_sizes))
        ends = pace.spread(side, batch)
        rows.append(served_level(groups, found.rule, side, micro_batch=micro, ends=ends, peak=peak))
    rule = rate_rule(job, large[-1], times.network)
    stages = laid_out(job, rule, rows, schedule)
    why = (
        *group_reasons.groups(
            job,
            found,
            pace,
            levels,
            samples=samples,
            large_source=whence if source == "one" else source,
            measured=times.measured,
        ),
        *cycle_reasons.memory(stages, times.limit),
        *cycle_reasons.round_time(job, stages),
        *optimizer,
        *cycle_reasons.rate(job, rule, large[-1], schedule),
    )
    return Layout(stages, rule, found.rule, why)


def _check_limits(job: Job, made: Layout, times: Measured | Stated) -> None:
    """Refuse rows that together miss a deadline or cost, as they may where `plain` keeps both."""
    high = times.other_seconds + sum(
        stage.epochs * stage.predicted_epoch_seconds.high
        for stage in made.stages
        if stage.predicted_epoch_seconds is not None
    )
    cost = (times.hourly or 0.0) * high / SECONDS_PER_HOUR
    advice = "train fewer epochs"
    if job.method in SERVED:
        advice += ", or leave dual.extra_time to the plan"
    for limit, verb, value, unit in (
        ("deadline", "take", high, " s"),
        ("max_cost", "cost", cost, ""),
    ):
        most = getattr(job.goal, limit)
        if most is not None and value > most:
            raise PlanError(
                f"method={job.method} may {verb} {value:.4g}{unit}, goal.{limit}={most:g}: raise "
                f"goal.{limit}, {advice}"
            )
