"""Whether a run may go on under another plan than the one it was begun with."""

from __future__ import annotations

from collections.abc import Iterator

from batchwright.records import Plan, Stage

_TOLD = ("job", "considered", "knees", "held_out", "reasons")
"""What of a plan says why it is so, and nothing of what to do."""

_FREE = (
    *("epochs", "local_batch_sizes", "micro_batch_size", "learning_rate"),
    *("fixed_samples", "sample_seconds", "step_seconds"),
    *("predicted_epoch_seconds", "predicted_bytes"),
)
"""What a row may have otherwise: its batches, the rate that goes with them, and what they take."""


def why_not(plan: Plan, former: Plan, epochs: int) -> str:
    """Why a run that did so many epochs of a former plan cannot go on under a plan; else empty.

    The header and the rows of these epochs are the same, and later rows have other batches and
    rates at most: network, data, optimizer and random numbers then go on as if nothing had changed.
    """
    if plan.epochs != former.epochs:
        return f"it has {plan.epochs} epochs in place of {former.epochs}"
    for name in Plan.model_fields:
        if name not in (*_TOLD, "stages") and getattr(plan, name) != getattr(former, name):
            return f"it has another {name}"
    rows = zip(_by_epoch(plan), _by_epoch(former), strict=True)
    changed = [number for number, (new, old) in enumerate(rows) if new != old]
    if changed and changed[0] < max(1, epochs):  # nothing done under it: it is simply another
        return f"it changes epoch {changed[0] + 1}, and {epochs} are done"
    for number, (new, old) in enumerate(zip(_by_epoch(plan), _by_epoch(former), strict=True)):
        for name in Stage.model_fields:
            if name not in _FREE and getattr(new, name) != getattr(old, name):
                return f"it has another {name} in epoch {number + 1}"
        if new.workers != old.workers:
            return f"it is for {new.workers} workers in place of {old.workers}"
    return ""


def _by_epoch(plan: Plan) -> Iterator[Stage]:
    """The row of each epoch, as a row of one."""
    for stage in plan.stages:
        for _ in range(stage.epochs):
            yield stage.model_copy(update={"epochs": 1})
