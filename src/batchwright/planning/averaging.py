"""Whether held-out accuracy is that of an average of the weights, what follows, and why."""

from __future__ import annotations

from batchwright.planning.chosen import Chosen
from batchwright.records import Job, Reason
from batchwright.records.text.formatting import counted, percent

AVERAGE_EPOCHS = 0.5
"""That the average looks back on: of five averages the one with which trainings of 12 and 16 epochs
came earliest to accuracies 0.5, 2 and 5 points below that of their end (docs/log.md)."""
_EARLIER = 0.86  # of the epochs that the weights take, over twelve trainings of four tasks
STRETCH = 2
"""A schedule is laid out over so many times the epochs that its target is likely to take. While the
rate is high an average is above the end of a whole training of as many epochs, so the target comes
sooner; and the target may take more epochs than was thought (docs/log.md)."""
_SOONER = 0.8  # of the epochs of a schedule that ends at the target


def averaged_epochs(job: Job) -> float | None:
    """Epochs that the average looks back on; `None`: the weights themselves are evaluated."""
    return AVERAGE_EPOCHS if job.averages else None


def scheduled_epochs(job: Job, needed: int) -> int:
    """Epochs that the rate's decay is laid out over, at most the job's.

    Where none of them is evaluated when the target is likely to be reached, training could not end
    there: then the schedule does.

    Args:
        job: Its ``epochs`` are the most.
        needed: Epochs that the training is to take.
    """
    stretched = job.averages and needed % job.evaluate_epochs == 0
    return min(job.epochs, STRETCH * needed) if stretched else needed


def averaging_reasons(job: Job) -> tuple[Reason, ...]:
    """Why weights are averaged; nothing to say where they are not."""
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
    """Why the schedule is longer than the training is to be; nothing to say where it is not."""
    if laid_out == needed:
        return ()
    why = (
        f"The rate's decay is laid out over {counted(laid_out, 'epoch')}, not over the {needed} "
        "that goal.accuracy is likely to take, since training ends there: while the rate is high, "
        "an average of the weights is at a target sooner, in trainings of other tasks after "
        f"{percent(_SOONER, 0)} of the epochs of a schedule that ends with it."
    )
    return (Chosen(counted(laid_out, "epoch"), why, "assumed").reason("schedule"),)
