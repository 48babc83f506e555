"""A plan that changes while it is followed: what is done stays as it was, the rest is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchwright.errors import PlanError
from batchwright.records import Plan, Stage

_HEADER = ("data", "network", "method", "merge", "server", "update", "ags", "precision", "kinds")
_RULE = ("base", "base_batch", "scaling", "decay")
_ROW = ("resolution", "dropout", "augmentation", "augmentation_strength", "rate_stage")


def spliced(followed: Plan, advised: Plan, epoch: int) -> Plan:
    """The advised plan from an epoch on, and before it the rows that were followed.

    Batches and rates may change; whatever a network, its data or its optimizer were built for
    stays. The job stays, too: it says what was asked for.

    Args:
        followed: The plan until now.
        advised: The plan from ``epoch`` on; its rows before that are not looked at.
        epoch: Zero-based.

    Raises:
        PlanError: A run that follows the one cannot go on under the other.
    """
    for name in _HEADER:
        if getattr(advised, name) != getattr(followed, name):
            raise PlanError(f"the new plan has another {name}, which a run cannot change")
    for name in _RULE:
        if getattr(advised.learning_rate, name) != getattr(followed.learning_rate, name):
            raise PlanError(f"the new plan has another learning_rate.{name}")
    if advised.epochs != followed.epochs:
        raise PlanError(f"the new plan has {advised.epochs} epochs in place of {followed.epochs}")
    if not 0 <= epoch < followed.epochs:
        raise PlanError(f"epoch {epoch} is none of the {followed.epochs} that could be changed")
    for number, (new, old) in enumerate(zip(_by_epoch(advised), _by_epoch(followed), strict=True)):
        if number >= epoch:
            _refuse_other_row(number, new, old)
    past, future = _between(followed.stages, 0, epoch), _between(advised.stages, epoch, None)
    if past and _whole(past[-1]) == _whole(future[0]):
        joined = past.pop()
        future[0] = joined.model_copy(update={"epochs": joined.epochs + future[0].epochs})
    return advised.model_copy(update={"job": followed.job, "stages": (*past, *future)})


def goes_on(plan: Plan, former: Plan, epochs: int) -> bool:
    """Whether a run that did so many epochs under a former plan may go on under another.

    That is so where the two agree in all but what was asked for and why, and in the rows of these
    epochs; later rows may differ in what `spliced` changes.
    """
    same = {"job": plan.job, "considered": (), "knees": (), "held_out": (), "reasons": ()}
    if former.model_copy(update=same) == plan.model_copy(update=same):
        return True
    if epochs == 0 or former.epochs != plan.epochs:
        return False  # nothing was done under it, so it is simply another
    try:
        spliced(former, plan, min(epochs, plan.epochs - 1))
    except PlanError:
        return False
    done = zip(_by_epoch(plan), _by_epoch(former), strict=True)
    return all(new == old for _, (new, old) in zip(range(epochs), done, strict=False))


def _refuse_other_row(number: int, new: Stage, old: Stage) -> None:
    for name in _ROW:
        if getattr(new, name) != getattr(old, name):
            raise PlanError(f"the new plan has another {name} in epoch {number + 1}")
    if new.workers != old.workers:
        raise PlanError(
            f"the new plan is for {new.workers} workers, and {old.workers} are running"
        )


def _by_epoch(plan: Plan) -> Iterator[Stage]:
    """The row of each epoch, as a row of one."""
    for stage in plan.stages:
        for _ in range(stage.epochs):
            yield _whole(stage)


def _whole(stage: Stage) -> Stage:
    return stage.model_copy(update={"epochs": 1})


def _between(stages: Sequence[Stage], first: int, end: int | None) -> list[Stage]:
    """The rows of the epochs from ``first`` until before ``end``, cut where they go beyond."""
    found, start = [], 0
    for stage in stages:
        stop = start + stage.epochs
        low, high = max(first, start), stop if end is None else min(end, stop)
        if high > low:
            found.append(stage.model_copy(update={"epochs": high - low}))
        start = stop
    return found
