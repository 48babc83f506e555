"""A step timed in two ways, in turns: the ratio of the times, and its interval.

The machine's speed drifts; in the order ABBA a steady drift cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev

from batchwright.distributed.group import Group
from batchwright.prediction.fit import interval_in_ratio, student_t_975
from batchwright.probing.batches import Batch
from batchwright.probing.bench import SMALLEST_BATCH, Bench
from batchwright.probing.commands import TakeTurns
from batchwright.probing.measure.timing import from_rank_0, now
from batchwright.records import Estimate

WORTHWHILE = 0.99
"""The second way is chosen where a step takes at most this share of its time in the first. The
wrong choice is to cost 3 % at most (`benchmarks.first_contact`)."""

MIN_SECONDS = 1.0
"""Least seconds for a comparison, however small the budget: with less time the batch would be so
small that a step is mostly its fixed time."""

_MIN_ROUNDS, _MAX_ROUNDS = 3, 25
_CAUTION = 2  # factor on the interval for stopping early: one of many looks may mislead by chance

MIN_TURNS = 2 * _MIN_ROUNDS + 1
"""Least turns of each way, with the first one, which does not count."""

_FIRST_BATCH = 8  # of the step that shows the time of a sample

Turn = Callable[[], float]
"""Takes a few steps and returns the seconds of one, the mean over the workers."""

Switch = Callable[..., None]
"""Called as switch(on=...): puts the second way of computing on or off."""


def compare(
    turns: Sequence[Turn], may_go_on: Callable[[], bool]
) -> tuple[tuple[list[float], list[float]], Estimate]:
    r"""Seconds of every turn of A and of B, and the ratio of B to A with its 95 % interval.

    Each round is A, B, B, A, and :math:`r = \sqrt{B_1 B_2 / (A_1 A_2)}`; the ratio is the geometric
    mean over the rounds, with the interval of Student's t for :math:`\ln r`.

    Args:
        turns: A and B.
        may_go_on: Whether there is time, asked after each round from the third on. The rounds end
            earlier once the ratio is clearly below `WORTHWHILE` or above 1.
    """
    first, second = turns
    times: tuple[list[float], list[float]] = ([], [])
    logs: list[float] = []
    for turn in turns:
        turn()  # warm-up: kernels are chosen, memory is touched
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
    """A function that says whether ``seconds`` have not passed yet, the same on all workers."""
    began = now(group.device)
    return lambda: bool(from_rank_0(group, int(now(group.device) - began < seconds)))


def compare_switched(
    bench: Bench, supply: Callable[[], Batch], switch: Switch, seconds: float
) -> tuple[tuple[list[float], list[float]], Estimate]:
    """`compare` of steps with ``switch`` off (A) and on (B), for about ``seconds``."""

    def turn(*, on: bool) -> Turn:
        def take() -> float:
            switch(on=on)
            return step_seconds(bench, supply)

        return take

    return compare([turn(on=False), turn(on=True)], time_left(bench.group, seconds))


def step_seconds(bench: Bench, supply: Callable[[], Batch]) -> float:
    """Seconds of one step, the mean over the workers."""
    return fmean(bench.group.gather(sum(bench.step(supply))))


def affordable_batch(bench: Bench, command: TakeTurns) -> int:
    """The largest local batch up to the wanted one that fits and is compared in about that time."""
    resolution, wanted = command.resolution, command.wanted_batch_size
    size = _fitting(bench, resolution, min(_FIRST_BATCH, wanted))
    supply = bench.supply(size, resolution)
    bench.step(supply)
    each = sum(bench.step(supply)) / size
    room = max(command.seconds, MIN_SECONDS) / (2 * MIN_TURNS * each)
    return _fitting(bench, resolution, from_rank_0(bench.group, max(size, min(wanted, int(room)))))


def _fitting(bench: Bench, resolution: int, size: int) -> int:
    """``size`` samples, halved until a step fits the memory of all workers."""
    while size > SMALLEST_BATCH and not bench.try_step(bench.supply(size, resolution)):
        size = max(SMALLEST_BATCH, size // 2)
    return size
