"""Measured steps: times, memory and exchanges, for each point that a probe has visited."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchwright.records.base import Count, Index, NonNegative, OptimizerName, Positive, Record


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
    disturbed: bool = Field(
        False,
        description="Whether other programs ran beside all of these visits. Where they ran beside "
        "some alone, only the others count. False in older profiles.",
    )
    beside_seconds: Positive | None = Field(
        None,
        description="Mean seconds of the whole step at the slowest visit that does not count, as "
        "other programs ran beside it. Null where all visits count, and in older profiles.",
    )
    loading: StepLoading | None = Field(
        None,
        description="Times of loading, which these times include; null where batches are made "
        "within the step or, in older profiles, were in memory.",
    )

    def scaled(self, ratio: float) -> StepTime:
        """This point with whole steps that take ``ratio`` times as long, its parts left as is."""
        names = ("step_seconds", "step_low", "step_high")
        times: dict[str, object] = {name: ratio * getattr(self, name) for name in names}
        times["visits"] = tuple(ratio * visit for visit in self.visits)
        times["beside_seconds"] = self.beside_seconds and ratio * self.beside_seconds
        return self.model_copy(update=times)


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
