"""The learning rate over a whole training, as `batchwright schedule` shows it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchwright.records.base import Count, Document, Index, NonNegative, Positive, Record
from batchwright.records.plan_fields import AgsRule, LearningRateRule, Reason


class ScheduleRow(Record):
    """A stage of the plan, a stretch of one resolution, batch and rate, and when it is trained."""

    start: Index = Field(description="Epochs of training before the stage.")
    end: Count = Field(description="Epochs from the start of the training to the stage's end.")
    rate_stage: Index = Field(description="Stage of the learning rate, zero-based.")
    resolution: Count = Field(description="Training image side, in pixels.")
    local_batch_sizes: tuple[Count, ...] = Field(
        description="Samples per step of each worker, in rank order."
    )
    micro_batch_size: Count = Field(description="Most samples in one forward pass.")
    steps_per_epoch: Count | None = Field(
        description="Updates in an epoch; null under a parameter server, where each worker takes "
        "its own steps."
    )
    most_gain: float = Field(
        ge=1, description="Largest factor of `scaling=gain` on the rate; 1 without it."
    )
    most_factor: Positive = Field(
        1.0,
        description="Largest factor of adaptive gradient scaling on a tensor's gradient, with SGD; "
        "1 without it.",
    )

    @property
    def most(self) -> float:
        """Largest factor on the rate by both."""
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
    """The rate at one moment. Where the rate jumps there are two points: before and after."""

    epoch: NonNegative = Field(description="Epochs trained before this point.")
    samples: Index = Field(description="Samples trained on before this point, over all workers.")
    step: Index | None = Field(
        description="Updates before this point; null under a parameter server."
    )
    learning_rate: NonNegative = Field(
        description="Rate per step, before measured gain and gradient factors."
    )
    row: Index = Field(description="Index of the stage that holds there, zero-based.")
    what: str = Field("", description="What happens at this point, in words; empty: nothing.")


class RateSchedule(Document):
    """The learning rate over the epochs, with the plan's stages and the source of each choice."""

    format: Literal["batchwright-schedule/1"] = "batchwright-schedule/1"
    name: str = Field(description="Network and data, in words.")
    rule: LearningRateRule = Field(description="The rate as a function of samples seen.")
    scaled_to: Count | None = Field(
        description="Batch that the peak rate was scaled to, in samples: the global batch, or "
        "under a parameter server a local one; null if the rule gives that peak for no batch."
    )
    served: bool = Field(description="Whether a parameter server merges the workers' models.")
    ags: AgsRule | None = Field(description="Adaptive gradient scaling; null: none.")
    epochs: Count = Field(description="Length, in epochs.")
    samples_per_epoch: Count = Field(description="Training samples in one epoch.")
    warmup_steps: Index | None = Field(
        description="Updates that begin before the warm-up has ended; null under a parameter "
        "server."
    )
    rows: tuple[ScheduleRow, ...] = Field(min_length=1, description="The plan's stages, in order.")
    points: tuple[SchedulePoint, ...] = Field(description="The rate over the epochs, in order.")
    reasons: tuple[Reason, ...] = Field(description="Reasons of the plan that concern the rate.")
    doubts: tuple[str, ...] = Field(
        description="Settings that may not be intended, one line for each."
    )

    def _facts(self) -> list[tuple[str, str]]:
        return [
            ("of", self.name),
            ("epochs", str(self.epochs)),
            ("peak rate", f"{self.rule.peak:.3g}"),
            ("scaling", self.rule.scaling),
            ("warm-up", f"{self.rule.warmup_epochs:.3g} epochs"),
            ("decay", self.rule.decay),
            ("points", str(len(self.points))),
        ]
