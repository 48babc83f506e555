r"""The best interval between checkpoints, where workers fail or are taken away.

With C seconds for a checkpoint, M seconds between two failures in the mean, R seconds for a restart
and :math:`\tau` seconds of training between two checkpoints:

.. math::
    \tau_{Young} = \sqrt{2 C M}, \quad
    \tau_{Daly} = \sqrt{2 C M} \left[ 1 + \frac13 \sqrt{\frac{C}{2 M}} + \frac{C}{18 M} \right] - C
    \; (C < 2 M, \text{ else } M)

and where failures are a Poisson process, work of W seconds takes in the mean

.. math:: T = M e^{R / M} \left( e^{(\tau + C) / M} - 1 \right) \frac W \tau

References:
    Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9);
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), equations 13, 37.
"""

from __future__ import annotations

from math import exp, expm1, inf, sqrt

from batchwright.records import NetworkFacts
from batchwright.records.registries.optimizers import OPTIMIZERS

_BYTES = 4  # of a weight
_DISK = 200e6  # bytes per second, assumed


def assumed_bytes(network: NetworkFacts, optimizer: str, *, averages: bool, served: bool) -> int:
    """Assumed size of a checkpoint: weights, the optimizer's state and an average if any.

    Args:
        network: The network.
        optimizer: Name of the optimizer; `auto` counts as SGD.
        averages: Whether the training keeps an average of the weights.
        served: Whether a parameter server writes it, which has no optimizer's state.
    """
    kept = (0 if served else OPTIMIZERS[optimizer].kept) + averages
    return _BYTES * network.parameters + kept * network.trained_bytes


def assumed_cost(network: NetworkFacts, optimizer: str, *, averages: bool, served: bool) -> float:
    """Assumed seconds of a checkpoint: its `assumed_bytes`, at 200 MB/s."""
    return assumed_bytes(network, optimizer, averages=averages, served=served) / _DISK


def young_interval(cost: float, mean_seconds: float) -> float:
    """Seconds between checkpoints by Young's formula; see above.

    Args:
        cost: Seconds that a checkpoint holds up training.
        mean_seconds: Mean seconds between two failures.
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
    """Mean seconds that ``work`` takes, failures and checkpoints included; see above.

    Args:
        work: Seconds of training without failures and checkpoints.
        interval: Seconds of training between checkpoints.
        cost: Seconds that a checkpoint holds up training.
        restart: Seconds from a failure until training goes on from the last checkpoint.
        mean_seconds: Mean seconds between two failures; infinite where there are none.

    Returns:
        Seconds; infinite where they overflow.
    """
    if mean_seconds == inf:
        return work * (1 + cost / interval)
    try:
        once = mean_seconds * exp(restart / mean_seconds) * expm1((interval + cost) / mean_seconds)
    except (OverflowError, ZeroDivisionError):  # the mean may be 0
        return inf
    return once * work / interval
