"""Advice to a run that goes on: what its epochs took, against what its plan predicted.

Pure: finished epochs in, a new plan or nothing out. Where the newest epochs miss the
prediction by more than ``goal.tolerance``, all that was measured before the run is brought to what
the epochs show (`refitting.at_level_of`), and the rest of the run is planned again with it: with
the same workers, and with what is left of its time and money. That is offered if it changes the
batch.
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
        epoch: First epoch that it is for, zero-based.
        reason: Measured against predicted, and what changes.
        plan: The whole run's: rows up to ``epoch`` as they were followed, then the new one.
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
    """A new plan for a run, where its epochs call for one and it can be had.

    Args:
        plan: What the run follows now.
        profile: What its first plan was made from.
        epochs: Those that it has finished, each once, in order.
        offered: What it was offered before, in order; the newest is not offered again.

    Returns:
        `None` where the prediction holds, nothing better is known, or too little is.

    Raises:
        BatchwrightError: Plan and profile do not fit together, or no plan comes of them.
    """
    drift = drift_of(plan, epochs)
    if drift is None or not drift.beyond or profile is None:
        return None
    # It can go on with another batch, and the planner chose the one that it has.
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
    spent = _spent(epochs, drift)
    again, missed = _planned_again(plan, level.profile, drift, epoch, spent)
    new = again.stages[0]
    if new.workers != plan.workers or new.predicted_epoch_seconds is None:
        return None
    followed = [drift.stage.global_batch_size]
    for former in offered[-1:]:
        at = former.plan.stage_of(min(epoch, former.plan.epochs - 1))
        followed.append(former.plan.stages[at].global_batch_size)
    if plan.job.goal.target is not None and profile.trials:
        # With one optimizer's trials and the likeliest epochs the choice is another by itself.
        unmoved, _ = _planned_again(plan, profile, drift, epoch, spent)
        followed.append(unmoved.stages[0].global_batch_size)
    if any(alike(new.global_batch_size, batch) for batch in followed):
        return None
    unchanged = epoch_seconds(level.profile, plan, drift.stage)
    change = f"global batch {drift.stage.global_batch_size:,} -> {new.global_batch_size:,}"
    reason = (
        f"{drift}: {_found(level, drift.stage)}. From epoch {epoch + 1} on, {change} would make it "
        f"{between(new.predicted_epoch_seconds)} s an epoch instead of "
        f"{between(unchanged)} s{missed}."
    )
    why = Reason(choice="change while training", value=change, why=reason, source="measured")
    whole = again.model_copy(
        update={
            "stages": (new.model_copy(update={"epochs": plan.epochs}),),
            "reasons": (why, *again.reasons),
        }
    )
    return Offer(epoch=epoch, reason=reason, plan=spliced(plan, whole, epoch))


def _planned_again(
    plan: Plan, profile: Profile, drift: Drift, epoch: int, spent: float
) -> tuple[Plan, str]:
    """The rest of the run, planned anew; and what of its limits cannot be kept, in words.

    Args:
        plan: What the run follows now.
        profile: How the machine is now.
        drift: Tells the row that it is in.
        epoch: First epoch of the rest.
        spent: Seconds that will be gone by then.
    """
    goal, left = plan.job.goal, plan.epochs - epoch
    # Trials tell of whole trainings, so candidates are compared over all epochs.
    judged = plan.epochs if profile.trials else left
    asked = plan.job.warmup_epochs  # of the whole run, whose rule of the rate stays
    rest: dict[str, Any] = {
        "epochs": judged,
        "warmup_epochs": asked if asked == "auto" else min(asked, judged),
        "optimizer": plan.update,  # a run does not change it on the way
    }
    limits: dict[str, float] = {}
    if goal.deadline is not None:
        limits["deadline"] = goal.deadline - spent
    if goal.max_cost is not None and goal.price is not None:
        limits["max_cost"] = goal.max_cost - goal.price * plan.workers * spent / 3600
    limits = {name: value * judged / left for name, value in limits.items()}
    free = {"objective": "time", "deadline": None, "max_cost": None}
    told, found = "", None
    if all(value > 0 for value in limits.values()):
        try:
            # Epochs were chosen with a margin; for the rest the likeliest number counts.
            aims = {**limits, "confidence": 0.5}
            found = make_plan(profile, with_workers_of(plan, goal=aims, **rest))
        except PlanError:
            if not limits:
                raise
    if found is None:
        names = " and ".join(f"goal.{name}" for name in limits)
        told = f"; no batch keeps {names} any more, and this one misses by least"
        found = make_plan(profile, with_workers_of(plan, goal=free, **rest))
    batch, most = found.stages[0].global_batch_size, MAX_CHANGE * drift.stage.global_batch_size
    least = -(-drift.stage.global_batch_size // MAX_CHANGE)
    if least <= batch <= most:
        return found, told
    near = min(max(batch, least), most)
    told += f"; the plan would be {batch:,}, and one change goes {MAX_CHANGE} times as far at most"
    return make_plan(profile, with_workers_of(plan, goal=free, global_batch=near, **rest)), told


def _spent(epochs: Sequence[EpochRecord], drift: Drift) -> float:
    """Seconds of training, evaluation and checkpoints until the epoch in progress has ended."""
    beside = [one.evaluation_seconds + one.checkpoint_seconds for one in epochs]
    trained = sum(one.training_seconds for one in epochs)
    return trained + sum(beside) + drift.measured + median(beside)


def _found(level: Level, stage: Stage) -> str:
    """What the epochs say of the machine, in words."""
    told = f"computing takes {level.computing:.2f} times as long as measured before"
    if stage.workers > 1:
        more = "more" if level.exchange_seconds > 0 else "less"
        told += (
            f", and waiting for {counted(stage.workers, 'worker')} to exchange "
            f"{duration(abs(level.exchange_seconds))} {more} a step"
        )
    return told
