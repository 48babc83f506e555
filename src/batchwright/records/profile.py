"""The profile: what was measured, on what, of which workload."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Literal

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
"""How `Cluster.allocator` ends where glibc joins small freed pieces, so that tensors fit again."""

FAR_BEYOND_CHANCE = 0.3
"""Share of what chance leaves wrong that a network which has learnt before answers right (Cohen's
kappa)."""


class DataFacts(Record):
    """What a plan needs to know of a data set, and how it is recognized again."""

    name: str = Field(description="digits, cifar100, an image folder's own name, or import string.")
    digest: str = Field(description="SHA-256 over names, labels and pixels, in hex.")
    train_samples: Count = Field(description="Training images.")
    val_samples: Index = Field(description="Held-out images, never trained on.")
    split: str = Field(description="How the held-out images were chosen, in words.")
    classes: tuple[str, ...] = Field(description="Class names, in label order.")
    side: Count = Field(description="Natural training resolution: image side, in pixels.")
    skipped: Index = Field(0, description="Unreadable images left out.")
    channels: Count = Field(3, description="Of an image; others than 3 in your own data alone.")
    largest_class: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the held-out images that are of the commonest class: what always "
        "answering it gets right; null where they were not counted.",
    )

    @property
    def even_classes(self) -> float:
        """As many classes of one size as guessing is right by: fewer where one is larger."""
        count, largest = len(self.classes), self.largest_class
        if largest is None or not 1 + 1e-9 < largest * count < count:
            return count
        return 1 / largest

    @property
    def guessing(self) -> float:
        """Accuracy of always answering the commonest class; 0 where there are no two classes."""
        return 1 / self.even_classes if len(self.classes) > 1 else 0.0


class NetworkFacts(Record):
    """What a plan needs to know of a network."""

    name: str = Field(description="As in the job.")
    parameters: Count = Field(description="Number of weights, frozen ones too.")
    trained_bytes: Count = Field(description="Bytes of the gradients that workers exchange.")
    batch_norm: bool = Field(description="Whether it has batch normalization.")
    least_side: Count = Field(1, description="Smallest image side that it takes, in pixels.")


class Cluster(Record):
    """The hardware and software a profile was taken on."""

    device: Literal["cpu", "cuda"] = Field(description="Kind of device.")
    device_name: str = Field(description="Processor or GPU model.")
    kind: str = Field("", description="Name of this kind of worker; empty: the device's name.")
    workers: Count = Field(description="Most worker processes that measured together.")
    cores: Count = Field(description="CPU cores usable on the host.")
    threads: Count = Field(description="Compute threads of each, with that many workers.")
    memory_bytes: Count = Field(description="Memory one worker may use, in bytes.")
    python: str = Field(description="Python version.")
    torch: str = Field(description="PyTorch version.")
    allocator: str = Field(
        description="How the memory allocator was set; ends in what `JOINED` says where it joins "
        "small freed pieces."
    )
    arithmetic: str = Field(
        "", description="What float32 is on a GPU (TF32), and how cuDNN chooses; empty on the CPU."
    )

    @property
    def pieces_apart(self) -> bool:
        """Whether small freed pieces are kept apart in the heap, so that tensors fit less well."""
        return self.device == "cpu" and not self.allocator.endswith(JOINED)

    @property
    def several_cores(self) -> bool:
        """Whether cores of a processor share a step, by threads or by workers."""
        return self.device == "cpu" and self.cores > 1


class StepLoading(Record):
    """What loading has to do with the time of a step, where it goes on beside the steps."""

    loaders: Index = Field(description="Loader processes of each worker; 0: the worker loads.")
    batch_seconds: NonNegative = Field(
        description="A loader process's seconds for a batch, all of them loading and no step taken."
    )
    cpu_seconds: NonNegative = Field(description="Processor seconds of that.")
    alone_seconds: Positive = Field(
        description="The step while nothing is loaded, its batch at hand, in seconds."
    )
    input_seconds: NonNegative = Field(
        description="Of the step beside loading, what it waits for its batch, in seconds."
    )


class StepTime(Record):
    """Time of one training step on one worker while all workers compute at once."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    workers: Count = Field(description="Workers that computed at the same time.")
    compute_seconds: Positive = Field(
        description="Input, forward, backward and update, without waiting for the exchange of "
        "gradients, in seconds: of the mean steps of the visits the median."
    )
    sync_seconds: NonNegative = Field(
        description="The wait for the exchange that the backward pass did not hide, in seconds: of "
        "the mean steps of the visits the median."
    )
    step_seconds: Positive = Field(description="Median of the visits, in seconds.")
    step_low: Positive = Field(description="Lower quartile of the whole step, in seconds.")
    step_high: Positive = Field(description="Upper quartile of the whole step, in seconds.")
    repeats: Count = Field(description="Timed steps.")
    visits: tuple[Positive, ...] = Field(
        (),
        description="Mean of the whole step at each visit to this point, in seconds, as a training "
        "is the sum of its steps; visits are apart in time, so they show how repeatable the "
        "machine is. Empty: one visit.",
    )
    visit_error: NonNegative | None = Field(
        None,
        description="Standard error of the mean of one visit by the scatter of its own steps, as a "
        "share of it, in the median over the visits; null in older profiles.",
    )
    loading: StepLoading | None = Field(
        None,
        description="Loading, which is in these times; null where batches are made within the step "
        "or, in older profiles, were at hand.",
    )


class PrecisionTime(Record):
    """Time of the same training step in one number format, by which `auto` is decided."""

    precision: Precision = Field(description="Number format of the forward and backward pass.")
    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    step_seconds: Positive = Field(description="Median of the whole step, in seconds.")


class PrecisionRatio(Record):
    """How a step in a 16-bit format compares with the same one in float32, timed in turns."""

    ratio: Estimate = Field(description="Step in the 16-bit format over one in float32.")
    rounds: Count = Field(description="Rounds of float32, the other, the other, float32.")
    wanted_batch_size: Count = Field(
        description="Samples per step on each worker that the choice is for; those compared are "
        "fewer where time or memory allowed no more."
    )
    finite: bool = Field(
        True,
        description="Whether gradients in the 16-bit format were finite wherever those in float32 "
        "were; if not, float32 is taken however long it takes.",
    )


class PairTime(Record):
    """Times of two groups of workers with unequal local batches, computing at the same time.

    What counts is their ratio: both groups saw the same state of the machine, visit by visit.
    """

    resolution: Count = Field(description="Image side, in pixels.")
    large_workers: Count = Field(description="Workers with the large local batch.")
    small_workers: Count = Field(description="Workers with the small one.")
    large_batch: Count = Field(description="Samples per step of the former.")
    small_batch: Count = Field(description="Samples per step of the latter.")
    large_seconds: Positive = Field(description="Median of a step of the former, in seconds.")
    small_seconds: Positive = Field(
        description="Step of the latter, in seconds: that times the median ratio of the two."
    )
    repeats: Count = Field(description="Visits that the medians are over.")
    ratios: tuple[Positive, ...] = Field(
        (),
        description="Step of the small batch over that of the large one at each visit; visits are "
        "apart in time, so they show how well the ratio is known. Empty: only the median is.",
    )


class MemoryPoint(Record):
    """Peak memory of one training step on one worker."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples in the step.")
    peak_bytes: Count = Field(
        description="Largest sum of live tensor bytes during the step, weights included."
    )
    workers: Count = Field(1, description="Workers; several keep buffers to exchange gradients.")
    resident_bytes: Count | None = Field(
        None,
        description="Largest resident size of the process during the step, on a GPU what its "
        "allocator held; null if unknown.",
    )


class MemoryParts(Record):
    """Bytes on one worker whatever the batch, by what they are for."""

    parameters: Count = Field(description="Weights, frozen ones too.")
    buffers: Index = Field(description="Statistics of batch normalization and the like.")
    gradients: Index = Field(description="Gradients of the trained weights.")
    optimizer: Index = Field(description="Momentum and other state of the optimizer.")
    reduction: Index = Field(description="Buffers to exchange gradients; unused by one worker.")


class OutOfMemory(Record):
    """A step that did not fit, or that killed the process which tried it."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples in the step.")
    workers: Count = Field(description="Workers that tried it at the same time.")
    short_of: Literal["memory", "shared memory"] = Field(
        "memory",
        description="What there was too little of: the memory of a worker, or the shared memory "
        "through which loader processes hand over their batches.",
    )


class CollectiveTime(Record):
    """Time of one exchange of a message between workers."""

    operation: Literal["all-reduce", "push-pull"] = Field(
        "all-reduce", description="A sum over all, or sending to one process and back."
    )
    bytes: Count = Field(description="Message size, in bytes.")
    workers: Count = Field(description="Processes taking part.")
    seconds: Positive = Field(description="Median, in seconds.")
    low: Positive = Field(description="Lower quartile, in seconds.")
    high: Positive = Field(description="Upper quartile, in seconds.")
    repeats: Count = Field(description="Timed calls.")


class LinkTime(Record):
    """The network between two workers, measured by messages that nobody else sends meanwhile."""

    between: Literal["hosts", "workers of a host"] = Field(description="Which two.")
    latency: NonNegative = Field(description="Half of an empty message's way there and back, s.")
    latency_low: NonNegative = Field(description="Its lower quartile, in seconds.")
    latency_high: NonNegative = Field(description="Its upper quartile, in seconds.")
    bandwidth: Positive = Field(description="Bytes per second, in one direction.")
    bandwidth_low: Positive = Field(description="Its lower quartile.")
    bandwidth_high: Positive = Field(description="Its upper quartile.")
    bytes: Count = Field(description="Of the largest message, in bytes.")


class KindTimes(Record):
    """Workers of one of several kinds that measured together, each kind at its own pace."""

    kind: str = Field(description="Name, as in `goal.kinds`; hosts' names where speed sets apart.")
    workers: Count = Field(description="Of this kind, among all that measured together.")
    device_name: str = Field(description="Processor or GPU model.")
    memory_bytes: Count = Field(description="Memory one worker may use, in bytes.")
    pace: Positive = Field(description="Computing of a step, over the mean of all workers'.")
    steps: tuple[StepTime, ...] = Field(
        description="Step times, of all workers at once: its own computing, and the exchange "
        "without waiting for slower kinds."
    )


class UpdateTime(Record):
    """Time of an optimizer's step alone: it is the same whatever the batch."""

    optimizer: OptimizerName = Field(description="As in a job.")
    workers: Count | None = Field(
        None,
        description="Workers that updated at the same time: the more, the fewer threads each has; "
        "null in older profiles.",
    )
    seconds: Positive = Field(description="Median, in seconds.")
    low: Positive = Field(description="Lower quartile, in seconds.")
    high: Positive = Field(description="Upper quartile, in seconds.")
    repeats: Count = Field(description="Timed updates.")


class GradientNoise(Record):
    """Gradient noise early in training (McCandlish et al. 2018)."""

    noise_scale: Positive | None = Field(
        description="tr(Sigma)/|G|^2, in samples; null where the signal was not above the noise."
    )
    trace: float = Field(description="Estimate of tr(Sigma), gradient units squared.")
    sqr_norm: float = Field(description="Estimate of |G|^2, gradient units squared.")
    relative_error: NonNegative | None = Field(
        None, description="Standard error of the noise scale, as a share of it; null if unknown."
    )
    parts: Count = Field(description="Gradients of parts that entered each estimate.")
    repeats: Count = Field(description="Estimates averaged before dividing.")


class FirstAnswers(Record):
    """What the network answers before any training, for held-out images drawn at random."""

    images: Index = Field(
        description="How many; 0: it gives no number for each class, or labels are no classes."
    )
    right: Index = Field(description="Answered right.")
    by_chance: NonNegative = Field(
        description="As many as would be if answers and labels, each as often as they came, had "
        "nothing to do with each other."
    )

    @property
    def knowing(self) -> bool:
        """Whether it answers far better than by chance, so has learnt before."""
        rest = self.images - self.by_chance
        noise = sqrt(max(0.0, self.by_chance * rest) / max(1, self.images))
        return self.right - self.by_chance > max(FAR_BEYOND_CHANCE * rest, 3 * noise)


class Trial(Record):
    """A short training, its rate come down to its end, and what it had learnt by then.

    It began with the job's starting weights and was judged on images held out from the training
    set, which no trial was trained on; the job's own held-out images were not looked at.
    """

    optimizer: OptimizerName = Field(description="As in a job.")
    global_batch_size: Count = Field(description="Samples per step over all workers.")
    rate: Positive = Field(description="Highest learning rate, per step.")
    usual_rate: Positive = Field(
        description="That which a plan gives a training of this length and batch."
    )
    resolution: Count = Field(description="Image side, in pixels.")
    samples: Count = Field(description="Trained on, over all workers; a sample twice counts twice.")
    steps: Count = Field(description="Updates of the weights.")
    accuracy: float = Field(ge=0, le=1, description="Of the held-out images: share.")
    loss: NonNegative | None = Field(
        description="Mean loss of the held-out images; null where it was infinite."
    )
    held_out: Count = Field(description="Images that this is over.")
    seconds: Positive = Field(description="Wall time of training and judging.")


class RecomputationTimes(Record):
    """Why blocks are computed again in the backward pass, or are not, where memory is short."""

    resolution: Count = Field(description="Image side, in pixels.")
    wanted_batch_size: Count = Field(
        description="Samples per step on each worker that the choice is for."
    )
    limit_bytes: Count = Field(description="Bytes that a worker may use.")
    plain_batch_size: Index = Field(
        description="The most of them that fit at once without; 0: not even the fewest."
    )
    recomputing_batch_size: Index = Field(description="The same with.")
    compared_batch_sizes: tuple[Count, Count] | None = Field(
        None,
        description="Samples of the steps that were timed, without and with: those that fit, or "
        "fewer where time allowed no more. Null where there was nothing to compare.",
    )
    plain_sample_seconds: Positive | None = Field(
        None, description="Median time of such a step without, in seconds per sample."
    )
    recomputing_sample_seconds: Positive | None = Field(None, description="The same with.")
    ratio: Estimate | None = Field(None, description="The latter over the former, in turns.")
    chosen: bool = Field(description="Whether they are computed again.")


class CompilationTimes(Record):
    """What compiling the network takes and saves, by which it is decided."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    training_seconds: Positive = Field(
        description="The job's epochs by steps of this batch as they are, in seconds."
    )
    plain_seconds: Positive = Field(description="Median of such a step, in seconds.")
    compile_seconds: NonNegative | None = Field(
        None,
        description="What compiling took, on the slowest worker, in seconds; null where it was not "
        "tried, since the training is short. What the cache holds already is quicker.",
    )
    compiled_seconds: Positive | None = Field(None, description="Median of a compiled step.")
    ratio: Estimate | None = Field(None, description="Compiled over plain step, in turns.")
    failure: str = Field("", description="Why it cannot be compiled; else empty.")
    asked: bool = Field(description="Whether the job asks for it, whatever it saves.")
    chosen: bool = Field(description="Whether it is compiled.")


class GraphTimes(Record):
    """What replaying passes from CUDA graphs saves, by which it is decided."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    plain_seconds: Positive = Field(description="Median of a step as it is, in seconds.")
    replayed_seconds: Positive | None = Field(None, description="Median of a replayed step.")
    ratio: Estimate | None = Field(None, description="Replayed over plain step, in turns.")
    failure: str = Field("", description="Why passes cannot be replayed; else empty.")
    chosen: bool = Field(description="Whether they are.")


class MachineLoad(Record):
    """What else the machine did while it was looked at, in cores' worth of processor time.

    Whose processes these are: `ours` are the process that measures and all below it, workers and
    loader processes included. The kernel's own threads are neither.
    """

    cores: Count = Field(
        description="CPU cores that the workers may use at once: those that were looked at, or "
        "fewer by a control group's limit."
    )
    seconds: Positive = Field(description="How long, in seconds.")
    ours: NonNegative = Field(description="Cores that we used.")
    others: NonNegative = Field(description="Cores that other programs used.")
    stolen: NonNegative = Field(description="Cores that the host of this virtual machine took.")
    idle: NonNegative = Field(description="Cores that had nothing to do.")
    throttled: NonNegative = Field(
        description="Cores that a control group's limit kept us from using, because others in the "
        "group used them."
    )
    scatter: NonNegative | None = Field(
        None,
        description="Relative standard deviation of the time of the same step from visit to visit; "
        "null if too few visits tell.",
    )


class Profile(Document):
    """What `probe` measured: reusable input of `plan`."""

    format: Literal["batchwright-profile/1"] = "batchwright-profile/1"
    job: Job = Field(description="The job that was measured, resolved.")
    data: DataFacts = Field(description="Its data.")
    network: NetworkFacts = Field(description="Its network.")
    cluster: Cluster = Field(description="Where it was measured.")
    precisions: tuple[PrecisionTime, ...] = Field(
        (), description="Number formats compared; empty where there was no choice."
    )
    precision_ratio: PrecisionRatio | None = Field(
        None, description="What that comparison shows; null where there was none."
    )
    recomputation: RecomputationTimes | None = Field(
        None,
        description="What activation checkpointing would bring, where memory was too short for the "
        "batch; null where there was no question.",
    )
    compilation: CompilationTimes | None = Field(
        None, description="What compiling takes and saves; null where it was no question."
    )
    graphs: GraphTimes | None = Field(
        None, description="What CUDA graphs save; null where there was no question."
    )
    steps: tuple[StepTime, ...] = Field(description="Step times.")
    pairs: tuple[PairTime, ...] = Field(
        (), description="Times of unequal local batches side by side, for `dual-batch`."
    )
    memory: tuple[MemoryPoint, ...] = Field(description="Memory peaks.")
    memory_parts: MemoryParts | None = Field(
        None, description="What of the memory does not grow with the batch; null if not counted."
    )
    out_of_memory: tuple[OutOfMemory, ...] = Field((), description="Steps that did not fit.")
    collectives: tuple[CollectiveTime, ...] = Field(description="Exchange times.")
    links: tuple[LinkTime, ...] = Field(
        (),
        description="The network between workers of a host and between hosts, where another "
        "launcher has started them; the latter is the job's `link`, unless that is given.",
    )
    kinds: tuple[KindTimes, ...] = Field(
        (), description="Kinds of workers, where several measured together; else empty."
    )
    updates: tuple[UpdateTime, ...] = Field(
        (),
        description="Of the optimizers that `optimizer=auto` chooses from; the step times are with "
        "`sgd` then.",
    )
    noise: GradientNoise | None = Field(description="Gradient noise; null if not measurable.")
    first_answers: FirstAnswers | None = Field(
        None,
        description="What the network answers before any training; null where that is not known, "
        "as of a step of your own.",
    )
    trials: tuple[Trial, ...] = Field(
        (), description="Short trainings, which show how the network learns from these images."
    )
    trials_open: bool = Field(
        False, description="Whether the probe has not ended yet, with trials still to be made."
    )
    trials_note: str = Field(
        "", description="Why there are no trials, or fewer than their time allows; else empty."
    )
    load: MachineLoad | None = Field(
        None, description="What else the machine did meanwhile; null where nothing tells."
    )
    evaluation_seconds_per_image: Positive = Field(
        description="Forward pass without gradients on one worker, in seconds per image."
    )
    probe_seconds: Positive = Field(description="Wall time that measuring took, in seconds.")

    @field_validator("job")
    @classmethod
    def _measured_without(cls, job: Job) -> Job:
        """Profiles from before there was the choice were taken without what it offers."""
        unasked = [key for key in PASS_KEYS if getattr(job, key) == "auto"]
        return job.model_copy(update=dict.fromkeys(unasked, "off"))

    @property
    def without_accuracy(self) -> bool:
        """Whether the network's answers were seen to have no held-out accuracy."""
        return self.first_answers is not None and not self.first_answers.images

    def _tables(self) -> list[Shown]:
        """Step times, at most eight of them, evenly through the list."""
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
    """The smallest and the largest of some numbers; ``none`` without any."""
    found = sorted(set(values))
    if not found:
        return "none"
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
