"""The lines of ``metrics.jsonl``: each is one record, whose `kind` says which.

A line leaves out what has its default value. Every one may come from anyone, as lines reach a
service, so texts have a length and numbers a range.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchwright.records.base import Estimate, Record
from batchwright.records.run import (
    Count,
    EpochRecord,
    Index,
    Loss,
    NonNegative,
    Place,
    Positive,
    RoundRecord,
)

LONGEST_NOTE = 4000
"""Characters of a note."""


class WorkerStep(Record):
    """A worker's part of a step; seconds are means over the steps since the line before."""

    local_batch_size: Index = Field(description="Samples per step.")
    compute_seconds: NonNegative = Field(description="Input, forward, backward, update.")
    wait_seconds: NonNegative = Field(description="For slower workers.")


class StepLine(Record):
    """Where training is inside an epoch; at most twice a second."""

    kind: Literal["step"]
    epoch: Index = Field(description="Zero-based.")
    step: Index = Field(description="Steps done in this epoch.")
    steps: Index = Field(description="Steps of this epoch.")
    training_seconds: NonNegative = Field(description="Training time in this epoch so far.")
    train_loss: Loss | None = Field(description="Mean over the epoch so far; null if not finite.")
    samples_per_second: NonNegative = Field(description="Of all workers, in this epoch so far.")
    learning_rate: NonNegative = Field(description="Of the last step, first parameter group.")
    workers: tuple[WorkerStep, ...] = Field(description="In rank order.")

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
    """The local batches from a step on: as an epoch begins, and where they change."""

    kind: Literal["shares"]
    epoch: Index = Field(description="Zero-based.")
    step: Index = Field(description="First step that has them, zero-based.")
    steps: Index = Field(description="Steps of this epoch.")
    workers: tuple[WorkerShare, ...] = Field(description="In rank order.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples per step of each worker, in rank order."""
        return tuple(one.local_batch_size for one in self.workers)


class EpochLine(Record):
    """A finished epoch, and what the plan predicted for it."""

    kind: Literal["epoch"]
    record: EpochRecord
    epochs: Count = Field(description="Epochs of the run.")
    predicted_seconds: Positive | None = Field(
        None, description="Predicted for `training_seconds`; null without a prediction."
    )
    predicted_top1: Estimate | None = Field(
        None, description="Predicted held-out accuracy, in [0, 1]; null without a prediction."
    )
    expected_top1: Estimate | None = Field(
        None,
        description="Held-out accuracy expected after the last epoch, by those so far; null where "
        "that is not told, or `goal.accuracy` is likely to end the run sooner.",
    )
    likely_epochs: Count | None = Field(
        None,
        description="Epochs that the run is likely to take, where `goal.accuracy` may end it; null "
        "where that is not told.",
    )


class RoundLine(Record):
    """A finished round with the parameter server."""

    kind: Literal["round"]
    record: RoundRecord
    learning_rate: NonNegative = Field(description="Of its last step.")
    committed: Index = Field(description="Samples of all rounds that have ended.")


class EvaluationLine(Record):
    """The accuracy of an epoch whose line was written before it was known."""

    kind: Literal["evaluation"]
    epoch: Index = Field(description="Zero-based.")
    top1: Annotated[float, Field(ge=0, le=1)] | None = Field(description="Held-out accuracy.")


class NoteLine(Record):
    """Something that a person should read."""

    kind: Literal["note"]
    text: Annotated[str, Field(max_length=LONGEST_NOTE)]


RunLine = Annotated[
    StepLine | SharesLine | EpochLine | RoundLine | EvaluationLine | NoteLine,
    Field(discriminator="kind"),
]


def note(text: str) -> NoteLine:
    """A note, cut to its length; bytes of a file's name that are no UTF-8 become question marks."""
    return NoteLine(kind="note", text=text[:LONGEST_NOTE].encode(errors="replace").decode())
