"""The gradient noise scale early in training, from gradients of parts of the training data.

    starting weights --> warm-up: steps on one half of the data, in random order --> gradients of
    parts of the other half, at the weights so far

At the starting weights gradients agree as they never do again: within the first thousand samples
the noise scale grows several times, and hardly in the rest of the first epoch. So it is measured
after some steps. These are taken anew, not those that were timed: how many of these there were, and
how often they saw the same samples, depends on the machine. No sample is in two parts, and none was
trained on, since what two parts share, or the weights know by heart, passes for signal.
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
from batchwright.probing.measure.timing import follow, now
from batchwright.records import GradientNoise

WARM_UP_SAMPLES = 2048
"""Most samples trained on before, by all workers; on five workloads the noise scale has come to
within a factor of two of the first epoch's by then, most of it in the first half."""

_FEWEST_WARM = (
    128  # trained on, or the scale is that of the starting weights: several times too low
)
_WARM_SAMPLES = 512  # trained on even if that takes longer than it should
_WARM_UP_SHARE = 0.5  # of the time
_LEAST = 16  # parts measured of all workers before one looks how well the scale is known
_MOST = 320  # parts measured, of all workers
_KNOWN, _VAGUE = 0.15, 0.5  # relative errors: below, time is saved; above, more is taken
_MAX_TIME = 4.0  # times the time there is, where there were too few samples or all is vague
_FEWEST = 8  # parts in all; where the data make no more, parts are smaller
_COLUMNS = 2**14


def measure_noise(
    bench: Bench, resolution: int, part_size: int, *, seconds: float
) -> GradientNoise | None:
    """Noise scale after a few steps from the starting weights; those of the steps stay.

    Parts have ``part_size`` samples, or fewer where the data are few.

    Returns:
        The estimate; `None` if no two parts' gradients were finite, the data do not make two, or
        time allowed too few steps before.
    """
    order = bench.batches.shuffled()
    measured, trained = order[: len(order) // 2], order[len(order) // 2 :]
    size = min(part_size, max(SMALLEST_BATCH, len(measured) // _FEWEST))
    most = min(_MOST, len(measured) // size) // bench.group.size  # equally many on all workers
    if most * bench.group.size < 2:
        return None
    parts = measured.split(size)[bench.group.rank :: bench.group.size][:most]
    seen = _warm_up(bench, trained, resolution, part_size, seconds=_WARM_UP_SHARE * seconds)
    noise = None
    if seen >= min(_FEWEST_WARM, len(trained) // 2):
        noise = _measured(bench, parts, resolution, seconds=(1 - _WARM_UP_SHARE) * seconds)
    feed = bench.batches.feed(bench.group.size)
    if feed is not None:
        finish_loading(bench, feed)
    return noise


def _measured(
    bench: Bench, parts: Sequence[Tensor], resolution: int, *, seconds: float
) -> GradientNoise | None:
    """The estimate from as many of this worker's ``parts``, and of the others', as it takes."""
    group = bench.group
    weights = sum(parameter.numel() for parameter in bench.trained)
    random = torch.Generator().manual_seed(0)  # for the same signs on all workers
    signs = torch.randint(2, (weights,), generator=random, dtype=torch.int8) * 2 - 1
    signs = signs.to(bench.device)
    batches = bench.batches.training_feed(group.size).training(parts, 0, resolution)
    began, time, late = now(bench.device), _MAX_TIME * seconds, 0
    rows: list[Tensor] = []
    noise: GradientNoise | None = None
    each = -(-_LEAST // group.size)  # of each worker
    for first in range(0, len(parts), each):
        sketches: list[Tensor] = []
        for _ in parts[first : first + each]:
            sketches.append(_sketch(bench, next(batches), signs))
            late = follow(group, int(now(bench.device) - began > time))
            if late:
                break
        own = torch.stack(sketches)
        everyone = own.new_zeros(group.size, *own.shape)
        everyone[group.rank] = own
        rows.append(group.sum(everyone).flatten(0, 1))
        noise = noise_of(torch.cat(rows), part_size=len(parts[0]))
        error = noise.relative_error if noise else None
        time = seconds * (_MAX_TIME if error is None or error > _VAGUE else 1)
        if late or follow(group, int(error is not None and error <= _KNOWN)):
            break
    return noise


def noise_of(gradients: Tensor, *, part_size: int) -> GradientNoise | None:
    r"""The noise scale that the gradients of parts of equal size show.

    Every pair of parts tells of the signal, so all go into one estimate. Its standard error is by
    the jackknife: with :math:`r_{-i}` the ratio without part i and n parts,
    :math:`\sigma^2 = \frac{n - 1}{n} \sum_i (r_{-i} - \bar r_{-i})^2` (Efron and Stein 1981).

    Args:
        gradients: One a row, or what keeps their inner products; rows that are not finite are left
            out.
        part_size: Samples in each part.

    Returns:
        Without a scale where its standard error would be as large as itself; `None` with fewer than
        two finite rows.
    """
    rows = gradients[gradients.isfinite().all(dim=1)].double()
    n = len(rows)
    if n < 2:
        return None
    total, norms = rows.sum(0), rows.square().sum(1)
    whole = total.square().sum()
    trace, signal = estimate(norms.mean(), whole / n**2, parts=n, batch=n * part_size)
    found, error = bool(trace > 0) and bool(signal > 0), None
    if found and n > 2:  # what is left without one part must be two
        traces, signals = estimate(
            (norms.sum() - norms) / (n - 1),
            (whole - 2 * rows @ total + norms) / (n - 1) ** 2,
            parts=n - 1,
            batch=(n - 1) * part_size,
        )
        ratios = traces / signals * signal / trace
        told = sqrt((n - 1) * float(ratios.var(correction=0)))
        found = bool((traces > 0).all()) and bool((signals > 0).all()) and told < 1
        error = told if found else None
    return GradientNoise(
        noise_scale=float(trace / signal) if found else None,
        trace=float(trace),
        sqr_norm=float(signal),
        relative_error=error,
        parts=n,
        repeats=1,
    )


def _warm_up(bench: Bench, indices: Tensor, resolution: int, size: int, *, seconds: float) -> int:
    """Train a little from the starting weights, on each of ``indices`` once at most.

    Returns:
        Samples trained on, by all workers.
    """
    group = bench.group
    bench.start_over()
    step = size * group.size
    steps = min(len(indices), WARM_UP_SAMPLES) // step
    if not steps:
        return 0
    own = [one[group.rank :: group.size] for one in indices[: steps * step].split(step)]
    stream = bench.batches.training_feed(group.size).training(own, 0, resolution)
    batches = chain([next(stream)], stream)  # before the clock runs: loader processes start
    began = now(bench.device)
    for done in range(steps):
        spent = (now(bench.device) - began) / seconds
        late = spent > (1 if done * step >= _WARM_SAMPLES else _MAX_TIME)
        if follow(group, int(done > 0 and late)):
            return done * step
        bench.step(batches.__next__)
    return steps * step


def _sketch(bench: Bench, batch: Batch, signs: Tensor) -> Tensor:
    """The gradient of one part, folded into `_COLUMNS` numbers.

    With random signs this keeps inner products, to within 1 / sqrt(columns) of the lengths (Alon,
    Matias and Szegedy 1996): far less than the parts scatter, and gradients of large networks need
    not all be kept.
    """
    loss = bench.scale.scaled(bench.loss(batch), 1.0)
    gradients = torch.autograd.grad(loss, bench.trained, materialize_grads=True)
    flat = torch.cat([gradient.float().flatten() for gradient in gradients])
    flat *= signs
    folded = functional.pad(flat, (0, -len(flat) % _COLUMNS)).view(-1, _COLUMNS).sum(0)
    return folded / bench.scale.scale
