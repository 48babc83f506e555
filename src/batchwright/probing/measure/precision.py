"""float32 or 16 bits: decided by timing the same step in both, at the batch that is planned.

A processor may multiply 16 bits in hardware and still be slower in them: depthwise convolutions
have few products to gain from, and every conversion costs. With few samples a step is mostly what
it takes whatever the batch, which tells nothing of a large one.

    steps with more and more samples, up to the batch in question --> both formats in turns, ABBA,
    until the interval of their ratio tells, or the time is up

In turns, because the machine's speed wanders: in ABBA a steady drift cancels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple

from batchwright.distributed.group import Group
from batchwright.prediction.fit import interval_in_ratio, student_t_975
from batchwright.probing.bench import SMALLEST_BATCH, Batch, Bench, sides_of
from batchwright.probing.measure.memory import weigh
from batchwright.probing.measure.timing import follow, now
from batchwright.records import Estimate, Job, Precision, PrecisionRatio, PrecisionTime
from batchwright.workload.data.sources import ImageData
from batchwright.workload.host import free_memory, half_of, release_memory

WORTHWHILE = 0.99
"""16 bits are taken where a step takes at most this share of its time in float32. A comparison
is right to 2 % or so, and the wrong choice is to cost 3 % at most."""

USUAL_BATCH = 256
"""Local batch, in samples, that is compared where the plan is to choose one and the data allow it:
plans choose a batch at which what a step takes whatever the batch counts for little."""

MIN_SECONDS = 1.0
"""Spent where it takes so long, however small the budget: steps that fit in then are long enough to
depend on the batch, and few samples would tell of what a step takes whatever the batch."""

_FIRST_BATCH = 8
_MEMORY_SHARE = 0.5  # that the batch may take by what was weighed
_MIN_ROUNDS, _MAX_ROUNDS = 3, 25
_CAUTION = 2  # times the interval must tell to stop early: who looks often is fooled sometimes
_TURN_SECONDS = 0.02  # of short steps several are timed together
_GROWTH = (4, 2)  # of the batch from one try to the next, the first that time allows

Turn = Callable[[], float]
"""Takes a few steps; seconds of one of them, the mean over the workers."""


class Choice(NamedTuple):
    """The number format to train in, and what decided; nothing where there was no choice."""

    precision: Precision
    times: tuple[PrecisionTime, ...] = ()
    ratio: PrecisionRatio | None = None


def choose_precision(job: Job, data: ImageData, group: Group, *, seconds: float) -> Choice:
    """The number format to train in; all workers of the group come to the same answer.

    ``seconds`` are spent, or `MIN_SECONDS`, or three rounds of ABBA if they take longer.
    """
    if job.precision != "auto":
        return Choice(job.precision)
    half = half_of(group.device)
    if half is None:
        return Choice("float32")
    formats: tuple[Precision, Precision] = ("float32", half)
    benches = [
        Bench(job.model_copy(update={"precision": precision, "compile": "off"}), data, group)
        for precision in formats
    ]
    began = now(group.device)
    workers = group.size if job.workers == "auto" else job.workers  # more, if they are virtual
    wanted = planned_batch(job, data.facts.train_samples, workers)
    resolution = max(sides_of(job))
    size = _largest(benches, wanted, resolution, seconds=seconds)

    def left() -> float:
        return seconds - (now(group.device) - began)

    turns = [_turn(bench, bench.supply(size, resolution)) for bench in benches]
    times, ratio = compare(turns, lambda: bool(follow(group, int(left() > 0))))
    # Kernels of 16 bits may be at fault where those of float32 are not, whatever the rate: those of
    # PyTorch for CPUs are at 3 x 3 convolutions of a single pixel.
    finite = benches[1].broken_steps <= benches[0].broken_steps
    # What is free is looked at next: networks and batches must not be in the way until then.
    del turns, benches
    gc.collect()
    release_memory(group.device)
    return Choice(
        half if finite and ratio.value <= WORTHWHILE else "float32",
        tuple(
            PrecisionTime(
                precision=precision,
                resolution=resolution,
                local_batch_size=size,
                step_seconds=median(taken),
            )
            for precision, taken in zip(formats, times, strict=True)
        ),
        PrecisionRatio(
            ratio=ratio, rounds=len(times[0]) // 2, wanted_batch_size=wanted, finite=finite
        ),
    )


def planned_batch(job: Job, samples: int, workers: int) -> int:
    """Samples in a forward pass of each worker, as they are asked for or usually planned.

    ``samples`` are those of the training set.
    """
    if job.global_batch != "auto":
        size = -(-job.global_batch // workers)
    else:
        size = min(USUAL_BATCH, samples // job.goal.least_steps // workers)
    if job.micro_batch != "auto":
        size = min(size, job.micro_batch)
    return max(SMALLEST_BATCH, size)


def compare(
    turns: Sequence[Turn], may_go_on: Callable[[], bool]
) -> tuple[tuple[list[float], list[float]], Estimate]:
    r"""Seconds of every turn of two, A and B, and the ratio of B to A.

    Each round is A, B, B, A, and :math:`r = \sqrt{B_1 B_2 / (A_1 A_2)}`; the ratio is the geometric
    mean over the rounds, with the interval of Student's t for :math:`\ln r`.

    Args:
        turns: A and B.
        may_go_on: Whether there is time, asked after each round from the third on; the rounds end
            without it once the ratio is clearly below `WORTHWHILE` or above 1.
    """
    first, second = turns
    times: tuple[list[float], list[float]] = ([], [])
    logs: list[float] = []
    for turn in turns:
        turn()  # kernels are chosen, memory is touched
    while True:
        a, b, c, d = first(), second(), second(), first()
        times[0].extend((a, d))
        times[1].extend((b, c))
        logs.append(log(b * c / (a * d)) / 2)
        rounds = len(logs)
        if rounds < _MIN_ROUNDS:
            continue
        error = student_t_975(rounds - 1) * stdev(logs) / sqrt(rounds)
        ratio = exp(fmean(logs))
        wide = interval_in_ratio(ratio, _CAUTION * error)
        apart = wide.high < WORTHWHILE or wide.low > 1
        if apart or rounds == _MAX_ROUNDS or not may_go_on():
            return times, interval_in_ratio(ratio, error)


def _turn(bench: Bench, supply: Callable[[], Batch]) -> Turn:
    """Takes as many steps at a time as `_TURN_SECONDS` hold, at least one."""
    counts: list[int] = []

    def take() -> float:
        if not counts:
            counts.append(follow(bench.group, max(1, int(_TURN_SECONDS / sum(bench.step(supply))))))
        taken = fmean(sum(bench.step(supply)) for _ in range(counts[0]))
        return fmean(bench.group.gather(taken))

    return take


def _largest(benches: Sequence[Bench], wanted: int, resolution: int, *, seconds: float) -> int:
    """The batch to compare: ``wanted``, or what time and memory allow of it.

    It is approached from below: time and memory of the next size are told from those before. A step
    in float32 takes more memory than one in 16 bits, so that one is weighed.
    """
    plain, group = benches[0], benches[0].group
    size = min(_FIRST_BATCH, wanted)
    peak, _ = weigh(plain, plain.supply(size, resolution))
    if peak is None:
        return min(SMALLEST_BATCH, wanted)
    limit = plain.job.goal.memory or free_memory(group.device, group.size)
    fixed = plain.live_bytes() + plain.parts().gradients
    sample_bytes = max(0, peak - fixed) / size
    most = int((_MEMORY_SHARE * limit - fixed) / sample_bytes) if sample_bytes else wanted
    began = now(group.device)
    tried: list[tuple[int, float]] = []
    while size < wanted:
        together = 0.0
        for bench in benches:  # the second step of each counts
            supply = bench.supply(size, resolution)
            bench.step(supply)
            together += sum(bench.step(supply))
        tried.append((size, together))
        left = max(seconds, MIN_SECONDS) - (now(group.device) - began)
        sizes = [min(factor * size, wanted, most) for factor in _GROWTH]
        allowed = [one for one in sizes if one > size and _comparison(tried, one) <= left]
        larger = follow(group, allowed[0] if allowed else 0)
        if not larger:
            break
        size = larger
    return size


def _comparison(tried: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds that the fewest rounds take with ``size`` samples.

    By the line through the last two sizes, or in proportion to the last.
    """
    last, seconds = tried[-1]
    slope = seconds / last
    if len(tried) > 1:
        before, less = tried[-2]
        slope = min(slope, max(0.0, seconds - less) / (last - before))
    return (2 * _MIN_ROUNDS + 1) * (seconds + slope * (size - last))
