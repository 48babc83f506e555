"""Whole numbers of samples in proportion to weights: nothing lost, every bound kept."""

from collections.abc import Sequence
from fractions import Fraction
from math import floor, isfinite


def apportion(
    weights: Sequence[float],
    total: int,
    *,
    least: int | Sequence[int] | None = None,
    most: int | Sequence[int] | None = None,
) -> list[int]:
    """Split ``total`` into whole numbers in proportion to ``weights``: largest remainder.

    Every ideal share ``total * w_i / sum(w)`` is cut to a whole number, and what is missing goes,
    one each, to the largest remainders; of equal remainders the lowest index comes first. A share
    outside its bounds is held there, and the rest is split among the others by the same rule.
    Computed in exact fractions, so no share is lost to rounding.

    The published rule of dynamic batch size adds only where the remainder is at least one half,
    which can lose samples; this one always sums to ``total``.

    Args:
        weights: One per entry, not negative, at least one of them positive; any unit.
        total: What is split, in samples.
        least: Smallest share, for all or one per entry, in samples; unset: 0.
        most: Largest share, for all or one per entry, in samples; unset: no limit.

    Returns:
        One whole number per weight; their sum is ``total``.

    Raises:
        ValueError: A weight or bound makes no sense, or the bounds leave no way to reach the total.

    Example:
        >>> apportion([13.7, 16.5, 19.6, 14.2], 64)
        [14, 16, 20, 14]
        >>> apportion([3, 1], 8, most=5)
        [5, 3]
    """
    exact = _exact_weights(weights)
    low = _bounds(least, len(exact), 0)
    high = _bounds(most, len(exact), max(total, 0))
    _refuse_infeasible(total, low, high)
    ideal = _bounded_shares(exact, total, low, high)
    shares = [floor(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: shares[i] - ideal[i])
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _exact_weights(weights: Sequence[float]) -> list[Fraction]:
    for index, weight in enumerate(weights):
        if not isfinite(weight) or weight < 0:
            raise ValueError(f"weight {index} is {weight}: give a finite number, 0 or more")
    if not any(weight > 0 for weight in weights):
        raise ValueError(f"weights {list(weights)}: at least one must be positive")
    return [Fraction(weight) for weight in weights]


def _bounds(given: int | Sequence[int] | None, count: int, default: int) -> list[int]:
    if given is None:
        return [default] * count
    if isinstance(given, int):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} bounds {list(given)} for {count} weights")
    return list(given)


def _refuse_infeasible(total: int, low: list[int], high: list[int]) -> None:
    for index, (smallest, largest) in enumerate(zip(low, high, strict=True)):
        if smallest < 0 or smallest > largest:
            raise ValueError(f"entry {index} cannot be at least {smallest} and at most {largest}")
    if not sum(low) <= total <= sum(high):
        raise ValueError(
            f"total {total} lies outside what the bounds allow: {sum(low)} to {sum(high)}"
        )


def _bounded_shares(
    weights: list[Fraction], total: int, low: list[int], high: list[int]
) -> list[Fraction]:
    """Ideal shares within bounds: each is ``clip(c * weight, low, high)`` for one common c."""
    shares = [Fraction(0)] * len(weights)
    free = list(range(len(weights)))
    while free:
        rest = total - sum(share for i, share in enumerate(shares) if i not in free)
        mass = sum(weights[i] for i in free)
        for i in free:
            shares[i] = rest * weights[i] / mass if mass else Fraction(rest, len(free))
        clipped = {i: min(max(shares[i], Fraction(low[i])), Fraction(high[i])) for i in free}
        excess = sum(clipped[i] - shares[i] for i in free)
        # Too much in all: those held up at their least stay there; too little: those held down.
        held = [
            i
            for i in free
            if (excess >= 0 and clipped[i] > shares[i]) or (excess <= 0 and clipped[i] < shares[i])
        ]
        if not held:
            break
        for i in held:
            shares[i] = clipped[i]
        free = [i for i in free if i not in held]
    return shares
