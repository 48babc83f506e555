"""The lines of ``metrics.jsonl``: each is a record; its `kind` says of which type.

Values at their defaults are left out. A service gets lines from anyone, so lengths of texts and
ranges of numbers are limited.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchwright.records.base import Count, Estimate, Index, Record
from batchwright.records.run import EpochRecord, Loss, NonNegative, Place, Positive, RoundRecord

LONGEST_NOTE = 4000
"""Longest text of a note, in characters."""


class WorkerStep(Record):
    """A worker's part of a step; seconds are means over the steps since the previous line."""

    local_batch_size: Index = Field(description="Samples per step.")
    compute_seconds: NonNegative = Field(
        description="Seconds of input, forward pass, backward pass and update."
    )
    wait_seconds: NonNegative = Field(description="Seconds of waiting for slower workers.")


class StepLine(Record):
    """Progress inside an epoch; written at most twice a second."""

    kind: Literal["step"]
    epoch: Index = Field(description="Number of the epoch, zero-based.")
    step: Index = Field(description="Steps done in this epoch.")
    steps: Index = Field(description="Steps of this epoch.")
    training_seconds: NonNegative = Field(description="Seconds of training in this epoch so far.")
    train_loss: Loss | None = Field(
        description="Mean training loss in this epoch so far; null if not finite."
    )
    samples_per_second: NonNegative = Field(
        description="Samples per second of all workers in this epoch so far."
    )
    learning_rate: NonNegative = Field(
        description="Learning rate of the last step, of the first parameter group."
    )
    workers: tuple[WorkerStep, ...] = Field(description="The workers, in rank order.")

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all workers."""
        return sum(one.local_batch_size for one in self.workers)


class WorkerShare(Record):
    """A worker's part of the samples."""

    place: Place = Field(description="Host and device, such as `node1/cuda:0`.")
    local_batch_size: Index = Field(description="Samples per step.")
    speed: NonNegative | None = Field(None, description="Samples per second; null if not known.")


class SharesLine(Record):
    """The local batches from a step on; written at the start and at each change."""

    kind: Literal["shares"]
    epoch: Index = Field(description="Number of the epoch, zero-based.")
    step: Index = Field(description="First step with these local batches, zero-based.")
    steps: Index = Field(description="Steps of this epoch.")
    workers: tuple[WorkerShare, ...] = Field(description="The workers, in rank order.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples per step of each worker, in rank order."""
        return tuple(one.local_batch_size for one in self.workers)


class EpochLine(Record):
    """A finished epoch, with predictions for it and for the run's end."""

    kind: Literal["epoch"]
    record: EpochRecord
    epochs: Count = Field(description="Epochs of the run.")
    predicted_seconds: Positive | None = Field(
        None, description="Predicted `training_seconds`; null without a prediction."
    )
    predicted_top1: Estimate | None = Field(
        None, description="Predicted held-out accuracy, in [0, 1]; null without a prediction."
    )
    expected_top1: Estimate | None = Field(
        None,
        description="Held-out accuracy expected after the last epoch, from the epochs so far; null "
        "where it is unknown, or `goal.accuracy` is likely to end the run sooner.",
    )
    likely_epochs: Count | None = Field(
        None,
        description="Epochs that the run is likely to take, where `goal.accuracy` may end it; null "
        "where they are unknown.",
    )


class RoundLine(Record):
    """A finished round with the parameter server."""

    kind: Literal["round"]
    record: RoundRecord
    learning_rate: NonNegative = Field(description="Learning rate of the round's last step.")
    committed: Index = Field(description="Samples of all finished rounds.")


class EvaluationLine(Record):
    """The accuracy of an epoch whose line was written before the evaluation ended."""

    kind: Literal["evaluation"]
    epoch: Index = Field(description="Number of the epoch, zero-based.")
    top1: Annotated[float, Field(ge=0, le=1)] | None = Field(description="Held-out accuracy.")


class NoteLine(Record):
    """A message for people."""

    kind: Literal["note"]
    text: Annotated[str, Field(max_length=LONGEST_NOTE)]


RunLine = Annotated[
    StepLine | SharesLine | EpochLine | RoundLine | EvaluationLine | NoteLine,
    Field(discriminator="kind"),
]


def note(text: str) -> NoteLine:
    """A note, cut to `LONGEST_NOTE`; file names' bytes that are no UTF-8 become question marks."""
    return NoteLine(kind="note", text=text[:LONGEST_NOTE].encode(errors="replace").decode())
