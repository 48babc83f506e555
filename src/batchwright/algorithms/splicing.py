"""Runs that change their plan on the way, or resume under another one: whether and how they may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchwright.errors import PlanError
from batchwright.records import Plan, Stage
from batchwright.records.plan_fields import TOLD, TOLD_OF_A_ROW

_EXPLAINING = ("job", "judged_from", *TOLD)
"""Fields of a plan with reasons, predictions and when a run may end, which change no step of it."""

_OF_WORKERS = ("kinds", "threads", "cores")
"""Fields of a plan that describe the workers of its first row."""

_FREE = ("epochs", "local_batch_sizes", "micro_batch_size", "learning_rate", *TOLD_OF_A_ROW)
"""Fields of a row that a new plan may change: batches, their rate, and their times and memory."""


def spliced(followed: Plan, new: Plan, epoch: int, *, workers_may_differ: bool = False) -> Plan:
    """The plan of a run that changes to a new plan at ``epoch``: first old rows, then new ones.

    Header, data, network and the rule of the rate are kept, so the schedule of the rate goes on;
    each new row has the rate for its batch. Considered candidates and reasons are the new plan's,
    and so are kinds and cores of the workers, unless the first row is for another number of them.
    Accuracies after later epochs, and the loss at the end, are not predicted, as the batch of the
    training changes.

    Args:
        followed: The plan so far.
        new: The plan for the rest, with as many epochs in all.
        epoch: First epoch of the new plan, zero-based.
        workers_may_differ: Whether the new plan may be for another number of workers.

    Raises:
        PlanError: The two do not fit together, or the epoch is not one of theirs.
    """
    for name, one, other in (
        ("data", followed.data.digest, new.data.digest),
        ("network", followed.network.name, new.network.name),
        ("method", followed.method, new.method),
        ("workers", followed.workers, new.workers),
        ("epochs", followed.epochs, new.epochs),
    ):
        if one != other and not (name == "workers" and workers_may_differ):
            raise PlanError(
                f"a run cannot change to a plan with {name} {other}, since it has {name} {one}"
            )
    if not 0 <= epoch < followed.epochs:
        raise PlanError(
            f"a run of {followed.epochs} epochs cannot change its plan at epoch {epoch}"
        )
    workers = new if epoch == 0 or new.workers == followed.workers else followed
    return followed.model_copy(
        update={
            "stages": (
                *_between(followed.stages, 0, epoch),
                *_between(new.stages, epoch, new.epochs),
            ),
            "considered": new.considered,
            "epoch_accuracy": tuple(
                accuracy if place < epoch else None
                for place, accuracy in enumerate(followed.epoch_accuracy)
            ),
            "end_loss": None,
            "train_seconds": None,
            "knees": new.knees,
            "held_out": new.held_out,
            "reasons": new.reasons,
            **{name: getattr(workers, name) for name in _OF_WORKERS},
        }
    )


def _between(stages: Sequence[Stage], first: int, last: int) -> list[Stage]:
    """The rows from epoch ``first`` up to epoch ``last``; rows at the ends are shortened."""
    found, start = [], 0
    for stage in stages:
        epochs = min(start + stage.epochs, last) - max(start, first)
        if epochs > 0:
            found.append(stage.model_copy(update={"epochs": epochs}))
        start += stage.epochs
    return found


def why_not(plan: Plan, former: Plan, epochs: int) -> str:
    """Why a run that did ``epochs`` epochs of a former plan cannot go on under ``plan``, in words.

    It can, and the result is empty, if the header and the rows of these epochs are the same, and
    later rows differ only in batches and rates: then network, data, optimizer and random numbers go
    on unchanged. A run that did all its epochs may go on for as many as its plan allows.
    """
    longer = epochs >= former.epochs < plan.epochs <= (former.max_epochs or 0)
    if plan.epochs != former.epochs and not longer:
        return f"it has {plan.epochs} epochs in place of {former.epochs}"
    for name in Plan.model_fields:
        if name in (*_EXPLAINING, "stages", "growth"):
            continue
        if getattr(plan, name) != getattr(former, name):
            return f"it has another {name}"
    growth, before = ([_of_an_epoch(one, row) for row in one.growth] for one in (plan, former))
    if growth != before:
        return "it has another growth"
    rows = list(zip(_by_epoch(plan), _by_epoch(former), strict=False))  # epochs of both plans
    changed = [number for number, (new, old) in enumerate(rows) if new != old]
    if changed and changed[0] < max(1, epochs):  # the first row has to agree in any case
        return f"it changes epoch {changed[0] + 1}, and {epochs} are done"
    for number, (new, old) in enumerate(rows):
        for name in Stage.model_fields:
            if name not in _FREE and getattr(new, name) != getattr(old, name):
                return f"it has another {name} in epoch {number + 1}"
    return ""


def _by_epoch(plan: Plan) -> Iterator[Stage]:
    """The row of each epoch, by `_of_an_epoch`."""
    for stage in plan.stages:
        yield from [_of_an_epoch(plan, stage)] * stage.epochs


def _of_an_epoch(plan: Plan, stage: Stage) -> Stage:
    """A plan's row as a row of one epoch, without what is merely told.

    Without a server local batches are sorted: workers get them by their kinds, so a run may go on
    with its hosts in another order.
    """
    untold = {name: Stage.model_fields[name].default for name in TOLD_OF_A_ROW}
    sizes = stage.local_batch_sizes
    ordered = sizes if plan.server is not None else tuple(sorted(sizes))
    return stage.model_copy(update={"epochs": 1, "local_batch_sizes": ordered, **untold})
