"""Seconds of a training step, while all workers of the group compute at once.

Workers on one host share its memory bandwidth and caches, so one worker alone would be measured too
fast. Loader processes share its cores as well, so where they feed the training, they feed the
measured steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, mean
from typing import Any

from batchwright.probing.batches import Batch
from batchwright.probing.bench import Bench, Steppable
from batchwright.probing.measure.timing import from_rank_0
from batchwright.records import StepLoading
from batchwright.training.batches.feeding import Feed
from batchwright.workload.data.loading import Totals

LONG_STEP = 0.1
"""Seconds; longer steps need one step to warm up, shorter ones two."""

MIN_STEPS = 2
"""Steps timed at a visit, however long they take."""

_POLL_SECONDS = 0.0005

Steps = list[tuple[float, float]]
"""Seconds of computing and of waiting for the exchange, of each step."""

WorkerMeans = tuple[tuple[float, float], ...]
"""Mean seconds of computing and of waiting for the exchange, of each worker in rank order."""


def visit(
    bench: Steppable, supply: Callable[[], Any], *, seconds: float, most_steps: int
) -> tuple[Steps, WorkerMeans]:
    """Time a few steps in a row.

    The first one or two steps of each visit are discarded, in which kernels are chosen, caches
    filled and memory touched; so is a step before them that records CUDA graphs, which takes many
    times as long. The ``seconds`` to spend leave them out.

    Returns:
        Seconds of computing and of waiting for the exchange: for each timed step, means over the
        workers; and for each worker, means over the steps. At least `MIN_STEPS` are timed, unless
        ``most_steps`` is less.
    """
    take_first_steps(bench, supply)
    each = _warm(bench, supply)
    steps = _affordable(bench, each, seconds, most_steps)
    everyone = bench.group.gather([bench.step(supply) for _ in range(steps)])
    of_steps = [_means(step) for step in zip(*everyone, strict=True)]
    return of_steps, tuple(_means(own) for own in everyone)


def _means(timed: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return mean(compute for compute, _ in timed), mean(sync for _, sync in timed)


def visit_beside_loading(
    bench: Bench, feed: Feed, size: int, resolution: int, *, seconds: float, most_steps: int
) -> tuple[Steps, WorkerMeans, StepLoading]:
    """Time a few steps whose batches are loaded beside them, as in a training.

    Loader processes take cores from the steps, and steps wait for loaders that are slower than they
    are; in the long run one batch is loaded while one is trained on. The visit reproduces that:

        a batch from each process, and one more | steps with that one, nothing loading |
        a step with each of the others | timed steps

    Each step takes a batch, and so has another one loaded. Before the clock runs, the batches that
    were loaded in advance are used up: then loaders faster than the steps have as many ready again
    and slower ones none, and either stays so. All processes load equally many batches in the timed
    steps, at least one, even beyond ``seconds`` and ``most_steps``.

    Returns:
        The mean step, repeated for each timed step, since batches come in bursts; the mean step of
        each worker; and the times of loading.
    """
    meter = feed.loading
    # All workers take equally many steps, and hosts with more cores load by more processes.
    loaders = max(bench.group.gather(meter.loaders))
    before = meter.totals
    stream = bench.stream(feed, [size], resolution)
    first = next(stream)
    finish_loading(bench, feed)
    batch_seconds, cpu_seconds = _batch_seconds(before, meter.totals)
    take_first_steps(bench, lambda: first)
    alone = _warm(bench, lambda: first)
    each = _warm(bench, stream.__next__, least=loaders)
    steps = in_turns(_affordable(bench, each, seconds, most_steps), loaders)
    timed = [_fed_step(bench, stream) for _ in range(steps)]
    finish_loading(bench, feed)
    means = [fmean(parts) for parts in zip(*timed, strict=True)]
    if not meter.loaders:  # nothing was loaded beside the steps, so all of them count as alone
        batch_seconds, cpu_seconds = _batch_seconds(before, meter.totals)
        alone = means[1] + means[2]
    everyone = bench.group.gather((*means, alone, batch_seconds, cpu_seconds))
    waited, computing, sync, alone, batch_seconds, cpu_seconds = (
        fmean(parts) for parts in zip(*everyone, strict=True)
    )
    by_worker = tuple((one[0] + one[1], one[2]) for one in everyone)
    return (
        [(waited + computing, sync)] * steps,
        by_worker,
        StepLoading(
            loaders=loaders,
            batch_seconds=batch_seconds,
            cpu_seconds=cpu_seconds,
            alone_seconds=alone,
            input_seconds=waited,
        ),
    )


def in_turns(count: int, loaders: int) -> int:
    """``count`` batches, rounded so that each loader process loads equally many, at least one.

    Example:
        >>> in_turns(10, 0), in_turns(10, 4), in_turns(10, 16)
        (10, 8, 16)
    """
    return max(1, count // loaders) * loaders if loaders else count


def take_first_steps(bench: Steppable, *supplies: Callable[[], Any]) -> None:
    """Take the steps after a new supply that record CUDA graphs: their times say nothing."""
    for _ in range(bench.first_steps):
        bench.step(*supplies)


def _warm(bench: Steppable, supply: Callable[[], Any], *, least: int = 1) -> float:
    """Take one or two steps to warm up, or ``least`` if that is more; seconds of the last one."""
    each = sum(bench.step(supply))
    more = max(least - 1, from_rank_0(bench.group, int(each < LONG_STEP)))
    for _ in range(more):
        each = sum(bench.step(supply))
    return each


def _affordable(bench: Steppable, each: float, seconds: float, most_steps: int) -> int:
    """Number of timed steps, the same on all workers."""
    wanted = int(min(most_steps, seconds / each))
    return from_rank_0(bench.group, min(most_steps, max(MIN_STEPS, wanted)))


def _batch_seconds(before: Totals, after: Totals) -> tuple[float, float]:
    """Wall and processor seconds that a process takes to load a batch; 0 where none loads."""
    batches = max(1, after.batches - before.batches)
    return (
        (after.seconds - before.seconds) / batches,
        (after.cpu_seconds - before.cpu_seconds) / batches,
    )


def _fed_step(bench: Bench, stream: Iterator[Batch]) -> tuple[float, float, float]:
    """Take a step; seconds of waiting for the batch, computing, and waiting for the exchange."""
    start = time.perf_counter()
    batch = next(stream)
    waited = time.perf_counter() - start
    return waited, *bench.step(lambda: batch)


def finish_loading(bench: Bench, feed: Feed | None) -> None:
    """Wait until all workers have loaded the batches asked for: loading would disturb later steps.

    A batch that fails to load counts as well; its error is raised when the batch is taken. A worker
    without a feed waits for the others.
    """
    while feed is not None and feed.loading.batches < feed.loading.asked:
        time.sleep(_POLL_SECONDS)
    from_rank_0(bench.group, 0)
