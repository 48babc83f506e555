"""Splits samples into whole numbers, evenly or in proportion to weights, within bounds."""

from collections.abc import Sequence
from math import inf, isfinite, lcm


def apportion(
    weights: Sequence[float],
    total: int,
    *,
    least: int | Sequence[int] | None = None,
    most: int | Sequence[int] | None = None,
) -> list[int]:
    """Split ``total`` into whole numbers in proportion to ``weights``: largest remainder.

    Every ideal share ``total * w_i / sum(w)`` is rounded down, and the missing samples go, one
    each, to the largest remainders; of equal remainders the lowest index comes first. A share
    outside its bounds is set to the bound, and the rest is split among the others by the same rule.
    All computing is exact, in whole numbers.

    The published rule of dynamic batch size adds a sample only where the remainder is at least one
    half, which can lose samples; here the shares always sum to ``total``.

    Args:
        weights: One weight per entry, not negative, at least one of them positive; any unit.
        total: The number of samples to split.
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
    whole = _whole_weights(weights)
    low = _bounds(least, len(whole), 0)
    high = _bounds(most, len(whole), max(total, 0))
    for index, (smallest, largest) in enumerate(zip(low, high, strict=True)):
        if smallest < 0 or smallest > largest:
            raise ValueError(f"entry {index} cannot be at least {smallest} and at most {largest}")
    if not sum(low) <= total <= sum(high):
        raise ValueError(
            f"total {total} lies outside what the bounds allow: {sum(low)} to {sum(high)}"
        )
    shares, free, remainders = _floors(whole, total, low, high)
    by_remainder = sorted(range(len(free)), key=remainders.__getitem__, reverse=True)
    for place in by_remainder[: total - sum(shares)]:
        shares[free[place]] += 1
    return shares


def split_evenly(total: int, count: int) -> list[int]:
    """``total`` in ``count`` whole parts that differ by 1 at most, the larger ones first.

    Example:
        >>> split_evenly(256, 3)
        [86, 85, 85]
    """
    part, larger = divmod(total, count)
    return [part + 1] * larger + [part] * (count - larger)


def _whole_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers in exactly the same proportions."""
    if not any(weights):
        raise ValueError(f"weights {list(weights)}: at least one must be positive")
    if not all(map(isfinite, weights)) or min(weights) < 0:
        index = next(i for i, weight in enumerate(weights) if not 0 <= weight < inf)
        raise ValueError(f"weight {index} is {weights[index]}: give a finite number, 0 or more")
    ratios = [weight.as_integer_ratio() for weight in weights]
    common = lcm(*{denominator for _, denominator in ratios})
    return [numerator * common // denominator for numerator, denominator in ratios]


def _bounds(given: int | Sequence[int] | None, count: int, default: int) -> list[int]:
    if given is None:
        return [default] * count
    if isinstance(given, int):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} bounds {list(given)} for {count} weights")
    return list(given)


def _floors(
    weights: Sequence[int], total: int, low: Sequence[int], high: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Ideal shares within bounds: each is ``clip(c * weight, low, high)`` for one common c.

    Returns:
        All shares, rounded down; the indices of entries that are not held at a bound; and the
        remainders of these, in a common unit.
    """
    shares, free, rest = list(low), list(range(len(weights))), total
    while True:  # ends, since bounds that allow the total never hold all free entries
        mine = [weights[i] for i in free]
        if not any(mine):
            mine = [1] * len(free)
        mass = sum(mine)
        parts = [divmod(rest * weight, mass) for weight in mine]
        # By how much bounds raise entries that are below, and lower those above, in 1 / mass.
        up, down = {}, {}
        for i, (share, cut) in zip(free, parts, strict=True):
            shares[i] = share
            if share < low[i]:
                up[i] = (low[i] - share) * mass - cut
            elif (share, cut) > (high[i], 0):
                down[i] = (share - high[i]) * mass + cut
        excess = sum(up.values()) - sum(down.values())
        # Too much in all: entries at their lower bound stay there; too little: those at the upper.
        held = {i: low[i] for i in up} if excess >= 0 else {i: high[i] for i in down}
        if not held:
            return shares, free, [cut for _, cut in parts]
        for i, bound in held.items():
            shares[i] = bound
        rest -= sum(held.values())
        free = [i for i in free if i not in held]
