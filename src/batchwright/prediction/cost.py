r"""What training costs: price times workers times time.

.. math:: C = \sum_k K_k p_k T / 3600

:math:`K_k`: workers of kind k; :math:`p_k`: price of one of them for an hour; :math:`T`: seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import Estimate

_SECONDS_PER_HOUR = 3600


def train_cost(rates: Sequence[tuple[int, float]], seconds: Estimate) -> Estimate:
    """Cost of training, in the currency of the prices; every worker is paid for all of it.

    ``rates`` are for each kind its number of workers and the price of one for an hour.
    """
    per_second = sum(workers * price for workers, price in rates) / _SECONDS_PER_HOUR
    return Estimate(
        value=per_second * seconds.value,
        low=per_second * seconds.low,
        high=per_second * seconds.high,
    )
