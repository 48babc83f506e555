"""Seconds of a forward pass without gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median

import torch

from batchwright.errors import TrainingError
from batchwright.probing.bench import Batch, Bench, if_it_fits
from batchwright.probing.measure.step_time import in_turns
from batchwright.probing.measure.timing import now
from batchwright.workload.host import release_memory
from batchwright.workload.task import set_training


def evaluation_seconds(bench: Bench, batch_size: int, repeats: int) -> float:
    """Seconds per image, loading or making batches included, after passes to warm up.

    At least one pass is timed, and loader processes load equally many each. Where memory runs out,
    half as many images are tried, as an evaluation does.

    Returns:
        The median; where loader processes feed the passes, whose batches come in bursts, the mean.

    Raises:
        TrainingError: Not even one image fits into memory.
    """
    while batch_size:
        found = if_it_fits(partial(_seconds, bench, batch_size, repeats))
        if found is not None:
            return found
        release_memory(bench.device)
        batch_size //= 2
    raise TrainingError("not even one image can be evaluated in the memory that is free")


def _seconds(bench: Bench, batch_size: int, repeats: int) -> float:
    feed = bench.evaluation_feed()
    if feed is None:
        return median(_passes(bench, bench.evaluation_supply(batch_size), 1, repeats)) / batch_size
    try:
        loaders = feed.loading.loaders
        unused, timed = passes(repeats, loaders)
        stream = bench.evaluation_stream(feed, batch_size, unused + timed + loaders)
        return fmean(_passes(bench, stream.__next__, unused, timed)) / batch_size
    finally:
        feed.close()


def passes(repeats: int, loaders: int) -> tuple[int, int]:
    """How many passes warm up, as many as are loaded ahead among them, and how many are timed.

    Example:
        >>> passes(4, 0), passes(4, 2), passes(4, 6)
        ((1, 4), (3, 4), (7, 6))
    """
    return 1 + loaders, in_turns(repeats, loaders)


def _passes(bench: Bench, supply: Callable[[], Batch], unused: int, repeats: int) -> list[float]:
    """Seconds of each of some passes, behind some that are not timed."""
    bench.network.eval()
    seconds = []
    with torch.no_grad():  # a module may keep what it makes, and is trained later
        for _ in range(unused + repeats):
            start = now(bench.device)
            bench.loss(supply())
            seconds.append(now(bench.device) - start)
    set_training(bench.network)
    return seconds[unused:]
