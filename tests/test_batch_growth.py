"""A batch that grows with the gradient noise: its rows in the plan, and epochs that have them."""

from __future__ import annotations

import json
import sys
from math import sqrt
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.harness.kept_runs import Run
from benchmarks.methods import batch_growth

import batchwright as bw
from batchwright.algorithms.batch_growth import rows_in_reach
from batchwright.errors import JobError, PlanError
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.planning.schedule import rate_schedule
from batchwright.prediction.noise_scale import NoiseState
from batchwright.records import Estimate, Job, Plan
from batchwright.records.documents import change_job
from batchwright.records.lines.run_lines import EpochLine
from batchwright.records.text.formatting import in_bytes
from batchwright.records.text.plan_facts import plan_facts
from batchwright.records.text.plan_text import is_chosen
from batchwright.reporting.data.live_run import RunLines, summary_so_far
from batchwright.workflows.drift import drift_of
from batchwright.workflows.exports.trainers import refuse_what_trainers_cannot
from batchwright.workflows.replan import may_change
from batchwright.workflows.run_training import checked_destination
from samples import (
    make_data,
    make_epoch,
    make_job,
    make_network,
    make_profile,
    make_step,
    make_summary,
    reason,
)
from samples import make_plan as make_sample_plan
from test_decisions import opened
from test_session import make_session, make_tiny_plan, summary_in, train, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = make_data(train_samples=4096)
TASK = "imagenette-resnet8"
SECONDS = Estimate(value=0.01, low=0.009, high=0.011)


def growing(plan: Plan, *factors: float) -> Plan:
    """The plan with growth rows of so many times its batch."""
    (planned,) = plan.stages
    rows = (
        planned.model_copy(
            update={
                "local_batch_sizes": tuple(round(times * n) for n in planned.local_batch_sizes),
                "learning_rate": planned.learning_rate * sqrt(times),
            }
        )
        for times in factors
    )
    return plan.model_copy(update={"growth": tuple(rows)})


PLAN = growing(make_sample_plan(), 2, 4, 8)  # 96 samples, 30 epochs


def planned(**keys: object) -> Plan:
    """A plan of measured steps whose batch grows."""
    usual = {"optimizer": "muon", "global_batch": 64, "batch_growth": "noise"}
    job = make_job(**(usual | keys))
    return make_plan(make_profile(job=make_job(), data=DATA), job)


# --------------------------------------------------------------------------- which rows in reach


@pytest.mark.parametrize(
    ("noise", "rows"),
    [
        ((), 0),
        ((None, None), 0),
        ((100.0,), 0),
        ((100.0, 199.0), 0),
        ((100.0, 200.0), 1),
        ((None, 100.0, 399.0), 1),
        ((100.0, 900.0, 150.0), 3),  # never back
        ((100.0, None, 9e9), 3),
        ((400.0, 100.0, 200.0), 0),  # the first one counts
    ],
)
def test_the_batch_doubles_as_often_as_the_noise_since_the_first_epoch(noise, rows) -> None:
    assert rows_in_reach(PLAN, noise) == rows
    assert rows_in_reach(make_sample_plan(), noise) == 0


def test_the_rows_that_epochs_were_trained_with_are_those_of_their_batches() -> None:
    batches = dict(enumerate([96, 96, 192, 192, 768]))
    rows = PLAN.as_trained(batches).stages
    assert [(row.epochs, row.global_batch_size) for row in rows] == [(2, 96), (2, 192), (26, 768)]
    rate = PLAN.stages[0].learning_rate
    assert rows[2].learning_rate == pytest.approx(rate * sqrt(8))
    assert PLAN.as_trained({}).stages == PLAN.stages
    assert PLAN.as_trained({2: 192}).stages[0].epochs == 2  # without lines of the first ones
    assert PLAN.as_trained({2: 192, 30: 384}).epochs == 30  # a line that contradicts the plan
    plain = make_sample_plan()
    assert plain.as_trained(batches) is plain
    assert PLAN.row(7, 400).global_batch_size == 384


# ----------------------------------------------------------------------------------- in the plan


def test_the_plan_has_rows_of_two_four_and_eight_times_the_batch_as_far_as_they_are_quicker() -> (
    None
):
    plan = planned()
    (first,) = plan.stages
    assert [row.global_batch_size for row in plan.growth] == [128, 256]  # 512 leave 8 steps
    seconds = [row.predicted_epoch_seconds.value for row in (first, *plan.growth)]
    assert seconds == sorted(seconds, reverse=True)
    for row in plan.growth:
        times = row.global_batch_size / first.global_batch_size
        assert row.learning_rate == pytest.approx(first.learning_rate * sqrt(times))
        assert row.predicted_bytes.value >= first.predicted_bytes.value
    why = reason(plan, "growth of the batch")
    assert why.value == "to at most 256 samples"
    assert "128 (" in why.why
    assert "with sgd" not in why.why
    assert "with sgd" in reason(planned(optimizer="sgd"), "growth of the batch").why
    assert (
        planned(scaling="none").growth[0].learning_rate
        == planned(scaling="none").stages[0].learning_rate
    )


def test_a_batch_that_leaves_no_room_does_not_grow_and_the_plan_says_so() -> None:
    plan = planned(global_batch=256)
    assert plan.growth == ()
    assert reason(plan, "growth of the batch").value == "none"
    few = planned(goal={"doubling_gain": 0.4})
    assert few.growth == ()
    assert "saves less than goal.doubling_gain=0.4" in reason(few, "growth of the batch").why
    (doubt,) = (one for one in rate_schedule(plan).doubts if "batch_growth" in one)
    assert doubt.startswith("batch_growth=noise leaves the batch at 256: twice")
    (doubt,) = rate_schedule(planned(global_batch=256, workers=1)).doubts
    assert "at 256, and steps are cut for it: twice" in doubt
    assert not any("batch_growth" in one for one in rate_schedule(planned()).doubts)
    capped = planned(method="dynamic-batch", most_local_batch=64)
    assert [row.global_batch_size for row in capped.growth] == [128]


def test_noise_takes_two_parts_of_a_step_which_one_worker_makes_of_micro_batches() -> None:
    assert planned(workers=2).stages[0].accumulation_steps == 1
    alone = planned(workers=1)
    assert alone.stages[0].accumulation_steps == 2
    assert all(row.accumulation_steps >= 2 for row in alone.growth)
    usual = make_plan(make_profile(job=make_job(), data=DATA), make_job(workers=1, global_batch=64))
    assert usual.stages[0].accumulation_steps == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"batch_growth": "noise"},
        {"scaling": "gain", "base_batch": 1},
        {"ags": {"mode": "norm"}, "base_batch": 1},
    ],
)
def test_a_plan_takes_no_batch_whose_noise_cannot_be_measured(keys) -> None:
    """Its own choice was refused, although the next batch would do."""
    proportional = [make_step(1, batch, seconds=0.001 * batch) for batch in (2, 4, 8, 16)]
    asked = {"workers": 1, "goal": {"objective": "knee"}}
    profile = make_profile(job=make_job(**asked), steps=tuple(proportional))
    usual = make_plan(profile, make_job(**asked))
    assert usual.stages[0].global_batch_size == 2
    plan = make_plan(profile, make_job(**asked, **keys))
    assert plan.stages[0].global_batch_size >= 4
    assert plan.stages[0].accumulation_steps >= 2
    assert plan.knees[0].global_batch_size == plan.stages[0].global_batch_size
    small = next(one for one in plan.considered if one.global_batch_size == 2)
    assert "cannot be cut into the 2 parts" in small.refused
    few = profile.model_copy(update={"data": make_data(train_samples=30)})
    with pytest.raises(PlanError, match=r"give global_batch=4 or more, or leave"):
        make_plan(few, make_job(**asked, **keys))


def test_a_plan_without_measurements_grows_too() -> None:
    job = Job(epochs=3, optimizer="muon", batch_growth="noise", workers=2, global_batch=64)
    plan = plan_without_profile(job, DATA, make_network())
    assert [row.global_batch_size for row in plan.growth] == [128, 256]
    assert "s an epoch" not in reason(plan, "growth of the batch").why


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"ags": {"mode": "norm"}, "optimizer": "sgd"}, "batch_growth=noise with ags.mode=norm"),
        ({"scaling": "gain"}, "batch_growth=noise with scaling=gain"),
        ({"method": "auto"}, "batch_growth=noise is for method=plain or dynamic-batch"),
    ],
)
def test_what_follows_the_noise_too_is_refused(keys, said) -> None:
    with pytest.raises(JobError, match=said):
        change_job(Job(batch_growth="noise"), keys)


def test_who_changes_or_fixes_the_batch_refuses_a_plan_that_grows(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", "secret")
    with pytest.raises(PlanError, match=r"its batch may grow.*batch_growth=off"):
        refuse_what_trainers_cannot(PLAN, "a trainer")
    grows = PLAN.model_copy(update={"job": make_job(batch_growth="noise")})
    with pytest.raises(PlanError, match="--follow-advice with batch_growth=noise"):
        checked_destination(None, grows, "http://here", resume=False, follow_advice=True)
    with pytest.raises(PlanError, match="both change the batch"):
        make_session(plan=growing(make_tiny_plan(), 2), follow_advice=True, run_folder=tmp_path)
    assert may_change(make_sample_plan())
    assert not may_change(PLAN)


# ---------------------------------------------------------------------------------- in the reports


def test_measured_epochs_are_compared_with_the_row_that_they_had() -> None:
    quick = [row.model_copy(update={"predicted_epoch_seconds": SECONDS}) for row in PLAN.growth]
    plan = PLAN.model_copy(update={"growth": tuple(quick)})
    batches = [96] * 5 + [192] * 5
    epochs = [make_epoch(n, global_batch_size=one) for n, one in enumerate(batches)]
    drift = drift_of(plan, epochs)
    assert drift is not None
    assert drift.predicted == SECONDS
    assert drift.stage.global_batch_size == 192
    lines = RunLines(epochs=[EpochLine(kind="epoch", record=one, epochs=30) for one in epochs])
    shown = summary_so_far("a run", plan, None, lines)
    assert [row.global_batch_size for row in shown.plan.stages] == [96, 192]


def test_of_the_batches_that_a_run_had_the_plan_chose_the_first() -> None:
    plan = planned()
    grown = plan.as_trained({0: 64, 1: 128})
    assert len(grown.stages) == 2
    picked = [one.global_batch_size for one in grown.considered if is_chosen(grown, one)]
    assert picked == [64]


def test_a_simulation_says_that_its_batch_stays() -> None:
    notes = [bw.simulate(plan, steps=50, repeats=2).notes for plan in (PLAN, make_sample_plan())]
    told = [any("the batch stays" in note for note in one) for one in notes]
    assert told == [True, False]


def test_trackers_and_model_cards_have_the_batches_that_a_run_had() -> None:
    plan = planned(learning_rate=0.1, base_batch=64)
    assert plan_facts(plan)["batch_growth"] == "noise"
    grown = plan_facts(plan.as_trained({2: 128, 4: 256}))
    assert grown["batch_growth"] == (
        "noise, 128 from epoch 3 on at rate 0.141, 256 from epoch 5 on at rate 0.2"
    )
    assert "batch_growth" not in plan_facts(make_sample_plan())


def test_a_notebook_shows_the_peak_beside_the_memory_of_the_largest_batch() -> None:
    much = Estimate(value=7e9, low=6e9, high=8e9)
    larger = PLAN.growth[0].model_copy(update={"predicted_bytes": much})
    plan = PLAN.model_copy(update={"growth": (larger,)}).as_trained({0: 96, 5: 192})
    epoch = make_epoch(5)
    workers = tuple(one.model_copy(update={"peak_bytes": 7 * 10**9}) for one in epoch.workers)
    (shown,) = make_summary(plan=plan, epochs=(make_epoch(5, workers=workers),))._tables()
    assert [cells[:2] for cells in shown.rows] == [("peak memory", in_bytes(much))]


# ------------------------------------------------------------------------------------ in training


TINY = growing(make_tiny_plan(micro=2, epochs=5), 2, 4)  # 5 samples of 22, in parts of 2 and 3


@pytest.fixture
def rising(monkeypatch) -> None:
    """A noise scale of 500 samples for each step of several parts; the first epoch has four."""
    monkeypatch.setattr(NoiseState, "noise_scale", property(lambda self: 500.0 * self.updates))


def trained(folder, plan=TINY, *, until=None, resume=False):
    one = make_session(plan=plan, run_folder=folder, resume=resume)
    with one:
        train(one, until=until)
    return summary_in(folder), weights_of(one.model)


def notes(folder) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "note"]


@pytest.mark.usefixtures("rising")
def test_epochs_go_on_with_a_larger_batch_and_a_higher_rate_once_the_noise_has_grown(
    tmp_path,
) -> None:
    summary, _ = trained(tmp_path / "run")
    sizes = [one.global_batch_size for one in summary.epochs]
    assert sizes == [5, 5, 10, 10, 10]
    assert [one.steps for one in summary.epochs] == [5, 5, 3, 3, 3]
    rates = [one.learning_rate for one in summary.epochs]
    assert rates == pytest.approx([0.1, 0.1, *[0.1 * sqrt(2)] * 3])
    assert [(row.epochs, row.global_batch_size) for row in summary.plan.stages] == [(2, 5), (3, 10)]
    assert notes(tmp_path / "run") == [
        "from epoch 3 on the batch is 10, not 5: the gradient noise scale has grown from 2,000 to "
        "4,000 samples"
    ]


@pytest.mark.usefixtures("rising")
@pytest.mark.parametrize(  # micro-batches: before, at and behind the change
    "until", [26, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 30))]
)
def test_a_run_that_is_stopped_goes_on_with_the_batch_that_it_had(tmp_path, until) -> None:
    whole, weights = trained(tmp_path / "whole")
    with pytest.raises(SystemExit):
        trained(tmp_path / "pieces", until=until)
    again, pieces = trained(tmp_path / "pieces", resume=True)
    assert torch.equal(weights, pieces)
    assert [one.global_batch_size for one in again.epochs] == [5, 5, 10, 10, 10]
    assert again.plan == whole.plan


def test_the_batch_stays_where_the_noise_does(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(NoiseState, "noise_scale", property(lambda _: 40.0))
    grows, weights = trained(tmp_path / "grows")
    stays, same = trained(tmp_path / "stays", TINY.model_copy(update={"growth": ()}))
    assert torch.equal(weights, same)
    assert [one.steps for one in grows.epochs] == [one.steps for one in stays.epochs]
    assert grows.plan.stages == stays.plan.stages


# ----------------------------------------------------------------------------------- its benchmark


def test_growth_is_compared_with_the_same_seed_of_the_same_task() -> None:
    plans = {arm: batch_growth.plan_of(TASK, arm, 17, opened(TASK)) for arm in batch_growth.ARMS}
    assert [row.global_batch_size for row in plans["noise"].growth] == [64, 128]
    assert not plans["base"].growth
    assert plans["short"].epochs == plans["base"].epochs - 1
    assert {plan.stages[0].local_batch_sizes for plan in plans.values()} == {(16, 16)}
    runs = {
        name: {
            "base": [Run(50.0, 20.0, (first,)), Run(52.0, 30.0, (first,))],
            "noise": [Run(50.0 + more, 18.0, (4 * first,)), Run(52.0 + more, 27.0, (first,))],
            "short": [Run(49.0, 19.0, (first,)), Run(51.0, 28.5, (first,))],
        }
        for (name, first), more in zip(batch_growth.BATCHES.items(), (0.0, -1.5, 0.9), strict=True)
    }
    found = batch_growth.BENCHMARK.values(batch_growth.found_of(runs))
    assert set(found) == {one.name for one in batch_growth.BENCHMARK.figures}
    assert found["points"].value == pytest.approx(-0.2)
    assert found["points_worst_task"].value == pytest.approx(-1.5)
    assert found["points_over_short"].value == pytest.approx(0.8)
    assert found["time"].value == pytest.approx(0.9)
    assert found["time"].met
    assert found["growth"].value == pytest.approx(2.5)
