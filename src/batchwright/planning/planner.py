"""Puts the choices together: profiles and a goal become a plan, with a reason for each choice.

Pure: no clock, no host, no random numbers, so the same input gives the same plan everywhere.

    batchwright plan PROFILE.json --explain

The way through the folder: `validation` and `merging` check the profiles and the job,
`worker_types` fits the models, `cluster_options` lists the clusters, `local_batches` divides a
batch between unequal workers, `table` predicts every candidate, `knees` finds the batch beyond
which a larger one saves too little time, `choice` applies limits and objective,
`prediction_records` makes the records. `assembly` takes these steps one after the other. Methods
with several rows or two groups of workers go on from there, each with a file of its own in
`methods`, put into the plan by `layout`; `method_choice` compares all methods. A job without
profiles is planned in the same way, with the step times that the job itself states (`time_models`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchwright.errors import PlanError
from batchwright.planning import method_choice
from batchwright.planning.assembly.found import found_in
from batchwright.planning.assembly.known import known_of
from batchwright.planning.assembly.record import assembled, with_one_row, with_rows_of_method
from batchwright.planning.candidates.learnt import expected_of
from batchwright.planning.candidates.optimizer import chosen_optimizer, optimizer_reason
from batchwright.planning.candidates.preemptions import settled_checkpoints
from batchwright.planning.candidates.worker_types import link_given
from batchwright.planning.compiling import check_compilation
from batchwright.planning.learning_rates import rate_of
from batchwright.planning.merging import merge_profiles
from batchwright.planning.methods.batch_growth import growth_reasons, growth_rows
from batchwright.planning.methods.layout import (
    Layout,
    laid_out,
    lay_out,
    link_reason,
    method_reason,
)
from batchwright.planning.methods.simulated import simulated
from batchwright.planning.methods.time_models import stated_times
from batchwright.planning.resolution import resolution_reason, sides
from batchwright.planning.validation import (
    check_profiles,
    measured_job,
    planning_job,
    within_measured,
)
from batchwright.records import (
    DataFacts,
    Job,
    NetworkFacts,
    OptimizerName,
    Plan,
    Profile,
    RunSummary,
)
from batchwright.records.base import Method


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
    job = measured_job(merged, job)

    def with_method(method: Method) -> Plan:
        return make_plan(profiles, job.model_copy(update={"method": method}), runs=runs)

    if job.method == "auto":
        return method_choice.plan_of_best(job, merged[0], runs, with_method)
    if job.launcher.simulated:
        slowest = not job.method_spec.served
        given = [simulated(profile, job, slowest=slowest) for profile in given]
        merged = tuple(simulated(profile, job, slowest=slowest) for profile in merged)
    check_profiles(merged, job)
    check_compilation(merged[0], job)
    known = known_of(given, merged, job, runs)
    found = found_in(known, job)
    if job.method_spec.same_steps:
        plan = with_one_row(job, known, found)
    else:
        plan = with_rows_of_method(job, known, found)
        if runs or any(profile.trials for profile in given):
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
            job = job.model_copy(update=settled_checkpoints(job, times.losses))
        return assembled(replace(times, job=job), layout, layout.reasons)
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
    return assembled(times, layout, explained, update, growth=growth)


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
