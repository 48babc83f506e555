r"""Two batch sizes at once: the small batch, and each worker's part of the data.

A step of x samples takes :math:`a x + b` seconds on every worker, so d samples take about
:math:`(a + b / x) \, d`. In a round :math:`n = n_L + n_S` workers together go through the d samples
once, and all end at the same time. A round may take k times as long as with the large batch alone
(Lu et al. 2025, arXiv 2509.26092, eq. 1 to 8):

.. math::
    T = k \, (a + b / B_L) \, d / n, \quad d_L = k d / n, \quad d_S = (d - n_L d_L) / n_S, \quad
    B_S = \frac{b}{T / d_S - a}

With workers of unequal speed, :math:`n_L` and :math:`n_S` are sums of relative speeds, and
:math:`d_L, d_S` are the samples of a worker of speed 1.

Beyond the paper, the fixed time may differ, too: worker i takes :math:`(a x + o_i b) / v_i`. With
the samples a second of a group, :math:`R_G(x) = \sum_{i \in G} v_i / (a + o_i b / x)`:

.. math::
    T = k \, d / R_{L+S}(B_L), \quad T R_S(B_S) = d - T R_L(B_L)

As :math:`\sum_i o_i b \, s_i = T \sum_i v_i - a d` for :math:`s_i` steps of worker i, workers of
equal overhead make the same number of steps together in the same time, however many of them have
the small batch. Otherwise a step costs least where :math:`o_i` is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite, sqrt
from typing import Literal

from batchwright.algorithms.partition import apportion
from batchwright.errors import PlanError

Rounding = Literal["truncate", "round"]

_NARROW = 1e-6  # relative width at which the bisection for the small batch ends


@dataclass(frozen=True)
class Relative:
    """A worker relative to a usual one."""

    speed: float  # speed v over that of a usual worker
    overhead: float = 1.0  # fixed time o of a step over that of a usual worker with the same speed


@dataclass(frozen=True)
class Pair:
    """The small batch, and the samples of both groups; `None` where a group has no workers."""

    small_batch: int | None  # local batch B_S of a small-batch worker, in samples
    large_samples: int | None  # samples d_L of a large-batch worker in a round
    small_samples: int | None  # samples d_S of a small-batch worker in a round
    factor: float  # d_S / d_L, the weight of a small-batch worker's model; 1 if there is one group
    round_seconds: float  # seconds of a round, before rounding to whole samples


def solve(
    a: float,
    b: float,
    large_batch: int,
    *,
    small_workers: float,
    large_workers: float,
    extra_time: float,
    samples: int,
    rounding: Rounding = "round",
    least: int = 1,
) -> Pair:
    """The small batch and both groups' samples per round; equations at the head of this module.

    First d_L becomes a whole number, then d_S is computed from that and becomes one, then B_S from
    the unrounded time of a round: the order that gives the published tables.

    Args:
        a: Seconds per sample, not negative.
        b: Fixed seconds per step.
        large_batch: Local batch B_L of a large-batch worker, in samples.
        small_workers: Number of small-batch workers, or the sum of their speeds.
        large_workers: Number of large-batch workers, or the sum of their speeds.
        extra_time: Time k of a round over that with large batches alone, at least 1.
        samples: Training samples d of an epoch.
        rounding: ``truncate`` drops fractions, as in the paper's tables 2 and 3; ``round`` takes
            the nearest whole number, as in its table 6.
        least: Fewest samples that a worker can train on.

    Returns:
        The pair; with ``extra_time`` 1 both batches are the same.

    Raises:
        PlanError: No such pair exists; the message names the largest extra time with a pair.

    Example:
        >>> solve(0.00056607, 0.014041204, 500, small_workers=1, large_workers=3, extra_time=1.05,
        ...       samples=50_000, rounding="truncate")
        ... # doctest: +ELLIPSIS
        Pair(small_batch=83, large_samples=13125, small_samples=10625, factor=0.809..., ...)
    """
    _check_line(a, b)
    whole = floor if rounding == "truncate" else _nearest
    workers = small_workers + large_workers
    alone = (a + b / large_batch) * samples / workers
    if not small_workers:
        share = whole(samples / workers)
        _check_share("large", large_batch, share, large_workers)
        return Pair(None, share, None, 1.0, alone)
    _check_fixed(b)
    most = largest_extra_time(
        a, b, large_batch, small_workers=small_workers, large_workers=large_workers, least=least
    )
    if large_workers and extra_time >= workers / large_workers:
        raise PlanError(
            f"dual.extra_time={extra_time:g} leaves no samples for the {small_workers:g} "
            f"of {workers:g} workers that have the small batch: it has to be below "
            f"{workers / large_workers:.4g}, and with batches of at least {least} at most "
            f"{_shown_below(most)}"
        )
    large_samples: int | None = None
    if large_workers:
        large_samples = whole(extra_time * samples / workers)
    rest = samples if large_samples is None else samples - large_workers * large_samples
    small_samples = whole(rest / small_workers)
    small_batch = large_batch
    if extra_time > 1 and small_samples > 0:
        spare = extra_time * alone / small_samples - a  # fixed seconds a sample may take
        if spare > b / large_batch:  # else rounding has used up the extra time
            small_batch = whole(b / spare)
    if small_batch < least or small_samples < 1:
        raise PlanError(
            f"dual.extra_time={extra_time:g} with the small batch on {small_workers:g} of "
            f"{workers:g} workers wants a local batch below {least}: give at most "
            f"{_shown_below(most)}, or more small-batch workers"
        )
    if large_samples is not None:
        _check_share("large", large_batch, large_samples, large_workers)
    _check_share("small", small_batch, small_samples, small_workers)
    factor = 1.0 if large_samples is None else small_samples / large_samples
    return Pair(small_batch, large_samples, small_samples, factor, extra_time * alone)


def solve_unlike(
    a: float,
    b: float,
    large_batch: int,
    *,
    small: Sequence[Relative],
    large: Sequence[Relative],
    extra_time: float,
    samples: int,
    rounding: Rounding = "round",
    least: int = 1,
) -> Pair:
    """`solve` for workers whose fixed times differ; equations at the head of this module.

    Args:
        a: Seconds per sample of a usual worker, not negative.
        b: Its fixed seconds per step.
        large_batch: As for `solve`.
        small: The small-batch workers.
        large: The large-batch workers.
        extra_time: As for `solve`.
        samples: As for `solve`.
        rounding: As for `solve`.
        least: As for `solve`.

    Returns:
        The pair; its samples are those of a worker of speed 1, on average over the group.

    Raises:
        PlanError: As `solve`.

    Example:
        >>> usual, light = Relative(1.0), Relative(1.0, overhead=0.1)
        >>> pair = solve_unlike(1.0, 100.0, 100, large=[usual], small=[light], extra_time=1.02,
        ...                     samples=10_000)
        >>> pair.small_batch, pair.large_samples, pair.small_samples
        (74, 3619, 6381)
    """
    of_small, of_large = (sum(worker.speed for worker in group) for group in (small, large))
    _check_line(a, b)
    whole = floor if rounding == "truncate" else _nearest
    alone = samples / _rate(a, b, large_batch, [*large, *small])
    if not small:
        share = whole(samples / of_large)
        _check_share("large", large_batch, share, of_large)
        return Pair(None, share, None, 1.0, alone)
    _check_fixed(b)
    most = largest_extra_time_unlike(a, b, large_batch, small=small, large=large, least=least)
    if extra_time > most:
        raise PlanError(
            f"dual.extra_time={extra_time:g} with the small batch on {len(small)} of "
            f"{len(small) + len(large)} workers wants a local batch below {least}: give at most "
            f"{_shown_below(most)}, or more small-batch workers"
        )
    seconds = extra_time * alone
    done = seconds * _rate(a, b, large_batch, large)  # samples of the large-batch workers
    wanted = (samples - done) / seconds
    low, high = float(least), float(large_batch)
    while high - low > _NARROW * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _rate(a, b, middle, small) > wanted else (middle, high)
    small_batch = whole(high)
    small_samples = whole((samples - done) / of_small)
    _check_share("small", small_batch, small_samples, of_small)
    if not large:
        return Pair(small_batch, None, small_samples, 1.0, seconds)
    large_samples = whole(done / of_large)
    _check_share("large", large_batch, large_samples, of_large)
    factor = small_samples / large_samples
    return Pair(small_batch, large_samples, small_samples, factor, seconds)


def largest_extra_time_unlike(
    a: float,
    b: float,
    large_batch: int,
    *,
    small: Sequence[Relative],
    large: Sequence[Relative],
    least: int = 1,
) -> float:
    r"""`largest_extra_time` for workers whose fixed times differ.

    .. math:: k = R_{L+S}(B_L) / (R_L(B_L) + R_S(m))
    """
    if not small:
        return 1.0
    fastest = _rate(a, b, large_batch, [*large, *small])
    return fastest / (_rate(a, b, large_batch, large) + _rate(a, b, least, small))


def weights_in_time(
    a: float, b: float, batch: int, workers: Sequence[Relative]
) -> tuple[float, ...]:
    """Samples of each worker of a group in the same time, scaled to the sum of their speeds.

    >>> weights_in_time(1.0, 10.0, 10, [Relative(1.0), Relative(0.5)])
    (1.0, 0.5)
    """
    if len({worker.overhead for worker in workers}) <= 1:
        return tuple(worker.speed for worker in workers)
    rates = [_rate(a, b, batch, [worker]) for worker in workers]
    speeds, all_rates = sum(worker.speed for worker in workers), sum(rates)
    return tuple(speeds * rate / all_rates for rate in rates)


def _rate(a: float, b: float, batch: float, workers: Sequence[Relative]) -> float:
    """Samples a second of some workers together."""
    return sum(worker.speed / (a + worker.overhead * b / batch) for worker in workers)


def largest_extra_time(
    a: float,
    b: float,
    large_batch: int,
    *,
    small_workers: float,
    large_workers: float,
    least: int = 1,
) -> float:
    r"""Largest extra time at which the small batch is not below ``least``.

    Solving :math:`B_S = m` for k, with :math:`\rho = (a + b / B_L) / (a + b / m)`:

    .. math:: k = n / (n_L + \rho \, n_S)

    which is below :math:`n / n_L`, where small-batch workers would have no samples left.

    Example:
        >>> round(largest_extra_time(1, 9, 9, small_workers=1, large_workers=1), 3)
        1.667
    """
    if not small_workers:
        return 1.0
    share = (a + b / large_batch) / (a + b / least)
    return (small_workers + large_workers) / (large_workers + share * small_workers)


def chord(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Seconds per sample and fixed seconds of the line through two (batch, seconds of a step).

    Raises:
        PlanError: It is one batch twice.

    Example:
        >>> chord((1, 3.0), (3, 7.0))
        (2.0, 1.0)
    """
    (x0, t0), (x1, t1) = sorted((one, other))
    if x0 == x1:
        raise PlanError(f"one batch, {x0:g}, does not tell a fixed time from one per sample")
    a = (t1 - t0) / (x1 - x0)
    return a, t0 - a * x0


def spread(
    pair: Pair,
    samples: int,
    *,
    large: Sequence[float],
    small: Sequence[float],
) -> tuple[int, ...]:
    """Samples per round of every worker, in rank order; they sum to ``samples`` exactly.

    A group's workers share what the pair gives the group in proportion to their speeds; samples
    that rounding left over go to small-batch workers, one each.

    Args:
        pair: The solved pair.
        samples: Training samples of an epoch.
        large: Relative speed of each large-batch worker.
        small: Relative speed of each small-batch worker.

    Raises:
        PlanError: A worker would get no samples.
    """
    of_large = samples
    if small:
        of_large = _nearest((pair.large_samples or 0) * sum(large))
    shares = [
        *(apportion(list(large), of_large) if large else []),
        *(apportion(list(small), samples - of_large) if small else []),
    ]
    if min(shares) < 1:
        raise PlanError(
            f"{samples} training images are too few for {len(shares)} workers, one of which would "
            "get none: give fewer workers"
        )
    return tuple(shares)


def update_factor(ratio: float, rule: Literal["ratio", "sqrt", "none"]) -> float:
    r"""Weight of a small-batch worker's model: the ratio :math:`d_S / d_L`, its root, or 1."""
    return {"ratio": ratio, "sqrt": sqrt(ratio), "none": 1.0}[rule]


def _check_line(a: float, b: float) -> None:
    """Refuse step times that cannot be; whether numbers of the job make sense it says itself."""
    if not (isfinite(a) and isfinite(b) and a >= 0) or a + b <= 0:
        raise PlanError(
            f"by what was measured, a step takes {b:.3g} s and {a:.3g} s more for each image, "
            "which cannot be: measure more batches, with a larger probe.budget"
        )


def _check_fixed(b: float) -> None:
    if b <= 0:
        raise PlanError(
            f"a step has no fixed time (b = {b:g} s), so a smaller batch takes no longer and none "
            "answers to dual.extra_time: give dual.small_workers=0, or method=plain"
        )


def _check_share(which: str, batch: int, share: int, workers: float) -> None:
    if batch > share:
        fewer = ", or fewer workers" if workers > 1 else ""
        raise PlanError(
            f"the {which} local batch, {batch}, is more than the {share} samples that a worker of "
            f"{workers:g} gets in a round: give smaller dual.large_batches{fewer}"
        )


def _nearest(value: float) -> int:
    return floor(value + 0.5)


def _shown_below(bound: float) -> str:
    """A bound with four decimals, never above it."""
    return f"{floor(1e4 * bound) / 1e4:g}"
