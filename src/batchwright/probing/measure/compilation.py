"""Compiled or not: decided by what compiling takes, and by what it saves over the whole training.

a few plain steps: how long the training takes without --> if that is long enough, compile -->
both in turns, ABBA --> compiled where what is saved is more than what compiling takes
"""

from __future__ import annotations

from math import ceil
from statistics import median

from batchwright.probing.bench import SMALLEST_BATCH, Bench, sides_of
from batchwright.probing.measure.comparison import (
    affordable_batch,
    compare_switched,
    step_seconds,
)
from batchwright.probing.measure.timing import now
from batchwright.records import CompilationTimes

SHORT = 120.0
"""Seconds of a training that is too short to be asked. Assumed: a tenth of it, which compiling may
save, is hardly more than what compiling takes."""


def compare_compilation(
    bench: Bench, resolution: int, wanted: int, *, asked: bool, seconds: float
) -> CompilationTimes:
    """What compiling takes and saves; the network computes as it is chosen afterwards.

    Where passes are replayed from CUDA graphs, it is compared with that, and goes without.

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
    replays = bench.graphs.on

    def switch(*, on: bool) -> None:
        bench.compile(on=on)
        bench.graphs.switch(on=replays and not on)

    size = affordable_batch(bench, resolution, wanted, seconds)
    supply = bench.supply(size, resolution)
    step_seconds(bench, supply)
    plain = step_seconds(bench, supply)
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
    switch(on=True)
    taken, failure = _compiled(bench, resolution, size, plain)
    told = told.model_copy(update={"compile_seconds": taken, "failure": failure})
    if failure:
        switch(on=False)
        return told
    times, ratio = compare_switched(bench, supply, switch, seconds)
    surely_saved = (1 - ratio.high) * training  # it must not make the training longer
    chosen = asked or surely_saved > taken
    switch(on=chosen)
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
