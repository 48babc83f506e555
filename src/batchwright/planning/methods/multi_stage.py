"""Plans of several rows or two groups of workers: the choice for `plain` becomes theirs.

The cluster and the batch at the highest resolution are chosen as for `plain`; what is added is laid
out by `rows`, timed by `pacing`, and explained by `cycle_reasons` and `group_reasons`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.algorithms.learning_rate import make_rule
from batchwright.errors import PlanError
from batchwright.planning.candidates.choice import Choice, Progress
from batchwright.planning.candidates.local_batches import largest_shares, local_batches, split
from batchwright.planning.candidates.optimizer import chosen_optimizer
from batchwright.planning.candidates.prediction_records import prediction
from batchwright.planning.candidates.table import SECONDS_PER_HOUR, Table
from batchwright.planning.methods.round_times import measured_pace
from batchwright.planning.methods.rows import (
    Level,
    laid_out,
    large_batches_of,
    served_in_time,
    served_level,
)
from batchwright.planning.methods.simulated import usual_times
from batchwright.planning.reasons import cycle_reasons, explanations, group_reasons, reasons
from batchwright.planning.resolution import (
    Schedule,
    per_resolution,
    preset_of,
    schedule_of,
)
from batchwright.planning.validation import sides
from batchwright.records import (
    DataFacts,
    Job,
    LearningRateRule,
    NetworkFacts,
    Prediction,
    Reason,
    ServerRule,
    Stage,
)

_MOST_SAMPLES = 2**24  # where the memory alone is asked


@dataclass(frozen=True)
class Composed:
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
    if job.method_spec.same_steps:
        return job
    if job.method_spec.cycles:
        schedule_of(job)  # refuses what cannot be laid out, before anything is searched
    batches, _ = cycle_batches(job, data)
    if batches is None:
        return job
    return job.model_copy(update={"global_batch": batches[-1]})


def cycle_batches(job: Job, data: DataFacts) -> tuple[tuple[int, ...] | None, str]:
    """The global batch at each resolution of `cyclic`, and where it comes from.

    Returns:
        `None` where the chosen one holds at all.

    Raises:
        PlanError: They contradict the global batch or the number of resolutions.
    """
    if not job.method_spec.takes("cycle.batches"):
        return None, ""
    given, preset = job.cycle.batches, preset_of(job)
    if given != "auto":
        batches = per_resolution("cycle.batches", given, sides(job))
        if job.global_batch not in ("auto", batches[-1]):
            raise PlanError(
                f"cycle.batches={','.join(map(str, given))} says {batches[-1]} at {sides(job)[-1]} "
                f"px, global_batch={job.global_batch} another: give one of them"
            )
        return batches, "asked"
    fits = preset is not None and (
        sides(job) == preset.resolutions
        and max(preset.batches) <= data.train_samples // job.goal.least_steps
    )
    if preset is not None and fits and job.global_batch == "auto":
        return preset.batches, "published"
    return None, ""


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
    if job.method_spec.cycles:
        job = job.model_copy(update={"decay": "none"})
    update = chosen_optimizer(job, batch)
    return make_rule(job, batch, job.epochs, update, batch_norm=network.batch_norm)


def compose(
    job: Job, table: Table, choice: Choice, chosen: Prediction, progress: Progress
) -> Composed:
    """The plan's table from the choice for `plain`.

    Args:
        job: Resolved, its workers settled.
        table: What candidates were compared by.
        choice: What was chosen.
        chosen: Its record.
        progress: What a batch means for progress.

    Raises:
        PlanError: No pair of batches exists, stages do not add up, or a limit is missed.
    """
    schedule = schedule_of(job) if job.method_spec.cycles else None
    made = _served(job, table, choice, schedule) if job.method_spec.served else None
    if made is None:
        assert schedule is not None  # noqa: S101 - cyclic, as it has no server
        made = _cycled(job, table, choice, chosen, progress, schedule)
    other = table.evaluating(choice.row.mix, choice.row.epochs)
    check_limits(job, made.stages, other, choice.row.mix.hourly)
    scheduled: tuple[Reason, ...] = ()
    if schedule is not None:
        scheduled = (
            *cycle_reasons.preset(job, schedule, table.data),
            cycle_reasons.resolutions(job, schedule, table.data),
            cycle_reasons.stages(job, schedule),
            *cycle_reasons.dropouts(schedule),
        )
    else:
        scheduled = (reasons.resolution(max(sides(job)), table.data),)
    return Composed(
        made.stages,
        made.rule,
        made.server,
        (
            cycle_reasons.method(job),
            *scheduled,
            *made.reasons,
            *cycle_reasons.training_time(job, made.stages, other),
            *cycle_reasons.link(job),
        ),
    )


def _cycled(
    job: Job,
    table: Table,
    choice: Choice,
    chosen: Prediction,
    progress: Progress,
    schedule: Schedule,
) -> Composed:
    """All workers alike, resolution by resolution."""
    row = choice.row
    given, source = cycle_batches(job, table.data)
    batches = given or (row.batch,) * len(schedule.resolutions)
    levels = [
        _level(job, table, choice, progress, side, batch)
        for side, batch in zip(schedule.resolutions, batches, strict=True)
    ]
    rule = rate_rule(job, batches[-1], row.mix.members[0][0].profile.network)
    stages = laid_out(job, rule, levels, schedule)
    found = (
        explanations.local_batches(stages[-1], row.mix, row.totals),
        cycle_reasons.cycle_batches(batches, schedule.resolutions, source),
        *explanations.memory(row, chosen, job.goal),
        explanations.epoch_time(row, chosen),
        *cycle_reasons.rate(job, rule, batches[-1], schedule),
    )
    return Composed(stages, rule, None, found)


def _level(
    job: Job, table: Table, choice: Choice, progress: Progress, side: int, batch: int
) -> Level:
    mix = choice.row.mix
    totals = choice.row.totals if batch == choice.row.batch else split(mix, side, batch)
    if totals is None or batch > table.data.train_samples:
        raise PlanError(
            f"cycle.batches has {batch} at {side} px: {mix.workers} worker(s) need {mix.least} to "
            f"{table.data.train_samples} samples"
        )
    found = prediction(
        table, table.row(mix, side, totals, asked=True), progress, named=False, edge=False
    )
    kind, _ = mix.members[0]
    largest = max(largest_shares(mix, totals))
    return {
        "resolution": side,
        "local_batch_sizes": local_batches(mix, totals),
        "micro_batch_size": found.micro_batch_size,
        "predicted_epoch_seconds": found.epoch_seconds,
        "predicted_bytes": found.peak_bytes,
        **usual_times(job, kind.chord(mix.workers, side, largest), largest),
    }


def _served(job: Job, table: Table, choice: Choice, schedule: Schedule | None) -> Composed:
    """Two groups at each resolution."""
    row, samples = choice.row, table.data.train_samples
    mix, workers = row.mix, row.mix.workers
    kind = mix.members[0][0]
    levels = sides(job) if schedule is not None else (max(sides(job)),)
    plain = max(largest_shares(mix, row.totals))
    large, source = large_batches_of(
        job,
        levels,
        plain,
        samples / workers,
        lambda side: kind.memory.largest_batch(side, kind.limit, _MOST_SAMPLES, workers=workers),
    )
    pace = measured_pace(mix, job, large[-1])
    other = table.evaluating(mix, choice.row.epochs)
    found = served_in_time(
        job,
        pace,
        workers,
        sides=levels,
        large_batches=large,
        samples=samples,
        epochs=(job.epochs,) if schedule is None else schedule.epochs_of_levels,
        other_seconds=other,
    )
    rows: list[Level] = []
    for side, groups, batch in zip(levels, found.groups, large, strict=True):
        most = max(groups.local_batch_sizes)  # without large-batch workers the small one
        micro = kind.parts(workers, side, most)[0]
        if kind.parting is not None:  # the small batch may want parts too
            wanted = kind.parting.most_at_once(groups.local_batch_sizes, kind.least)
            micro = min(micro, wanted)
        rows.append(
            served_level(
                groups,
                found.rule,
                side,
                micro_batch=micro,
                ends=pace.spread(side, batch),
                # Each steps for itself, without buffers to exchange gradients.
                peak=kind.memory.predict(side, micro, workers=1, accumulates=micro < most),
            )
        )
    rule = rate_rule(job, large[-1], kind.profile.network)
    stages = laid_out(job, rule, rows, schedule)
    return Composed(
        stages,
        rule,
        found.rule,
        (
            *group_reasons.groups(
                job, found, pace, levels, samples=samples, large_source=source, measured=True
            ),
            *cycle_reasons.memory(stages, kind.limit),
            *cycle_reasons.round_time(job, stages),
            *cycle_reasons.rate(job, rule, large[-1], schedule),
        ),
    )


def check_limits(
    job: Job, stages: Sequence[Stage], other_seconds: float, hourly: float | None
) -> None:
    """Refuse rows that together miss a deadline or cost, as they may where `plain` keeps both.

    Args:
        job: Resolved.
        stages: The rows.
        other_seconds: Of the whole training, besides theirs.
        hourly: Price of all workers for an hour; `None`: not known.

    Raises:
        PlanError: They do.
    """
    high = other_seconds + sum(
        stage.epochs * stage.predicted_epoch_seconds.high
        for stage in stages
        if stage.predicted_epoch_seconds is not None
    )
    advice = "train fewer epochs"
    if job.method_spec.served:
        advice += ", or leave dual.extra_time to the plan"
    deadline, most = job.goal.deadline, job.goal.max_cost
    if deadline is not None and high > deadline:
        raise PlanError(
            f"method={job.method} may take {high:.4g} s, goal.deadline={deadline:g}: raise "
            f"goal.deadline, {advice}"
        )
    cost = 0.0 if hourly is None else hourly * high / SECONDS_PER_HOUR
    if most is not None and cost > most:
        raise PlanError(
            f"method={job.method} may cost {cost:.4g}, goal.max_cost={most:g}: raise "
            f"goal.max_cost, {advice}"
        )
