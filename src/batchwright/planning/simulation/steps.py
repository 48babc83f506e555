r"""Steps of workers that sum their gradients: each takes as long as the slowest and the exchange.

In step t worker i computes for

.. math:: t_{ti} = \frac{a_i b_i + c_i}{v_i} \, e^{\sigma z_{ti}} \, s_{ti}

with local batch :math:`b_i`, speed :math:`v_i` and standard normal :math:`z`; :math:`s` is the
slowdown while the worker is a straggler, else 1. Workers become stragglers and cease to be with
constant rates in time, also within a step and while they wait; in steps that are long enough for
many such changes the mean of :math:`s` counts. All workers are computed at once, so time and memory
of the simulation grow in proportion to their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchwright.algorithms.balancer import Balancer
from batchwright.planning.simulation.cluster import Floats, Row

Scatter = Callable[[np.random.Generator, tuple[int, int]], Floats]
"""(generator, (steps, workers)) -> factors on the computing of each step."""

RECORDED_STEPS = 12
"""Number of first steps whose times are recorded for each worker."""
_BLOCK = 2**18  # random numbers that are drawn at once: two megabytes
_OFTEN = 30.0  # times that a worker becomes a straggler in a step from which on the mean counts


@dataclass(frozen=True)
class Stragglers:
    """Workers that are slower for a while."""

    share: float = 0.0  # share of its time in which a worker is a straggler
    slowdown: float = 1.0  # seconds of computing as a straggler over the usual ones
    seconds: float = 1.0  # mean seconds for which a worker is a straggler at a time

    def compute(
        self, work: Floats, slow: npt.NDArray[np.bool_], generator: np.random.Generator
    ) -> Floats:
        """Seconds that each worker computes for what takes ``work`` seconds if none is a straggler.

        ``slow``: Who is a straggler; changed in place to who is one at the end of the computing.
        """
        apart = self.seconds * (1 - self.share) / self.share  # mean seconds until a next time
        if not float(work.max()) < _OFTEN * apart:
            return work / (1 - self.share + self.share / self.slowdown)
        left, spent, busy = work.copy(), np.zeros(len(work)), np.arange(len(work))
        while len(busy):
            pace = np.where(slow[busy], self.slowdown, 1.0)
            needed = left[busy] * pace
            lasts = generator.exponential(np.where(slow[busy], self.seconds, apart))
            spent[busy] += np.minimum(lasts, needed)
            left[busy] -= lasts / pace
            busy = busy[lasts < needed]
            slow[busy] ^= True
        return spent

    def wait(
        self, seconds: Floats, slow: npt.NDArray[np.bool_], generator: np.random.Generator
    ) -> None:
        """Let ``seconds`` pass in which workers do not compute; ``slow`` as for `compute`."""
        changed = -np.expm1(-seconds / self.seconds / (1 - self.share))
        slow ^= generator.random(len(slow)) < changed * np.where(slow, 1 - self.share, self.share)


def lognormal(deviation: float) -> Scatter:
    """Random factors with median 1 whose logarithms have this standard deviation."""
    return lambda generator, shape: np.exp(deviation * generator.standard_normal(shape))


@dataclass
class StepSeries:
    """Some consecutive steps, in seconds; arrays have an entry for each step."""

    computing: Floats  # mean over the workers of the seconds of computing
    slowest: Floats  # seconds of computing of the slowest worker
    exchange: float  # seconds that the exchange adds to each step
    changes: int = 0  # number of times that the shares changed
    # Seconds of computing in the first steps, (steps, workers).
    recorded: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def totals(self, count: int, whole: float) -> tuple[float, float, float]:
        """Seconds of ``count`` steps: computing (mean worker), waiting for others, exchange.

        Steps beyond the simulated ones take the mean of the second half of these.

        Args:
            count: Number of steps.
            whole: Number of steps, with smaller ones at the end of epochs counted by their share.
        """
        simulated = len(self.slowest)
        more, half = count - simulated, simulated // 2
        sums = [
            float(one.sum() + more * one[half:].mean()) * whole / count
            for one in (self.computing, self.slowest)
        ]
        # A mean of equal numbers may be rounded to above the largest of them.
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
    """Simulate the first steps of a row of the plan.

    Args:
        row: Times of a step.
        speeds: Speed of each worker relative to these times.
        count: Number of steps.
        generator: Draws all random numbers.
        scatter: Draws the factors by which steps of a worker differ.
        stragglers: Workers that are slower for a while; `None`: none.
        balancer: Changes the shares; `None`: they stay.
    """
    workers = len(speeds)
    batches, shares = row.batches, tuple(row.batches.tolist())
    usual = (row.sample_seconds * batches + row.step_seconds) / speeds
    series = StepSeries(np.empty(count), np.empty(count), row.exchange)
    slow = np.zeros(workers, dtype=bool)
    if stragglers is not None:
        slow = generator.random(workers) < stragglers.share
    block = max(1, min(_BLOCK // workers, count))
    recorded = []
    for start in range(0, count, block):
        size = min(block, count - start)
        factors = scatter(generator, (size, workers))
        for at, step in enumerate(range(start, start + size)):
            seconds = usual * factors[at]
            if stragglers is not None:
                seconds = stragglers.compute(seconds, slow, generator)
                stragglers.wait(seconds.max() - seconds + row.exchange, slow, generator)
            series.computing[step], series.slowest[step] = seconds.mean(), seconds.max()
            if step < RECORDED_STEPS:
                recorded.append(seconds)
            if balancer is None:
                continue
            balancer.watch(shares, seconds.tolist(), usual=step % row.steps > 0)
            wanted = balancer.look(epoch_ends=(step + 1) % row.steps == 0)
            if wanted is not None:
                series.changes += 1
                batches, shares = np.array(wanted, dtype=np.int64), wanted
                usual = (row.sample_seconds * batches + row.step_seconds) / speeds
    series.recorded = np.array(recorded)
    return series


def worker_speeds(
    relative: Floats, spread: float, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Random speeds of workers: the stated ones, times lognormal factors of this deviation."""
    return relative * np.exp(spread * generator.standard_normal(len(relative)))
