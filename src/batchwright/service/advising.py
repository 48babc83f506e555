"""Advice to a run that goes on: a new plan, where its epochs miss the prediction.

A pure function from finished epochs to a new plan or nothing. Where the newest epochs miss the
prediction by more than ``goal.tolerance``, the profile is corrected to the speed that they show
(`workflows.replan.at_level_of`), and the rest of the run is planned again with it: with the same
workers, and with the time and money that are left. The new plan is offered if it changes the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from batchwright.algorithms.splicing import spliced
from batchwright.errors import PlanError
from batchwright.planning.planner import make_plan
from batchwright.records import EpochRecord, Plan, Profile, Reason, Stage
from batchwright.records.service import Advice
from batchwright.records.text.formatting import between, counted, duration
from batchwright.workflows.drift import Drift, drift_of
from batchwright.workflows.replan import (
    MAX_CHANGE,
    Level,
    alike,
    at_level_of,
    epoch_seconds,
    may_change,
    with_workers_of,
)


@dataclass(frozen=True)
class Offer:
    """A new plan for the rest of a run.

    Attributes:
        epoch: First epoch that the new plan is for, zero-based.
        reason: Measured against predicted, and what changes.
        plan: Plan of the whole run: rows up to ``epoch`` as they were followed, then the new one.
    """

    epoch: int
    reason: str
    plan: Plan


def advice_for(
    plan: Plan,
    profile: Profile | None,
    epochs: Sequence[EpochRecord],
    offered: Sequence[Advice] = (),
) -> Offer | None:
    """A new plan for a run whose epochs miss the prediction, if another batch is better.

    Args:
        plan: The plan that the run follows now.
        profile: The profile that its first plan was made from.
        epochs: Its finished epochs, each once, in order.
        offered: Advice that it was offered before, in order; the newest is not offered again.

    Returns:
        `None` where the prediction holds, no other batch is better, or too little is known.

    Raises:
        BatchwrightError: Plan and profile do not fit together, or no plan comes of them.
    """
    drift = drift_of(plan, epochs)
    if drift is None or not drift.beyond or profile is None:
        return None
    # Only a run that can go on with another batch, and whose batch the planner chose.
    if not may_change(plan) or plan.job.global_batch != "auto":
        return None
    if len({stage.workers for stage in plan.stages}) > 1:
        return None
    epoch = drift.done + 1  # the one in progress ends first
    if epoch >= plan.epochs:
        return None
    level = at_level_of(drift.times, profile, plan, drift.stage)
    if level is None:
        return None
    # Seconds of training, evaluation and checkpoints until the epoch in progress has ended.
    pauses = [one.evaluation_seconds + one.checkpoint_seconds for one in epochs]
    trained = sum(one.training_seconds for one in epochs)
    spent = trained + sum(pauses) + drift.measured + median(pauses)
    rest, missed = _rest_plan(plan, level.profile, drift, epoch, spent)
    new = rest.stages[0]
    if new.workers != plan.workers or new.predicted_epoch_seconds is None:
        return None
    known = [drift.stage.global_batch_size]  # batches that are no news
    for former in offered[-1:]:
        at = former.plan.stage_of(min(epoch, former.plan.epochs - 1))
        known.append(former.plan.stages[at].global_batch_size)
    if plan.job.goal.target is not None and profile.trials:
        # Planning the rest with one optimizer's trials and the likeliest epochs may choose another
        # batch even where the machine is as it was: that batch is no answer to the drift.
        uncorrected, _ = _rest_plan(plan, profile, drift, epoch, spent)
        known.append(uncorrected.stages[0].global_batch_size)
    if any(alike(new.global_batch_size, batch) for batch in known):
        return None
    unchanged = epoch_seconds(level.profile, plan, drift.stage)
    change = f"global batch {drift.stage.global_batch_size:,} -> {new.global_batch_size:,}"
    reason = (
        f"{drift}: {_found(level, drift.stage)}. From epoch {epoch + 1} on, {change} would make it "
        f"{between(new.predicted_epoch_seconds)} s an epoch instead of "
        f"{between(unchanged)} s{missed}."
    )
    why = Reason(choice="change while training", value=change, why=reason, source="measured")
    whole = rest.model_copy(
        update={
            "stages": (new.model_copy(update={"epochs": plan.epochs}),),
            "reasons": (why, *rest.reasons),
        }
    )
    return Offer(epoch=epoch, reason=reason, plan=spliced(plan, whole, epoch))


def _rest_plan(
    plan: Plan, profile: Profile, drift: Drift, epoch: int, spent: float
) -> tuple[Plan, str]:
    """A new plan for the rest of the run.

    Args:
        plan: The plan that the run follows now.
        profile: The measurements, of the machine as it is now.
        drift: How the run misses its prediction, and in which row of the plan.
        epoch: First epoch of the rest, zero-based.
        spent: Seconds that the run will have taken by then.

    Returns:
        The plan, and the run's limits that it cannot keep, in words.
    """
    goal, left = plan.job.goal, plan.epochs - epoch
    # Trials predict whole trainings, so candidates are compared over all epochs.
    judged = plan.epochs if profile.trials else left
    warmup = plan.job.warmup_epochs  # of the whole run, whose rate schedule stays
    keys: dict[str, Any] = {
        "epochs": judged,
        "warmup_epochs": warmup if warmup == "auto" else min(warmup, judged),
        "optimizer": plan.update,  # a run keeps its optimizer
    }
    limits: dict[str, float] = {}
    if goal.deadline is not None:
        limits["deadline"] = goal.deadline - spent
    if goal.max_cost is not None and goal.price is not None:
        limits["max_cost"] = goal.max_cost - goal.price * plan.workers * spent / 3600
    limits = {name: value * judged / left for name, value in limits.items()}
    no_limits = {"objective": "time", "deadline": None, "max_cost": None}
    missed, rest = "", None
    if all(value > 0 for value in limits.values()):
        try:
            # Epochs were chosen with a margin; for the rest the likeliest number counts.
            aims = {**limits, "confidence": 0.5}
            rest = make_plan(profile, with_workers_of(plan, goal=aims, **keys))
        except PlanError:
            if not limits:
                raise
    if rest is None:
        names = " and ".join(f"goal.{name}" for name in limits)
        missed = f"; no batch keeps {names} any more, and this one misses by least"
        rest = make_plan(profile, with_workers_of(plan, goal=no_limits, **keys))
    batch, most = rest.stages[0].global_batch_size, MAX_CHANGE * drift.stage.global_batch_size
    least = -(-drift.stage.global_batch_size // MAX_CHANGE)
    if least <= batch <= most:
        return rest, missed
    near = min(max(batch, least), most)
    missed += (
        f"; the plan would be {batch:,}, and one change goes {MAX_CHANGE} times as far at most"
    )
    job = with_workers_of(plan, goal=no_limits, global_batch=near, **keys)
    return make_plan(profile, job), missed


def _found(level: Level, stage: Stage) -> str:
    """What the epochs show of the machine, in words."""
    text = f"computing takes {level.computing:.2f} times as long as measured before"
    if stage.workers > 1:
        more = "more" if level.exchange_seconds > 0 else "less"
        text += (
            f", and waiting for {counted(stage.workers, 'worker')} to exchange "
            f"{duration(abs(level.exchange_seconds))} {more} a step"
        )
    return text
