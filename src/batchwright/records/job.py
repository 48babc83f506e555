"""The job: what to train, on what, and what the plan should aim for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from batchwright.records.base import Augmentation, Count, Index, NonNegative, Positive, Record


class ProbeSettings(Record):
    """How much to measure before planning (job keys ``probe.*``)."""

    budget: Positive = Field(20.0, description="Most time to spend on measuring, in seconds.")
    error: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Stop earlier once every step time in question is known this well: half width "
        "of its 95 % interval, as a share of it.",
    )
    steps: Count = Field(10, description="Most timed steps at one visit to a measured point.")
    kind: str = Field(
        "",
        description="Name of this kind of worker, by which `goal.kinds` refers to it; unset: the "
        "device's own name.",
    )


class WorkerKind(Record):
    """Some workers of one kind that a plan may use (an item of job key ``goal.kinds``)."""

    kind: str = Field(min_length=1, description="Name; that of a profile, or one of your own.")
    count: Count = Field(description="How many there are.")
    price: Positive | None = Field(
        None, description="Price of one of them for an hour, in any currency."
    )
    memory: Count | None = Field(None, description="Bytes one may use; unset: as measured.")
    like: str = Field("", description="Profile it behaves like, where it was not measured itself.")
    speed: Positive = Field(1.0, description="How many times as fast as `like`; assumed.")


class Link(Record):
    """The network between workers that were not measured together (job keys ``link.*``)."""

    latency: NonNegative | None = Field(None, description="Time of an empty message, in seconds.")
    bandwidth: Positive | None = Field(None, description="Bytes per second, in one direction.")


class Goal(Record):
    """What the plan should aim for (job keys ``goal.*``)."""

    objective: Literal["knee", "time", "cost", "target-accuracy"] = Field(
        "knee",
        description="`knee`: the smallest global batch, and the fewest workers, after which more "
        "pay little; `time`: the least time; `cost`: the least cost; `target-accuracy`: the least "
        "time to `goal.accuracy`.",
    )
    doubling_gain: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="The knee: doubling the batch must save more than this share of the time.",
    )
    least_steps: Count = Field(10, description="Fewest steps per epoch a batch may leave.")
    memory: Count | None = Field(
        None, description="Most bytes one worker may use; unset: what the device has free."
    )
    deadline: Positive | None = Field(
        None, description="Most time for the whole training, evaluation included, in seconds."
    )
    max_cost: Positive | None = Field(
        None, description="Most the whole training may cost, in the currency of the price."
    )
    max_workers: Count | None = Field(
        None,
        description="Most workers to plan for; beyond what was measured, `link.*` must be given.",
    )
    price: Positive | None = Field(
        None, description="Price of one worker for an hour, in any currency."
    )
    accuracy: float | None = Field(
        None, gt=0, lt=1, description="Held-out accuracy that `target-accuracy` aims for: share."
    )
    kinds: tuple[WorkerKind, ...] = Field(
        (), description="Kinds of workers to choose from; unset: those that were measured."
    )
    tolerance: float = Field(
        0.10,
        gt=0,
        lt=1,
        description="Plan again where measured times differ by more than this share.",
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
    batch_norm: Literal["worker", "synchronized"] = Field(
        "worker",
        description="Batch normalization in training over each worker's own samples, or over all "
        "workers' at each step (GPUs only).",
    )
    sampling: Literal["shuffle", "balanced"] = Field(
        "shuffle",
        description="`shuffle`: each image once per epoch; `balanced`: drawn with replacement, all "
        "classes equally often.",
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of weights, order, split and augmentation."
    )
    epochs: Count = Field(30, description="Epochs to train.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of the forward and backward pass. `auto`: bfloat16 autocast where the "
        "processor computes in it and the probe finds it faster, else float32.",
    )
    method: Literal["plain", "dynamic-batch"] = Field(
        "plain",
        description="How the workers share the batch. `plain`: as planned, throughout; "
        "`dynamic-batch`: each worker's share follows its measured speed, the global batch stays.",
    )
    rebalance_steps: Index = Field(
        25,
        description="For `dynamic-batch`: steps after which the shares are made again, as well as "
        "at the end of an epoch. 0: only there, as published.",
    )
    least_local_batch: Count | None = Field(
        None,
        description="Fewest samples per step that `dynamic-batch` leaves a worker; unset: 1, or 2 "
        "with batch normalization.",
    )
    most_local_batch: Count | None = Field(
        None,
        description="Most samples per step that `dynamic-batch` gives a worker; unset: no limit, "
        "what does not fit at once goes in micro-batches.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: GPUs if any.")
    workers: Literal["auto"] | Count = Field(
        "auto",
        description="Training processes. `auto`: the plan decides, up to all visible GPUs, or 2 "
        "on CPU.",
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
    checkpoint_steps: Count | None = Field(
        None, description="Steps between checkpoints, as well as `checkpoint_seconds`."
    )
    timeout: Positive = Field(
        120.0, description="Seconds after which a silent collective gives up."
    )
    restarts: Index = Field(
        3,
        description="How often the workers are started again, from the last checkpoint, after one "
        "was killed. An error of their own ends the run at once.",
    )
    port: int = Field(
        0, ge=0, le=65535, description="Rendezvous port on this machine; 0: any free one."
    )
    probe: ProbeSettings = Field(ProbeSettings(), description="Measuring before planning.")
    goal: Goal = Field(Goal(), description="What the plan aims for.")
    link: Link = Field(Link(), description="The network between machines.")

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
