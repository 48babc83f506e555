"""Seconds of an optimizer's step alone, for those that a plan may choose from."""

from __future__ import annotations

import torch

from batchwright.errors import JobError
from batchwright.probing.bench import Bench
from batchwright.probing.measure.timing import follow, now, spread
from batchwright.records import UpdateTime
from batchwright.records.registries.optimizers import AUTO, OPTIMIZERS
from batchwright.workload.task import build_optimizer

_WARM_UP, _LEAST, _MOST = 2, 3, 50


def update_times(bench: Bench, *, seconds: float) -> tuple[UpdateTime, ...]:
    """Time the update of each optimizer, all workers at the same time, for so many seconds each.

    The bench's weights are the same again afterwards, and it has no gradients.

    Returns:
        By optimizer; without those that have nothing to do on this network.
    """
    with torch.no_grad():
        weights = [parameter.detach().clone() for parameter in bench.trained]
        for parameter in bench.trained:
            parameter.grad = torch.full_like(parameter, 1e-3).normal_(std=1e-3)
        found = []
        for name in AUTO:
            try:
                optimizer = build_optimizer(
                    bench.network, bench.job, OPTIMIZERS[name].rate, name=name
                )
            except JobError:
                continue
            low, middle, high, repeats = _timed(bench, optimizer, seconds)
            found.append(
                UpdateTime(optimizer=name, seconds=middle, low=low, high=high, repeats=repeats)
            )
        for parameter, before in zip(bench.trained, weights, strict=True):
            parameter.copy_(before)
            parameter.grad = None
    return tuple(found)


def _timed(
    bench: Bench, optimizer: torch.optim.Optimizer, seconds: float
) -> tuple[float, float, float, int]:
    for _ in range(_WARM_UP):
        optimizer.step()
    started = now(bench.device)
    times: list[float] = []
    while len(times) < _MOST:
        start = now(bench.device)
        optimizer.step()
        times.append(now(bench.device) - start)
        going = len(times) < _LEAST or now(bench.device) - started < seconds
        if not follow(bench.group, int(going)):  # all do as many
            break
    return *spread(times), len(times)
