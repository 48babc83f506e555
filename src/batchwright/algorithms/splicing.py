"""A run that changes its plan on the way, or goes on under another: whether it may, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchwright.errors import PlanError
from batchwright.records import Plan, Stage

_TOLD = (
    *("job", "considered", "target_epochs", "epoch_accuracy"),
    *("knees", "held_out", "reasons"),
)
"""What of a plan says why it is so or what is expected, and nothing of what to do."""

_FREE = (
    *("epochs", "local_batch_sizes", "micro_batch_size", "learning_rate"),
    *("fixed_samples", "sample_seconds", "step_seconds"),
    *("predicted_epoch_seconds", "predicted_bytes"),
)
"""What a row may have otherwise: its batches, the rate that goes with them, and what they take."""


def spliced(followed: Plan, new: Plan, epoch: int, *, workers_may_differ: bool = False) -> Plan:
    """A plan that a run can go on with from ``epoch``: its rows before that are those it followed.

    Header, data, network and the rule of the rate stay, so the schedule of the rate goes on where
    it is; each row brings the rate that goes with its batch. What was considered, and why, is the
    new plan's.

    What accuracy is predicted after the epochs that follow is not known of a training whose batch
    changes.

    Args:
        followed: The plan so far.
        new: The plan for the rest, as long.
        epoch: First epoch that the new one is for, zero-based.
        workers_may_differ: Whether the new one may be for other workers than the one so far.

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
    return followed.model_copy(
        update={
            "stages": (
                *_between(followed.stages, 0, epoch),
                *_between(new.stages, epoch, new.epochs),
            ),
            "considered": new.considered,
            "epoch_accuracy": tuple(
                told if place < epoch else None
                for place, told in enumerate(followed.epoch_accuracy)
            ),
            "knees": new.knees,
            "held_out": new.held_out,
            "kinds": new.kinds,
            "reasons": new.reasons,
        }
    )


def _between(stages: Sequence[Stage], first: int, last: int) -> list[Stage]:
    """Rows from one epoch up to another, those at the ends shortened."""
    found, start = [], 0
    for stage in stages:
        epochs = min(start + stage.epochs, last) - max(start, first)
        if epochs > 0:
            found.append(stage.model_copy(update={"epochs": epochs}))
        start += stage.epochs
    return found


def why_not(plan: Plan, former: Plan, epochs: int) -> str:
    """Why a run that did so many epochs of a former plan cannot go on under a plan; else empty.

    The header and the rows of these epochs are the same, and later rows have other batches and
    rates at most: network, data, optimizer and random numbers then go on as if nothing had changed.
    A run that did all its epochs may go on for as many as its plan allows.
    """
    longer = epochs >= former.epochs < plan.epochs <= (former.max_epochs or 0)
    if plan.epochs != former.epochs and not longer:
        return f"it has {plan.epochs} epochs in place of {former.epochs}"
    for name in Plan.model_fields:
        if name not in (*_TOLD, "stages") and getattr(plan, name) != getattr(former, name):
            return f"it has another {name}"
    rows = list(zip(_by_epoch(plan), _by_epoch(former), strict=False))  # those of both
    changed = [number for number, (new, old) in enumerate(rows) if new != old]
    if changed and changed[0] < max(1, epochs):  # nothing done under it: it is simply another
        return f"it changes epoch {changed[0] + 1}, and {epochs} are done"
    for number, (new, old) in enumerate(rows):
        for name in Stage.model_fields:
            if name not in _FREE and getattr(new, name) != getattr(old, name):
                return f"it has another {name} in epoch {number + 1}"
    return ""


def _by_epoch(plan: Plan) -> Iterator[Stage]:
    """The row of each epoch, as a row of one.

    Without a server, which worker takes which of the local batches follows from who is there: a run
    for several kinds of workers goes on in another order of its hosts, or without one of them.
    """
    for stage in plan.stages:
        sizes = stage.local_batch_sizes
        ordered = sizes if plan.server is not None else tuple(sorted(sizes))
        row = stage.model_copy(update={"epochs": 1, "local_batch_sizes": ordered})
        yield from [row] * stage.epochs
