"""Candidates that measurements cannot tell from the chosen one, and what is said of them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from batchwright.planning.candidates import level as level_module
from batchwright.planning.planner import make_plan
from batchwright.records import Estimate, GradientNoise
from batchwright.records.text.plan_text import candidate_words
from samples import make_job, make_profile, make_step
from test_choice import allowed, chosen, reason

BATCHES = (4, 8, 16, 32, 64)


def profile_of(second, scatter, visits=5, **changes):
    """Two workers take ``second`` times the time of one; visits scatter by a share, evenly."""
    spread = [1 + scatter * (2 * k / (visits - 1) - 1) for k in range(visits)]
    steps = []
    for workers in (1, 2):
        for batch in BATCHES:
            step = make_step(workers, batch, seconds=0.004 + 0.001 * batch)
            seconds = step.step_seconds * (second if workers > 1 else 1)
            times = {"step_seconds": seconds, "step_low": seconds, "step_high": seconds}
            shown = {**times, "visits": tuple(seconds * one for one in spread)}
            steps.append(step.model_copy(update=shown))
    return make_profile(steps=tuple(steps), **changes)


def planned(profile, **goal):
    """By time, unless the goal says otherwise."""
    return make_plan(profile, make_job(workers="auto", goal={"objective": "knee"} | goal))


def level(plan):
    return {(one.workers, one.global_batch_size) for one in plan.considered if one.level}


def test_clusters_that_take_the_same_time_within_their_errors_are_level():
    plan = planned(profile_of(1.8, 0.15))
    assert {workers for workers, _ in level(plan)} - {plan.workers}
    why = reason(plan, "workers").why
    other = 3 - plan.workers
    assert f"May be as good: {other} worker" in why
    assert "What was measured does not tell which is better" in why
    for one in plan.considered:
        assert ("may be as good" in candidate_words(plan, one).split(", ")) == one.level
    assert "may be as good" in plan.explain()


def test_level_clusters_of_other_kinds_are_told_by_their_kinds():
    """Of two workers on demand '2 workers' were said to be as good: two spot ones."""
    profile = profile_of(1.1, 0.15)
    name = profile.cluster.device_name
    kinds = (
        {"kind": "owned", "like": name, "count": 2},
        {"kind": "spot", "like": name, "count": 2},
    )
    why = reason(planned(profile, kinds=kinds, objective="time"), "workers").why
    (told,) = re.findall(r"May be as good: (.*?)\. ", why)
    assert "2 spot" in told
    assert "worker" not in told


@pytest.mark.parametrize("second", [1.1, 3.0])
def test_clusters_that_are_far_apart_are_not_level(second):
    plan = planned(profile_of(second, 0.01))
    assert plan.workers == (2 if second < 1.9 else 1)
    assert not {workers for workers, _ in level(plan)} - {plan.workers}
    assert "May be as good" not in reason(plan, "workers").why


@pytest.mark.parametrize("goal", [{}, {"price": 1.0}, {"objective": "time"}])
def test_more_precise_measurements_leave_no_more_candidates_level(goal):
    rough, fine = (planned(profile_of(1.8, scatter), **goal) for scatter in (0.3, 0.003))
    assert len(level(fine)) <= len(level(rough))
    assert level(rough)


@pytest.mark.parametrize(
    "goal",
    [
        {},
        {"price": 1.0},
        {"objective": "time"},
        {"objective": "cost", "price": 1.0},
        {"objective": "target-accuracy", "accuracy": 0.9},
    ],
)
def test_what_is_level_is_within_the_limits_and_not_the_chosen_one(goal):
    plan = planned(profile_of(1.8, 0.2), **goal)
    for one in plan.considered:
        if one.level:
            assert one in allowed(plan)
            assert one != chosen(plan)


def test_on_one_line_only_the_seconds_are_as_uncertain_as_its_fixed_part(monkeypatch):
    """An epoch of the other takes twice as long or half, and as many epochs less or more."""
    cluster = object()
    monkeypatch.setattr(level_module, "saving", lambda knee, batch: (0.5, 0.05))
    knee = SimpleNamespace(cluster=cluster, line=(0.01, 0.001))

    def found(seconds, epochs, doubt):
        chosen = SimpleNamespace(cluster=cluster, batch=32, seconds=100.0)
        other = SimpleNamespace(cluster=cluster, batch=64, seconds=100.0 * seconds * epochs)
        return level_module.level_in_value(
            lambda row: 0.01,
            chosen,
            [chosen, other],
            [knee],
            lambda row: row.seconds,
            lambda row: Estimate(value=epochs, low=epochs * (1 - doubt), high=2 * epochs),
        )

    assert found(0.5, 2.1, 0.0)  # log 2 is 0.07 off, and 5 % are between them
    assert not found(0.5, 2.4, 0.0)
    assert not found(1.0, 1.05, 0.0)  # equal seconds are on one line for certain
    assert found(1.0, 1.05, 0.1)
    assert found(0.5, 2.4, 0.2)


def test_batches_are_level_to_a_target_as_far_as_their_epochs_are_uncertain():
    noise = GradientNoise(
        noise_scale=30, trace=1, sqr_norm=0.01, relative_error=0.1, parts=20, repeats=1
    )
    goal = {"objective": "target-accuracy", "accuracy": 0.9}
    plan = planned(profile_of(1.8, 0.001, noise=noise), **goal)
    seconds = {
        one.global_batch_size: one.target_seconds.value
        for one in allowed(plan)
        if one.workers == plan.workers
    }
    best = chosen(plan).global_batch_size
    near = min(set(seconds) - {best}, key=seconds.__getitem__)
    assert seconds[near] > 1.02 * seconds[best]  # much more than the times are off
    assert (plan.workers, near) in level(plan)
    assert "finished runs of several batches" in reason(plan, "global batch").why


def test_batches_that_may_be_the_knee_are_level():
    plan = planned(profile_of(1.1, 0.3))
    batches = {batch for workers, batch in level(plan) if workers == plan.workers}
    assert batches
    assert "May be as good: " in reason(plan, "global batch").why
    sharp = planned(profile_of(1.1, 0.001), doubling_gain=0.12)
    assert not {batch for workers, batch in level(sharp) if workers == sharp.workers}


def test_a_batch_asked_for_is_level_with_none():
    profile = profile_of(1.8, 0.3)
    plan = make_plan(profile, make_job(workers=2, global_batch=64))
    assert not level(plan)


def test_a_plan_far_from_what_was_measured_says_so_first():
    steps = tuple(make_step(workers, batch) for workers in (1, 2) for batch in (2, 4))
    plan = make_plan(make_profile(steps=steps))
    told = plan.reasons[0]
    assert told.choice == "extrapolation"
    assert max(plan.stages[0].local_batch_sizes) >= 2 * 4
    assert "at most 4 with 2 workers" in told.why
    assert all(one.choice != "extrapolation" for one in make_plan(make_profile()).reasons)
    small = make_plan(make_profile(), make_job(workers=2, global_batch=4))
    assert "at least 4" in small.reasons[0].why
