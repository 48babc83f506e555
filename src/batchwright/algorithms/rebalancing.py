r"""Local batches that follow the workers' measured speeds, and not the noise in them.

A worker's step takes :math:`t_i = (b_i + o) / v_i` seconds: :math:`v_i` is its speed in samples per
second, and :math:`o` the fixed time of a step over the time per sample, in samples. All workers
finish together with

.. math:: b_i = v_i \frac{B + n o}{\sum_m v_m} - o

With :math:`o = 0` this is the published rule of dynamic batch size, whose shares are the last ones
over their times, normalized. It converges to the same shares some rounds later, as each of its
steps is too short where there is a fixed time.

docs/methods.md has the published rule and its relatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log, sqrt
from statistics import fmean, median

from batchwright.algorithms.partition import apportion
from batchwright.prediction.drift import QUARTILES_PER_DEVIATION

DEAD_BAND = 0.03
"""Largest change of a local batch, as a share, with which all batches are kept."""

SUDDEN = 3 * DEAD_BAND
"""Change of a worker's relative speed above which it counts at once, without smoothing, if it is
also above `CERTAIN` standard errors of its measurement."""

CERTAIN = 3.0
"""Standard errors of a measurement beyond which a change is hardly ever noise."""

SMOOTHING = 0.3
"""Weight of the newest measurement in the exponential mean."""

NOISE_BAND = 1.5 * sqrt(SMOOTHING / (2 - SMOOTHING))
"""Dead band over the standard error of a measurement: 1.5 standard errors of a smoothed speed,
whose variance is `SMOOTHING` / (2 - `SMOOTHING`) of that of a measurement."""

_MIN_CHANGE = 0.75  # samples; smaller changes would alternate between two whole numbers
_MIN_GROWTH = 0.25  # least relative change of batches that identifies the fixed time despite noise
_HALVINGS = 40  # bisections
_OF_JUMPS = 0.954  # median distance of two normal values, in standard deviations


def midmean(values: Sequence[float]) -> float:
    """Mean of the middle half of the values: an outlier moves it little, a change at once."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def speeds_of(
    batches: Sequence[int], seconds: Sequence[float], fixed_samples: float
) -> list[float]:
    """Speed of each worker, in samples per second, from a step's seconds of computing."""
    return [(batch + fixed_samples) / t for batch, t in zip(batches, seconds, strict=True)]


def published_speeds(samples: Sequence[int], seconds: Sequence[float]) -> list[float]:
    r"""Performance of each worker in an epoch, :math:`p_i = d_i / t_i`.

    The next share of a worker is its part of the sum. With times in proportion to samples, all
    workers take the same time after one epoch; with a fixed time in each step, after two to four.

    Args:
        samples: Samples :math:`d_i` of each worker in the epoch.
        seconds: Seconds :math:`t_i` of its computing in the epoch.

    References:
        Ye et al. 2020, arXiv 2007.11831.
    """
    return [count / time for count, time in zip(samples, seconds, strict=True)]


def noise_within(times: Sequence[Sequence[float]]) -> float:
    """Standard error of a worker's relative speed, by the scatter of the measured steps.

    Args:
        times: Seconds of each worker in each step; a single step has no scatter.
    """
    relative = [[one / mean for one in step] for step in times if (mean := fmean(step))]
    count = len(relative)
    widths = []
    for worker in zip(*relative, strict=True):
        ordered = sorted(worker)
        width = ordered[(3 * count - 1) // 4] - ordered[count // 4]
        widths.append(width / (ordered[count // 2] or 1.0))
    return fmean(widths) / QUARTILES_PER_DEVIATION / sqrt(count) if widths else 0.0


def noise_between(measured: Sequence[Mapping[str, float]]) -> float:
    """Standard error of a worker's relative speed, by the jumps between successive measurements.

    It uses the median jump, so that a single lasting change does not count as noise.

    Args:
        measured: Speeds by worker, of the same workers in each measurement; at least two.
    """
    relative = [
        [log(speed / mean) for speed in one.values()]
        for one in measured
        for mean in [fmean(one.values())]  # once: a simulation has 10,000 workers
    ]
    jumps = [
        abs(now - then)
        for before, after in pairwise(relative)
        for then, now in zip(before, after, strict=True)
    ]
    return median(jumps) / _OF_JUMPS


def followed(
    known: Mapping[str, float], measured: Mapping[str, float], noise: float = 0.0
) -> dict[str, float]:
    """Speeds after one more measurement of some workers.

    Only relative speeds change shares, so a change that all workers have in common (a machine that
    slows down for all) is divided out first. The rest is smoothed, unless a worker's relative speed
    changed by more than `SUDDEN` and by more than noise: then the measurement counts as it is.

    Args:
        known: Samples per second so far, by worker; other workers than measured are possible.
        measured: The newest measurement.
        noise: Standard error of the measurement, as a share.

    Returns:
        The speeds of all workers in either.
    """
    both = [worker for worker in measured if worker in known]
    if not both:
        return {**known, **measured}
    common = sum(measured[w] for w in both) / sum(known[w] for w in both)
    expected = {worker: common * speed for worker, speed in known.items()}
    bound = max(SUDDEN, CERTAIN * noise)
    sudden = any(abs(measured[w] / expected[w] - 1) > bound for w in both)
    weight = 1.0 if sudden else SMOOTHING
    smoothed = {w: expected[w] + weight * (measured[w] - expected[w]) for w in both}
    return {**expected, **measured, **smoothed}


def balanced(
    speeds: Sequence[float],
    batch: int,
    *,
    fixed_samples: float = 0.0,
    least: int | Sequence[int] = 1,
    most: int | Sequence[int] | None = None,
) -> list[int]:
    """Local batches of equal time, as whole numbers that sum to ``batch``.

    Args:
        speeds: Speed of each worker, in samples per second, positive.
        batch: Global batch, in samples.
        fixed_samples: Fixed time of a step over the time per sample, in samples.
        least: Fewest samples of a worker, one number for all or one for each.
        most: Most samples of a worker; the rest goes to others. Unset: no limit.

    Raises:
        ValueError: The bounds leave no way to reach ``batch``.
    """
    # The fixed time counts like further samples of every worker.
    fixed = round(fixed_samples)
    count = len(speeds)
    low = [least] * count if isinstance(least, int) else least
    high = [most or batch] * count if most is None or isinstance(most, int) else most
    shares = apportion(
        speeds,
        batch + fixed * count,
        least=[fixed + bound for bound in low],
        most=[fixed + bound for bound in high],
    )
    return [share - fixed for share in shares]


def worth_changing(current: Sequence[int], wanted: Sequence[int], noise: float = 0.0) -> bool:
    """Whether any local batch would change by more than the dead band and by more than noise.

    Args:
        current: Current local batches, in samples.
        wanted: Local batches by the smoothed speeds.
        noise: Standard error of a single measurement of the speeds, as a share.
    """
    band = max(DEAD_BAND, NOISE_BAND * noise)
    return any(
        abs(now - then) > max(band * then, _MIN_CHANGE)
        for then, now in zip(current, wanted, strict=True)
    )


def fixed_cost(
    before: tuple[Sequence[int], Sequence[float]],
    after: tuple[Sequence[int], Sequence[float]],
    noise: float = 0.0,
) -> float | None:
    r"""The fixed time of a step, in samples, from times before and after local batches changed.

    It is the :math:`o` with which the relative speeds of the workers stay the same. For the worker
    g that gained most and the worker l that lost most,

    .. math:: \frac{t'_g / t_g}{t'_l / t_l} = \frac{(b'_g + o) (b_l + o)}{(b_g + o) (b'_l + o)}

    whose right side falls as :math:`o` rises. It is searched between 0 and the mean local batch. If
    a speed changed meanwhile, the result is wrong but harmless: with any fixed time the shares
    converge to equal times.

    Args:
        before: Local batches, in samples, and seconds of each worker.
        after: Local batches and seconds of each worker after the change.
        noise: Standard error of the seconds, as a share.

    Returns:
        The fixed time in samples; `None` where the batches changed too little to identify it.
    """
    (old, old_seconds), (new, new_seconds) = before, after
    growth = [b / a for a, b in zip(old, new, strict=True)]
    gained, lost = growth.index(max(growth)), growth.index(min(growth))
    if growth[gained] < (1 + max(_MIN_GROWTH, CERTAIN * noise)) * growth[lost]:
        return None
    slowdown = [b / a for a, b in zip(old_seconds, new_seconds, strict=True)]
    ratio = slowdown[gained] / slowdown[lost]

    def expected(fixed: float) -> float:
        return (
            (new[gained] + fixed)
            / (old[gained] + fixed)
            * (old[lost] + fixed)
            / (new[lost] + fixed)
        )

    low, high = 0.0, sum(new) / len(new)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > ratio else (low, middle)
    return (low + high) / 2
