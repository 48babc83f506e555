"""Seconds of an optimizer's step, for those that a plan may choose from."""

from __future__ import annotations

import torch

from batchwright.errors import JobError
from batchwright.probing.batches import Batch
from batchwright.probing.bench import SMALLEST_BATCH, Bench
from batchwright.probing.measure.timing import follow, now, spread
from batchwright.records import UpdateTime
from batchwright.records.registries.optimizers import AUTO, OPTIMIZERS
from batchwright.training.step.normalization import Statistics
from batchwright.workload.task import build_optimizer

_LEAST, _MOST = 3, 50
_ALONE = 1.2  # how far one update alone may be off, as a factor


def update_times(bench: Bench, *, seconds: float) -> tuple[UpdateTime, ...]:
    """Time the update of each optimizer, all workers at the same time, for so many seconds each.

    Each follows a backward pass, as in a training. Straight after one another, with weights and
    moments still in the caches, updates take a tenth less, SGD's half.

    One that takes longer by itself is timed once, without warming up: Muon makes matrices of a
    classifier with 100 million weights orthogonal in a minute or two of a processor core.

    The bench's network is the same again afterwards, and it has no gradients.

    Returns:
        By optimizer; without those that have nothing to do on this network.
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
    first = _seconds(bench, optimizer)
    if follow(bench.group, int(first > seconds)):  # more of them would take too much of the probe
        return first / _ALONE, first, first * _ALONE, 1
    optimizer.step()
    started = now(bench.device)
    times: list[float] = []
    while len(times) < _MOST:
        _backward(bench, batch)
        times.append(_seconds(bench, optimizer))
        going = len(times) < _LEAST or now(bench.device) - started < seconds
        if not follow(bench.group, int(going)):  # all do as many
            break
    return *spread(times), len(times)


def _seconds(bench: Bench, optimizer: torch.optim.Optimizer) -> float:
    start = now(bench.device)
    optimizer.step()
    return now(bench.device) - start


def _backward(bench: Bench, batch: Batch) -> None:
    """A backward pass whose gradients are not kept: those of the updates stay as they are."""
    kept = [parameter.grad for parameter in bench.trained]
    for parameter in bench.trained:
        parameter.grad = None
    with torch.enable_grad():
        bench.loss(batch).backward()
    for parameter, grad in zip(bench.trained, kept, strict=True):
        parameter.grad = grad
