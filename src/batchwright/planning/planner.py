"""Puts the choices together: profiles and a goal become a plan, with a reason for each choice.

Pure: no clock, no host, no random numbers, so the same input gives the same plan everywhere.

    batchwright plan PROFILE.json --explain

The way through the folder: `validation` and `merging` check the profiles and the job,
`worker_types` fits the models, `cluster_options` lists the clusters, `local_batches` divides a
batch between unequal workers, `table` predicts every candidate, `knees` finds the batch beyond
which a larger one saves too little time, `choice` applies limits and objective,
`prediction_records` makes the records. Methods with several rows or two groups of workers go on
from there, each with a file of its own in `methods`, put into the plan by `layout`;
`method_choice` compares all methods. A job without profiles is planned in the same way, with the
step times that the job itself states (`time_models`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from batchwright.errors import PlanError
from batchwright.planning import method_choice
from batchwright.planning.averaging import (
    averaged_epochs,
    averaging_reasons,
    schedule_reasons,
    scheduled_epochs,
)
from batchwright.planning.candidates.choice import (
    Choice,
    aimed,
    asked_for,
    batch_reason,
    choose,
    other_resolutions,
    settled_goal,
    workers_reason,
)
from batchwright.planning.candidates.cluster_options import (
    cluster_options_of,
    may_mix,
)
from batchwright.planning.candidates.knees import KneeFit, knee_fits_of, knee_record
from batchwright.planning.candidates.learnt import (
    LearningCurve,
    expected_of,
    learnt_of,
    loss_links_of,
    why_unknown,
)
from batchwright.planning.candidates.optimizer import (
    Compared,
    chosen_optimizer,
    longer_with_muon,
    optimizer_reason,
    optimizers_of,
)
from batchwright.planning.candidates.prediction_records import (
    MAX_SHOWN,
    extrapolations,
    held_out,
    kept_rows,
    predictions,
    training_time,
)
from batchwright.planning.candidates.preemptions import Losses, spot_reasons
from batchwright.planning.candidates.progress import Progress, fewest_epochs, progress_reasons
from batchwright.planning.candidates.table import Row, Table
from batchwright.planning.candidates.worker_types import link_given, worker_types_of
from batchwright.planning.chosen import Chosen
from batchwright.planning.compiling import check_compilation, compilation
from batchwright.planning.gradient_scaling import ags_rule, check_parts, unmeasured_noise
from batchwright.planning.gradient_scaling import reasons as scaling_reasons
from batchwright.planning.learning_rates import rate_of
from batchwright.planning.measurements import (
    fewer_cores,
    graphs,
    loading,
    machine,
    measured_precision,
    recomputation,
    threads_of_all,
)
from batchwright.planning.merging import merge_profiles
from batchwright.planning.methods.batch_growth import growth_reasons, growth_rows
from batchwright.planning.methods.layout import (
    Layout,
    laid_out,
    lay_out,
    link_reason,
    method_reason,
    searched,
)
from batchwright.planning.methods.simulated import simulated
from batchwright.planning.methods.time_models import Measured, Stated, stated_times
from batchwright.planning.methods.update_rule import settle
from batchwright.planning.refusals import OF_LENGTH
from batchwright.planning.resolution import resolution_reason, sides
from batchwright.planning.run_history import Experience, experience_of
from batchwright.planning.validation import (
    check_profiles,
    least_local,
    measured_job,
    planning_job,
    precision_of,
    within_measured,
)
from batchwright.records import (
    DataFacts,
    Estimate,
    Job,
    NetworkFacts,
    OptimizerName,
    Plan,
    Profile,
    Reason,
    RunSummary,
    Stage,
)
from batchwright.records.base import Method
from batchwright.records.job import as_written, check_job
from batchwright.records.text.formatting import counted


def make_plan(
    profiles: Profile | Sequence[Profile],
    job: Job | None = None,
    *,
    runs: Sequence[RunSummary] = (),
) -> Plan:
    """Decide how to train the profiles' workload.

    Args:
        profiles: What was measured; several are merged, one for each kind of worker.
        job: The job to plan for; unset: the first profile's own. It may differ from that one in
            `PLANNING_KEYS` only. A number of workers or a global batch that is not `auto` is
            kept. In the profile's own job the number of workers is open if several were measured.
        runs: Finished runs of the same task, from which accuracy and the epochs to a target are
            predicted.

    Returns:
        A plan with predictions for what was considered and a reason for every choice.

    Raises:
        PlanError: The job is not the one measured, profiles contradict themselves or hold too
            little, or no candidate is within the limits.
    """
    given = [profiles] if isinstance(profiles, Profile) else list(profiles)
    merged = merge_profiles(given)
    job = asked = measured_job(merged, job)

    def with_method(method: Method) -> Plan:
        return make_plan(profiles, asked.model_copy(update={"method": method}), runs=runs)

    if job.method == "auto":
        return method_choice.plan_of_best(job, merged[0], runs, with_method)
    if job.launcher.simulated:
        slowest = not job.method_spec.served
        given = [simulated(profile, job, slowest=slowest) for profile in given]
        merged = tuple(simulated(profile, job, slowest=slowest) for profile in merged)
    check_profiles(given, merged, job)
    check_compilation(merged[0], job)
    data, network = merged[0].data, merged[0].network
    job = searched(job, data)
    experience = experience_of(merged[0], job, runs)
    observed = experience.observed()
    learnt, links = learnt_of(given, job, observed), loss_links_of(given, job, observed)
    longer = longer_with_muon(worker_types_of(merged, job), job)
    compared = (*experience.compared(), *(learnt.compared(job, longer) if learnt else ()))
    if learnt and experience.tells_accuracy and not learnt.longest:
        # Without trials the accuracy after each epoch of the runs says more than the learning
        # curve, which sees the end of each run alone.
        learnt = None
    job, recipe_reason = settle(job, experience.tried(), compared)
    experience = replace(experience, job=job)
    kinds = worker_types_of(merged, job)
    clusters = cluster_options_of(kinds, job)
    progress = replace(_progress(merged, experience, compared, learnt), loss_links=links)
    job = job.model_copy(update={"goal": settled_goal(job.goal, progress)})
    table = Table(job=job, data=data, clusters=clusters, compared=compared, epochs=progress.trained)
    table.check_asked()
    rows, knees, choice = _chosen(table, progress)
    unknown = why_unknown(given, job, learnt) + choice.objective.without_accuracy
    progress = replace(choice.objective.progress, unknown=unknown)
    named = bool(job.goal.kinds) or len(kinds) > 1
    taken = [kind.profile for kind, _ in choice.row.cluster.members]
    own = next(profile for profile in merged if any(profile is one for one in taken))
    kept = kept_rows(rows, knees, choice)
    considered = predictions(table, rows, kept, choice, progress, named=named)
    chosen = considered[kept.index(choice.row)]
    batch = chosen.global_batch_size
    update = chosen_optimizer(job, batch, compared)
    row = choice.row
    # The schedule may be longer than the training: as long as the limits allow.
    longer_schedules = range(row.epochs + 1, scheduled_epochs(job, row.epochs) + 1)
    scheduled = row.epochs + bisect_left(
        longer_schedules, True, key=lambda epochs: bool(table.trained(row, epochs).misses)
    )
    job = job.model_copy(update={"epochs": row.epochs})
    decided: dict[str, Any] = {"scaling": job.scaling, "ags": job.ags, "epochs": scheduled}
    losses = table.losses(row.cluster)
    decided |= _checkpoints(job, losses)
    settled = asked.model_copy(update={"workers": chosen.workers, **decided})
    check_job(settled)
    times = Measured(settled, table, choice, chosen, progress)
    by_epoch: tuple[Estimate | None, ...] = ()
    end_loss: Estimate | None = None
    growth: tuple[Stage, ...] = ()
    apart = len(kinds) > 1 and not may_mix(kinds, job)
    threads = None if job.launcher.simulated else threads_of_all(row.cluster)
    workers = workers_reason(job, choice, threads, named=named, apart=apart)
    measured = (
        measured_precision(own, precision_of(job)),
        *recomputation(own),
        *compilation(own, job),
        *graphs(merged),
    )
    why_update = (*recipe_reason, *optimizer_reason(settled, batch, compared))
    if not job.method_spec.same_steps:
        layout = lay_out(settled, times)
        explained = (workers, *measured, *layout.reasons, *why_update)
    else:
        open_scaling = asked.scaling == "auto"
        rule, rates = rate_of(settled, batch, data, network, update, learnt, by_runs=open_scaling)
        layout = Layout(laid_out(settled, rule, [times.only_level()]), rule)
        growth = growth_rows(times, layout.stages[0])
        end_loss = progress.end_loss(batch)
        by_epoch = progress.by_epoch(
            batch, scheduled, rule, averaged=averaged_epochs(job) is not None
        )
        stage = layout.stages[0]
        of_batch, of_time = times.batch_reasons(stage)
        knee = next(
            (b for b in knees if (b.cluster, b.resolution) == (row.cluster, row.resolution)), None
        )
        in_training = unmeasured_noise(layout.stages, least_local(network), served=False)
        explained = (
            workers,
            resolution_reason(stage.resolution, data, other_resolutions(row, rows)),
            *measured,
            *method_reason(settled),
            batch_reason(job, choice, knee, named=named),
            *of_batch,
            *of_time,
            training_time(job, chosen),
            *(losses.reasons(chosen.train_seconds) if chosen.train_seconds else ()),
            *why_update,
            *rates,
            *growth_reasons(job, growth, update),
            *progress_reasons(progress, batch, in_training),
            *schedule_reasons(row.epochs, scheduled),
            *link_reason(settled),
        )
    work = table.work(row, row.epochs)
    explained = (*explained, *spot_reasons(table.job, row.cluster, kinds, work))
    virtual = job.launcher.simulated  # loading and held-out steps are of this machine's own time
    plan = _assembled(
        times,
        layout,
        (
            *machine(merged, row.cluster.workers),
            *extrapolations(row.cluster, layout.stages),
            *explained,
            *(() if virtual else loading(own, layout.stages)),
        ),
        update,
        ags_by_runs=asked.ags.mode == "auto",
        growth=growth,
        considered=considered,
        max_epochs=asked.epochs if scheduled < asked.epochs else None,
        target_epochs=row.epochs if row.epochs < scheduled else None,
        epoch_accuracy=by_epoch,
        end_loss=end_loss,
        knees=tuple(
            knee_record(knee, job.goal.doubling_gain, named=named, ends=len(rows) <= MAX_SHOWN)
            for knee in knees
        ),
        held_out=() if virtual else held_out(kinds),
        kinds=row.cluster.kinds if named else (),
        threads=threads,
        cores=threads and fewer_cores(own, layout.stages, threads),
    )
    accuracy_seen = runs or any(profile.trials for profile in given)
    if not job.method_spec.same_steps and accuracy_seen:
        return method_choice.beside_plain(plan, merged[0], runs, with_method)
    return plan


def plan_without_profile(job: Job, data: DataFacts, network: NetworkFacts) -> Plan:
    """A plan that trains as the job asks, without any measurement; it predicts nothing.

    What the job leaves open is assumed: one worker, float32, the base batch or, where the data is
    too small for it, the largest batch that leaves ``goal.least_steps`` steps per epoch.

    A method with two groups of workers needs the seconds of a step. A job for a virtual cluster
    states them in ``virtual.sample_seconds`` and ``virtual.step_seconds``, and the plan predicts
    the rounds from these.

    Args:
        job: What to train.
        data: The data set.
        network: The network.

    Raises:
        PlanError: Batches, workers and data do not fit together, or a limit is missed.
    """
    if job.method == "auto":  # methods are compared by predictions, and there are none
        job = job.model_copy(update={"method": "plain"})
    times = stated_times(job, data, network)
    job, batch = times.job, times.batch
    expected = expected_of(job, data)
    compared = expected.compared(job) if expected else ()
    why_update = optimizer_reason(job, batch, compared)
    if not job.method_spec.same_steps:
        layout = lay_out(job, times, why_update)
        if layout.server is not None:  # without one, no time is known, nor what is lost of it
            job = job.model_copy(update=_checkpoints(job, times.losses))
        return _assembled(replace(times, job=job), layout, layout.reasons)
    update = chosen_optimizer(job, batch, compared)
    rule, rates = rate_of(job, batch, data, network, update)
    layout = Layout(laid_out(job, rule, [times.only_level()]), rule)
    growth = growth_rows(times, layout.stages[0])
    explained = (
        *times.batch_reasons(layout.stages[0])[0],
        resolution_reason(max(sides(job)), data),
        *method_reason(job),
        *why_update,
        *rates,
        *growth_reasons(job, growth, update),
        *link_reason(job),
    )
    return _assembled(times, layout, explained, update, growth=growth)


def plan_to_measure(profile: Profile, optimizer: OptimizerName | None = None) -> Plan:
    """The plan that the measurements so far allow, in the middle of a probe.

    An accuracy to reach, or to maximize, is left out where it cannot be judged before the trials.
    `method=auto` is planned as `plain`, with which all other methods are compared. Prices that are
    in a file have not been read yet, so costs are left out.

    Args:
        profile: What was measured so far; it may have no trials yet.
        optimizer: The optimizer to plan with; unset: the job's own.

    Raises:
        PlanError: There is no such plan either.
    """
    job = planning_job(profile)
    if not link_given(job.link):
        job = within_measured(job, profile)
    if optimizer is not None:
        job = job.model_copy(update={"optimizer": optimizer})
    if job.goal.prices is not None:
        job = job.model_copy(update={"goal": job.goal.without_cost()})
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


def _checkpoints(job: Job, losses: Losses) -> dict[str, float]:
    """The interval between checkpoints, where workers are taken away and the job leaves it open."""
    if losses.mean == inf or job.checkpoint_seconds != "auto":
        return {}
    return {"checkpoint_seconds": losses.interval}


def _chosen(table: Table, progress: Progress) -> tuple[list[Row], list[KneeFit], Choice]:
    """The candidates, their knees and the choice among them, made as for `plain`."""
    job = table.job
    rows = [aimed(table, row, progress) for row in table.rows()]
    free = job.workers == "auto" and not job.launcher.one_worker
    if job.method_spec.served and free:  # two groups take two workers or more
        rows = [row for row in rows if row.cluster.workers > 1] or rows
    if not job.method_spec.same_steps:
        rows = _without_limits_of_plain(job, rows)
    knees = knee_fits_of(rows, job.goal.doubling_gain, table.surplus)
    choice = choose(table, rows, knees, progress)
    return rows, knees, choice


def _without_limits_of_plain(job: Job, rows: Sequence[Row]) -> list[Row]:
    """The candidates of a method with other steps, without the limits that none of them keeps.

    Such a method may keep a deadline or a cost that `plain` misses: low resolutions are quicker,
    and workers of a server exchange less. So the deadline, the cost or both are left out, and
    `lay_out` checks them.
    """
    top = max(row.resolution for row in rows)
    _, asked = asked_for(job, [row for row in rows if row.resolution == top])
    missed = [{miss.limit for miss in row.misses} for row in asked]
    left_out = next(
        (
            limits
            for limits in (set[str](), {"goal.deadline"}, {"goal.max_cost"})
            if any(one <= limits for one in missed)
        ),
        OF_LENGTH,
    )
    return [
        replace(row, misses=tuple(miss for miss in row.misses if miss.limit not in left_out))
        for row in rows
    ]


def _assembled(
    times: Measured | Stated,
    layout: Layout,
    explained: Sequence[Reason],
    update: OptimizerName | None = None,
    *,
    ags_by_runs: bool = False,
    **predicted: Any,
) -> Plan:
    """The plan as a record, with the reasons that follow from its stages.

    Args:
        times: Step times, and the job as it was settled.
        layout: Stages and learning rate.
        explained: Reasons that come first.
        update: The optimizer; unset: the job's own for the largest batch.
        ags_by_runs: Whether runs decided for the job's `ags.mode`, if it is not `auto`.
        predicted: Further fields of the plan: predictions.

    Raises:
        JobError: Bounds of gradient scaling contradict each other.
        PlanError: A batch cannot be cut into the parts that it takes.
    """
    job, stages, rule, server = times.job, layout.stages, layout.rule, layout.server
    least = least_local(times.network)
    check_parts(job, stages, least)
    if update is None:
        update = chosen_optimizer(job, max(stage.global_batch_size for stage in stages))
    assert job.method != "auto"  # noqa: S101 - settled before
    return Plan(
        job=job,
        data=times.data,
        network=times.network,
        method=job.method,
        update=update,
        ags=ags_rule(job),
        average_epochs=averaged_epochs(job),
        judged_from=sum(row.epochs for row in stages[:-1]),
        precision=precision_of(job),
        learning_rate=rule,
        merge="parameter server" if server else "sample-weighted all-reduce",
        server=server,
        stages=stages,
        reasons=(
            *explained,
            *scaling_reasons(job, stages, least, rule, update, by_runs=ags_by_runs),
            *averaging_reasons(job),
            *_normalization_reasons(job),
            *_patience_reasons(job, stages),
        ),
        **predicted,
    )


def _normalization_reasons(job: Job) -> tuple[Reason, ...]:
    """What images are normalized by; empty where it is open, so by the training images' own."""
    if job.normalize == "auto":
        return ()
    why = "Mean and standard deviation of the training images, as asked."
    if job.normalize != "data":
        why = (
            "Means of red, green and blue, then standard deviations: those that the weights at the "
            "start were trained with, unless the job was given others. normalize=data takes those "
            "of the training images."
        )
    return (Chosen(as_written(job.normalize), why, "asked").reason("normalization"),)


def _patience_reasons(job: Job, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """When training may end before its last epoch for want of progress; empty if it never does."""
    if job.goal.patience is None:
        return ()
    times, only = counted(job.goal.patience, "evaluation"), ""
    if len(stages) > 1:
        only = "Only those of the last row count, as accuracy moves with resolution and rate. "
    why = (
        "Training ends once so many in a row have brought no held-out accuracy above the best one "
        f"before. {only}When that will be is not predicted: the plan's times and costs are of all "
        "epochs, so they are upper bounds."
    )
    return (Chosen(times, why, "asked").reason("patience"),)


def _progress(
    profiles: Sequence[Profile],
    experience: Experience,
    compared: Sequence[Compared],
    learnt: LearningCurve | None,
) -> Progress:
    job, least = experience.job, None
    noise = next((p.noise for p in profiles if p.noise and p.noise.noise_scale), None)
    # Cycles and two batch sizes are laid out over the epochs that are stated.
    if job.goal.target is not None and job.method_spec.same_steps:
        least = fewest_epochs(job)
    return Progress(
        models={name: experience.progress(noise, name) for name in optimizers_of(job)},
        optimizer=lambda batch: chosen_optimizer(job, batch, compared),
        base_batch=job.base_batch,
        planned=job.epochs,
        target=job.goal.accuracy,
        confidence=job.goal.confidence,
        least=least,
        learnt=learnt,
        guessing=profiles[0].data.guessing,
        judged=not any(profile.without_accuracy for profile in profiles),
    )
