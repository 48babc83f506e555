r"""Steps of workers that sum their gradients: each lasts as long as the slowest, and the exchange.

In step t worker i computes for

.. math:: t_{ti} = \frac{a_i b_i + c_i}{v_i} \, e^{\sigma z_{ti}} \, s_{ti}

with local batch :math:`b_i`, speed :math:`v_i`, standard normal :math:`z`, and :math:`s` the
straggler's slowdown while it is one, else 1. Workers become stragglers and cease to be with
constant rates. All workers are computed at once: time and memory grow in proportion to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import expm1

import numpy as np
import numpy.typing as npt

from batchwright.algorithms.balancer import Balancer
from batchwright.planning.simulation.cluster import Floats, Row

Scatter = Callable[[np.random.Generator, tuple[int, int]], Floats]
"""(generator, (steps, workers)) -> factors on the computing of each step."""

TOLD_STEPS = 12
_BLOCK = 2**18  # numbers at once: two megabytes of them


@dataclass(frozen=True)
class Stragglers:
    """Workers that are slower for a while.

    Attributes:
        share: Of its time that a worker is one.
        slowdown: How many times as long it then computes.
        seconds: How long it stays one, mean.
    """

    share: float = 0.0
    slowdown: float = 1.0
    seconds: float = 1.0

    def chances(self, step_seconds: float) -> tuple[float, float]:
        """Probability of becoming a straggler in a step, and of ceasing to be one."""
        begins = self.share / (1 - self.share) / self.seconds
        return -expm1(-begins * step_seconds), -expm1(-step_seconds / self.seconds)


def lognormal(deviation: float) -> Scatter:
    """Factors with median 1 whose logarithms scatter by so much."""
    return lambda generator, shape: np.exp(deviation * generator.standard_normal(shape))


@dataclass
class StepSeries:
    """Some steps in a row; arrays are over the steps, in seconds.

    Attributes:
        computing: Of the mean worker.
        slowest: Of the slowest one.
        exchange: What comes on top, the same in each.
        changes: How often the shares changed.
        told: The first steps: computing of each worker.
    """

    computing: Floats
    slowest: Floats
    exchange: float
    changes: int = 0
    told: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def totals(self, count: int, whole: float) -> tuple[float, float, float]:
        """Seconds of some steps: the mean worker's computing, waiting for others, exchange.

        Beyond those simulated, all are like the mean of the second half.

        Args:
            count: How many steps.
            whole: The same, those at the end of an epoch counted by what they take.
        """
        simulated = len(self.slowest)
        more, half = count - simulated, simulated // 2
        sums = [
            float(one.sum() + more * one[half:].mean()) * whole / count
            for one in (self.computing, self.slowest)
        ]
        # A mean of equal numbers may be rounded up, beyond the largest of them.
        return sums[0], max(sums[1] - sums[0], 0.0), self.exchange * count


def simulate_steps(
    row: Row,
    speeds: Floats,
    count: int,
    generator: np.random.Generator,
    *,
    scatter: Scatter,
    stragglers: Stragglers | None = None,
    balancer: Balancer | None = None,
) -> StepSeries:
    """The first steps of a row of the plan.

    Args:
        row: What a step takes.
        speeds: Of each worker relative to that.
        count: How many steps.
        generator: Of all random numbers.
        scatter: How steps of a worker differ.
        stragglers: Who is slower for a while; `None`: nobody.
        balancer: What makes shares again; `None`: they stay.
    """
    workers = len(speeds)
    batches, shares = row.batches, tuple(row.batches.tolist())
    usual = (row.sample_seconds * batches + row.step_seconds) / speeds
    series = StepSeries(np.empty(count), np.empty(count), row.exchange)
    slow = np.zeros(workers, dtype=bool)
    if stragglers is not None:
        slow = generator.random(workers) < stragglers.share
        begins, ceases = stragglers.chances(float(np.median(usual)) + row.exchange)
    block = max(1, min(_BLOCK // workers, count))
    told = []
    for start in range(0, count, block):
        size = min(block, count - start)
        factors = scatter(generator, (size, workers))
        for at, step in enumerate(range(start, start + size)):
            factor = factors[at]
            if stragglers is not None:
                slow ^= generator.random(workers) < np.where(slow, ceases, begins)
                factor = np.where(slow, stragglers.slowdown * factor, factor)
            seconds = usual * factor
            series.computing[step], series.slowest[step] = seconds.mean(), seconds.max()
            if step < TOLD_STEPS:
                told.append(seconds)
            if balancer is None:
                continue
            balancer.watch(shares, seconds.tolist(), usual=step % row.steps > 0)
            wanted = balancer.look(epoch_ends=(step + 1) % row.steps == 0)
            if wanted is not None:
                series.changes += 1
                batches, shares = np.array(wanted, dtype=np.int64), wanted
                usual = (row.sample_seconds * batches + row.step_seconds) / speeds
    series.told = np.array(told)
    return series


def worker_speeds(
    relative: Floats, spread: float, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Speeds of workers: those stated, times what workers of a kind differ by."""
    return relative * np.exp(spread * generator.standard_normal(len(relative)))
