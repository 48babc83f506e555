"""The nouns that travel between the verbs: frozen, checked, with a unit on every field.

    Job --probe--> Profile --plan--> Plan --train--> RunSummary --report--> pages

Words, settled once:

* *worker*: one training rank. *Loader process*: a data-loading process.
* *local* batch: samples per step on one worker. *Global* batch: their sum over the workers.
* *epoch*: every training sample once. *Step*: one update of the weights.
* *stage*: a stretch of constant learning rate (before warm-up and decay) and resolution.
* *micro-batch*: the part of a local batch that goes through the network at once.

Every record refuses unknown keys, NaN and infinity. A file holds one record; its ``format`` says
which and in which version.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]

Precision = Literal["float32", "bfloat16"]
Augmentation = Literal["none", "crop", "crop-flip"]
Source = Literal["measured", "predicted", "published", "assumed", "asked"]


class Record(BaseModel):
    """Base of all records: immutable, unknown keys refused, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# --------------------------------------------------------------------------------------- the job


class ProbeSettings(Record):
    """How much to measure before planning (job keys ``probe.*``)."""

    budget: Positive = Field(20.0, description="Time to spend on measuring, in seconds.")
    steps: Count = Field(10, description="Timed steps per measured point.")


class Goal(Record):
    """What the plan should aim for (job keys ``goal.*``)."""

    objective: Literal["knee", "time"] = Field(
        "knee",
        description="`knee`: the smallest global batch after which doubling gains little time; "
        "`time`: the least predicted epoch time.",
    )
    doubling_gain: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="The knee: doubling the batch must save at least this share of the epoch time.",
    )
    least_steps: Count = Field(10, description="Fewest steps per epoch a batch may leave.")
    memory: Count | None = Field(
        None, description="Most bytes one worker may use; unset: what the device has free."
    )


class Job(Record):
    """What to train, and on what. Every key that changes the result is here."""

    data: str = Field(
        "digits",
        min_length=1,
        description="`digits`, `cifar10:PATH`, `cifar100:PATH`, `imagefolder:PATH`, or an import "
        "string `package.module:function` that returns (train, validation, class names).",
    )
    val: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the images held out (seeded, equal per class) where `imagefolder` "
        "has no val/ or test/.",
    )
    unreadable: Literal["refuse", "skip"] = Field(
        "refuse", description="An unreadable image: stop and name it, or skip and count it."
    )
    network: str = Field(
        "resnet8",
        min_length=1,
        description="`resnet8`, `resnet18`, `vgg8`, `mobilenet_small`, or an import string such as "
        "`torchvision.models:resnet50`, called with `num_classes=`.",
    )
    weights: str | None = Field(
        None, description="Path of a checkpoint or plain state_dict to start from."
    )
    frozen: tuple[str, ...] = Field(
        (), description="Parameters to leave as they are: name patterns such as `stages.0.*`."
    )
    loss: str = Field(
        "cross_entropy",
        min_length=1,
        description="`cross_entropy`, or an import string: f(outputs, labels) -> mean loss.",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="For `cross_entropy`: share.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the classifier: share.")
    augment: Literal["auto", "none", "crop", "crop-flip"] = Field(
        "auto",
        description="Random shift and crop, with or without horizontal flip. `auto`: `crop` for "
        "digits, else `crop-flip`.",
    )
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="Nesterov SGD, or AdamW.")
    momentum: float = Field(0.9, ge=0, lt=1, description="For `sgd`: momentum.")
    weight_decay: NonNegative = Field(
        5e-4, description="Decay of weight matrices and kernels; norms and biases have none."
    )
    learning_rate: Literal["auto"] | Positive = Field(
        "auto",
        description="Rate at `base_batch`, per step. `auto`: 0.1 for `sgd`, 0.001 for `adamw`.",
    )
    base_batch: Count = Field(128, description="Global batch at which `learning_rate` holds.")
    scaling: Literal["linear", "sqrt", "none"] = Field(
        "sqrt", description="How the rate grows with the global batch over `base_batch`."
    )
    warmup_epochs: Literal["auto"] | NonNegative = Field(
        "auto",
        description="Epochs of linear warm-up. `auto`: none if the rate is not scaled up, else "
        "5, or a tenth of the epochs if that is less.",
    )
    decay: Literal["cosine", "steps", "none"] = Field(
        "cosine",
        description="After warm-up: half a cosine to 0, or a tenth at 1/3, 2/3 and 8/9 of the "
        "epochs, or constant.",
    )
    clip_norm: Positive | None = Field(None, description="Largest global gradient norm.")
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of weights, order, split and augmentation."
    )
    epochs: Count = Field(30, description="Epochs to train.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of the forward and backward pass. `auto`: bfloat16 autocast where the "
        "processor computes in it and the probe finds it faster, else float32.",
    )
    method: Literal["plain"] = Field("plain", description="How the workers share the batch.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: GPUs if any.")
    workers: Literal["auto"] | Count = Field(
        "auto", description="Training processes. `auto`: all visible GPUs, or 2 on CPU."
    )
    launch: Literal["local", "in-process"] = Field(
        "local", description="`local`: processes under torchrun; `in-process`: one worker, here."
    )
    global_batch: Literal["auto"] | Count = Field(
        "auto", description="Samples per step over all workers. `auto`: the plan decides."
    )
    micro_batch: Literal["auto"] | Count = Field(
        "auto",
        description="Most samples that go through the network at once on a worker; a larger local "
        "batch accumulates gradients. `auto`: what fits the memory.",
    )
    resolutions: Literal["auto"] | tuple[Count, ...] = Field(
        "auto",
        description="Training image sides in pixels, low to high; `plain` trains at the highest. "
        "`auto`: the data's own size.",
    )
    evaluate_epochs: Count = Field(1, description="Evaluate every so many epochs, and at the end.")
    checkpoint_seconds: Positive = Field(
        60.0, description="Seconds between checkpoints inside an epoch."
    )
    timeout: Positive = Field(
        120.0, description="Seconds after which a silent collective gives up."
    )
    restarts: Index = Field(0, description="How often a dead worker group is started again.")
    port: int = Field(
        0, ge=0, le=65535, description="Rendezvous port on this machine; 0: any free one."
    )
    probe: ProbeSettings = Field(ProbeSettings(), description="Measuring before planning.")
    goal: Goal = Field(Goal(), description="What the plan aims for.")

    @property
    def augmentation(self) -> Augmentation:
        """`augment`, with `auto` resolved."""
        if self.augment != "auto":
            return self.augment
        return "crop" if self.data == "digits" else "crop-flip"

    @model_validator(mode="after")
    def _resolutions_rise(self) -> Job:
        sides = self.resolutions
        if sides != "auto" and (not sides or list(sides) != sorted(set(sides))):
            raise ValueError(
                f"resolutions={','.join(map(str, sides))}: give one or more rising sides in "
                "pixels, such as resolutions=24,32"
            )
        return self


# ----------------------------------------------------------------------------- what was measured


class Estimate(Record):
    """A value with an interval that should hold the truth 95 times in 100."""

    value: float = Field(description="Best guess, in the unit of the field that holds it.")
    low: float = Field(description="Lower end, same unit.")
    high: float = Field(description="Upper end, same unit.")


class DataFacts(Record):
    """What a plan needs to know of a data set, and how it is recognized again."""

    name: str = Field(description="Kind of data: digits, cifar100, imagefolder or import string.")
    digest: str = Field(description="SHA-256 over names, labels and pixels, in hex.")
    train_samples: Count = Field(description="Training images.")
    val_samples: Index = Field(description="Held-out images, never trained on.")
    split: str = Field(description="How the held-out images were chosen, in words.")
    classes: tuple[str, ...] = Field(description="Class names, in label order.")
    side: Count = Field(description="Natural training resolution: image side, in pixels.")
    skipped: Index = Field(0, description="Unreadable images left out.")


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
    workers: Count = Field(description="Worker processes that measured together.")
    cores: Count = Field(description="CPU cores usable on the host.")
    threads: Count = Field(description="Compute threads of each worker.")
    memory_bytes: Count = Field(description="Memory one worker may use, in bytes.")
    python: str = Field(description="Python version.")
    torch: str = Field(description="PyTorch version.")
    allocator: str = Field(description="How the memory allocator was set.")


class StepTime(Record):
    """Time of one training step on one worker while all workers compute at once."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    workers: Count = Field(description="Workers that computed at the same time.")
    compute_seconds: Positive = Field(
        description="Median of input, forward, backward and update, without exchange, in seconds."
    )
    sync_seconds: NonNegative = Field(
        description="Median of the gradient exchange after it, waiting included, in seconds."
    )
    step_seconds: Positive = Field(description="Median of the whole step, in seconds.")
    step_low: Positive = Field(description="Lower quartile of the whole step, in seconds.")
    step_high: Positive = Field(description="Upper quartile of the whole step, in seconds.")
    repeats: Count = Field(description="Timed steps.")


class PrecisionTime(Record):
    """Time of the same training step in one number format, by which `auto` is decided."""

    precision: Precision = Field(description="Number format of the forward and backward pass.")
    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    step_seconds: Positive = Field(description="Median of the whole step, in seconds.")


class MemoryPoint(Record):
    """Peak memory of one training step on one worker."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples in the step.")
    peak_bytes: Count = Field(
        description="Largest sum of live tensor bytes during the step, weights included."
    )


class CollectiveTime(Record):
    """Time of one all-reduce."""

    bytes: Count = Field(description="Message size, in bytes.")
    workers: Count = Field(description="Processes taking part.")
    seconds: Positive = Field(description="Median, in seconds.")
    low: Positive = Field(description="Lower quartile, in seconds.")
    high: Positive = Field(description="Upper quartile, in seconds.")
    repeats: Count = Field(description="Timed calls.")


class GradientNoise(Record):
    """Gradient noise early in training (McCandlish et al. 2018)."""

    noise_scale: Positive | None = Field(
        description="tr(Sigma)/|G|^2, in samples; null where the signal was not above the noise."
    )
    trace: float = Field(description="Estimate of tr(Sigma), gradient units squared.")
    sqr_norm: float = Field(description="Estimate of |G|^2, gradient units squared.")
    parts: Count = Field(description="Gradients of parts that entered each estimate.")
    repeats: Count = Field(description="Steps averaged before dividing.")


class Profile(Record):
    """What `probe` measured: reusable input of `plan`."""

    format: Literal["batchwright-profile/1"] = "batchwright-profile/1"
    job: Job = Field(description="The job that was measured, resolved.")
    data: DataFacts = Field(description="Its data.")
    network: NetworkFacts = Field(description="Its network.")
    cluster: Cluster = Field(description="Where it was measured.")
    precisions: tuple[PrecisionTime, ...] = Field(
        (), description="Number formats compared; empty where there was no choice."
    )
    steps: tuple[StepTime, ...] = Field(description="Step times.")
    memory: tuple[MemoryPoint, ...] = Field(description="Memory peaks.")
    collectives: tuple[CollectiveTime, ...] = Field(description="All-reduce times.")
    noise: GradientNoise | None = Field(description="Gradient noise; null if not measurable.")
    evaluation_seconds_per_image: Positive = Field(
        description="Forward pass without gradients on one worker, in seconds per image."
    )
    probe_seconds: Positive = Field(description="Wall time that measuring took, in seconds.")


# --------------------------------------------------------------------------------------- the plan


class Prediction(Record):
    """What one candidate batch would cost."""

    workers: Count = Field(description="Workers.")
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
    extrapolated: bool = Field(description="Whether the batch lies outside what was measured.")


class Reason(Record):
    """Why a choice is what it is."""

    choice: str = Field(description="What was chosen, for example `global batch`.")
    value: str = Field(description="The value, with its unit.")
    why: str = Field(description="The reason, in a sentence.")
    source: Source = Field(description="Where it came from.")
    reference: str = Field("", description="For `published`: who, when, where.")


class LearningRateRule(Record):
    """The learning rate as a function of samples seen; see `planning.learning_rate`."""

    base: Positive = Field(description="Rate at the base batch, per step.")
    base_batch: Count = Field(description="Global batch at which the base rate holds.")
    scaling: Literal["linear", "sqrt", "none"] = Field(description="Growth with the batch.")
    peak: Positive = Field(description="Rate at the planned batch, after warm-up, per step.")
    warmup_epochs: NonNegative = Field(description="Length of the linear warm-up, in epochs.")
    decay: Literal["cosine", "steps", "none"] = Field(description="Shape after warm-up.")


class Stage(Record):
    """A stretch of epochs under one resolution, batch and rate: a row of the plan."""

    epochs: Count = Field(description="Length, in epochs.")
    resolution: Count = Field(description="Training image side, in pixels.")
    learning_rate: Positive = Field(description="Rate before warm-up and decay, per step.")
    dropout: float = Field(ge=0, lt=1, description="Share of features dropped.")
    augmentation: Augmentation = Field(description="Random changes to training images.")
    local_batch_sizes: tuple[Count, ...] = Field(
        min_length=1, description="Samples per step of each worker, in rank order."
    )
    micro_batch_size: Count = Field(description="Most samples in one forward pass.")
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


class Plan(Record):
    """A header and a table of stages; nothing else passes between deciding and doing.

    Holds no time, host or output path: the same input gives the same bytes everywhere.
    """

    format: Literal["batchwright-plan/1"] = "batchwright-plan/1"
    job: Job = Field(description="The job it was made for, resolved.")
    data: DataFacts = Field(description="The data it was made for.")
    network: NetworkFacts = Field(description="The network it was made for.")
    method: Literal["plain"] = Field(description="How the workers share the batch.")
    merge: Literal["sample-weighted all-reduce"] = "sample-weighted all-reduce"
    update: Literal["sgd", "adamw"] = Field(description="Optimizer.")
    precision: Precision = Field(description="Number format of the forward and backward pass.")
    learning_rate: LearningRateRule = Field(description="The rate over time.")
    stages: tuple[Stage, ...] = Field(min_length=1, description="The table.")
    considered: tuple[Prediction, ...] = Field((), description="Candidates, small to large.")
    reasons: tuple[Reason, ...] = Field((), description="Why, choice by choice.")

    @property
    def epochs(self) -> int:
        """Epochs over all stages."""
        return sum(stage.epochs for stage in self.stages)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.stages[0].workers

    @property
    def top_resolution(self) -> int:
        """Largest training resolution, in pixels; evaluation uses it."""
        return max(stage.resolution for stage in self.stages)

    def stage_of(self, epoch: int) -> int:
        """Index of the stage that holds the zero-based ``epoch``; `IndexError` past the end."""
        last = 0
        for index, stage in enumerate(self.stages):
            last += stage.epochs
            if epoch < last:
                return index
        raise IndexError(f"epoch {epoch} is past the plan's {last}")

    def explain(self) -> str:
        """The plan, choice by choice, and what else was considered, as text for a person."""
        return "\n".join([*self._header_lines(), "", *self._stage_lines(), *self._reason_lines()])

    def _header_lines(self) -> list[str]:
        data, network, stage = self.data, self.network, self.stages[0]
        return [
            f"{network.name} ({network.parameters:,} weights) on {data.name} "
            f"({data.train_samples:,} training and {data.val_samples:,} held-out images, "
            f"{len(data.classes)} classes)",
            f"{self.workers} worker(s), global batch {stage.global_batch_size}, {self.precision}, "
            f"{self.update}, {self.merge}, {self.epochs} epochs",
        ]

    def _stage_lines(self) -> list[str]:
        lines = ["stage  epochs  side  local batches     micro-batch  rate     s / epoch (95 %)"]
        for index, stage in enumerate(self.stages):
            seconds = stage.predicted_epoch_seconds
            shown = (
                f"{seconds.value:.2f} ({seconds.low:.2f} to {seconds.high:.2f})"
                if seconds
                else "not measured"
            )
            batches = "+".join(map(str, stage.local_batch_sizes))
            lines.append(
                f"{index:<6} {stage.epochs:<7} {stage.resolution:<5} {batches:<17} "
                f"{stage.micro_batch_size:<12} {stage.learning_rate:<8.4g} {shown}"
            )
        return lines

    def _reason_lines(self) -> list[str]:
        lines = ["", "why"] if self.reasons else []
        for reason in self.reasons:
            source = f"{reason.source}: {reason.reference}" if reason.reference else reason.source
            lines.append(f"  {reason.choice} = {reason.value}   [{source}]")
            lines.append(f"      {reason.why}")
        if self.considered:
            chosen = self.stages[0].global_batch_size
            lines += ["", "considered: global batch, steps / epoch, s / epoch (95 %), peak MiB"]
        for one in self.considered:
            mark = "*" if one.global_batch_size == chosen else " "
            epoch = one.epoch_seconds
            lines.append(
                f"{mark} {one.global_batch_size:>6} {one.steps_per_epoch:>7}   "
                f"{epoch.value:.2f} ({epoch.low:.2f} to {epoch.high:.2f})   "
                f"{one.peak_bytes.value / 2**20:.0f}"
                + ("   beyond what was measured" if one.extrapolated else "")
            )
        return lines


# ---------------------------------------------------------------------------------- what happened


class WorkerTime(Record):
    """Where one worker's time went in one epoch of training, in seconds."""

    local_batch_size: Count = Field(description="Samples per step.")
    samples: Index = Field(description="Samples trained on.")
    input_seconds: NonNegative = Field(description="Waiting for and preparing images.")
    compute_seconds: NonNegative = Field(description="Forward and backward pass, and update.")
    communication_seconds: NonNegative = Field(
        description="Exchanging gradients, waiting for other workers included."
    )


class EpochRecord(Record):
    """What one epoch was like."""

    epoch: Index = Field(description="Zero-based.")
    resolution: Count = Field(description="Training image side, in pixels.")
    global_batch_size: Count = Field(description="Planned samples per step over all workers.")
    steps: Index = Field(description="Updates asked for.")
    skipped_steps: Index = Field(description="Updates skipped because a gradient was not finite.")
    samples: Index = Field(description="Training samples seen this epoch.")
    learning_rate: NonNegative = Field(description="Rate of the last step, per step.")
    train_loss: float | None = Field(description="Mean loss over the epoch; null if not finite.")
    val_loss: float | None = Field(None, description="Held-out mean loss; null if not evaluated.")
    val_correct: Index | None = Field(None, description="Held-out images classified correctly.")
    val_count: Index | None = Field(None, description="Held-out images evaluated.")
    noise_scale: Positive | None = Field(None, description="Gradient noise scale, in samples.")
    training_seconds: NonNegative = Field(description="Steps, input and exchange, in seconds.")
    evaluation_seconds: NonNegative = Field(description="Held-out evaluation, in seconds.")
    checkpoint_seconds: NonNegative = Field(description="Writing checkpoints, in seconds.")
    workers: tuple[WorkerTime, ...] = Field(description="Per worker, in rank order.")
    whole: bool = Field(True, description="False if part of it ran before a resume.")

    @property
    def top1(self) -> float | None:
        """Held-out accuracy in [0, 1]; `None` if not evaluated."""
        if self.val_correct is None or not self.val_count:
            return None
        return self.val_correct / self.val_count


class RunSummary(Record):
    """A whole run: what `report` reads."""

    format: Literal["batchwright-summary/1"] = "batchwright-summary/1"
    run_folder: str = Field(description="Where the run's files are.")
    plan: Plan = Field(description="The plan that was followed.")
    profile: Profile | None = Field(None, description="What was measured before, if anything.")
    epochs: tuple[EpochRecord, ...] = Field(description="One per finished epoch.")
    setup_seconds: NonNegative = Field(
        description="Starting processes and opening data and network, in seconds."
    )
    wall_seconds: NonNegative = Field(description="Training verb from start to end, in seconds.")
    resumed: Index = Field(0, description="How often the run was continued.")

    @property
    def test_accuracy(self) -> float | None:
        """Held-out accuracy of the last evaluated epoch, in [0, 1]."""
        return next((e.top1 for e in reversed(self.epochs) if e.top1 is not None), None)

    @property
    def best_epoch(self) -> EpochRecord | None:
        """The evaluated epoch with the highest held-out accuracy, the earliest of equals."""
        evaluated = [e for e in self.epochs if e.top1 is not None]
        return max(evaluated, key=lambda e: e.top1 or 0.0) if evaluated else None

    @property
    def measured_epoch_seconds(self) -> float | None:
        """Median training seconds of whole epochs, the first left out if there are more."""
        from statistics import median

        whole = [e.training_seconds for e in self.epochs if e.whole]
        return median(whole[1:] or whole) if whole else None
