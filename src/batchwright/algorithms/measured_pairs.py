r"""The fixed time of a step, in samples, from all pairs of batches that were measured side by side.

Near the measured pairs a step of x samples takes :math:`a (x + \beta)` seconds, where
:math:`\beta = b / a` is its fixed time in samples. :math:`\beta` alone determines which batches end
their rounds together. A pair with the ratio :math:`\rho = t(B_S) / t(B_L)` gives

.. math:: \beta = \frac{\rho B_L - B_S}{1 - \rho}

with the error of its ratio, which on a shared machine moves the small batch by a tenth. So the
pairs are averaged, weighted by their errors and by their distances: step times are curved, and a
pair of other batches gives another chord.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import hypot, inf, log

from batchwright.errors import PlanError
from batchwright.prediction.drift import ratio_error
from batchwright.records import PairTime

BEND = 0.2
"""Assumed relative standard deviation of the fixed time between two chords whose small batches
differ by a factor e."""

UNKNOWN_ERROR = 0.02
"""Assumed relative standard error of a ratio that was measured in one visit."""

_MIN_ERROR = 0.001
_MIN_REST = 0.01  # least 1 - ratio: equal times do not identify the fixed time
_TURNS = 20  # most iterations of fixed time and small batch


def fixed_samples(pairs: Sequence[PairTime], small_batch: float) -> float:
    """The fixed time of a step, in samples, of the chord from a small batch to the large one.

    Args:
        pairs: Pairs of one resolution and about one large batch, at least one.
        small_batch: The small batch of the chord, in samples.
    """
    weights, total = 0.0, 0.0
    for pair in pairs:
        ratio, known = pair.small_seconds / pair.large_seconds, ratio_error(pair.ratios)
        relative = max(UNKNOWN_ERROR if known == inf else known, _MIN_ERROR)
        rest = max(1 - ratio, _MIN_REST)
        fixed = (ratio * pair.large_batch - pair.small_batch) / rest
        error = abs(ratio * relative * (pair.large_batch - pair.small_batch) / rest**2)
        far = BEND * abs(fixed) * log(small_batch / pair.small_batch)
        weight = 1 / hypot(error, far) ** 2
        weights += weight
        total += weight * fixed
    return total / weights


def expected_ratio(pairs: Sequence[PairTime], large_batch: int, small_batch: int) -> float:
    """Seconds of a step of the small batch over those of the large one, by all pairs together."""
    fixed = fixed_samples(pairs, small_batch)
    return (small_batch + fixed) / (large_batch + fixed)


def solved_line(
    pairs: Sequence[PairTime], small_batch_of: Callable[[float, float], int]
) -> tuple[tuple[float, float], PairTime]:
    """The chord through the large batch and the small batch that follows from the chord itself.

    Args:
        pairs: Pairs, as for `fixed_samples`.
        small_batch_of: (seconds per sample, fixed seconds) -> the small batch; raises `PlanError`
            if there is none.

    Returns:
        Seconds per sample and fixed seconds of the chord; and the pair with the nearest small
        batch.

    Raises:
        PlanError: No chord has a small batch.
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
    """The small batch with which iteration begins: that of the pair nearest to its own result."""
    found: list[tuple[float, int]] = []
    for pair in pairs:
        with suppress(PlanError):
            batch = small_batch_of(*_line([pair], pair.small_batch))
            found.append((abs(log(batch / pair.small_batch)), batch))
    return min(found)[1] if found else small_batch_of(*_line(pairs, pairs[0].small_batch))


def _line(pairs: Sequence[PairTime], small_batch: int) -> tuple[float, float]:
    """Seconds per sample and fixed seconds, scaled to the times of the nearest pair."""
    fixed = fixed_samples(pairs, small_batch)
    near = _nearest(pairs, small_batch)
    per_sample = near.large_seconds / (near.large_batch + fixed)
    return per_sample, per_sample * fixed


def _nearest(pairs: Sequence[PairTime], small_batch: int) -> PairTime:
    return min(pairs, key=lambda pair: abs(log(pair.small_batch / small_batch)))
