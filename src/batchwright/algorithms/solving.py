"""Where a rising function reaches a value, in few evaluations."""

from __future__ import annotations

from collections.abc import Callable


def solve_rising(
    function: Callable[[int], float], target: float, low: int, high: int
) -> tuple[int, int]:
    """Neighbouring whole numbers between which a rising function passes ``target``.

    Regula falsi, which finds a line's answer at once, and every third time the middle, so that no
    bend makes it creep.

    Args:
        function: Rising, or nearly so.
        target: The value to reach.
        low: Least argument.
        high: Largest argument.

    Returns:
        (``low``, ``low``) if even that gives more than the target, (``high``, ``high``) if even
        that gives no more, else n and n + 1 with f(n) <= target < f(n + 1).
    """
    at_low = function(low)
    if at_low > target or low >= high:
        return low, low
    at_high = function(high)
    if at_high <= target:
        return high, high
    turn = 0
    while high - low > 1:
        turn += 1
        share = (target - at_low) / (at_high - at_low) if turn % 3 else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        value = function(middle)
        if value <= target:
            low, at_low = middle, value
        else:
            high, at_high = middle, value
    return low, high
