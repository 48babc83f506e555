"""What a plan holds: a header and a table of stages, with predictions and reasons."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Literal, Self

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
    sum_of,
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
    """A number of workers of one kind."""

    kind: str = Field(description="Name of the kind.")
    count: Count = Field(description="Number of workers of this kind.")


class Prediction(Record):
    """A candidate (workers, batch and resolution) and what is predicted for it."""

    workers: Count = Field(description="Number of workers.")
    kinds: tuple[KindCount, ...] = Field(
        (), description="Kinds of the workers; empty: all of the measured kind."
    )
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
        description="Progress per sample relative to the base batch, each at its own learning "
        "rate; null if unknown.",
    )
    epochs: Estimate | None = Field(
        None,
        description="Epochs to the target accuracy; null if unknown, or if more than 10 times "
        "those of the job.",
    )
    trained_epochs: Count | None = Field(
        None,
        description="Epochs that the plan would train this candidate to reach the target accuracy; "
        "null where the plan does not choose epochs.",
    )
    target_seconds: Estimate | None = Field(
        None,
        description="With the objective `target-accuracy`: seconds of training to the target, in "
        "the chosen epochs. Where these are unknown: seconds for as much progress as one "
        "epoch with the base batch. Null with another objective, or if unknown.",
    )
    accuracy: Estimate | None = Field(
        None,
        description="Held-out accuracy, a share, after the job's epochs or those chosen for this "
        "candidate; null if unknown.",
    )
    train_seconds: Estimate | None = Field(
        None, description="Seconds of the whole training, evaluation included."
    )
    cost: Estimate | None = Field(
        None, description="Cost of the whole training, in the price's currency; null without price."
    )
    extrapolated: bool = Field(description="Whether the batch lies outside what was measured.")
    assumed: bool = Field(
        False, description="Whether it rests on a stated link or speed, not on measured ones."
    )
    frontier: bool = Field(
        False,
        description="Whether no candidate of its resolution is better in time, cost and, where "
        "that is known, accuracy.",
    )
    level: bool = Field(
        False,
        description="Whether the measurements cannot tell it from the chosen candidate.",
    )
    refused: str = Field("", description="The limit that it violates, in words; empty: none.")


class Knee(Record):
    """The batch beyond which larger ones save too little, for one cluster and resolution."""

    workers: Count = Field(description="Number of workers.")
    kinds: tuple[KindCount, ...] = Field(
        (), description="Kinds of the workers; empty: all of the measured kind."
    )
    resolution: Count = Field(description="Image side, in pixels.")
    global_batch_size: Count | None = Field(
        description="Smallest candidate whose doubling gains too little, in samples; null if all "
        "gain enough."
    )
    low: float | None = Field(
        None, description="The knee at the lower end of the fit's interval, in samples."
    )
    high: float | None = Field(
        None, description="The knee at the upper end of the fit's interval, in samples."
    )
    closed_form: float | None = Field(
        None,
        description="The knee of a straight line through the step times, in samples; null if the "
        "step times are not such a line.",
    )
    kneedle: Count | None = Field(
        None, description="The knee that the Kneedle algorithm finds, in samples; null: none."
    )


class HeldOut(Record):
    """A step that was predicted but not measured, for `check` to measure."""

    workers: Count = Field(description="Workers that compute at the same time.")
    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    step_seconds: Estimate = Field(description="Seconds per step.")
    peak_bytes: Estimate = Field(description="Peak tensor bytes on one worker.")
    resident_bytes: Estimate | None = Field(
        None, description="Largest resident size of a worker process; null if not measured."
    )


class Alternative(Record):
    """Another value that could have been chosen."""

    value: str = Field(description="The value, with its unit.")
    loss: str = Field(description="Predicted loss, or gain, if it were chosen, in words.")


class Reason(Record):
    """The reason of one choice."""

    choice: str = Field(description="Name of the choice, for example `global batch`.")
    value: str = Field(description="The chosen value, with its unit.")
    why: str = Field(description="The reason, in a sentence.")
    source: Source = Field(description="Where the value comes from.")
    reference: str = Field("", description="For `published`: authors, year and place.")
    alternatives: tuple[Alternative, ...] = Field((), description="Other values, with their loss.")


class LearningRateRule(Record):
    """The learning rate as a function of samples seen; see `algorithms.learning_rate`."""

    base: Positive = Field(description="Rate at the base batch, per step.")
    base_batch: Count = Field(description="Global batch at which the base rate holds.")
    scaling: Literal["linear", "sqrt", "gain", "none"] = Field(
        description="How the rate grows with the batch; `gain` is a measured factor on top."
    )
    peak: Positive = Field(description="Rate at the planned batch, after warm-up, per step.")
    warmup_epochs: NonNegative = Field(
        description="Length of the warm-up in epochs: a linear rise, for `one-cycle` a cosine."
    )
    decay: Literal["cosine", "steps", "one-cycle", "none"] = Field(
        description="Shape after the warm-up; `one-cycle` also has a start of its own."
    )
    warmup_start: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Rate at the start of the warm-up, as a share of the peak; null: the base "
        "rate, for `one-cycle` its own start.",
    )
    tried: Positive = Field(
        1.0,
        description="Factor that trials at several rates found best, relative to the rate of a "
        "plan without trials. It is part of base and peak.",
    )


class AgsRule(Record):
    """Adaptive gradient scaling; see `training.step.gradient_scaling`."""

    mode: Literal["norm", "gain"] = Field(
        description="Factors are the ratio of gradient norms at two batches, or its square."
    )
    base_batch: Count = Field(
        description="Batch whose gradient norms the factors aim at, in samples."
    )
    least: Positive = Field(description="Smallest factor.")
    most: Positive | None = Field(
        description="Largest factor; null: the smaller of the factor that noise alone gives at the "
        "step's batch and of what the rate's rule leaves up to linear scaling."
    )
    lookback: Count = Field(description="Steps over which norms are averaged.")


class ServerRule(Record):
    """How a parameter server merges the workers' weights."""

    consistency: Literal["bsp", "ssp", "asp"] = Field(
        description="Whom workers wait for: each other (`bsp`), the slowest beyond `staleness` "
        "(`ssp`), nobody (`asp`)."
    )
    staleness: Index | None = Field(
        description="For `ssp`: most rounds ahead of the slowest; else null."
    )
    merge: Literal["journal", "compsac"] = Field(
        description="With update factor f: (w + f w_i) / (1 + f), or ((2 - f) w + f w_i) / 2."
    )
    update_factor: Literal["ratio", "sqrt", "none"] = Field(
        description="How update factors follow from samples per round, small over large."
    )
    exchange_steps: Count | None = Field(
        description="Steps of a worker between two exchanges; null: once a round."
    )
    momentum: Literal["keep", "reset"] = Field(
        description="What becomes of a worker's momentum after an exchange."
    )
    small_workers: Index = Field(
        description="Number of workers with the small batch; they have the highest ranks."
    )
    extra_time: float = Field(
        ge=1, description="Time of a round relative to one with large batches alone."
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
        "rank order; their sum is an epoch. Empty without a server.",
    )
    update_factors: tuple[Positive, ...] = Field(
        (),
        description="Weight of each worker's model in a merge, in rank order; empty without a "
        "server.",
    )
    local_batch_sizes: tuple[Count, ...] = Field(
        min_length=1, description="Samples per step of each worker, in rank order."
    )
    micro_batch_size: Count = Field(description="Most samples in one forward pass.")
    fixed_samples: NonNegative = Field(
        0.0, description="Fixed time of a step on a worker, counted in samples; 0: unknown."
    )
    sample_seconds: NonNegative | None = Field(
        None,
        description="Time per sample of a step on one worker, without exchange, in seconds; null: "
        "unknown. A virtual cluster's clock uses it with `step_seconds`.",
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
    """The fields of a `Plan`, without its `explain`, whose module needs this type itself."""

    format: Literal["batchwright-plan/1"] = "batchwright-plan/1"
    job: Job = Field(description="The job that the plan was made for, resolved.")
    data: DataFacts = Field(description="The data that the plan was made for.")
    network: NetworkFacts = Field(description="The network that the plan was made for.")
    method: Method = Field(
        description="How batch and resolution are used; with `dynamic-batch` the table's local "
        "batches are the first ones."
    )
    merge: Literal["sample-weighted all-reduce", "parameter server"] = Field(
        "sample-weighted all-reduce", description="How the workers' gradients or models are merged."
    )
    server: ServerRule | None = Field(None, description="The parameter server; null without.")
    update: OptimizerName = Field(description="Name of the optimizer.")
    ags: AgsRule | None = Field(None, description="Adaptive gradient scaling; null: none.")
    average_epochs: Positive | None = Field(
        None,
        description="Epochs that an exponential average of the weights looks back on; held-out "
        "accuracy and delivered weights are those of the average. Null: no average.",
    )
    judged_from: Index = Field(
        0,
        description="First zero-based epoch whose accuracy counts for `goal.patience`. Accuracy "
        "before it does not compare: a cycle had another resolution or rate, or the rate had come "
        "down before the run was extended.",
    )
    precision: Precision = Field(description="Number format of the forward and backward pass.")
    learning_rate: LearningRateRule = Field(description="The learning rate over time.")
    stages: tuple[Stage, ...] = Field(min_length=1, description="The table of stages, in order.")
    growth: tuple[Stage, ...] = Field(
        (),
        description="Rows with larger batches, small to large, to one of which later epochs change "
        "where the gradient noise scale has grown as much since the first epoch. Empty: the batch "
        "does not grow.",
    )
    considered: tuple[Prediction, ...] = Field((), description="Candidates, small to large.")
    max_epochs: Count | None = Field(
        None,
        description="Most epochs of a run that misses its target in those that the plan chose, as "
        "the job allows. Null where the plan does not choose the epochs.",
    )
    target_epochs: Count | None = Field(
        None,
        description="Epochs in which training is likely to reach its target and so to end, where "
        "the schedule is laid out over more; else null.",
    )
    train_seconds: Estimate | None = Field(
        None,
        description="Predicted seconds of the whole training, in the epochs that it is likely to "
        "take: evaluation, compiling and lost work included. Null if unknown, or if the plan was "
        "changed while training.",
    )
    epoch_accuracy: tuple[Estimate | None, ...] = Field(
        (),
        description="Predicted accuracy on the job's held-out images after each epoch, a share. "
        "While the rate is high it is lower than at the end of a training of as many epochs. "
        "Null after few steps; empty if unknown.",
    )
    end_loss: Estimate | None = Field(
        None,
        description="Predicted cross entropy on the job's held-out images at the end of training; "
        "null if unknown.",
    )
    knees: tuple[Knee, ...] = Field((), description="The knee of each cluster size and resolution.")
    held_out: tuple[HeldOut, ...] = Field((), description="Predictions for `check` to measure.")
    kinds: tuple[KindCount, ...] = Field((), description="Workers in rank order, by kind.")
    threads: Count | None = Field(
        None,
        description="Compute threads of each worker when its steps were timed. Null where nothing "
        "was measured, or where kinds of workers differ.",
    )
    cores: Count | None = Field(
        None,
        description="Cores that a worker on a GPU needs, which engines are asked to reserve. Null "
        "where they are as many as `threads`.",
    )
    reasons: tuple[Reason, ...] = Field((), description="The reason of each choice.")

    @property
    def worker_cores(self) -> int | None:
        """Cores that each worker needs; `None` if unknown."""
        return self.cores or self.threads

    @property
    def method_spec(self) -> MethodSpec:
        """The method's entry in the registry."""
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
        """The candidates that were not refused, the chosen one in bold."""
        chosen = -1 if self.chosen is None else self.considered.index(self.chosen)
        kept = [at for at, one in enumerate(self.considered) if not one.refused]
        if len(kept) > _MOST_SHOWN:
            ones = self.considered
            kept = [at for at in kept if at == chosen or ones[at].frontier or ones[at].level]
        if len(kept) > _MOST_SHOWN:  # the neighbours of the chosen one
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
        """Epochs that training is likely to take in all, after ``done`` epochs.

        Those to its target, and the whole schedule's once they have passed without reaching it.
        """
        likely = self.target_epochs or self.epochs
        return likely if done < likely else self.epochs

    @property
    def seconds_of_steps(self) -> Estimate | None:
        """Predicted seconds of all steps, in the likely epochs; `None` if unknown."""
        rows = [(row.epochs, row.predicted_epoch_seconds) for row in self.stages]
        return sum_of(rows, over=self.epochs / self.likely_epochs())

    @property
    def whole_seconds(self) -> Estimate | None:
        """Predicted seconds of the whole training; those of all steps where no more is known."""
        return self.train_seconds or self.seconds_of_steps

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
        """The candidate that a plan of one stage trains; `None` with several, or if not listed.

        `None` with a parameter server, too: candidates take their steps together.
        """
        if len(self.stages) > 1 or self.server is not None:
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

    def keeps_after(self, epoch: int) -> bool:
        """Whether the checkpoint after a zero-based epoch stays."""
        every = self.job.checkpoint_epochs
        return every is not None and (epoch + 1) % every == 0

    def row(self, epoch: int, batch: int = 0) -> Stage:
        """The row of a zero-based epoch; with a grown global batch the growth row that has it.

        Args:
            epoch: The epoch; `IndexError` past the end.
            batch: Global batch that the epoch had, in samples, if it had begun.
        """
        planned = self.stages[self.stage_of(epoch)]
        grown = [row for row in self.growth if row.global_batch_size <= batch]
        return max((planned, *grown), key=lambda row: row.global_batch_size)

    def as_trained(self, batches: Mapping[int, int]) -> Self:
        """The plan with the rows that its epochs had; itself if its batch cannot grow.

        Args:
            batches: Global batch of each finished epoch, by its zero-based number. Epochs that are
                still to come have the row of the last one.
        """
        if not self.growth:
            return self
        starts = {0, *batches, *accumulate(row.epochs for row in self.stages)}
        inside = sorted(one for one in starts if one < self.epochs)
        stages, batch = list[Stage](), 0
        for start, end in pairwise((*inside, self.epochs)):
            batch = batches.get(start, batch)
            row = self.row(start, batch)
            before = stages.pop().epochs if stages and _alike(stages[-1], row) else 0
            stages.append(row.model_copy(update={"epochs": before + end - start}))
        return self.model_copy(update={"stages": tuple(stages)})

    def stage_of(self, epoch: int) -> int:
        """Index of the stage that holds the zero-based ``epoch``; `IndexError` past the end."""
        last = 0
        for index, stage in enumerate(self.stages):
            last += stage.epochs
            if epoch < last:
                return index
        raise IndexError(f"epoch {epoch} is past the plan's {last}")


TOLD = (
    *("considered", "cores", "end_loss", "epoch_accuracy", "held_out", "knees", "reasons"),
    *("target_epochs", "threads", "train_seconds"),
)
TOLD_OF_A_ROW = (
    *("fixed_samples", "sample_seconds", "step_seconds"),
    *("predicted_epoch_seconds", "predicted_bytes"),
)
"""Fields of a plan, and of its rows, that are predictions, measured times or reasons. Nobody
approves them, and another version may predict otherwise, or more. No rule of a training depends on
them, but times do: a virtual cluster's clock, and what divides batches anew, begin with them."""


def _alike(one: Stage, other: Stage) -> bool:
    """Whether two rows differ in their epochs alone."""
    return one.model_copy(update={"epochs": other.epochs}) == other
