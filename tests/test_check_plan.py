"""Held-out points: which are measured, how they compare, and what is learnt from them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as some

from batchwright.errors import PlanError
from batchwright.planning.planner import make_plan
from batchwright.records import (
    Check,
    Cluster,
    KindTimes,
    MemoryPoint,
    OutOfMemory,
    Reason,
    StepTime,
    UpdateTime,
)
from batchwright.workflows.check_plan import (
    chosen_points,
    compare,
    open_again,
    own_steps,
    with_points,
)
from clusters import make_choice, make_held_out, make_measured, make_step, step_seconds
from samples import make_job, make_profile


class Measured(NamedTuple):
    """As `probing.probe.measure_points` returns it."""

    steps: tuple[StepTime, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
    cluster: Cluster = make_profile().cluster
    out_of_memory: tuple[OutOfMemory, ...] = ()
    kinds: tuple[KindTimes, ...] = ()


def key(point):
    return point.workers, point.resolution, point.local_batch_size


@given(
    sizes=some.dictionaries(
        some.tuples(some.integers(1, 4), some.sampled_from([16, 24, 32])),
        some.integers(1, 9),
        min_size=1,
    ),
    count=some.integers(1, 60),
)
def test_points_are_spread_evenly_over_workers_and_resolutions(sizes, count):
    held_out = tuple(
        make_held_out(w, 4 * b, r) for (w, r), n in sizes.items() for b in range(1, n + 1)
    )
    found = chosen_points(make_choice(held_out=held_out, considered=()), count)
    assert len(found) == min(count, len(held_out))
    assert len({key(one) for one in found}) == len(found)
    assert {key(one) for one in found} <= {key(one) for one in held_out}
    taken = {place: sum((p.workers, p.resolution) == place for p in found) for place in sizes}
    for place, n in taken.items():
        most = max(taken.values())
        assert n == sizes[place] or n >= most - 1


def test_few_points_of_one_curve_lie_apart_and_not_at_its_ends():
    plan = make_choice(workers=(2,), considered=())
    sizes = [one.local_batch_size for one in chosen_points(plan, 2)]
    assert sizes == [24, 182]
    assert len(chosen_points(plan, 100)) == 6


def test_the_plan_s_own_step_is_measured_first():
    plan = make_choice()  # 2 workers with 256 each
    (own,) = chosen_points(plan, 1)
    assert key(own) == (2, 32, 256)
    (planned,) = [one for one in plan.considered if key(one) == key(own)]
    assert own.step_seconds == planned.step_seconds
    assert own.peak_bytes == planned.peak_bytes
    found = chosen_points(plan, 4)
    assert found[0] == own
    assert len({key(one) for one in found}) == 4
    alone = plan.model_copy(update={"held_out": ()})
    assert chosen_points(alone, 9) == (own,)
    other = found[1]
    steps = (make_step(2, 256), make_step(other.workers, other.local_batch_size))
    check = compare(plan, found, Measured(steps=steps))
    assert [one.planned for one in check.points] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 128},
        {"local_batch_sizes": (300, 212)},
    ],
)
def test_a_step_that_equal_workers_cannot_take_in_one_pass_is_not_measured_as_the_plan_s(change):
    plan = make_choice()
    stage = plan.stages[0].model_copy(update=change)
    assert own_steps(plan.model_copy(update={"stages": (stage,)})) == ()
    assumed = tuple(one.model_copy(update={"assumed": True}) for one in plan.considered)
    assert own_steps(plan.model_copy(update={"considered": assumed})) == ()


def test_a_step_of_another_optimizer_goes_into_no_profile_that_timed_no_updates():
    plan, profile = make_choice(), make_measured()
    _, other = points = chosen_points(plan, 2)
    apart = Measured(steps=(make_step(2, 256, 1.5),))
    measured = Measured(steps=(make_step(other.workers, other.local_batch_size),))
    check = compare(plan, points, measured, profile, apart=apart)
    assert [one.planned for one in check.points] == [True, False]
    kept = {key(one): one for one in check.profile.steps}
    assert kept[2, 32, 256] == {key(one): one for one in profile.steps}[2, 32, 256]
    assert key(other) in kept
    alone = compare(plan, points[:1], None, profile, apart=apart)
    assert alone.profile == profile
    assert alone.points[0].planned


def timed(optimizer: str, seconds: float) -> UpdateTime:
    low, high = 0.9 * seconds, 1.1 * seconds
    return UpdateTime(
        optimizer=optimizer, workers=2, seconds=seconds, low=low, high=high, repeats=9
    )


@pytest.mark.parametrize("known", [False, True])
def test_a_step_of_another_optimizer_goes_into_the_profile_less_its_longer_update(known):
    profile = make_measured(updates=(timed("sgd", 0.001), timed("muon", 0.005)))
    profile = profile.model_copy(update={"job": make_job(optimizer="auto")})
    if not known:
        steps = tuple(one for one in profile.steps if key(one) != (2, 32, 256))
        profile = profile.model_copy(update={"steps": steps})
    plan = make_choice(update="muon")
    own = make_step(2, 256, 1.5, visit_error=0.01)
    check = compare(plan, chosen_points(plan, 1), None, profile, apart=Measured(steps=(own,)))
    assert check.points[0].measured == own.step_seconds
    before = {key(one): one for one in profile.steps}
    after = {key(one): one for one in check.profile.steps}
    taken = after.pop((2, 32, 256))
    less = tuple(one - 0.004 for one in own.visits)
    assert sorted(taken.visits) == pytest.approx(
        sorted(less + (before.pop((2, 32, 256)).visits if known else ()))
    )
    assert after == before
    if not known:
        assert taken.compute_seconds == pytest.approx(own.compute_seconds - 0.004)
        assert taken.step_seconds == pytest.approx(own.step_seconds - 0.004)
        assert taken.visit_error > own.visit_error
    long = make_measured(updates=(timed("sgd", 0.001), timed("muon", own.step_seconds)))
    long = long.model_copy(update={"job": profile.job, "steps": profile.steps})
    found = compare(plan, chosen_points(plan, 1), None, long, apart=Measured(steps=(own,)))
    assert found.profile == long  # what is left is nothing that a step can take


def test_a_plan_without_held_out_points_says_what_to_measure():
    with pytest.raises(PlanError, match=r"probe at more batches .* and plan again"):
        chosen_points(make_choice(held_out=(), considered=()), 12)


def test_every_quantity_that_was_predicted_and_measured_is_compared():
    plan = make_choice()
    own, first, second, *_ = points = chosen_points(plan, 12)
    assert key(own) == (2, 32, 256)
    measured = Measured(
        steps=(make_step(*key(first)[::2], 1.02), make_step(*key(second)[::2], 1.30)),
        memory=(
            MemoryPoint(
                resolution=32,
                local_batch_size=first.local_batch_size,
                workers=first.workers,
                peak_bytes=round(first.peak_bytes.high) + 10,
                resident_bytes=round(first.resident_bytes.value),
            ),
            MemoryPoint(
                resolution=32,
                local_batch_size=second.local_batch_size,
                workers=second.workers,
                peak_bytes=round(second.peak_bytes.value),
            ),
        ),
    )
    check = compare(plan, points, measured)
    assert [(one.quantity, one.local_batch_size, one.inside) for one in check.points] == [
        ("step_seconds", first.local_batch_size, True),
        ("peak_bytes", first.local_batch_size, False),
        ("resident_bytes", first.local_batch_size, True),
        ("step_seconds", second.local_batch_size, False),
        ("peak_bytes", second.local_batch_size, True),
    ]
    assert check.points[0].error == pytest.approx(1 / 1.02 - 1)
    assert len(check.points[0].visits) == 3
    assert check.missed
    assert check.profile is None
    assert Check.model_validate_json(check.model_dump_json()) == check


def test_a_point_that_did_not_fit_is_kept():
    lost = OutOfMemory(resolution=32, local_batch_size=362, workers=2)
    check = compare(make_choice(), (), Measured(out_of_memory=(lost,)), make_measured())
    assert check.out_of_memory == (lost,)
    assert check.profile.out_of_memory == (lost,)


def test_the_profile_takes_the_new_points_in_and_pools_those_it_had():
    profile = make_measured()
    new, known = make_step(2, 24), make_step(2, 32, 1.1)
    check = compare(make_choice(), (), Measured(steps=(new, known)), profile)
    by_place = {key(one): one for one in check.profile.steps}
    assert by_place[2, 32, 24] == new
    pooled = by_place[2, 32, 32]
    assert len(pooled.visits) == 6
    assert step_seconds(2, 32) < pooled.step_seconds < 1.1 * step_seconds(2, 32)
    assert len(check.profile.steps) == len(profile.steps) + 1
    for field in ("memory", "collectives", "noise", "probe_seconds", "data", "cluster"):
        assert getattr(check.profile, field) == getattr(profile, field)


@pytest.mark.parametrize("virtual", [{}, {"sample_seconds": 0.02, "step_seconds": 0.1}])
def test_a_simulated_plan_has_nothing_to_check(virtual):
    job = make_job(launch="virtual", workers=4, virtual=virtual)
    plan = make_plan(make_profile(), job)
    with pytest.raises(PlanError, match="simulated cluster"):
        chosen_points(plan, 3)
    here = plan.model_copy(update={"job": job.model_copy(update={"launch": "local"})})
    with pytest.raises(PlanError, match="nothing can be checked"):
        chosen_points(here, 3)


@pytest.mark.parametrize("change", [{"torch": "2.6.0"}, {"device_name": "Other CPU"}])
def test_points_of_another_machine_do_not_go_into_the_profile(change):
    other = make_measured().cluster.model_copy(update=change)
    with pytest.raises(PlanError, match=next(iter(change.values()))):
        with_points(make_measured(), cluster=other, steps=(make_step(1, 24),))
    with pytest.raises(PlanError, match=next(iter(change.values()))):
        compare(make_choice(), (), Measured(cluster=other), make_measured())


def test_a_new_plan_chooses_the_workers_again_unless_they_were_asked_for():
    profile = make_measured(job=make_job(workers="auto"))
    plan = make_choice()
    assert plan.job.workers == 2
    assert open_again(plan, profile).workers == "auto"
    asked = Reason(choice="workers", value="2", why="Asked for.", source="asked")
    assert open_again(make_choice(reasons=(asked,)), profile).workers == 2


def test_a_new_plan_may_train_as_long_as_the_job_and_not_as_the_plan():
    profile, fewer = make_measured(), make_job(epochs=8)
    assert open_again(make_choice(job=fewer, max_epochs=30), profile).epochs == 30
    assert open_again(make_choice(job=fewer), profile).epochs == 8
