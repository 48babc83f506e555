"""The fixed time of a step from several noisy pairs that were measured side by side."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest

from batchwright.algorithms.measured_pairs import expected_ratio, fixed_samples, solved_line
from batchwright.errors import PlanError
from test_match_rounds import make_pair

A, FIXED, LARGE = 0.0006, 25.0, 500


def seconds(batch: float) -> float:
    return A * (batch + FIXED)


def pair_of(small_batch: int, ratios=None):
    ratio = seconds(small_batch) / seconds(LARGE)
    ratios = (ratio,) * 5 if ratios is None else tuple(ratio * one for one in ratios)
    return make_pair(
        small_batch=small_batch,
        large_seconds=seconds(LARGE),
        small_seconds=seconds(LARGE) * median(ratios),
        ratios=ratios,
    )


def test_pairs_of_a_line_tell_its_fixed_time_wherever_they_are():
    pairs = [pair_of(batch) for batch in (40, 83, 240)]
    for wanted in (20, 83, 400):
        assert fixed_samples(pairs, wanted) == pytest.approx(FIXED)
        assert expected_ratio(pairs, LARGE, wanted) == pytest.approx(
            seconds(wanted) / seconds(LARGE)
        )


def test_a_well_known_pair_counts_more_than_a_wild_one_and_a_near_one_more_than_a_far_one():
    calm = pair_of(83, (0.999, 1.0, 1.0, 1.0, 1.001))
    wild = pair_of(80, (0.9, 1.0, 1.1, 1.2, 1.3))
    assert fixed_samples([calm, wild], 82) == pytest.approx(FIXED, rel=0.02)
    assert fixed_samples([wild], 82) > 1.5 * FIXED
    other = make_pair(small_batch=250, large_seconds=0.3, small_seconds=0.18, ratios=(0.6,) * 5)
    far = abs(fixed_samples([calm, other], 83) - FIXED)
    near = abs(fixed_samples([calm, other], 240) - FIXED)
    assert far < near


def test_many_noisy_pairs_say_more_than_the_nearest_one():
    errors: dict[str, list[float]] = {"all": [], "nearest": []}
    for seed in range(60):
        rng = random.Random(seed)
        pairs = [
            pair_of(batch, [rng.lognormvariate(0, 0.04) for _ in range(5)])
            for batch in (76, 80, 83, 88)
        ]
        for name, some in (("all", pairs), ("nearest", pairs[2:3])):
            errors[name].append(abs(expected_ratio(some, LARGE, 83) / (seconds(83) / 0.315) - 1))
    assert fmean(errors["all"]) < 0.7 * fmean(errors["nearest"])


def test_a_pair_whose_small_batch_takes_as_long_as_the_large_one_is_no_trouble():
    flat = make_pair(large_seconds=0.3, small_seconds=0.3, ratios=(1.0, 1.1, 0.9))
    assert fixed_samples([flat, pair_of(83)], 83) == pytest.approx(FIXED, rel=0.02)


def test_where_no_small_batch_comes_of_any_pair_it_is_said():
    def refuse(*line):
        raise PlanError(f"none of {line}")

    with pytest.raises(PlanError, match="none of"):
        solved_line([pair_of(83)], refuse)


def test_the_line_goes_through_the_small_batch_that_it_makes():
    def small_batch_of(a, b):
        return round(4 * b / a)  # 100 where the fixed time is 25 samples

    line, near = solved_line([pair_of(60), pair_of(110)], small_batch_of)
    assert line == pytest.approx((A, A * FIXED))
    assert near.small_batch == 110
