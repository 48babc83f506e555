"""Puts the choices together: profiles and a goal become a plan, with a reason for each choice.

Pure: no clock, no host, no random numbers, so the same input gives the same plan everywhere.

    batchwright plan PROFILE.json --explain

The way through the folder: `inputs` and `merging` check what is given, `kinds` fits the models,
`mixes` lists the clusters, `shares` divides a batch between unequal workers, `table` predicts every
candidate, `knees` finds where batch stops paying, `choice` applies limits and objective, `outlook`
makes the records, `explanations` and `reasons` say why. Methods with several rows or two groups of
workers go on from there: `composed`, over `resolution`, `rows`, `pacing`, `groups`, `dual_batch`;
`methods` compares them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from batchwright.algorithms.learning_rate import rule_for
from batchwright.errors import PlanError
from batchwright.planning import method_choice
from batchwright.planning.assembly import assemble, stage_of
from batchwright.planning.candidates.choice import (
    Choice,
    Progress,
    aimed,
    check_progress,
    choose,
    settled_goal,
)
from batchwright.planning.candidates.cluster_options import cluster_options_of
from batchwright.planning.candidates.knees import KneeFit, knee_fits_of, knee_record
from batchwright.planning.candidates.learnt import Learnt, learnt_of, why_unknown
from batchwright.planning.candidates.local_batches import local_batches
from batchwright.planning.candidates.optimizer import (
    Compared,
    chosen_optimizer,
    optimizer_reason,
    optimizers_of,
)
from batchwright.planning.candidates.prediction_records import (
    MOST_SHOWN,
    held_out,
    kept_rows,
    predictions,
)
from batchwright.planning.candidates.table import Row, Table
from batchwright.planning.candidates.worker_types import WorkerType, link_given, worker_types_of
from batchwright.planning.gradient_scaling import unmeasured_noise
from batchwright.planning.merging import merge_profiles
from batchwright.planning.methods.multi_stage import compose, searched
from batchwright.planning.methods.simulated import simulated, usual_times
from batchwright.planning.methods.update_rule import settle
from batchwright.planning.reasons import alternatives, cycle_reasons, explanations, reasons
from batchwright.planning.run_history import Experience, experience_of
from batchwright.planning.stated_times import plan_without_profile
from batchwright.planning.validation import (
    PLANNING_KEYS,
    check_bounds,
    check_counts,
    check_goal,
    check_profiles,
    least_local,
    measured_job,
    planning_job,
    precision_of,
)
from batchwright.records import (
    Estimate,
    HeldOut,
    Job,
    LearningRateRule,
    Plan,
    Prediction,
    Profile,
    Reason,
    RunSummary,
    Stage,
)
from batchwright.records.base import Method

__all__ = [
    "PLANNING_KEYS",
    "make_plan",
    "plan_to_measure",
    "plan_without_profile",
    "planning_job",
]


def make_plan(
    profiles: Profile | Sequence[Profile],
    job: Job | None = None,
    *,
    runs: Sequence[RunSummary] = (),
) -> Plan:
    """Decide how to train the profiles' workload.

    Args:
        profiles: What was measured; several are merged, one for each kind of worker.
        job: The job to plan for, if not the first profile's own; may differ in `PLANNING_KEYS`
            only. Its number of workers and global batch are kept where they are not `auto`; in the
            profile's own job the workers are open if several numbers of them were measured.
        runs: Finished runs of the same task, which tell epochs to a target and accuracy.

    Returns:
        A plan with predictions for what was considered and a reason for every choice.

    Raises:
        PlanError: The job is not the one measured, profiles contradict themselves or hold too
            little, or no candidate is within the limits.
        JobError: The warm-up asked for is longer than the training.
    """
    given = [profiles] if isinstance(profiles, Profile) else list(profiles)
    merged = merge_profiles(given)
    job = measured_job(merged, job)
    with_method = partial(_with_method, profiles, job, runs)
    if job.method == "auto":
        return method_choice.plan_of_best(job, merged[0], runs, with_method)
    if job.launcher.simulated:
        slowest = not job.method_spec.served
        given = [simulated(profile, job, slowest=slowest) for profile in given]
        merged = tuple(simulated(profile, job, slowest=slowest) for profile in merged)
    check_profiles(given, merged, job)
    check_goal(job)
    asked, job = job, searched(job, merged[0].data)
    told = experience_of(merged[0], job, runs)
    learnt = learnt_of(given, job, told.observed())
    compared = told.compared() or (learnt.compared(job) if learnt else ())
    job, recipe_reason = settle(job, told.tried(), compared)
    told = replace(told, job=job)
    kinds = worker_types_of(merged, job)
    mixes = cluster_options_of(kinds, job)
    progress = _progress(merged, told, compared, learnt)
    check_progress(job, progress)
    unknown, goal = why_unknown(given, job), settled_goal(job.goal, progress)
    if goal.objective == "knee" and job.goal.objective != "knee":
        unknown += " So goal.objective=auto goes by time alone, as knee does."
    progress, job = replace(progress, unknown=unknown), job.model_copy(update={"goal": goal})
    table = Table(
        job=job, data=merged[0].data, mixes=mixes, compared=compared, epochs=progress.trained
    )
    table.check_asked()
    rows, bends, choice = _chosen(table, progress)
    named = bool(job.goal.kinds) or len(kinds) > 1
    kept = kept_rows(rows, bends, choice)
    considered = predictions(table, rows, kept, choice, progress, named=named)
    chosen = considered[kept.index(choice.row)]
    batch = chosen.global_batch_size
    update = chosen_optimizer(job, batch, compared)
    job = job.model_copy(update={"epochs": choice.row.epochs})
    by_runs = {"scaling": job.scaling, "ags": job.ags, "epochs": job.epochs}
    settled = asked.model_copy(update={"workers": chosen.workers, **by_runs})
    check_counts(settled)
    by_epoch: tuple[Estimate | None, ...] = ()
    explained: tuple[Reason, ...] = (
        explanations.workers(job, choice, named=named, mixing=_mixing(kinds, job)),
        reasons.measured_precision(merged[0], precision_of(job)),
    )
    if not job.method_spec.same_steps:
        made = compose(settled, table, choice, chosen, progress)
        rule, stages, server = made.rule, made.stages, made.server
        explained += (*made.reasons, *recipe_reason, *optimizer_reason(settled, batch))
    else:
        tried = learnt.rate_scale(update) if learnt else 1.0
        rule, server = rule_for(job, batch, merged[0].data, merged[0].network, update, tried), None
        stages = (_stage(settled, chosen, choice.row, rule),)
        by_epoch = progress.by_epoch(batch, rule, merged[0].data.val_samples)
        least = least_local(merged[0].network)
        explained = (
            explained[0],
            reasons.resolution(
                stages[0].resolution, merged[0].data, alternatives.resolutions(choice.row, rows)
            ),
            explained[1],
            *reasons.method(settled),
            *_predicted(job, choice, chosen, stages[0], bends, progress),
            *recipe_reason,
            *optimizer_reason(settled, batch, compared),
            *reasons.learning_rate(
                job, rule, stages[0], update, explanations.rates_tried(job, batch, update, learnt)
            ),
            *explanations.progress_of(
                job, batch, progress, unmeasured_noise(stages, least, served=False)
            ),
            *cycle_reasons.link(settled),
        )
    if not job.launcher.simulated:
        explained += reasons.loading(merged[0], stages)
    plan = assemble(
        settled,
        merged[0].data,
        merged[0].network,
        rule,
        stages,
        server=server,
        update=update,
        considered=considered,
        epoch_accuracy=by_epoch,
        knees=tuple(
            knee_record(bend, job.goal.doubling_gain, named=named, ends=len(rows) <= MOST_SHOWN)
            for bend in bends
        ),
        held_out=_held_out(job, kinds),
        kinds=choice.row.mix.kinds if named else (),
        reasons=(
            *reasons.machine(merged),
            *explanations.extrapolations(choice.row.mix, stages),
            *explained,
        ),
    )
    told_of = runs or any(profile.trials for profile in given)
    if not job.method_spec.same_steps and told_of:
        return method_choice.beside_plain(plan, merged[0], runs, with_method)
    return plan


def _with_method(
    profiles: Profile | Sequence[Profile], job: Job, runs: Sequence[RunSummary], method: Method
) -> Plan:
    """The plan of the same job with another method."""
    return make_plan(profiles, job.model_copy(update={"method": method}), runs=runs)


def plan_to_measure(profile: Profile) -> Plan:
    """The plan by what is measured so far, which may be no trials yet.

    Where only trials tell whether a goal of accuracy can be met, the plan without it. `method=auto`
    begins with `plain`, which all methods are held against.

    Raises:
        PlanError: There is no such plan either.
    """
    job = planning_job(profile)
    if job.method == "auto":
        job = job.model_copy(update={"method": "plain"})
    try:
        return make_plan(profile, job)
    except PlanError:
        free: dict[str, object] = {"objective": "auto", "accuracy": None}
        if job.goal.target is not None:  # in fewer epochs, it may keep these
            free |= {"deadline": None, "max_cost": None}
        elif job.goal.objective != "accuracy":
            raise
        return make_plan(profile, job.model_copy(update={"goal": job.goal.model_copy(update=free)}))


def _chosen(table: Table, progress: Progress) -> tuple[list[Row], list[KneeFit], Choice]:
    """The candidates, their knees and the choice among them, as for `plain`.

    A cycle may keep a deadline that the highest resolution alone misses: `compose` judges that.
    """
    job, rows = table.job, aimed(table.job.goal, table.rows(), progress)
    if job.method_spec.served and job.workers == "auto":  # one worker makes no two groups
        rows = [row for row in rows if row.mix.workers > 1] or rows
    bends = knee_fits_of(rows, job.goal.doubling_gain, table.surplus)
    try:
        return rows, bends, choose(job, rows, bends, progress, table.error, table.trained)
    except PlanError:
        if not job.method_spec.cycles or job.goal.deadline is None:
            raise
    rows = [
        replace(row, misses=tuple(one for one in row.misses if one.limit != "goal.deadline"))
        for row in rows
    ]
    bends = knee_fits_of(rows, job.goal.doubling_gain, table.surplus)
    return rows, bends, choose(job, rows, bends, progress, table.error, table.trained)


def _predicted(
    job: Job,
    choice: Choice,
    chosen: Prediction,
    stage: Stage,
    bends: Sequence[KneeFit],
    progress: Progress,
) -> tuple[Reason, ...]:
    """Batch, memory and time."""
    row = choice.row
    bend = next((b for b in bends if b.mix is row.mix and b.resolution == row.resolution), None)
    return (
        explanations.global_batch(job, choice, bend, progress),
        explanations.local_batches(stage, row.mix, row.totals),
        *explanations.memory(row, chosen, job.goal),
        explanations.epoch_time(row, chosen),
        explanations.training_time(job, chosen),
    )


def _held_out(job: Job, kinds: Sequence[WorkerType]) -> tuple[HeldOut, ...]:
    """Of the first measured kind; nothing that is measured tells of simulated times."""
    if job.launcher.simulated:
        return ()
    return next((held_out(kind) for kind in kinds if not kind.stated), ())


def _stage(job: Job, chosen: Prediction, row: Row, rule: LearningRateRule) -> Stage:
    local = local_batches(row.mix, row.totals)
    check_bounds(job, local)
    kind, _ = row.mix.members[0]
    fixed = kind.fixed_samples(len(local), chosen.resolution, chosen.micro_batch_size)
    alone = {}
    if job.launcher.simulated:
        line = kind.chord(len(local), chosen.resolution, max(local))
        alone = usual_times(job, line, max(local))
    return stage_of(
        job,
        chosen.resolution,
        rule,
        local,
        fixed_samples=fixed,
        micro_batch_size=chosen.micro_batch_size,
        predicted_epoch_seconds=chosen.epoch_seconds,
        predicted_bytes=chosen.peak_bytes,
        **alone,
    )


def _progress(
    profiles: Sequence[Profile],
    told: Experience,
    compared: Sequence[Compared],
    learnt: Learnt | None,
) -> Progress:
    job = told.job
    noise = next((p.noise for p in profiles if p.noise and p.noise.noise_scale), None)
    return Progress(
        models={name: told.progress(noise, name) for name in optimizers_of(job)},
        optimizer=lambda batch: chosen_optimizer(job, batch, compared),
        base_batch=job.base_batch,
        planned=job.epochs,
        target=job.goal.accuracy,
        confidence=job.goal.confidence,
        least=_least_epochs(job),
        learnt=learnt,
    )


def _least_epochs(job: Job) -> int | None:
    """Fewest that the plan may choose: those of the warm-up; `None` where it chooses none.

    Cycles and two batch sizes are laid out over the epochs that are stated.
    """
    if job.goal.target is None or not job.method_spec.same_steps:
        return None
    return 1 if job.warmup_epochs == "auto" else max(1, ceil(job.warmup_epochs))


def _mixing(kinds: Sequence[WorkerType], job: Job) -> str:
    """Why kinds are not mixed, in a sentence; empty if they are."""
    if len(kinds) == 1 or link_given(job.link):
        return ""
    return (
        "Kinds are not mixed: they were not measured together, and link.latency and "
        "link.bandwidth are not given."
    )
