"""`planning.candidates.choice`: the frontier, every objective and limit, and what nothing meets."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import PlanError
from batchwright.planning.candidates.choice import _share, choose
from batchwright.planning.candidates.objectives.comparisons import pareto
from batchwright.planning.planner import make_plan
from batchwright.prediction.accuracy.quality import fit_progress
from batchwright.records import GradientNoise, Job
from example_counts import examples
from samples import (
    LOCAL_BATCHES,
    make_cluster,
    make_data,
    make_job,
    make_kind_profile,
    make_profile,
    make_step,
    make_summary,
    reason,
)

COORDINATE = st.integers(0, 8)
MEASURED = 240  # images at once, the most that `make_kind_profile` has times of


def planned(profile=None, **changes):
    """A plan of the sample profile, by time unless keys of its job or goal say otherwise."""
    profile = profile or make_profile()
    if "accuracy" not in changes:
        changes = {"objective": "knee"} | changes
    keys = {key: changes.pop(key) for key in tuple(changes) if key in Job.model_fields}
    job = profile.job.model_dump() | {"workers": "auto"} | keys
    job["goal"] = job["goal"] | changes
    return make_plan(profile, Job.model_validate(job))


def chosen(plan):
    batch = plan.stages[0].global_batch_size
    return next(
        one
        for one in plan.considered
        if (one.workers, one.global_batch_size, one.resolution)
        == (plan.workers, batch, plan.top_resolution)
        and (not plan.kinds or one.kinds == plan.kinds)
    )


def allowed(plan):
    return [
        one for one in plan.considered if not one.refused and one.resolution == plan.top_resolution
    ]


def at_knees(plan):
    """The candidate at each cluster's knee, or its largest where there is none."""
    found = {}
    for one in allowed(plan):
        for knee in plan.knees:
            if (knee.workers, knee.resolution) == (one.workers, one.resolution) and (
                knee.global_batch_size in (None, one.global_batch_size)
            ):
                found[one.workers] = one
    return list(found.values())


def many_workers(**changes):
    """Up to 64 workers on data so few that larger batches cannot pay for ever more exchange."""
    job = make_kind_profile("a", sides=(96, 128)).job
    link = job.link.model_copy(update={"latency": 1e-3})
    profile = make_kind_profile(
        "a",
        sides=(96, 128),
        job=job.model_copy(update={"link": link, "learning_rate": "auto"}),
        data=make_data(train_samples=20_000, val_samples=1000, side=128),
    )
    return planned(profile, **{"max_workers": 64, **changes})


# ------------------------------------------------------------------------------------- frontier


@given(st.lists(st.tuples(COORDINATE, COORDINATE), max_size=40))
def test_the_frontier_is_what_comparing_all_pairs_gives(points):
    def beaten(point):
        return any(
            other[0] <= point[0] and other[1] <= point[1] and other != point for other in points
        )

    assert pareto(points) == [i for i, point in enumerate(points) if not beaten(point)]


def test_the_marked_candidates_are_the_frontier_of_their_resolution():
    plan = many_workers(price=1.0)
    assert {one.resolution for one in plan.considered} == {96, 128}
    for side in (96, 128):
        open_to = [one for one in plan.considered if one.resolution == side and not one.refused]
        for one in open_to:
            beaten = any(
                other.train_seconds.value <= one.train_seconds.value
                and other.cost.value <= one.cost.value
                and other.accuracy.value >= one.accuracy.value
                and (other.train_seconds, other.cost) != (one.train_seconds, one.cost)
                for other in open_to
            )
            assert one.frontier == (not beaten)
    assert not any(one.frontier for one in plan.considered if one.refused)
    assert chosen(plan).frontier


# ----------------------------------------------------------------------------------- objectives


def test_the_time_objective_takes_the_least_time():
    plan = many_workers(objective="time")
    assert chosen(plan).train_seconds.value == min(o.train_seconds.value for o in allowed(plan))
    assert 1 < plan.workers < 64


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_of_equal_candidates_the_smallest_batch_is_taken_whatever_the_rounding(objective):
    """In passes of 3 images, 64 took a seventeenth digit less than 32, and was chosen for it."""
    profile = make_profile(data=make_data(train_samples=1280))
    plan = planned(
        profile, objective=objective, price=1.0, micro_batch=3, workers=1, least_steps=20
    )
    small, large = (
        next(one for one in allowed(plan) if (one.workers, one.global_batch_size) == (1, batch))
        for batch in (32, 64)
    )
    assert large.train_seconds.value < small.train_seconds.value
    assert large.train_seconds.value == pytest.approx(small.train_seconds.value, rel=1e-12)
    assert chosen(plan) == small
    assert small.frontier == large.frontier


def test_the_least_of_a_limit_is_advised_without_less():
    few = make_profile(data=make_data(train_samples=3))
    with pytest.raises(PlanError, match=r"give goal\.least_steps=1$"):
        planned(few, workers=1)


def test_the_cost_objective_takes_the_least_cost():
    plan = many_workers(objective="cost", price=2.0)
    near = [one for one in allowed(plan) if one.local_batch_size < 2 * MEASURED]
    best = min(near, key=lambda one: one.cost.value)
    assert chosen(plan) == best
    cheapest = min(allowed(plan), key=lambda one: one.cost.value)
    assert f"Not taken: {cheapest.global_batch_size} samples" in reason(plan, "global batch").why
    # A plan with another objective says so, too: elsewhere it would seem to choose what costs more.
    others = reason(many_workers(objective="time", price=2.0), "workers").alternatives
    assert [one.value.partition("(")[2] for one in others if "objective=cost" in one.value] == [
        "goal.objective=cost, near what was measured)"
    ]
    assert plan.workers == 1  # every further worker only adds an exchange
    hours = best.train_seconds.value / 3600
    assert best.cost.value == pytest.approx(2.0 * plan.workers * hours)


def test_without_a_price_the_knee_is_where_the_next_size_up_saves_too_little():
    plan = many_workers()
    best = {one.workers: one.train_seconds.value for one in at_knees(plan)}
    sizes = sorted(best)
    saves = [1 - best[more] / best[few] for few, more in pairwise(sizes)]
    expected = next(few for few, saved in zip(sizes, saves, strict=False) if saved <= 0.05)
    assert plan.workers == expected
    assert 1 < expected < 64
    assert "next size up saves at most 5.0 %" in reason(plan, "workers").why


def test_with_a_price_the_knee_is_the_least_product_of_time_and_cost():
    plan = many_workers(price=1.0)
    best = min(at_knees(plan), key=lambda one: one.train_seconds.value * one.cost.value)
    assert chosen(plan) == best
    assert "one percent more cost" in reason(plan, "workers").why


LEARNT_BEFORE = {"weights": "w.pt"}
"""Of such weights other tasks tell nothing, so the noise scale is all that tells of progress."""


def test_the_accuracy_objective_weighs_progress_per_sample():
    noise = GradientNoise(noise_scale=30, trace=1, sqr_norm=0.01, parts=2, repeats=20)
    profile = make_profile(noise=noise, job=make_job(**LEARNT_BEFORE))
    plan = planned(profile, objective="target-accuracy", accuracy=0.9, base_batch=32)
    progress = fit_progress(noise, base_batch=32, scaling="sqrt")
    for one in plan.considered:
        epochs = progress.relative_epochs(one.global_batch_size).value
        assert one.target_seconds.value == pytest.approx(one.epoch_seconds.value * epochs)
    assert chosen(plan) == min(allowed(plan), key=lambda one: one.target_seconds.value)
    fastest = planned(profile, objective="time")
    assert plan.stages[0].global_batch_size < fastest.stages[0].global_batch_size
    assert "number of epochs is not known" in reason(plan, "global batch").why


@examples(60)
@given(
    st.floats(1e-4, 0.05),
    st.floats(1e-5, 5e-3),
    st.floats(0, 0.02),
    st.floats(2, 5000),
    st.sampled_from(["linear", "sqrt", "none"]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
)
def test_choice_table_frontier_and_alternatives_go_by_one_time_to_the_target(
    fixed, per_image, exchange, noise_scale, scaling, price, with_run
):
    steps = tuple(
        make_step(workers, batch, seconds=fixed + per_image * batch + exchange * (workers > 1))
        for workers in (1, 2)
        for batch in (4, 8, 16, 32, 64)
    )
    noise = GradientNoise(
        noise_scale=noise_scale, trace=1, sqr_norm=0.01, relative_error=0.3, parts=2, repeats=20
    )
    goal = {"objective": "target-accuracy", "accuracy": 0.9, "price": price}
    job = make_job(goal=goal, workers="auto", scaling=scaling, optimizer="sgd", **LEARNT_BEFORE)
    run = make_summary()
    began = run.plan.job.model_copy(update=LEARNT_BEFORE)
    run = run.model_copy(update={"plan": run.plan.model_copy(update={"job": began})})
    runs = [run] if with_run else []
    measured = make_job(optimizer="sgd", **LEARNT_BEFORE)
    plan = make_plan(make_profile(steps=steps, noise=noise, job=measured), job, runs=runs)
    best, known = chosen(plan), allowed(plan)
    assert best.target_seconds.value == min(one.target_seconds.value for one in known)

    def share(one, other, quantity):
        return getattr(one, quantity).value / getattr(other, quantity).value

    for one in plan.considered:
        if with_run:  # whole trainings, of the epochs that the run tells
            assert one.refused or one.target_seconds == one.train_seconds
            continue
        # Epoch time over progress, both as the table has them.
        times = share(one, best, "epoch_seconds") / share(one, best, "efficiency")
        assert share(one, best, "target_seconds") == pytest.approx(times)

    def spent(one):
        return one.target_seconds.value * one.workers

    marked = [one for one in known if one.frontier]
    assert best in marked
    for one in known:
        beaten = any(
            other.target_seconds.value < one.target_seconds.value * (1 - 1e-9)
            and spent(other) < spent(one) * (1 - 1e-9)
            for other in known
        )
        assert not (one.frontier and beaten)
    quickest = {}
    for one in sorted(known, key=lambda one: one.target_seconds.value):
        quickest.setdefault(one.workers, one)
    places = {(one.workers, one.global_batch_size): one for one in plan.considered}
    named = re.compile(r"(?:(\d+) workers?, global batch )?(\d+)")
    for told in (reason(plan, "workers"), reason(plan, "global batch")):
        for alternative in told.alternatives:
            workers, batch = named.match(alternative.value).groups()
            other = places[int(workers or plan.workers), int(batch)]
            times = share(other, best, "target_seconds")
            assert alternative.loss.startswith(_share(times, 1.0, "time to the accuracy"))
            if workers and "objective" not in alternative.value:
                assert other == quickest[int(workers)]


def test_a_run_tells_epochs_and_accuracy():
    run = make_summary()
    job = make_job(goal={"objective": "target-accuracy", "accuracy": 0.9}, workers="auto")
    plan = make_plan(make_profile(), job, runs=[run])
    best = chosen(plan)
    assert best.epochs.low <= best.epochs.value <= best.epochs.high
    assert best.accuracy is not None
    assert best.train_seconds.value == min(one.train_seconds.value for one in allowed(plan))
    assert "from the runs given" in reason(plan, "epochs to target").why
    assert "%" in reason(plan, "accuracy").value
    assert reason(planned(scaling="gain"), "accuracy").value == "not known"


def test_a_run_of_another_task_is_refused():
    run = make_summary()
    data = run.plan.data.model_copy(update={"digest": "ab" * 32})
    other = run.model_copy(update={"plan": run.plan.model_copy(update={"data": data})})
    said = r"data=digits \(digest abababababab\), the profile data=digits \(digest 5e5e5e5e5e5e\)"
    with pytest.raises(PlanError, match=f"{said}: give runs of the same task"):
        make_plan(make_profile(), runs=[other])


# --------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ({"deadline": 26}, "goal.deadline=26"),
        ({"price": 1.0, "max_cost": 0.013}, "goal.max_cost=0.013"),
        ({"max_workers": 1}, "has 2 workers, goal.max_workers=1"),
        ({"memory": 20 * 2**20}, "the limit is 20.0 MiB"),
        ({"least_steps": 40}, "goal.least_steps=40"),
    ],
)
def test_a_limit_refuses_by_the_upper_end_and_says_so(limit, named):
    free, plan = planned(), planned(**limit)
    refused = [one for one in plan.considered if named in one.refused]
    assert refused
    assert allowed(plan)
    assert not chosen(plan).refused
    for one in allowed(plan):
        assert one.train_seconds.high <= limit.get("deadline", float("inf"))
        assert one.cost is None or one.cost.high <= limit.get("max_cost", float("inf"))
        assert one.workers <= limit.get("max_workers", 2)
        assert one.peak_bytes.high <= limit.get("memory", float("inf"))
        assert one.steps_per_epoch >= limit.get("least_steps", 10)
    if "deadline" in limit:
        most = limit["deadline"]
        assert any(one.train_seconds.value <= most < one.train_seconds.high for one in refused)
    assert chosen(free).refused == ""


@pytest.mark.parametrize("objective", ["time", "knee"])
def test_bounds_of_a_worker_s_samples_bound_the_batches_to_choose_from(objective):
    """The batch was chosen without them, and the plan refused where it was beyond one."""
    keys = {"method": "dynamic-batch", "objective": objective, "workers": 2}
    free, most, least = (
        [one for one in planned(**keys, **bound).considered if one.workers == 2]
        for bound in ({}, {"most_local_batch": 24}, {"least_local_batch": 60})
    )
    assert [one.global_batch_size for one in free] == [8, 16, 32, 64, 128, 142, 256]
    assert [one.global_batch_size for one in most] == [8, 16, 32, 48, 64]
    assert most[-1].refused == "gives each worker 32 images, most_local_batch=24"
    assert planned(**keys, most_local_batch=24).stages[0].local_batch_sizes == (24, 24)
    assert [one.global_batch_size for one in least] == [128, 142, 256]
    with pytest.raises(PlanError, match=r"most_local_batch=24 .* give global_batch=48 or less"):
        planned(**keys, most_local_batch=24, global_batch=100)
    with pytest.raises(
        PlanError, match=r"142 .* gives each worker 71 images, least_local_batch=75"
    ):
        planned(**keys, least_local_batch=75)


def test_the_time_of_a_short_step_says_what_its_interval_allows_for():
    """As fixed as half of it may be, where cores share it; a GPU's, and one core's, is not."""
    said = {}
    for cores in (1, 2):
        plan = planned(make_profile(cluster=make_cluster(cores=cores)))
        said[cores] = "cores wait" in reason(plan, "epoch time").why, chosen(plan).epoch_seconds
    (alone, narrow), (shared, wide) = said[1], said[2]
    assert shared
    assert not alone
    assert wide.high > narrow.high
    gpu = planned(make_profile(cluster=make_cluster(device="cuda")))
    assert "cores wait" not in reason(gpu, "epoch time").why


def test_a_knee_that_misses_the_deadline_gives_way_to_the_next_larger_batch():
    free = many_workers(max_workers=1, doubling_gain=0.4)
    knee = chosen(free)
    plan = many_workers(max_workers=1, doubling_gain=0.4, deadline=0.99 * knee.train_seconds.high)
    assert plan.stages[0].global_batch_size > knee.global_batch_size
    assert "the nearest within the limits to the knee" in reason(plan, "global batch").why.lower()


def test_what_nothing_meets_names_the_nearest_candidate():
    nearest = planned().considered[-2]
    assert (nearest.workers, nearest.global_batch_size, nearest.refused) == (2, 142, "")

    def most(seconds):
        """The epochs that it may be trained in so many seconds."""
        times = [planned(epochs=n).considered[-2].train_seconds.high for n in range(1, 31)]
        return sum(one <= seconds for one in times)

    with pytest.raises(PlanError) as caught:
        planned(deadline=5)
    assert str(caught.value) == (
        "no candidate is within the limits; the nearest, global batch 142 on 2 workers at 32 px, "
        f"may take {nearest.train_seconds.high:.4g} s, goal.deadline=5: raise goal.deadline, or "
        f"give epochs={most(5)} or less"
    )
    time = nearest.train_seconds
    between = time.value + 0.5 * (time.high - time.value)
    with pytest.raises(PlanError) as caught:
        planned(deadline=between, global_batch=142)
    assert str(caught.value) == (
        "no candidate is within the limits; the nearest, global batch 142 on 2 workers at 32 px, "
        f"is expected to take {time.value:.3g} s and may take {time.high:.4g} s, "
        f"goal.deadline={between:g}: raise goal.deadline, or measure more for a narrower interval "
        f"(a larger probe.budget), or give epochs={most(between)} or less"
    )


# ------------------------------------------------------------------------- kept, and explained


def test_asked_workers_and_batch_are_kept_with_what_they_lose():
    plan = planned(workers=1, global_batch=40)
    assert plan.stages[0].local_batch_sizes == (40,)
    assert plan.job.workers == 1
    for choice in ("workers", "global batch"):
        one = reason(plan, choice)
        assert one.source == "asked"
        assert "The plan itself would choose 2 workers" in one.why
        assert "less time" in one.why


def test_one_step_is_told_as_one():
    whole = planned(global_batch=1437, workers=1)
    assert "leaves 1 step an epoch" in reason(whole, "global batch").why
    shared = planned(method="dynamic-batch", rebalance_steps=1)
    assert "every 1 step and at the end" in reason(shared, "method").why
    level = make_profile(
        steps=[make_step(n, batch, seconds=0.01) for n in (1, 2) for batch in LOCAL_BATCHES]
    )
    none = planned(level, workers=1, least_steps=1)
    assert "at least 1 step an epoch" in reason(none, "global batch").why


def test_asking_for_what_the_plan_would_choose_is_said_to_lose_nothing():
    free = planned()
    plan = planned(workers=free.workers, global_batch=free.stages[0].global_batch_size)
    assert plan.stages == free.stages
    assert "would choose the same" in reason(plan, "workers").why


def test_alternatives_tell_their_loss():
    plan = planned(price=1.0)
    batches = reason(plan, "global batch").alternatives
    assert [one.value for one in batches] == ["128 samples", "256 samples"]
    assert "more time" in batches[0].loss
    assert "goal.least_steps=10" in batches[1].loss
    sizes = reason(plan, "workers").alternatives
    assert sizes[0].value.startswith("1 worker, global batch")
    assert "more time" in sizes[0].loss
    assert "cost" in sizes[0].loss


def test_a_batch_that_is_too_far_off_is_named_with_its_workers_where_they_are_others(monkeypatch):
    """'Not taken: 143 samples' was a batch that the chosen workers do not have."""

    def passing(*given):
        found = choose(*given)
        others = (row for row in given[1] if row.cluster is not found.row.cluster)
        return replace(found, passed=next(others))

    monkeypatch.setattr("batchwright.planning.assembly.found.choose", passing)
    plan = planned()
    other = 3 - plan.workers
    why = reason(plan, "global batch").why
    assert re.search(rf"Not taken: \d+ samples on {other} workers? \(", why)


def test_in_process_is_one_worker():
    plan = planned(launch="in-process")
    assert plan.workers == 1
    assert reason(plan, "workers").source == "asked"


def test_a_profile_of_several_worker_counts_leaves_the_choice_to_the_plan():
    profile = make_profile()
    assert profile.job.workers == 2
    assert {one.workers for one in make_plan(profile).considered} == {1, 2}
    assert make_plan(profile, goal_of(profile, max_workers=1)).workers == 1
    with pytest.raises(PlanError, match=r"2 workers, goal\.max_workers=1"):
        planned(workers=2, max_workers=1)
    assert planned(workers=2, max_workers=8).workers == 2  # a bound that is kept takes no link


def goal_of(profile, **goal):
    job = profile.job.model_dump() | {"workers": "auto", "goal": goal}
    return Job.model_validate(job)


def test_candidates_are_listed_by_resolution_workers_and_batch():
    plan = many_workers()
    keys = [(one.resolution, one.workers, one.global_batch_size) for one in plan.considered]
    assert keys == sorted(keys)
    assert [(knee.resolution, knee.workers) for knee in plan.knees] == sorted(
        (knee.resolution, knee.workers) for knee in plan.knees
    )


def test_plain_trains_at_the_highest_resolution_and_shows_the_others():
    plan = many_workers(objective="time")
    assert plan.stages[0].resolution == 128
    shown = reason(plan, "resolution").alternatives
    assert [one.value for one in shown] == ["96 px"]
    assert "less time" in shown[0].loss


def test_held_out_points_lie_midway_between_measured_ones():
    held = make_plan(make_profile()).held_out
    assert [(one.workers, one.local_batch_size) for one in held] == [
        (workers, batch) for workers in (1, 2) for batch in (6, 12, 22, 46)
    ]
    for one in held:
        assert one.step_seconds.low < one.step_seconds.value < one.step_seconds.high
        assert one.peak_bytes.low <= one.peak_bytes.value <= one.peak_bytes.high
        assert one.resident_bytes is not None


def test_more_workers_than_measured_are_marked_as_assumed():
    plan = many_workers()
    for one in plan.considered:
        assert one.assumed == (one.workers > 1)
    why = next(one.why for one in many_workers(max_workers=8).reasons if one.choice == "workers")
    assert "the time of their exchange is predicted from the stated link" in why


def test_the_same_input_gives_the_same_bytes():
    assert many_workers().model_dump_json() == many_workers().model_dump_json()


def test_several_times_as_much_is_told_as_a_ratio():
    assert _share(1.25, 1.0, "time") == "25.0 % more time"
    assert _share(124.0, 1.0, "time") == "124 times the time"
    assert _share(0.2, 1.0, "cost") == "80.0 % less cost"
