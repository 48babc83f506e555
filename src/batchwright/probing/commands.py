"""What the controller can ask of the workers, and what they answer: one JSON line each.

Workers ``rank < workers`` carry a command out together; the others wait. Rank 0 answers.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from batchwright.records import (
    CollectiveTime,
    CompilationTimes,
    Count,
    DataFacts,
    FirstAnswers,
    GradientNoise,
    GraphTimes,
    Index,
    LinkTime,
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
    micro_batch: int | None = None  # most samples in one forward pass; `None`: as many as there are

    @property
    def workers(self) -> int:
        """All of them."""
        return self.large_workers + self.small_workers

    def __str__(self) -> str:
        groups = f"{self.large_workers} + {self.small_workers} workers"
        return (
            f"{self.resolution} px, local batches {self.large_batch} and {self.small_batch}, "
            f"{groups}"
        )


class Compare(Record):
    """Time the same step in float32 and in 16 bits, and choose; answered by `Compared`."""

    do: Literal["compare"] = "compare"
    workers: Count
    seconds: Positive = Field(description="Time to spend.")


class Compared(Record):
    """The number format to train in, and the times that decided; none where none was needed."""

    precision: Precision
    times: tuple[PrecisionTime, ...]
    ratio: PrecisionRatio | None


class Prepare(Record):
    """Build network and optimizer; answered by `Prepared`. Comes before all that follows."""

    do: Literal["prepare"] = "prepare"
    workers: Count
    precision: Precision
    recompute: bool = Field(False, description="Blocks again in the backward pass.")
    compile: bool = Field(False, description="Whether the network computes compiled.")
    cuda_graphs: bool = Field(False, description="Whether passes are replayed from CUDA graphs.")


class Prepared(Record):
    """What was built, and on what."""

    data: DataFacts
    network: NetworkFacts
    parts: MemoryParts
    held_bytes: Index = Field(
        0,
        description="What a GPU holds besides whatever the batch, such as images; in each peak.",
    )
    device_name: str
    other_devices: tuple[str, ...] = Field((), description="Other models that workers have.")
    threads: Count = Field(description="Compute threads of each worker.")
    memory_bytes: Count = Field(description="Bytes that each worker may use.")
    allocator: str
    arithmetic: str = ""
    no_graphs: str = Field("", description="Why passes are not replayed, though they should.")
    loaders: Index | None = Field(
        None,
        description="Loader processes of each worker; null: a step makes its batch itself.",
    )


class TakeTurns(Record):
    """Time a step two ways, in turns, at the batch that is planned or less."""

    workers: Count
    resolution: Count
    wanted_batch_size: Count
    seconds: Positive = Field(description="Time to spend.")


class Recompute(TakeTurns):
    """Time a step that does not fit the memory both ways; answered by `Recomputed`.

    Steps afterwards are as it was chosen.
    """

    do: Literal["recompute"] = "recompute"
    limit_bytes: Count
    try_without: bool = Field(True, description="False: it surely does not fit as it is.")


class Recomputed(Record):
    """What came of it; nothing where all samples fit, or the network has no blocks."""

    times: RecomputationTimes | None


class Compile(TakeTurns):
    """Time a step compiled and not; answered by `Compiled`. Steps afterwards are as chosen.

    The time to spend is without that of compiling.
    """

    do: Literal["compile"] = "compile"
    asked: bool


class Compiled(Record):
    """What came of it."""

    times: CompilationTimes


class Replay(TakeTurns):
    """Time a step replayed from CUDA graphs and not; answered by `Replayed`.

    Steps afterwards are as it was chosen.
    """

    do: Literal["replay"] = "replay"


class Replayed(Record):
    """What came of it."""

    times: GraphTimes


class Guess(Record):
    """Peak bytes of a step that nobody has tried yet; answered by `Guessed`."""

    do: Literal["guess"] = "guess"
    workers: Literal[1] = 1  # one process can tell for all
    resolution: Count
    local_batch_size: Count
    recompute: bool = Field(False, description="As if blocks were recomputed, which they may be.")


class Guessed(Record):
    """From fake tensors; null where PyTorch cannot tell."""

    peak_bytes: Count | None


class Weigh(Record):
    """Memory of one step, and whether it fits at all; answered by `Weighed`."""

    do: Literal["weigh"] = "weigh"
    workers: Count
    resolution: Count
    local_batch_size: Count


class Weighed(Record):
    """Both sizes as in `MemoryPoint`; no peak: the step does not fit, and changed nothing."""

    peak_bytes: Count | None
    resident_bytes: Count | None


class Visit(Record):
    """Time a few steps; answered by `Visited`."""

    do: Literal["visit"] = "visit"
    workers: Count
    resolution: Count
    local_batch_size: Count
    seconds: NonNegative = Field(description="Time to spend, warm-up aside.")
    most_steps: Count


class Visited(Record):
    """Seconds of computing and of waiting for the exchange, of each timed step.

    Where loader processes feed the steps, whose batches come in bursts, each is the visit's mean.
    """

    steps: tuple[tuple[Positive, NonNegative], ...]
    apart: tuple[tuple[Positive, NonNegative], ...] = Field(
        (), description="The same of each worker, in rank order: means of the visit."
    )
    loading: StepLoading | None = None

    @property
    def shortest(self) -> float:
        """Seconds of the shortest step, which tells what is affordable.

        In a slow stretch of the machine all others may take many times as long.
        """
        return min(map(sum, self.steps))


class VisitPair(Record):
    """Have two groups take steps at the same time, nobody waiting; answered by `PairVisited`."""

    do: Literal["pair"] = "pair"
    workers: Count
    resolution: Count
    large_workers: Count
    large_batch: Count
    small_batch: Count
    micro_batch: Count
    seconds: Positive = Field(description="Time to spend on each of two stretches.")


class PairVisited(Record):
    """Seconds of a step with the large and with the small batch.

    Twice: first the groups as planned, then with the batches changed over.
    """

    stretches: tuple[tuple[Positive, Positive], ...]


class Exchange(Record):
    """Time an exchange between the workers; answered by `Exchanged`."""

    do: Literal["exchange"] = "exchange"
    operation: Literal["all-reduce", "push-pull"]
    workers: Annotated[int, Field(ge=2)]
    bytes: Count
    seconds: Positive = Field(description="Time to spend.")


class Exchanged(Record):
    """The time it took."""

    time: CollectiveTime


class TimeLink(Record):
    """Time messages between rank 0 and another, in silence; answered by `LinkTimed`."""

    do: Literal["link"] = "link"
    workers: Count
    partner: Count = Field(description="Rank of the other.")
    between: Literal["hosts", "workers of a host"]
    seconds: Positive = Field(description="Time to spend.")


class LinkTimed(Record):
    """What they took."""

    link: LinkTime


class MeasureNoise(Record):
    """Gradient noise at the present weights, which stay; answered by `NoiseMeasured`."""

    do: Literal["noise"] = "noise"
    workers: Count
    resolution: Count
    part_size: Count = Field(description="Samples in each part.")
    seconds: Positive = Field(description="Time to spend.")


class NoiseMeasured(Record):
    """Null where no gradient was finite."""

    noise: GradientNoise | None


class Evaluate(Record):
    """Time forward passes of the starting weights, without gradients; answered by `Evaluated`.

    The network has the starting weights afterwards.
    """

    do: Literal["evaluate"] = "evaluate"
    workers: Count
    batch_size: Count
    repeats: Index


class Evaluated(Record):
    """What they took, and what was answered."""

    seconds_per_image: Positive = Field(description="Median.")
    first_answers: FirstAnswers | None = Field(None, description="Null where none can be told.")


class TimeUpdates(Record):
    """Time the optimizers that a plan may choose from; answered by `UpdatesTimed`.

    Weights and the optimizer's state stay.
    """

    do: Literal["updates"] = "updates"
    workers: Count
    seconds: Positive = Field(description="Time to spend on each.")


class UpdatesTimed(Record):
    """What they take."""

    times: tuple[UpdateTime, ...]


class RunTrial(Record):
    """Train from the starting weights for a little, and judge; answered by `TrialRun`.

    Weights, statistics and the optimizer's state are the starting ones afterwards.
    """

    do: Literal["trial"] = "trial"
    workers: Count
    resolution: Count
    optimizer: OptimizerName
    global_batch_size: Count
    rate_scale: Positive = Field(1.0, description="Multiple of the usual learning rate.")
    samples: Count = Field(description="To train on, over all workers.")
    held_out: Count = Field(description="Training images that are kept to judge on.")
    micro_batch: Count = Field(description="Most samples in a forward pass of a worker.")
    most_seconds: Positive | None = Field(
        None, description="Training is given up when it has taken so long; null: never."
    )


class TrialRun(Record):
    """How a trial ended; before that, now and then, how far it has come."""

    done: float = Field(1.0, ge=0, le=1, description="Share of it; 1 once it has ended.")
    trial: Trial | None = Field(
        None, description="Null before its end, and where memory ran out or what follows is so."
    )
    given_up: bool = Field(False, description="Whether it took too long.")
    no_accuracy: bool = Field(
        False, description="Whether outputs and labels are not such that accuracy could be told."
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


def ignored(*told: object) -> None:
    """For whoever does not want to know how far something has come."""
    del told


def read_command(line: str | bytes) -> Command:
    """The command that a line of JSON holds."""
    return _COMMANDS.validate_json(line)
