r"""How often to write a checkpoint, where workers fail or are taken away.

With C seconds for a checkpoint, M seconds between two failures in the mean, R seconds to start
again and :math:`\tau` seconds of training between two checkpoints:

.. math::
    \tau_{Young} = \sqrt{2 C M}, \quad
    \tau_{Daly} = \sqrt{2 C M} \left[ 1 + \frac13 \sqrt{\frac{C}{2 M}} + \frac{C}{18 M} \right] - C
    \; (C < 2 M, \text{ else } M)

and work of W seconds takes, in the mean, where failures come as a Poisson process,

.. math:: T = M e^{R / M} \left( e^{(\tau + C) / M} - 1 \right) \frac W \tau

References:
    Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9);
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), equations 13, 37.
"""

from __future__ import annotations

from math import exp, expm1, inf, sqrt

from batchwright.records import NetworkFacts

_BYTES = 4  # of a weight
_DISK = 200e6  # bytes per second


def assumed_cost(network: NetworkFacts, *, averages: bool) -> float:
    """Seconds of writing weights, momentum and an average, if any, at 200 MB/s, if nobody says."""
    return (_BYTES * network.parameters + (1 + averages) * network.trained_bytes) / _DISK


def young_interval(cost: float, mean_seconds: float) -> float:
    """Seconds between checkpoints by Young's formula; see above.

    Args:
        cost: Seconds that a checkpoint holds up training.
        mean_seconds: Between two failures of anything that stops it.
    """
    return sqrt(2 * cost * mean_seconds)


def daly_interval(cost: float, mean_seconds: float) -> float:
    """Seconds of training between checkpoints by Daly's higher-order formula; see above."""
    if cost >= 2 * mean_seconds:
        return mean_seconds
    share = cost / (2 * mean_seconds)
    return sqrt(2 * cost * mean_seconds) * (1 + sqrt(share) / 3 + share / 9) - cost


def expected_seconds(
    work: float, interval: float, cost: float, restart: float, mean_seconds: float
) -> float:
    """Seconds that ``work`` takes in the mean, failures and checkpoints included; see above.

    Args:
        work: Seconds of training without either.
        interval: Seconds of training between checkpoints.
        cost: Seconds that one holds up training.
        restart: Seconds from a failure until training goes on from the last checkpoint.
        mean_seconds: Between two failures; infinite where there are none.

    Returns:
        Infinite where it is too large for a number.
    """
    if mean_seconds == inf:
        return work * (1 + cost / interval)
    try:
        once = mean_seconds * exp(restart / mean_seconds) * expm1((interval + cost) / mean_seconds)
    except (OverflowError, ZeroDivisionError):  # too large, also where failures come at once
        return inf
    return once * work / interval
