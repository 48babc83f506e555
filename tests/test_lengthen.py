"""A run that misses its target goes on, for as many epochs as the job allows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import batchwright as bw
from batchwright.algorithms.splicing import why_not
from batchwright.records import EpochRecord, Estimate, Plan, RunSummary
from batchwright.reporting.data.reading import accuracy_comparison
from batchwright.workflows.lengthen import lengthened
from samples import make_dual_plan, make_epoch, make_job, make_plan, make_summary


def missed(epochs: int = 4, most: int = 30, *, top1: float = 0.55, **goal: object) -> RunSummary:
    """A run that trained the few epochs that its plan chose, and ended below its target."""
    (stage,) = make_plan().stages
    job = make_job(epochs=epochs, goal={"accuracy": 0.6, **goal})
    plan = make_plan(
        job=job, stages=(stage.model_copy(update={"epochs": epochs}),), max_epochs=most
    )
    done = tuple(make_epoch(epoch, val_correct=round(top1 * 360)) for epoch in range(epochs))
    return make_summary(plan=plan, epochs=done, setup_seconds=0.0, wall_seconds=spent(done))


def spent(epochs: Sequence[EpochRecord]) -> float:
    """Seconds of training, evaluation and checkpoints."""
    return sum(
        one.training_seconds + one.evaluation_seconds + one.checkpoint_seconds for one in epochs
    )


def test_it_goes_on_and_says_why() -> None:
    longer = lengthened(missed())
    assert longer is not None
    assert longer.epochs == 6
    assert longer.reasons[-1].why == (
        "After 4 epochs held-out accuracy is 55.0 %, below goal.accuracy=0.6; epochs=30 allows "
        "more."
    )
    assert longer.max_epochs == 30
    assert longer.likely_epochs() == 6


def test_the_planned_time_grows_with_the_epochs() -> None:
    run = missed()
    whole = Estimate(value=8.0, low=4.0, high=12.0)
    for total, then in ((None, None), (whole, Estimate(value=12.0, low=6.0, high=18.0))):
        plan = run.plan.model_copy(update={"train_seconds": total})
        longer = lengthened(run.model_copy(update={"plan": plan}))
        assert longer is not None
        assert longer.train_seconds == then


@pytest.mark.parametrize(("epochs", "most", "then"), [(4, 5, 5), (1, 30, 2), (5, 30, 8)])
def test_it_never_takes_more_than_the_job_allows(epochs: int, most: int, then: int) -> None:
    longer = lengthened(missed(epochs, most))
    assert longer is not None
    assert longer.epochs == then


def test_a_run_whose_batch_has_grown_gets_more_epochs_of_the_plan_as_it_was_made() -> None:
    run = missed()
    (planned,) = run.plan.stages
    larger = planned.model_copy(update={"local_batch_sizes": (96, 96)})
    made = run.plan.model_copy(update={"growth": (larger,)})
    grown = made.as_trained({0: 96, 1: 96, 2: 192, 3: 192})
    assert len(grown.stages) == 2
    longer = lengthened(run.model_copy(update={"plan": grown}))
    assert longer is not None
    assert [(row.epochs, row.global_batch_size) for row in longer.stages] == [(6, 96)]
    assert longer.growth == (larger,)
    assert not why_not(longer, made, 4)


def test_the_further_the_target_the_more_epochs() -> None:
    """By the learning curve with the slope that tasks have, four times as many at most."""
    for top1, epochs in ((0.55, 6), (0.45, 12), (0.3, 16), (0.05, 16)):
        longer = lengthened(missed(top1=top1))
        assert longer is not None
        assert longer.epochs == epochs


def test_what_guessing_gets_right_counts_for_nothing() -> None:
    run = missed(top1=0.5)
    data = run.plan.data.model_copy(update={"largest_class": 0.5})
    uneven = run.model_copy(update={"plan": run.plan.model_copy(update={"data": data})})
    even, longer = lengthened(run), lengthened(uneven)
    assert even is not None
    assert longer is not None
    assert longer.epochs == 16 > even.epochs


@pytest.mark.parametrize("classes", [(), ("all",)])
def test_data_without_classes_have_no_guessing(classes: tuple[str, ...]) -> None:
    run = missed()
    data = run.plan.data.model_copy(update={"classes": classes})
    longer = lengthened(run.model_copy(update={"plan": run.plan.model_copy(update={"data": data})}))
    assert longer is not None
    assert longer.epochs == 6


def test_it_ends_where_it_is_to_end() -> None:
    assert lengthened(missed(top1=0.6)) is None  # reached
    assert lengthened(missed(4, 4)) is None  # the most
    summary = missed()
    for changes in (
        {"max_epochs": None},  # the plan did not choose
        {"job": make_job(goal={})},  # no target
        {"server": make_dual_plan().server},
    ):
        plan = summary.plan.model_copy(update=changes)
        assert lengthened(summary.model_copy(update={"plan": plan})) is None
    assert lengthened(summary.model_copy(update={"epochs": summary.epochs[:2]})) is None


def test_it_keeps_the_deadline() -> None:
    seconds = spent(missed().epochs)
    assert lengthened(missed(deadline=1.3 * seconds)) is None
    summary = missed(deadline=1.6 * seconds)
    assert lengthened(summary) is not None
    # The seconds of a start count, too: training itself stops by the clock on the wall.
    starts = {"setup_seconds": 0.2 * seconds, "wall_seconds": 1.2 * seconds}
    assert lengthened(summary.model_copy(update=starts)) is None
    # Those of a simulated cluster are on another clock.
    assert lengthened(summary.model_copy(update=starts | {"simulated": True})) is not None


def test_it_keeps_the_cost() -> None:
    cost = 2 * 7.2 * spent(missed().epochs) / 3600  # of two workers
    assert lengthened(missed(price=7.2, max_cost=1.3 * cost)) is None
    assert lengthened(missed(price=7.2, max_cost=1.6 * cost)) is not None


def test_a_run_that_did_all_its_epochs_may_go_on_for_more() -> None:
    before = missed().plan
    longer = lengthened(missed())
    assert longer is not None
    assert why_not(longer, before, 4) == ""
    assert why_not(longer, before, 3) == "it has 6 epochs in place of 4"
    assert why_not(before, longer, 4) == "it has 4 epochs in place of 6"


def test_the_prediction_is_judged_after_the_epochs_it_was_made_for() -> None:
    summary = missed()
    told = tuple(Estimate(value=0.5 + epoch / 100, low=0.4, high=0.7) for epoch in range(4))
    longer = lengthened(summary)
    assert longer is not None
    more = make_summary(
        plan=longer.model_copy(update={"epoch_accuracy": told}),
        epochs=(*summary.epochs, make_epoch(4), make_epoch(5)),
    )
    found = accuracy_comparison(more)
    assert found.predicted == told[-1]
    assert found.measured == 0.55


@pytest.mark.slow
def test_a_training_goes_on_until_it_reaches_its_target(tmp_path, capfd, undrawn) -> None:
    """One epoch of digits does not reach 90 %; more do, and a later resume finds it finished."""
    probe = {"budget": 0.3, "learning": 0}
    profile = bw.probe(data="digits", epochs=1, workers=1, launch="in-process", probe=probe)
    plan = bw.plan(profile, global_batch=64)
    goal = plan.job.goal.model_copy(update={"accuracy": 0.9})
    job = plan.job.model_copy(update={"goal": goal})
    plan = Plan(**{**dict(plan), "job": job, "max_epochs": 20})
    summary = bw.train(plan, run_folder=tmp_path / "run")
    assert len(summary.epochs) > 1
    assert summary.epochs[0].top1 < 0.9 <= summary.accuracy
    assert [one.epoch for one in summary.epochs] == list(range(len(summary.epochs)))
    assert "going on: After 1 epoch held-out accuracy is" in capfd.readouterr().err
    assert (tmp_path / "run" / "plan-1-epochs.json").exists()
    (first,) = bw.load(tmp_path / "run" / "summary-1-epochs.json").epochs
    assert first.top1 == summary.epochs[0].top1
    rates = [one.learning_rate for one in summary.epochs]
    assert rates[1] > rates[0]  # the cosine is laid out anew over the longer training
    again = bw.train(run_folder=tmp_path / "run", resume=True)
    assert len(again.epochs) == len(summary.epochs)
    bw.report(summary)
