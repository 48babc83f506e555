"""What a plan holds: a header and a table of stages, with what was predicted and why."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchwright.records.base import (
    Augmentation,
    Count,
    Document,
    Estimate,
    Index,
    Method,
    NonNegative,
    OptimizerName,
    Positive,
    Precision,
    Record,
    Shown,
    Source,
)
from batchwright.records.job import Job
from batchwright.records.profile import DataFacts, NetworkFacts
from batchwright.records.registries.methods import METHODS, MethodSpec
from batchwright.records.text.formatting import (
    between,
    in_bytes,
    in_seconds,
    local_batches,
    shares_between,
)

_MOST_SHOWN = 8  # candidates in a notebook


class KindCount(Record):
    """So many workers of one kind."""

    kind: str = Field(description="Name of the kind.")
    count: Count = Field(description="Workers of it.")


class Prediction(Record):
    """What one candidate, so many workers with a batch at a resolution, would take."""

    workers: Count = Field(description="Workers.")
    kinds: tuple[KindCount, ...] = Field((), description="Their kinds; empty: the measured one.")
    global_batch_size: Count = Field(description="Samples per step over all workers.")
    local_batch_size: Count = Field(description="Largest local batch, samples per step.")
    micro_batch_size: Count = Field(description="Most samples in one forward pass.")
    resolution: Count = Field(description="Image side, in pixels.")
    steps_per_epoch: Count = Field(description="Updates per epoch.")
    step_seconds: Estimate = Field(description="Seconds per step.")
    epoch_seconds: Estimate = Field(
        description="Seconds per epoch of training, without evaluation and checkpoints."
    )
    peak_bytes: Estimate = Field(description="Peak tensor bytes on one worker.")
    efficiency: Estimate | None = Field(
        None,
        description="Progress per sample against the base batch, at the rate that each is given; "
        "null if unknown.",
    )
    epochs: Estimate | None = Field(
        None,
        description="Epochs to the target accuracy; null if nothing tells, or if they are more "
        "than 10 times those of the job.",
    )
    trained_epochs: Count | None = Field(
        None,
        description="Epochs that the plan would train it to reach the target accuracy; null where "
        "it does not choose them.",
    )
    target_seconds: Estimate | None = Field(
        None,
        description="Where the objective is `target-accuracy`: seconds of training to it, in the "
        "epochs that were chosen; where nothing tells these, for as much progress as an "
        "epoch with the base batch makes. Null with another objective, or if unknown.",
    )
    accuracy: Estimate | None = Field(
        None,
        description="Held-out accuracy after the job's epochs, or after those chosen for it, a "
        "share; null if unknown.",
    )
    train_seconds: Estimate | None = Field(
        None, description="Seconds of the whole training, evaluation included."
    )
    cost: Estimate | None = Field(
        None, description="Of the whole training, in the price's currency; null without price."
    )
    extrapolated: bool = Field(description="Whether the batch lies outside what was measured.")
    assumed: bool = Field(
        False, description="Whether stated figures, not measured ones, went in: link or speed."
    )
    frontier: bool = Field(
        False,
        description="Whether no candidate of its resolution is better in time, cost and, where "
        "that is known, accuracy.",
    )
    level: bool = Field(
        False,
        description="Whether what was measured cannot tell it from the chosen one: the choice may "
        "as well have fallen on it.",
    )
    refused: str = Field("", description="The limit it misses, in words; empty if none.")


class Knee(Record):
    """Where more batch stops paying, for one cluster size and resolution."""

    workers: Count = Field(description="Workers.")
    kinds: tuple[KindCount, ...] = Field((), description="Their kinds; empty: the measured one.")
    resolution: Count = Field(description="Image side, in pixels.")
    global_batch_size: Count | None = Field(
        description="Smallest candidate whose doubling gains too little; null if all gain enough."
    )
    low: float | None = Field(
        None, description="Where it would be at the lower end of the fit's interval, in samples."
    )
    high: float | None = Field(None, description="The same at its upper end, in samples.")
    closed_form: float | None = Field(
        None, description="Where a straight line puts it, in samples; null if it is none."
    )
    kneedle: Count | None = Field(None, description="What Kneedle says; null if nothing.")


class HeldOut(Record):
    """A step that was not measured, predicted so that `check` can."""

    workers: Count = Field(description="Workers that compute at the same time.")
    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    step_seconds: Estimate = Field(description="Seconds per step.")
    peak_bytes: Estimate = Field(description="Peak tensor bytes on one worker.")
    resident_bytes: Estimate | None = Field(
        None, description="Largest resident size of a worker process; null if not measured."
    )


class Alternative(Record):
    """What else could have been chosen."""

    value: str = Field(description="The value, with its unit.")
    loss: str = Field(description="What choosing it would lose, or gain, by prediction.")


class Reason(Record):
    """Why a choice is what it is."""

    choice: str = Field(description="What was chosen, for example `global batch`.")
    value: str = Field(description="The value, with its unit.")
    why: str = Field(description="The reason, in a sentence.")
    source: Source = Field(description="Where it came from.")
    reference: str = Field("", description="For `published`: who, when, where.")
    alternatives: tuple[Alternative, ...] = Field((), description="What else there was.")


class LearningRateRule(Record):
    """The learning rate as a function of samples seen; see `algorithms.learning_rate`."""

    base: Positive = Field(description="Rate at the base batch, per step.")
    base_batch: Count = Field(description="Global batch at which the base rate holds.")
    scaling: Literal["linear", "sqrt", "gain", "none"] = Field(
        description="Growth with the batch; `gain` is measured, and multiplies the rate besides."
    )
    peak: Positive = Field(description="Rate at the planned batch, after warm-up, per step.")
    warmup_epochs: NonNegative = Field(
        description="Length of the rise at the start, in epochs: a line, for `one-cycle` a cosine."
    )
    decay: Literal["cosine", "steps", "one-cycle", "none"] = Field(
        description="Shape after warm-up; `one-cycle` begins its rise at its own rate, too."
    )
    warmup_start: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the peak at which the rise begins; null: the base rate, for "
        "`one-cycle` its own.",
    )
    tried: Positive = Field(
        1.0,
        description="The rate over that which a plan without trials gives: what trials at several "
        "rates found best. Base and peak hold it.",
    )


class AgsRule(Record):
    """Adaptive gradient scaling; see `training.step.gradient_scaling`."""

    mode: Literal["norm", "gain"] = Field(
        description="Factors are the ratio of gradient norms at two batches, or its square."
    )
    base_batch: Count = Field(description="Batch whose gradient norms are aimed at, in samples.")
    least: Positive = Field(description="Smallest factor.")
    most: Positive | None = Field(
        description="Largest factor; null: that of noise alone at the step's batch, or what the "
        "rate's rule has left to linear scaling."
    )
    lookback: Count = Field(description="Steps over which norms are averaged.")


class ServerRule(Record):
    """How a parameter server merges the workers' weights."""

    consistency: Literal["bsp", "ssp", "asp"] = Field(
        description="Who waits for whom: all for all, for the slowest within bounds, nobody."
    )
    staleness: Index | None = Field(
        description="For `ssp`: most rounds ahead of the slowest; else null."
    )
    merge: Literal["journal", "compsac"] = Field(
        description="With update factor f: (w + f w_i) / (1 + f), or ((2 - f) w + f w_i) / 2."
    )
    update_factor: Literal["ratio", "sqrt", "none"] = Field(
        description="What the table's update factors are, of small over large samples per round."
    )
    exchange_steps: Count | None = Field(
        description="Steps of a worker between two exchanges; null: once a round."
    )
    momentum: Literal["keep", "reset"] = Field(description="Of a worker, after an exchange.")
    small_workers: Index = Field(
        description="Workers with the small batch; they follow the others in rank order."
    )
    extra_time: float = Field(
        ge=1, description="Time of a round over that with large batches alone."
    )


class Stage(Record):
    """A stretch of epochs under one resolution, batch and rate: a row of the plan."""

    epochs: Count = Field(description="Length, in epochs.")
    resolution: Count = Field(description="Training image side, in pixels.")
    learning_rate: Positive = Field(description="Rate before warm-up and decay, per step.")
    dropout: float = Field(ge=0, lt=1, description="Share of features dropped.")
    augmentation: Augmentation = Field(description="Random changes to training images.")
    augmentation_strength: NonNegative = Field(
        1.0, description="Largest random shift, relative to the usual eighth of the side."
    )
    rate_stage: Index = Field(
        0, description="Stage of the learning rate that the row is a part of, zero-based."
    )
    samples_per_round: tuple[Count, ...] = Field(
        (),
        description="Samples of each worker between two exchanges with the parameter server, in "
        "rank order, an epoch in all; empty without one.",
    )
    update_factors: tuple[Positive, ...] = Field(
        (), description="Weight of each worker's model in a merge, in rank order; empty as above."
    )
    local_batch_sizes: tuple[Count, ...] = Field(
        min_length=1, description="Samples per step of each worker, in rank order."
    )
    micro_batch_size: Count = Field(description="Most samples in one forward pass.")
    fixed_samples: NonNegative = Field(
        0.0, description="Fixed cost of a step on a worker, as so many samples' worth; 0: unknown."
    )
    sample_seconds: NonNegative | None = Field(
        None,
        description="Time per sample of a step on one worker, without exchange, in seconds; null: "
        "unknown. With the next, what a virtual cluster's clock goes by.",
    )
    step_seconds: NonNegative | None = Field(
        None, description="Fixed time of a step on one worker, in seconds; null: unknown."
    )
    predicted_epoch_seconds: Estimate | None = Field(
        None, description="Seconds per epoch of training; null where nothing was measured."
    )
    predicted_bytes: Estimate | None = Field(
        None, description="Peak tensor bytes on one worker; null where nothing was measured."
    )

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.local_batch_sizes)

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all workers."""
        return sum(self.local_batch_sizes)

    @property
    def accumulation_steps(self) -> int:
        """Forward passes per update on the worker with the largest local batch."""
        return -(-max(self.local_batch_sizes) // self.micro_batch_size)


class PlanFields(Document):
    """The fields of a `Plan`, apart from it for those who put them into words."""

    format: Literal["batchwright-plan/1"] = "batchwright-plan/1"
    job: Job = Field(description="The job it was made for, resolved.")
    data: DataFacts = Field(description="The data it was made for.")
    network: NetworkFacts = Field(description="The network it was made for.")
    method: Method = Field(
        description="How batch and resolution are used; with `dynamic-batch` the table's local "
        "batches are where it starts."
    )
    merge: Literal["sample-weighted all-reduce", "parameter server"] = Field(
        "sample-weighted all-reduce", description="How the workers' learning comes together."
    )
    server: ServerRule | None = Field(None, description="The parameter server; null without.")
    update: OptimizerName = Field(description="Optimizer.")
    ags: AgsRule | None = Field(None, description="Adaptive gradient scaling; null: none.")
    average_epochs: Positive | None = Field(
        None,
        description="Held-out accuracy and delivered weights are those of an exponential average "
        "of the weights that looks back on so many epochs; null: of the weights.",
    )
    precision: Precision = Field(description="Number format of the forward and backward pass.")
    learning_rate: LearningRateRule = Field(description="The rate over time.")
    stages: tuple[Stage, ...] = Field(min_length=1, description="The table.")
    considered: tuple[Prediction, ...] = Field((), description="Candidates, small to large.")
    max_epochs: Count | None = Field(
        None,
        description="Epochs that the job allows, where the plan chose fewer to reach its target: "
        "a run that misses it goes on for so many at most. Null where the plan does not choose.",
    )
    target_epochs: Count | None = Field(
        None,
        description="Epochs in which training is likely to reach its target and so to end, where "
        "the schedule is laid out over more; else null.",
    )
    epoch_accuracy: tuple[Estimate | None, ...] = Field(
        (),
        description="Held-out accuracy after each epoch, a share, as counted on the job's held-out "
        "images: while the rate is high it is below what a whole training of as many epochs would "
        "reach. Null where few steps were taken; empty if nothing tells.",
    )
    knees: tuple[Knee, ...] = Field((), description="For each cluster size and resolution.")
    held_out: tuple[HeldOut, ...] = Field((), description="Predictions for `check` to measure.")
    kinds: tuple[KindCount, ...] = Field((), description="Workers in rank order, by kind.")
    threads: Count | None = Field(
        None,
        description="Compute threads that each worker had where its steps were timed. Null where "
        "nothing was measured, or kinds differ in them.",
    )
    cores: Count | None = Field(
        None,
        description="Cores that a worker on a GPU needs, for which engines are asked. Null where "
        "these are as many as `threads`.",
    )
    reasons: tuple[Reason, ...] = Field((), description="Why, choice by choice.")

    @property
    def worker_cores(self) -> int | None:
        """Cores of each worker, as far as they are known."""
        return self.cores or self.threads

    @property
    def method_spec(self) -> MethodSpec:
        """`method`'s entry in the registry."""
        return METHODS[self.method]

    def _facts(self) -> list[tuple[str, str]]:
        sides = ", ".join(str(side) for side in sorted({one.resolution for one in self.stages}))
        top = max(self.stages, key=lambda stage: stage.resolution)
        return [
            ("network", self.network.name),
            ("data", self.data.name),
            ("method", self.method),
            ("workers", str(self.workers)),
            ("global batch", f"{top.global_batch_size} ({local_batches(top.local_batch_sizes)})"),
            ("side", f"{sides} px"),
            ("optimizer", self.update),
            ("rate", f"{self.stages[0].learning_rate:.3g}"),
            ("precision", self.precision),
            ("epochs", str(self.epochs)),
            ("seconds per epoch", in_seconds(top.predicted_epoch_seconds)),
        ]

    def _tables(self) -> list[Shown]:
        """The candidates that a choice could fall on, the chosen one in bold."""
        chosen = -1 if self.chosen is None else self.considered.index(self.chosen)
        rivals = [(at, one) for at, one in enumerate(self.considered) if not one.refused]
        if len(rivals) > _MOST_SHOWN:  # what is better in nothing is left out
            rivals = [(at, one) for at, one in rivals if at == chosen or one.frontier or one.level]
        kept = [at for at, _ in rivals]
        if len(kept) > _MOST_SHOWN:  # those around the choice
            place = kept.index(chosen) if chosen in kept else 0
            first = max(0, min(place - _MOST_SHOWN // 2, len(kept) - _MOST_SHOWN))
            kept = kept[first : first + _MOST_SHOWN]
        rows = [
            (
                str(one.workers),
                str(one.global_batch_size),
                f"{one.resolution} px",
                between(one.epoch_seconds),
                shares_between(one.accuracy) if one.accuracy else "not known",
                in_bytes(one.peak_bytes),
            )
            for one in (self.considered[index] for index in kept)
        ]
        head = ("workers", "global batch", "side", "s / epoch", "accuracy", "memory")
        bold = kept.index(chosen) if chosen in kept else -1
        name = f"{len(rows)} of {len(self.considered)} candidates"
        name += ", the choice in bold" if bold >= 0 else ""
        return [Shown(name, head, rows, bold)] if rows else []

    @property
    def epochs(self) -> int:
        """Epochs over all stages."""
        return sum(stage.epochs for stage in self.stages)

    def likely_epochs(self, done: int = 0) -> int:
        """Epochs that training is likely to take in all, ``done`` of them done.

        Those to its target, and all of the schedule once these have gone by without it.
        """
        likely = self.target_epochs or self.epochs
        return likely if done < likely else self.epochs

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.stages[0].workers

    @property
    def top_resolution(self) -> int:
        """Largest training resolution, in pixels; evaluation uses it."""
        return max(stage.resolution for stage in self.stages)

    @property
    def chosen(self) -> Prediction | None:
        """The candidate that a plan of one row trains; `None` with several, or if not listed."""
        if len(self.stages) > 1:
            return None
        (stage,) = self.stages
        size = self.workers, stage.global_batch_size, stage.resolution
        found = (
            one
            for one in self.considered
            if (one.workers, one.global_batch_size, one.resolution) == size
            and one.kinds == self.kinds
        )
        return next(found, None)

    def evaluates_after(self, epoch: int) -> bool:
        """Whether the model is evaluated after a zero-based epoch; after the last it always is."""
        return (epoch + 1) % self.job.evaluate_epochs == 0 or epoch + 1 == self.epochs

    def stage_of(self, epoch: int) -> int:
        """Index of the stage that holds the zero-based ``epoch``; `IndexError` past the end."""
        last = 0
        for index, stage in enumerate(self.stages):
            last += stage.epochs
            if epoch < last:
                return index
        raise IndexError(f"epoch {epoch} is past the plan's {last}")
