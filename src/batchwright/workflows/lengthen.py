"""Gives more epochs to a run that trained all its epochs and missed its target accuracy."""

from __future__ import annotations

from math import ceil, exp, log

from batchwright.prediction.accuracy.learning import PRIOR
from batchwright.records import Plan, Reason, RunSummary
from batchwright.records.run import is_over
from batchwright.records.text.formatting import counted, percent
from batchwright.reporting.data.spending import spending

MIN_GROWTH, MAX_GROWTH = 1.5, 4.0
"""Limits of the new number of epochs over the old one. The rate's decay is laid out over the longer
training, so that a cosine continues at 0.25 to 0.85 of the peak."""


def lengthened(summary: RunSummary) -> Plan | None:
    """The plan of a run with more epochs; `None` if the run should end.

    A run gets more epochs if the plan chose fewer than the job allows to reach `goal.accuracy`, no
    evaluation has reached it, and `goal.deadline`, `goal.max_cost` and `goal.patience` leave room
    for more. Plans of several stages, or with a parameter server, are laid out over their epochs
    and get no more.

    Args:
        summary: The summary of a run that has done all epochs of its plan.
    """
    plan, reached = summary.plan, summary.accuracy
    if plan.growth:  # its rows are those that epochs had, and training goes on from the last one
        first = plan.stages[0].model_copy(update={"epochs": plan.epochs})
        plan = plan.model_copy(update={"stages": (first,)})
    target = plan.job.goal.target
    if target is None or reached is None or plan.max_epochs is None or plan.server is not None:
        return None
    if len(plan.stages) > 1 or len(summary.epochs) < plan.epochs:
        return None
    if is_over(plan, summary.epochs):
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
    times = epochs / plan.likely_epochs()
    more = {
        "stages": stages,
        "target_epochs": None,
        "train_seconds": plan.train_seconds and plan.train_seconds.mapped(lambda one: times * one),
        "end_loss": None,
        "reasons": (*plan.reasons, reason),
    }
    # The rate rises again, and accuracy falls with that below the best one.
    return plan.model_copy(update={**more, "judged_from": plan.epochs})


def _growth(reached: float, target: float, summary: RunSummary) -> float:
    r"""Factor on the epochs so far that reaches the target, by the learning curve of other tasks.

    .. math:: \exp((\operatorname{logit} u^* - \operatorname{logit} u) / \beta)

    where u is the accuracy above guessing and :math:`\beta` the mean slope over tasks; see
    `prediction.accuracy.learning`. For an accuracy no better than guessing it is `MAX_GROWTH`.
    """
    chance = summary.plan.data.guessing
    now, then = ((one - chance) / (1 - chance) for one in (reached, target))
    if now <= 0:
        return MAX_GROWTH
    apart = log(then / (1 - then)) - log(now / (1 - now))
    return min(MAX_GROWTH, max(MIN_GROWTH, exp(apart / exp(PRIOR.slope.mean))))


def _within_limits(summary: RunSummary, longer: Plan) -> bool:
    """Whether deadline and cost allow a longer plan, at the speed of the epochs so far."""
    goal, spent = longer.job.goal, spending(summary.model_copy(update={"plan": longer}))
    seconds = spent.expected or 0.0
    if goal.max_cost is not None and spent.priced and spent.cost(seconds) > goal.max_cost:
        return False
    if not summary.simulated:  # the deadline includes starts, and workers will start once more
        seconds += max(0.0, summary.wall_seconds - spent.so_far) + summary.setup_seconds
    return goal.deadline is None or seconds <= goal.deadline
