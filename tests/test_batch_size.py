"""`algorithms.batch_size`: candidates, the doubling rule, and Kneedle beside it."""

import random
from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.algorithms.batch_size import (
    candidates,
    knee_of_line,
    knee_point,
    kneedle,
    steps_per_epoch,
)


def test_candidates_are_powers_of_two_per_worker_and_the_largest():
    assert candidates(2, 143, least_local=16) == [32, 64, 128, 142]
    assert candidates(3, 100) == [3, 6, 12, 24, 48, 96, 99]
    assert candidates(2, 128) == [2, 4, 8, 16, 32, 64, 128]


def test_of_the_candidates_nothing_may_be_left():
    assert candidates(2, 143, least_local=80) == []
    assert candidates(4, 3) == []


@given(st.integers(1, 8), st.integers(1, 5000), st.integers(1, 64))
def test_candidates_rise_within_the_limits(workers, most_global, least):
    found = candidates(workers, most_global, least_local=least)
    assert found == sorted(set(found))
    assert all(b % workers == 0 and workers * least <= b <= most_global for b in found)


@given(st.integers(1, 10_000), st.data())
def test_the_steps_of_an_epoch_hold_every_sample_once(samples, data):
    batch = data.draw(st.integers(1, samples))
    least = data.draw(st.integers(1, batch))
    steps, last = steps_per_epoch(samples, batch, least)
    assert (steps - 1) * batch + last == samples
    assert last >= least


GRIDS = st.lists(st.integers(1, 10**6), min_size=1, max_size=30, unique=True)


def per_sample(fixed, slope):
    return lambda batch: slope + fixed / batch


@given(st.floats(1e-5, 1e-2), st.floats(0.1, 3000), st.floats(0.01, 0.45), GRIDS)
def test_on_any_grid_the_rule_finds_the_smallest_candidate_not_below_the_closed_form(
    slope, ratio, gain, batches
):
    fixed = ratio * slope
    closed_form = fixed * (1 - 2 * gain) / (2 * gain * slope)
    expected = min((b for b in batches if b >= closed_form), default=None)
    assert knee_of_line(fixed, slope, gain) == pytest.approx(closed_form)
    if any(abs(b / closed_form - 1) < 1e-6 for b in batches):
        return  # so near to it, rounding decides which side the saving falls
    assert knee_point(batches, per_sample(fixed, slope), gain) == expected


def test_the_closed_form_at_its_ends():
    assert knee_of_line(0.0, 0.001, 0.05) == 0
    assert knee_of_line(0.01, 0.0, 0.05) == knee_of_line(0.01, 0.001, 5e-324) == inf
    assert knee_of_line(0.01, 0.001, 0.5) == 0  # a doubling never saves more than half


def test_the_published_curve_has_its_knee_at_the_candidate_above_630():
    batches = [2**i for i in range(4, 13)]
    assert knee_point(batches, per_sample(0.035, 0.0005), 0.05) == 1024
    assert knee_of_line(0.035, 0.0005, 0.05) == pytest.approx(630)


def test_more_candidates_at_either_end_do_not_move_the_knee():
    for first in range(2, 11):
        for last in range(10, 16):
            batches = [2**i for i in range(first, last + 1)]
            assert knee_point(batches, per_sample(0.035, 0.0005), 0.05) == 1024


def test_a_single_candidate_can_be_the_knee_or_not():
    assert knee_point([1024], per_sample(0.035, 0.0005), 0.05) == 1024
    assert knee_point([16], per_sample(0.035, 0.0005), 0.05) is None


def test_without_a_knee_there_is_none():
    assert knee_point([16, 32, 64], lambda batch: 1 / batch, 0.05) is None
    assert knee_point([], lambda batch: 1 / batch, 0.05) is None


def test_where_time_is_in_proportion_the_smallest_candidate_is_the_knee():
    assert knee_point([16, 32, 64], lambda batch: 0.001, 0.05) == 16


def test_a_doubling_that_saves_exactly_the_share_is_a_knee_whatever_the_rounding():
    assert knee_point([16], {16: 1.0, 32: 0.95}.__getitem__, 0.05) == 16  # 1 - 0.95 > 0.05


def test_kneedle_gives_the_answers_measured_before():
    def epoch(x):
        return (0.0005 * x + 0.035) * -(-50_000 // (4 * x))

    for grid, plain, logarithmic in (
        ([2**i for i in range(4, 13)], 256, 128),
        (list(range(16, 4097, 16)), 272, 96),
        ([2**i for i in range(4, 11)], 128, 64),
    ):
        seconds = [epoch(x) for x in grid]
        assert kneedle(grid, seconds) == plain
        assert 2 ** kneedle([log2(x) for x in grid], seconds) == pytest.approx(logarithmic)


def test_kneedle_finds_nothing_on_a_flat_or_a_short_curve():
    assert kneedle([4, 5, 6], [1.0, 1.0, 1.0]) is None
    assert kneedle([4, 5], [2.0, 1.0]) is None


@pytest.mark.filterwarnings("ignore")
def test_kneedle_agrees_with_kneed_on_falling_curves():
    kneed = pytest.importorskip("kneed")
    rng = random.Random(0)
    for _ in range(100):
        x = list(range(4, 5 + rng.randint(3, 13)))
        fixed, noise = 10 ** rng.uniform(-2, 0), rng.choice([0, 0.005])
        y = [(0.0005 + fixed / 2**v) * (1 + rng.gauss(0, noise)) for v in x]
        expected = kneed.KneeLocator(x, y, curve="convex", direction="decreasing").knee
        assert kneedle(x, y) == expected
