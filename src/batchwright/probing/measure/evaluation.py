"""Seconds of a forward pass without gradients, and the accuracy of the untrained network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import TrainingError
from batchwright.probing.batches import Batch
from batchwright.probing.bench import Bench, if_it_fits
from batchwright.probing.commands import Evaluated
from batchwright.probing.measure.step_time import in_turns
from batchwright.probing.measure.timing import now
from batchwright.records import FirstAnswers
from batchwright.workload.host import release_memory
from batchwright.workload.task import set_training


def evaluate(bench: Bench, batch_size: int, repeats: int) -> Evaluated:
    """Time passes with the starting weights, which the network has afterwards.

    The time includes loading or making the batches, and leaves out warm-up passes. At least one
    pass is timed; loader processes load equally many batches each. Where memory runs out, half as
    many images are tried, as an evaluation does.

    Returns:
        The median of the passes, or, where loader processes deliver batches in bursts, their mean;
        and the network's answers in all passes.

    Raises:
        TrainingError: Not even one image fits into memory.
    """
    bench.start_over()
    while batch_size:
        evaluated = if_it_fits(partial(_evaluate, bench, batch_size, repeats))
        if evaluated is not None:
            return evaluated
        release_memory(bench.device)
        batch_size //= 2
    raise TrainingError("not even one image can be evaluated in the memory that is free")


def _evaluate(bench: Bench, batch_size: int, repeats: int) -> Evaluated:
    feed = bench.batches.evaluation_feed(bench.group.size)
    if feed is None:
        seconds, first = _passes(bench, bench.batches.evaluation_supply(batch_size), 1, repeats)
        return Evaluated(seconds_per_image=median(seconds) / batch_size, first_answers=first)
    try:
        loaders = feed.loading.loaders
        unused, timed = passes(repeats, loaders)
        stream = bench.batches.evaluation_stream(feed, batch_size, unused + timed + loaders)
        seconds, first = _passes(bench, stream.__next__, unused, timed)
        return Evaluated(seconds_per_image=fmean(seconds) / batch_size, first_answers=first)
    finally:
        feed.close()


def passes(repeats: int, loaders: int) -> tuple[int, int]:
    """Number of warm-up passes, which use up the batches loaded ahead, and of timed passes.

    Example:
        >>> passes(4, 0), passes(4, 2), passes(4, 6)
        ((1, 4), (3, 4), (7, 6))
    """
    return 1 + loaders, in_turns(repeats, loaders)


def _passes(
    bench: Bench, supply: Callable[[], Batch], unused: int, repeats: int
) -> tuple[list[float], FirstAnswers]:
    """Seconds of each of ``repeats`` passes after ``unused`` untimed ones, and all answers."""
    bench.network.eval()
    seconds, given = [], []
    with torch.no_grad():  # a module may keep what it makes, and is trained later
        for _ in range(unused + repeats):
            start = now(bench.device)
            batch = supply()
            outputs, _ = bench.outputs_and_loss(batch)
            seconds.append(now(bench.device) - start)
            given.append((answers(outputs, batch[1], bench.classes), batch[1]))
    set_training(bench.network)
    return seconds[unused:], _first_answers(given)


def answers(outputs: Any, labels: Tensor, classes: int) -> Tensor | None:
    """The most likely class of each image, int64 (n,).

    `None` where there is no accuracy: the outputs are not a number for each class, or the labels
    are not classes.
    """
    are_classes = torch.is_tensor(outputs) and outputs.ndim == 2 and labels.ndim == 1
    return outputs.argmax(dim=1) if are_classes and outputs.shape[1] >= max(2, classes) else None


def _first_answers(given: list[tuple[Tensor | None, Tensor]]) -> FirstAnswers:
    """Accuracy over several batches, each with its answers and labels."""
    if any(found is None for found, _ in given):
        return FirstAnswers(images=0, right=0, by_chance=0.0)
    found = torch.cat([one for one, _ in given if one is not None]).cpu()
    labels = torch.cat([one for _, one in given]).cpu()
    alike = sum(float((found == one).sum() * (labels == one).sum()) for one in found.unique())
    return FirstAnswers(
        images=len(found), right=int((found == labels).sum()), by_chance=alike / len(found)
    )
