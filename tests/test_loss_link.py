"""Held-out loss by accuracy: the line, its interval, and where plans and reports show it."""

from __future__ import annotations

from math import exp, hypot, log
from random import Random

import pytest

from batchwright.algorithms.splicing import spliced, why_not
from batchwright.planning.planner import make_plan
from batchwright.prediction.accuracy.loss_link import LossLink, fit_loss
from batchwright.prediction.accuracy.trainings import Observed
from batchwright.records import Estimate, Goal, Plan, Profile, RunSummary
from batchwright.reporting.data.reading import compared_rows
from batchwright.workflows.lengthen import lengthened
from samples import make_epoch, make_job, make_summary, reason
from samples import make_plan as bare_plan
from test_learning import taught
from test_lengthen import missed
from test_optimizer import profile_of
from test_run_history import run_of

LEVEL, POWER = 1.2, 0.9


def loss_at(accuracy: float) -> float:
    """The loss of a made-up task, which follows the line exactly."""
    return exp(LEVEL + POWER * log(1 - accuracy))


def mark(accuracy: float, loss: float | None = None) -> Observed:
    return Observed("sgd", 32, 3000, accuracy, 10_000, loss=loss or loss_at(accuracy))


def link_of(*marks: Observed) -> LossLink | None:
    return fit_loss(marks, classes=10, held_out=10_000)


def sure(accuracy: float) -> Estimate:
    return Estimate(value=accuracy, low=accuracy, high=accuracy)


# ------------------------------------------------------------------------------------- the line


def test_the_line_that_marks_were_made_with_comes_back():
    link = link_of(*map(mark, (0.3, 0.5, 0.6)))
    assert (link.intercept, link.slope) == pytest.approx((LEVEL, POWER))
    assert link.scatter == pytest.approx(0.0, abs=1e-9)
    found = link.at(Estimate(value=0.9, low=0.8, high=0.95))
    ends = [loss_at(one) for one in (0.9, 0.95, 0.8)]  # a high accuracy is a low loss
    assert [found.value, found.low, found.high] == pytest.approx(ends)


@pytest.mark.parametrize("marks", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 12))])
@pytest.mark.parametrize("unsure", [0.0, 0.3])
def test_the_interval_holds_the_loss_of_one_more_training_95_times_in_100(marks, unsure):
    """Beyond the marks, too, and with an accuracy that is itself known with an error."""
    random, inside, times = Random(marks), 0, 2000
    for _ in range(times):
        seen = [0.3 + 0.4 * (at + random.random()) / marks for at in range(marks)]
        link = link_of(*(mark(one, loss_at(one) * exp(random.gauss(0, 0.01))) for one in seen))
        place = log(1 - 0.8)  # the logarithm of wrong answers has a normal error
        low, value, high = (1 - exp(place + side * 1.96 * unsure) for side in (1, 0, -1))
        reached = 1 - exp(random.gauss(place, unsure))
        found = link.at(Estimate(value=value, low=low, high=high))
        inside += found.low <= loss_at(reached) * exp(random.gauss(0, 0.01)) <= found.high
    assert 0.935 < inside / times < (0.985 if unsure else 0.965)


def test_the_interval_grows_away_from_the_marks_and_with_their_scatter():
    def scattered(scatter: float) -> LossLink:
        sides = ((0.3, 1), (0.4, -1), (0.5, -1), (0.6, 1))
        return link_of(*(mark(one, loss_at(one) * exp(side * scatter)) for one, side in sides))

    def half(scatter: float, accuracy: Estimate) -> float:
        found = scattered(scatter).at(accuracy)
        return log(found.high / found.value)

    widths = [half(*one) for one in ((0.02, sure(0.45)), (0.02, sure(0.7)), (0.02, sure(0.9)))]
    assert widths == sorted(widths)
    assert half(0.04, sure(0.9)) == pytest.approx(2 * widths[-1], rel=0.01)
    unsure, moved = Estimate(value=0.45, low=0.3, high=0.6), log(0.7 / 0.55)
    with_line_known = hypot(widths[0], scattered(0.02).slope * moved)
    assert half(0.02, unsure) > 1.02 * with_line_known  # the slope has an error as well


@pytest.mark.parametrize(
    "marks",
    [
        [],
        [mark(0.3), mark(0.5), mark(0.5, 0.9)],  # two accuracies
        [mark(0.3), mark(0.5), mark(0.6)._replace(loss=None)],
        [mark(0.3), mark(0.5), mark(0.6)._replace(loss=0.0)],
        [mark(0.3), mark(0.5), mark(0.1, 6.0)],  # guesses
        [mark(0.3, 1.0), mark(0.5, 1.1), mark(0.6, 1.3)],  # rises, as where networks overfit
    ],
)
def test_a_line_takes_three_different_accuracies_with_losses_that_fall(marks):
    assert link_of(*marks) is None


def test_a_loss_that_is_known_within_a_factor_of_ten_only_where_it_was_seen_is_not_told_elsewhere():
    link = link_of(mark(0.3), mark(0.5, 1.2 * loss_at(0.5)), mark(0.6), mark(0.65))
    assert link.at(sure(0.55)) is not None
    assert link.at(sure(0.999)) is None


def test_an_accuracy_of_one_is_no_loss_of_zero():
    """As few images held out tell no share of wrong answers below half an image."""
    link = fit_loss(map(mark, (0.3, 0.5, 0.6)), classes=10, held_out=50)
    assert link.at(Estimate(value=0.98, low=0.97, high=1.0)).low == pytest.approx(
        loss_at(0.99), 0.1
    )
    few = [mark(1.0, loss_at(0.995))._replace(held_out=100), *map(mark, (0.3, 0.5, 0.6))]
    assert link_of(*few).slope == pytest.approx(POWER)


# ------------------------------------------------------------------------------- plan and report


def kept(profile: Profile | None = None) -> Profile:
    """A profile whose trials have the losses of the made-up task."""
    profile = profile or taught()
    trials = (one.model_copy(update={"loss": loss_at(one.accuracy)}) for one in profile.trials)
    return profile.model_copy(update={"trials": tuple(trials)})


def test_a_plan_tells_the_loss_at_its_accuracy_and_chooses_nothing_by_it():
    plan, without = make_plan(kept()), make_plan(taught())  # there all losses are equal
    accuracy, found = plan.chosen.accuracy, plan.end_loss
    ends = [loss_at(one) for one in (accuracy.value, accuracy.high, accuracy.low)]
    assert [found.value, found.low, found.high] == pytest.approx(ends)
    told = reason(plan, "held-out loss")
    assert told.source == "predicted"
    assert f"in 4 trainings of this task with optimizer={plan.update}. " in told.why
    assert f"held-out loss = {told.value}" in plan.explain()
    assert without.end_loss is None
    assert reason(without, "held-out loss").value == "not known"

    def rest(one: Plan) -> dict:
        reasons = tuple(each for each in one.reasons if each.choice != "held-out loss")
        return one.model_copy(update={"reasons": reasons, "end_loss": None}).model_dump()

    assert rest(plan) == rest(without)


def test_trainings_with_another_optimizer_tell_nothing_of_the_loss():
    """On digits a line through both was off by a factor of three where the own one met the loss."""
    profile, plan = kept(), make_plan(kept())
    other = tuple(
        one if one.optimizer == plan.update else one.model_copy(update={"loss": 3.0})
        for one in profile.trials
    )
    assert make_plan(profile.model_copy(update={"trials": other})).end_loss == plan.end_loss
    none = tuple(
        one.model_copy(update={"loss": 3.0}) if one.optimizer == plan.update else one
        for one in profile.trials
    )
    assert make_plan(profile.model_copy(update={"trials": none})).end_loss is None


def test_the_loss_is_kept_in_the_plan_and_plans_without_it_are_read():
    plan = make_plan(kept())
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    old = make_plan(taught()).model_dump(mode="json")
    del old["end_loss"]
    assert Plan.model_validate(old).end_loss is None


@pytest.mark.parametrize("other", [{"label_smoothing": 0.1}, {"loss": "mine:loss"}])
def test_trials_with_another_loss_than_evaluations_measure_tell_none(other):
    profile = kept()
    job = profile.job.model_copy(update=other)
    plan = make_plan(profile.model_copy(update={"job": job}))
    assert plan.chosen.accuracy is not None
    assert plan.end_loss is None
    assert "plain cross entropy" in reason(plan, "held-out loss").why


def test_nothing_is_said_of_a_loss_where_nothing_of_the_accuracy_was_measured():
    bare = make_plan(taught().model_copy(update={"trials": ()}))
    assert bare.end_loss is None
    assert "held-out loss" not in [one.choice for one in bare.reasons]


def test_nothing_is_said_of_a_loss_that_no_training_would_tell():
    """Trials and runs do not train with rates by gradient noise."""
    job = make_job(optimizer="sgd", global_batch=512, scaling="gain")
    plan = make_plan(profile_of(), job, runs=[run_of("sgd", 512, 0.8)])
    assert plan.chosen.accuracy is not None
    assert "held-out loss" not in [one.choice for one in plan.reasons]


def ending(accuracy: float, loss: float) -> RunSummary:
    run = run_of("sgd", 512, accuracy)
    last = run.epochs[-1].model_copy(update={"val_loss": loss})
    return run.model_copy(update={"epochs": (*run.epochs[:-1], last)})


def test_runs_tell_the_loss_by_their_ends_also_without_trials_and_each_run_once():
    job = make_job(optimizer="sgd", learning_rate="auto", global_batch=512)
    runs = [ending(one, loss_at(one)) for one in (0.8, 0.85, 0.9)]
    plan = make_plan(profile_of(), job, runs=[*runs, runs[-1]])
    assert plan.end_loss.value == pytest.approx(loss_at(plan.chosen.accuracy.value))
    assert "3 trainings of this task" in reason(plan, "held-out loss").why
    assert make_plan(profile_of(), job, runs=runs[:2]).end_loss is None


def reported(plan: Plan, epochs: int) -> list[list[str]]:
    done = tuple(make_epoch(epoch, val_loss=0.55) for epoch in range(epochs))
    rows = compared_rows(make_summary(plan=plan, epochs=done))
    return [cells for cells in rows if cells[0] == "held-out loss"]


def test_the_report_has_the_loss_of_the_end_beside_what_was_predicted():
    plan = bare_plan(end_loss=Estimate(value=0.5, low=0.4, high=0.6))
    row = ["held-out loss", "0.500 (0.400 to 0.600)", "0.550", "10.0 % more, inside the interval"]
    assert reported(plan, plan.epochs) == [row]
    assert reported(plan, 2)[0][2] == "not measured"
    assert reported(bare_plan(), plan.epochs) == []
    impatient = plan.model_copy(update={"job": make_job(goal=Goal(accuracy=0.99))})
    assert reported(impatient, plan.epochs) == []  # it would have ended wherever it got there


def test_a_run_that_takes_another_plan_on_the_way_has_no_predicted_loss():
    plan = bare_plan(end_loss=Estimate(value=0.5, low=0.4, high=0.6))
    assert spliced(plan, plan, 1).end_loss is None
    assert why_not(spliced(plan, plan, 1), plan, 1) == ""
    run = missed()
    told = run.plan.model_copy(update={"end_loss": plan.end_loss})
    assert lengthened(run.model_copy(update={"plan": told})).end_loss is None


def test_a_loss_with_other_last_digits_makes_no_second_trial():
    profile, usual = kept(), make_plan(kept())
    again = (one.model_copy(update={"loss": one.loss * (1 + 1e-6)}) for one in profile.trials)
    plan = make_plan(profile.model_copy(update={"trials": (*profile.trials, *again)}))
    assert plan.considered == usual.considered
    assert reason(plan, "held-out loss") == reason(usual, "held-out loss")
