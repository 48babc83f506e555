"""Sweeps as they come out of runs, for tests that need one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from batchwright.records import Sweep, SweepCell, SweptKey
from batchwright.workflows.sweep.gathering import settings_of
from samples import make_data, make_job


def make_cell(
    values: Sequence[Any], seed: int, curve: Sequence[float], **changes: Any
) -> SweepCell:
    """A run that came to these accuracies, epoch by epoch."""
    fields = {
        "name": "-".join(map(str, [*values, seed])),
        "values": tuple(values),
        "seed": seed,
        "state": "done",
        "workers": 1,
        "global_batch_size": 64,
        "learning_rate": 0.1,
        "warmup_epochs": 0.0,
        "accuracy": curve[-1],
        "best_accuracy": max(curve),
        "best_epoch": list(curve).index(max(curve)) + 1,
        "accuracies": tuple(curve),
        "train_loss": 0.5,
        "training_seconds": 10.0 + seed,
    }
    return SweepCell(**(fields | changes))


def make_sweep(
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: int = 3,
    replaced: Mapping[int, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> Sweep:
    """A sweep whose accuracy rises with the first key's place, the epoch and the seed.

    Args:
        grid: Values by key.
        seeds: Runs of each setting.
        replaced: Fields of single cells, by their place.
        changes: Fields of the record.
    """
    grid = grid or {"warmup_epochs": [0.0, 1.0, 2.0], "global_batch": [256, 1024]}
    cells = []
    for seed in range(seeds):
        for values in product(*grid.values()):
            first = list(next(iter(grid.values()))).index(values[0])
            curve = [0.3 + 0.1 * epoch + 0.05 * first + 0.01 * seed for epoch in range(4)]
            cells.append(make_cell(values, seed, curve, **(replaced or {}).get(len(cells), {})))
    fields = {
        "folder": "sweeps/a",
        "job": make_job(workers=1),
        "data": make_data(),
        "keys": tuple(SweptKey(key=key, values=tuple(some)) for key, some in grid.items()),
        "seeds": tuple(range(seeds)),
        "cells": tuple(cells),
        "settings": settings_of(cells),
    }
    return Sweep(**(fields | changes))
