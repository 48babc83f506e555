"""Plans again with what a run measured, where its epochs missed the prediction by too much."""

from __future__ import annotations

from statistics import median, quantiles

from batchwright.checking import open_again, with_points
from batchwright.planning.planner import make_plan
from batchwright.prediction.step_time import fit_step_time
from batchwright.records import Estimate, Plan, Profile, Refit, RunSummary, Stage, StepTime


def refit(summary: RunSummary) -> Refit | None:
    """What the measured epochs would have changed; `None` where the prediction held.

    Raises:
        BatchwrightError: The epochs contradict the profile, or no plan comes of both.
    """
    plan, profile, stage = summary.plan, summary.profile, summary.plan.stages[0]
    predicted, measured = stage.predicted_epoch_seconds, summary.measured_epoch_seconds
    if profile is None or predicted is None or not measured or len(plan.stages) > 1:
        return None
    if plan.server is not None or plan.job.launch == "virtual":  # epochs are not made of such steps
        return None
    error = (predicted.value - measured) / measured
    if abs(error) <= plan.job.goal.tolerance or len(plan.kinds) > 1:
        return None
    fitted = with_points(profile, steps=(_step_of(summary, profile, stage, predicted),))
    again = make_plan(fitted, open_again(plan, profile))
    return Refit(
        predicted=predicted,
        measured=measured,
        error=error,
        tolerance=plan.job.goal.tolerance,
        refitted=_epoch_seconds(fitted, plan),
        workers=again.workers,
        global_batch_size=again.stages[0].global_batch_size,
    )


def _step_of(summary: RunSummary, profile: Profile, stage: Stage, predicted: Estimate) -> StepTime:
    r"""The run's epochs as visits to the step that they are made of.

    .. math:: t = \hat t(m) \, T / \hat T

    An epoch may end in a smaller step and a step may take several passes, so the prediction for one
    pass :math:`\hat t(m)` is scaled by what the whole epoch :math:`T` took against its own
    prediction; where every step is one full pass this is T over the number of steps.
    """
    model = fit_step_time(
        profile.steps,
        collectives=profile.collectives,
        gradient_bytes=profile.network.trained_bytes,
        link=summary.plan.job.link,
    )
    one_pass = model.seconds(stage.workers, stage.resolution, [stage.micro_batch_size])
    whole = [epoch for epoch in summary.epochs if epoch.whole]
    whole = whole[1:] or whole
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
    )


def _epoch_seconds(fitted: Profile, plan: Plan) -> Estimate:
    """Seconds per epoch of the same batch and workers by the new fit, whatever the limits."""
    goal = plan.job.goal.model_copy(
        update={"objective": "time", "deadline": None, "max_cost": None, "max_workers": None}
    )
    same = {"workers": plan.workers, "global_batch": plan.stages[0].global_batch_size, "goal": goal}
    stage = make_plan(fitted, plan.job.model_copy(update=same)).stages[0]
    assert stage.predicted_epoch_seconds is not None  # noqa: S101 - it was measured
    return stage.predicted_epoch_seconds
