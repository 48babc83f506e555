"""A step timed in two ways, in turns: the ratio of their times, and how sure it is.

The machine's speed wanders: in ABBA a steady drift cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Protocol

from batchwright.distributed.group import Group
from batchwright.prediction.fit import interval_in_ratio, student_t_975
from batchwright.probing.batches import Batch
from batchwright.probing.bench import SMALLEST_BATCH, Bench
from batchwright.probing.measure.timing import follow, now
from batchwright.records import Estimate

WORTHWHILE = 0.99
"""The second way is taken where a step takes at most this share of its time in the first. A
comparison is right to 2 % or so, and the wrong choice is to cost 3 % at most."""

MIN_SECONDS = 1.0
"""Spent where it takes so long, however small the budget: steps that fit in then are long enough to
depend on the batch, and few samples would tell of what a step takes whatever the batch."""

_MIN_ROUNDS, _MAX_ROUNDS = 3, 25
_CAUTION = 2  # times the interval must tell to stop early: who looks often is fooled sometimes

MIN_TURNS = 2 * _MIN_ROUNDS + 1
"""Turns that each way has at least, the first one too, which does not count."""

_FIRST_BATCH = 8  # tells what a sample takes

Turn = Callable[[], float]
"""Takes a few steps; seconds of one of them, the mean over the workers."""


class Switch(Protocol):
    """Puts something on or off."""

    def __call__(self, *, on: bool) -> None:
        """Put it so."""


def compare(
    turns: Sequence[Turn], may_go_on: Callable[[], bool]
) -> tuple[tuple[list[float], list[float]], Estimate]:
    r"""Seconds of every turn of two, A and B, and the ratio of B to A.

    Each round is A, B, B, A, and :math:`r = \sqrt{B_1 B_2 / (A_1 A_2)}`; the ratio is the geometric
    mean over the rounds, with the interval of Student's t for :math:`\ln r`.

    Args:
        turns: A and B.
        may_go_on: Whether there is time, asked after each round from the third on; the rounds end
            without it once the ratio is clearly below `WORTHWHILE` or above 1.
    """
    first, second = turns
    times: tuple[list[float], list[float]] = ([], [])
    logs: list[float] = []
    for turn in turns:
        turn()  # kernels are chosen, memory is touched
    while True:
        a, b, c, d = first(), second(), second(), first()
        times[0].extend((a, d))
        times[1].extend((b, c))
        logs.append(log(b * c / (a * d)) / 2)
        rounds = len(logs)
        if rounds < _MIN_ROUNDS:
            continue
        error = student_t_975(rounds - 1) * stdev(logs) / sqrt(rounds)
        ratio = exp(fmean(logs))
        wide = interval_in_ratio(ratio, _CAUTION * error)
        apart = wide.high < WORTHWHILE or wide.low > 1
        if apart or rounds == _MAX_ROUNDS or not may_go_on():
            return times, interval_in_ratio(ratio, error)


def time_left(group: Group, seconds: float) -> Callable[[], bool]:
    """Says whether so much time has not passed yet, the same on all workers."""
    began = now(group.device)
    return lambda: bool(follow(group, int(now(group.device) - began < seconds)))


def compare_switched(
    bench: Bench, supply: Callable[[], Batch], switch: Switch, seconds: float
) -> tuple[tuple[list[float], list[float]], Estimate]:
    """Steps as they are and with what ``switch`` puts on, as `compare` has them, for so long."""

    def turn(*, on: bool) -> Turn:
        def take() -> float:
            switch(on=on)
            return step_seconds(bench, supply)

        return take

    return compare([turn(on=False), turn(on=True)], time_left(bench.group, seconds))


def step_seconds(bench: Bench, supply: Callable[[], Batch]) -> float:
    """Seconds of a step, the mean over the workers."""
    return fmean(bench.group.gather(sum(bench.step(supply))))


def affordable_batch(bench: Bench, resolution: int, wanted: int, seconds: float) -> int:
    """Samples of a step that fits, and can be taken in turns in the time there is."""
    size = _fitting(bench, resolution, min(_FIRST_BATCH, wanted))
    supply = bench.supply(size, resolution)
    bench.step(supply)
    each = sum(bench.step(supply)) / size
    room = max(seconds, MIN_SECONDS) / (2 * MIN_TURNS * each)
    return _fitting(bench, resolution, follow(bench.group, max(size, min(wanted, int(room)))))


def _fitting(bench: Bench, resolution: int, size: int) -> int:
    """So many samples, or as many halves of them as it takes for a step to fit on all workers."""
    while size > SMALLEST_BATCH and not bench.try_step(bench.supply(size, resolution)):
        size = max(SMALLEST_BATCH, size // 2)
    return size
