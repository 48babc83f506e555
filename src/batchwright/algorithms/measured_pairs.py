r"""The fixed time of a step, in samples, from all pairs of batches that were measured side by side.

A step of x samples takes :math:`a (x + \beta)` seconds near the pairs at hand, where
:math:`\beta = b / a` is its fixed time in samples, and :math:`\beta` alone says which batches end
their rounds together. A pair with the ratio :math:`\rho = t(B_S) / t(B_L)` tells

.. math:: \beta = \frac{\rho B_L - B_S}{1 - \rho}

with the error of its ratio, which on a shared machine moves the small batch by a tenth. So the
pairs are averaged, each by its own error and by how far it is: step times bend, and a pair of other
batches tells another chord.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import hypot, inf, log

from batchwright.errors import PlanError
from batchwright.prediction.drift import ratio_error
from batchwright.records import PairTime

BEND = 0.2
"""How much of itself the fixed time may differ by between two chords whose small batches differ by
the factor e: a standard deviation. Of the measured networks 0.05 to 0.3."""

UNKNOWN_ERROR = 0.02
"""Relative standard error of a ratio of which one visit is known."""

_MIN_ERROR = 0.001
_MIN_REST = 0.01  # a small batch that takes as long as the large one tells next to nothing
_TURNS = 20  # of fixed time and small batch


def fixed_samples(pairs: Sequence[PairTime], small_batch: float) -> float:
    """The fixed time of a step in samples, near the chord from a small batch to the large one.

    Args:
        pairs: Of one resolution and about one large batch; at least one.
        small_batch: Where it is wanted, in samples.
    """
    weights, total = 0.0, 0.0
    for pair in pairs:
        fixed, error = _told(pair)
        far = BEND * abs(fixed) * log(small_batch / pair.small_batch)
        weight = 1 / hypot(error, far) ** 2
        weights += weight
        total += weight * fixed
    return total / weights


def expected_ratio(pairs: Sequence[PairTime], large_batch: int, small_batch: int) -> float:
    """Seconds of a step of the small batch over one of the large, by all pairs together."""
    fixed = fixed_samples(pairs, small_batch)
    return (small_batch + fixed) / (large_batch + fixed)


def solved_line(
    pairs: Sequence[PairTime], small_batch_of: Callable[[float, float], int]
) -> tuple[tuple[float, float], PairTime]:
    """The chord through the large batch and the small one that it makes itself.

    Args:
        pairs: As for `fixed_samples`.
        small_batch_of: f(seconds per sample, fixed seconds) -> the small batch; raises `PlanError`
            where there is none.

    Returns:
        Seconds per sample and fixed seconds; and the pair whose small batch is nearest.

    Raises:
        PlanError: As ``small_batch_of``.
    """
    batch = _start(pairs, small_batch_of)
    line, seen = _line(pairs, batch), set()
    for _ in range(_TURNS):
        seen.add(batch)
        batch = small_batch_of(*line)
        line = _line(pairs, batch)
        if batch in seen:
            break
    return line, _nearest(pairs, batch)


def _start(pairs: Sequence[PairTime], small_batch_of: Callable[[float, float], int]) -> int:
    """What the pair that lies nearest to its own answer says; of some no small batch comes."""
    found: list[tuple[float, int]] = []
    for pair in pairs:
        with suppress(PlanError):
            batch = small_batch_of(*_line([pair], pair.small_batch))
            found.append((abs(log(batch / pair.small_batch)), batch))
    return min(found)[1] if found else small_batch_of(*_line(pairs, pairs[0].small_batch))


def _line(pairs: Sequence[PairTime], small_batch: int) -> tuple[float, float]:
    """Seconds per sample, and fixed seconds; on the clock of the nearest pair."""
    fixed = fixed_samples(pairs, small_batch)
    near = _nearest(pairs, small_batch)
    per_sample = near.large_seconds / (near.large_batch + fixed)
    return per_sample, per_sample * fixed


def _nearest(pairs: Sequence[PairTime], small_batch: int) -> PairTime:
    return min(pairs, key=lambda pair: abs(log(pair.small_batch / small_batch)))


def _told(pair: PairTime) -> tuple[float, float]:
    """What one pair says of the fixed time, in samples, and its standard error."""
    ratio = pair.small_seconds / pair.large_seconds
    known = ratio_error(pair.ratios)
    relative = max(UNKNOWN_ERROR if known == inf else known, _MIN_ERROR)
    rest = max(1 - ratio, _MIN_REST)
    fixed = (ratio * pair.large_batch - pair.small_batch) / rest
    return fixed, abs(ratio * relative * (pair.large_batch - pair.small_batch) / rest**2)
