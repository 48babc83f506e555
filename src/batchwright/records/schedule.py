"""The learning rate over a whole training, as `batchwright schedule` shows it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchwright.records.base import Count, Document, Index, NonNegative, Positive, Record
from batchwright.records.plan_fields import AgsRule, LearningRateRule, Reason


class ScheduleRow(Record):
    """A stretch of one resolution, batch and rate: a row of the plan, and when it is."""

    start: Index = Field(description="Epochs before it.")
    end: Count = Field(description="Epochs until its end, counted from the start of the training.")
    rate_stage: Index = Field(description="Stage of the learning rate, zero-based.")
    resolution: Count = Field(description="Training image side, in pixels.")
    local_batch_sizes: tuple[Count, ...] = Field(
        description="Samples per step of each worker, in rank order."
    )
    micro_batch_size: Count = Field(description="Most samples in one forward pass.")
    steps_per_epoch: Count | None = Field(
        description="Updates in an epoch; null under a parameter server, where workers have their "
        "own."
    )
    most_gain: float = Field(
        ge=1, description="Most that `scaling=gain` may multiply the rate by; 1 without it."
    )
    most_factor: Positive = Field(
        1.0,
        description="Most that adaptive gradient scaling may multiply a tensor's gradient by, with "
        "SGD; 1 without it.",
    )

    @property
    def most(self) -> float:
        """Most that both may make of the rate."""
        return self.most_gain * self.most_factor

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all workers."""
        return sum(self.local_batch_sizes)

    @property
    def accumulation_steps(self) -> int:
        """Forward passes per update on the worker with the largest local batch."""
        return -(-max(self.local_batch_sizes) // self.micro_batch_size)


class SchedulePoint(Record):
    """The rate at one moment. Where it falls at once there are two: before and after."""

    epoch: NonNegative = Field(description="Epochs before it.")
    samples: Index = Field(description="Training samples before it, over all workers.")
    step: Index | None = Field(description="Updates before it; null under a parameter server.")
    learning_rate: NonNegative = Field(description="Per step, before gain and factors.")
    row: Index = Field(description="Row that holds there, zero-based.")
    what: str = Field("", description="What happens there, in words; empty: nothing.")


class RateSchedule(Document):
    """The learning rate against epochs, with the rows of the plan and where all comes from."""

    format: Literal["batchwright-schedule/1"] = "batchwright-schedule/1"
    name: str = Field(description="What is trained, in words.")
    rule: LearningRateRule = Field(description="The rate as a function of samples seen.")
    scaled_to: Count | None = Field(
        description="Samples of the step that the peak rate is for: over all workers, or of one "
        "under a parameter server; null if the peak is not what the rule says for any."
    )
    served: bool = Field(description="Whether a parameter server merges the workers' models.")
    ags: AgsRule | None = Field(description="Adaptive gradient scaling besides; null: none.")
    epochs: Count = Field(description="Length, in epochs.")
    samples_per_epoch: Count = Field(description="Training samples in one epoch.")
    warmup_steps: Index | None = Field(
        description="Updates that begin before the warm-up has ended; null under a parameter "
        "server."
    )
    rows: tuple[ScheduleRow, ...] = Field(min_length=1, description="Of the plan, in order.")
    points: tuple[SchedulePoint, ...] = Field(description="The rate, in order.")
    reasons: tuple[Reason, ...] = Field(description="Those of the plan that it rests on.")
    doubts: tuple[str, ...] = Field(description="What may not be meant, a line each.")

    def _facts(self) -> list[tuple[str, str]]:
        """The rule of the rate, and how long it holds."""
        return [
            ("of", self.name),
            ("epochs", str(self.epochs)),
            ("peak rate", f"{self.rule.peak:.3g}"),
            ("scaling", self.rule.scaling),
            ("warm-up", f"{self.rule.warmup_epochs:.3g} epochs"),
            ("decay", self.rule.decay),
            ("points", str(len(self.points))),
        ]
