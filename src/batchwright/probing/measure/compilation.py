"""Compiled or not: decided by what compiling takes, and by what it saves over the whole training.

a few plain steps: how long the training takes without --> if that is long enough, compile -->
both in turns, ABBA --> compiled where what is saved is more than what compiling takes
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from statistics import fmean, median
from typing import Protocol

from batchwright.probing.bench import SMALLEST_BATCH, Batch, Bench, sides_of
from batchwright.probing.measure.precision import MIN_SECONDS, compare
from batchwright.probing.measure.timing import follow, now
from batchwright.records import CompilationTimes, Estimate

SHORT = 120.0
"""Seconds of a training that is too short to be asked. Assumed: a tenth of it, which compiling may
save, is hardly more than what compiling takes."""


class Switch(Protocol):
    """Puts something on or off."""

    def __call__(self, *, on: bool) -> None:
        """Put it so."""


_FIRST_BATCH = 8
_ROUNDS = 7  # turns of each in the fewest rounds of a comparison, the first ones too


def compare_compilation(
    bench: Bench, resolution: int, wanted: int, *, asked: bool, seconds: float
) -> CompilationTimes:
    """What compiling takes and saves; the network computes as it is chosen afterwards.

    Args:
        bench: Neither compiled nor recomputing.
        resolution: Image side, in pixels.
        wanted: Samples of a step on each worker, as they are planned or fit the memory.
        asked: Whether it is compiled if that is possible, whatever it saves.
        seconds: To spend on the comparison; `MIN_SECONDS`, or three rounds of ABBA, if they take
            longer.

    Returns:
        The same on all workers.
    """
    size = affordable(bench, resolution, wanted, seconds)
    supply = bench.supply(size, resolution)
    mean_step(bench, supply)
    plain = mean_step(bench, supply)
    job, samples = bench.job, bench.train_samples
    training = job.epochs * ceil(samples / (size * bench.group.size)) * plain
    told = CompilationTimes(
        resolution=resolution,
        local_batch_size=size,
        training_seconds=training,
        plain_seconds=plain,
        asked=asked,
        chosen=False,
    )
    if not asked and training < SHORT:
        return told
    taken, failure = _compiled(bench, resolution, size, plain)
    told = told.model_copy(update={"compile_seconds": taken, "failure": failure})
    if failure:
        bench.compile(on=False)
        return told
    times, ratio = in_turns(bench, supply, bench.compile, seconds)
    surely_saved = (1 - ratio.high) * training  # it must not make the training longer
    chosen = asked or surely_saved > taken
    bench.compile(on=chosen)
    plain, compiled = map(median, times)
    return told.model_copy(
        update={
            "plain_seconds": plain,
            "compiled_seconds": compiled,
            "ratio": ratio,
            "chosen": chosen,
        }
    )


def _compiled(bench: Bench, resolution: int, size: int, plain: float) -> tuple[float, str]:
    """Seconds by which the first compiled steps took longer, and why compiling failed, if it did.

    A second batch tells whether others are compiled anew; other image sides mostly are, and a
    training that has them pays for each. The slowest worker counts: all wait. A worker whose
    compiler fails has failed all of them.
    """
    bench.compile(on=True)
    more = 0.0
    others = [(side, size) for side in sides_of(bench.job) if side != resolution]
    for side, batch in ((resolution, size), (resolution, max(SMALLEST_BATCH, size // 2)), *others):
        began = now(bench.device)
        bench.step(bench.supply(batch, side))
        usual = plain * batch * side**2 / (size * resolution**2)
        more += max(0.0, now(bench.device) - began - usual)
        if bench.compilation.failure:
            break
    told = bench.group.gather((more, bench.compilation.failure))
    return max(seconds for seconds, _ in told), next((why for _, why in told if why), "")


def mean_step(bench: Bench, supply: Callable[[], Batch]) -> float:
    """Seconds of a step, the mean over the workers."""
    return fmean(bench.group.gather(sum(bench.step(supply))))


def in_turns(
    bench: Bench, supply: Callable[[], Batch], switch: Switch, seconds: float
) -> tuple[tuple[list[float], list[float]], Estimate]:
    """Steps as they are and with what ``switch`` puts on, as `compare` has them, for so long."""
    began = now(bench.device)

    def turn(*, on: bool) -> Callable[[], float]:
        def take() -> float:
            switch(on=on)
            return mean_step(bench, supply)

        return take

    def may_go_on() -> bool:
        return bool(follow(bench.group, int(now(bench.device) - began < seconds)))

    return compare([turn(on=False), turn(on=True)], may_go_on)


def affordable(bench: Bench, resolution: int, wanted: int, seconds: float) -> int:
    """Samples of a step that fits, and can be taken in turns in the time there is."""
    size = _fitting(bench, resolution, min(_FIRST_BATCH, wanted))
    supply = bench.supply(size, resolution)
    bench.step(supply)
    each = sum(bench.step(supply)) / size
    room = max(seconds, MIN_SECONDS) / (2 * _ROUNDS * each)
    return _fitting(bench, resolution, follow(bench.group, max(size, min(wanted, int(room)))))


def _fitting(bench: Bench, resolution: int, size: int) -> int:
    """So many samples, or as many halves of them as it takes for a step to fit on all workers."""
    while size > SMALLEST_BATCH and not bench.try_step(bench.supply(size, resolution)):
        size = max(SMALLEST_BATCH, size // 2)
    return size
