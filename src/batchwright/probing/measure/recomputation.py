"""Micro-batches or recomputation, where a batch does not fit the memory: decided by timing both.

A network whose blocks are computed again in the backward pass (`workload.passes.recomputation`)
takes more samples at once, for one more forward pass a step. Without recomputation, a batch that
does not fit is split into micro-batches, each of which takes the fixed time of a pass besides the
time of its samples.

    two small steps weighed each way --> the most samples that fit, each way, weighed -->
    both in turns, ABBA, in seconds a sample
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from batchwright.probing.bench import SMALLEST_BATCH, Bench
from batchwright.probing.commands import Recompute
from batchwright.probing.measure.comparison import (
    MIN_SECONDS,
    MIN_TURNS,
    WORTHWHILE,
    Turn,
    compare,
    step_seconds,
    time_left,
)
from batchwright.probing.measure.memory import weigh
from batchwright.probing.measure.timing import from_rank_0, now
from batchwright.records import RecomputationTimes

_SECOND_BATCH = 8  # with the smallest batch it shows the bytes of a sample
_TRIES = 4  # of batches near the limit: the expected size is too large a few times at most


@dataclass(frozen=True)
class _Fitting:
    """The most samples that fit at once, 0 if not even the fewest do, and seconds per sample."""

    samples: int
    sample_seconds: float = 0.0


def compare_recomputation(bench: Bench, command: Recompute) -> RecomputationTimes | None:
    """How the wanted samples fit in both ways, and the times, the same on all workers.

    The comparison takes the command's seconds, or `MIN_SECONDS`, or three rounds of ABBA, whichever
    is longest. `None` where the step fits without recomputation.
    """
    resolution, wanted, limit = command.resolution, command.wanted_batch_size, command.limit_bytes
    bench.recompute(on=False)
    plain = _most(bench, resolution, wanted, limit) if command.try_without else _Fitting(0)
    if plain.samples == wanted:
        return None
    bench.recompute(on=True)
    again = _most(bench, resolution, wanted, limit)
    found = RecomputationTimes(
        resolution=resolution,
        wanted_batch_size=wanted,
        limit_bytes=limit,
        plain_batch_size=plain.samples,
        recomputing_batch_size=again.samples,
        chosen=plain.samples < SMALLEST_BATCH <= again.samples,
    )
    if SMALLEST_BATCH <= plain.samples < min(wanted, again.samples):
        found = _timed(bench, found, plain, again, command.seconds)
    bench.recompute(on=found.chosen)
    return found


def _timed(
    bench: Bench, found: RecomputationTimes, plain: _Fitting, again: _Fitting, seconds: float
) -> RecomputationTimes:
    """``found`` with times, and with the choice by them."""
    left = time_left(bench.group, seconds)
    each = MIN_TURNS * (plain.sample_seconds + again.sample_seconds)
    room = max(SMALLEST_BATCH, int(max(seconds, MIN_SECONDS) / each)) if each else again.samples
    room = from_rank_0(bench.group, room)
    sizes = min(plain.samples, room), min(again.samples, room)

    def turn(size: int, *, on: bool) -> Turn:
        supply = bench.supply(size, found.resolution)

        def take() -> float:
            bench.recompute(on=on)
            return step_seconds(bench, supply) / size

        return take

    turns = [turn(size, on=on) for size, on in zip(sizes, (False, True), strict=True)]
    times, ratio = compare(turns, left)
    plain_seconds, again_seconds = map(median, times)
    return found.model_copy(
        update={
            "compared_batch_sizes": sizes,
            "plain_sample_seconds": plain_seconds,
            "recomputing_sample_seconds": again_seconds,
            "ratio": ratio,
            "chosen": ratio.value <= WORTHWHILE,
        }
    )


def _most(bench: Bench, resolution: int, wanted: int, limit: int) -> _Fitting:
    """The most samples up to ``wanted`` whose step is weighed to stay within ``limit`` bytes.

    Peaks are convex in the samples: beyond two known sizes a peak is on the line through them, or
    above it.
    """
    known: list[tuple[int, int]] = []
    best = _Fitting(0)

    def weighed(size: int) -> int | None:
        supply: Callable[[], Any] = bench.supply(size, resolution)
        began = now(bench.device)
        peak, _ = weigh(bench, supply)
        if peak is None or not from_rank_0(bench.group, int(peak <= limit)):
            return None
        nonlocal best
        # Weighing takes two or three steps, the first of them slow: this is an upper bound.
        best = _Fitting(size, (now(bench.device) - began) / 2 / size)
        known.append((size, peak))
        return peak

    size = min(_SECOND_BATCH, wanted)
    if weighed(SMALLEST_BATCH) is None or size <= SMALLEST_BATCH:
        return best
    if weighed(size) is not None:
        (low, low_peak), (high, high_peak) = known
        slope = max(1.0, (high_peak - low_peak) / (high - low))
        size = from_rank_0(bench.group, min(wanted, high + int((limit - high_peak) / slope)))
    else:
        size = (best.samples + size) // 2
    for _ in range(_TRIES):
        if size <= best.samples or weighed(size) is not None:
            break
        size = from_rank_0(bench.group, (best.samples + size) // 2)
    return best
