"""Measurements that decide how steps are computed: format, recomputation, compiling, graphs."""

from __future__ import annotations

from pydantic import Field

from batchwright.records.base import (
    Count,
    Estimate,
    Index,
    NonNegative,
    Positive,
    Precision,
    Record,
)


class PrecisionTime(Record):
    """Time of a training step in one number format; `precision=auto` takes the fastest."""

    precision: Precision = Field(description="Number format of the forward and backward pass.")
    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    step_seconds: Positive = Field(description="Median of the whole step, in seconds.")


class PrecisionRatio(Record):
    """Time of a step in a 16-bit format relative to the same step in float32, timed in turns."""

    ratio: Estimate = Field(
        description="Time of a step in the 16-bit format over that of one in float32."
    )
    rounds: Count = Field(description="Rounds of four timings: float32, 16-bit, 16-bit, float32.")
    wanted_batch_size: Count = Field(
        description="Samples per step on each worker that the choice is for; the timed steps have "
        "fewer where time or memory allowed no more."
    )
    finite: bool = Field(
        True,
        description="Whether gradients in the 16-bit format were finite wherever those in float32 "
        "were; if not, float32 is chosen whatever its time.",
    )


class RecomputationTimes(Record):
    """Measurements of activation checkpointing, where memory is short, and the choice."""

    resolution: Count = Field(description="Image side, in pixels.")
    wanted_batch_size: Count = Field(
        description="Samples per step on each worker that the choice is for."
    )
    limit_bytes: Count = Field(description="Bytes that a worker may use.")
    plain_batch_size: Index = Field(
        description="Largest local batch that fits at once without activation checkpointing; 0: "
        "not even the smallest."
    )
    recomputing_batch_size: Index = Field(
        description="Largest local batch that fits at once with it; 0: not even the smallest."
    )
    compared_batch_sizes: tuple[Count, Count] | None = Field(
        None,
        description="Samples of the timed steps, without and with it: the largest that fit, or "
        "fewer where time allowed no more. Null where there was nothing to compare.",
    )
    plain_sample_seconds: Positive | None = Field(
        None, description="Median time of a timed step without it, in seconds per sample."
    )
    recomputing_sample_seconds: Positive | None = Field(
        None, description="Median time of a timed step with it, in seconds per sample."
    )
    ratio: Estimate | None = Field(
        None, description="Time per sample with it over that without, timed in turns."
    )
    chosen: bool = Field(description="Whether activation checkpointing is used.")


class CompilationTimes(Record):
    """Measurements of compiling the network, and the choice."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    training_seconds: Positive = Field(
        description="Seconds of the job's epochs in uncompiled steps of this batch."
    )
    plain_seconds: Positive = Field(description="Median of an uncompiled step, in seconds.")
    compile_seconds: NonNegative | None = Field(
        None,
        description="Seconds of compiling on the slowest worker, less where a cache held results; "
        "null where it was not tried, since the training is short.",
    )
    compiled_seconds: Positive | None = Field(
        None, description="Median of a compiled step, in seconds."
    )
    ratio: Estimate | None = Field(
        None, description="Time of a compiled step over that of an uncompiled one, timed in turns."
    )
    failure: str = Field("", description="Why the network cannot be compiled; else empty.")
    asked: bool = Field(description="Whether the job requests it, whatever it saves.")
    chosen: bool = Field(description="Whether the network is compiled.")


class GraphTimes(Record):
    """Measurements of replaying passes from CUDA graphs, and the choice."""

    resolution: Count = Field(description="Image side, in pixels.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    plain_seconds: Positive = Field(description="Median of a step without graphs, in seconds.")
    replayed_seconds: Positive | None = Field(
        None, description="Median of a replayed step, in seconds."
    )
    ratio: Estimate | None = Field(
        None, description="Time of a replayed step over that of one without, timed in turns."
    )
    failure: str = Field("", description="Why passes cannot be replayed; else empty.")
    chosen: bool = Field(description="Whether passes are replayed.")
