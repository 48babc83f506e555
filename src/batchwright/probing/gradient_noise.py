"""The gradient noise scale early in training, from gradients of parts of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from statistics import fmean

import torch
from torch import Tensor

from batchwright.prediction.noise_scale import estimate
from batchwright.probing.bench import Batch, Bench
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
    supply = bench.supply(part_size, resolution)
    start = now(bench.device)
    first = _estimate(bench, supply, part_size)
    each = now(bench.device) - start
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, int(seconds / each)))
    more = follow(bench.group, steps) - 1
    estimates = [first, *(_estimate(bench, supply, part_size) for _ in range(more))]
    finite = [(trace, signal) for trace, signal in estimates if isfinite(trace + signal)]
    if not finite:
        return None
    trace, signal = fmean(t for t, _ in finite), fmean(s for _, s in finite)
    return GradientNoise(
        noise_scale=trace / signal if trace > 0 and signal > 0 else None,
        trace=trace,
        sqr_norm=signal,
        relative_error=relative_error(finite),
        parts=parts,
        repeats=len(finite),
    )


def relative_error(estimates: Sequence[tuple[float, float]]) -> float | None:
    r"""Standard error of the ratio of two means, as a share of it, by the jackknife.

    With :math:`r_{-i}` the ratio without step i and n steps:
    :math:`\sigma^2 = \frac{n - 1}{n} \sum_i (r_{-i} - \bar r_{-i})^2` (Efron and Stein 1981).

    Args:
        estimates: tr(Sigma) and |G|^2 of each step.

    Returns:
        `None` with one step, or where a ratio without some step has no meaning.
    """
    n = len(estimates)
    traces, signals = sum(t for t, _ in estimates), sum(s for _, s in estimates)
    without = [(traces - trace, signals - signal) for trace, signal in estimates]
    if n < 2 or min(traces, signals, *(min(pair) for pair in without)) <= 0:
        return None
    ratios = [trace / signal for trace, signal in without]
    center = fmean(ratios)
    variance = (n - 1) / n * sum((ratio - center) ** 2 for ratio in ratios)
    return sqrt(variance) * signals / traces


def _estimate(bench: Bench, supply: Callable[[], Batch], part_size: int) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 from the parts of one step."""
    parts = PARTS_PER_WORKER * bench.group.size
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
    return estimate(
        weighted.item(), whole.square().sum().item(), parts=parts, batch=parts * part_size
    )
