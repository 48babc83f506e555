"""The gradient noise scale early in training, from gradients of parts of the training data.

    starting weights --> warm-up: steps on one half of the data, in random order --> gradients of
    parts of the other half, at the weights so far

At the starting weights gradients agree as they never do again: within the first thousand samples
the noise scale grows several times, and hardly in the rest of the first epoch. So it is measured
after some steps from the starting weights. The timed steps do not serve for that: their number, and
how often they saw the same samples, depend on the machine. No sample is in two parts, and no sample
of a part was trained on: shared samples, or samples that the weights have memorized, would look
like signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.prediction.noise_scale import estimate
from batchwright.probing.batches import Batch
from batchwright.probing.bench import SMALLEST_BATCH, Bench
from batchwright.probing.measure.step_time import finish_loading
from batchwright.probing.measure.timing import from_rank_0, now
from batchwright.records import GradientNoise

WARM_UP_SAMPLES = 2048
"""Most samples of the warm-up, over all workers."""

# Fewest samples of the warm-up: with fewer, the scale is that of the starting weights, which is
# several times too low.
_FEWEST_WARM = 128
_WARM_SAMPLES = 512  # of the warm-up, even if they take longer than they should
_WARM_UP_SHARE = 0.5  # of the time, for the warm-up
_LEAST = 16  # parts over all workers before the error is looked at
_MOST = 320  # parts over all workers
_KNOWN, _VAGUE = 0.15, 0.5  # relative errors: measuring ends early below, takes longer above
_MAX_TIME = 4.0  # multiple of the planned time, while samples are too few or the error is vague
_FEWEST = 8  # parts at least; where the data are too few for that, parts are smaller
_COLUMNS = 2**14  # numbers that a gradient is folded into


def measure_noise(
    bench: Bench, resolution: int, part_size: int, *, seconds: float
) -> GradientNoise | None:
    """Noise scale after a few steps from the starting weights; the network keeps the new weights.

    Parts have ``part_size`` samples, or fewer where the data are few.

    Returns:
        The estimate; `None` if no two parts' gradients were finite, the data do not suffice for two
        parts, or the warm-up had time for too few steps.
    """
    order = bench.batches.shuffled()
    measured, trained = order[: len(order) // 2], order[len(order) // 2 :]
    size = min(part_size, max(SMALLEST_BATCH, len(measured) // _FEWEST))
    most = min(_MOST, len(measured) // size) // bench.group.size  # parts, the same on all workers
    if most * bench.group.size < 2:
        return None
    parts = measured.split(size)[bench.group.rank :: bench.group.size][:most]
    seen = _warm_up(bench, trained, resolution, part_size, seconds=_WARM_UP_SHARE * seconds)
    noise = None
    if seen >= min(_FEWEST_WARM, len(trained) // 2):
        noise = _measured(bench, parts, resolution, seconds=(1 - _WARM_UP_SHARE) * seconds)
    finish_loading(bench, bench.batches.feed(bench.group.size))
    return noise


def _measured(
    bench: Bench, parts: Sequence[Tensor], resolution: int, *, seconds: float
) -> GradientNoise | None:
    """The estimate from as many parts of all workers as its error needs.

    ``parts`` are indices of this worker's samples.
    """
    group = bench.group
    weights = sum(parameter.numel() for parameter in bench.trained)
    random = torch.Generator().manual_seed(0)  # the same signs on all workers
    signs = torch.randint(2, (weights,), generator=random, dtype=torch.int8) * 2 - 1
    signs = signs.to(bench.device)
    batches = bench.batches.training_feed(group.size).training(parts, 0, resolution)
    began, time, late = now(bench.device), _MAX_TIME * seconds, 0
    rows: list[Tensor] = []
    noise: GradientNoise | None = None
    each = -(-_LEAST // group.size)  # parts of each worker between two looks
    for first in range(0, len(parts), each):
        sketches: list[Tensor] = []
        for _ in parts[first : first + each]:
            sketches.append(_sketch(bench, next(batches), signs))
            late = from_rank_0(group, int(now(bench.device) - began > time))
            if late:
                break
        own = torch.stack(sketches)
        everyone = own.new_zeros(group.size, *own.shape)
        everyone[group.rank] = own
        rows.append(group.sum(everyone).flatten(0, 1))
        noise = noise_of(torch.cat(rows), part_size=len(parts[0]))
        error = noise.relative_error if noise else None
        time = seconds * (_MAX_TIME if error is None or error > _VAGUE else 1)
        if late or from_rank_0(group, int(error is not None and error <= _KNOWN)):
            break
    return noise


def noise_of(gradients: Tensor, *, part_size: int) -> GradientNoise | None:
    r"""The noise scale, estimated from the gradients of parts of equal size.

    Every pair of parts carries information on the signal, so all parts go into one estimate. Its
    standard error is by the jackknife: with :math:`r_{-i}` the ratio without part i and n parts,
    :math:`\sigma^2 = \frac{n - 1}{n} \sum_i (r_{-i} - \bar r_{-i})^2` (Efron and Stein 1981).

    Args:
        gradients: One gradient a row, (parts, weights), or projections that keep their inner
            products. Rows that are not finite are left out.
        part_size: Samples in each part.

    Returns:
        The estimate; its ``noise_scale`` is `None` where the standard error would be as large as
        the scale. `None` with fewer than two finite rows.
    """
    rows = gradients[gradients.isfinite().all(dim=1)].double()
    n = len(rows)
    if n < 2:
        return None
    total, norms = rows.sum(0), rows.square().sum(1)
    whole = total.square().sum()
    trace, signal = estimate(norms.mean(), whole / n**2, parts=n, batch=n * part_size)
    found, error = bool(trace > 0) and bool(signal > 0), None
    if found and n > 2:  # leaving one part out must leave two
        traces, signals = estimate(
            (norms.sum() - norms) / (n - 1),
            (whole - 2 * rows @ total + norms) / (n - 1) ** 2,
            parts=n - 1,
            batch=(n - 1) * part_size,
        )
        ratios = traces / signals * signal / trace
        relative = sqrt((n - 1) * float(ratios.var(correction=0)))
        found = bool((traces > 0).all()) and bool((signals > 0).all()) and relative < 1
        error = relative if found else None
    return GradientNoise(
        noise_scale=float(trace / signal) if found else None,
        trace=float(trace),
        sqr_norm=float(signal),
        relative_error=error,
        parts=n,
        repeats=1,
    )


def _warm_up(bench: Bench, indices: Tensor, resolution: int, size: int, *, seconds: float) -> int:
    """Train briefly from the starting weights; returns the samples seen, over all workers.

    Each of the samples ``indices`` is taken once at most.
    """
    group = bench.group
    bench.start_over()
    step = size * group.size
    steps = min(len(indices), WARM_UP_SAMPLES) // step
    if not steps:
        return 0
    own = [one[group.rank :: group.size] for one in indices[: steps * step].split(step)]
    stream = bench.batches.training_feed(group.size).training(own, 0, resolution)
    batches = chain([next(stream)], stream)  # loader processes start before the clock runs
    began = now(bench.device)
    for done in range(steps):
        spent = (now(bench.device) - began) / seconds
        late = spent > (1 if done * step >= _WARM_SAMPLES else _MAX_TIME)
        if from_rank_0(group, int(done > 0 and late)):
            return done * step
        bench.step(batches.__next__)
    return steps * step


def _sketch(bench: Bench, batch: Batch, signs: Tensor) -> Tensor:
    """The gradient of one part, folded into `_COLUMNS` numbers, float32 (columns,).

    With random signs the folding keeps inner products to within 1 / sqrt(columns) of the lengths
    (Alon, Matias and Szegedy 1996). That is far less than the parts scatter, and gradients of large
    networks take little memory.
    """
    loss = bench.scale.scaled(bench.loss(batch), 1.0)
    gradients = torch.autograd.grad(loss, bench.trained, materialize_grads=True)
    flat = torch.cat([gradient.float().flatten() for gradient in gradients])
    flat *= signs
    folded = functional.pad(flat, (0, -len(flat) % _COLUMNS)).view(-1, _COLUMNS).sum(0)
    return folded / bench.scale.scale
