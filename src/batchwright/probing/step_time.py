"""Seconds of a training step at several local batches, while all workers compute at once.

Workers on one host share its memory bandwidth and caches, so one worker alone would be measured too
fast. The exchange of gradients is timed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from batchwright.probing.bench import Batch, Bench
from batchwright.probing.memory import peak_of_step
from batchwright.probing.timing import WARM_UP_STEPS, follow, now, spread
from batchwright.records import MemoryPoint, StepTime

FIRST_BATCH = 16  # smallest local batch measured where the data is large enough
LEAST_POINTS = 3  # a line through fewer shows no error
_SMALLEST_TRIAL = 2  # samples; batch normalization takes no fewer
_LEAST_STEPS = 3  # timed per point, however short the time
_WORTHWHILE_STEPS = 5  # fewer are not worth a point beyond the first ones


def local_batch_sizes(most: int, least: int) -> list[int]:
    """Local batches to measure: powers of two from 16 or less up to ``most``, and ``most``.

    At least `LEAST_POINTS` of them, going beyond ``most`` where the data is that small: samples may
    repeat while measuring.

    Args:
        most: Largest local batch that a plan can choose, in samples.
        least: Smallest one, in samples.

    Example:
        >>> local_batch_sizes(71, 2), local_batch_sizes(30, 2), local_batch_sizes(1, 2)
        ([16, 32, 64, 71], [4, 8, 16, 30], [2, 4, 8])
    """
    first = FIRST_BATCH
    while first > most // 4 and first // 2 >= least:
        first //= 2
    sizes = [first << k for k in range(LEAST_POINTS)]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] >= most else [*sizes, most]


def measure_points(
    bench: Bench,
    resolution: int,
    sizes: Sequence[int],
    *,
    seconds: float,
    memory_limit: int,
    report: Callable[[str], None],
    least_points: int = LEAST_POINTS,
) -> tuple[list[StepTime], list[MemoryPoint]]:
    """Time and memory at one resolution, small batches first, as many as the time allows.

    The first ``least_points`` are measured in any case, with fewer steps if time is short. The
    others stop before the time is over, or before a step needs more memory than there is. What time
    is left goes into a second pass over the same points: other programs and the processor's clock
    change from one second to the next, and steps taken in one go would not show it.

    Args:
        bench: What is measured.
        resolution: Image side, in pixels.
        sizes: Local batches, rising, in samples.
        seconds: Time to spend.
        memory_limit: Bytes one worker may use.
        report: Called with the name of each point before it is measured.
        least_points: Points that are always measured.
    """
    deadline = now(bench.device) + seconds
    sizes = _start_lower_if_slow(bench, resolution, sizes, seconds, least_points)
    points: list[_Point] = []
    peaks: list[MemoryPoint] = []
    per_sample = seconds_per_sample(bench, resolution, sizes[0])
    for position, size in enumerate(sizes):
        ahead = sum(sizes[position:least_points]) or size
        left = deadline - now(bench.device)
        steps = _affordable_steps(bench, left / (per_sample * ahead), position < least_points)
        if _next_peak(peaks, size) > memory_limit:
            steps = 0
        steps = follow(bench.group, steps)
        if not steps:
            break
        report(f"{resolution} px, local batch {size}")
        supply = bench.supply(size, resolution)
        peak = peak_of_step(bench, supply)
        if peak is None:
            break
        peaks.append(MemoryPoint(resolution=resolution, local_batch_size=size, peak_bytes=peak))
        points.append(_Point(size, supply, time_steps(bench, supply, steps)))
        per_sample = median(map(sum, points[-1].seconds)) / size
    for point in points:
        left = deadline - now(bench.device)
        affordable = left > point.pass_seconds
        if not follow(bench.group, int(affordable)):
            break
        point.seconds += time_steps(bench, point.supply, len(point.seconds))
    return [_record(point, resolution, bench.group.size) for point in points], peaks


@dataclass
class _Point:
    """One local batch while it is measured; ``seconds`` are (compute, sync) of each step."""

    size: int
    supply: Callable[[], Batch]
    seconds: list[tuple[float, float]]

    @property
    def pass_seconds(self) -> float:
        """Time that measuring it once more takes."""
        timed = sum(map(sum, self.seconds))
        return timed * (1 + WARM_UP_STEPS / len(self.seconds))


def time_steps(bench: Bench, supply: Callable[[], Batch], steps: int) -> list[tuple[float, float]]:
    """Seconds of computing and of exchange of each of ``steps`` steps, means over the workers."""
    for _ in range(WARM_UP_STEPS):
        bench.step(supply)
    everyone = bench.group.gather([_time_step(bench, supply) for _ in range(steps)])
    return [
        (mean(compute for compute, _ in step), mean(sync for _, sync in step))
        for step in zip(*everyone, strict=True)
    ]


def _record(point: _Point, resolution: int, workers: int) -> StepTime:
    low, middle, high = spread([compute + sync for compute, sync in point.seconds])
    return StepTime(
        resolution=resolution,
        local_batch_size=point.size,
        workers=workers,
        compute_seconds=median(compute for compute, _ in point.seconds),
        sync_seconds=median(sync for _, sync in point.seconds),
        step_seconds=middle,
        step_low=low,
        step_high=high,
        repeats=len(point.seconds),
    )


def _time_step(bench: Bench, supply: Callable[[], Batch]) -> tuple[float, float]:
    """Seconds of computing and of exchange in one step."""
    start = now(bench.device)
    bench.loss(supply()).backward()
    computed = now(bench.device)
    bench.exchange()
    exchanged = now(bench.device) if bench.group.size > 1 else computed
    bench.update()
    end = now(bench.device)
    return (computed - start) + (end - exchanged), exchanged - computed


def seconds_per_sample(bench: Bench, resolution: int, size: int) -> float:
    """A first guess, from the second of two steps; the same on all workers."""
    supply = bench.supply(size, resolution)
    bench.step(supply)
    nanoseconds = int(1e9 * sum(_time_step(bench, supply)) / size)
    return follow(bench.group, nanoseconds) / 1e9


def _start_lower_if_slow(
    bench: Bench, resolution: int, sizes: Sequence[int], seconds: float, least_points: int
) -> list[int]:
    """``sizes`` with smaller ones put before, where the first of them would take too long."""
    per_sample = seconds_per_sample(bench, resolution, _SMALLEST_TRIAL)
    if per_sample * sizes[0] < seconds / 10:  # at most: a step has a fixed part too
        per_sample = seconds_per_sample(bench, resolution, sizes[0])
    steps = _LEAST_STEPS + WARM_UP_STEPS + 1
    chosen = list(sizes)
    while chosen[0] // 2 >= _SMALLEST_TRIAL:
        if steps * per_sample * sum(chosen[:least_points]) <= seconds:
            break
        chosen.insert(0, chosen[0] // 2)
    return chosen


def _affordable_steps(bench: Bench, steps: float, needed: bool) -> int:
    """Timed steps out of ``steps`` that there is time for; 0 to stop here."""
    wanted = bench.job.probe.steps
    timed = min(wanted, int(steps) - WARM_UP_STEPS - 1)
    if needed:
        return max(timed, min(_LEAST_STEPS, wanted))
    return timed if timed >= min(_WORTHWHILE_STEPS, wanted) else 0


def _next_peak(peaks: Sequence[MemoryPoint], size: int) -> float:
    """Bytes that ``size`` samples will need, on the line through the last two points."""
    if len(peaks) < 2:
        return 0.0
    before, last = peaks[-2:]
    slope = (last.peak_bytes - before.peak_bytes) / (
        last.local_batch_size - before.local_batch_size
    )
    return last.peak_bytes + slope * (size - last.local_batch_size)
