r"""How far computing and the exchange of gradients overlap.

.. math:: t = (t_{comp}^\gamma + t_{sync}^\gamma)^{1/\gamma}, \quad 1 \le \gamma \le 10

With :math:`\gamma = 1` they run one after the other; with a large one the shorter is hidden (Qiao
et al., OSDI 2021, Pollux).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import log

NO_OVERLAP, FULL_OVERLAP = 1.0, 10.0
_SIGNIFICANT = 3.84  # 95 % quantile of chi-squared with one degree of freedom
_GRID = 91
_STEPS = 40  # of the search by thirds


def combine(compute: float, exchange: float, overlap: float) -> float:
    """Seconds of a step; ``overlap`` is gamma in the equation above."""
    if exchange <= 0:
        return compute
    if overlap == NO_OVERLAP:
        return compute + exchange
    long, short = max(compute, exchange), min(compute, exchange)
    return float(long * (1 + (short / long) ** overlap) ** (1 / overlap))


def fit_overlap(steps: Sequence[tuple[float, float, float, float]]) -> float | None:
    """Least squares of relative errors over measured steps.

    Args:
        steps: Seconds of computing, of the exchange on its own and of the whole step, and the
            standard error of the whole step as a share of it.

    Returns:
        The overlap; `None` where none and full overlap are equally likely, as where the exchange
        is short against computing.
    """
    return _fitted(tuple(steps)) if steps else None


@lru_cache(maxsize=8)  # the same measurements are planned with several times, as for each optimizer
def _fitted(steps: tuple[tuple[float, float, float, float], ...]) -> float | None:
    def misfit(overlap: float) -> float:
        return sum(
            (log(whole / combine(compute, exchange, overlap)) / error) ** 2
            for compute, exchange, whole, error in steps
        )

    step = (FULL_OVERLAP - NO_OVERLAP) / (_GRID - 1)
    best = min((NO_OVERLAP + i * step for i in range(_GRID)), key=misfit)
    best = _refine(misfit, max(NO_OVERLAP, best - step), min(FULL_OVERLAP, best + step))
    worst = max(misfit(NO_OVERLAP), misfit(FULL_OVERLAP))
    # Errors are scaled up where even the best overlap misses by more than they allow.
    inflation = max(1.0, misfit(best) / max(1, len(steps) - 1))
    return best if worst - misfit(best) > _SIGNIFICANT * inflation else None


def _refine(misfit: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of ``misfit`` between two values around it, by ternary search."""
    for _ in range(_STEPS):
        third = (high - low) / 3
        if misfit(low + third) <= misfit(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2
