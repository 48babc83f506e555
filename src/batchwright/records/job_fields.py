"""The keys of a job, and values that follow from several of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchwright.records.base import (
    NO_ARGUMENTS,
    TIMED,
    Arguments,
    AskedMethod,
    Augmentation,
    Count,
    Epochs,
    Index,
    Keys,
    NonNegative,
    Positive,
    PositiveTime,
    Workers,
)
from batchwright.records.clusters.sections import Link, Ray, Slurm, Virtual, written
from batchwright.records.job_sections import Ags, Cycle, DualBatch, Goal, ProbeSettings, Server
from batchwright.records.registries.data_sources import DATA, FUNCTION, source_of
from batchwright.records.registries.launchers import LAUNCHERS, Launcher
from batchwright.records.registries.methods import METHODS, MethodSpec
from batchwright.records.registries.networks import NETWORKS, network_spec
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.registries.presets import PRESETS, Preset
from batchwright.records.registries.registry import Named, explained, listed

ALL_BUT_HEAD = "all-but-head"
"""The pattern of job key ``frozen`` for all parameters but those of the last layer."""
Scaling = Literal["linear", "sqrt", "gain", "none"]
Kept = Annotated[float, Field(ge=0, lt=1)]


class JobFields(Keys):
    """The keys of a `Job`, without its rules (`records.job`), which need this type themselves."""

    data: str = Field(
        "digits",
        min_length=1,
        description=f"{listed(one.form for one in DATA.own.values())}, or "
        "an import string `package.module:function` that returns (train, validation, class names). "
        "What each reads: [data](data.md).",
    )
    data_args: Arguments = Field(
        NO_ARGUMENTS,
        description="Arguments of a library's data source, by name: columns, splits, arguments "
        "of a class ([data](data.md)).",
    )
    val: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the images held out (equal per class, the same with every "
        "`seed`) where the data have no held-out part.",
    )
    unreadable: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What to do with an unreadable image before training: stop and name it, or "
        "skip and count it. One that is damaged later ends a run that reads it from its file.",
    )
    network: str = Field(
        "resnet8",
        min_length=1,
        description=f"{listed(one.form for one in NETWORKS.own.values())} (the libraries' own "
        "names: [networks](data.md#networks)), or an import string such as `my_models:small`, "
        "called with `num_classes=`.",
    )
    network_args: Arguments = Field(
        NO_ARGUMENTS,
        description="Arguments that the network is built with, by name. `pretrained` starts from "
        "the library's trained weights, with a new classifier for these classes.",
    )
    weights: str | None = Field(
        None,
        description="Path of weights to start from: a checkpoint of ours, of timm, torchvision or "
        "Lightning, a plain state_dict, or safetensors ([which](data.md#weights-of-a-file)).",
    )
    frozen: tuple[str, ...] = Field(
        (),
        description="Parameters that are not trained: name patterns such as `stages.0.*`, or "
        "`all-but-head`, all but those of the last layer.",
    )
    body_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Learning rate of all layers but the last, over that of the last layer, which "
        "has the plan's. Below 1, weights that were learnt before change less than a new last "
        "layer; `frozen=all-but-head` leaves them as they are.",
    )
    normalize: Literal["auto", "data"] | tuple[float, ...] = Field(
        "auto",
        description="What images are normalized by: `data`, mean and standard deviation of the "
        "training images; or six numbers for pixels from 0 to 1, the means of red, green and blue "
        "and then their standard deviations. `auto`: those that the weights started from were "
        "trained with, where these tell them (`network_args.pretrained`, or a `weights` file of "
        "ours), else as `data`. Images from a function of yours stay as they are.",
    )
    loss: str = Field(
        "cross_entropy",
        min_length=1,
        description="`cross_entropy`, or an import string of f(outputs, labels) -> mean loss, "
        "of a `torch.nn.Module` that is called like it, or of a class of such modules, built "
        "without arguments, such as `torch.nn:MultiMarginLoss`. A module has no parameters to "
        "train. The mean is over the samples: with class weights w, `CrossEntropyLoss(weight=w)` "
        "divides by the sum of the weights in each micro-batch, so that results depend on how a "
        'batch is split. Give `CrossEntropyLoss(weight=w, reduction="none")(outputs, '
        "labels).mean()` (with w of mean 1 over the images the rate fits as before), or take "
        "`sampling=balanced`.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Label smoothing of `cross_entropy`."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the classifier.")
    augment: Literal["auto", "none", "flip", "crop", "crop-flip", "resized-crop"] = Field(
        "auto",
        description="Random horizontal flip, shift and crop, or both; `resized-crop`: random "
        "resized crops and flips, as usual for photographs: a part of `crop_scale` to all of the "
        "area, 3/4 to 4/3 times as wide as high, fills the image. `auto`: `crop` for "
        "digits, else `crop-flip`, or that of `cycle.preset`. Images from a function of yours "
        "stay as they are.",
    )
    crop_scale: float = Field(
        0.08,
        gt=0,
        le=1,
        description="For `augment=resized-crop`: least share of an image's area that is shown.",
    )
    rotation: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Images are rotated at random by up to this share of a full turn either "
        "way; corners are filled by mirroring.",
    )
    zoom: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Images show up to this share more or less of each side, at random.",
    )
    optimizer: Annotated[str, Named(OPTIMIZERS, "auto")] = Field(
        "auto",
        description="SGD, AdamW, or Muon: momentum made orthogonal for matrices and kernels, "
        "SGD for everything else. `auto`: SGD or Muon, whichever trials or runs show to reach "
        "more. Without either: SGD for weights that were trained before (`weights`, "
        "`network_args.pretrained`), else the one that other tasks' trainings favour, mostly Muon. "
        "Always SGD where `learning_rate` is given, even at its default, where layers are "
        "`frozen`, with `ags.mode=norm` or `gain`, `scaling=gain`, `momentum=0` or "
        "`nesterov=false`, and with `cyclic`, `dual-batch` and `hybrid`.",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of `sgd` and `muon`.")
    nesterov: bool = Field(
        True,
        description="Whether `sgd` has Nesterov's momentum; `false`: plain. `muon` always has "
        "Nesterov's.",
    )
    betas: Annotated[
        tuple[Kept, Kept],
        written("betas", "give two numbers from 0 to below 1, such as betas=0.9,0.95"),
    ] = Field(
        (0.9, 0.999),
        description="For `adamw`: the shares that its averages of the gradient and of the "
        "gradient's square keep at each step.",
    )
    eps: Positive = Field(
        1e-8,
        description="For `adamw`: what is added to the root of the second average, by which the "
        "first is divided.",
    )
    weight_decay: NonNegative = Field(
        5e-4, description="Decay of weight matrices and kernels; norms and biases have none."
    )
    learning_rate: Literal["auto"] | Positive = Field(
        "auto",
        description="Rate at `base_batch`, per step. `auto`: 0.1 for `sgd`, 0.001 for `adamw`. "
        "For `muon` 0.1, more where a training has few steps, and 0.02 without batch "
        "normalization. All of these times what trials at other rates found best (without "
        "batch normalization no more per step than the highest at which one has learnt). A "
        "rate that is given makes `optimizer=auto` SGD.",
    )
    base_batch: Count = Field(128, description="Global batch at which `learning_rate` holds.")
    scaling: Literal["auto", "linear", "sqrt", "gain", "none"] = Field(
        "auto",
        description="How the rate grows with the global batch over `base_batch`; under a "
        "parameter server with the large local batch. `gain`: by the measured gradient noise, "
        "from 1 where it is small to linear where it is large (AdaScale). `auto`: the best in "
        "the runs given to `plan --run`, else `sqrt`.",
    )
    warmup_epochs: Literal["auto"] | NonNegative = Field(
        "auto",
        description="Epochs of linear warm-up from `warmup_start`, also fractions. Without a "
        "scaled-up rate it raises nothing, unless `warmup_start` is given. `auto`: none there, "
        "else by the batch and `warmup_law`, half of the epochs at most.",
    )
    warmup_start: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "auto",
        description="Rate at which the warm-up begins, as a share of the peak, whether the "
        "rate is scaled up or not. `auto`: the rate at `base_batch`; for `one-cycle` a 25th of "
        "the peak.",
    )
    warmup_law: Literal["root", "linear"] = Field(
        "root",
        description="Length of a warm-up of `auto` for a batch of B times `base_batch`: "
        "`root`: epochs x 5/90 x sqrt(B / 60); `linear`: epochs x (5 + 5 (B - 60) / 180) / 90, "
        "as the warm-up poster reads the same two points.",
    )
    decay: Literal["cosine", "steps", "one-cycle", "none"] = Field(
        "cosine",
        description="After warm-up: half a cosine to 0; a tenth at 1/3, 2/3 and 8/9 of the epochs; "
        "constant; or `one-cycle`, which rises from a 25th by half a cosine, over 30 % of the "
        "epochs unless `warmup_epochs` says otherwise, and falls by another to a 10,000th of where "
        "it began. `cyclic` and `hybrid` have stages instead.",
    )
    clip_norm: Positive | None = Field(None, description="Largest global gradient norm.")
    average_weights: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether held-out accuracy, `best.pt` and delivered weights are those of "
        "an average of the weights over the last half epoch, which is closer to the final "
        "accuracy while the rate is high. `auto`: where training ends as soon as "
        "`goal.accuracy` is reached. Not with a parameter server or `launch=virtual`.",
    )
    batch_norm: Literal["worker", "synchronized"] = Field(
        "worker",
        description="Whether batch normalization in training is over each worker's own "
        "samples, or over all workers' at each step (GPUs only). Not with a parameter server.",
    )
    sampling: Literal["shuffle", "balanced"] = Field(
        "shuffle",
        description="`shuffle`: each image once per epoch; `balanced`: drawn with replacement, all "
        "classes equally often.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, order and augmentation.")
    epochs: Epochs = Field(
        30,
        description="Epochs to train; the most, where the plan chooses their number to reach "
        "`goal.accuracy`.",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number format of the forward and backward pass. `auto`: bfloat16 autocast "
        "where the processor computes in it, float16 on GPUs that compute only in that, if the "
        "probe finds it faster, else float32. Losses are scaled for float16.",
    )
    compile: Literal["auto", "off", "on"] = Field(
        "off",
        description="Whether the network is compiled for training (`torch.compile`). `auto`: "
        "where it saves more, over the whole training, than compiling takes. The probe "
        "measures both if the training takes two minutes or more. On the CPU it needs a C++ "
        "compiler.",
    )
    cuda_graphs: Literal["auto", "off", "on"] = Field(
        "auto",
        description="Whether a GPU replays forward and backward passes from CUDA graphs, so "
        "that it does not wait for the host between small kernels: the same numbers, some more "
        "memory. `auto`: where the probe finds a step quicker, for the built-in networks and "
        "those of timm and torchvision. Not with compiling, activation checkpointing or "
        "synchronized batch normalization.",
    )
    method: AskedMethod = Field(
        "plain",
        description=explained(*METHODS.own.values(), METHODS["auto"]),
    )
    rebalance: Literal["smoothed", "published"] = Field(
        "smoothed",
        description="For `dynamic-batch`: how shares follow speed. `smoothed`: by smoothed "
        "speeds, without a step's fixed time, and only where a share changes by more than 3 %; "
        "`published`: once an epoch, each in proportion to its samples over its time in the "
        "last epoch, whatever the change.",
    )
    rebalance_steps: Index = Field(
        25,
        description="For `rebalance=smoothed`: steps after which shares are computed anew, "
        "besides the end of each epoch. 0: only there, as in the published method.",
    )
    least_local_batch: Count | None = Field(
        None,
        description="Fewest samples per step that `dynamic-batch` leaves a worker; unset: 1, or 2 "
        "with batch normalization.",
    )
    most_local_batch: Count | None = Field(
        None,
        description="Most samples per step that `dynamic-batch` gives a worker; unset: no "
        "limit, what does not fit at once is split into micro-batches.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: GPUs if any.")
    workers: Literal["auto"] | Workers = Field(
        "auto",
        description="Training processes. `auto`: the plan decides, up to all visible GPUs, or 2 "
        "on CPU.",
    )
    launch: Annotated[str, Named(LAUNCHERS, "auto")] = Field(
        "auto",
        description=explained(LAUNCHERS["auto"], *LAUNCHERS.own.values()),
    )
    nodes: Count = Field(
        1, description="For `launch=slurm`: machines, which share the workers evenly."
    )
    loaders: Literal["auto"] | Index = Field(
        "auto",
        description="Loader processes of each worker, for data from a function of your own and for "
        "images that stay in their files; 0 loads in the worker itself. `auto`: 2 for the "
        "former, as many as a worker has threads for the latter.",
    )
    global_batch: Literal["auto"] | Count = Field(
        "auto", description="Samples per step over all workers. `auto`: the plan decides."
    )
    batch_growth: Literal["off", "noise"] = Field(
        "off",
        description="Whether the global batch grows between epochs: `noise`: it doubles for each "
        "time that the measured gradient noise scale has doubled since the first epoch, to at most "
        "8 times and 16 steps an epoch, and the rate follows by `scaling`. It never shrinks. Meant "
        "for `muon`: with `sgd` it cost accuracy.",
    )
    micro_batch: Literal["auto"] | Count = Field(
        "auto",
        description="Most samples that go through the network at once on a worker; a larger local "
        "batch accumulates gradients. `auto`: what fits the memory.",
    )
    activation_checkpointing: Literal["auto", "off", "on"] = Field(
        "auto",
        description="Whether blocks of the network keep only their input and are computed "
        "again in the backward pass: less memory, one more forward pass a step, the same "
        "gradients. `auto`: where the requested batch, or else 256 images a worker, does not "
        "fit the memory, if the probe finds it faster than micro-batches or the only way; else "
        "off.",
    )
    resolutions: Literal["auto"] | tuple[Count, ...] = Field(
        "auto",
        description="Training image sides in pixels, low to high; `cyclic` and `hybrid` go "
        "through them, the others train at the highest. `auto`: the images' own size, at most "
        "160 unless a function of yours provides them; for `cyclic` and `hybrid` also some "
        "lower ones.",
    )
    evaluate_epochs: Count = Field(1, description="Evaluate every so many epochs, and at the end.")
    track: tuple[Literal["gradient-norm", "hessian"], ...] = Field(
        (),
        description="What each evaluation also measures, on a batch of at most 128 training "
        "samples: the gradient's norm, the largest eigenvalue of the Hessian (10 to 100 steps "
        "of that batch, with several times the memory of one, which the plan does not count).",
    )
    checkpoint_seconds: Literal["auto"] | PositiveTime = Field(
        "auto",
        description="Seconds between checkpoints inside an epoch. `auto`: the plan's choice "
        "where workers may be taken away (`goal.preemptions_per_hour`), else 60.",
    )
    checkpoint_steps: Count | None = Field(
        None,
        description="Steps between checkpoints, besides `checkpoint_seconds`. More where the "
        "disk is still writing the last one: training does not wait for it.",
    )
    checkpoint_epochs: Count | None = Field(
        None,
        description="Epochs between checkpoints that are kept for good, as "
        "`checkpoints/epoch-N.pt`, each as large as `last.pt`. Unset: none; `last.pt` and "
        "`best.pt` are there in any case.",
    )
    timeout: Annotated[float, Field(gt=0, le=1e6), TIMED] = Field(
        120.0, description="Seconds after which a collective without an answer gives up."
    )
    restarts: Index = Field(
        3,
        description="How often the workers are restarted from the last checkpoint after one "
        "was killed. A worker's own error ends the run at once.",
    )
    port: int = Field(
        0, ge=0, le=65535, description="Rendezvous port on this machine; 0: any free one."
    )
    dual: DualBatch = Field(DualBatch(), description="Two batch sizes at once.")
    server: Server = Field(Server(), description="The parameter server.")
    ags: Ags = Field(Ags(), description="Adaptive gradient scaling.")
    cycle: Cycle = Field(Cycle(), description="Resolutions and rates over the training.")
    virtual: Virtual = Field(Virtual(), description="The simulated cluster.")
    slurm: Slurm = Field(Slurm(), description="What Slurm is asked for.")
    ray: Ray = Field(Ray(), description="What Ray is asked for.")
    probe: ProbeSettings = Field(ProbeSettings(), description="Measuring before planning.")
    goal: Goal = Field(Goal(), description="What the plan aims for.")
    link: Link = Field(Link(), description="The network between machines.")

    @property
    def rate_scaling(self) -> Scaling:
        """`scaling`, with `auto` as ``sqrt``; where runs show a better one, `plan` replaced it."""
        return "sqrt" if self.scaling == "auto" else self.scaling

    @property
    def method_spec(self) -> MethodSpec:
        """The method's entry in the registry."""
        return METHODS[self.method]

    @property
    def launcher(self) -> Launcher:
        """The launcher's entry in the registry."""
        return LAUNCHERS[self.launch]

    @property
    def seconds_between_checkpoints(self) -> float:
        """`checkpoint_seconds`, with `auto` as 60."""
        return 60.0 if self.checkpoint_seconds == "auto" else self.checkpoint_seconds

    @property
    def preset(self) -> Preset | None:
        """The schedule of `cycle.preset`; `None` without one, or if the method has no cycle."""
        return PRESETS.get(self.cycle.preset) if self.method_spec.takes("cycle.preset") else None

    @property
    def asked_epochs(self) -> int:
        """`epochs`, or those of the preset where the job leaves them at the default."""
        usual = JobFields.model_fields["epochs"].default
        given = "epochs" in self.cycle.keep or self.epochs != usual
        if self.preset is None or given:
            return self.epochs
        stages = self.cycle.stage_epochs
        return sum(self.preset.stage_epochs if stages == "auto" else stages)

    @property
    def asked_resolutions(self) -> tuple[int, ...]:
        """`resolutions`, or with `auto` those of the preset; empty if the data decide them."""
        if self.resolutions != "auto":
            return self.resolutions
        return () if self.preset is None else self.preset.resolutions

    @property
    def code_keys(self) -> tuple[str, ...]:
        """The keys whose values are import strings of user code."""
        own_data = self.data if source_of(self.data) is FUNCTION else ""
        own_network = "" if network_spec(self.network) else self.network
        named = {"data": own_data, "network": own_network, "loss": self.loss}
        return tuple(key for key, name in named.items() if ":" in name)

    @property
    def augmentation(self) -> Augmentation:
        """`augment`, with `auto` resolved."""
        if self.augment != "auto":
            return self.augment
        published = self.preset.augment if self.preset is not None else None
        return published or source_of(self.data).augment

    @property
    def can_average(self) -> bool:
        """Whether workers can evaluate an average of the weights."""
        return not self.launcher.simulated and not self.method_spec.served

    @property
    def averages(self) -> bool:
        """Whether a plan evaluates an average of the weights."""
        return self.average_weights == "on" or (
            self.average_weights == "auto" and self.goal.target is not None and self.can_average
        )

    @property
    def looks_ahead(self) -> bool:
        """Whether SGD's momentum is Nesterov's."""
        return self.nesterov and self.momentum > 0
