"""`prediction.drift`: scatter between visits, and what a median over them is worth."""

import random
from math import exp, hypot, sqrt
from statistics import median, quantiles, stdev

import pytest

from batchwright.prediction.drift import (
    ASSUMED_DRIFT,
    drift_by_workers,
    level_error,
    median_share,
    point_error,
    point_seconds,
    pooled_drift,
    pooled_skew,
    step_share,
    visit_deviation,
    visit_scatter,
)
from batchwright.probing.measure.timing import mean_step
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


def steps_of(rng, level, spread, count):
    """Steps that are ``level`` in the mean and scatter by ``spread``."""
    return [level * exp(rng.gauss(-(spread**2) / 2, spread)) for _ in range(count)]


def visited(rng, drift, spread, *, visits=3, steps=10, batch=32):
    """A point whose steps scatter by ``spread`` within a visit, and whose visits drift."""
    drawn = []
    for _ in range(visits):
        level = 0.02 * exp(rng.gauss(0, drift))
        drawn.append(steps_of(rng, level, spread, steps))
    means = [mean_step([(step, 0.0) for step in visit]) for visit in drawn]
    together = [step for visit in drawn for step in visit]
    low, value, high = quantiles(together, n=4, method="inclusive")
    seen = {"step_seconds": value, "step_low": low, "step_high": high, "repeats": len(together)}
    seen["visit_error"] = median(one.error for one in means)
    return point(tuple(one.seconds for one in means), batch).model_copy(update=seen)


@pytest.mark.parametrize("drift", [0.02, 0.08])
@pytest.mark.parametrize("visits", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_what_the_scatter_of_steps_makes_of_a_visit_is_no_drift(drift, visits):
    rng = random.Random(visits)
    points = [
        visited(rng, drift, spread, visits=visits) for _ in range(200) for spread in (0.01, 0.3)
    ]
    found = pooled_drift(points)
    assert found.share == pytest.approx(drift, rel=0.25)
    assert visit_scatter(points) > 1.1 * found.share
    noisy = points[1::2]
    errors = [visit_deviation(one, drift) for one in noisy]
    assert median(errors) == pytest.approx(hypot(drift, 0.3 / sqrt(10)), rel=0.15)


def test_steps_that_scatter_widely_tell_little_of_drift_even_if_their_visits_agree():
    alike = {"visits": (0.02, 0.0201, 0.0199)}
    lucky = [visited(random.Random(0), 0.0, 0.3).model_copy(update=alike)] * 8
    assert pooled_drift(lucky) == (ASSUMED_DRIFT, 0)
    assert visit_scatter(lucky) < 0.01
    steady = noisy(random.Random(4), 0.02, 3, 8)
    assert pooled_drift([*lucky, *steady]).degrees < 2 * 8 + 3
    assert pooled_drift([*lucky, *steady]).share == pytest.approx(0.02, rel=0.4)


def test_four_more_visits_tell_though_their_steps_scatter_a_little():
    rng = random.Random(9)
    points = [visited(rng, 0.08, 0.02, visits=2) for _ in range(4)]
    assert pooled_drift(points[:3]) == (ASSUMED_DRIFT, 0)
    assert pooled_drift(points).degrees == 4
    assert drift_by_workers(points)[1].degrees == 4


def test_visits_that_are_further_apart_than_steps_explain_tell_of_drift():
    """As on a busy machine, where all scatters."""
    rng = random.Random(5)
    found = pooled_drift([visited(rng, 0.4, 0.3) for _ in range(60)])
    assert found.share == pytest.approx(0.4, rel=0.2)
    assert found.degrees > 80


def test_how_far_visits_are_apart_is_not_taken_for_a_scatter_of_steps():
    steady = visited(random.Random(0), 0.2, 0.001, visits=2)
    older = steady.model_copy(update={"visit_error": None})
    once = older.model_copy(update={"visits": steady.visits[:1]})
    assert steady.step_high > 1.02 * steady.step_low
    assert step_share(steady) < 0.001
    assert step_share(older) == 0
    assert step_share(once) > 0.005  # all that its steps show


def drifting(rng, drift, visits, points, workers):
    return [
        one.model_copy(update={"workers": workers}) for one in noisy(rng, drift, visits, points)
    ]


def test_each_number_of_workers_drifts_as_its_own_visits_show():
    rng = random.Random(0)
    points = [*drifting(rng, 0.01, 3, 8, 1), *drifting(rng, 0.12, 3, 8, 2)]
    found, of_all = drift_by_workers(points), pooled_drift(points)
    assert 0.01 <= found[1].share < 0.5 * of_all.share
    assert 0.08 < found[2].share < 0.15
    assert found[1].degrees == found[2].degrees == 2 * 8 + 4


def test_where_few_visits_tell_workers_drift_as_all_do():
    rng = random.Random(1)
    points = [*drifting(rng, 0.01, 4, 20, 1), *drifting(rng, 0.12, 2, 1, 2)]
    found, of_all = drift_by_workers(points), pooled_drift(points)
    assert found[2].degrees == 1 + 4
    assert 0.8 * of_all.share < found[2].share < 5 * of_all.share
    never = [*points[:20], points[20].model_copy(update={"visits": ()})]
    assert drift_by_workers(never)[2].share == pytest.approx(pooled_drift(never).share)
    assert drift_by_workers(never)[2].degrees == 4
    assert drift_by_workers(points[:1]) == {1: (ASSUMED_DRIFT, 0)}


def test_one_number_of_workers_drifts_as_all_points_do():
    points = noisy(random.Random(2), 0.05, 3, 10)
    assert drift_by_workers(points)[1].share == pytest.approx(pooled_drift(points).share)
    assert drift_by_workers(points)[1].degrees == pooled_drift(points).degrees


def test_one_suspended_visit_does_not_decide_the_drift_of_its_workers():
    points = noisy(random.Random(3), 0.05, 3, 10)
    stuck = point((0.02, 10.0)).model_copy(update={"workers": 2})
    assert drift_by_workers([*points, stuck])[2].share < 0.15


@pytest.mark.parametrize(
    "visits", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 9))]
)
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
