"""`algorithms.partition`: whole shares that always add up."""

import re
from fractions import Fraction
from itertools import pairwise
from math import floor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.algorithms.partition import apportion
from example_counts import times


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
    assert apportion([1, 0], 10, least=[0, 2], most=[9, 10]) == [8, 2]
    assert apportion([1, 1, 1], 11, least=[0, 0, 4], most=[2, 4, 12]) == [2, 4, 5]


def test_a_share_at_its_limit_takes_no_part_of_a_sample_more():
    assert apportion([1, 1, 1], 7, most=[2, 2, 4]) == [2, 2, 3]


def test_entries_without_weight_take_what_nobody_else_may():
    assert apportion([1, 0, 0], 10, most=[4, 10, 10]) == [4, 3, 3]


@pytest.mark.parametrize(
    ("weights", "total", "bounds", "named"),
    [
        ([1, 1], 10, {"most": 4}, "10"),
        ([1, 1], 3, {"least": 2}, "3"),
        ([1, 1], -1, {}, "total -1 lies outside what the bounds allow: 0 to 0"),
        ([0.5, -2], 3, {}, "weight 1 is -2"),
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


# ------------------------------------------------------------------------- the same, in fractions


def in_fractions(weights, total, low, high):
    """The rule as it reads, slowly."""
    exact = [Fraction(weight) for weight in weights]
    ideal = bounded_shares(exact, total, low, high)
    shares = [floor(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: shares[i] - ideal[i])
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def bounded_shares(weights, total, low, high):
    shares = [Fraction(0)] * len(weights)
    free = list(range(len(weights)))
    while free:
        rest = total - sum(share for i, share in enumerate(shares) if i not in free)
        mass = sum(weights[i] for i in free)
        for i in free:
            shares[i] = rest * weights[i] / mass if mass else Fraction(rest, len(free))
        clipped = {i: min(max(shares[i], Fraction(low[i])), Fraction(high[i])) for i in free}
        excess = sum(clipped[i] - shares[i] for i in free)
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


WEIGHTS = {
    "ties": lambda chance: chance.randint(0, 5),
    "long": lambda chance: chance.randint(0, 2**70),
    "usual": lambda chance: chance.random(),
    "powers": lambda chance: 2.0 ** chance.randint(-1074, 1023),
    "extreme": lambda chance: chance.choice([0.0, 0.1, 0.2, 0.3, 1.0, 5e-324, 1e-310, 1e308]),
}


@pytest.mark.parametrize("weight_of", WEIGHTS.values(), ids=WEIGHTS)
def test_shares_are_those_of_exact_fractions(weight_of):
    chance = Random(0)
    for _ in range(times(1000)):
        ws = [weight_of(chance) for _ in range(chance.randint(1, 8))]
        ws[0] = ws[0] or 1.0
        total = chance.randint(0, chance.choice([5, 40, 10**9]))
        usual = total // len(ws)
        low = [chance.choice([0, 0, chance.randint(0, usual)]) for _ in ws]
        high = [chance.choice([total, chance.randint(usual + 1, 3 * usual + 1)]) for _ in ws]
        expected = in_fractions(ws, total, low, high)
        assert apportion(ws, total, least=low, most=high) == expected, (ws, total, low, high)


def test_many_workers_have_the_shares_of_exact_fractions():
    ws = [1 / (3 + (7 * index) % 11) for index in range(1024)]
    low, high = (
        [2 + index % 40 for index in range(1024)],
        [45 + index % 16 for index in range(1024)],
    )
    assert apportion(ws, 51_200) == in_fractions(ws, 51_200, [0] * 1024, [51_200] * 1024)
    assert apportion(ws, 45_000, least=low, most=high) == in_fractions(ws, 45_000, low, high)
