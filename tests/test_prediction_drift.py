"""`prediction.drift`: scatter between visits, and what a median over them is worth."""

import random
from math import exp
from statistics import median, stdev

import pytest

from batchwright.prediction.drift import (
    ASSUMED_DRIFT,
    level_error,
    median_share,
    point_error,
    point_seconds,
    pooled_drift,
    pooled_skew,
)
from batchwright.records import StepTime


def point(visits, batch=32, scatter=0.0, step=0.02):
    value = median(visits) if visits else step
    return StepTime(
        resolution=32,
        local_batch_size=batch,
        workers=1,
        compute_seconds=value,
        sync_seconds=0,
        step_seconds=value,
        step_low=value * (1 - scatter),
        step_high=value * (1 + scatter),
        repeats=9,
        visits=visits,
    )


def noisy(rng, drift, visits, points):
    return [
        point(tuple(0.01 * (b + 1) * exp(rng.gauss(0, drift)) for _ in range(visits)), b + 1)
        for b in range(points)
    ]


@pytest.mark.parametrize("visits", [2, 3, 5])
def test_the_drift_of_normal_visits_is_recovered_whatever_their_number(visits):
    rng = random.Random(visits)
    drift, degrees = pooled_drift(noisy(rng, 0.06, visits, 400))
    assert drift == pytest.approx(0.06, rel=0.1)
    assert degrees == 400 * (visits - 1)


def test_the_level_of_a_point_is_no_drift():
    drift, _ = pooled_drift([point((0.01, 0.0101)), point((1.0, 1.01))] * 4)
    assert drift == pytest.approx(0.009, rel=0.05)


def test_one_suspended_visit_does_not_decide_the_drift():
    points = noisy(random.Random(0), 0.05, 3, 20)
    clean, _ = pooled_drift(points)
    stuck = points[0].model_copy(update={"visits": (*points[0].visits[:2], 10.0)})
    assert pooled_drift([stuck, *points[1:]])[0] < 1.4 * clean


def test_slow_stretches_count():
    rng = random.Random(0)
    clean = noisy(rng, 0.03, 4, 20)
    slow = [p.model_copy(update={"visits": (*p.visits[:3], p.visits[3] * 1.15)}) for p in clean]
    assert pooled_drift(slow)[0] > 1.5 * pooled_drift(clean)[0]


def test_too_few_visits_leave_the_drift_assumed():
    assert pooled_drift([point(()), point((0.02,)), point((0.02, 0.03))]) == (ASSUMED_DRIFT, 0)


@pytest.mark.parametrize("visits", [1, 2, 3, 4, 5, 9])
def test_the_share_of_a_median_is_that_of_a_simulated_one(visits):
    rng = random.Random(visits)
    medians = [median(rng.gauss(0, 1) for _ in range(visits)) for _ in range(20_000)]
    assert stdev(medians) <= 1.02 * median_share(visits)
    assert stdev(medians) >= 0.88 * median_share(visits)


def test_a_point_is_worth_more_with_every_visit():
    errors = [point_error(point((0.02,) * n), 0.05) for n in (1, 2, 3, 6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == 0.05


def test_a_point_never_revisited_is_as_unsure_as_its_steps_too():
    assert point_error(point((), scatter=0.3), 0.05) > 0.08


def test_a_points_time_is_the_median_of_its_visits():
    assert point_seconds(point((0.02, 0.05, 0.021))) == 0.021
    assert point_seconds(point((), step=0.04)) == 0.04


def test_what_all_points_share_shrinks_with_visits_but_not_with_points():
    few, many = ([point((0.02,) * 3, b) for b in range(1, n)] for n in (3, 30))
    assert level_error(few, 0.05) == level_error(many, 0.05)
    assert level_error([point((0.02,) * 9)], 0.05) < level_error(few, 0.05)


def test_drift_that_goes_both_ways_has_no_skew_and_slow_stretches_have():
    rng = random.Random(0)
    even = noisy(rng, 0.05, 4, 200)
    assert pooled_skew(even) == pytest.approx(1, abs=0.1)
    slow = [
        p.model_copy(
            update={"visits": tuple(v * (1.3 if rng.random() < 0.2 else 1) for v in p.visits)}
        )
        for p in noisy(rng, 0.02, 4, 200)
    ]
    assert 1.3 < pooled_skew(slow) < 2


def test_few_visits_hardly_tell_a_skew():
    assert pooled_skew([point((0.02, 0.02, 0.03)), point((0.019, 0.02, 0.021))]) < 1.15
    assert pooled_skew([point((0.02, 0.03))]) == 1
