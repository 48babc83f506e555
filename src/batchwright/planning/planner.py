"""Puts the choices together: profiles and a goal become a plan, with a reason for each choice.

Pure: no clock, no host, no random numbers, so the same input gives the same plan everywhere.

    batchwright plan PROFILE.json --explain

The way through the folder: `validation` and `merging` check what is given, `worker_types` fits the
models, `cluster_options` lists the clusters, `local_batches` divides a batch between unequal
workers, `table` predicts every candidate, `knees` finds where batch stops paying, `choice` applies
limits and objective, `prediction_records` makes the records. Methods with several rows or two
groups of workers go on from there, each with a file of its own in `methods`, put into the plan by
`layout`; `method_choice` compares them all. A job without profiles takes the same way with
times that it states (`time_models`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, inf
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
    batch_reason,
    choose,
    other_resolutions,
    settled_goal,
    workers_reason,
)
from batchwright.planning.candidates.cluster_options import ClusterOption, cluster_options_of
from batchwright.planning.candidates.knees import KneeFit, knee_fits_of, knee_record
from batchwright.planning.candidates.learnt import Learnt, expected_of, learnt_of, why_unknown
from batchwright.planning.candidates.optimizer import (
    Compared,
    chosen_optimizer,
    extra_seconds,
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
from batchwright.planning.candidates.preemptions import Offer, spot_reason
from batchwright.planning.candidates.progress import Progress, fewest_epochs, progress_reasons
from batchwright.planning.candidates.table import Row, Table
from batchwright.planning.candidates.worker_types import WorkerType, link_given, worker_types_of
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
    threads_of,
)
from batchwright.planning.merging import merge_profiles
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
from batchwright.planning.resolution import resolution_reason, sides
from batchwright.planning.run_history import Experience, experience_of
from batchwright.planning.validation import (
    check_profiles,
    least_local,
    measured_job,
    planning_job,
    precision_of,
)
from batchwright.records import (
    DataFacts,
    Estimate,
    HeldOut,
    Job,
    NetworkFacts,
    OptimizerName,
    Plan,
    Profile,
    Reason,
    RunSummary,
)
from batchwright.records.base import Method
from batchwright.records.job import check_job


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
    told = experience_of(merged[0], job, runs)
    learnt = learnt_of(given, job, told.observed())
    longer = _longer_with_muon(worker_types_of(merged, job), job)
    compared = (*told.compared(), *(learnt.compared(job, longer) if learnt else ()))
    if learnt and told.tells_accuracy and not learnt.longest:
        learnt = None  # without trials, runs' curves tell more of accuracy than a law of their ends
    job, recipe_reason = settle(job, told.tried(), compared)
    told = replace(told, job=job)
    kinds = worker_types_of(merged, job)
    clusters = cluster_options_of(kinds, job)
    progress = _progress(merged, told, compared, learnt)
    job = job.model_copy(update={"goal": settled_goal(job.goal, progress)})
    table = Table(job=job, data=data, clusters=clusters, compared=compared, epochs=progress.trained)
    table.check_asked()
    rows, knees, choice = _chosen(table, progress)
    unknown = why_unknown(given, job, learnt) + choice.objective.untold
    progress = replace(choice.objective.progress, unknown=unknown)
    named = bool(job.goal.kinds) or len(kinds) > 1
    kept = kept_rows(rows, knees, choice)
    considered = predictions(table, rows, kept, choice, progress, named=named)
    chosen = considered[kept.index(choice.row)]
    batch = chosen.global_batch_size
    update = chosen_optimizer(job, batch, compared)
    row = choice.row
    more = range(row.epochs + 1, scheduled_epochs(job, row.epochs) + 1)  # the schedule may take
    scheduled = row.epochs + bisect_left(  # as many of them as the limits allow
        more, True, key=lambda epochs: bool(table.trained(row, epochs).misses)
    )
    job = job.model_copy(update={"epochs": row.epochs})
    by_runs: dict[str, Any] = {"scaling": job.scaling, "ags": job.ags, "epochs": scheduled}
    losses = table.losses(choice.row.cluster)
    if losses.mean < inf and job.checkpoint_seconds == "auto":
        by_runs["checkpoint_seconds"] = losses.interval
    settled = asked.model_copy(update={"workers": chosen.workers, **by_runs})
    check_job(settled)
    times = Measured(settled, table, choice, chosen, progress)
    by_epoch: tuple[Estimate | None, ...] = ()
    apart = len(kinds) > 1 and not link_given(job.link)
    threads = None if job.launcher.simulated else _threads(row.cluster)
    workers = workers_reason(job, choice, threads, named=named, apart=apart)
    measured = (
        measured_precision(merged[0], precision_of(job)),
        *recomputation(merged[0]),
        *compilation(merged[0], job),
        *graphs(merged),
    )
    why_update = (*recipe_reason, *optimizer_reason(settled, batch, compared))
    if not job.method_spec.same_steps:
        made = lay_out(settled, times)
        explained = (workers, *measured, *made.reasons, *why_update)
    else:
        rule, rates = rate_of(settled, batch, data, network, update, learnt)
        made = Layout(laid_out(settled, rule, [times.only_level()]), rule)
        by_epoch = progress.by_epoch(
            batch, scheduled, rule, averaged=averaged_epochs(job) is not None
        )
        row, stage = choice.row, made.stages[0]
        of_batch, of_time = times.batch_reasons(stage)
        knee = next(
            (b for b in knees if (b.cluster, b.resolution) == (row.cluster, row.resolution)), None
        )
        in_training = unmeasured_noise(made.stages, least_local(network), served=False)
        explained = (
            workers,
            resolution_reason(stage.resolution, data, other_resolutions(row, rows)),
            *measured,
            *method_reason(settled),
            batch_reason(job, choice, knee),
            *of_batch,
            *of_time,
            training_time(job, chosen),
            *(losses.reasons(chosen.train_seconds) if chosen.train_seconds else ()),
            *why_update,
            *rates,
            *progress_reasons(progress, batch, in_training),
            *schedule_reasons(choice.row.epochs, scheduled),
            *link_reason(settled),
        )
    explained = (*explained, *_spot_reasons(table, choice.row, kinds))
    virtual = job.launcher.simulated  # nothing that is measured tells of simulated times
    plan = _assembled(
        times,
        made,
        (
            *machine(merged, choice.row.cluster.workers),
            *extrapolations(choice.row.cluster, made.stages),
            *explained,
            *(() if virtual else loading(merged[0], made.stages)),
        ),
        update,
        considered=considered,
        max_epochs=asked.epochs if scheduled < asked.epochs else None,
        target_epochs=choice.row.epochs if choice.row.epochs < scheduled else None,
        epoch_accuracy=by_epoch,
        knees=tuple(
            knee_record(knee, job.goal.doubling_gain, named=named, ends=len(rows) <= MAX_SHOWN)
            for knee in knees
        ),
        held_out=() if virtual else _held_out(kinds),
        kinds=choice.row.cluster.kinds if named else (),
        threads=threads,
        cores=threads and fewer_cores(merged[0], made.stages, threads),
    )
    told_of = runs or any(profile.trials for profile in given)
    if not job.method_spec.same_steps and told_of:
        return method_choice.beside_plain(plan, merged[0], runs, with_method)
    return plan


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
    """
    if job.method == "auto":  # nothing tells of another
        job = job.model_copy(update={"method": "plain"})
    times = stated_times(job, data, network, local_batch_sizes)
    job, batch = times.job, times.batch
    expected = expected_of(job, data)
    compared = expected.compared(job) if expected else ()
    why_update = optimizer_reason(job, batch, compared)
    if not job.method_spec.same_steps:
        made = lay_out(job, times, why_update)
        return _assembled(times, made, made.reasons)
    update = chosen_optimizer(job, batch, compared)
    rule, rates = rate_of(job, batch, data, network, update)
    made = Layout(laid_out(job, rule, [times.only_level()]), rule)
    explained = (
        *times.batch_reasons(made.stages[0])[0],
        resolution_reason(max(sides(job)), data),
        *method_reason(job),
        *why_update,
        *rates,
        *link_reason(job),
    )
    return _assembled(times, made, explained, update)


def plan_to_measure(profile: Profile, optimizer: OptimizerName | None = None) -> Plan:
    """The plan by what is measured so far, which may be no trials yet.

    ``optimizer`` stands in for the job's own.

    Where only trials tell whether a goal of accuracy can be met, the plan without it. `method=auto`
    begins with `plain`, which all methods are held against. Prices of a file are not known yet.

    Raises:
        PlanError: There is no such plan either.
    """
    job = planning_job(profile)
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


def _threads(cluster: ClusterOption) -> int | None:
    """Compute threads of each worker, as measured; `None` where not all had as many."""
    found = {threads_of(kind.profile.cluster, count) for kind, count in cluster.members}
    return found.pop() if len(found) == 1 else None


def _held_out(kinds: Sequence[WorkerType]) -> tuple[HeldOut, ...]:
    """Steps to check predictions by: workers that were measured together go at the slowest pace."""
    measured = [kind for kind in kinds if not kind.stated]
    together = [kind for kind in measured if kind.together]
    slowest = max(together, key=lambda kind: kind.profile.kinds[0].pace, default=None)
    return held_out(slowest or measured[0]) if measured else ()


def _spot_reasons(table: Table, row: Row, kinds: Sequence[WorkerType]) -> tuple[Reason, ...]:
    """Whether workers that may be taken away pay, where the same ones are to be had otherwise."""
    if len(row.cluster.members) > 1:
        return ()
    ((mine, count),) = row.cluster.members
    work = row.epochs * row.epoch_seconds + table.other_seconds(row.cluster, row.epochs)

    def offer(kind: WorkerType) -> Offer:
        cluster = ClusterOption(((kind, count),))
        return Offer(str(cluster), cluster.hourly or 0.0, table.losses(cluster))

    return tuple(
        spot_reason(offer(mine), offer(other), work, count)
        for other in kinds
        if mine.price
        and other.price
        and other.profile is mine.profile
        and other.speed == mine.speed
        and bool(other.preemptions) != bool(mine.preemptions)
    )


def _chosen(table: Table, progress: Progress) -> tuple[list[Row], list[KneeFit], Choice]:
    """The candidates, their knees and the choice among them, as for `plain`.

    A cycle may keep a deadline that the highest resolution alone misses: `lay_out` judges that.
    """
    job = table.job
    rows = [aimed(job.goal, row, progress, table.trained) for row in table.rows()]

    def chosen(rows: list[Row]) -> tuple[list[Row], list[KneeFit], Choice]:
        knees = knee_fits_of(rows, job.goal.doubling_gain, table.surplus)
        return (
            rows,
            knees,
            choose(job, rows, knees, progress, table.error, table.trained, table.far_off),
        )

    if job.method_spec.served and job.workers == "auto":  # one worker makes no two groups
        rows = [row for row in rows if row.cluster.workers > 1] or rows
    try:
        return chosen(rows)
    except PlanError:
        if not job.method_spec.cycles or job.goal.deadline is None:
            raise
    limits = [tuple(one for one in row.misses if one.limit != "goal.deadline") for row in rows]
    return chosen([replace(row, misses=left) for row, left in zip(rows, limits, strict=True)])


def _longer_with_muon(kinds: Sequence[WorkerType], job: Job) -> Callable[[int], float]:
    """How many times as long as with SGD a step with Muon takes, by the global batch.

    With as many workers as are asked for or, if these were not measured, the most that were; of
    several kinds of workers, where it is the most.
    """
    side = max(sides(job))

    def times(kind: WorkerType, batch: int) -> float:
        asked = job.workers
        workers = asked if isinstance(asked, int) and asked in kind.measured else kind.measured[-1]
        extra = extra_seconds(job, kind.profile, "muon", workers, kind.speed)
        if extra is None:
            return 1.0
        local = max(kind.least, ceil(batch / workers))
        return 1.0 + extra.value / kind.seconds(workers, side, local)

    return lambda batch: max(times(kind, batch) for kind in kinds)


def _assembled(
    times: Measured | Stated,
    made: Layout,
    explained: Sequence[Reason],
    update: OptimizerName | None = None,
    **predicted: Any,
) -> Plan:
    """The plan; ``predicted`` are its fields of that kind, and ``update`` what runs say, if any.

    Raises:
        JobError: Bounds of gradient scaling contradict each other.
        PlanError: A batch cannot be cut into the parts that it takes.
    """
    job, stages, rule, server = times.job, made.stages, made.rule, made.server
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
        precision=precision_of(job),
        learning_rate=rule,
        merge="parameter server" if server else "sample-weighted all-reduce",
        server=server,
        stages=stages,
        reasons=(
            *explained,
            *scaling_reasons(job, stages, least, rule, update),
            *averaging_reasons(job),
        ),
        **predicted,
    )


def _progress(
    profiles: Sequence[Profile],
    told: Experience,
    compared: Sequence[Compared],
    learnt: Learnt | None,
) -> Progress:
    job, least = told.job, None
    noise = next((p.noise for p in profiles if p.noise and p.noise.noise_scale), None)
    # Cycles and two batch sizes are laid out over the epochs that are stated.
    if job.goal.target is not None and job.method_spec.same_steps:
        least = fewest_epochs(job)
    return Progress(
        models={name: told.progress(noise, name) for name in optimizers_of(job)},
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
