"""Plans again with a run's own epoch times, where they missed the prediction by too much.

* `refit`, for a finished run: its epochs are added to the profile as visits to their step, since
  the profile may have been wrong at that batch. If the new fit does not match them, because the
  rest of the profile contradicts it, all measured steps are scaled as in `at_level_of`; the fit
  nearer to the epochs counts.
* `at_level_of`, for a run that goes on: all measured steps are scaled to the machine's present
  speed, so that predictions hold for every batch that the run could change to.
* `for_other_workers`: an engine goes on with another number of workers, and the rest of the run is
  planned for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median, quantiles

from batchwright.algorithms.splicing import spliced
from batchwright.errors import PlanError
from batchwright.planning.planner import make_plan
from batchwright.prediction.step_time import StepTimeModel, fit_step_time
from batchwright.records import (
    EpochRecord,
    Estimate,
    Job,
    Plan,
    Profile,
    Reason,
    Refit,
    RunSummary,
    Stage,
    StepTime,
)
from batchwright.records.text.formatting import counted
from batchwright.workflows.check_plan import open_again, with_points
from batchwright.workflows.drift import EpochTime, time_of

MIN_CHANGE = 1.25
"""Ratio of two global batches below which a change is not worthwhile."""

MAX_CHANGE = 4
"""Largest ratio of two global batches in one change: the rate jumps with it, without a warm-up."""


@dataclass(frozen=True)
class Level:
    """The machine's present speed, relative to that during the probe.

    Attributes:
        computing: Present compute time of a step over the measured one.
        exchange_seconds: Additional seconds per step of the exchange that the backward pass does
            not hide; negative if the exchange is faster.
        profile: The profile with its step times changed accordingly.
    """

    computing: float
    exchange_seconds: float
    profile: Profile


def supported(plan: Plan) -> bool:
    """Whether the plan's epochs consist of steps like those of the profile."""
    return plan.server is None and not plan.job.launcher.simulated and len(plan.kinds) < 2


def may_change(plan: Plan) -> bool:
    """Whether a run of this plan could change its stages.

    Cycles are laid out as a whole, a parameter server has two batches that depend on each other,
    and a batch that grows changes by itself.
    """
    sides = {stage.resolution for stage in plan.stages}
    laid_out = not plan.method_spec.same_steps or len(sides) > 1 or bool(plan.growth)
    return supported(plan) and not laid_out


def alike(one: int, other: int) -> bool:
    """Whether two global batches are too close for a change."""
    return max(one, other) < MIN_CHANGE * min(one, other)


def refit(summary: RunSummary) -> Refit | None:
    """A new plan with the measured epochs, beside the old one; `None` if the prediction held.

    Raises:
        BatchwrightError: The epochs contradict the profile, or no plan can be made of both.
    """
    plan, profile, stage = summary.plan, summary.profile, summary.plan.stages[0]
    predicted, measured = stage.predicted_epoch_seconds, summary.measured_epoch_seconds
    if profile is None or predicted is None or not measured or len(plan.stages) > 1:
        return None
    tolerance = plan.job.goal.tolerance
    error = (predicted.value - measured) / measured
    if abs(error) <= tolerance or not supported(plan):
        return None
    fitted = with_points(profile, steps=(_step_of(summary, profile, stage, predicted),))
    refitted = epoch_seconds(fitted, plan, stage)
    inside = refitted.low <= measured <= refitted.high
    if not inside or abs(refitted.value - measured) > tolerance * measured:
        times = [time_of(epoch) for epoch in _settled(summary)]
        level = at_level_of(times, profile, plan, stage)
        if level is not None:
            at_level = epoch_seconds(level.profile, plan, stage)
            # If the measured steps contradict each other, the first fit may be nearer.
            if abs(log(at_level.value / measured)) < abs(log(refitted.value / measured)):
                fitted, refitted = level.profile, at_level
    again = make_plan(fitted, open_again(plan, profile))
    return Refit(
        predicted=predicted,
        measured=measured,
        error=error,
        tolerance=tolerance,
        refitted=refitted,
        workers=again.workers,
        global_batch_size=again.stages[0].global_batch_size,
    )


def _step_of(summary: RunSummary, profile: Profile, stage: Stage, predicted: Estimate) -> StepTime:
    r"""The run's epochs as visits to the step that they consist of.

    .. math:: t = \hat t(m) \, T / \hat T

    An epoch may end in a smaller step, and a step may take several passes. So the prediction for
    one pass :math:`\hat t(m)` is scaled by the epoch's measured time :math:`T` over its predicted
    time :math:`\hat T`. If every step is one full pass, this is T over the number of steps.
    """
    model = _model(profile, summary.plan)
    one_pass = model.seconds(stage.workers, stage.resolution, stage.micro_batch_size)
    whole = _settled(summary)
    visits = [one_pass * epoch.training_seconds / predicted.value for epoch in whole]
    waited = sum(w.wait_seconds + w.communication_seconds for epoch in whole for w in epoch.workers)
    busy = sum(w.input_seconds + w.compute_seconds for epoch in whole for w in epoch.workers)
    share = waited / (waited + busy) if waited + busy else 0.0
    step = median(visits)
    low, _, high = quantiles(visits, n=4, method="inclusive") if len(visits) > 1 else 3 * visits
    return StepTime(
        resolution=stage.resolution,
        local_batch_size=stage.micro_batch_size,
        workers=stage.workers,
        compute_seconds=(1 - share) * step,
        sync_seconds=share * step,
        step_seconds=step,
        step_low=low,
        step_high=high,
        repeats=max(1, sum(epoch.steps for epoch in whole)),
        visits=tuple(visits),
        visit_error=0.0,  # an epoch has so many steps that their scatter averages out
    )


def _settled(summary: RunSummary) -> list[EpochRecord]:
    """The epochs that ran without a resume; the first, a warm-up, is left out if there are more."""
    whole = [epoch for epoch in summary.epochs if epoch.whole]
    return whole[1:] or whole


def at_level_of(
    epochs: Sequence[EpochTime], profile: Profile, plan: Plan, stage: Stage
) -> Level | None:
    r"""The machine's present speed, from epochs of one stage of a run's plan.

    An epoch that takes T instead of the :math:`\hat T` that the profile predicts consists of steps
    of :math:`t = \hat t \, T / \hat T`. With s the share of computing in them, computing takes
    :math:`\alpha = s t / \hat t_c` times as long as in the profile, and the exchange takes
    :math:`\delta = (1 - s) t - (\hat t - \hat t_c)` longer. Computing grows with the batch and the
    exchange does not, so a measured step with compute time C and whole time S becomes
    :math:`\max(\alpha C, S + (\alpha - 1) C + \delta)` at every batch. An update also takes
    :math:`\alpha` times as long.

    Args:
        epochs: Times of epochs of the stage, at least one.
        profile: The profile, measured before the run.
        plan: The run's plan, which is `supported`.
        stage: The stage.

    Returns:
        The present speed; `None` if that number of workers was never measured together.

    Raises:
        PlanError: The profile gives no prediction for this batch.
    """
    model = _model(profile, plan)
    if model.assumed(stage.workers):
        return None
    step = (stage.workers, stage.resolution, stage.micro_batch_size)
    whole, computing = model.seconds(*step), model.computing(*step)
    expected = epoch_seconds(profile, plan, stage).value
    now = whole * median(epoch.seconds for epoch in epochs) / expected
    if stage.workers == 1:  # a single worker exchanges nothing
        times, longer = now / whole, 0.0
    else:
        share = median(min(1.0, one.computing_seconds / one.seconds) for one in epochs)
        times, longer = share * now / computing, (1 - share) * now - max(0.0, whole - computing)
    steps = tuple(_moved(point, times, longer) for point in profile.steps)
    updates = tuple(
        one.model_copy(update={k: times * getattr(one, k) for k in ("seconds", "low", "high")})
        for one in profile.updates
    )
    moved = profile.model_copy(update={"steps": steps, "updates": updates})
    return Level(times, longer, moved)


def _moved(point: StepTime, times: float, longer: float) -> StepTime:
    """A measured step: computing multiplied by ``times``, exchange ``longer`` (in seconds)."""
    computing = times * point.compute_seconds
    if point.workers == 1:  # a single worker exchanges nothing
        whole = times * point.step_seconds
    else:
        whole = max(computing, point.step_seconds + computing - point.compute_seconds + longer)
    return point.scaled(whole / point.step_seconds).model_copy(
        update={"compute_seconds": computing, "sync_seconds": whole - computing}
    )


def epoch_seconds(profile: Profile, plan: Plan, stage: Stage) -> Estimate:
    """Predicted seconds per epoch of a stage's batch and workers, whatever the goal's limits.

    Raises:
        PlanError: The profile gives no prediction for this batch.
    """
    free = {"objective": "time", "deadline": None, "max_cost": None}
    job = with_workers_of(plan, global_batch=stage.global_batch_size, goal=free)
    found = make_plan(profile, job).stages[0].predicted_epoch_seconds
    if found is None:
        raise PlanError("the profile says nothing of seconds per epoch: probe, and plan again")
    return found


def with_workers_of(plan: Plan, *, goal: Mapping[str, object], **keys: object) -> Job:
    """The plan's job for the plan's own workers, with some keys of it and of its goal changed."""
    chosen = {one.kind: one.count for one in plan.kinds}
    kinds = tuple(
        one.model_copy(update={"count": chosen[one.kind]})
        for one in plan.job.goal.kinds
        if one.kind in chosen
    )
    aims = plan.job.goal.model_copy(update={**goal, "max_workers": None, "kinds": kinds})
    return plan.job.model_copy(update={"workers": plan.workers, **keys, "goal": aims})


def _model(profile: Profile, plan: Plan) -> StepTimeModel:
    return fit_step_time(
        profile.steps,
        collectives=profile.collectives,
        gradient_bytes=profile.network.trained_bytes,
        link=plan.job.link,
        several_cores=profile.cluster.several_cores,
    )


# ------------------------------------------------------------------------ another number of workers


def for_other_workers(plan: Plan, profile: Profile, epoch: int, workers: int) -> Plan:
    """The plan with its epochs from ``epoch`` on planned again, for another number of workers.

    Optimizer, schedule and length stay. `goal.deadline` and `goal.max_cost` do not apply, since a
    run that began with other workers may be unable to keep them. If ``workers`` is the number of
    the first stage, the rest gets the first stage again.

    Args:
        plan: The plan that the run follows now.
        profile: The profile of its first plan.
        epoch: First epoch of the rest, zero-based, which has not begun.
        workers: The present number of workers.

    Returns:
        The plan of the whole run; its stages up to ``epoch`` are unchanged.

    Raises:
        PlanError: The plan cannot change, or nothing is known of that number of workers.
    """
    if not may_change(plan):
        if plan.growth:
            raise PlanError("batch_growth=noise changes the batch by the gradient noise alone")
        raise PlanError(f"method={plan.method} keeps its batches to the end")
    now, first = plan.stages[plan.stage_of(epoch)], plan.stages[0]
    if workers == first.workers:
        again, row = plan, first
    else:
        again = _planned_for(plan, _with_fewer(profile, workers), now, workers)
        row = again.stages[0]
    change = f"global batch {now.global_batch_size:,} -> {row.global_batch_size:,}"
    reason = Reason(
        choice="change while training",
        value=f"{counted(workers, 'worker')}, {change}",
        why=f"Training goes on with {counted(workers, 'worker')} in place of {now.workers}, from "
        f"epoch {epoch + 1} on with a batch for these.",
        source="predicted",
    )
    whole = again.model_copy(
        update={
            "stages": (row.model_copy(update={"epochs": plan.epochs}),),
            "reasons": (reason, *again.reasons),
        }
    )
    return spliced(plan, whole, epoch, workers_may_differ=True)


def _planned_for(plan: Plan, profile: Profile, now: Stage, workers: int) -> Plan:
    """A plan for ``workers`` workers; it keeps the stage's batch if the best one is `alike`, and
    changes it by a factor of at most `MAX_CHANGE`.
    """
    keys = {"workers": workers, "epochs": plan.epochs, "optimizer": plan.update}
    free = {"deadline": None, "max_cost": None}
    found = make_plan(profile, with_workers_of(plan, goal=free, **keys))
    batch, before = found.stages[0].global_batch_size, now.global_batch_size
    near = min(max(batch, -(-before // MAX_CHANGE)), MAX_CHANGE * before)
    near = before if alike(near, before) else near
    if near == batch:
        return found
    return make_plan(profile, with_workers_of(plan, goal=free, global_batch=near, **keys))


def _with_fewer(profile: Profile, workers: int) -> Profile:
    """The profile as if for ``workers`` workers, if it was measured only with more of them.

    Compute times are kept. So are exchange times, which are upper bounds then, since a ring of n
    workers takes 2 (n - 1) messages. A single worker exchanges nothing.
    """
    counts = sorted({point.workers for point in profile.steps})
    if workers >= counts[0]:
        return profile
    change = {"workers": workers}
    steps = [one for one in profile.steps if one.workers == counts[0]]
    if workers == 1:
        steps = [_moved(one, 1.0, -one.sync_seconds) for one in steps]
    exchanges = [
        one.model_copy(update=change) for one in profile.collectives if one.workers == counts[0]
    ]
    return profile.model_copy(
        update={
            "steps": tuple(one.model_copy(update=change) for one in steps),
            "collectives": tuple(exchanges) if workers > 1 else (),
            "job": profile.job.model_copy(update=change),
            "cluster": profile.cluster.model_copy(update=change),
        }
    )
