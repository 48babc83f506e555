"""Records of a run: epochs, workers' times, rounds, and the summary of the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from statistics import median
from typing import Annotated, Literal

from pydantic import Field

from batchwright.records.base import Count, Document, Estimate, Index, Record, Shown
from batchwright.records.plan import Plan
from batchwright.records.profile import Profile
from batchwright.records.text.formatting import (
    between,
    counted,
    duration,
    in_bytes,
    local_batches,
    number,
    percent,
    shares_between,
    size,
)

# Records of a run may come from anyone. They are added up, drawn and stored, so their numbers have
# limits, beyond which sums would overflow, or JSON and databases would round.
NonNegative = Annotated[float, Field(ge=0, le=1e300)]
Positive = Annotated[float, Field(gt=0, le=1e300)]
Loss = Annotated[float, Field(ge=-1e300, le=1e300)]
Place = Annotated[str, Field(max_length=1000)]


def recorded_loss(value: float) -> float | None:
    """The loss as records hold it: `None` if it is not finite."""
    return value if abs(value) <= 1e300 else None


def reached_epoch(plan: Plan, epochs: Iterable[EpochRecord]) -> EpochRecord | None:
    """The first evaluated epoch that reached the accuracy at which training ends; else `None`."""
    target = plan.job.goal.target
    if target is None:
        return None
    return next((one for one in epochs if one.top1 is not None and one.top1 >= target), None)


def stalled_epoch(plan: Plan, epochs: Iterable[EpochRecord]) -> EpochRecord | None:
    """The evaluated epoch at which accuracy has not risen for `goal.patience` evaluations.

    `None` where there is none, or no such goal. Evaluations count from `Plan.judged_from` on. With
    a parameter server, epochs may be evaluated in another order than theirs: nothing counts before
    the evaluations of all epochs before it.
    """
    if plan.job.goal.patience is None:
        return None
    best, since = -inf, 0
    for one in (each for each in epochs if each.epoch >= plan.judged_from):
        if one.top1 is not None:
            best, since = max(best, one.top1), 0 if one.top1 > best else since + 1
        elif plan.server is not None and plan.evaluates_after(one.epoch):
            return None
        if since == plan.job.goal.patience:
            return one
    return None


def stalled_words(plan: Plan, epochs: Iterable[EpochRecord]) -> str:
    """That and when `goal.patience` has ended a training, in words; empty if it has not."""
    last = stalled_epoch(plan, epochs)
    if last is None:
        return ""
    times = counted(plan.job.goal.patience or 0, "evaluation")
    return (
        f"goal.patience={plan.job.goal.patience} ended training after epoch {last.epoch + 1} of "
        f"{plan.epochs}: no held-out accuracy of {times} was above the best one before"
    )


def is_over(plan: Plan, epochs: Sequence[EpochRecord]) -> bool:
    """Whether an evaluation has ended training: at `goal.accuracy`, or by `goal.patience`."""
    return bool(reached_epoch(plan, epochs) or stalled_epoch(plan, epochs))


class WorkerTime(Record):
    """How one worker spent its time in one epoch of training, in seconds."""

    place: Place = Field("", description="Host and device, such as `node1/cuda:0`.")
    local_batch_size: Count = Field(description="Samples per step, at the end of the epoch.")
    samples: Index = Field(description="Samples trained on.")
    input_seconds: NonNegative = Field(description="Seconds of waiting for and preparing images.")
    compute_seconds: NonNegative = Field(
        description="Seconds of forward pass, backward pass and update."
    )
    wait_seconds: NonNegative = Field(
        0.0, description="Seconds of waiting for slower workers before the exchange could end."
    )
    communication_seconds: NonNegative = Field(
        description="Seconds of exchanging gradients that the backward pass did not hide."
    )
    loading_cpu_seconds: NonNegative = Field(
        0.0,
        description="Processor seconds of the worker's loader processes, not part of the other "
        "times. Where they share the worker's cores, computing takes longer by up to these seconds "
        "over the number of cores.",
    )
    peak_bytes: Count | None = Field(
        None,
        description="Largest sum of live tensor bytes: on CUDA during the epoch, on the CPU during "
        "one of its steps; null where it was not measured.",
    )


class LocalBatches(Record):
    """The workers' local batches from one step of an epoch on."""

    step: Index = Field(description="First step of the epoch with these batches, zero-based.")
    sizes: tuple[Index, ...] = Field(description="Samples per step of each worker, in rank order.")


class RoundRecord(Record):
    """One worker's stretch between two exchanges with the parameter server."""

    worker: Index = Field(description="Rank of the worker.")
    number: Index = Field(
        description="Number among all rounds in the order in which they were assigned, zero-based."
    )
    epoch: Index = Field(
        description="Epoch that most of the round's samples belong to, zero-based."
    )
    resolution: Count = Field(description="Training image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step.")
    samples: Index = Field(description="Samples trained on.")
    steps: Index = Field(description="Number of updates.")
    update_factor: Positive = Field(description="Weight of the worker's model in the merge.")
    loss: Loss | None = Field(description="Mean training loss; null if not finite.")
    start: NonNegative = Field(description="Start of the round, in seconds since training began.")
    compute_seconds: NonNegative = Field(
        description="Seconds of input, forward pass, backward pass and update."
    )
    exchange_seconds: NonNegative = Field(description="Seconds of push, merge and pull.")
    wait_seconds: NonNegative = Field(
        description="Seconds of waiting for other workers, between push and pull."
    )
    evaluation_seconds: NonNegative = Field(
        0.0, description="Seconds of evaluating the merged model before the next round."
    )
    skipped_steps: Index = Field(
        0, description="Updates skipped because a gradient was not finite."
    )
    repeated_steps: Index = Field(
        0,
        description="Steps that were repeated: in smaller micro-batches after memory ran out, or "
        "uncompiled.",
    )
    lead: Index = Field(
        0, description="Rounds that the worker was ahead of the slowest when this one began."
    )
    peak_bytes: Count | None = Field(
        None,
        description="Largest sum of live tensor bytes in a step; null where it was not measured.",
    )


class FactorRange(Record):
    """Factors of adaptive scaling over the steps of an epoch."""

    mean: Positive = Field(
        description="Mean over the steps, and over tensors where each has its own factor."
    )
    least: Positive = Field(description="Smallest factor.")
    most: Positive = Field(description="Largest factor.")


class EpochRecord(Record):
    """Loss, accuracy and times of one epoch."""

    epoch: Index = Field(description="Number of the epoch, zero-based.")
    resolution: Count = Field(description="Training image side, in pixels.")
    global_batch_size: Count = Field(description="Planned samples per step over all workers.")
    steps: Index = Field(description="Number of steps, skipped updates included.")
    skipped_steps: Index = Field(description="Updates skipped because a gradient was not finite.")
    samples: Index = Field(description="Samples trained on in this epoch.")
    learning_rate: NonNegative = Field(description="Learning rate of the last step, per step.")
    train_loss: Loss | None = Field(description="Mean loss over the epoch; null if not finite.")
    val_loss: Loss | None = Field(
        None, description="Held-out cross entropy; null if not evaluated."
    )
    val_correct: Index | None = Field(None, description="Held-out images classified correctly.")
    val_count: Index | None = Field(None, description="Held-out images evaluated.")
    noise_scale: Positive | None = Field(None, description="Gradient noise scale, in samples.")
    gradient_norm: NonNegative | None = Field(
        None,
        description="Norm of the gradient of the loss on a batch, at the evaluation; null without "
        "`track`.",
    )
    hessian_eigenvalue: Loss | None = Field(
        None,
        description="Largest eigenvalue of the Hessian of that loss; null without `track`.",
    )
    gradient_factors: FactorRange | None = Field(
        None, description="Factors on the tensors' gradients; null without `ags.mode`."
    )
    rate_gain: FactorRange | None = Field(
        None, description="Factors on the learning rate; null without `scaling=gain`."
    )
    training_seconds: NonNegative = Field(
        description="Seconds of training: steps, input and exchange."
    )
    evaluation_seconds: NonNegative = Field(description="Seconds of the held-out evaluation.")
    checkpoint_seconds: NonNegative = Field(description="Seconds of writing checkpoints.")
    repeated_steps: Index = Field(
        0,
        description="Steps that were repeated: in smaller micro-batches after memory ran out, or "
        "uncompiled.",
    )
    workers: tuple[WorkerTime, ...] = Field(description="Times of each worker, in rank order.")
    shares: tuple[LocalBatches, ...] = Field(
        (), description="Local batches at the epoch's start, and after each change."
    )
    whole: bool = Field(True, description="False if part of the epoch ran before a resume.")

    @property
    def top1(self) -> float | None:
        """Held-out accuracy in [0, 1]; `None` if not evaluated."""
        if self.val_correct is None or not self.val_count:
            return None
        return self.val_correct / self.val_count

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of all workers; `None` if it took no time."""
        return self.samples / self.training_seconds if self.training_seconds else None


def _accuracy_then_loss(epoch: EpochRecord) -> tuple[float, float]:
    loss = inf if epoch.val_loss is None else epoch.val_loss
    return epoch.top1 or 0.0, -loss


class Refit(Record):
    """A new plan from the profile with the run's measured times, beside the plan of the run."""

    predicted: Estimate = Field(description="Seconds per epoch by the run's plan.")
    measured: Positive = Field(description="Measured seconds per epoch.")
    error: float = Field(description="Relative error, (predicted - measured) / measured.")
    tolerance: float = Field(
        description="Relative error beyond which the models were fitted again."
    )
    refitted: Estimate = Field(description="Seconds per epoch by the new fit.")
    workers: Count = Field(description="Workers that the new plan has.")
    global_batch_size: Count = Field(description="Global batch that the new plan has.")


class CommandPart(Record):
    """A part of the command besides training."""

    name: str = Field(description="Name of the part, such as `probe`.")
    seconds: NonNegative = Field(description="Wall time, in seconds.")


class RunSummary(Document):
    """A whole run: what `report` reads."""

    format: Literal["batchwright-summary/1"] = "batchwright-summary/1"
    run_folder: str = Field(description="Folder of the run's files.")
    plan: Plan = Field(description="The plan that was followed.")
    profile: Profile | None = Field(
        None, description="Profile that the plan was made from, if it was kept."
    )
    epochs: tuple[EpochRecord, ...] = Field(description="The finished epochs, in order.")
    setup_seconds: NonNegative = Field(
        description="Seconds of starting processes and opening data and network."
    )
    wall_seconds: NonNegative = Field(
        description="Wall time of training from start to end, in seconds."
    )
    before: tuple[CommandPart, ...] = Field(
        (), description="Parts of the last command before training, in order."
    )
    after: tuple[CommandPart, ...] = Field(
        (), description="Parts of the last command after training, in order."
    )
    resumed: Index = Field(0, description="How often the run was continued.")
    rounds: tuple[RoundRecord, ...] = Field(
        (),
        description="Rounds with the parameter server, in the order in which they ended; those of "
        "virtual workers by the end of their waits, and then by rank. Empty without a server.",
    )
    simulated: bool = Field(
        False, description="Whether all training seconds are those of a simulated cluster."
    )
    refit: Refit | None = Field(
        None, description="A new plan, if the epochs missed the prediction by too much."
    )

    def _facts(self) -> list[tuple[str, str]]:
        plan, best, seconds = self.plan, self.best_epoch, self.measured_epoch_seconds
        stage = plan.stages[-1]
        batch = f"{stage.global_batch_size} ({local_batches(stage.local_batch_sizes)})"
        simulated = " (simulated)" if self.simulated else ""
        accuracy = "not evaluated"
        if best is not None and best.top1 is not None and self.accuracy is not None:
            accuracy = (
                f"{percent(self.accuracy)} (best {percent(best.top1)}, epoch {best.epoch + 1})"
            )
        return [
            ("network", plan.network.name),
            ("data", plan.data.name),
            ("method", plan.method),
            ("workers", str(plan.workers)),
            ("global batch", batch),
            ("epochs", f"{self.epochs[-1].epoch + 1 if self.epochs else 0} of {plan.epochs}"),
            ("held-out accuracy", accuracy),
            ("time per epoch", f"{duration(seconds)}{simulated}" if seconds else "not measured"),
            ("folder", self.run_folder),
        ]

    def _tables(self) -> list[Shown]:
        """Predicted and measured figures, those that have both."""
        plan, seconds, accuracy = self.plan, self.measured_epoch_seconds, self.accuracy
        top = max(plan.stages, key=lambda stage: (stage.resolution, stage.global_batch_size))
        predicted, last = top.predicted_epoch_seconds, next(reversed(plan.epoch_accuracy), None)
        peaks = [one.peak_bytes for e in self.epochs for one in e.workers if one.peak_bytes]
        rows = []
        if predicted and seconds and len(plan.stages) == 1:
            rows.append(("seconds per epoch", between(predicted), number(seconds)))
        if last and accuracy is not None and len(self.epochs) == plan.epochs:
            rows.append(("held-out accuracy", shares_between(last), percent(accuracy)))
        if top.predicted_bytes and peaks:
            rows.append(("peak memory", in_bytes(top.predicted_bytes), size(max(peaks))))
        head = ("", "predicted (95 %)", "measured")
        return [Shown("predicted and measured", head, rows)] if rows else []

    @property
    def ended(self) -> bool:
        """Whether the run trained all its epochs, or an evaluation has ended training."""
        last = self.epochs[-1].epoch + 1 if self.epochs else 0
        return last >= self.plan.epochs or is_over(self.plan, self.epochs)

    @property
    def best_accuracy(self) -> float | None:
        """Highest held-out accuracy of all evaluated epochs, in [0, 1]; see `best_epoch`."""
        return self.best_epoch.top1 if self.best_epoch else None

    @property
    def accuracy(self) -> float | None:
        """Held-out accuracy of the last evaluated epoch, in [0, 1]; `None` without any."""
        return next((e.top1 for e in reversed(self.epochs) if e.top1 is not None), None)

    @property
    def best_epoch(self) -> EpochRecord | None:
        """The evaluated epoch with the highest held-out accuracy.

        Of equal accuracies the one with the lowest held-out loss counts, of equal losses the
        earliest, as for ``best.pt``.
        """
        evaluated = [e for e in self.epochs if e.top1 is not None]
        return max(evaluated, key=_accuracy_then_loss) if evaluated else None

    @property
    def measured_epoch_seconds(self) -> float | None:
        """Median training seconds of whole epochs, the first left out if there are more."""
        whole = [e.training_seconds for e in self.epochs if e.whole]
        return median(whole[1:] or whole) if whole else None
