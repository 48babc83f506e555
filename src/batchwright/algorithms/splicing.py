"""One plan up to an epoch and another from there on, for a run that changes its plan on the way."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.errors import PlanError
from batchwright.records import Plan, Stage


def spliced(followed: Plan, new: Plan, epoch: int) -> Plan:
    """A plan that a run can go on with from ``epoch``: its rows before that are those it followed.

    Header, data, network and the rule of the rate stay, so the schedule of the rate goes on where
    it is; each row brings the rate that goes with its batch. What was considered, and why, is the
    new plan's.

    What accuracy is predicted after the epochs that follow is not known of a training whose batch
    changes.

    Args:
        followed: The plan so far.
        new: The plan for the rest; as long, and for as many workers.
        epoch: First epoch that the new one is for, zero-based.

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
        if one != other:
            raise PlanError(
                f"a run cannot change to a plan with {name} {other}, since it has {name} {one}"
            )
    if not 0 <= epoch < followed.epochs:
        raise PlanError(
            f"a run of {followed.epochs} epochs cannot change its plan at epoch {epoch}"
        )
    return followed.model_copy(
        update={
            "stages": (*_before(followed.stages, epoch), *_from(new.stages, epoch)),
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


def _before(stages: Sequence[Stage], epoch: int) -> list[Stage]:
    """Rows up to an epoch, the last one shortened."""
    return [
        stage.model_copy(update={"epochs": min(stage.epochs, epoch - start)})
        for start, stage in _starts(stages)
        if start < epoch
    ]


def _from(stages: Sequence[Stage], epoch: int) -> list[Stage]:
    """Rows from an epoch on, the first one shortened."""
    return [
        stage.model_copy(update={"epochs": min(stage.epochs, start + stage.epochs - epoch)})
        for start, stage in _starts(stages)
        if start + stage.epochs > epoch
    ]


def _starts(stages: Sequence[Stage]) -> list[tuple[int, Stage]]:
    """Rows with the epochs that they begin at."""
    starts, start = [], 0
    for stage in stages:
        starts.append((start, stage))
        start += stage.epochs
    return starts
