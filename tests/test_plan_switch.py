"""A plan that changes at the end of an epoch: who may go on under it, and that nothing is lost."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from batchwright.algorithms.splicing import spliced, why_not
from batchwright.errors import NewPlan, PlanError
from batchwright.records import Plan, RunSummary
from batchwright.records.documents import read_record, write_record
from batchwright.records.service import KeptAdvice
from batchwright.training.plan_switch import PlanSwitch
from batchwright.training.recorder import Recorder
from batchwright.workflows import run_training
from batchwright.workflows.run_training import checked_destination
from batchwright.workflows.stopwatch import Stopwatch
from samples import make_dual_plan, make_job, make_plan
from test_session import make_model, make_session, make_tiny_plan, train, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 5


def another(plan, **row):
    """The same plan with other rows."""
    rows = tuple(stage.model_copy(update=row) for stage in plan.stages)
    return plan.model_copy(update={"stages": rows})


PLAN = make_tiny_plan(epochs=EPOCHS)
LARGER = another(PLAN, local_batch_sizes=(11,), learning_rate=0.2)


def advise(folder, plan=LARGER, *, number=1, epoch=1):
    advice = KeptAdvice(number=number, epoch=epoch, reason="epochs take twice as long", plan=plan)
    write_record(advice, folder / "advice.json")
    return advice


def notes(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "note"]


# ------------------------------------------------------------------------------------ who may go on


def test_later_rows_may_have_other_batches_and_rates():
    changed = spliced(PLAN, LARGER, 2)
    assert [stage.epochs for stage in changed.stages] == [2, 3]
    assert changed.stages[1].local_batch_sizes == (11,)
    for done in (0, 1, 2):
        assert not why_not(changed, PLAN, done)
    assert why_not(changed, PLAN, 3) == "it changes epoch 3, and 3 are done"
    assert not why_not(PLAN, PLAN, 5)
    assert not why_not(another(PLAN), PLAN.model_copy(update={"reasons": make_plan().reasons}), 2)
    # Another version predicts otherwise, for the epochs that are done, too.
    assert not why_not(another(PLAN, fixed_samples=3.0, predicted_bytes=None), PLAN, 2)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (LARGER, "it changes epoch 1, and 0 are done"),
        (make_tiny_plan(epochs=9), "it has 9 epochs in place of 5"),
        (PLAN.model_copy(update={"precision": "bfloat16"}), "it has another precision"),
        (spliced(PLAN, another(PLAN, resolution=16), 2), "it has another resolution in epoch 3"),
        (spliced(PLAN, another(PLAN, dropout=0.5), 2), "it has another dropout in epoch 3"),
    ],
)
def test_what_cannot_be_gone_on_with_is_said(changed, why):
    assert why_not(changed, PLAN, 0) == why


def test_rows_of_a_growing_batch_may_be_predicted_otherwise():
    """Another version's plan was refused for the times of these rows alone."""
    (row,) = another(PLAN, local_batch_sizes=(12,)).stages
    growing = PLAN.model_copy(update={"growth": (row,)})
    later = row.model_copy(update={"fixed_samples": 3.0, "predicted_bytes": None, "epochs": 9})
    assert not why_not(growing.model_copy(update={"growth": (later,)}), growing, 2)
    other = row.model_copy(update={"learning_rate": 9.0})
    for changed in ((other,), ()):
        found = why_not(growing.model_copy(update={"growth": changed}), growing, 0)
        assert found == "it has another growth"


def test_a_run_goes_on_with_its_hosts_in_another_order():
    plan = make_tiny_plan((6, 4, 2), epochs=EPOCHS)
    arranged = another(plan, local_batch_sizes=(2, 6, 4))
    assert not why_not(plan, arranged, 3)
    assert why_not(plan, another(plan, local_batch_sizes=(6, 5, 1)), 3)
    served = make_dual_plan()
    assert why_not(
        another(served, local_batch_sizes=served.stages[0].local_batch_sizes[::-1]), served, 3
    )


# ---------------------------------------------------------------------------------- what is advised


@pytest.fixture
def folder(tmp_path):
    write_record(PLAN, tmp_path / "plan.json")
    return tmp_path


def advised(folder, plan=PLAN):
    return PlanSwitch(folder, plan, Recorder(folder, plan))


def test_without_advice_or_before_its_epoch_nothing_changes(folder):
    assert not advised(None).wanted(1)
    assert not advised(folder).wanted(1)
    advise(folder, epoch=3)
    assert not advised(folder).wanted(2)
    assert (folder / "advice.json").exists()


def test_advice_for_an_epoch_that_has_passed_is_for_the_next_one(folder):
    advise(folder, epoch=1)
    one = advised(folder)
    assert one.wanted(3)
    one.take()
    assert read_record(folder / "plan.json", Plan) == spliced(PLAN, LARGER, 3)
    assert read_record(folder / "plan-1.json", Plan) == PLAN
    assert read_record(folder / "advice-1.json", KeptAdvice).taken == 3
    assert not (folder / "advice.json").exists()
    assert notes(folder) == ["advice 1 is taken from epoch 4 on: epochs take twice as long"]


def test_the_last_epoch_is_the_last_that_can_change(folder):
    advise(folder)
    assert not advised(folder).wanted(EPOCHS)
    assert advised(folder).wanted(EPOCHS - 1)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (another(PLAN, resolution=16), "another resolution"),
        (make_tiny_plan(epochs=9), "epochs 9"),
    ],
)
def test_advice_that_cannot_be_followed_is_put_aside_with_a_note(folder, plan, why):
    advise(folder, plan)
    assert not advised(folder).wanted(1)
    assert not (folder / "advice.json").exists()
    assert read_record(folder / "advice-1.json", KeptAdvice).taken is None
    assert read_record(folder / "plan.json", Plan) == PLAN
    (note,) = notes(folder)
    assert note.startswith("advice 1 is not taken: ")
    assert why in note


def test_unreadable_advice_is_put_aside_with_a_note(folder):
    (folder / "advice.json").write_text("{")
    assert not advised(folder).wanted(1)
    assert not (folder / "advice.json").exists()
    assert notes(folder)[0].startswith("advice is not taken: ")


class Killed(BaseException):
    """Nothing is done after it."""


def killed(*_):
    raise Killed


@pytest.mark.parametrize("at", ["_settle", "_put_aside"])
def test_advice_that_a_killed_process_has_followed_is_put_aside_later(folder, monkeypatch, at):
    advise(folder)
    one = advised(folder)
    assert one.wanted(1)
    with monkeypatch.context() as patch:
        patch.setattr(PlanSwitch, at, killed)
        with pytest.raises(Killed):
            one.take()
    assert (folder / "advice.json").exists()
    changed = read_record(folder / "plan.json", Plan)
    assert changed == spliced(PLAN, LARGER, 1)
    assert not advised(folder, changed).wanted(2)
    assert read_record(folder / "advice-1.json", KeptAdvice).taken == 2
    assert not (folder / "advice.json").exists()
    assert read_record(folder / "plan.json", Plan) == changed


def test_advice_for_what_is_followed_anyhow_changes_nothing(folder):
    advise(folder, another(PLAN))
    assert not advised(folder).wanted(1)
    assert read_record(folder / "advice-1.json", KeptAdvice).taken == 1
    assert read_record(folder / "plan.json", Plan) == PLAN


# ---------------------------------------------------------------------------------- what is trained


def begin(folder, plan=PLAN, **options):
    model = make_model(extras=True)
    return make_session(model, plan=plan, run_folder=folder, follow_advice=True, **options)


def test_a_session_stops_after_the_epoch_and_goes_on_under_the_new_plan(tmp_path):
    folder = tmp_path / "run"
    one = begin(folder)
    seen = []

    def each_step():
        seen.append(one.local_batch_sizes)
        if len(seen) == 6:  # in the second epoch
            advise(folder)

    with pytest.raises(NewPlan, match="from epoch 3 on"), one:
        train(one, each_step=each_step)
    assert seen == [(5,)] * 10
    assert not (folder / "summary.json").exists()
    changed = read_record(folder / "plan.json", Plan)
    with begin(folder, changed, resume=True) as two:
        train(two, each_step=lambda: seen.append(two.local_batch_sizes))
    assert seen[10:] == [(11,)] * 6
    summary = read_record(folder / "summary.json", RunSummary)
    assert [epoch.global_batch_size for epoch in summary.epochs] == [5, 5, 11, 11, 11]
    assert [epoch.learning_rate for epoch in summary.epochs] == pytest.approx([0.1] * 2 + [0.2] * 3)
    assert all(epoch.whole for epoch in summary.epochs)
    assert summary.plan == changed


def test_a_loop_that_stops_early_takes_no_more_advice(tmp_path):
    with begin(tmp_path / "run") as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(cross_entropy(one.model(features), labels))
            advise(tmp_path / "run")
            break
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "advice.json").exists()


def test_going_on_under_a_plan_that_changes_nothing_is_as_if_nothing_had_been(tmp_path):
    whole = begin(tmp_path / "whole")
    with whole:
        train(whole)
    one = begin(tmp_path / "run")
    same = spliced(PLAN, another(PLAN, learning_rate=0.1 + 1e-12), 1)
    with pytest.raises(NewPlan), one:
        train(one, each_step=lambda: advise(tmp_path / "run", same))
    changed = read_record(tmp_path / "run" / "plan.json", Plan)
    with begin(tmp_path / "run", changed, resume=True) as two:
        train(two)
    assert torch.allclose(weights_of(two.model), weights_of(whole.model), rtol=0, atol=1e-6)


def test_a_session_that_follows_no_advice_leaves_it_alone(tmp_path):
    (tmp_path / "run").mkdir()
    advise(tmp_path / "run")
    with make_session(plan=PLAN, run_folder=tmp_path / "run") as one:
        train(one)
    assert (tmp_path / "run" / "advice.json").exists()


# ------------------------------------------------------------------------------------- the launcher


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (make_job(launch="virtual"), "its seconds are simulated"),
        (make_dual_plan(), "its rounds keep their batches"),
    ],
)
def test_advice_that_could_never_be_taken_is_refused_at_once(what, why):
    asked = {"resume": False, "follow_advice": True}
    with pytest.raises(PlanError, match=why):
        checked_destination(None, what, "http://localhost:1", **asked)
    with pytest.raises(PlanError, match="name it with --report-to"):
        checked_destination(None, make_job(), "", **asked)


def test_a_launcher_starts_again_with_the_new_plan_until_it_stays(tmp_path, monkeypatch):
    write_record(PLAN, tmp_path / "plan.json")
    plans = [spliced(PLAN, LARGER, 1), spliced(PLAN, LARGER, 3), None]
    begun = []

    def train_once(folder, plan, *_, resume, follow_advice):
        begun.append((plan, resume, follow_advice))
        new = plans[len(begun) - 1]
        if new is not None:
            write_record(new, folder / "plan.json")

    monkeypatch.setattr(run_training, "_train_once", train_once)
    monkeypatch.setattr(run_training, "_summarized", lambda folder, watch: "summary")
    told = run_training.conduct(tmp_path, PLAN, Stopwatch(), resume=False, follow_advice=True)
    assert told == "summary"
    assert begun == [(PLAN, False, True), (plans[0], True, True), (plans[1], True, True)]
