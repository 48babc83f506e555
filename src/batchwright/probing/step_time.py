"""Seconds of a training step, while all workers of the group compute at once.

Workers on one host share its memory bandwidth and caches, so one worker alone would be measured too
fast.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from batchwright.probing.bench import Batch, Bench
from batchwright.probing.timing import follow

LONG_STEP = 0.1
"""Seconds; a step that takes longer is warm after one, shorter ones after two."""

LEAST_STEPS = 2
"""Timed at a visit, however long they take."""


def visit(
    bench: Bench, supply: Callable[[], Batch], *, seconds: float, most_steps: int
) -> list[tuple[float, float]]:
    """Seconds of computing and of waiting for the exchange of a few steps in a row.

    The first one or two steps at each visit are discarded: kernels are chosen, caches filled and
    memory touched.

    Args:
        bench: What takes the steps.
        supply: Makes their batches.
        seconds: Time to spend, the discarded steps aside.
        most_steps: Most timed steps, at least 1.

    Returns:
        Means over the workers, for each timed step; at least `LEAST_STEPS` if so many may be.
    """
    each = sum(bench.step(supply))
    if follow(bench.group, int(each < LONG_STEP)):
        each = sum(bench.step(supply))
    wanted = int(min(most_steps, seconds / each))
    steps = follow(bench.group, min(most_steps, max(LEAST_STEPS, wanted)))
    everyone = bench.group.gather([bench.step(supply) for _ in range(steps)])
    return [
        (mean(compute for compute, _ in step), mean(sync for _, sync in step))
        for step in zip(*everyone, strict=True)
    ]
