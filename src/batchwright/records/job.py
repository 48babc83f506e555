"""The job: what to train, on what, and what the plan should aim for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from batchwright.errors import ArgumentError, JobError
from batchwright.records.base import (
    AskedMethod,
    Augmentation,
    Count,
    Index,
    Keys,
    NonNegative,
    Positive,
    html_table,
)
from batchwright.records.job_keys import job_keys, job_problem
from batchwright.records.registries.data_sources import DATA, FUNCTION, source_of
from batchwright.records.registries.launchers import LAUNCHERS, Launcher
from batchwright.records.registries.methods import METHODS, MethodSpec
from batchwright.records.registries.networks import NETWORKS
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.registries.registry import Named, explained, listed

Scaling = Literal["linear", "sqrt", "gain", "none"]
AgsMode = Literal["off", "norm", "gain"]

LEAST_BUDGET, MOST_BUDGET = 5.0, 20.0
"""Limits of `probe.budget`, where it is `auto`, in seconds."""
BUDGET_SHARE = 0.1
"""Of the training's time, between these limits."""


class ProbeSettings(Keys):
    """How much to measure before planning (job keys ``probe.*``)."""

    budget: Literal["auto"] | Positive = Field(
        "auto",
        description="Most time to spend on measuring, in seconds. `auto`: a tenth of what the "
        f"training is going to take, as far as the first steps tell, but {LEAST_BUDGET:g} s at "
        f"least and {MOST_BUDGET:g} s at most.",
    )
    error: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Stop earlier once every step time in question is known this well: half width "
        "of its 95 % interval, as a share of it.",
    )
    steps: Count = Field(
        10,
        description="Most timed steps at one visit to a measured point; more where each loader "
        "process would not load a batch meanwhile.",
    )
    learning: NonNegative = Field(
        0.1,
        description="Time to spend on trials, short trainings that show how the network learns, "
        "with which optimizer and, where `learning_rate` is open, at which rate: "
        "below 1 a share of the planned training's time, from 1 on seconds; 0: none.",
    )
    kind: str = Field(
        "",
        description="Name of this kind of worker, by which `goal.kinds` refers to it; unset: the "
        "device's own name.",
    )

    @property
    def first_budget(self) -> float:
        """Seconds that may be spent on measuring before anything is known."""
        return LEAST_BUDGET if self.budget == "auto" else self.budget

    def budget_for(self, training_seconds: float) -> float:
        """Seconds to spend on measuring for a training that takes as long as that."""
        return max(self.first_budget, min(BUDGET_SHARE * training_seconds, self.most_budget))

    @property
    def most_budget(self) -> float:
        """Seconds that may be spent on measuring, whatever becomes known."""
        return MOST_BUDGET if self.budget == "auto" else self.budget


class WorkerKind(Keys):
    """Some workers of one kind that a plan may use (an item of job key ``goal.kinds``)."""

    kind: str = Field(min_length=1, description="Name; that of a profile, or one of your own.")
    count: Count = Field(description="How many there are.")
    price: Positive | None = Field(
        None, description="Price of one of them for an hour, in any currency."
    )
    memory: Count | None = Field(None, description="Bytes one may use; unset: as measured.")
    like: str = Field("", description="Profile it behaves like, where it was not measured itself.")
    speed: Positive = Field(1.0, description="How many times as fast as `like`; assumed.")


class Link(Keys):
    """The network between workers that were not measured together (job keys ``link.*``)."""

    latency: NonNegative | None = Field(None, description="Time of an empty message, in seconds.")
    bandwidth: Positive | None = Field(None, description="Bytes per second, in one direction.")


VIRTUAL_LATENCY, VIRTUAL_BANDWIDTH = 5e-4, 125e6
"""Of virtual workers' links, where a job says nothing: half a millisecond a message, and the
Ethernet of 1 Gb/s of the dual-batch paper's experiments."""


class DualBatch(Keys):
    """Two batch sizes at once, for `dual-batch` and `hybrid` (job keys ``dual.*``)."""

    small_workers: Literal["auto"] | Index = Field(
        "auto",
        description="Workers that train with the smaller batch. `auto`: three quarters of them, or "
        "fewer where `goal.deadline` leaves little time.",
    )
    extra_time: Literal["auto"] | Annotated[float, Field(ge=1)] = Field(
        "auto",
        description="How many times as long a round may take as with large batches alone. `auto`: "
        "1.05, or as much up to 1.2 as `goal.deadline` leaves.",
    )
    large_batches: Literal["auto", "knee", "memory"] | tuple[Count, ...] = Field(
        "auto",
        description="Local batch of the other workers: one for all resolutions, or one for each. "
        "`knee`: what `plain` would choose at the highest, larger below as the memory leaves; "
        "`memory`: the largest that fits the memory, as published; `auto`: those of "
        "`cycle.preset` where they fit, else `knee`.",
    )
    rounding: Literal["round", "truncate"] = Field(
        "round",
        description="How batches and samples of a round become whole numbers: to the nearest, as "
        "in the paper's table 6, or without their fractions, as in its tables 2 and 3.",
    )
    shares: Literal["measured", "planned"] = Field(
        "measured",
        description="Samples per round: made again each epoch so that all workers end a round "
        "together, by their measured speeds; or as planned throughout.",
    )


class Server(Keys):
    """The parameter server of `dual-batch` and `hybrid` (job keys ``server.*``)."""

    consistency: Literal["asp", "bsp", "ssp"] = Field(
        "asp",
        description="`asp`: each worker's weights are merged as they arrive; `bsp`: all wait for "
        "each other; `ssp`: none is more than `server.staleness` rounds ahead of the slowest.",
    )
    staleness: Index = Field(3, description="For `ssp`: rounds; 0 is `bsp`.")
    merge: Literal["journal", "compsac"] = Field(
        "journal",
        description="With update factor f: `journal`: w = (w + f w_i) / (1 + f); `compsac`: "
        "w = ((2 - f) w + f w_i) / 2. `bsp` takes the mean weighted by f.",
    )
    update_factor: Literal["ratio", "sqrt", "none"] = Field(
        "ratio",
        description="Weight f of a small-batch worker's model: its planned samples between two "
        "exchanges over a large-batch worker's, the root of that, or 1.",
    )
    exchange_steps: Count | None = Field(
        None, description="Steps of a worker between two exchanges; unset: one exchange a round."
    )
    momentum: Literal["keep", "reset"] = Field(
        "keep", description="A worker's momentum after an exchange."
    )


class Ags(Keys):
    """Adaptive gradient scaling (job keys ``ags.*``)."""

    mode: Literal["auto", "off", "norm", "gain"] = Field(
        "auto",
        description="Each tensor's gradient times a factor from gradient norms at the base batch "
        "over those at the global batch: their ratio (`norm`), its square (`gain`), or none. "
        "They come on top of `scaling`. `auto`: what did best in the runs given to `plan --run`, "
        "else none.",
    )
    least: Positive = Field(1.0, description="Smallest factor.")
    most: Literal["auto"] | Positive = Field(
        "auto",
        description="Largest factor. `auto`: what noise alone would give, which is the global "
        "batch over `base_batch`, for `norm` the root of that; less where `scaling` has raised the "
        "rate, so that both together stay within linear scaling.",
    )
    lookback: Count = Field(50, description="Steps over which norms are averaged.")
    parts: int = Field(
        4,
        ge=2,
        description="Fewest parts of a global batch, workers times micro-batches, that norms are "
        "taken from; micro-batches are made smaller until there are as many. Fewer "
        "than 4 tell little.",
    )

    @property
    def factors(self) -> AgsMode:
        """`mode`, with `auto` at its usual: what runs say `plan` puts in its place."""
        return "off" if self.mode == "auto" else self.mode


class Cycle(Keys):
    """Resolutions and rates over the training, for `cyclic` and `hybrid` (job keys ``cycle.*``)."""

    preset: Literal["none", "cifar100", "imagenet"] = Field(
        "none",
        description="A published schedule, 140 epochs at 24 and 32 px or 105 at 160, 224 and "
        "288 px; it stands for what the job leaves as it is by default: epochs, resolutions, "
        "stages and their rates, dropout, and batches where they fit.",
    )
    order: Literal["cycle", "one-pass", "fixed"] = Field(
        "cycle",
        description="`cycle`: the resolutions low to high in each stage of the learning rate; "
        "`one-pass`: once over the whole training; `fixed`: the highest throughout.",
    )
    stage_epochs: Literal["auto"] | tuple[Count, ...] = Field(
        "auto",
        description="Length of each stage; together all epochs. `auto`: 4, 2 and 1 parts of them.",
    )
    stage_rates: Literal["auto"] | tuple[Positive, ...] = Field(
        "auto", description="Rate of each stage, relative to the first. `auto`: 1, 0.1 and 0.01."
    )
    shares: Literal["auto"] | tuple[Positive, ...] = Field(
        "auto",
        description="Parts of a stage for each resolution, low to high. `auto`: equal ones.",
    )
    batches: Literal["auto"] | tuple[Count, ...] = Field(
        "auto",
        description="For `cyclic`: global batch at each resolution. `auto`: the same at all.",
    )
    dropouts: Literal["auto"] | tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        "auto", description="Dropout at each resolution. `auto`: `dropout` at all."
    )
    strengths: Literal["auto"] | tuple[NonNegative, ...] = Field(
        "auto",
        description="Strength of the augmentation at each resolution: its largest shift, relative "
        "to the usual. `auto`: 1 at all.",
    )
    recalibrate: Index = Field(
        0,
        description="Training batches from which the statistics of batch normalization are taken "
        "anew, at the highest resolution, before each evaluation. 0: as trained.",
    )


class Disturbance(Keys):
    """A virtual worker slower for a while (an item of job key ``virtual.disturbances``)."""

    worker: Index = Field(description="Its rank.")
    start: NonNegative = Field(0.0, description="From when, in simulated seconds of training.")
    end: Positive | None = Field(None, description="Until when; unset: to the end.")
    slowdown: Positive = Field(description="How many times as long it computes.")


class Virtual(Keys):
    """The simulated cluster of ``launch=virtual`` (job keys ``virtual.*``)."""

    sample_seconds: Positive | tuple[Positive, ...] | None = Field(
        None,
        description="Time per sample of a step, in seconds: at the highest resolution, others in "
        "proportion as measured, else by their area; or one for each. Unset: as measured.",
    )
    step_seconds: NonNegative | tuple[NonNegative, ...] | None = Field(
        None,
        description="Fixed time of a step, in seconds: at all resolutions, or one for each. Unset: "
        "as measured.",
    )
    speeds: tuple[Positive, ...] = Field(
        (), description="Speed of each worker relative to that; unset: all 1."
    )
    overheads: tuple[Positive, ...] = Field(
        (),
        description="Fixed time of each worker's step relative to that of others as fast; unset: "
        "all 1.",
    )
    links: tuple[Positive, ...] = Field(
        (),
        description="Bandwidth of each worker's link relative to `link.bandwidth`; unset: all 1.",
    )
    disturbances: tuple[Disturbance, ...] = Field((), description="Who is slower, and when.")

    def stated(
        self, key: Literal["sample_seconds", "step_seconds"], side: int, sides: Sequence[int]
    ) -> tuple[float | None, bool]:
        """A stated time, and whether it is stated for this one of some resolutions, low to high.

        Otherwise it is that of the highest.
        """
        value = getattr(self, key)
        if not isinstance(value, tuple):
            return value, False
        if side in sides and len(sides) == len(value):
            return value[sides.index(side)], True
        return value[-1], False

    def misfit(self, workers: int) -> str:
        """What does not go with so many workers, in a line; empty if all does."""
        for key in ("speeds", "overheads", "links"):
            values = getattr(self, key)
            if values and len(values) != workers:
                listed = ",".join(f"{value:g}" for value in values)
                return (
                    f"virtual.{key}={listed}: {len(values)} values for workers={workers}: give "
                    "one for each"
                )
        for one in self.disturbances:
            if one.worker >= workers:
                return (
                    f"virtual.disturbances: worker {one.worker} of workers={workers}: give 0 to "
                    f"{workers - 1}"
                )
            if one.end is not None and one.end <= one.start:
                return (
                    f"virtual.disturbances: worker {one.worker} from {one.start:g} s until "
                    f"{one.end:g} s: the end must be later than the start"
                )
        return ""

    def relative_times(self, workers: int) -> tuple[tuple[float, float], ...]:
        """Speed and overhead of each of so many workers."""
        speeds, overheads = self.speeds or (1.0,) * workers, self.overheads or (1.0,) * workers
        return tuple(zip(speeds, overheads, strict=True))


class Goal(Keys):
    """What the plan should aim for (job keys ``goal.*``)."""

    objective: Literal["auto", "knee", "time", "cost", "accuracy", "target-accuracy"] = Field(
        "auto",
        description="`auto`: the least time of the candidates that are as accurate as the best, "
        "within `goal.accuracy_tolerance`, and `knee` where nothing tells accuracy; with "
        "`goal.accuracy`, `target-accuracy`; `knee`: the "
        "smallest global batch, and the fewest workers, after which more pay little; `time`: the "
        "least time; `cost`: the least cost; `accuracy`: the most accurate within the limits; "
        "`target-accuracy`: the least time, or `goal.least`, to `goal.accuracy`, where the plan "
        "chooses the epochs, too.",
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
        None,
        description="Most time for the whole training, evaluation included, in seconds. The plan "
        "keeps to it, and training ends there, with a checkpoint and exit code 124.",
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
        None,
        gt=0,
        lt=1,
        description="Held-out accuracy that `auto` and `target-accuracy` aim for: share. Training "
        "ends with the first evaluation that reaches it.",
    )
    confidence: float = Field(
        0.8,
        ge=0.5,
        lt=1,
        description="Probability with which the epochs that `target-accuracy` chooses reach "
        "`goal.accuracy`. Where none do, it trains the most, `epochs`, as long as these have a "
        "chance of a tenth.",
    )
    least: Literal["time", "cost"] = Field(
        "time", description="Of what `target-accuracy` takes the least."
    )
    accuracy_tolerance: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Held-out accuracy that `auto` gives up for time: share.",
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

    @property
    def target(self) -> float | None:
        """Accuracy that ends the training, a share; `None` where the objective is another."""
        return self.accuracy if self.objective in ("auto", "target-accuracy") else None


class Job(Keys):
    """What to train, and on what. Every key that changes the result is here."""

    data: str = Field(
        "digits",
        min_length=1,
        description=f"{listed(one.form for one in DATA.own.values())}, or an import "
        "string `package.module:function` that returns (train, validation, class names).",
    )
    val: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the images held out (equal per class, the same with every `seed`) "
        "where `imagefolder` has no val/ or test/.",
    )
    unreadable: Literal["refuse", "skip"] = Field(
        "refuse",
        description="An unreadable image, before the training: stop and name it, or skip and count "
        "it. One that is damaged later ends a run that reads it from its file.",
    )
    network: str = Field(
        "resnet8",
        min_length=1,
        description=f"{listed(NETWORKS.own)}, or an import string such as "
        "`torchvision.models:resnet50` or `timm.models:resnet50`, called with `num_classes=` "
        '(`pip install "batchwright[vision]"` installs these two packages).',
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
    optimizer: Annotated[str, Named(OPTIMIZERS, "auto")] = Field(
        "auto",
        description="Nesterov SGD, AdamW, or Muon: momentum made orthogonal for matrices and "
        "kernels, SGD for everything else. `auto`: the one of SGD and Muon that trials or runs "
        "show to reach more; without them Muon where the global batch is more than twice "
        "`base_batch`, else SGD. SGD with any batch where `learning_rate` is given, even as it "
        "is by default, where layers are `frozen`, with `ags.mode=norm` or `gain` or "
        "`scaling=gain`, with `momentum=0`, and with `cyclic`, `dual-batch` and `hybrid`.",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="For `sgd` and `muon`: momentum.")
    weight_decay: NonNegative = Field(
        5e-4, description="Decay of weight matrices and kernels; norms and biases have none."
    )
    learning_rate: Literal["auto"] | Positive = Field(
        "auto",
        description="Rate at `base_batch`, per step. `auto`: 0.1 for `sgd`, 0.001 for `adamw`; for "
        "`muon` 0.1, or as much as lets a training of few steps get anywhere, and 0.02 without "
        "batch normalization; times what trials at other rates found best. One that is given makes "
        "`optimizer=auto` SGD.",
    )
    base_batch: Count = Field(128, description="Global batch at which `learning_rate` holds.")
    scaling: Literal["auto", "linear", "sqrt", "gain", "none"] = Field(
        "auto",
        description="How the rate grows with the global batch over `base_batch`; under a parameter "
        "server with the large local batch. `gain`: by the measured gradient noise, from 1 where "
        "it is small to linear where it is large (AdaScale). `auto`: what did best in the runs "
        "given to `plan --run`, else `sqrt`.",
    )
    warmup_epochs: Literal["auto"] | NonNegative = Field(
        "auto",
        description="Epochs of linear warm-up from `warmup_start`, in fractions too; it raises "
        "nothing where the rate is not scaled up and begins at the rate at `base_batch`. `auto`: "
        "none there, else by the batch and `warmup_law`, half of the epochs at most.",
    )
    warmup_start: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "auto",
        description="Rate at which the warm-up begins, as a share of the peak, whether the rate is "
        "scaled up or not. `auto`: the rate at `base_batch`; for `one-cycle` a 25th.",
    )
    warmup_law: Literal["root", "linear"] = Field(
        "root",
        description="Length of a warm-up that is left open, for B times `base_batch`: `root`: "
        "epochs x 5/90 x sqrt(B / 60); `linear`: epochs x (5 + 5 (B - 60) / 180) / 90, as the "
        "warm-up poster reads the same two points.",
    )
    decay: Literal["cosine", "steps", "one-cycle", "none"] = Field(
        "cosine",
        description="After warm-up: half a cosine to 0; a tenth at 1/3, 2/3 and 8/9 of the epochs; "
        "constant; or `one-cycle`, which rises from a 25th by half a cosine, over 30 % of the "
        "epochs unless `warmup_epochs` says otherwise, and falls by another to a 10,000th of where "
        "it began. `cyclic` and `hybrid` have stages instead.",
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
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, order and augmentation.")
    epochs: Count = Field(
        30,
        description="Epochs to train; the most, where the plan chooses them to reach "
        "`goal.accuracy`.",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of the forward and backward pass. `auto`: bfloat16 autocast where the "
        "processor computes in it and the probe finds it faster, else float32.",
    )
    method: AskedMethod = Field(
        "plain",
        description=explained(*METHODS.values(), METHODS["auto"]),
    )
    rebalance: Literal["smoothed", "published"] = Field(
        "smoothed",
        description="For `dynamic-batch`: how shares follow. `smoothed`: by speeds that are "
        "smoothed, a step's fixed time taken out, and only where a share changes by more than 3 %; "
        "`published`: once an epoch, each in proportion to its samples over its time in the last "
        "epoch, whatever the change.",
    )
    rebalance_steps: Index = Field(
        25,
        description="For `rebalance=smoothed`: steps after which the shares are made again, as "
        "well as at the end of an epoch. 0: only there, as often as published.",
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
    launch: Annotated[str, Named(LAUNCHERS)] = Field(
        "local",
        description=explained(*LAUNCHERS.values()),
    )
    loaders: Literal["auto"] | Index = Field(
        "auto",
        description="Loader processes of each worker, for data from a function of your own and for "
        "folders that stay in their files; 0 loads in the worker itself. `auto`: 2 for the "
        "former, as many as a worker has threads for the latter.",
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
        description="Training image sides in pixels, low to high; `cyclic` and `hybrid` go through "
        "them, the others train at the highest. `auto`: the data's own size, of `imagefolder` "
        "at most 160, and for the two that and some below.",
    )
    evaluate_epochs: Count = Field(1, description="Evaluate every so many epochs, and at the end.")
    track: tuple[Literal["gradient-norm", "hessian"], ...] = Field(
        (),
        description="What each evaluation measures besides, on a batch of at most 128 training "
        "samples: the gradient's norm, the largest eigenvalue of the Hessian (10 to 100 steps "
        "of that batch, with several times the memory of one, which the plan does not count).",
    )
    checkpoint_seconds: Positive = Field(
        60.0, description="Seconds between checkpoints inside an epoch."
    )
    checkpoint_steps: Count | None = Field(
        None,
        description="Steps between checkpoints, as well as `checkpoint_seconds`. More where the "
        "disk is still writing the one before: training does not wait for it.",
    )
    timeout: Positive = Field(
        120.0, le=1e6, description="Seconds after which a silent collective gives up."
    )
    restarts: Index = Field(
        3,
        description="How often the workers are started again, from the last checkpoint, after one "
        "was killed. An error of their own ends the run at once.",
    )
    port: int = Field(
        0, ge=0, le=65535, description="Rendezvous port on this machine; 0: any free one."
    )
    dual: DualBatch = Field(DualBatch(), description="Two batch sizes at once.")
    server: Server = Field(Server(), description="The parameter server.")
    ags: Ags = Field(Ags(), description="Adaptive gradient scaling.")
    cycle: Cycle = Field(Cycle(), description="Resolutions and rates over the training.")
    virtual: Virtual = Field(Virtual(), description="The simulated cluster.")
    probe: ProbeSettings = Field(ProbeSettings(), description="Measuring before planning.")
    goal: Goal = Field(Goal(), description="What the plan aims for.")
    link: Link = Field(Link(), description="The network between machines.")

    if not TYPE_CHECKING:  # a checker goes by the keys

        def __init__(self, *others: object, **keys: Any) -> None:
            if others:
                raise ArgumentError("a Job takes its keys by name, such as bw.Job(epochs=3)")
            try:
                super().__init__(**keys)
            except ValidationError as error:
                raise JobError(job_problem(error, job_keys(type(self)))) from None

        __init__.__pydantic_base_init__ = True  # pydantic itself need not call it for JSON

    def _changed(self) -> dict[str, Any]:
        """The keys that are not as by default."""
        return self.model_dump(exclude_defaults=True)

    def __repr_args__(self) -> list[tuple[str, Any]]:
        return list(self._changed().items())

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return html_table("Job", [(key, str(value)) for key, value in self._changed().items()])

    @property
    def rate_scaling(self) -> Scaling:
        """`scaling`, with `auto` at its usual: what runs say `plan` puts in its place."""
        return "sqrt" if self.scaling == "auto" else self.scaling

    @property
    def method_spec(self) -> MethodSpec:
        """What is known of `method`."""
        return METHODS[self.method]

    @property
    def launcher(self) -> Launcher:
        """What is known of `launch`."""
        return LAUNCHERS[self.launch]

    @property
    def code_keys(self) -> tuple[str, ...]:
        """The keys that name a function to import."""
        own_data = self.data if source_of(self.data) is FUNCTION else ""
        named = {"data": own_data, "network": self.network, "loss": self.loss}
        return tuple(key for key, name in named.items() if ":" in name)

    @property
    def augmentation(self) -> Augmentation:
        """`augment`, with `auto` resolved."""
        return source_of(self.data).augment if self.augment == "auto" else self.augment

    @model_validator(mode="after")
    def _resolutions_rise(self) -> Job:
        sides = self.resolutions
        if sides != "auto" and (not sides or list(sides) != sorted(set(sides))):
            raise ValueError(
                f"resolutions={','.join(map(str, sides))}: give one or more rising sides in "
                "pixels, such as resolutions=24,32"
            )
        return self
