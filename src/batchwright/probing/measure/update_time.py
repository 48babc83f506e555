"""Seconds of an optimizer's step, for the optimizers that a plan may choose from."""

from __future__ import annotations

import torch

from batchwright.errors import JobError
from batchwright.probing.batches import Batch
from batchwright.probing.bench import SMALLEST_BATCH, Bench
from batchwright.probing.measure.timing import from_rank_0, now, spread
from batchwright.records import UpdateTime
from batchwright.records.registries.optimizers import AUTO, OPTIMIZERS
from batchwright.training.step.normalization import Statistics
from batchwright.workload.task import build_optimizer

_LEAST, _MOST = 3, 50  # timed updates of an optimizer
_ALONE = 1.2  # factor by which the time of a single update may be off


def update_times(bench: Bench, *, seconds: float) -> tuple[UpdateTime, ...]:
    """Time the updates of each optimizer for about ``seconds``, on all workers at the same time.

    Each update follows a backward pass, as in a training. Updates straight after one another, with
    weights and moments still in the caches, would take a tenth less, SGD's half as long.

    An update that takes longer than ``seconds`` is timed once, without warming up: Muon takes a
    minute or two of a processor core to orthogonalize a classifier with 100 million weights.

    The bench's network has its former weights afterwards, and no gradients.

    Returns:
        Times by optimizer, without optimizers that have nothing to do on this network.
    """
    with torch.no_grad():
        weights = [parameter.detach().clone() for parameter in bench.trained]
        for parameter in bench.trained:
            parameter.grad = torch.full_like(parameter, 1e-3).normal_(std=1e-3)
        batch = bench.supply(SMALLEST_BATCH, bench.side)()
        statistics = Statistics(bench.network)
        statistics.keep()
        found = []
        for name in AUTO:
            try:
                optimizer = build_optimizer(
                    bench.network, bench.job, OPTIMIZERS[name].rate, name=name
                )
            except JobError:
                continue
            low, middle, high, repeats = _timed(bench, optimizer, batch, seconds)
            found.append(
                UpdateTime(
                    optimizer=name,
                    workers=bench.group.size,
                    seconds=middle,
                    low=low,
                    high=high,
                    repeats=repeats,
                )
            )
        for parameter, before in zip(bench.trained, weights, strict=True):
            parameter.copy_(before)
            parameter.grad = None
        statistics.end(updated=False)
    return tuple(found)


def _timed(
    bench: Bench, optimizer: torch.optim.Optimizer, batch: Batch, seconds: float
) -> tuple[float, float, float, int]:
    """Lower quartile, median and upper quartile of the seconds, and the number of updates."""
    first = _seconds(bench, optimizer)
    if from_rank_0(bench.group, int(first > seconds)):  # more would take too much of the probe
        return first / _ALONE, first, first * _ALONE, 1
    optimizer.step()
    started = now(bench.device)
    times: list[float] = []
    while len(times) < _MOST:
        _backward(bench, batch)
        times.append(_seconds(bench, optimizer))
        going = len(times) < _LEAST or now(bench.device) - started < seconds
        if not from_rank_0(bench.group, int(going)):  # equally many on all workers
            break
    return *spread(times), len(times)


def _seconds(bench: Bench, optimizer: torch.optim.Optimizer) -> float:
    start = now(bench.device)
    optimizer.step()
    return now(bench.device) - start


def _backward(bench: Bench, batch: Batch) -> None:
    """Take a backward pass and drop its gradients; the updates keep using theirs."""
    kept = [parameter.grad for parameter in bench.trained]
    for parameter in bench.trained:
        parameter.grad = None
    with torch.enable_grad():
        bench.loss(batch).backward()
    for parameter, grad in zip(bench.trained, kept, strict=True):
        parameter.grad = grad
