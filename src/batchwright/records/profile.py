"""The profile: measurements of a workload, with the machine they were taken on.

The records of single measurements are in `measured`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, log, sqrt
from typing import Annotated, Literal

from pydantic import Field, field_validator

from batchwright.records.base import (
    Count,
    Document,
    Index,
    NonNegative,
    OptimizerName,
    Positive,
    Precision,
    Record,
    Shown,
)
from batchwright.records.job import PASS_KEYS, Job
from batchwright.records.measured.choices import (
    CompilationTimes,
    GraphTimes,
    PrecisionRatio,
    PrecisionTime,
    RecomputationTimes,
)
from batchwright.records.measured.steps import (
    CollectiveTime,
    KindTimes,
    LinkTime,
    MemoryParts,
    MemoryPoint,
    OutOfMemory,
    PairTime,
    StepTime,
    UpdateTime,
)
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
    formats: tuple[Precision, ...] = Field(
        (),
        description="Number formats among which `precision=auto` chooses: float32, and the 16-bit "
        "one that the device has instructions for, if any; empty: not known.",
    )

    @property
    def pieces_apart(self) -> bool:
        """Whether the heap keeps small freed pieces apart, so that large tensors fit less well."""
        return self.device == "cpu" and not self.allocator.endswith(JOINED)

    @property
    def several_cores(self) -> bool:
        """Whether several CPU cores share a step, by threads or by workers."""
        return self.device == "cpu" and self.cores > 1


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
