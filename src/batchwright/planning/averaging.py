"""Whether held-out accuracy is evaluated with an average of the weights, and the reasons for it."""

from __future__ import annotations

from batchwright.planning.chosen import Chosen
from batchwright.records import Job, Reason
from batchwright.records.text.formatting import counted, percent

AVERAGE_EPOCHS = 0.5
"""Epochs that the average of the weights looks back on. Of five lengths tried this one reached the
accuracies 0.5, 2 and 5 points below the final one earliest, in trainings of 12 and 16 epochs
(docs/log.md)."""
_EARLIER = 0.86
"""Epochs until an average reaches an accuracy over those until the weights reach it: the mean over
twelve trainings of four tasks (docs/decisions/0076)."""
STRETCH = 2
"""Epochs of a schedule over the epochs that its target is likely to take. While the rate is high,
an average is more accurate than a whole training of as many epochs at its end, so the target comes
sooner; and the target may take more epochs than was thought (docs/log.md)."""
_SOONER = 0.8
"""Epochs until the target in a stretched schedule over those of a schedule that ends there."""


def averaged_epochs(job: Job) -> float | None:
    """Epochs that the average looks back on; `None`: the weights themselves are evaluated."""
    return AVERAGE_EPOCHS if job.averages else None


def scheduled_epochs(job: Job, needed: int) -> int:
    """Number of epochs that the rate's decay is laid out over.

    The schedule is `STRETCH` times as long as needed only if an evaluation follows the epoch in
    which the target is likely to be reached: without one, training could not end there.

    Args:
        job: Its ``epochs`` are the upper bound.
        needed: Epochs that the target is likely to take.
    """
    stretched = job.averages and needed % job.evaluate_epochs == 0
    return min(job.epochs, STRETCH * needed) if stretched else needed


def averaging_reasons(job: Job) -> tuple[Reason, ...]:
    """Why weights are averaged; empty where they are not."""
    back = averaged_epochs(job)
    if back is None:
        return ()
    value = f"over {back:g} epoch"
    if job.average_weights == "on":
        return (Chosen(value, "As asked.", "asked").reason("average of weights"),)
    why = (
        "Training ends once held-out accuracy reaches goal.accuracy, and that of an average does "
        f"so earlier: after {percent(_EARLIER, 0)} of the epochs in trainings of four other tasks."
    )
    return (Chosen(value, why, "assumed").reason("average of weights"),)


def schedule_reasons(needed: int, laid_out: int) -> tuple[Reason, ...]:
    """Why the schedule is longer than the planned training; empty where it is not.

    Args:
        needed: Epochs that the target is likely to take.
        laid_out: Epochs of the schedule, from `scheduled_epochs`.
    """
    if laid_out == needed:
        return ()
    why = (
        f"Training ends at goal.accuracy, likely after {counted(needed, 'epoch')}, but the rate's "
        f"decay is laid out over {laid_out}: while the rate is high, an average of the weights "
        f"reaches a target sooner, in trainings of other tasks after {percent(_SOONER, 0)} of the "
        "epochs of a schedule that ends with the target."
    )
    return (Chosen(counted(laid_out, "epoch"), why, "assumed").reason("schedule"),)
