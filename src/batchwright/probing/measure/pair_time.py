"""Seconds of a step of two groups of workers that compute side by side, each at its own pace.

Workers of a parameter server compute like this: between two exchanges nobody waits for anybody, but
all share the machine's memory bandwidth and caches. The measurement is for the ratio of the two
groups' times, so both are timed over the very same seconds. A worker whose core is slower than the
others' would distort the ratio, so the groups change their batches over and are timed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from batchwright.distributed.group import Group
from batchwright.probing.batches import Batch
from batchwright.probing.bench import Bench
from batchwright.probing.commands import VisitPair
from batchwright.probing.measure.step_time import LONG_STEP, MIN_STEPS, take_first_steps

Supplies = Sequence[Callable[[], Batch]]


def visit_pair(
    bench: Bench, everyone: Group, command: VisitPair
) -> tuple[tuple[float, float], ...]:
    """Mean seconds of a step with the large and with the small batch, in two stretches.

    All workers of ``everyone`` call this at the same time; the bench's group is this worker alone.

    Returns:
        The pairs of `PairVisited`; each value is the mean over the workers of a group.
    """
    small = everyone.size - command.large_workers
    is_large_in = (everyone.rank < command.large_workers, everyone.rank >= small)
    return tuple(_stretch(bench, everyone, command, is_large=is_large) for is_large in is_large_in)


def _stretch(
    bench: Bench, everyone: Group, command: VisitPair, *, is_large: bool
) -> tuple[float, float]:
    size = command.large_batch if is_large else command.small_batch
    parts = _parts(size, command.micro_batch)
    feed = bench.batches.feed(everyone.size)
    supplies: Supplies = [bench.supply(part, command.resolution) for part in parts]
    if feed is not None:
        supplies = [bench.stream(feed, parts, command.resolution).__next__] * len(parts)
    take_first_steps(bench, *supplies)
    uncompiled = bool(bench.compilation.failure)
    each = _warm(bench, supplies)
    if bench.share_failure(everyone) and not uncompiled:  # else some would go on compiled
        each = _warm(bench, supplies)
    seconds = max(command.seconds, (MIN_STEPS + 0.5) * max(everyone.gather(each)))
    # Steps go on until the time is up, so that all workers compute all the while. A step that ends
    # later had the machine more to itself and does not count, unless it is the only one.
    began = time.perf_counter()
    ends: list[float] = []
    while not ends or ends[-1] < seconds:
        bench.step(*supplies)
        ends.append(time.perf_counter() - began)
    counted = max(1, sum(end <= seconds for end in ends))
    times = everyone.gather((is_large, ends[counted - 1] / counted))
    large = fmean(seconds for of_large, seconds in times if of_large)
    return large, fmean(seconds for of_large, seconds in times if not of_large)


def _warm(bench: Bench, supplies: Supplies) -> float:
    """Take one or two steps to warm up; seconds of the last one."""
    each = sum(bench.step(*supplies))
    return each if each >= LONG_STEP else sum(bench.step(*supplies))


def _parts(size: int, most: int) -> list[int]:
    """Sizes of the micro-batches of a local batch, each of at most ``most`` samples.

    >>> _parts(500, 128), _parts(83, 128)
    ([128, 128, 128, 116], [83])
    """
    whole, rest = divmod(size, most)
    return [most] * whole + [rest] * bool(rest)
