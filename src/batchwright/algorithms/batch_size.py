"""Candidate global batches, how they are compared, and the knee where doubling saves too little."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf


def as_compared(value: float) -> float:
    """A time, cost, share or accuracy as candidates are compared by it: to nine digits.

    In small micro-batches an epoch takes as long with any batch. Without this, the rounding errors
    of the sums would choose one of them.

    Example:
        >>> as_compared(101.01599999999999) == as_compared(101.01600000000002)
        True
    """
    return float(f"{value:.8e}")


def candidates(workers: int, most_global: int, *, least_local: int = 1) -> list[int]:
    """Global batches to consider: equal local batches in powers of two, and the largest one.

    Args:
        workers: Number of workers.
        most_global: Largest global batch that the data allows, in samples.
        least_local: Smallest local batch, in samples.

    Returns:
        Rising multiples of ``workers``; empty if the limits leave none.

    Example:
        >>> candidates(2, 143, least_local=16)
        [32, 64, 128, 142]
    """
    largest = most_global // workers
    powers = []
    local = 1
    while local <= largest:
        powers.append(local)
        local *= 2
    return [workers * local for local in sorted({*powers, largest}) if local >= least_local]


def steps_per_epoch(samples: int, global_batch: int, least: int) -> tuple[int, int]:
    """Steps in one epoch, and the samples of the last one.

    A remainder of fewer samples than the global batch is a step of its own if it has enough samples
    for all workers; else it is added to the step before.

    Args:
        samples: Training samples in an epoch.
        global_batch: Samples per step over all workers, at most ``samples``.
        least: Fewest samples a step can have over all workers.

    Example:
        >>> steps_per_epoch(1000, 64, 4), steps_per_epoch(1000, 333, 4)
        ((16, 40), (3, 334))
    """
    whole, tail = divmod(samples, global_batch)
    if tail == 0:
        return whole, global_batch
    return (whole + 1, tail) if tail >= least else (whole, global_batch + tail)


def knee_of_line(fixed: float, slope: float, doubling_gain: float) -> float:
    r"""Batch from which doubling saves at most a share of the time, where time is a line.

    Where a step of :math:`b` samples takes :math:`a b + \beta` seconds, so a sample takes
    :math:`a + \beta / b`, doubling saves at most :math:`\epsilon` from

    .. math:: b^* = \beta (1 - 2 \epsilon) / (2 \epsilon a)

    on.

    Args:
        fixed: :math:`\beta`, seconds per step, at least 0.
        slope: :math:`a`, seconds per sample, at least 0.
        doubling_gain: :math:`\epsilon`, a share in (0, 1).

    Returns:
        In samples; 0 where no doubling saves more, infinite where every doubling does.

    Example:
        >>> round(knee_of_line(0.035, 0.0005, 0.05))
        630
    """
    least = fixed * (1 - 2 * doubling_gain)
    if least <= 0:
        return 0.0
    most = 2 * doubling_gain * slope  # may be 0 with a tiny share
    return least / most if most > 0 else inf


def knee_point(
    batches: Iterable[int], seconds_per_sample: Callable[[int], float], doubling_gain: float
) -> int | None:
    r"""Smallest batch whose doubling saves at most a share of the time per sample.

    .. math:: 1 - \frac{t(2b) / 2b}{t(b) / b} \le \epsilon

    The rule needs no range of batches, so the answer does not move when candidates are added at
    either end, and the doubled batch need not be one of them.

    Args:
        batches: Candidates, in samples.
        seconds_per_sample: :math:`t(b) / b`, for the candidates and their doubles.
        doubling_gain: :math:`\epsilon`, a share in (0, 1).

    Returns:
        The batch; `None` if every doubling saves more than that share.
    """
    for batch in sorted(batches):
        saves = 1 - seconds_per_sample(2 * batch) / seconds_per_sample(batch)
        if as_compared(saves) <= doubling_gain:
            return batch
    return None


def kneedle(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The knee of a convex, falling curve by Kneedle: farthest from the line between its ends.

    Both axes are brought to [0, 1]; in 1 - (x + y), a local maximum is a knee once the curve has
    fallen below it by a mean step of x (S = 1) before it rises again. So the answer depends on the
    range and spacing of x: give batches as log2.

    Args:
        x: Rising, at least one value.
        y: One value for each.

    Returns:
        The x of the first knee; `None` if there is none.

    References:
        Satopaa et al., Finding a "Kneedle" in a Haystack, ICDCS Workshops 2011.
    """
    width, height = x[-1] - x[0], max(y) - min(y)
    if len(x) < 3 or height <= 0:
        return None
    difference = [
        1 - (one - x[0]) / width - (other - min(y)) / height
        for one, other in zip(x, y, strict=True)
    ]
    knee, threshold = None, 0.0
    for i in range(1, len(x) - 1):
        before, here, after = difference[i - 1 : i + 2]
        if here >= before and here >= after:
            knee, threshold = x[i], here - 1 / (len(x) - 1)
        elif here <= before and here <= after:
            knee = None
        if knee is not None and after < threshold:
            return knee
    return None
