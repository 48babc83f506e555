"""Rounds with a parameter server: workers train for themselves and queue at the server's link.

The queue of events and the server's link are those of the virtual cluster
(`algorithms.simulated_clock`), with drawn times in place of a run's: a round takes the time of its
steps, is pushed over the worker's own link, goes through the server's one model after the other,
and what was merged comes back in the same way. Merging is taken to cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from batchwright.algorithms.simulated_clock import Events, ServerLink
from batchwright.planning.simulation.cluster import Floats, Row
from batchwright.planning.simulation.steps import Stragglers

_AS_GOOD_AS_THE_MEAN = 1e12
"""Poisson numbers with such a mean scatter by a millionth of it; NumPy draws none beyond 1e18."""

Draw = Callable[[int], float]
"""(worker) -> seconds that it computes in its next round."""


@dataclass(frozen=True)
class Rounds:
    """What some rounds of each worker came to; arrays are by worker, in seconds.

    Attributes:
        seconds: From the start to the last worker's end.
        computing: Of training.
        exchange: Of pushing and pulling, the wait in the server's queue included.
        waiting: For other workers, where they wait for each other.
        queue: In the server's queue alone, mean of all pushes.
        pushes: How many models reached the server.
    """

    seconds: float
    computing: Floats
    exchange: Floats
    waiting: Floats
    queue: float
    pushes: int


def simulate_rounds(
    workers: int,
    rounds: int,
    draw: Draw,
    *,
    transfer: float,
    service: float,
    ahead: float = inf,
    until: float = inf,
) -> Rounds:
    """Simulate rounds of each worker.

    Args:
        workers: How many.
        rounds: Of each.
        draw: Seconds of computing of a worker's next round.
        transfer: Seconds of a model over a worker's own link.
        service: Seconds of a model over the server's.
        until: Seconds after which nothing is looked at any more.
        ahead: Rounds that a worker may be ahead of the slowest: 0 is `bsp`, infinite `asp`.
    """
    link, events = ServerLink(service), Events()
    computing, exchange, waiting = np.zeros(workers), np.zeros(workers), np.zeros(workers)
    done = [0] * workers
    slowest, behind = 0, Counter({0: workers})
    blocked: list[tuple[int, float]] = []
    queue, last = 0.0, 0.0

    def begin(worker: int, now: float) -> None:
        seconds = draw(worker)
        computing[worker] += seconds
        exchange[worker] += transfer
        events.add(now + seconds + transfer, worker, "push")

    def pull(worker: int, now: float) -> None:
        there = link.send(now) + transfer
        exchange[worker] += there - now
        begin(worker, there)

    for worker in range(workers):
        begin(worker, 0.0)
    pushes = 0
    while events:
        arrival, worker, _ = events.next()
        if arrival > until:
            break
        pushes += 1
        received = link.receive(arrival)
        queue += received - arrival
        exchange[worker] += received - arrival
        last = max(last, received)
        behind[done[worker]] -= 1
        done[worker] += 1
        behind[done[worker]] += 1
        moved = not behind[slowest]
        slowest += moved
        if done[worker] < rounds:
            if done[worker] - slowest <= ahead:
                pull(worker, received)
            else:
                blocked.append((worker, received))
        if not moved or not blocked:
            continue
        ready = [one for one in blocked if done[one[0]] - slowest <= ahead]
        blocked = [one for one in blocked if done[one[0]] - slowest > ahead]
        for other, since in ready:
            waiting[other] += received - since
            pull(other, received)
    return Rounds(last, computing, exchange, waiting, queue / max(pushes, 1), pushes)


def round_draws(
    row: Row,
    speeds: Floats,
    generator: np.random.Generator,
    *,
    samples: npt.NDArray[np.int64],
    spread: float,
    stragglers: Stragglers | None,
) -> Draw:
    """What a round of ``samples`` takes each worker.

    Steps scatter for themselves, so a round scatters less by the root of their number. How often a
    worker becomes a straggler in a round is a Poisson number, each time for an exponential time.
    """
    steps = np.ceil(samples / row.batches)
    usual = ((row.sample_seconds * samples + row.step_seconds * steps) / speeds).tolist()
    deviations = (spread / np.sqrt(steps)).tolist()
    rate = 0.0
    if stragglers is not None:
        rate = stragglers.share / (1 - stragglers.share) / stragglers.seconds

    def draw(worker: int) -> float:
        work = float(usual[worker]) * float(
            np.exp(deviations[worker] * generator.standard_normal())
        )
        if stragglers is None:
            return work
        # While it is slow, its work lasts longer by the slowdown; of the work, as much is slowed
        # as the share of its time says.
        slowed = (
            work
            * stragglers.share
            / (stragglers.share + (1 - stragglers.share) * stragglers.slowdown)
        )
        often = rate * work
        if not often < _AS_GOOD_AS_THE_MEAN:
            return work + slowed * (stragglers.slowdown - 1)
        times = generator.poisson(often)
        drawn = float(generator.gamma(times, stragglers.seconds)) if times else 0.0
        expected = often * stragglers.seconds
        part = min(slowed * drawn / expected, work) if expected else 0.0
        return work + part * (stragglers.slowdown - 1)

    return draw
