"""Whether held-out accuracy is that of an average of the weights, and why."""

from __future__ import annotations

from batchwright.planning.chosen import Chosen
from batchwright.records import Job, Reason

AVERAGE_EPOCHS = 0.5
"""That the average looks back on: of five averages the one with which trainings of 12 and 16 epochs
came earliest to accuracies 0.5, 2 and 5 points below that of their end (docs/log.md)."""
_EARLIER = 0.86  # of the epochs that the weights take, over twelve trainings of four tasks


def averaged_epochs(job: Job) -> float | None:
    """Epochs that the average looks back on; `None`: the weights themselves are evaluated."""
    return AVERAGE_EPOCHS if job.averages else None


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
        f"so earlier: after {_EARLIER:.0%} of the epochs in trainings of four other tasks."
    )
    return (Chosen(value, why, "assumed").reason("average of weights"),)
