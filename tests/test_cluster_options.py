"""Kinds of workers, alone and together: shares of equal time, sizes, limits, large clusters."""

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import BatchwrightError, PlanError
from batchwright.planning.candidates import local_batches as shares_module
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.local_batches import (
    local_batches,
    shares_by_kind,
    solve_rising,
    split,
)
from batchwright.planning.candidates.worker_types import worker_types_of
from batchwright.planning.planner import make_plan
from batchwright.prediction.step_time import StepTimeModel
from batchwright.probing.commands import Point
from batchwright.probing.kinds import Place, common_kind, kinds_of
from batchwright.records import Goal, KindCount, Link, Plan, WorkerKind
from batchwright.workflows.together import places_in
from samples import make_data, make_kind_profile, reason

SIDES = (96, 128)
FEW = {"sides": SIDES, "batches": (8, 16, 32, 64, 128)}
GIB = 2**30
RATES = {"slow": 1.0, "fast": 3.0}


def job_of(profile, kinds, *, workers="auto", global_batch="auto", epochs=3, **goal):
    return profile.job.model_copy(
        update={
            "workers": workers,
            "global_batch": global_batch,
            "epochs": epochs,
            "goal": Goal(kinds=kinds, **goal),
        }
    )


def planned(kinds, profiles=None, **keys):
    profiles = profiles or [make_kind_profile("slow", **FEW), make_kind_profile("fast", 3, **FEW)]
    kinds = tuple(WorkerKind(**kind) for kind in kinds)
    return make_plan(profiles, job_of(profiles[0], kinds, **keys))


def cluster_of(counts, speeds, **changes):
    """A cluster of made-up kinds with these counts and speeds."""
    names = [f"kind-{n}" for n in range(len(counts))]
    profiles = [
        make_kind_profile(name, speed, **(FEW | changes))
        for name, speed in zip(names, speeds, strict=True)
    ]
    asked = tuple(WorkerKind(kind=n, count=c) for n, c in zip(names, counts, strict=True))
    kinds = worker_types_of(profiles, job_of(profiles[0], asked))
    return ClusterOption(tuple(zip(kinds, counts, strict=True)))


# ------------------------------------------------------------------------------- equal times


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.lists(st.floats(0.3, 8), min_size=4, max_size=4),
    st.integers(0, 5000),
)
def test_a_batch_is_split_exactly_and_so_that_all_take_equal_time(counts, speeds, more):
    cluster = cluster_of(counts, speeds[: len(counts)])
    batch = cluster.least + more
    totals = split(cluster, 128, batch)
    assert sum(totals) == batch
    sizes = local_batches(cluster, totals)
    assert sum(sizes) == batch
    assert len(sizes) == cluster.workers
    assert min(sizes) >= 2
    lines = [kind.line(cluster.workers, 128) for kind, _ in cluster.members]
    rate = sum(count / slope for count, (_, slope) in zip(counts, lines, strict=True))
    seconds = batch / rate + sum(n * f / s for n, (f, s) in zip(counts, lines, strict=True)) / rate
    ideal = [(seconds - fixed) / slope for fixed, slope in lines]
    if min(ideal) >= 2:  # nobody is held at the least batch
        for total, count, share in zip(totals, counts, ideal, strict=True):
            assert abs(total - count * share) < 1 + 1e-6


@given(st.integers(2, 40), st.integers(2, 40))
def test_shares_within_a_kind_differ_by_one_at_most(count, total):
    sizes = local_batches(ClusterOption(((None, count),)), (total,))
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1


def test_memory_holds_a_kind_back_and_the_others_take_its_part():
    free = cluster_of((2, 2), (1.0, 1.0))
    assert [share for _, share in shares_by_kind(free, split(free, 128, 400))] == [100, 100]
    plan = planned(
        [{"kind": "slow", "count": 2, "memory": GIB}, {"kind": "fast", "count": 2}],
        global_batch=4000,
        workers=4,
    )
    sizes = dict(zip(("fast", "slow"), plan.stages[0].local_batch_sizes[::2], strict=True))
    assert sum(plan.stages[0].local_batch_sizes) == 4000
    assert sizes["slow"] <= (GIB - 180_000_000) / (60 * 128**2)
    assert sizes["fast"] > 3 * sizes["slow"]


def test_the_limit_beside_the_largest_peak_is_that_of_its_kind():
    slow, held_back = {"kind": "slow", "count": 2}, {"kind": "fast", "count": 2, "memory": GIB}
    plan = planned([slow, held_back], global_batch=4000, workers=4)
    assert plan.chosen.peak_bytes.high > GIB
    why = reason(plan, "memory").why
    assert "the limit is 80.00 GiB, what the device has free for one worker" in why
    alone = planned([{"kind": "fast", "count": 1, "memory": GIB}])
    assert "the limit is 1024.0 MiB, the memory of goal.kinds." in reason(alone, "memory").why


def test_every_mixed_candidate_keeps_each_kinds_memory():
    plan = planned(
        [{"kind": "slow", "count": 2, "memory": GIB // 2}, {"kind": "fast", "count": 1}],
        objective="time",
    )
    most = (GIB / 2 - 180_000_000) / (60 * 128**2)
    assert plan.kinds == (KindCount(kind="fast", count=1), KindCount(kind="slow", count=2))
    _, *slow = plan.stages[0].local_batch_sizes
    assert max(slow) <= most


def test_a_batch_too_small_for_all_workers_is_not_split():
    cluster = cluster_of((3, 2), (1, 2))
    assert split(cluster, 128, 9) is None
    assert split(cluster, 128, 10) == (6, 4)


@given(st.integers(0, 60), st.integers(1, 60), st.floats(-50, 4000), st.floats(0.5, 3))
def test_solving_finds_the_neighbours_of_a_value(low, width, target, power):
    def rising(x):
        return x**power

    first, last = solve_rising(rising, target, low, low + width)
    if target < rising(low):
        assert (first, last) == (low, low)
    elif target >= rising(low + width):
        assert (first, last) == (low + width, low + width)
    else:
        assert last == first + 1
        assert rising(first) <= target < rising(last)


# ------------------------------------------------------------------------------ which clusters


def test_of_each_kind_powers_of_two_and_all_and_of_several_all_together():
    plan = planned([{"kind": "slow", "count": 6}, {"kind": "fast", "count": 3}])
    found = {tuple((k.kind, k.count) for k in one.kinds) for one in plan.considered}
    assert found == {
        *((("slow", n),) for n in (1, 2, 4, 6)),
        *((("fast", n),) for n in (1, 2, 3)),
        (("fast", 3), ("slow", 6)),
    }


def test_the_cheapest_speed_comes_first_where_prices_are_given():
    plan = planned(
        [
            {"kind": "slow", "count": 2, "price": 0.1},
            {"kind": "fast", "count": 2, "price": 3.0},
            {"kind": "other", "count": 2, "price": 0.1, "like": "fast", "speed": 0.5},
        ]
    )
    found = {
        tuple((k.kind, k.count) for k in one.kinds)
        for one in plan.considered
        if len(one.kinds) == 2
    }
    assert found == {(("fast", 2), ("other", 2)), (("other", 2), ("slow", 2))}


def test_the_most_workers_cut_off_a_mixture():
    plan = planned([{"kind": "slow", "count": 8}, {"kind": "fast", "count": 3}], max_workers=5)
    assert all(one.workers <= 5 for one in plan.considered)
    assert any(
        one.kinds == (KindCount(kind="fast", count=3), KindCount(kind="slow", count=2))
        for one in plan.considered
    )


def test_asked_workers_may_be_a_mixture():
    plan = planned(
        [{"kind": "slow", "count": 4}, {"kind": "fast", "count": 2}], workers=5, objective="time"
    )
    assert plan.kinds == (KindCount(kind="fast", count=2), KindCount(kind="slow", count=3))
    assert plan.workers == plan.job.workers == 5
    fast, slow = plan.stages[0].local_batch_sizes[0], plan.stages[0].local_batch_sizes[-1]
    assert fast > 2 * slow
    assert "all kinds take equal time" in reason(plan, "local batches").why


def test_more_workers_than_were_measured_need_no_link_if_the_goal_allows_fewer():
    profile = make_kind_profile("slow", workers=(1, 2), **FEW)
    profile = profile.model_copy(update={"job": profile.job.model_copy(update={"link": Link()})})
    listed = [{"kind": "slow", "count": 8}]
    advised = "give goal.max_workers=2, or state the network"
    with pytest.raises(PlanError, match=rf"^goal\.kinds allows 8 .*{advised}"):
        planned(listed, [profile])
    with pytest.raises(PlanError, match=rf"^goal\.max_workers allows 4 .*{advised}"):
        planned(listed, [profile], max_workers=4)
    plan = planned(listed, [profile], max_workers=2)
    assert {one.workers for one in plan.considered} == {1, 2}


def test_kinds_that_were_measured_are_chosen_from_without_being_listed():
    profiles = [make_kind_profile("slow", **FEW), make_kind_profile("fast", 3, **FEW)]
    plan = make_plan(profiles)
    assert plan.kinds
    assert {one.workers for one in plan.considered} == {1, 2}


def test_without_a_link_kinds_are_not_mixed_and_the_reason_says_so():
    profiles = [make_kind_profile("slow", **FEW), make_kind_profile("fast", 3, **FEW)]
    job = profiles[0].job.model_copy(update={"link": Link()})
    plan = make_plan(profiles, job)
    assert all(len(one.kinds) == 1 for one in plan.considered)
    assert "Kinds are not mixed" in reason(plan, "workers").why


def test_measurements_that_a_plan_tells_of_are_those_of_the_chosen_kind():
    profiles = [make_kind_profile("slow", **FEW), make_kind_profile("fast", 3, **FEW)]
    job = profiles[0].job.model_copy(update={"link": Link()})
    for order in (profiles, profiles[::-1]):
        plan = make_plan(order, job)
        assert plan.kinds == (KindCount(kind="fast", count=1),)
        assert "on GPU fast" in reason(plan, "precision").why


def test_a_stated_speed_is_taken_and_marked_as_assumed():
    plan = planned(
        [{"kind": "new", "count": 1, "like": "slow", "speed": 2}],
        [make_kind_profile("slow", **FEW)],
    )
    same = planned([{"kind": "slow", "count": 1}], [make_kind_profile("slow", **FEW)])
    for new, old in zip(plan.considered, same.considered, strict=True):
        assert new.step_seconds.value == pytest.approx(old.step_seconds.value / 2)
        assert new.assumed
        assert not old.assumed
    assert "new is taken as 2 times as fast as slow" in reason(plan, "workers").why


def test_costs_add_up_over_kinds():
    plan = planned(
        [
            {"kind": "slow", "count": 2, "price": 0.5},
            {"kind": "fast", "count": 1, "price": 2.0},
        ],
        workers=3,
    )
    one = next(c for c in plan.considered if len(c.kinds) == 2)
    assert one.cost.value == pytest.approx(3.0 * one.train_seconds.value / 3600)
    assert one.cost.high == pytest.approx(3.0 * one.train_seconds.high / 3600)


def test_asked_workers_that_no_cluster_has_are_refused():
    profiles = [make_kind_profile("slow", **FEW), make_kind_profile("fast", 3, **FEW)]
    job = profiles[0].job.model_copy(update={"workers": 2, "link": Link()})
    with pytest.raises(PlanError, match=r"was measured with workers=1, .*workers=2.*link"):
        make_plan(profiles, job)
    with pytest.raises(PlanError, match=r"workers=5, but the profiles measured 2: .*goal\.kinds"):
        make_plan(profiles, profiles[0].job.model_copy(update={"workers": 5}))
    open_job = job.model_copy(update={"workers": "auto"})
    # Three are neither of one kind nor, without a network, of both.
    few, more = (
        make_kind_profile(name, workers=(count,), job=open_job, **FEW)
        for name, count in (("few", 2), ("more", 4))
    )
    kinds = ({"kind": "few", "count": 2}, {"kind": "more", "count": 4})
    with pytest.raises(PlanError, match=r"workers=3: .*mixed only over a stated network"):
        planned(kinds, [few, more], workers=3)


@pytest.mark.parametrize(
    ("kinds", "keys", "named"),
    [
        ([{"kind": "t4", "count": 1}], {}, "no profile of 't4', only of 'slow', 'fast'"),
        (
            [{"kind": "new", "count": 1, "like": "t4"}],
            {},
            "no profile of 't4'.*probe it with probe.kind=t4",
        ),
        ([{"kind": "slow", "count": 1}, {"kind": "slow", "count": 2}], {}, "'slow' twice"),
        ([{"kind": "slow", "count": 2}], {"workers": 3}, "workers=3, but goal.kinds holds 2"),
        ([{"kind": "slow", "count": 2}], {"objective": "cost"}, "needs the price"),
        (
            [{"kind": "slow", "count": 2, "price": 1}, {"kind": "fast", "count": 2}],
            {"max_cost": 1.0},
            "needs the price.*each of goal.kinds",
        ),
        (
            [{"kind": "slow", "count": 2, "memory": 5}],
            {},
            "limit is 5 bytes: raise the memory of goal.kinds",
        ),
    ],
)
def test_kinds_that_make_no_sense_are_refused(kinds, keys, named):
    with pytest.raises(BatchwrightError, match=named) as caught:
        planned(kinds, **keys)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ large clusters


def large(workers, monkeypatch=None):
    """A plan for so many workers of five kinds, and how often a step time was looked up."""
    profiles = [make_kind_profile(f"kind-{n}", 2.0**n) for n in range(5)]
    kinds = tuple(
        WorkerKind(kind=f"kind-{n}", count=workers // 5, price=0.1 * 1.8**n) for n in range(5)
    )
    calls = 0
    seconds = StepTimeModel.seconds

    def counted(self, *args):
        nonlocal calls
        calls += 1
        return seconds(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimeModel, "seconds", counted)
        plan = make_plan(profiles, job_of(profiles[0], kinds))
    return plan, calls


@pytest.mark.slow
def test_ten_thousand_workers_are_planned_without_going_through_them(monkeypatch):
    widest = 0
    apportion = shares_module.apportion

    def watched(weights, *args, **keys):
        nonlocal widest
        widest = max(widest, len(weights))
        return apportion(weights, *args, **keys)

    monkeypatch.setattr(shares_module, "apportion", watched)
    _, few = large(100)
    plan, many = large(10_000)
    assert many < 3 * few  # a hundred times the workers
    assert 2 <= widest <= 5
    assert sum(one.count for one in plan.kinds) == plan.workers
    assert max(sum(k.count for k in one.kinds) for one in plan.considered) == 10_000
    assert {one.resolution for one in plan.considered} == {96, 128, 160, 192, 224}
    assert len(plan.considered) < 1000
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_tiny_micro_batch_is_planned_whatever_the_number_of_passes():
    """A list of the passes of the largest batch would not fit any memory."""
    data = make_data(train_samples=10**14)
    profiles = [make_kind_profile(kind, speed, **FEW, data=data) for kind, speed in RATES.items()]
    kinds = tuple(WorkerKind(kind=kind, count=2) for kind in RATES)
    job = job_of(profiles[0], kinds, deadline=1e15, accuracy=0.5)
    plan = make_plan(profiles, job.model_copy(update={"micro_batch": 2}))
    assert max(one.global_batch_size for one in plan.considered) > 10**13
    assert plan.stages[0].micro_batch_size == 2


def test_in_a_long_list_frontier_chosen_cluster_and_knees_are_kept():
    plan, _ = large(1000)
    keys = {(one.resolution, one.kinds, one.global_batch_size) for one in plan.considered}
    for knee in plan.knees:
        if knee.global_batch_size is not None:
            assert (knee.resolution, knee.kinds, knee.global_batch_size) in keys
    assert sum(one.frontier for one in plan.considered) >= 5
    own = [c for c in plan.considered if c.kinds == plan.kinds and c.resolution == 224]
    assert len(own) > 3


@pytest.mark.parametrize("samples", [50, 500, 5000])
def test_on_few_data_no_cluster_lists_a_batch_twice(samples):
    data = make_data(train_samples=samples, side=128)
    profiles = [make_kind_profile("slow", data=data, **FEW)]
    profiles.append(make_kind_profile("fast", 8, data=data, **FEW))
    kinds = [{"kind": "slow", "count": 6}, {"kind": "fast", "count": 1}]
    plan = planned(kinds, profiles, least_steps=1, global_batch=17)
    keys = [(one.resolution, one.kinds, one.global_batch_size) for one in plan.considered]
    assert len(set(keys)) == len(keys)
    assert plan.stages[0].global_batch_size == 17
    assert all(one.global_batch_size <= samples for one in plan.considered)


# ------------------------------------------------------------------------ measured together


def measured_together(
    paces=(1.0, 2.0), exchange=0.003, *, names=("gpu", "gpu"), disturbed=None, times=2, named=""
):
    """A worker on each of some hosts, by their paces; as a joint probe tells of them.

    The first host took ``disturbed`` times as long, a function of the batch's place and the visit.
    """
    size = len(paces)
    one = make_kind_profile("gpu", workers=(size,), **FEW)
    alone = one.job.model_copy(update={"link": Link(), "workers": size})
    one = one.model_copy(update={"job": alone})
    steps, visits = [], {}
    for place, point in enumerate(one.steps):
        told, wholes = [], []
        for visit in range(times):
            own = [pace * point.step_seconds for pace in paces]
            own[0] *= disturbed(place, visit) if disturbed else 1
            wholes.append(max(own) + exchange)
            told.append(tuple((seconds, wholes[-1] - seconds) for seconds in own))
        update = {"step_seconds": median(wholes), "visits": tuple(wholes)}
        steps.append(point.model_copy(update=update))
        visits[Point(point.workers, point.resolution, point.local_batch_size)] = told
    places = [
        Place(f"node{number}", "", name, "a GPU", GIB * 80) for number, name in enumerate(names, 1)
    ]
    kinds = kinds_of(places, steps, visits, named=named)
    return one.model_copy(update={"steps": tuple(steps), "kinds": kinds}), places


def test_a_host_that_is_clearly_slower_is_a_kind_of_its_own():
    profile, places = measured_together()
    fast, slow = profile.kinds
    assert (fast.kind, slow.kind) == ("gpu", "gpu (node2)")
    first = profile.steps[0]
    assert slow.steps[0].step_seconds == pytest.approx(first.step_seconds)
    assert fast.steps[0].sync_seconds == pytest.approx(0.003)
    assert fast.steps[0].step_seconds == pytest.approx((first.step_seconds - 0.003) / 2 + 0.003)
    names = [fast.kind, slow.kind]
    assert [one.kind_in_plan(names, "") for one in places] == names
    assert not measured_together(paces=(1.0, 1.1))[0].kinds


def test_hosts_of_the_kind_that_a_job_names_are_one_and_others_say_so():
    assert not measured_together(named="gpu")[0].kinds
    profile, places = measured_together((1.0, 2.0, 2.0), names=("gpu", "gpu", "b"), named="gpu")
    assert [(one.kind, one.workers) for one in profile.kinds] == [("gpu", 2), ("b", 1)]
    assert common_kind(places, "gpu") == "gpu"
    assert common_kind(places[2:], "gpu") == "b"
    silent = replace(places[0], kind=places[0].device_name)
    assert common_kind([silent], "") == ""
    assert silent.with_kind("gpu") == places[0]
    assert places[2].with_kind("gpu") == places[2]
    assert silent.kind_in_plan(["gpu", "b"], "gpu") == "gpu"
    assert silent.kind_in_plan(["gpu", silent.device_name], "gpu") == silent.device_name


def test_kinds_that_were_measured_together_are_planned_together():
    """Shares of equal time over all that were there, with no figure of the network."""
    profile, _ = measured_together()
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 90, "epochs": 3}))
    assert plan.kinds == (KindCount(kind="gpu", count=1), KindCount(kind="gpu (node2)", count=1))
    fast, slow = plan.stages[0].local_batch_sizes
    assert fast + slow == 90
    assert fast > 1.7 * slow
    assert not any(one.assumed for one in plan.considered)
    assert "not mixed" not in reason(plan, "workers").why
    assert {one.workers for one in plan.considered} == {2}
    # All together go at the slowest one's pace, by which predictions are checked.
    exact = 0.003 + 2 * (0.004 + 6e-8 * 96**2 * plan.held_out[0].local_batch_size)
    assert plan.held_out[0].step_seconds.value == pytest.approx(exact, rel=0.05)


def test_fewer_workers_than_kinds_that_were_measured_together_are_refused():
    profile, _ = measured_together()
    job = profile.job.model_copy(update={"workers": "auto", "goal": Goal(max_workers=1)})
    with pytest.raises(PlanError, match=r"goal\.max_workers=1: .* these 2: give 2 or more"):
        make_plan(profile, job)


def test_a_kind_that_was_measured_alone_may_have_fewer_workers_than_others_together():
    together, _ = measured_together()
    alone = make_kind_profile("alone", **FEW)
    job = together.job.model_copy(update={"workers": "auto"})
    plan = make_plan([one.model_copy(update={"job": job}) for one in (together, alone)], job)
    assert {one.workers for one in plan.considered} == {1}


def test_kinds_on_one_host_have_the_threads_that_they_were_timed_with():
    profile, _ = measured_together()
    host = profile.cluster.model_copy(update={"cores": 8, "threads": 4})
    job = profile.job.model_copy(update={"global_batch": 90, "epochs": 3})
    plan = make_plan(profile.model_copy(update={"cluster": host}), job)
    assert (plan.workers, plan.threads) == (2, 4)
    assert "Each with 4 compute threads" in reason(plan, "workers").why


def test_single_visits_draw_no_curves_that_cross():
    """A host twice as fast, disturbed in single visits, still gets about two thirds."""
    factors = (0.6, 1.0, 1.3, 1.9)
    profile, _ = measured_together(
        names=("a", "b"), disturbed=lambda place, _: factors[place % 4], times=1
    )
    assert [one.kind for one in profile.kinds] == ["a", "b"]
    pairs = zip(*(one.steps for one in profile.kinds), strict=True)
    (ratio,) = {round(b.compute_seconds / a.compute_seconds, 9) for a, b in pairs}
    assert 1.5 < ratio < 2.5
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 96, "epochs": 3}))
    assert 54 <= plan.stages[0].local_batch_sizes[0] <= 76


def test_many_visits_tell_what_a_kind_takes_at_each_batch():
    profile, _ = measured_together(
        disturbed=lambda place, visit: (0.9, 1.1)[place % 2] * (0.99, 1.01)[visit % 2], times=40
    )
    for place, (step, told) in enumerate(zip(profile.kinds[0].steps, profile.steps, strict=True)):
        exact = (told.step_seconds - 0.003) / 2 * (0.9, 1.1)[place % 2]
        assert step.compute_seconds == pytest.approx(exact, rel=0.011)


def test_groups_of_a_server_are_planned_in_the_order_of_the_workers_that_are_there():
    """Slower ones that were started first stay first."""
    profile, places = measured_together((2.0, 1.0), names=("slow", "fast"))
    job = profile.job.model_copy(update={"global_batch": 90, "epochs": 3})
    plain = make_plan(profile, job)
    assert [one.kind for one in plain.kinds] == ["fast", "slow"]
    server = {"method": "dual-batch", "global_batch": "auto"}
    dual = make_plan(profile, job.model_copy(update=server))
    assert [one.kind for one in dual.kinds] == ["slow", "fast"]
    started = [one.kind for one in places]
    assert places_in(dual, started) == [0, 1]
    assert places_in(plain, started) == [1, 0]


def test_equal_hosts_whose_visits_scatter_are_of_one_kind():
    """Four of five visits find one slower, as on a busy machine, and the fifth far quicker."""
    busy, _ = measured_together(
        (1.0, 1.0), disturbed=lambda place, _: 0.4 if place == 9 else 1.3, times=1
    )
    assert not busy.kinds
    steady, _ = measured_together((1.0, 1.0), disturbed=lambda *_: 1.9)
    assert len(steady.kinds) == 2


def test_kinds_that_visits_cannot_tell_apart_go_at_one_pace():
    factors = (1.0, 1.25, 0.8)
    profile, _ = measured_together(
        (1.0, 1.02), names=("a", "b"), disturbed=lambda place, _: factors[place % 3], times=1
    )
    assert [one.pace for one in profile.kinds] == [1, 1]


def test_more_of_what_was_measured_together_goes_by_the_network():
    profile, _ = measured_together()
    kinds = tuple(WorkerKind(kind=one.kind, count=4) for one in profile.kinds)
    job = job_of(profile, kinds, global_batch=360)
    plan = make_plan(profile, job.model_copy(update={"link": Link(latency=2e-5, bandwidth=1e10)}))
    assert max(one.workers for one in plan.considered) == 8
    assert {one.assumed for one in plan.considered if one.workers == 8} == {True}


def test_a_plan_for_kinds_that_were_measured_together_can_be_simulated():
    profile, _ = measured_together()
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 90, "epochs": 3}))
    (found,) = bw.simulate(plan, profile=profile, repeats=1).clusters
    assert found.workers == 2
