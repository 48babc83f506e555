"""`planning.partition`: whole shares that always add up."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.planning.partition import apportion


@pytest.mark.parametrize(
    ("ideal", "total", "expected"),
    [
        # The published example, and one where the published rule loses a sample.
        ([13.7, 16.5, 19.6, 14.2], 64, [14, 16, 20, 14]),
        ([1.4, 1.4, 1.2], 4, [2, 1, 1]),
    ],
)
def test_published_examples_come_out(ideal, total, expected):
    assert apportion(ideal, total) == expected


def test_equal_weights_give_the_remainder_to_the_first():
    assert apportion([1, 1, 1, 1], 10) == [3, 3, 2, 2]


def test_exact_shares_are_kept_whatever_the_floating_point():
    assert apportion([0.1, 0.2, 0.7], 10) == [1, 2, 7]
    assert apportion([1e-300, 1e300], 5) == [0, 5]


def test_excess_over_a_bound_goes_to_the_others_in_proportion():
    assert apportion([6, 2, 1], 90, most=[30, 90, 90]) == [30, 40, 20]
    assert apportion([1, 10, 10], 42, least=8) == [8, 17, 17]


def test_a_share_held_at_one_bound_can_push_another_to_its_own():
    assert apportion([8, 4, 1], 26, most=[8, 10, 26]) == [8, 10, 8]


def test_entries_without_weight_take_what_nobody_else_may():
    assert apportion([1, 0, 0], 10, most=[4, 10, 10]) == [4, 3, 3]


@pytest.mark.parametrize(
    ("weights", "total", "bounds", "named"),
    [
        ([1, 1], 10, {"most": 4}, "10"),
        ([1, 1], 3, {"least": 2}, "3"),
        ([1, 1], -1, {}, "-1"),
        ([1, -2], 3, {}, "-2"),
        ([1, float("nan")], 3, {}, "nan"),
        ([0, 0], 3, {}, "[0, 0]"),
        ([], 3, {}, "[]"),
        ([1, 1], 3, {"least": [1]}, "[1]"),
        ([1, 1], 3, {"least": [2, 0], "most": [1, 3]}, "entry 0"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_value(weights, total, bounds, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        apportion(weights, total, **bounds)


weight = st.floats(0, 1e6, allow_subnormal=False)
weights = st.lists(weight, min_size=1, max_size=8).filter(lambda ws: any(w > 0 for w in ws))


@given(weights, st.integers(0, 10_000))
def test_shares_sum_to_the_total_and_stay_within_one_of_the_ideal(ws, total):
    shares = apportion(ws, total)
    assert sum(shares) == total
    for share, w in zip(shares, ws, strict=True):
        assert abs(share - total * w / sum(ws)) < 1 + 1e-6
    assert shares == apportion(ws, total)


@given(st.data())
def test_bounds_hold_whenever_the_total_can_be_reached(data):
    ws = data.draw(weights)
    low = [data.draw(st.integers(0, 50)) for _ in ws]
    high = [smallest + data.draw(st.integers(0, 50)) for smallest in low]
    total = data.draw(st.integers(sum(low), sum(high)))
    shares = apportion(ws, total, least=low, most=high)
    assert sum(shares) == total
    assert all(a <= s <= b for a, s, b in zip(low, shares, high, strict=True))


@given(weights, st.integers(0, 1000))
def test_a_heavier_entry_never_gets_less(ws, total):
    shares = apportion(ws, total)
    ranked = sorted(range(len(ws)), key=lambda i: ws[i])
    for light, heavy in pairwise(ranked):
        if ws[light] < ws[heavy]:
            assert shares[light] <= shares[heavy]
