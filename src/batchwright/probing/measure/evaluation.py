"""Seconds of a forward pass without gradients, and what the network answers before any training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchwright.errors import TrainingError
from batchwright.probing.batches import Batch
from batchwright.probing.bench import Bench, if_it_fits
from batchwright.probing.measure.step_time import in_turns
from batchwright.probing.measure.timing import now
from batchwright.records import FirstAnswers
from batchwright.workload.host import release_memory
from batchwright.workload.task import set_training


class Evaluation(NamedTuple):
    """What passes over held-out images told."""

    seconds_per_image: float
    first_answers: FirstAnswers


def evaluate(bench: Bench, batch_size: int, repeats: int) -> Evaluation:
    """Time passes with the starting weights, which the network has afterwards.

    Loading or making batches is included, passes to warm up are not. At least one pass is timed,
    and loader processes load equally many each. Where memory runs out, half as many images are
    tried, as an evaluation does.

    Returns:
        The median; where loader processes feed the passes, whose batches come in bursts, the mean.
        And the answers of all passes.

    Raises:
        TrainingError: Not even one image fits into memory.
    """
    bench.start_over()
    while batch_size:
        found = if_it_fits(partial(_evaluate, bench, batch_size, repeats))
        if found is not None:
            return found
        release_memory(bench.device)
        batch_size //= 2
    raise TrainingError("not even one image can be evaluated in the memory that is free")


def _evaluate(bench: Bench, batch_size: int, repeats: int) -> Evaluation:
    feed = bench.batches.evaluation_feed(bench.group.size)
    if feed is None:
        seconds, first = _passes(bench, bench.batches.evaluation_supply(batch_size), 1, repeats)
        return Evaluation(median(seconds) / batch_size, first)
    try:
        loaders = feed.loading.loaders
        unused, timed = passes(repeats, loaders)
        stream = bench.batches.evaluation_stream(feed, batch_size, unused + timed + loaders)
        seconds, first = _passes(bench, stream.__next__, unused, timed)
        return Evaluation(fmean(seconds) / batch_size, first)
    finally:
        feed.close()


def passes(repeats: int, loaders: int) -> tuple[int, int]:
    """How many passes warm up, as many as are loaded ahead among them, and how many are timed.

    Example:
        >>> passes(4, 0), passes(4, 2), passes(4, 6)
        ((1, 4), (3, 4), (7, 6))
    """
    return 1 + loaders, in_turns(repeats, loaders)


def _passes(
    bench: Bench, supply: Callable[[], Batch], unused: int, repeats: int
) -> tuple[list[float], FirstAnswers]:
    """Seconds of each of some passes, behind some that are not timed; the answers of all."""
    bench.network.eval()
    seconds, told = [], []
    with torch.no_grad():  # a module may keep what it makes, and is trained later
        for _ in range(unused + repeats):
            start = now(bench.device)
            batch = supply()
            outputs, _ = bench.outputs_and_loss(batch)
            seconds.append(now(bench.device) - start)
            told.append((answers(outputs, batch[1], bench.classes), batch[1]))
    set_training(bench.network)
    return seconds[unused:], _first_answers(told)


def answers(outputs: Any, labels: Tensor, classes: int) -> Tensor | None:
    """The classes that a network takes images for; `None` where accuracy cannot be told.

    Then it gives no number for each class, or the labels are no classes.
    """
    told = torch.is_tensor(outputs) and outputs.ndim == 2 and labels.ndim == 1
    return outputs.argmax(dim=1) if told and outputs.shape[1] >= max(2, classes) else None


def _first_answers(told: list[tuple[Tensor | None, Tensor]]) -> FirstAnswers:
    """Of some batches, each with its labels."""
    if any(found is None for found, _ in told):
        return FirstAnswers(images=0, right=0, by_chance=0.0)
    found = torch.cat([one for one, _ in told if one is not None]).cpu()
    labels = torch.cat([one for _, one in told]).cpu()
    alike = sum(float((found == one).sum() * (labels == one).sum()) for one in found.unique())
    return FirstAnswers(
        images=len(found), right=int((found == labels).sum()), by_chance=alike / len(found)
    )
