"""What a run teaches where its epochs missed the prediction."""

from __future__ import annotations

import pytest

from batchwright.planning.planner import make_plan
from batchwright.refitting import refit
from clusters import LOCAL_BATCHES, make_step
from samples import make_epoch, make_job, make_profile, make_summary


def make_run(factor, *, epochs=6, profile=None, **keys):
    """A run of the profile's own plan whose epochs take ``factor`` times as long as predicted."""
    steps = tuple(make_step(n, b) for n in (1, 2) for b in LOCAL_BATCHES)
    profile = profile or make_profile(steps=steps, job=make_job(workers="auto", **keys))
    plan = make_plan(profile)
    predicted = plan.stages[0].predicted_epoch_seconds.value
    records = tuple(make_epoch(e, training_seconds=factor * predicted) for e in range(epochs))
    return make_summary(plan=plan, profile=profile, epochs=records)


@pytest.mark.parametrize("factor", [0.95, 1.0, 1.08])
def test_a_prediction_within_the_tolerance_stands(factor):
    assert refit(make_run(factor)) is None


def test_without_a_profile_a_prediction_or_an_epoch_there_is_nothing_to_learn():
    run = make_run(1.5)
    assert refit(run.model_copy(update={"profile": None})) is None
    assert refit(run.model_copy(update={"epochs": ()})) is None
    stage = run.plan.stages[0].model_copy(update={"predicted_epoch_seconds": None})
    plan = run.plan.model_copy(update={"stages": (stage,)})
    assert refit(run.model_copy(update={"plan": plan})) is None


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_fit_with_the_epochs_predicts_nearer_to_them(factor):
    run = make_run(factor)
    found = refit(run)
    before = run.plan.stages[0].predicted_epoch_seconds.value
    assert found.error == pytest.approx(1 / factor - 1)
    assert found.tolerance == 0.1
    assert found.measured == pytest.approx(factor * before)
    assert abs(found.refitted.value - found.measured) < abs(before - found.measured)
    assert found.workers >= 1
    assert found.global_batch_size >= found.workers


def test_the_tolerance_is_the_goal_s():
    assert refit(make_run(1.08, goal={"tolerance": 0.05})) is not None
    assert refit(make_run(1.5, goal={"tolerance": 0.6})) is None


def test_limits_that_the_run_missed_do_not_stop_the_new_fit():
    """The same batch is predicted again, even if it meets the deadline no more."""
    run = make_run(1.0)
    seconds = 1.2 * 30 * run.plan.stages[0].predicted_epoch_seconds.value
    run = make_run(1.3, goal={"deadline": seconds + 60})
    assert refit(run).refitted.value > run.plan.stages[0].predicted_epoch_seconds.value
