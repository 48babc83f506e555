"""Replayed from CUDA graphs or not: decided by timing the same step both ways, in turns."""

from __future__ import annotations

from statistics import median

from batchwright.probing.bench import Bench
from batchwright.probing.measure.comparison import (
    WORTHWHILE,
    affordable_batch,
    compare_switched,
    step_seconds,
)
from batchwright.records import GraphTimes


def compare_graphs(bench: Bench, resolution: int, wanted: int, *, seconds: float) -> GraphTimes:
    """What replaying a step's passes saves; afterwards passes are replayed, or not, as chosen.

    Args:
        bench: Neither compiled nor recomputing.
        resolution: Image side, in pixels.
        wanted: Samples of a step on each worker, as they are planned or fit the memory.
        seconds: To spend on the comparison; three rounds of ABBA, if they take longer.

    Returns:
        The same on all workers.
    """
    size = affordable_batch(bench, resolution, wanted, seconds)
    supply = bench.supply(size, resolution)
    told = GraphTimes(
        resolution=resolution,
        local_batch_size=size,
        plain_seconds=step_seconds(bench, supply),
        chosen=False,
    )
    bench.graphs.switch(on=True)
    step_seconds(bench, supply)
    everyone = bench.group.gather((bench.graphs.holds, bench.graphs.failure))
    if not all(holds for holds, _ in everyone):  # what one worker cannot replay, none does
        bench.graphs.switch(on=False)
        return told.model_copy(update={"failure": next((why for _, why in everyone if why), "")})
    times, ratio = compare_switched(bench, supply, bench.graphs.switch, seconds)
    chosen = ratio.value <= WORTHWHILE
    bench.graphs.switch(on=chosen)
    plain, replayed = map(median, times)
    return told.model_copy(
        update={
            "plain_seconds": plain,
            "replayed_seconds": replayed,
            "ratio": ratio,
            "chosen": chosen,
        }
    )
