"""The gradient noise scale early in training, from gradients of parts of one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.prediction.noise_scale import NoiseState
from batchwright.probing.bench import Bench
from batchwright.probing.timing import follow, now
from batchwright.records import GradientNoise

PARTS_PER_WORKER = 4
_MOST_STEPS, _LEAST_STEPS = 40, 4


def measure_noise(
    bench: Bench, resolution: int, part_size: int, *, seconds: float
) -> GradientNoise | None:
    """Noise scale at the current weights, which stay as they are.

    Args:
        bench: What is measured; a few steps should have been trained.
        resolution: Image side, in pixels.
        part_size: Samples in each part.
        seconds: Time to spend.

    Returns:
        The estimate; `None` if no gradient was finite, or there is nothing but one part.
    """
    parts = PARTS_PER_WORKER * bench.group.size
    start = now(bench.device)
    state = _add_step(bench, NoiseState(), resolution, part_size)
    each = now(bench.device) - start
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, int(seconds / each)))
    for _ in range(follow(bench.group, steps) - 1):
        state = _add_step(bench, state, resolution, part_size)
    if not state.updates:
        return None
    return GradientNoise(
        noise_scale=state.noise_scale,
        trace=state.trace,
        sqr_norm=state.sqr_norm,
        parts=parts,
        repeats=state.updates,
    )


def _add_step(bench: Bench, state: NoiseState, resolution: int, part_size: int) -> NoiseState:
    parts = PARTS_PER_WORKER * bench.group.size
    supply = bench.supply(part_size, resolution)
    total = torch.zeros(1, device=bench.device)
    mean: list[Tensor] = []
    for _ in range(PARTS_PER_WORKER):
        loss = bench.loss(supply())
        gradients = torch.autograd.grad(loss, bench.trained, materialize_grads=True)
        total += sum(gradient.float().square().sum() for gradient in gradients)
        shares = [gradient.float() / parts for gradient in gradients]
        mean = [m + s for m, s in zip(mean, shares, strict=True)] if mean else shares
    # One message: the batch's mean gradient, and S with equal parts.
    message = torch.cat([*(m.flatten() for m in mean), total / parts])
    bench.group.sum(message)
    whole, weighted = message[:-1], message[-1]
    return state.update(
        weighted.item(), whole.square().sum().item(), parts=parts, batch=parts * part_size
    )
