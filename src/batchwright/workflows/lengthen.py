"""Goes on with a run that trained all its epochs and missed the accuracy that it was to reach."""

from __future__ import annotations

from math import ceil, exp, log

from batchwright.prediction.accuracy.learning import PRIOR
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
    epochs = min(plan.max_epochs, ceil(_growth(reached, target, summary) * plan.epochs))
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
    more = {"stages": stages, "target_epochs": None, "reasons": (*plan.reasons, reason)}
    return plan.model_copy(update=more)


def _growth(reached: float, target: float, summary: RunSummary) -> float:
    r"""Epochs that the target takes over those so far, by the law of learning of other tasks.

    .. math:: \exp((\operatorname{logit} u^* - \operatorname{logit} u) / \beta)

    with u what accuracy is above guessing and :math:`\beta` the slope that tasks have in the mean;
    see `prediction.accuracy.learning`. An accuracy that is no better than guessing takes the most.
    """
    chance = summary.plan.data.guessing
    now, then = ((one - chance) / (1 - chance) for one in (reached, target))
    if now <= 0:
        return MAX_GROWTH
    apart = log(then / (1 - then)) - log(now / (1 - now))
    return min(MAX_GROWTH, max(MIN_GROWTH, exp(apart / exp(PRIOR.slope.mean))))


def _within_limits(summary: RunSummary, longer: Plan) -> bool:
    """Whether deadline and cost allow a longer plan, at the pace of the epochs so far."""
    goal, told = longer.job.goal, spending(summary.model_copy(update={"plan": longer}))
    seconds = told.expected or 0.0
    if goal.max_cost is not None and told.priced and told.cost(seconds) > goal.max_cost:
        return False
    if not summary.simulated:  # the deadline counts starts as well, and there will be another
        seconds += max(0.0, summary.wall_seconds - told.so_far) + summary.setup_seconds
    return goal.deadline is None or seconds <= goal.deadline
