"""Rounds with a parameter server: workers train by themselves and queue at the server's link.

The queue of events and the server's link are those of the virtual cluster
(`algorithms.simulated_clock`), with random times in place of a run's. A worker computes the steps
of a round and pushes its model over its own link; the server's link passes one model after the
other; and the merged model comes back in the same way. Merging is taken to cost nothing.
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
"""Mean above which the mean stands for a Poisson number: this scatters by a millionth of the mean.
NumPy draws none with a mean beyond 1e18."""

Draw = Callable[[int], float]
"""worker -> random seconds that it computes in its next round."""


@dataclass(frozen=True)
class Rounds:
    """The times of some simulated rounds of each worker, in seconds; arrays are by worker."""

    seconds: float  # time from the start to the end of the last worker
    computing: Floats  # time of computing
    exchange: Floats  # time of pushing and pulling, including the wait in the server's queue
    waiting: Floats  # time of waiting for other workers, where they wait for each other
    queue: float  # time in the server's queue alone, mean over all pushes
    pushes: int  # number of models that reached the server


def simulate_rounds(
    workers: int,
    rounds: int,
    draw: Draw,
    *,
    transfer: float | Floats,
    service: float,
    ahead: float = inf,
    until: float = inf,
) -> Rounds:
    """Simulate rounds of each worker.

    Args:
        workers: Number of workers.
        rounds: Number of rounds of each worker.
        draw: Draws the seconds of computing of a worker's next round.
        transfer: Seconds of a model over a worker's own link: of each worker, or of all.
        service: Seconds of a model over the server's link.
        ahead: Rounds that a worker may be ahead of the slowest: 0 is `bsp`, infinite `asp`.
        until: Seconds after which the simulation ends.
    """
    link, events = ServerLink(service), Events()
    own = np.broadcast_to(transfer, workers).tolist()
    computing, exchange, waiting = np.zeros(workers), np.zeros(workers), np.zeros(workers)
    done = [0] * workers
    slowest, behind = 0, Counter({0: workers})
    blocked: list[tuple[int, float]] = []
    queue, last = 0.0, 0.0

    def begin(worker: int, now: float) -> None:
        seconds = draw(worker)
        computing[worker] += seconds
        exchange[worker] += own[worker]
        events.add(now + seconds + own[worker], worker, "push")

    def pull(worker: int, now: float) -> None:
        there = link.send(now) + own[worker]
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
    """Random seconds of computing in a round of each worker.

    The steps of a round scatter independently, so a round scatters less by the root of their
    number. The number of times that a worker becomes a straggler in a round is a Poisson number;
    each time lasts for an exponential time.

    Args:
        row: The row of the plan.
        speeds: Speed of each worker relative to the row's times.
        generator: Draws all random numbers.
        samples: Samples of each worker in a round.
        spread: Standard deviation of the seconds of a step, as a share.
        stragglers: Workers that are slower for a while; `None`: none.
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
        # A straggler's work takes longer by the slowdown. The expected part of the work that is
        # slowed follows from the share of its time in which a worker is a straggler.
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
