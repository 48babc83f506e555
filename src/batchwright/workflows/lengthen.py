"""Goes on with a run that trained all its epochs and missed the accuracy that it was to reach."""

from __future__ import annotations

from math import ceil, exp, log

from batchwright.planning.candidates.learnt import learnt_of
from batchwright.prediction.accuracy.law import PRIOR
from batchwright.prediction.accuracy.trainings import Observed, offset_of
from batchwright.records import Plan, Reason, RunSummary
from batchwright.records.text.formatting import counted, percent
from batchwright.reporting.data.spending import spending

MIN_GROWTH, MAX_GROWTH = 1.5, 4.0
"""Epochs in all over those so far. The rate's decay is laid out over the longer training, so that
with a cosine it begins again at a quarter of its peak at least, and at 0.85 of it at most."""


def lengthened(summary: RunSummary) -> Plan | None:
    """The plan of a run with more epochs; `None` where it is not to go on.

    It goes on where the plan chose fewer epochs than the job allows to reach `goal.accuracy`, and
    the last evaluation is below it, if `goal.deadline` and `goal.max_cost` leave room for them.
    Plans of several stages, or with a parameter server, are laid out over their epochs and stay as
    they are.

    Args:
        summary: Of a run that has done all epochs of its plan.
    """
    plan, reached = summary.plan, summary.accuracy
    target = plan.job.goal.target
    if target is None or reached is None or plan.max_epochs is None or plan.server is not None:
        return None
    if len(plan.stages) > 1 or len(summary.epochs) < plan.epochs:
        return None
    if any(one.top1 is not None and one.top1 >= target for one in summary.epochs):
        return None
    least, most = (ceil(times * plan.epochs) for times in (MIN_GROWTH, MAX_GROWTH))
    wanted = _by_trials(summary, target, most) or _by_others(summary, reached, target)
    epochs = min(plan.max_epochs, most, max(least, wanted))
    if epochs <= plan.epochs:
        return None
    (stage,) = plan.stages
    stages = (stage.model_copy(update={"epochs": epochs}),)
    if not _within_limits(summary, plan.model_copy(update={"stages": stages})):
        return None
    reason = Reason(
        choice="more epochs",
        value=counted(epochs, "epoch"),
        why=f"After {counted(plan.epochs, 'epoch')} held-out accuracy is {percent(reached)}, below "
        f"goal.accuracy={target:g}; epochs={plan.max_epochs} allows more.",
        source="measured",
    )
    return plan.model_copy(update={"stages": stages, "reasons": (*plan.reasons, reason)})


def _by_trials(summary: RunSummary, target: float, most: int) -> int | None:
    """Epochs that reach the target, as the probe's trials tell together with what the run reached.

    With probability `goal.confidence`; ``most`` where it takes more, `None` without trials.
    """
    plan, profile, last = summary.plan, summary.profile, summary.epochs[-1]
    if profile is None or last.top1 is None or not last.val_count:
        return None
    run = Observed(
        plan.update,
        last.global_batch_size,
        sum(one.samples for one in summary.epochs),
        last.top1,
        last.val_count,
        offset_of(plan.learning_rate.tried),
    )
    learnt = learnt_of([profile], plan.job, [(plan.job, run)])
    if learnt is None or plan.update not in learnt.optimizers:
        return None
    found = learnt.needed(run.optimizer, run.batch, target, plan.job.goal.confidence, most)
    return most if found is None else found


def _by_others(summary: RunSummary, reached: float, target: float) -> int:
    r"""Epochs that the target takes, by the slope that tasks have in the mean.

    .. math:: E \exp((\operatorname{logit} u^* - \operatorname{logit} u) / \beta)

    with u what accuracy is above guessing; see `prediction.accuracy.law`. At an accuracy that is
    no better than guessing as many as can be.
    """
    epochs, chance = summary.plan.epochs, 1 / len(summary.plan.data.classes)
    now, then = ((one - chance) / (1 - chance) for one in (reached, target))
    if now <= 0:
        return ceil(MAX_GROWTH * epochs)
    apart = log(then / (1 - then)) - log(now / (1 - now))
    return ceil(epochs * min(MAX_GROWTH, exp(apart / PRIOR.usual_slope)))


def _within_limits(summary: RunSummary, longer: Plan) -> bool:
    """Whether deadline and cost allow a longer plan, at the pace of the epochs so far."""
    goal, told = longer.job.goal, spending(summary.model_copy(update={"plan": longer}))
    seconds = told.expected or 0.0
    if goal.max_cost is not None and told.priced and told.cost(seconds) > goal.max_cost:
        return False
    if not summary.simulated:  # the deadline counts starts as well, and there will be another
        seconds += max(0.0, summary.wall_seconds - told.so_far) + summary.setup_seconds
    return goal.deadline is None or seconds <= goal.deadline
