"""Seconds of a forward pass without gradients."""

from __future__ import annotations

from statistics import median

import torch

from batchwright.probing.bench import Bench
from batchwright.probing.timing import now
from batchwright.workload.task import set_training


def evaluation_seconds(bench: Bench, batch_size: int, repeats: int) -> float:
    """Median time per image, data path included, after one pass to warm up.

    Args:
        bench: Its network is in training mode again afterwards.
        batch_size: Images in one pass.
        repeats: Timed passes, at least 1.
    """
    supply = bench.evaluation_supply(batch_size)
    bench.network.eval()
    measured = []
    with torch.no_grad():  # a module may keep what it makes, and is trained later
        for _ in range(repeats + 1):
            start = now(bench.device)
            bench.loss(supply())
            measured.append((now(bench.device) - start) / batch_size)
    set_training(bench.network)
    return median(measured[1:])
