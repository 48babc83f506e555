"""Sections of a job, the parts that have keys of their own: measuring, goal and methods.

Sections that describe a cluster are in `clusters.sections`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from batchwright.records.base import (
    Count,
    Index,
    Keys,
    NonNegative,
    Positive,
    PositiveTime,
    Price,
    ShareOrTime,
    Size,
    StatedTime,
)
from batchwright.records.clusters.sections import WorkerKind

LocalBatch = Annotated[int, Field(ge=1, le=10**7)]
AgsMode = Literal["off", "norm", "gain"]

MIN_BUDGET, MAX_BUDGET = 5.0, 20.0
"""Limits of `probe.budget`, where it is `auto`, in seconds."""
BUDGET_SHARE = 0.1
"""Share of the training's time that a probe may take, between these limits."""


class ProbeSettings(Keys):
    """How much to measure before planning (job keys ``probe.*``)."""

    budget: Literal["auto"] | PositiveTime = Field(
        "auto",
        description="Most time to spend on measuring, in seconds. `auto`: a tenth of the "
        "training time expected from the first steps or, to a `goal.accuracy`, from trials, "
        f"but {MIN_BUDGET:g} s at least and {MAX_BUDGET:g} s at most.",
    )
    error: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Stop earlier once every step time in question is known this well: half "
        "width of its 95 % interval, as a share of it.",
    )
    steps: Count = Field(
        10,
        description="Most timed steps at one visit to a measured point; more where that is too "
        "few for each loader process to load a batch.",
    )
    learning: ShareOrTime = Field(
        0.1,
        description="Time for trials, short trainings that show how the network learns, with "
        "which optimizer and, where `learning_rate` is open, at which rate. Below 1: a share "
        "of the planned training's time, with a `goal.accuracy` of the time that it is likely "
        "to take. From 1 on: seconds. 0: none.",
    )
    kind: str = Field(
        "",
        description="Name of this kind of worker, by which `goal.kinds` refers to it, for all "
        "that measure together without a name of their own (`BATCHWRIGHT_KIND`). Unset: the "
        "device's name, and hosts that differ get names of their own.",
    )

    @property
    def first_budget(self) -> float:
        """Seconds that may be spent on measuring before anything is known."""
        return MIN_BUDGET if self.budget == "auto" else self.budget

    def budget_for(self, training_seconds: float) -> float:
        """Seconds to spend on measuring for a training of ``training_seconds``."""
        return max(self.first_budget, min(BUDGET_SHARE * training_seconds, self.most_budget))

    @property
    def most_budget(self) -> float:
        """Most seconds that may be spent on measuring."""
        return MAX_BUDGET if self.budget == "auto" else self.budget


class DualBatch(Keys):
    """Two batch sizes at once, for `dual-batch` and `hybrid` (job keys ``dual.*``)."""

    small_workers: Literal["auto"] | Index = Field(
        "auto",
        description="Workers that train with the smaller batch. `auto`: three quarters of them, or "
        "fewer where `goal.deadline` leaves little time.",
    )
    extra_time: Literal["auto"] | Annotated[float, Field(ge=1)] = Field(
        "auto",
        description="How many times as long a round may take as with large batches alone. "
        "`auto`: 1.05, or up to 1.2 where `goal.deadline` leaves time.",
    )
    large_batches: Literal["auto", "knee", "memory"] | tuple[LocalBatch, ...] = Field(
        "auto",
        description="Local batch of the workers with the larger batch: one for all "
        "resolutions, or one for each. `knee`: at the highest resolution the one that pays for "
        "a single worker, by time and gradient noise; at lower ones as much more as fits the "
        "memory. `memory`: the largest that fits a worker's memory (`goal.memory`), as in the "
        "paper, as long as a round has `goal.least_steps` steps; mostly far larger than "
        "`knee`, with fewer updates. `auto`: those of `cycle.preset` where they fit, else "
        "`knee`.",
    )
    rounding: Literal["round", "truncate"] = Field(
        "round",
        description="How batches and samples of a round become whole numbers: to the nearest, "
        "as in the paper's table 6, or truncated, as in its tables 2 and 3.",
    )
    shares: Literal["measured", "published", "planned"] = Field(
        "measured",
        description="Samples per round. `measured`: computed anew each epoch so that all "
        "workers end a round together, by their measured speeds. `published`: as by Ye et al. "
        "2020, in proportion to samples over time of the last round alone, and with them local "
        "batches and the weights of models (for `server.consistency=bsp`). `planned`: as "
        "planned throughout.",
    )


class Server(Keys):
    """The parameter server of `dual-batch` and `hybrid` (job keys ``server.*``)."""

    consistency: Literal["asp", "bsp", "ssp"] = Field(
        "asp",
        description="`asp`: each worker's weights are merged as they arrive; `bsp`: all wait for "
        "each other; `ssp`: none is more than `server.staleness` rounds ahead of the slowest.",
    )
    staleness: Index = Field(
        3, description="For `ssp`: rounds that a worker may be ahead; 0 is `bsp`."
    )
    merge: Literal["journal", "compsac"] = Field(
        "journal",
        description="With update factor f: `journal`: w = (w + f w_i) / (1 + f); `compsac`: "
        "w = ((2 - f) w + f w_i) / 2. `bsp` takes the mean weighted by f.",
    )
    update_factor: Literal["ratio", "sqrt", "none"] = Field(
        "ratio",
        description="Weight f of a small-batch worker's model. `ratio`: its planned samples "
        "between two exchanges over a large-batch worker's. `sqrt`: the root of that. `none`: "
        "1.",
    )
    exchange_steps: Count | None = Field(
        None, description="Steps of a worker between two exchanges; unset: one exchange a round."
    )
    momentum: Literal["keep", "reset"] = Field(
        "keep", description="What becomes of a worker's momentum after an exchange."
    )


class Ags(Keys):
    """Adaptive gradient scaling (job keys ``ags.*``)."""

    mode: Literal["auto", "off", "norm", "gain"] = Field(
        "auto",
        description="Each tensor's gradient times a factor from gradient norms at the base "
        "batch over those at the global batch: their ratio (`norm`), its square (`gain`), or "
        "none. Factors come on top of `scaling`. `auto`: the best in the runs given to `plan "
        "--run`, else none.",
    )
    least: Positive = Field(1.0, description="Smallest factor.")
    most: Literal["auto"] | Positive = Field(
        "auto",
        description="Largest factor. `auto`: what noise alone would give, the global batch "
        "over `base_batch`, for `norm` its root; less where `scaling` has raised the rate, so "
        "that both together stay within linear scaling.",
    )
    lookback: Count = Field(50, description="Steps over which norms are averaged.")
    parts: int = Field(
        4,
        ge=2,
        description="Fewest parts of a global batch, workers times micro-batches, from which "
        "norms are taken; micro-batches shrink until there are as many. Fewer than 4 tell "
        "little.",
    )

    @property
    def factors(self) -> AgsMode:
        """`mode`, with `auto` as ``off``; where runs show a better one, `plan` replaced it."""
        return "off" if self.mode == "auto" else self.mode


class Cycle(Keys):
    """Resolutions and rates over the training, for `cyclic` and `hybrid` (job keys ``cycle.*``)."""

    preset: Literal["none", "cifar100", "imagenet"] = Field(
        "none",
        description="A published schedule, 140 epochs at 24 and 32 px or 105 at 160, 224 and "
        "288 px. It replaces what the job leaves at its default: epochs, resolutions, stages "
        "and their rates, dropout, batches where they fit, and for `cifar100` augmentation "
        "(`augment=flip rotation=0.05 zoom=0.25`), plain momentum and `weight_decay=1e-4`.",
    )
    keep: tuple[Literal["epochs", "nesterov", "rotation", "weight_decay", "zoom"], ...] = Field(
        (),
        description="Job keys whose default `cycle.preset` does not replace.",
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
        description="Strength of the augmentation at each resolution: its largest shift, turn and "
        "zoom, and how far resized crops are from the whole image, relative to the usual. `auto`: "
        "1 at all.",
    )
    recalibrate: Index = Field(
        0,
        description="Training batches from which the statistics of batch normalization are "
        "computed anew, at the highest resolution, before each evaluation. 0: as trained. Not with "
        "synchronized batch normalization.",
    )


NOT_OBSERVED = 3
"""Factor on `goal.accuracy_tolerance` where accuracy is known from other tasks alone."""


def names_prices(value: object) -> bool:
    """Whether the value of `goal.kinds` is the path of a file of prices (.csv)."""
    return isinstance(value, str | Path) and str(value).strip().lower().endswith(".csv")


class Goal(Keys):
    """What the plan should aim for (job keys ``goal.*``)."""

    objective: Literal["auto", "knee", "time", "cost", "accuracy", "target-accuracy"] = Field(
        "auto",
        description="`auto`: the least time among the candidates as accurate as the best, "
        "within `goal.accuracy_tolerance`. Where accuracy is unknown it is `knee`, or a "
        "smaller batch where gradient noise says that larger ones save less time than they "
        "cost progress; with `goal.accuracy` it is `target-accuracy`. `knee`: the smallest "
        "global batch, and the fewest workers, beyond which more pay little; `time`: the least "
        "time; `cost`: the least cost; `accuracy`: the most accurate within the limits; "
        "`target-accuracy`: the least time, or `goal.least`, to `goal.accuracy`, with epochs "
        "that the plan chooses.",
    )
    doubling_gain: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="For the knee: doubling the batch must save more than this share of the time.",
    )
    least_steps: Count = Field(10, description="Fewest steps per epoch a batch may leave.")
    memory: Size | None = Field(
        None, description="Most bytes one worker may use; unset: what the device has free."
    )
    deadline: PositiveTime | None = Field(
        None,
        description="Most time for the whole training, with evaluation and without the probe, in "
        "seconds. The plan keeps to it, and training ends there, with a checkpoint and exit code "
        "124.",
    )
    max_cost: Positive | None = Field(
        None, description="Most the whole training may cost, in the currency of the price."
    )
    max_workers: Count | None = Field(
        None,
        description="Most workers to plan for; beyond what was measured, `link.*` must be given. "
        "`run` and `sweep` take no more than they measured.",
    )
    price: Price | None = Field(
        None, description="Price of one worker for an hour, in any currency."
    )
    accuracy: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Held-out accuracy that `auto` and `target-accuracy` aim for. Training "
        "ends with the first evaluation that reaches it. Other objectives neither choose by it nor "
        "end there: a line warns of a plan that is expected below it.",
    )
    patience: Count | None = Field(
        None,
        description="Training ends once this many evaluations in a row have brought no held-out "
        "accuracy above the best one before; with `cyclic` and `hybrid` those at the last "
        "resolution and rate count. The plan's times and costs are those of all epochs, so upper "
        "bounds. Unset: no run ends that way.",
    )
    confidence: float = Field(
        0.8,
        ge=0.5,
        lt=1,
        description="Probability with which the epochs that `target-accuracy` chooses reach "
        "`goal.accuracy`. Where no number of epochs is that sure, as many are trained as "
        "`epochs`, `goal.deadline` and `goal.max_cost` allow. A chance below a tenth is "
        "refused, unless it comes from other tasks' trainings alone.",
    )
    least: Literal["time", "cost"] = Field("time", description="What `target-accuracy` minimizes.")
    accuracy_tolerance: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Held-out accuracy that `auto` gives up for time. Without trials and runs "
        "up to three times as much, if that halves the time, for batches up to the gradient "
        "noise scale.",
    )
    kinds: tuple[WorkerKind, ...] = Field(
        (),
        description="Kinds of workers to choose from, or a file of prices whose name ends in "
        "`.csv`, which then becomes `goal.prices`. Unset: those that were measured.",
    )
    prices: str | None = Field(
        None,
        description="File of prices that a plan reads: it holds kinds of workers, as "
        "`goal.kinds` does.",
    )
    preemptions_per_hour: NonNegative | None = Field(
        None,
        description="How often one worker is taken away in an hour; of `goal.kinds` only those "
        "with `spot`. The plan then counts lost work and restarts, and chooses "
        "`checkpoint_seconds` where that is `auto`.",
    )
    restart_seconds: StatedTime = Field(
        30.0,
        description="Seconds that a plan counts from the loss of a worker until all train again.",
    )
    checkpoint_cost: StatedTime | None = Field(
        None,
        description="Seconds that a plan counts for each checkpoint, during which training "
        "waits; unset: weights, the optimizer's state, statistics and any average, at 200 MB/s "
        "(assumed).",
    )
    tolerance: float = Field(
        0.10,
        gt=0,
        lt=1,
        description="Share by which a run's epoch times may miss the prediction. Beyond it the run "
        "tells at its end what a new plan would choose, and a service offers one meanwhile.",
    )

    @model_validator(mode="before")
    @classmethod
    def _file_of_kinds(cls, given: Any) -> Any:
        if isinstance(given, dict) and names_prices(given.get("kinds")):
            return {**given, "kinds": (), "prices": str(given["kinds"])}
        return given

    @property
    def target(self) -> float | None:
        """Accuracy that ends the training, a share; `None` where no accuracy is aimed for."""
        return self.accuracy if self.objective in ("auto", "target-accuracy") else None

    def level_within(self, *, assumed: bool) -> float:
        """How much less accurate than the best a candidate may be, as a share.

        With ``assumed``, accuracies are known from other tasks alone, and differences between
        batches only to some points: then it is three times the tolerance. A candidate beyond the
        tolerance itself has to halve the time or cost.
        """
        return self.accuracy_tolerance * (NOT_OBSERVED if assumed else 1)

    @property
    def by_cost(self) -> bool:
        """Whether the plan minimizes the cost."""
        return self.objective == "cost" or (self.least == "cost" and self.target is not None)

    @property
    def bounds_workers(self) -> bool:
        """Whether the goal limits the workers that a plan may use."""
        return bool(self.kinds or self.prices) or self.max_workers is not None

    def without_cost(self) -> Goal:
        """The goal without what needs a price."""
        objective = "auto" if self.objective == "cost" else self.objective
        free = {"objective": objective, "max_cost": None, "least": "time", "prices": None}
        return self.model_copy(update=free)

    def preemptions_of(self, kind: str) -> float:
        """Preemptions per hour of one worker of a kind."""
        named = next((one for one in self.kinds if one.kind == kind), None)
        if named is None and self.kinds:
            return 0.0
        if named is None or (named.spot and named.preemptions_per_hour is None):
            return self.preemptions_per_hour or 0.0
        return named.preemptions_per_hour or 0.0

    def conflicts(self) -> Iterator[str]:
        """Error messages: an objective or limit lacks its price or target, a kind comes twice."""
        prices = [kind.price for kind in self.kinds] or [None]
        for key, wanted in (
            ("goal.objective=cost", self.objective == "cost"),
            ("goal.least=cost", self.least == "cost" and self.target is not None),
            (f"goal.max_cost={self.max_cost}", self.max_cost is not None),
        ):
            if wanted and self.price is None and self.prices is None and None in prices:
                yield (
                    f"{key} needs the price of a worker for an hour: give goal.price, or a price "
                    "for each of goal.kinds"
                )
        if self.objective == "target-accuracy" and self.accuracy is None:
            yield (
                "goal.objective=target-accuracy needs the accuracy to reach: give goal.accuracy, "
                "such as goal.accuracy=0.9"
            )
        if self.kinds and self.prices is not None:
            yield f"goal.kinds and goal.prices={self.prices} both name kinds of workers: give one"
        names = [one.kind for one in self.kinds]
        if twice := next((name for name in names if names.count(name) > 1), None):
            yield f"goal.kinds names {twice!r} twice: give one count for it"
