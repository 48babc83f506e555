r"""Seconds of a training step, while all workers of the group compute at once.

Workers on one host share its memory bandwidth and caches, so one worker alone would be measured too
fast. Loader processes share its cores, too, so where they feed the training they do so here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, mean
from typing import Any

from batchwright.probing.batches import Batch
from batchwright.probing.bench import Bench, Stepping
from batchwright.probing.measure.timing import follow
from batchwright.records import StepLoading
from batchwright.training.batches.feeding import Feed
from batchwright.workload.data.loading import Totals

LONG_STEP = 0.1
"""Seconds; a step that takes longer is warm after one, shorter ones after two."""

MIN_STEPS = 2
"""Timed at a visit, however long they take."""

_POLL_SECONDS = 0.0005

Steps = list[tuple[float, float]]
"""Seconds of computing and of waiting for the exchange, of each step."""

Apart = tuple[tuple[float, float], ...]
"""The same of each worker, in rank order: means over the steps."""


def visit(
    bench: Stepping, supply: Callable[[], Any], *, seconds: float, most_steps: int
) -> tuple[Steps, Apart]:
    """Seconds of computing and of waiting for the exchange of a few steps in a row.

    The first one or two steps at each visit are discarded: kernels are chosen, caches filled and
    memory touched; and one before them in which CUDA graphs are recorded, which takes many times as
    long. They are not in the ``seconds`` to spend.

    Returns:
        Means over the workers, for each timed step, at least `MIN_STEPS` if so many may be; and
        those of each worker.
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
) -> tuple[Steps, Apart, StepLoading]:
    """The same for steps whose batches are loaded beside them, as in a training.

    Loader processes take cores from the steps, and steps wait for them where they are slower; in
    the long run one batch is loaded while one is trained on. So it is here:

        a batch from each process, and one more | steps with that one, nothing loading |
        a step with each of the others | timed steps

    Each step takes a batch and so has another loaded. Before the clock runs, those that were loaded
    in advance are used up: of what loads faster than the steps as many are there again, of what
    loads more slowly none, and either way it stays so. All processes load equally many meanwhile,
    one batch at least; ``seconds`` and ``most_steps`` are otherwise kept for the timed steps.

    Returns:
        The mean step, as often as one was timed, since batches come in bursts; that of each worker;
        and what loading had to do with it.
    """
    meter = feed.loading
    before = meter.totals
    stream = bench.stream(feed, [size], resolution)
    first = next(stream)
    finish_loading(bench, feed)
    batch_seconds, cpu_seconds = _of_a_batch(before, meter.totals)
    take_first_steps(bench, lambda: first)
    alone = _warm(bench, lambda: first)
    each = _warm(bench, stream.__next__, least=meter.loaders)
    steps = in_turns(_affordable(bench, each, seconds, most_steps), meter.loaders)
    timed = [_fed_step(bench, stream) for _ in range(steps)]
    finish_loading(bench, feed)
    means = [fmean(parts) for parts in zip(*timed, strict=True)]
    if not meter.loaders:  # nothing was loaded beside the steps: all of them tell
        batch_seconds, cpu_seconds = _of_a_batch(before, meter.totals)
        alone = means[1] + means[2]
    everyone = bench.group.gather((*means, alone, batch_seconds, cpu_seconds))
    waited, computing, sync, alone, batch_seconds, cpu_seconds = (
        fmean(parts) for parts in zip(*everyone, strict=True)
    )
    apart = tuple((one[0] + one[1], one[2]) for one in everyone)
    return (
        [(waited + computing, sync)] * steps,
        apart,
        StepLoading(
            loaders=meter.loaders,
            batch_seconds=batch_seconds,
            cpu_seconds=cpu_seconds,
            alone_seconds=alone,
            input_seconds=waited,
        ),
    )


def in_turns(count: int, loaders: int) -> int:
    """How many batches are timed of ``count`` so that each loader process loads equally many.

    Example:
        >>> in_turns(10, 0), in_turns(10, 4), in_turns(10, 16)
        (10, 8, 16)
    """
    return max(1, count // loaders) * loaders if loaders else count


def take_first_steps(bench: Stepping, *supplies: Callable[[], Any]) -> None:
    """Those that tell nothing of the steps that come, once batches are supplied anew."""
    for _ in range(bench.first_steps):
        bench.step(*supplies)


def _warm(bench: Stepping, supply: Callable[[], Any], *, least: int = 1) -> float:
    """Seconds of the last of one or two steps that are not timed, or of ``least``."""
    each = sum(bench.step(supply))
    more = max(least - 1, follow(bench.group, int(each < LONG_STEP)))
    for _ in range(more):
        each = sum(bench.step(supply))
    return each


def _affordable(bench: Stepping, each: float, seconds: float, most_steps: int) -> int:
    """How many steps are timed, the same on all workers."""
    wanted = int(min(most_steps, seconds / each))
    return follow(bench.group, min(most_steps, max(MIN_STEPS, wanted)))


def _of_a_batch(before: Totals, after: Totals) -> tuple[float, float]:
    """Wall and processor seconds that loading a batch took a process."""
    batches = after.batches - before.batches
    return (
        (after.seconds - before.seconds) / batches,
        (after.cpu_seconds - before.cpu_seconds) / batches,
    )


def _fed_step(bench: Bench, stream: Iterator[Batch]) -> tuple[float, float, float]:
    """Seconds of waiting for the batch, of computing and of waiting for the exchange."""
    start = time.perf_counter()
    batch = next(stream)
    waited = time.perf_counter() - start
    return waited, *bench.step(lambda: batch)


def finish_loading(bench: Bench, feed: Feed) -> None:
    """Wait until all that was asked for is loaded, on all workers: it would disturb what comes.

    What fails counts, and is raised with its batch.
    """
    while feed.loading.batches < feed.loading.asked:
        time.sleep(_POLL_SECONDS)
    follow(bench.group, 0)
