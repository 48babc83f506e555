"""What a probe measures next, on arithmetic alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.prediction.drift import LATER_VISITS, median_share
from batchwright.probing.commands import Point, Visited, ignored
from batchwright.probing.course.acquisition import (
    Ledger,
    OpenChoice,
    expected_peak,
    half_width,
    is_enough,
    ladder_of,
    largest_size,
    local_batch_sizes,
    middle_size,
    next_point,
    smallest_size,
    visit_seconds,
    worker_counts,
)
from batchwright.probing.kinds import Place
from batchwright.probing.visiting import Visitor
from samples import make_job

SIZES = (16, 32, 64, 128, 256)
POINTS = [Point(workers, 32, size) for workers in (1, 2) for size in SIZES]
STEP = ((0.9, 0.1),)


@pytest.mark.parametrize(
    ("most", "least", "expected"),
    [
        (71, 2, [16, 32, 64, 71]),
        (128, 1, [16, 32, 64, 128]),
        (30, 2, [4, 8, 16, 30]),
        (1, 2, [2, 4, 8]),
        (0, 1, [1, 2, 4]),
        (5, 1, [1, 2, 4, 5]),
    ],
)
def test_measured_batches_reach_what_a_plan_can_choose(most, least, expected):
    assert local_batch_sizes(most, least) == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_powers_of_two_and_all_workers_are_measured(most, expected):
    assert worker_counts(most) == expected


def test_a_visit_takes_its_steps_and_those_that_warm_up():
    assert visit_seconds(0.01, 10) == pytest.approx(0.01 * (10 + 2))
    assert visit_seconds(0.05, 10) == pytest.approx(0.05 * (8 + 2))
    assert visit_seconds(3.0, 10) == pytest.approx(3.0 * (2 + 1))
    assert visit_seconds(3.0, 1) == pytest.approx(3.0 * (1 + 1))
    assert visit_seconds(3.0, 10, first=True) == pytest.approx(3.0 * (2 + 1 + 2))
    assert visit_seconds(3.0, 10, loaders=4) == pytest.approx(3.0 * (4 + 1 + 5 + 4))
    assert visit_seconds(0.01, 10, graphs=True) == pytest.approx(0.01 * (10 + 2 + 10))
    assert visit_seconds(0.01, 10, first=True, graphs=True) == pytest.approx(0.01 * (14 + 20))
    assert visit_seconds(0.01, 10, loaders=16) == pytest.approx(0.01 * (16 + 2 + 17 + 16))


@given(st.floats(1e-5, 10), st.floats(0.1, 100), st.integers(0, 5000), st.integers(1, 2))
def test_first_batches_rise_and_cost_no_more_than_the_fewest_do(
    sample_seconds, seconds, most, least
):
    sizes = local_batch_sizes(most, least)
    ladder = ladder_of(sizes, least)
    given_time = {"seconds": seconds, "visit": first_visit(sample_seconds)}
    smallest = smallest_size(ladder, sizes[0], **given_time)
    largest = largest_size(ladder, smallest, **given_time)
    middle = middle_size(ladder, smallest, largest)
    assert least <= smallest <= sizes[0]
    assert middle is not None
    assert smallest < middle < largest <= max(sizes)
    taken = given_time["visit"](largest)
    assert taken <= seconds / 2 or largest == [s for s in ladder if s > smallest][1]


def first_visit(sample_seconds, fixed_seconds=0.0):
    """Seconds of the first visit to a local batch."""
    return lambda size: visit_seconds(fixed_seconds + size * sample_seconds, 10, first=True)


def test_slow_steps_begin_with_smaller_batches():
    ladder = ladder_of([16, 32, 64, 71], 2)
    assert ladder == [2, 4, 8, 16, 32, 64, 71]
    quick, slow = first_visit(0.001), first_visit(0.06)
    assert smallest_size(ladder, 16, seconds=4.0, visit=quick) == 16
    assert largest_size(ladder, 16, seconds=4.0, visit=quick) == 71
    assert smallest_size(ladder, 16, seconds=4.0, visit=slow) == 2
    assert smallest_size(ladder, 16, seconds=4.0, visit=first_visit(0.001, 0.02)) == 16
    assert smallest_size(ladder, 16, seconds=4.0, visit=first_visit(0.001, 0.04)) == 8
    assert largest_size(ladder, 2, seconds=4.0, visit=slow) == 8


def test_the_peak_to_come_goes_on_as_the_last_segment_does():
    assert expected_peak({}, 100, 64) == 0
    assert expected_peak({2: 140}, 100, 4) == 180
    assert expected_peak({2: 140, 4: 160, 8: 240}, 100, 16) == 400
    assert expected_peak({2: 140, 8: 240}, 100, 5) == 240
    assert expected_peak({2: 80}, 100, 4) == 80  # the fixed part is no more than what was seen


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4)), min_size=1), st.integers(9, 999))
def test_the_peak_to_come_is_never_overrated_where_two_batches_were_seen(moments, size):
    def peak(batch):  # each moment of a step holds bytes linear in the batch
        return max(fixed + slope * batch for fixed, slope in moments)

    seen = {batch: peak(batch) for batch in (2, 8)}
    assert expected_peak(seen, 0, size) <= peak(size) * (1 + 1e-9) + 1e-6


def choose(ledger, *, error=lambda point: 0.1, left=100.0, seconds=lambda point: 1.0):
    return next_point(POINTS, ledger, error=error, seconds=seconds, left=left)


def test_the_least_certain_point_is_next():
    worst = POINTS[7]
    chosen = choose(Ledger(), error=lambda point: 0.2 if point == worst else 0.1)
    assert chosen == worst


def test_a_costly_visit_must_promise_more():
    slow = POINTS[4]
    seconds = {slow: 4.0}
    half = choose(
        Ledger(),
        error=lambda point: 0.19 if point == slow else 0.1,
        seconds=lambda point: seconds.get(point, 1.0),
    )
    assert half != slow
    assert slow == choose(
        Ledger(),
        error=lambda point: 0.21 if point == slow else 0.1,
        seconds=lambda point: seconds.get(point, 1.0),
    )


def test_of_equally_uncertain_points_those_of_the_open_choice_come_first():
    used, level = POINTS[7], POINTS[2]
    choice = OpenChoice(frozenset({used}), frozenset({level}))
    assert choice.worth(used) == choice.worth(level) == 1
    assert 1 > choice.worth(POINTS[1]) > choice.worth(Point(1, 64, 16)) > 0
    assert OpenChoice().worth(POINTS[0]) == 1
    ledger, order = Ledger(), []
    for _ in range(2):
        given = {"error": lambda _: 0.1, "seconds": lambda _: 1.0, "left": 100.0}
        order.append(next_point(POINTS, ledger, **given, choice=choice))
        ledger.add(order[-1], STEP)
    assert set(order) == {used, level}


def test_level_candidates_must_be_known_better():
    ledger = Ledger()
    for point in POINTS * 2:
        ledger.add(point, STEP)
    given = {"error": lambda _: 0.02, "drift": lambda _: 0.0, "target": 0.05}
    level = OpenChoice(frozenset({POINTS[0]}), frozenset({POINTS[5]}))
    decided = OpenChoice(frozenset({POINTS[0]}))

    def enough(choice, beside_others):
        return is_enough(
            POINTS, ledger, **given, comparison_error=lambda _: beside_others, choice=choice
        )

    assert enough(decided, 0.02)
    assert not enough(level, 0.02)
    assert enough(level, 0.01)  # though all measurements together may be off by more


def test_no_point_is_visited_twice_in_a_row_and_all_come_up():
    ledger = Ledger()
    certain = {point: 0.1 + 0.01 * index for index, point in enumerate(POINTS)}
    order = []
    for _ in range(60):
        point = choose(ledger, error=certain.__getitem__)
        ledger.add(point, STEP)
        order.append(point)
    assert all(before != after for before, after in pairwise(order))
    assert set(order) == set(POINTS)
    assert order.count(POINTS[-1]) > order.count(POINTS[0])


def test_a_point_that_is_never_certain_does_not_take_all_visits():
    ledger = Ledger()
    for point in POINTS:
        ledger.add(point, STEP)
    order = []
    for _ in range(40):
        order.append(choose(ledger, error=lambda point: 0.3 if point == POINTS[0] else 0.1))
        ledger.add(order[-1], STEP)
    assert order.count(POINTS[0]) <= 16


@given(
    st.floats(1, 60),
    st.lists(st.floats(0.001, 3), min_size=len(POINTS), max_size=len(POINTS)),
)
def test_visits_never_take_more_than_the_time_left(budget, steps):
    """A clock of its own: each visit takes exactly what it was thought to."""
    cost = dict(zip(POINTS, steps, strict=True))
    ledger, clock = Ledger(), 0.0
    for _ in range(500):
        point = choose(ledger, left=budget - clock, seconds=cost.__getitem__)
        if point is None:
            break
        clock += cost[point]
        ledger.add(point, STEP)
    assert clock <= budget
    if 2 * max(steps) < budget and max(steps) > 0.1:
        assert ledger.turn >= 1


def test_a_new_point_may_take_half_the_time_left_and_a_known_one_all_of_it():
    ledger = Ledger()
    assert choose(ledger, left=1.9) is None
    assert choose(ledger, left=2.0) is not None
    ledger.add(POINTS[0], STEP)
    ledger.add(POINTS[1], STEP)
    assert choose(ledger, left=1.0) == POINTS[0]


def test_enough_is_three_batches_seen_again_on_each_curve_and_every_interval_in_the_target():
    ledger = Ledger()

    def enough(error=0.01, drift=0.01, candidates=POINTS):
        return is_enough(
            candidates,
            ledger,
            error=lambda _: error,
            comparison_error=lambda _: error,
            drift=lambda _: drift,
            target=0.05,
        )

    assert not enough()
    three = [point for point in POINTS if point.local_batch_size in SIZES[:3]]
    for point in three:
        ledger.add(point, STEP)
    assert not enough()
    for point in three:
        assert not enough()
        ledger.add(point, STEP)
    assert enough()
    assert not enough(error=0.05)
    assert not enough(drift=0.1)
    assert not enough(candidates=[*POINTS, Point(1, 64, 16)])  # a curve nobody looked at
    asked = dict.fromkeys(("error", "comparison_error", "drift"), lambda _: 0)
    assert not is_enough([], Ledger(), **asked, target=1)
    ledger.add(Point(1, 32, 128), STEP)
    assert enough()
    noisy = POINTS[0]  # one point may scatter more than others
    drifts = {"drift": lambda point: 0.1 if point == noisy else 0.01}
    sure = {"error": lambda _: 0.01, "comparison_error": lambda _: 0.01, "target": 0.05}
    assert not is_enough(POINTS, ledger, **sure, **drifts)
    assert is_enough(POINTS[1:], ledger, **sure, **drifts)


def test_the_half_width_is_of_a_measurement_of_several_visits():
    assert half_width(0.03, 0.04 / median_share(LATER_VISITS)) == pytest.approx(1.96 * 0.05)


def test_visits_beside_other_programs_say_nothing_of_kinds_of_workers_either():
    places = [Place(f"node{n}", "", kind, "a GPU", 1) for n, kind in enumerate("ab")]
    visitor = Visitor(make_job(), None, 2, ignored, places=places)
    points = [Point(2, 32, size) for size in (16, 32)]

    def visit(seconds: float) -> None:
        for point in points:
            own = tuple((pace * seconds, 3 * seconds - pace * seconds) for pace in (1, 3))
            visitor.keep(point, Visited(steps=((2 * seconds, seconds),) * 2, by_worker=own))

    visit(0.1)
    visit(0.1)
    quiet, since = visitor.kinds(), visitor.ledger.turn
    for _ in range(4):
        visit(0.5)
    visitor.ledger.disturb(since)
    assert [kind.kind for kind in quiet] == ["a", "b"]
    for kind, before in zip(visitor.kinds(), quiet, strict=True):
        for step, then in zip(kind.steps, before.steps, strict=True):  # but how slow they were
            assert step.beside_seconds == pytest.approx(5 * step.step_seconds)
            assert step.model_copy(update={"beside_seconds": None}) == then
        assert kind.model_copy(update={"steps": before.steps}) == before
