"""Seconds of a step of two groups of workers that compute side by side, each at its own pace.

So it is under a parameter server: between two exchanges nobody waits for anybody, but all share the
machine's memory bandwidth and caches. What is wanted is the ratio of the two groups, so both are
timed over the very same seconds; and so that a worker with a slower core than the others does not
pass for a batch, the groups change over and are timed again.
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

    The bench's group is this worker alone; ``everyone`` computes at the same time, and calls this.

    Returns:
        As `PairVisited` says; means over the workers of a group.
    """
    small = everyone.size - command.large_workers
    plans = (everyone.rank < command.large_workers, everyone.rank >= small)
    return tuple(_stretch(bench, everyone, command, is_large=is_large) for is_large in plans)


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
    each = _warm(bench, supplies)
    seconds = max(command.seconds, (MIN_STEPS + 0.5) * max(everyone.gather(each)))
    # Steps go on until the time is up, so that the others have company; one that ends later had
    # none to its end and does not count, unless it is the first.
    began = time.perf_counter()
    ends: list[float] = []
    while not ends or ends[-1] < seconds:
        bench.step(*supplies)
        ends.append(time.perf_counter() - began)
    counted = max(1, sum(end <= seconds for end in ends))
    own = ends[counted - 1] / counted
    told = everyone.gather((is_large, own))
    large, small = ([own for is_, own in told if is_ == wanted] for wanted in (True, False))
    return fmean(large), fmean(small)


def _warm(bench: Bench, supplies: Supplies) -> float:
    """Seconds of the last of one or two steps that are not timed."""
    each = sum(bench.step(*supplies))
    return each if each >= LONG_STEP else sum(bench.step(*supplies))


def _parts(size: int, most: int) -> list[int]:
    """Micro-batches of a local batch.

    >>> _parts(500, 128), _parts(83, 128)
    ([128, 128, 128, 116], [83])
    """
    whole, rest = divmod(size, most)
    return [most] * whole + [rest] * bool(rest)
