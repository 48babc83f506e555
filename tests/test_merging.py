"""`planning.merging`: several profiles become one for each kind of worker."""

import pytest

import batchwright as bw
from batchwright.errors import PlanError
from batchwright.planning.merging import kind_of, merge_profiles
from batchwright.planning.planner import make_plan
from batchwright.planning.validation import planning_job
from batchwright.prediction.drift import step_share
from batchwright.prediction.step_time import fit_step_time
from batchwright.records import OutOfMemory, Profile, StepLoading
from samples import (
    LOCAL_BATCHES,
    make_cluster,
    make_data,
    make_job,
    make_kind_profile,
    make_memory,
    make_network,
    make_profile,
    make_step,
)


def with_steps(*points, **changes):
    steps = tuple(make_step(workers, batch) for workers, batch in points)
    return make_profile(steps=steps, **changes)


def test_one_profile_stays_as_it_is():
    profile = make_profile()
    assert merge_profiles([profile]) == (profile,)


def test_points_of_one_kind_are_joined_and_equal_ones_pool_their_visits():
    first, second = with_steps((1, 4), (1, 8)), with_steps((1, 8), (2, 8))
    (merged,) = merge_profiles([first, second])
    found = {(p.workers, p.local_batch_size): p for p in merged.steps}
    assert sorted(found) == [(1, 4), (1, 8), (2, 8)]
    pooled, single = found[1, 8], make_step(1, 8)
    assert pooled.visits == single.visits * 2
    assert pooled.repeats == 2 * single.repeats
    assert pooled.step_seconds == pytest.approx(single.step_seconds)
    assert found[1, 4] == make_step(1, 4)
    assert merged.probe_seconds == first.probe_seconds + second.probe_seconds
    assert merged.job.workers == "auto"
    assert Profile.model_validate_json(merged.model_dump_json()) == merged


@pytest.mark.parametrize("order", [1, -1])
def test_computing_is_as_large_a_share_of_pooled_steps_as_of_each(order):
    """The middle visit may be of one profile, and most of the steps of another."""

    def at(factor, visits, repeats):
        steps = []
        for batch in LOCAL_BATCHES:
            step = make_step(1, batch)
            parts = ("compute_seconds", "step_seconds", "step_low", "step_high")
            times = {name: factor * getattr(step, name) for name in parts}
            seen = {"visits": (factor * step.step_seconds,) * visits, "repeats": repeats}
            steps.append(step.model_copy(update={**times, **seen}))
        return make_profile(steps=tuple(steps))

    (merged,) = merge_profiles([at(2.0, 5, 50), at(1.0, 3, 300)][::order])
    times = fit_step_time(merged.steps)
    assert times.computing(1, 32, 64) == pytest.approx(times.seconds(1, 32, 64))
    assert times.seconds(1, 32, 64, 8) == pytest.approx(8 * times.seconds(1, 32, 8))


def test_pooled_steps_wait_for_as_large_a_share_of_their_time_as_each():
    def at(seconds, visits):
        times = {"batch_seconds": seconds, "cpu_seconds": seconds, "alone_seconds": 0.2 * seconds}
        loading = StepLoading(loaders=2, input_seconds=0.8 * seconds, **times)
        seen = {"step_seconds": seconds, "visits": (seconds,) * visits, "loading": loading}
        return make_profile(steps=(make_step(1, 8).model_copy(update=seen),))

    (merged,) = merge_profiles([at(1.0, 1), at(0.1, 5)])
    (step,) = merged.steps
    assert step.loading.input_seconds == pytest.approx(0.8 * step.step_seconds)
    assert step.loading.alone_seconds == pytest.approx(0.2 * step.step_seconds)
    assert step.loading.loaders == 2


def test_a_point_without_visits_counts_as_one_visit():
    bare = make_step(1, 8).model_copy(update={"visits": (), "step_seconds": 0.5})
    (merged,) = merge_profiles([with_steps((1, 8)), make_profile(steps=(bare,))])
    assert merged.steps[0].visits == (*make_step(1, 8).visits, 0.5)


def test_what_steps_make_of_a_visit_is_the_mean_of_what_is_told():
    told, untold = make_step(1, 8).model_copy(update={"visit_error": 0.02}), make_step(1, 8)
    more = told.model_copy(update={"visit_error": 0.05, "repeats": 2 * told.repeats})
    once = untold.model_copy(update={"visits": ()})
    for points, expected in (
        ((told, more), 0.04),
        ((told, untold), 0.02),
        ((untold,) * 2, None),
        ((once,) * 2, step_share(once)),
    ):
        (merged,) = merge_profiles([make_profile(steps=(point,)) for point in points])
        assert merged.steps[0].visit_error == pytest.approx(expected)


def test_visits_beside_other_programs_count_where_there_are_no_others():
    quiet = make_step(1, 8)
    slow = quiet.model_copy(update={"visits": (0.9, 0.9), "step_seconds": 0.9, "disturbed": True})
    slower = slow.model_copy(update={"beside_seconds": 1.5})
    (merged,) = merge_profiles([make_profile(steps=(one,)) for one in (slow, quiet, slower)])
    (step,) = merged.steps
    assert (step.visits, step.disturbed, step.beside_seconds) == (quiet.visits, False, 1.5)
    (merged,) = merge_profiles([make_profile(steps=(one,)) for one in (slow, quiet)])
    (step,) = merged.steps
    assert (step.visits, step.beside_seconds) == (quiet.visits, 0.9)  # as of visits in a probe
    (merged,) = merge_profiles([make_profile(steps=(one,)) for one in (slow, slower)])
    (step,) = merged.steps
    assert (step.visits, step.disturbed) == ((0.9,) * 4, True)


def test_the_larger_peak_the_least_memory_and_all_failures_are_kept():
    low = make_memory(1, 8)
    high = low.model_copy(update={"peak_bytes": low.peak_bytes + 5})
    failed = OutOfMemory(resolution=32, local_batch_size=512, workers=2)
    (merged,) = merge_profiles(
        [
            make_profile(memory=(high,), cluster=make_cluster(memory_bytes=5)),
            make_profile(memory=(low,), out_of_memory=(failed,)),
            make_profile(memory=(), out_of_memory=(failed,)),
        ]
    )
    assert merged.memory == (high,)
    assert merged.out_of_memory == (failed,)
    assert merged.cluster.memory_bytes == 5


def test_kinds_stay_apart_in_order():
    profiles = [make_kind_profile("b"), make_kind_profile("a"), make_kind_profile("b")]
    merged = merge_profiles(profiles)
    assert [kind_of(one) for one in merged] == ["b", "a"]
    assert [len(one.steps) for one in merged] == [150, 150]


def test_kinds_may_differ_in_whether_they_replay_graphs_and_a_plan_replays_where_one_does():
    plain, replayed = (
        make_kind_profile(kind, job=make_job(cuda_graphs=key))
        for kind, key in (("slow", "off"), ("fast", "on"))
    )
    assert len(merge_profiles([plain, replayed])) == 2
    assert planning_job(plain, replayed).cuda_graphs == "on"
    assert planning_job(plain).cuda_graphs == "off"
    alike = make_kind_profile("slow", job=make_job(cuda_graphs="on"))
    with pytest.raises(PlanError, match="cuda_graphs is off in one and on in the other"):
        merge_profiles([plain, alike])


def test_merging_does_not_depend_on_how_it_is_grouped():
    a, b, c = with_steps((1, 4)), with_steps((1, 4), (1, 8)), with_steps((2, 4))
    (at_once,) = merge_profiles([a, b, c])
    (in_turn,) = merge_profiles([*merge_profiles([a, b]), c])
    assert at_once.steps == in_turn.steps


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": make_data(digest="ff" * 32)}, "data is .* in one and .*ffff"),
        ({"network": make_network(parameters=5)}, "network parameters is 75290 .* 5"),
        ({"job": make_job(precision="float32")}, "precision is bfloat16 .* float32"),
        ({"job": make_job(optimizer="adamw")}, "optimizer is auto .* adamw"),
        ({"job": make_job(augment="none")}, "augment is crop .* none"),
        ({"cluster": make_cluster(torch="2.6.0")}, "torch is 2.13.0 .* 2.6.0 .*probe both"),
        ({"cluster": make_cluster(cores=8)}, "cores is 2 .* 8"),
    ],
)
def test_profiles_of_other_workloads_settings_or_versions_are_refused(change, named):
    with pytest.raises(PlanError, match=named) as caught:
        merge_profiles([make_profile(), make_profile(**change)])
    assert "\n" not in str(caught.value)


def test_what_does_not_change_a_point_may_differ():
    other = make_profile(job=make_job(epochs=3, seed=9, global_batch=64, base_batch=32))
    assert len(merge_profiles([make_profile(), other])) == 1


def test_nothing_to_merge_is_refused():
    with pytest.raises(PlanError, match="at least one profile"):
        merge_profiles([])


def test_a_plan_of_two_halves_is_that_of_the_whole():
    halves = [with_steps(*[(workers, batch) for batch in (4, 8, 16, 32, 64)]) for workers in (1, 2)]
    open_job = make_job(workers="auto")
    halves = [
        half.model_copy(update={"job": make_job(workers=n)})
        for n, half in zip((1, 2), halves, strict=True)
    ]
    whole = make_plan(make_profile(), open_job)
    assert make_plan(halves, open_job).considered == whole.considered
    for given in (halves, halves[::-1]):
        plan = make_plan(given)
        assert plan.stages[0].local_batch_sizes == whole.stages[0].local_batch_sizes
        reason = next(one for one in plan.reasons if one.choice == "workers")
        assert reason.source == "predicted"
    assert bw.plan(halves, workers=1).workers == 1


def test_kinds_measured_in_other_numbers_leave_the_number_open_in_any_order():
    kinds = [
        make_profile(
            job=make_job(workers=count),
            cluster=make_cluster(kind=name, workers=count),
            steps=tuple(make_step(count, batch) for batch in LOCAL_BATCHES),
        )
        for name, count in (("a", 1), ("b", 2))
    ]
    for given in (kinds, kinds[::-1]):
        plan = make_plan(given)
        assert plan.job.workers == plan.workers == 2
        assert {one.workers for one in plan.considered} == {1, 2}


def test_evaluation_is_that_of_the_profiles_at_the_highest_resolution():
    """Plans for lower ones take it in proportion to the pixels."""

    def at(side, seconds):
        return make_profile(
            job=make_job(resolutions=(side,)),
            steps=tuple(make_step(2, batch, side) for batch in LOCAL_BATCHES),
            memory=tuple(make_memory(2, batch, side) for batch in LOCAL_BATCHES),
            evaluation_seconds_per_image=seconds,
        )

    low, high, again = at(32, 0.01), at(64, 0.04), at(64, 0.06)
    for given, seconds in (([low, high], 0.04), ([high, low], 0.04), ([low, high, again], 0.05)):
        (merged,) = merge_profiles(given)
        assert merged.evaluation_seconds_per_image == pytest.approx(seconds)
    asked = high.job.model_copy(update={"global_batch": 64})
    alone, both = (make_plan(given, asked).chosen for given in (high, [low, high]))
    spent = [one.train_seconds.value - 30 * one.epoch_seconds.value for one in (alone, both)]
    assert spent[0] == pytest.approx(spent[1])


def test_profiles_at_other_resolutions_make_one_of_both():
    def at(side):
        points = [(workers, batch, side) for workers in (1, 2) for batch in LOCAL_BATCHES]
        return make_profile(
            job=make_job(resolutions=(side,)),
            steps=tuple(make_step(*point) for point in points),
            memory=tuple(make_memory(*point) for point in points),
        )

    plan = make_plan([at(24), at(32)])
    assert plan.job.resolutions == (24, 32)
    with pytest.raises(PlanError, match="no step times at 32 px, only step times at 24 px"):
        bw.plan([at(24), at(24)], resolutions=[32])
