"""float32 or bfloat16: decided by timing the same step in both.

A processor may multiply bfloat16 in hardware and still be slower in it: depthwise convolutions have
few products to gain from, and every conversion costs.
"""

from __future__ import annotations

import math
from statistics import median

from batchwright.group import Group
from batchwright.probing.bench import SMALLEST_BATCH, Bench, sides_of
from batchwright.probing.step_time import visit
from batchwright.probing.timing import follow
from batchwright.records import Job, Precision, PrecisionTime
from batchwright.workload.host import computes_in_bfloat16
from batchwright.workload.sources import ImageData

WORTHWHILE = 0.95
"""bfloat16 is taken where a step takes at most this share of its time in float32."""

_LARGEST_BATCH = 64  # samples; larger ones change the comparison little
_STEPS = 4  # timed in each format


def choose_precision(
    job: Job, data: ImageData, group: Group, *, seconds: float
) -> tuple[Precision, tuple[PrecisionTime, ...]]:
    """The number format to train in, and the times that decided; none where there is no choice.

    Args:
        job: Its resolutions are concrete.
        data: The job's data.
        group: The workers; all come to the same answer.
        seconds: Time to spend.
    """
    if job.precision != "auto":
        return job.precision, ()
    if not computes_in_bfloat16(group.device):
        return "float32", ()
    plain = Bench(job.model_copy(update={"precision": "float32"}), data, group)
    per_sample = _seconds_per_sample(plain)
    affordable = int(seconds / 2 / (_STEPS + 2) / per_sample)  # and two to warm up
    size = max(SMALLEST_BATCH, min(affordable, _LARGEST_BATCH))
    half = Bench(job.model_copy(update={"precision": "bfloat16"}), data, group)
    times = (_time(plain, "float32", size), _time(half, "bfloat16", size))
    faster = times[1].step_seconds <= WORTHWHILE * times[0].step_seconds
    return ("bfloat16" if faster else "float32"), times


def _seconds_per_sample(bench: Bench) -> float:
    """A first guess, from a second step; the same on all workers."""
    supply = bench.supply(SMALLEST_BATCH, max(sides_of(bench.job)))
    bench.step(supply)
    nanoseconds = int(1e9 * sum(bench.step(supply)) / SMALLEST_BATCH)
    return follow(bench.group, nanoseconds) / 1e9


def _time(bench: Bench, precision: Precision, size: int) -> PrecisionTime:
    resolution = max(sides_of(bench.job))
    steps = visit(bench, bench.supply(size, resolution), seconds=math.inf, most_steps=_STEPS)
    return PrecisionTime(
        precision=precision,
        resolution=resolution,
        local_batch_size=size,
        step_seconds=median(map(sum, steps)),
    )
