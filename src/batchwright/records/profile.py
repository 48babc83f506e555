"""The profile: measurements of a workload, with the machine they were taken on."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, log, sqrt
from typing import Annotated, Literal

from pydantic import Field, field_validator

from batchwright.records.base import (
    Count,
    Document,
    Estimate,
    Index,
    NonNegative,
    OptimizerName,
    Positive,
    Precision,
    Record,
    Shown,
)
from batchwright.records.job import PASS_KEYS, Job
from batchwright.records.text.formatting import duration, number, significant

JOINED = ", small pieces joined"
"""End of `Cluster.allocator` where glibc joins small freed pieces, so that tensors fit again."""

FAR_BEYOND_CHANCE = 0.3
"""Cohen's kappa (share right of what chance gets wrong) from which a network has learnt before."""


class DataFacts(Record):
    """Facts of a data set that a plan needs, and the digest by which it is recognized."""

    name: str = Field(description="digits, cifar100, an image folder's own name, or import string.")
    digest: str = Field(description="SHA-256 over names, labels and pixels, in hex.")
    train_samples: Count = Field(description="Training images.")
    val_samples: Index = Field(description="Held-out images, never trained on.")
    split: str = Field(description="How the held-out images were chosen, in words.")
    classes: tuple[str, ...] = Field(description="Class names, in label order.")
    side: Count = Field(description="Natural training resolution: image side, in pixels.")
    skipped: Index = Field(0, description="Number of unreadable images left out.")
    channels: Count = Field(
        3, description="Channels of an image; only data of your own may have others than 3."
    )
    largest_class: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the held-out images in the commonest class, the accuracy of always "
        "answering it; null where they were not counted.",
    )

    @property
    def even_classes(self) -> float:
        """Number of equally large classes with the same `guessing`: fewer where one is larger."""
        count, largest = len(self.classes), self.largest_class
        if largest is None or not 1 + 1e-9 < largest * count < count:
            return count
        return 1 / largest

    @property
    def guessing(self) -> float:
        """Accuracy of always answering the commonest class; 0 with fewer than two classes."""
        return 1 / self.even_classes if len(self.classes) > 1 else 0.0


class NetworkFacts(Record):
    """Facts of a network that a plan needs."""

    name: str = Field(description="Name, as in the job.")
    parameters: Count = Field(description="Number of weights, frozen ones too.")
    trained_bytes: Count = Field(description="Bytes of the gradients that workers exchange.")
    batch_norm: bool = Field(description="Whether it has batch normalization.")
    least_side: Count = Field(1, description="Smallest image side that it accepts, in pixels.")


class Cluster(Record):
    """The hardware and software that a profile was measured on."""

    device: Literal["cpu", "cuda"] = Field(description="Kind of device.")
    device_name: str = Field(description="Processor or GPU model.")
    kind: str = Field("", description="Name of this kind of worker; empty: the device's name.")
    workers: Count = Field(description="Most worker processes that measured together.")
    cores: Count = Field(description="CPU cores usable on the host.")
    threads: Count = Field(description="Compute threads of each of that many workers.")
    memory_bytes: Count = Field(description="Memory one worker may use, in bytes.")
    python: str = Field(description="Python version.")
    torch: str = Field(description="PyTorch version.")
    allocator: str = Field(
        description="Settings of the memory allocator; ends in `JOINED` where it joins small "
        "freed pieces."
    )
    arithmetic: str = Field(
        "",
        description="On a GPU: whether float32 is TF32, and how cuDNN chooses its algorithms; "
        "empty on the CPU.",
    )

    @property
    def pieces_apart(self) -> bool:
        """Whether the heap keeps small freed pieces apart, so that large tensors fit less well."""
        return self.device == "cpu" and not self.allocator.endswith(JOINED)

    @property
    def several_cores(self) -> bool:
        """Whether several CPU cores share a step, by threads or by workers."""
        return self.device == "cpu" and self.cores > 1


class StepLoading(Record):
    """Times of loading beside training steps, which share the processor."""

    loaders: Index = Field(
        description="Loader processes of each worker; 0: the worker itself loads."
    )
    batch_seconds: NonNegative = Field(
        description="Seconds in which a loader process loads a batch while all of them load and no "
        "step is taken."
    )
    cpu_seconds: NonNegative = Field(description="Processor seconds of loading such a batch.")
    alone_seconds: Positive = Field(
        description="Seconds of a step whose batch is in memory, while nothing is loaded."
    )
    input_seconds: NonNegative = Field(
        description="Seconds that a step waits for its batch while loading goes on."
    )


class StepTime(Record):
    """Time of one training step on one worker while all workers compute at once."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    workers: Count = Field(description="Workers that computed at the same time.")
    compute_seconds: Positive = Field(
        description="Seconds of input, forward, backward and update, without waiting for the "
        "exchange of gradients: median over the visits of their mean steps."
    )
    sync_seconds: NonNegative = Field(
        description="Seconds of waiting for the exchange that the backward pass did not hide: "
        "median over the visits of their mean steps."
    )
    step_seconds: Positive = Field(
        description="Seconds of the whole step: median over the visits of their mean steps."
    )
    step_low: Positive = Field(description="Lower quartile of the whole step, in seconds.")
    step_high: Positive = Field(description="Upper quartile of the whole step, in seconds.")
    repeats: Count = Field(description="Number of timed steps.")
    visits: tuple[Positive, ...] = Field(
        (),
        description="Mean seconds of the whole step at each visit to this point. Visits are apart "
        "in time, so they show how repeatable the machine is. Empty: one visit.",
    )
    visit_error: NonNegative | None = Field(
        None,
        description="Standard error of a visit's mean by the scatter of its own steps, as a share "
        "of the mean: median over the visits. Null in older profiles.",
    )
    loading: StepLoading | None = Field(
        None,
        description="Times of loading, which these times include; null where batches are made "
        "within the step or, in older profiles, were in memory.",
    )


class PrecisionTime(Record):
    """Time of a training step in one number format; `precision=auto` takes the fastest."""

    precision: Precision = Field(description="Number format of the forward and backward pass.")
    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    step_seconds: Positive = Field(description="Median of the whole step, in seconds.")


class PrecisionRatio(Record):
    """Time of a step in a 16-bit format relative to the same step in float32, timed in turns."""

    ratio: Estimate = Field(
        description="Time of a step in the 16-bit format over that of one in float32."
    )
    rounds: Count = Field(description="Rounds of four timings: float32, 16-bit, 16-bit, float32.")
    wanted_batch_size: Count = Field(
        description="Samples per step on each worker that the choice is for; the timed steps have "
        "fewer where time or memory allowed no more."
    )
    finite: bool = Field(
        True,
        description="Whether gradients in the 16-bit format were finite wherever those in float32 "
        "were; if not, float32 is chosen whatever its time.",
    )


class PairTime(Record):
    """Step times of two groups of workers with unequal local batches, computing at the same time.

    Their ratio matters: both groups saw the same state of the machine at each visit.
    """

    resolution: Count = Field(description="Image side, in pixels.")
    large_workers: Count = Field(description="Workers with the large local batch.")
    small_workers: Count = Field(description="Workers with the small local batch.")
    large_batch: Count = Field(description="The large local batch, in samples per step.")
    small_batch: Count = Field(description="The small local batch, in samples per step.")
    large_seconds: Positive = Field(
        description="Seconds of a step with the large batch: median over the visits."
    )
    small_seconds: Positive = Field(
        description="Seconds of a step with the small batch: `large_seconds` times the median "
        "ratio."
    )
    repeats: Count = Field(description="Number of visits.")
    ratios: tuple[Positive, ...] = Field(
        (),
        description="Step time of the small batch over that of the large one at each visit. Visits "
        "are apart in time, so they show how well the ratio is known. Empty: only the median is "
        "known.",
    )


class MemoryPoint(Record):
    """Peak memory of one training step on one worker."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples in the step.")
    peak_bytes: Count = Field(
        description="Largest sum of live tensor bytes during the step, weights included."
    )
    workers: Count = Field(
        1, description="Number of workers; several keep buffers to exchange gradients."
    )
    resident_bytes: Count | None = Field(
        None,
        description="Largest resident size of the process during the step, or on a GPU the bytes "
        "that its allocator held; null if unknown.",
    )


class MemoryParts(Record):
    """Bytes on one worker that do not depend on the batch, by purpose."""

    parameters: Count = Field(description="Weights, frozen ones too.")
    buffers: Index = Field(description="Statistics of batch normalization and the like.")
    gradients: Index = Field(description="Gradients of the trained weights.")
    optimizer: Index = Field(description="Momentum and other state of the optimizer.")
    reduction: Index = Field(
        description="Buffers to exchange gradients; a single worker needs none."
    )


class OutOfMemory(Record):
    """A step that did not fit the memory, or that killed the process which tried it."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples in the step.")
    workers: Count = Field(description="Workers that tried it at the same time.")
    short_of: Literal["memory", "shared memory"] = Field(
        "memory",
        description="Which memory was too small: that of a worker, or the shared memory through "
        "which loader processes pass their batches.",
    )


class CollectiveTime(Record):
    """Time of one exchange of a message between workers."""

    operation: Literal["all-reduce", "push-pull"] = Field(
        "all-reduce", description="A sum over all processes, or sending to one process and back."
    )
    bytes: Count = Field(description="Message size, in bytes.")
    workers: Count = Field(description="Number of processes that take part.")
    seconds: Positive = Field(description="Median, in seconds.")
    low: Positive = Field(description="Lower quartile, in seconds.")
    high: Positive = Field(description="Upper quartile, in seconds.")
    repeats: Count = Field(description="Number of timed calls.")


class LinkTime(Record):
    """The network between two workers, measured while no others send messages."""

    between: Literal["hosts", "workers of a host"] = Field(
        description="Where the two workers are: on two hosts, or on one."
    )
    latency: NonNegative = Field(
        description="Median seconds of an empty message in one direction, half of a round trip."
    )
    latency_low: NonNegative = Field(description="Lower quartile of the latency, in seconds.")
    latency_high: NonNegative = Field(description="Upper quartile of the latency, in seconds.")
    bandwidth: Positive = Field(description="Median bytes per second, in one direction.")
    bandwidth_low: Positive = Field(description="Lower quartile of the bandwidth.")
    bandwidth_high: Positive = Field(description="Upper quartile of the bandwidth.")
    bytes: Count = Field(description="Size of the largest message, in bytes.")


class KindTimes(Record):
    """Workers of one of several kinds that measured together, each kind at its own speed."""

    kind: str = Field(
        description="Name, as in `goal.kinds`; a host's name where hosts differ by speed alone."
    )
    workers: Count = Field(description="Workers of this kind, among all that measured together.")
    device_name: str = Field(description="Processor or GPU model.")
    memory_bytes: Count = Field(description="Memory one worker may use, in bytes.")
    pace: Positive = Field(
        description="Compute time of a step, relative to the mean over all workers."
    )
    steps: tuple[StepTime, ...] = Field(
        description="Step times while all workers compute: the kind's own computing, and the "
        "exchange without waiting for slower kinds."
    )


class UpdateTime(Record):
    """Time of an optimizer's update alone, which does not depend on the batch."""

    optimizer: OptimizerName = Field(description="Name of the optimizer, as in a job.")
    workers: Count | None = Field(
        None,
        description="Workers that updated at the same time: the more, the fewer threads each has; "
        "null in older profiles.",
    )
    seconds: Positive = Field(description="Median of an update, in seconds.")
    low: Positive = Field(description="Lower quartile, in seconds.")
    high: Positive = Field(description="Upper quartile, in seconds.")
    repeats: Count = Field(description="Number of timed updates.")


class GradientNoise(Record):
    """Gradient noise early in training (McCandlish et al. 2018)."""

    noise_scale: Positive | None = Field(
        description="Noise scale tr(Sigma)/|G|^2, in samples; null where |G|^2 was not above the "
        "noise."
    )
    trace: float = Field(description="Estimate of tr(Sigma), gradient units squared.")
    sqr_norm: float = Field(description="Estimate of |G|^2, gradient units squared.")
    relative_error: NonNegative | None = Field(
        None, description="Standard error of the noise scale, as a share of it; null if unknown."
    )
    parts: Count = Field(description="Gradients of parts of a batch that enter each estimate.")
    repeats: Count = Field(description="Estimates that are averaged before the division.")


class FirstAnswers(Record):
    """The network's answers before any training, for held-out images drawn at random."""

    images: Index = Field(
        description="Number of images; 0: outputs are not one number for each class, or labels are "
        "not classes."
    )
    right: Index = Field(description="Images that were classified correctly.")
    by_chance: NonNegative = Field(
        description="Images expected to be correct by chance: if answers and labels, with their "
        "own frequencies, were independent."
    )

    @property
    def knowing(self) -> bool:
        """Whether the network answers far better than by chance, and so has learnt before."""
        rest = self.images - self.by_chance
        noise = sqrt(max(0.0, self.by_chance * rest) / max(1, self.images))
        return self.right - self.by_chance > max(FAR_BEYOND_CHANCE * rest, 3 * noise)


class Trial(Record):
    """A short training with a whole rate schedule, and the accuracy at its end.

    A trial starts with the job's weights and is evaluated on images held out from the training set,
    on which no trial is trained. The job's own held-out images are not used.
    """

    optimizer: OptimizerName = Field(description="Name of the optimizer, as in a job.")
    global_batch_size: Count = Field(description="Samples per step over all workers.")
    rate: Positive = Field(description="Highest learning rate, per step.")
    usual_rate: Positive = Field(
        description="Learning rate of a plan for a training of this length and batch, per step."
    )
    resolution: Count = Field(description="Image side, in pixels.")
    samples: Count = Field(
        description="Samples trained on, over all workers; a sample used twice counts twice."
    )
    steps: Count = Field(description="Updates of the weights.")
    accuracy: float = Field(ge=0, le=1, description="Accuracy on the held-out images, a share.")
    loss: NonNegative | None = Field(
        description="Mean loss on the held-out images; null where it was infinite."
    )
    held_out: Count = Field(description="Number of these held-out images.")
    seconds: Positive = Field(description="Wall time of training and evaluation, in seconds.")


class RecomputationTimes(Record):
    """Measurements of activation checkpointing, where memory is short, and the choice."""

    resolution: Count = Field(description="Image side, in pixels.")
    wanted_batch_size: Count = Field(
        description="Samples per step on each worker that the choice is for."
    )
    limit_bytes: Count = Field(description="Bytes that a worker may use.")
    plain_batch_size: Index = Field(
        description="Largest local batch that fits at once without activation checkpointing; 0: "
        "not even the smallest."
    )
    recomputing_batch_size: Index = Field(
        description="Largest local batch that fits at once with it; 0: not even the smallest."
    )
    compared_batch_sizes: tuple[Count, Count] | None = Field(
        None,
        description="Samples of the timed steps, without and with it: the largest that fit, or "
        "fewer where time allowed no more. Null where there was nothing to compare.",
    )
    plain_sample_seconds: Positive | None = Field(
        None, description="Median time of a timed step without it, in seconds per sample."
    )
    recomputing_sample_seconds: Positive | None = Field(
        None, description="Median time of a timed step with it, in seconds per sample."
    )
    ratio: Estimate | None = Field(
        None, description="Time per sample with it over that without, timed in turns."
    )
    chosen: bool = Field(description="Whether activation checkpointing is used.")


class CompilationTimes(Record):
    """Measurements of compiling the network, and the choice."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    training_seconds: Positive = Field(
        description="Seconds of the job's epochs in uncompiled steps of this batch."
    )
    plain_seconds: Positive = Field(description="Median of an uncompiled step, in seconds.")
    compile_seconds: NonNegative | None = Field(
        None,
        description="Seconds of compiling on the slowest worker, less where a cache held results; "
        "null where it was not tried, since the training is short.",
    )
    compiled_seconds: Positive | None = Field(
        None, description="Median of a compiled step, in seconds."
    )
    ratio: Estimate | None = Field(
        None, description="Time of a compiled step over that of an uncompiled one, timed in turns."
    )
    failure: str = Field("", description="Why the network cannot be compiled; else empty.")
    asked: bool = Field(description="Whether the job requests it, whatever it saves.")
    chosen: bool = Field(description="Whether the network is compiled.")


class GraphTimes(Record):
    """Measurements of replaying passes from CUDA graphs, and the choice."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    plain_seconds: Positive = Field(description="Median of a step without graphs, in seconds.")
    replayed_seconds: Positive | None = Field(
        None, description="Median of a replayed step, in seconds."
    )
    ratio: Estimate | None = Field(
        None, description="Time of a replayed step over that of one without, timed in turns."
    )
    failure: str = Field("", description="Why passes cannot be replayed; else empty.")
    chosen: bool = Field(description="Whether passes are replayed.")


class MachineLoad(Record):
    """What the machine's cores did during the measurements, in cores' worth of processor time.

    `ours` counts the process that measures and all below it, workers and loader processes included.
    The kernel's own threads count neither as ours nor as others'.
    """

    cores: Count = Field(
        description="CPU cores that the workers may use at once: those that were observed, or "
        "fewer by a control group's limit."
    )
    seconds: Positive = Field(description="Length of the observation, in seconds.")
    ours: NonNegative = Field(description="Cores that our processes used.")
    others: NonNegative = Field(description="Cores that other programs used.")
    stolen: NonNegative = Field(description="Cores that the host of this virtual machine took.")
    idle: NonNegative = Field(description="Cores that had nothing to do.")
    throttled: NonNegative = Field(
        description="Cores that a control group's limit kept from our processes because others in "
        "the group used them."
    )
    scatter: NonNegative | None = Field(
        None,
        description="Relative standard deviation of the time of the same step from visit to visit; "
        "null after too few visits.",
    )
    least_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Least `share` in any second or more of steps that were timed beside others; "
        "null where none were, and in older profiles.",
    )

    @property
    def share(self) -> float:
        """Share of the cores in use, of those that we may use at most, that our processes had."""
        used = self.ours + self.others + self.stolen + self.throttled
        return min(1.0, self.ours / min(self.cores, used)) if used else 1.0


class Profile(Document):
    """Measurements of `probe`: reusable input of `plan`."""

    format: Literal["batchwright-profile/1"] = "batchwright-profile/1"
    job: Job = Field(description="The job that was measured, resolved.")
    data: DataFacts = Field(description="Facts of the job's data.")
    network: NetworkFacts = Field(description="Facts of the job's network.")
    cluster: Cluster = Field(description="Hardware and software of the measurements.")
    precisions: tuple[PrecisionTime, ...] = Field(
        (), description="Step times of the number formats compared; empty without a choice."
    )
    precision_ratio: PrecisionRatio | None = Field(
        None, description="Result of comparing number formats; null where none were compared."
    )
    recomputation: RecomputationTimes | None = Field(
        None,
        description="Measurements of activation checkpointing, where memory was too short for the "
        "batch; null where it was not considered.",
    )
    compilation: CompilationTimes | None = Field(
        None, description="Measurements of compiling; null where it was not considered."
    )
    graphs: GraphTimes | None = Field(
        None, description="Measurements of CUDA graphs; null where they were not considered."
    )
    steps: tuple[StepTime, ...] = Field(description="Step times.")
    pairs: tuple[PairTime, ...] = Field(
        (), description="Step times of unequal local batches side by side, for `dual-batch`."
    )
    memory: tuple[MemoryPoint, ...] = Field(description="Peaks of memory.")
    memory_parts: MemoryParts | None = Field(
        None, description="Memory that does not grow with the batch; null if not counted."
    )
    out_of_memory: tuple[OutOfMemory, ...] = Field(
        (), description="Steps that did not fit the memory."
    )
    collectives: tuple[CollectiveTime, ...] = Field(description="Times of exchanges.")
    links: tuple[LinkTime, ...] = Field(
        (),
        description="The network between workers of a host and between hosts, where another "
        "launcher has started them; the job's `link` defaults to that between hosts.",
    )
    kinds: tuple[KindTimes, ...] = Field(
        (), description="Kinds of workers, where several measured together; else empty."
    )
    updates: tuple[UpdateTime, ...] = Field(
        (),
        description="Update times of the optimizers that `optimizer=auto` chooses from; the step "
        "times are those with `sgd` then.",
    )
    noise: GradientNoise | None = Field(description="Gradient noise; null if not measurable.")
    first_answers: FirstAnswers | None = Field(
        None,
        description="The network's answers before any training; null if unknown, for example for "
        "a step of your own.",
    )
    trials: tuple[Trial, ...] = Field(
        (), description="Short trainings, which show how the network learns from these images."
    )
    trials_open: bool = Field(
        False, description="Whether the probe has not ended yet and more trials are to come."
    )
    trials_note: str = Field(
        "", description="Why there are no trials, or fewer than their time allows; else empty."
    )
    load: MachineLoad | None = Field(
        None, description="Load of the machine during the probe; null if unknown."
    )
    evaluation_seconds_per_image: Positive = Field(
        description="Seconds per image of a forward pass without gradients on one worker."
    )
    probe_seconds: Positive = Field(description="Wall time of the probe, in seconds.")

    @field_validator("job")
    @classmethod
    def _pass_keys_off(cls, job: Job) -> Job:
        """Turn ``auto`` of `PASS_KEYS` into ``off``, as older profiles were measured."""
        unasked = [key for key in PASS_KEYS if getattr(job, key) == "auto"]
        return job.model_copy(update=dict.fromkeys(unasked, "off"))

    @property
    def without_accuracy(self) -> bool:
        """Whether the network's outputs are known to have no held-out accuracy."""
        return self.first_answers is not None and not self.first_answers.images

    def bound_for(self, job: Job) -> int | None:
        """`goal.max_workers` of a job that trains with what was measured: no more than the workers
        that were measured together. So it is a bound alone, and no wish to plan for more workers
        than there are. That of a virtual cluster, whose workers are no processes, stays as it is.
        """
        most, measured = job.goal.max_workers, max((one.workers for one in self.steps), default=0)
        bounded = most is not None and 0 < measured < most and not job.launcher.simulated
        return measured if bounded else most

    def update_time(self, optimizer: str, workers: int) -> UpdateTime | None:
        """An optimizer's update on the nearest number of workers; `None` if it was not timed."""
        return min(
            (one for one in self.updates if one.optimizer == optimizer),
            key=lambda one: abs(log(one.workers / workers)) if one.workers else inf,
            default=None,
        )

    def _tables(self) -> list[Shown]:
        """At most eight of the step times, evenly spaced in the list."""
        count = min(8, len(self.steps))
        picked = [self.steps[index * len(self.steps) // count] for index in range(count)]
        rows = [
            (
                str(one.workers),
                f"{one.resolution} px",
                str(one.local_batch_size),
                f"{significant(1e3 * one.step_seconds)} "
                f"({significant(1e3 * one.step_low)} to {significant(1e3 * one.step_high)})",
            )
            for one in picked
        ]
        head = ("workers", "side", "local batch", "ms / step (quartiles)")
        return [Shown(f"{count} of {len(self.steps)} step times", head, rows)] if rows else []

    def _facts(self) -> list[tuple[str, str]]:
        scale = self.noise.noise_scale if self.noise else None
        return [
            ("network", self.network.name),
            ("data", self.data.name),
            ("device", self.cluster.kind or self.cluster.device_name),
            ("workers", _span(one.workers for one in self.steps)),
            ("local batches", _span(one.local_batch_size for one in self.steps)),
            ("side", f"{_span(one.resolution for one in self.steps)} px"),
            ("step times", str(len(self.steps))),
            ("noise scale", f"{number(scale)} samples" if scale else "not known"),
            ("measured in", duration(self.probe_seconds)),
        ]


def _span(values: Iterable[int]) -> str:
    """``3 to 9`` for the smallest and largest number, ``3`` if they are equal; or ``none``."""
    found = sorted(set(values))
    if not found:
        return "none"
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
