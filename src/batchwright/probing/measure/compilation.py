"""Whether the network is compiled: decided by what compiling takes and saves in a whole training.

a few plain steps: how long the training takes without --> if that is long enough, compile -->
both in turns, ABBA --> compiled where it saves more than compiling takes
"""

from __future__ import annotations

from math import ceil
from statistics import median

from batchwright.probing.bench import SMALLEST_BATCH, Bench, sides_of
from batchwright.probing.commands import Compile
from batchwright.probing.measure.comparison import (
    affordable_batch,
    compare_switched,
    step_seconds,
)
from batchwright.probing.measure.timing import now
from batchwright.records import CompilationTimes

SHORT = 120.0
"""Seconds of a training below which compiling is not tried. Assumed: compiling may save a tenth of
them, which is hardly more than what it takes."""


def compare_compilation(bench: Bench, command: Compile) -> CompilationTimes:
    """Times and choice, the same on all workers; ``bench`` neither compiles nor recomputes.

    Where passes are replayed from CUDA graphs, compiled steps are compared with replayed ones, and
    are not replayed themselves.
    """
    replays, resolution = bench.graphs.on, command.resolution

    def switch(*, on: bool) -> None:
        bench.compile(on=on)
        bench.graphs.switch(on=replays and not on)

    size = affordable_batch(bench, command)
    supply = bench.supply(size, resolution)
    step_seconds(bench, supply)
    plain = step_seconds(bench, supply)
    job, samples = bench.job, bench.train_samples
    training = job.epochs * ceil(samples / (size * bench.group.size)) * plain
    found = CompilationTimes(
        resolution=resolution,
        local_batch_size=size,
        training_seconds=training,
        plain_seconds=plain,
        asked=command.asked,
        chosen=False,
    )
    if not command.asked and training < SHORT:
        return found
    switch(on=True)
    taken, failure = _compiled(bench, resolution, size, plain)
    found = found.model_copy(update={"compile_seconds": taken, "failure": failure})
    if failure:
        switch(on=False)
        return found
    times, ratio = compare_switched(bench, supply, switch, command.seconds)
    surely_saved = (1 - ratio.high) * training  # compiling must not make the training longer
    chosen = command.asked or surely_saved > taken
    switch(on=chosen)
    plain, compiled = map(median, times)
    return found.model_copy(
        update={
            "plain_seconds": plain,
            "compiled_seconds": compiled,
            "ratio": ratio,
            "chosen": chosen,
        }
    )


def _compiled(bench: Bench, resolution: int, size: int, plain: float) -> tuple[float, str]:
    """Seconds by which the first compiled steps took longer, and why compiling failed, if it did.

    A step with a second batch is included, as another batch may be compiled anew. Other image sides
    mostly are, so each side of the job counts. The slowest worker counts, as all others wait; and
    compiling fails for all where it fails for one.
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
    everyone = bench.group.gather((more, bench.compilation.failure))
    return max(seconds for seconds, _ in everyone), next((why for _, why in everyone if why), "")
