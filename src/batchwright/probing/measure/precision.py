"""float32 or 16 bits: decided by timing the same step in both, at the batch that is planned.

A processor may multiply 16 bits in hardware and still be slower in them: depthwise convolutions
have few products to gain from, and every conversion costs. A step with few samples is mostly the
fixed time of a step, which shows nothing about a large batch. On a GPU the fixed time is that of
the host, which is longer in 16 bits: where passes may be replayed from CUDA graphs, both formats
are replayed.

    steps with more and more samples, up to the batch in question --> both formats in turns, ABBA,
    until the interval of their ratio decides, or the time is up
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import fmean, median

from batchwright.distributed.group import Group
from batchwright.probing.batches import Batch
from batchwright.probing.bench import SMALLEST_BATCH, Bench, sides_of
from batchwright.probing.commands import Compared
from batchwright.probing.measure.comparison import (
    MIN_SECONDS,
    MIN_TURNS,
    WORTHWHILE,
    Turn,
    compare,
    time_left,
)
from batchwright.probing.measure.memory import held_bytes, memory_of_each, weigh
from batchwright.probing.measure.step_time import take_first_steps
from batchwright.probing.measure.timing import from_rank_0, now
from batchwright.probing.replays import may_replay
from batchwright.records import Job, Precision, PrecisionRatio, PrecisionTime
from batchwright.workload.data.sources import ImageData
from batchwright.workload.host import half_of, release_memory

USUAL_BATCH = 256
"""Local batch, in samples, that is compared where the plan is to choose one and the data allow it:
plans choose a batch at which the fixed time of a step counts for little."""

_FIRST_BATCH = 8
_MEMORY_SHARE = 0.5  # of the free memory, that the batch may take by what was weighed
_TURN_SECONDS = 0.02  # several short steps are timed together for so long
_GROWTH = (4, 2)  # of the batch from one try to the next; the first factor that time allows is used


def formats_of(group: Group) -> tuple[Precision, ...]:
    """float32, and the 16-bit format that the devices of all workers multiply in hardware, if any.

    Hosts may have processors of which some have none: then there is no choice for the group.
    """
    halves = set(group.gather(half_of(group.device)))
    half = halves.pop() if len(halves) == 1 else None
    return ("float32",) if half is None else ("float32", half)


def choose_precision(job: Job, data: ImageData, group: Group, *, seconds: float) -> Compared:
    """The number format to train in; all workers of the group come to the same answer.

    The comparison takes ``seconds``, or `MIN_SECONDS`, or three rounds of ABBA, whichever is
    longest.
    """
    if job.precision != "auto":
        return Compared(precision=job.precision)
    formats = formats_of(group)
    if len(formats) == 1:
        return Compared(precision="float32")
    settled = {"compile": "off", "cuda_graphs": "on" if may_replay(job) else job.cuda_graphs}
    benches = [
        Bench(job.model_copy(update={"precision": precision, **settled}), data, group)
        for precision in formats
    ]
    left = time_left(group, seconds)
    workers = group.size if job.workers == "auto" else job.workers  # virtual workers may be more
    wanted = planned_batch(job, data.facts.train_samples, workers)
    resolution = max(sides_of(job))
    size = _largest(benches, wanted, resolution, seconds=seconds)

    turns = _turns(benches, size, resolution)
    times, ratio = compare(turns, left)
    # 16-bit kernels may give infinite gradients where float32 ones do not, whatever the rate: those
    # of PyTorch for CPUs do in 3 x 3 convolutions of a single pixel.
    finite = benches[1].broken_steps <= benches[0].broken_steps
    # Free memory is measured next, so networks and batches have to be gone by then.
    del turns, benches
    gc.collect()
    release_memory(group.device)
    return Compared(
        precision=formats[-1] if finite and ratio.value <= WORTHWHILE else "float32",
        times=tuple(
            PrecisionTime(
                precision=precision,
                resolution=resolution,
                local_batch_size=size,
                step_seconds=median(taken),
            )
            for precision, taken in zip(formats, times, strict=True)
        ),
        ratio=PrecisionRatio(
            ratio=ratio, rounds=len(times[0]) // 2, wanted_batch_size=wanted, finite=finite
        ),
    )


def planned_batch(job: Job, samples: int, workers: int) -> int:
    """Samples in a forward pass of each worker: as the job says, or as plans usually choose.

    ``samples`` is the size of the training set.
    """
    if job.global_batch != "auto":
        size = -(-job.global_batch // workers)
    else:
        size = min(USUAL_BATCH, samples // job.goal.least_steps // workers)
    if job.micro_batch != "auto":
        size = min(size, job.micro_batch)
    return max(SMALLEST_BATCH, size)


def _turns(benches: Sequence[Bench], size: int, resolution: int) -> list[Turn]:
    """A turn for each format; both are replayed, or neither where any worker cannot replay one."""
    supplies = [bench.supply(size, resolution) for bench in benches]
    if benches[0].graphs.on:
        for bench, supply in zip(benches, supplies, strict=True):
            take_first_steps(bench, supply)
        if not all(benches[0].group.gather(all(bench.graphs.holds for bench in benches))):
            for bench in benches:
                bench.graphs.end()
    return [_turn(bench, supply) for bench, supply in zip(benches, supplies, strict=True)]


def _turn(bench: Bench, supply: Callable[[], Batch]) -> Turn:
    """A turn of as many steps as fit into `_TURN_SECONDS`, at least one."""
    count = 0

    def take() -> float:
        nonlocal count
        if not count:
            take_first_steps(bench, supply)
            fitting = int(_TURN_SECONDS / sum(bench.step(supply)))
            count = from_rank_0(bench.group, max(1, fitting))
        taken = fmean(sum(bench.step(supply)) for _ in range(count))
        return fmean(bench.group.gather(taken))

    return take


def _largest(benches: Sequence[Bench], wanted: int, resolution: int, *, seconds: float) -> int:
    """The local batch to compare: ``wanted``, or a smaller one that time and memory allow.

    It is approached from below: time and memory of the next size follow from the sizes before. A
    step in float32 takes more memory than one in 16 bits, so the float32 step is weighed.
    """
    plain, group = benches[0], benches[0].group
    size = min(_FIRST_BATCH, wanted)
    supply = plain.supply(size, resolution)
    held = held_bytes(plain)  # the other bench, too, and the images of both
    peak, _ = weigh(plain, supply)
    if peak is None:
        return min(SMALLEST_BATCH, wanted)
    limit = plain.job.goal.memory or memory_of_each(group, group.size)
    fixed = plain.live_bytes() + plain.parts().gradients
    sample_bytes = max(0, peak - held - fixed) / size
    room = _MEMORY_SHARE * (limit - held) - fixed
    most = int(room / sample_bytes) if sample_bytes else wanted
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
        larger = from_rank_0(group, allowed[0] if allowed else 0)
        if not larger:
            break
        size = larger
    return size


def _comparison(tried: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds of the smallest comparison with ``size`` samples.

    Extrapolated by the line through the last two sizes, or in proportion to the only one.
    """
    last, seconds = tried[-1]
    slope = seconds / last
    if len(tried) > 1:
        before, less = tried[-2]
        slope = min(slope, max(0.0, seconds - less) / (last - before))
    return MIN_TURNS * (seconds + slope * (size - last))
