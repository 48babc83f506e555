"""Whether passes are replayed from CUDA graphs: decided by timing the same step in both ways."""

from __future__ import annotations

from statistics import median

from batchwright.probing.bench import Bench
from batchwright.probing.commands import Replay
from batchwright.probing.measure.comparison import (
    WORTHWHILE,
    affordable_batch,
    compare_switched,
    step_seconds,
)
from batchwright.records import GraphTimes


def compare_graphs(bench: Bench, command: Replay) -> GraphTimes:
    """Times and choice, the same on all workers; ``bench`` neither compiles nor recomputes."""
    size = affordable_batch(bench, command)
    supply = bench.supply(size, command.resolution)
    found = GraphTimes(
        resolution=command.resolution,
        local_batch_size=size,
        plain_seconds=step_seconds(bench, supply),
        chosen=False,
    )
    bench.graphs.switch(on=True)
    step_seconds(bench, supply)
    everyone = bench.group.gather((bench.graphs.holds, bench.graphs.failure))
    if not all(holds for holds, _ in everyone):  # where one worker cannot replay, none does
        bench.graphs.switch(on=False)
        return found.model_copy(update={"failure": next((why for _, why in everyone if why), "")})
    times, ratio = compare_switched(bench, supply, bench.graphs.switch, command.seconds)
    chosen = ratio.value <= WORTHWHILE
    bench.graphs.switch(on=chosen)
    plain, replayed = map(median, times)
    return found.model_copy(
        update={
            "plain_seconds": plain,
            "replayed_seconds": replayed,
            "ratio": ratio,
            "chosen": chosen,
        }
    )
