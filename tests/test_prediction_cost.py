"""`prediction.cost`: price times workers times time."""

import pytest

from batchwright.prediction.cost import train_cost
from batchwright.records import Estimate

HALF_AN_HOUR = Estimate(value=1800, low=1700, high=2000)


def test_all_kinds_are_paid_for_the_whole_time():
    cost = train_cost([(4, 3.0), (2, 0.5)], HALF_AN_HOUR)
    assert cost.value == pytest.approx(6.5)
    assert cost.low == pytest.approx(13 * 1700 / 3600)
    assert cost.high == pytest.approx(13 * 2000 / 3600)


def test_no_workers_cost_nothing():
    assert train_cost([], HALF_AN_HOUR).high == 0
