"""The controller's commands to the workers, and their answers: one JSON line each.

The workers with ``rank < workers`` carry a command out together, and the others wait. Rank 0
answers.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from batchwright.records import (
    Count,
    DataFacts,
    FirstAnswers,
    GradientNoise,
    Index,
    MemoryParts,
    NetworkFacts,
    NonNegative,
    OptimizerName,
    Positive,
    Precision,
    PrecisionRatio,
    PrecisionTime,
    RecomputationTimes,
    Record,
    StepLoading,
    Trial,
    UpdateTime,
)


class Point(NamedTuple):
    """A training step that can be measured: workers, image side in pixels, local batch."""

    workers: int
    resolution: int
    local_batch_size: int

    def __str__(self) -> str:
        many = "" if self.workers == 1 else f", {self.workers} workers"
        return f"{self.resolution} px, local batch {self.local_batch_size}{many}"


class Pair(NamedTuple):
    """Two groups of workers that compute at the same time with unequal local batches."""

    resolution: int  # image side, in pixels
    large_workers: int  # workers with the large batch
    small_workers: int  # workers with the small one
    large_batch: int  # samples per step of the former
    small_batch: int  # samples per step of the latter
    micro_batch: int | None = None  # most samples in one forward pass; `None`: the whole batch

    @property
    def workers(self) -> int:
        """Number of workers in both groups."""
        return self.large_workers + self.small_workers

    def __str__(self) -> str:
        groups = f"{self.large_workers} + {self.small_workers} workers"
        return (
            f"{self.resolution} px, local batches {self.large_batch} and {self.small_batch}, "
            f"{groups}"
        )


class Compare(Record):
    """Time the same step in float32 and in 16 bits, and choose a format; answered by `Compared`."""

    do: Literal["compare"] = "compare"
    workers: Count
    seconds: Positive = Field(description="Time to spend.")


class Compared(Record):
    """The number format to train in, and the times that decided it.

    There are no times where there was nothing to choose.
    """

    precision: Precision
    times: tuple[PrecisionTime, ...] = ()
    ratio: PrecisionRatio | None = None


class Prepare(Record):
    """Build network and optimizer; answered by `Prepared`.

    All further commands need it; only `Compare` may come before it.
    """

    do: Literal["prepare"] = "prepare"
    workers: Count
    precision: Precision
    recompute: bool = Field(False, description="Whether the backward pass recomputes blocks.")
    compile: bool = Field(False, description="Whether the network is compiled.")
    cuda_graphs: bool = Field(False, description="Whether passes are replayed from CUDA graphs.")


class Prepared(Record):
    """The network that was built, its data and its hardware."""

    data: DataFacts
    network: NetworkFacts
    parts: MemoryParts
    held_bytes: Index = Field(
        0,
        description="Bytes that a GPU holds whatever the batch, such as images; in each peak.",
    )
    device_name: str
    other_devices: tuple[str, ...] = Field(
        (), description="Device models of other workers that differ from rank 0's."
    )
    threads: Count = Field(description="Compute threads of each worker.")
    memory_bytes: Count = Field(description="Bytes that each worker may use.")
    allocator: str
    arithmetic: str = ""
    formats: tuple[Precision, ...] = ()
    no_graphs: str = Field(
        "", description="Why passes cannot be replayed as the job asks; empty: they can."
    )
    loaders: Index | None = Field(
        None,
        description="Loader processes of each worker; null: a step makes its batch itself.",
    )


class TakeTurns(Record):
    """Time a step in two ways, in turns, at the wanted batch or a smaller affordable one."""

    workers: Count
    resolution: Count
    wanted_batch_size: Count
    seconds: Positive = Field(description="Time to spend.")


class Recompute(TakeTurns):
    """Time a step that does not fit the memory, with recomputed blocks and with micro-batches.

    Answered by `Recomputed`. Later steps compute in the way that was chosen.
    """

    do: Literal["recompute"] = "recompute"
    limit_bytes: Count
    try_without: bool = Field(
        True, description="Whether to try without recomputation; false: it surely does not fit."
    )


class Recomputed(Record):
    """Times with and without recomputation; null where all samples fit or there are no blocks."""

    times: RecomputationTimes | None


class Compile(TakeTurns):
    """Time a step compiled and not compiled; answered by `CompilationTimes`.

    Later steps compute in the way that was chosen. The time to spend leaves compiling out.
    """

    do: Literal["compile"] = "compile"
    asked: bool = Field(description="Whether the job asks for compiling, whatever it saves.")


class Replay(TakeTurns):
    """Time a step with passes replayed from CUDA graphs and without; answered by `GraphTimes`.

    Later steps compute in the way that was chosen.
    """

    do: Literal["replay"] = "replay"


class Guess(Record):
    """Estimate the peak bytes of a step without taking it; answered by `Guessed`."""

    do: Literal["guess"] = "guess"
    workers: Literal[1] = 1  # the estimate is the same in every process
    resolution: Count
    local_batch_size: Count
    recompute: bool = Field(False, description="Whether to assume that blocks are recomputed.")


class Guessed(Record):
    """Peak bytes by fake tensors; null where PyTorch cannot estimate them."""

    peak_bytes: Count | None


class Weigh(Record):
    """Measure the memory of one step, and whether it fits; answered by `Weighed`."""

    do: Literal["weigh"] = "weigh"
    workers: Count
    resolution: Count
    local_batch_size: Count


class Weighed(Record):
    """Both sizes as in `MemoryPoint`; without a peak the step did not fit, and changed nothing."""

    peak_bytes: Count | None
    resident_bytes: Count | None


class Visit(Record):
    """Time a few steps in a row; answered by `Visited`."""

    do: Literal["visit"] = "visit"
    workers: Count
    resolution: Count
    local_batch_size: Count
    seconds: NonNegative = Field(description="Time to spend, warm-up aside.")
    most_steps: Count


class Visited(Record):
    """Seconds of computing and of waiting for the exchange, of each timed step.

    Loader processes deliver batches in bursts, so where they feed the steps, each entry is the mean
    of the visit.
    """

    steps: tuple[tuple[Positive, NonNegative], ...]
    by_worker: tuple[tuple[Positive, NonNegative], ...] = Field(
        (), description="Means over the steps for each worker, in rank order."
    )
    loading: StepLoading | None = None

    @property
    def shortest(self) -> float:
        """Seconds of the shortest step, by which the controller decides what is affordable.

        In a slow stretch of the machine all other steps may take many times as long.
        """
        return min(map(sum, self.steps))


class VisitPair(Record):
    """Time two groups that take steps at the same time without waiting for each other.

    Answered by `PairVisited`.
    """

    do: Literal["pair"] = "pair"
    workers: Count
    resolution: Count
    large_workers: Count
    large_batch: Count
    small_batch: Count
    micro_batch: Count
    seconds: Positive = Field(description="Time to spend on each of two stretches.")


class PairVisited(Record):
    """Seconds of a step with the large and with the small batch, in each of two stretches.

    In the second stretch the groups have changed their batches over.
    """

    stretches: tuple[tuple[Positive, Positive], ...]


class Exchange(Record):
    """Time an exchange of a message between the workers; answered by `CollectiveTime`."""

    do: Literal["exchange"] = "exchange"
    operation: Literal["all-reduce", "push-pull"]
    workers: Annotated[int, Field(ge=2)]
    bytes: Count
    seconds: Positive = Field(description="Time to spend.")


class TimeLink(Record):
    """Time messages between rank 0 and a partner while all others wait; answered by `LinkTime`."""

    do: Literal["link"] = "link"
    workers: Count
    partner: Count = Field(description="Rank of the partner.")
    between: Literal["hosts", "workers of a host"]
    seconds: Positive = Field(description="Time to spend.")


class MeasureNoise(Record):
    """Measure the gradient noise after a few steps; answered by `NoiseMeasured`."""

    do: Literal["noise"] = "noise"
    workers: Count
    resolution: Count
    part_size: Count = Field(description="Samples in each part.")
    seconds: Positive = Field(description="Time to spend.")


class NoiseMeasured(Record):
    """The gradient noise scale; null where no gradient was finite or the data do not suffice."""

    noise: GradientNoise | None


class Evaluate(Record):
    """Time forward passes without gradients at the starting weights; answered by `Evaluated`.

    The network has the starting weights afterwards.
    """

    do: Literal["evaluate"] = "evaluate"
    workers: Count
    batch_size: Count
    repeats: Index


class Evaluated(Record):
    """Time of an evaluation, and the accuracy of the untrained network."""

    seconds_per_image: Positive = Field(
        description="Median over the passes; their mean where loader processes feed them."
    )
    first_answers: FirstAnswers | None = Field(
        None, description="Answers of the untrained network; null where nothing was evaluated."
    )


class TimeUpdates(Record):
    """Time an update by each optimizer that a plan may choose; answered by `UpdatesTimed`.

    Weights and the state of the bench's own optimizer stay as they were.
    """

    do: Literal["updates"] = "updates"
    workers: Count
    seconds: Positive = Field(description="Time to spend on each optimizer.")


class UpdatesTimed(Record):
    """Times of the updates, by optimizer."""

    times: tuple[UpdateTime, ...]


class RunTrial(Record):
    """Train briefly from the starting weights and evaluate; answered by `TrialRun`.

    Weights, statistics and the optimizer's state are the starting ones afterwards.
    """

    do: Literal["trial"] = "trial"
    workers: Count
    resolution: Count
    optimizer: OptimizerName
    global_batch_size: Count
    rate_scale: Positive = Field(1.0, description="Multiple of the usual learning rate.")
    samples: Count = Field(description="Samples to train on, over all workers.")
    held_out: Count = Field(description="Training images that the trial is evaluated on.")
    micro_batch: Count = Field(description="Most samples in a forward pass of a worker.")
    most_seconds: Positive | None = Field(
        None, description="Seconds after which the trial is given up; null: never."
    )


class TrialRun(Record):
    """The outcome of a trial, or, now and then before its end, its progress."""

    done: float = Field(1.0, ge=0, le=1, description="Share of the trial; 1 once it has ended.")
    trial: Trial | None = Field(
        None,
        description="Null before the end, where memory ran out, and with the two flags below.",
    )
    given_up: bool = Field(False, description="Whether the trial took too long.")
    no_accuracy: bool = Field(
        False, description="Whether outputs and labels are such that there is no accuracy."
    )


Command = (
    Compare
    | Prepare
    | Recompute
    | Compile
    | Replay
    | Guess
    | Weigh
    | Visit
    | VisitPair
    | Exchange
    | TimeLink
    | MeasureNoise
    | Evaluate
    | TimeUpdates
    | RunTrial
)
_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="do")])


def ignored(*values: object) -> None:
    """A callback that does nothing."""
    del values


def read_command(line: str | bytes) -> Command:
    """Parse a command from a line of JSON."""
    return _COMMANDS.validate_json(line)
