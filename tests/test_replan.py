"""What a run teaches where its epochs missed the prediction."""

from __future__ import annotations

import pytest

from batchwright.algorithms.splicing import why_not
from batchwright.errors import PlanError
from batchwright.planning.planner import make_plan
from batchwright.records import WorkerTime
from batchwright.workflows.check_plan import with_points
from batchwright.workflows.replan import MAX_CHANGE, _step_of, for_other_workers, refit
from clusters import LOCAL_BATCHES, make_step
from samples import (
    make_cluster,
    make_cyclic_plan,
    make_data,
    make_epoch,
    make_job,
    make_memory,
    make_profile,
    make_summary,
)
from samples import make_step as make_sample_step
from test_optimizer import update


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


def test_how_single_steps_scatter_says_nothing_of_whole_epochs():
    """A visit of a probe is ten steps, that of a run an epoch."""
    run = make_run(1.25)
    stage = run.plan.stages[0]
    epochs = _step_of(run, run.profile, stage, stage.predicted_epoch_seconds)
    probed = epochs.model_copy(update={"visit_error": 0.2, "repeats": 20})
    profile = run.profile.model_copy(update={"steps": (probed,)})
    (point,) = with_points(profile, steps=(epochs,)).steps
    assert point.visit_error < 0.05


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
@pytest.mark.parametrize(
    ("batch", "factor"),
    [
        (48, 1.3),
        pytest.param(64, 2.0, marks=pytest.mark.slow),
        pytest.param(192, 1.6, marks=pytest.mark.slow),
        (320, 2.0),
    ],
)
def test_the_new_fit_comes_to_the_epochs_though_the_profile_speaks_against_them(
    batch, factor, optimizer
):
    batches = (4, 8, 16, 32, 64, 128)
    profile = make_profile(
        job=make_job(optimizer="auto", learning_rate="auto", workers=1, global_batch=batch),
        steps=tuple(make_sample_step(1, b, seconds=0.002 + 0.0001 * b) for b in batches),
        memory=tuple(make_memory(1, b) for b in batches),
        data=make_data(train_samples=32000),
        updates=(update("sgd", 0.0001), update("muon", 0.0201)),
        collectives=(),
    )
    plan = make_plan(profile, profile.job.model_copy(update={"optimizer": optimizer}))
    seconds = factor * plan.stages[0].predicted_epoch_seconds.value
    worker = WorkerTime(
        local_batch_size=batch,
        samples=32000,
        input_seconds=0,
        compute_seconds=seconds,
        communication_seconds=0,
    )
    epochs = tuple(
        make_epoch(e, training_seconds=seconds, global_batch_size=batch, workers=(worker,))
        for e in range(6)
    )
    found = refit(make_summary(plan=plan, profile=profile, epochs=epochs))
    assert found.refitted.low <= seconds <= found.refitted.high
    assert found.refitted.value == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.5])
def test_it_does_so_with_several_workers(factor):
    found = refit(make_run(factor))
    assert found.refitted.low <= found.measured <= found.refitted.high


def test_where_measured_steps_contradict_each_other_the_fit_that_is_nearer_counts():
    """Brought to the level of the epochs these would give 1.7 times as many seconds."""
    measured = (  # local batch, seconds of computing and of the exchange, visits
        (4, 10.0, 2.0, (12.0,)),
        (8, 18.0, 38.0, (37.0, 56.0, 63.0)),
        (16, 14.5, 29.0, (35.0, 42.0, 45.0, 52.0)),
        (32, 11.0, 3.0, (13.5, 14.0, 14.5)),
        (64, 14.0, 3.0, (16.0, 17.0, 18.0)),
    )
    profile = make_profile(
        job=make_job(global_batch=37),
        data=make_data(train_samples=104),
        steps=tuple(
            make_sample_step(2, batch, seconds=compute + sync).model_copy(
                update={
                    "compute_seconds": compute,
                    "sync_seconds": sync,
                    "step_seconds": compute + sync,
                    "visits": visits,
                }
            )
            for batch, compute, sync, visits in measured
        ),
        memory=tuple(make_memory(2, batch) for batch, *_ in measured),
        collectives=(),
    )
    plan = make_plan(profile)
    before = plan.stages[0].predicted_epoch_seconds.value
    worker = WorkerTime(
        local_batch_size=19,
        samples=52,
        input_seconds=0,
        compute_seconds=0.85 * 2 * before,
        communication_seconds=0.15 * 2 * before,
    )
    epochs = [make_epoch(e, training_seconds=2 * before, workers=(worker,) * 2) for e in range(3)]
    found = refit(make_summary(plan=plan, profile=profile, epochs=tuple(epochs)))
    assert found.refitted.value == pytest.approx(2 * before, rel=0.25)


def test_the_tolerance_is_the_goal_s():
    assert refit(make_run(1.08, goal={"tolerance": 0.05})) is not None
    assert refit(make_run(1.5, goal={"tolerance": 0.6})) is None


def test_limits_that_the_run_missed_do_not_stop_the_new_fit():
    """The same batch is predicted again, even if it meets the deadline no more."""
    run = make_run(1.0)
    seconds = 1.2 * 30 * run.plan.stages[0].predicted_epoch_seconds.value
    run = make_run(1.3, goal={"deadline": seconds + 60})
    assert refit(run).refitted.value > run.plan.stages[0].predicted_epoch_seconds.value


# ------------------------------------------------------------------------ another number of workers


def measured_with(workers, **keys):
    steps = tuple(make_step(workers, batch) for batch in LOCAL_BATCHES)
    memory = tuple(make_memory(workers, batch) for batch in LOCAL_BATCHES)
    return make_profile(
        job=make_job(workers=workers, **keys),
        cluster=make_cluster(workers=workers),
        data=make_data(train_samples=50_000),
        steps=steps,
        memory=memory,
    )


def rows(plan):
    return [(one.epochs, one.workers, one.global_batch_size) for one in plan.stages]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_the_rest_is_planned_for_the_workers_that_are_left_and_as_before_once_all_are_back(left):
    profile = measured_with(4, goal={"objective": "knee"})
    plan = make_plan(profile)
    fewer = for_other_workers(plan, profile, 5, left)
    (begun, then, batch), (rest, workers, fewer_batch) = rows(fewer)
    assert (begun, then, batch) == (5, 4, plan.stages[0].global_batch_size)
    assert (rest, workers) == (plan.epochs - 5, left)
    assert batch // MAX_CHANGE <= fewer_batch < batch
    slower, faster = (one.stages[-1].predicted_epoch_seconds.value for one in (fewer, plan))
    assert slower > faster
    for done in (0, 5):
        assert why_not(fewer, plan, done) == ""
    assert why_not(fewer, plan, 6) == "it changes epoch 6, and 6 are done"
    back = for_other_workers(fewer, profile, 9, 4)
    assert rows(back) == [(5, 4, batch), (4, left, fewer_batch), (plan.epochs - 9, 4, batch)]
    assert back.stages[2].learning_rate == plan.stages[0].learning_rate


def test_a_batch_that_was_asked_for_stays_with_fewer_workers():
    profile = measured_with(2, global_batch=96)
    fewer = for_other_workers(make_plan(profile), profile, 1, 1)
    assert [one.local_batch_sizes for one in fewer.stages] == [(48, 48), (96,)]


def test_plans_that_cannot_change_and_workers_that_nobody_knows_of_are_said():
    profile = measured_with(2)
    with pytest.raises(PlanError, match="method=cyclic keeps its batches"):
        for_other_workers(make_cyclic_plan(), profile, 1, 1)
    plan = make_plan(profile)
    grows = plan.model_copy(update={"growth": plan.stages})
    with pytest.raises(PlanError, match="batch_growth=noise changes the batch"):
        for_other_workers(grows, profile, 1, 1)
    with pytest.raises(PlanError, match="workers=3"):
        for_other_workers(plan, profile, 1, 3)
