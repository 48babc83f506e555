"""Objectives that know accuracy: the most accurate, and the least time or cost to a target."""

import os
import re
from functools import partial
from itertools import pairwise
from math import log
from statistics import NormalDist
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
import forked
from batchwright.cli.output import print_plan
from batchwright.errors import JobError, PlanError
from batchwright.planning.candidates.learnt import LearningCurve, learnt_of
from batchwright.planning.planner import make_plan, plan_to_measure
from batchwright.planning.refusals import MIN_CHANCE, _lower
from batchwright.planning.validation import idle_keys
from batchwright.records import Estimate, FirstAnswers, Goal, Job, RunSummary
from batchwright.records.documents import read_record, write_record
from batchwright.records.text.formatting import counted, percent, shares_between
from batchwright.records.text.plan_text import explain
from batchwright.reporting.data.plan_curves import plan_curves
from batchwright.reporting.data.spending import spending
from batchwright.service.pages.planner import Answer
from batchwright.service.pages.planner_form import FilledForm
from batchwright.workflows.simulating import simulate
from samples import make_epoch, make_job, make_kind_profile, make_profile, make_summary
from test_choice import allowed, chosen, reason
from test_learning import CLASSES, HELD_OUT, IMAGES, taught, truth
from test_run_history import run_of

EQUAL = 0.0005
PROFILE = taught()


def planned(profile=PROFILE, *, epochs=30, runs=(), **goal):
    """A plan of a profile with trials, with keys of the goal changed."""
    job = profile.job.model_copy(
        update={"epochs": epochs, "goal": profile.job.goal.model_copy(update=goal)}
    )
    return make_plan(profile, job, runs=runs)


def asked_of(profile, goal):
    """The profile's job with keys of the goal changed."""
    return profile.job.model_copy(update={"goal": profile.job.goal.model_copy(update=goal)})


def learnt_of_truth() -> LearningCurve:
    return LearningCurve(truth(), ("sgd", "muon"), IMAGES, HELD_OUT, 12_000)


# ------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("limit", [{}, {"deadline": 40.0}, {"max_workers": 1}])
def test_the_accuracy_objective_takes_the_quickest_of_the_most_accurate(limit):
    plan = planned(objective="accuracy", **limit)
    open_to = allowed(plan)
    most = max(one.accuracy.value for one in open_to)
    best = [one for one in open_to if one.accuracy.value >= most - EQUAL]
    assert chosen(plan) == min(best, key=lambda one: one.train_seconds.value)
    assert "The most accurate" in reason(plan, "global batch").why
    assert plan.epochs == 30


def test_more_room_makes_no_plan_worse_and_a_price_alone_changes_none():
    """Of each limit the larger value, by the objective that has more of it to choose from."""
    accuracies = [
        chosen(planned(objective="accuracy", deadline=seconds)).accuracy.value
        for seconds in (30.0, 40.0, 60.0, 120.0)
    ]
    assert all(more >= less - EQUAL for less, more in pairwise(accuracies))
    assert accuracies[0] < accuracies[-1]
    for limit, (few, many) in {"max_workers": (1, 2), "memory": (2**24, 2**30)}.items():
        small, large = (planned(objective="time", **{limit: value}) for value in (few, many))
        assert chosen(large).train_seconds.value <= chosen(small).train_seconds.value
    for objective in ("time", "accuracy"):
        free, dear = (planned(objective=objective, price=price) for price in (None, 1e4))
        assert dear.stages == free.stages


def test_no_tolerance_takes_those_that_are_shown_as_equal():
    exact = planned(epochs=1000, accuracy_tolerance=0.0)
    most = planned(epochs=1000, objective="accuracy")
    assert chosen(exact) == chosen(most)


def test_a_target_below_guessing_leaves_the_worth_of_an_image_as_it_is():
    usual, low = (planned(objective="time", accuracy=one) for one in (None, 0.01))
    assert [one.efficiency for one in low.considered] == [
        one.efficiency for one in usual.considered
    ]


def test_the_accuracy_objective_is_refused_where_nothing_tells_accuracy():
    bare = PROFILE.model_copy(update={"trials": ()})
    with pytest.raises(PlanError, match=r"goal\.objective=accuracy .*probe\.learning") as caught:
        planned(bare, objective="accuracy")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("goal", "named"),
    [
        ({"objective": "accuracy"}, "goal.objective=accuracy"),
        ({"accuracy": 0.9}, "goal.accuracy=0.9"),
        ({"objective": "target-accuracy", "accuracy": 0.9}, "goal.accuracy=0.9"),
    ],
)
def test_no_accuracy_is_aimed_for_where_the_network_gives_none(goal, named):
    """More time for trials was asked for, or a plan made whose training could not be judged."""
    none = FirstAnswers(images=0, right=0, by_chance=0.0)
    silent = BARE.model_copy(update={"first_answers": none})
    with pytest.raises(PlanError, match=rf"^{re.escape(named)} needs accuracy, .* two classes"):
        planned(silent, **goal)
    assert planned(silent, objective="time", accuracy=0.9).epochs == 30
    assert plan_to_measure(silent.model_copy(update={"job": asked_of(silent, goal)})).epochs == 30


def test_runs_of_a_loop_of_ones_own_tell_a_target_by_its_own_measure():
    none = FirstAnswers(images=0, right=0, by_chance=0.0)
    silent = BARE.model_copy(update={"first_answers": none})
    assert planned(silent, accuracy=0.7, runs=[run_beside_trials(0.9)]).job.goal.accuracy == 0.7


@pytest.mark.parametrize("objective", ["time", "cost", "knee", "accuracy"])
def test_a_plan_below_an_accuracy_that_it_does_not_aim_for_says_so(objective, capsys):
    """It was warned of that the accuracy ends nothing, and not that it is not reached."""
    goal = {"objective": objective, "price": 1.0}
    reached = chosen(bw.plan(PROFILE, goal=goal)).accuracy
    capsys.readouterr()
    for accuracy, below in ((reached.value + 0.001, True), (reached.value - 0.001, False)):
        bw.plan(PROFILE, goal=goal | {"accuracy": accuracy})
        ends, *more = capsys.readouterr().err.splitlines()
        assert f"does not end the training with goal.objective={objective}" in ends
        said = f"warning: the plan is expected to reach {shares_between(reached)}, which is below "
        assert more == [f"{said}goal.accuracy={accuracy:g}"] * below


def test_a_plan_that_is_expected_below_its_target_says_so(capsys):
    """Only the reasons told that 64 % were expected where 99 % were asked for."""
    reached = chosen(bw.plan(BARE, goal={"accuracy": 0.99})).accuracy
    said = f"warning: the plan is expected to reach {shares_between(reached)}, which is below "
    more = "; more epochs or time may reach it: --explain says how likely it is"
    assert f"{said}goal.accuracy=0.99{more}" in capsys.readouterr().err.splitlines()
    bw.plan(BARE, goal={"accuracy": 0.3})
    assert "expected to reach" not in capsys.readouterr().err


def test_an_accuracy_that_is_hardly_known_is_called_so_wherever_a_plan_tells_it(capsys):
    """Where 37 % came out a plan had said 67.0 %, with an interval that passed for decoration."""
    for profile, hardly in ((BARE, True), (PROFILE, False)):
        plan = planned(profile)
        known = chosen(plan).accuracy
        assert (known.high - known.low > 0.5) == hardly
        print_plan(plan, explain=False)
        said = f"{percent(known.value)} (hardly known: {100 * known.low:.0f} to "
        for text in (capsys.readouterr().err, reason(plan, "accuracy").value, explain(plan)):
            assert percent(known.value) in text
            assert (said in text) == hardly


def test_a_plan_tells_what_half_and_twice_the_epochs_would_reach():
    plan = planned()
    half, twice = (planned(epochs=n) for n in (plan.epochs // 2, 2 * plan.epochs))
    said = reason(plan, "accuracy").why
    for other in (half, twice):
        batch = plan.stages[0].global_batch_size
        row = next(one for one in other.considered if one.global_batch_size == batch)
        assert f"{percent(row.accuracy.value)} after {counted(other.epochs, 'epoch')}" in said


@pytest.mark.parametrize("objective", ["time", "cost", "knee"])
def test_other_objectives_say_what_accuracy_they_give_up(objective):
    plan = planned(objective=objective, price=1.0, accuracy_tolerance=0.001)
    best = chosen(planned(price=1.0, accuracy_tolerance=0.001))
    row = chosen(plan)
    assert row.accuracy.value < best.accuracy.value - 0.001
    said = reason(plan, "global batch").why
    whole = f"{percent(row.accuracy.value)}, and a more accurate candidate "
    assert f"{whole}{percent(best.accuracy.value)} in " in said
    assert said.count("goal.objective=auto") == 1
    loose = planned(objective=objective, price=1.0, accuracy_tolerance=0.5)
    assert "a more accurate candidate" not in reason(loose, "global batch").why


@pytest.mark.parametrize(("fixed", "taken"), [(1e-4, 32), (0.5, 512)])
def test_a_batch_far_beyond_those_that_were_timed_is_not_taken_for_a_percent(fixed, taken):
    """A step of so many images may be slower than the line through smaller ones says.

    Where so much larger a batch saves far more than it may be off, it is taken.
    """
    profile = make_kind_profile("a", sides=(96,), batches=(8, 16, 24, 32), fixed=fixed)
    plan = planned(profile, objective="time", max_workers=1)
    batch = plan.stages[0].global_batch_size
    assert (batch < 2 * 32) == (taken == 32)
    assert batch >= taken
    (reason,) = [one for one in plan.reasons if one.choice == "global batch"]
    told = [one.value for one in plan.reasons if one.choice == "extrapolation"]
    assert ("Not taken: " in reason.why, bool(told)) == (taken == 32, taken == 512)


def test_a_batch_that_is_asked_for_is_told_what_accuracy_it_gives_up():
    job = PROFILE.job.model_copy(update={"global_batch": 142})
    said = reason(make_plan(PROFILE, job), "global batch").why
    assert ", and a more accurate candidate " in said
    assert "leave global_batch to the plan" in said


# --------------------------------------------------------------------------------------- target


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["sgd", "muon"]),
    st.sampled_from([4, 64, 1024]),
    st.floats(0.05, 0.95),
    st.floats(0.5, 0.99),
    st.integers(1, 60),
)
def test_the_chosen_epochs_are_the_fewest_that_reach_the_target(
    name, batch, accuracy, confidence, most
):
    learnt = learnt_of_truth()

    def chance(epochs):
        """By the interval of a single seed, which is normal in the logit; none of too few steps.

        The law's own: what chance makes of few held-out images lets a run end sooner or later.
        """
        if not learnt.predicts(batch, epochs):
            return 0.0
        found = learnt.model.accuracy(learnt.candidate(name, batch, epochs))
        units = [(end - 1 / CLASSES) / (1 - 1 / CLASSES) for end in (found.value, found.low)]
        unit = (accuracy - 1 / CLASSES) / (1 - 1 / CLASSES)
        if unit <= 0:
            return 1.0
        middle, low, aim = (logit(one) for one in (*units, unit))
        return NormalDist().cdf(1.96 * (middle - aim) / (middle - low))

    brute = next((n for n in range(1, most + 1) if chance(n) >= confidence + 1e-6), None)
    found = learnt.needed(name, batch, accuracy, confidence, most)
    if found is None:
        assert brute is None or chance(brute) < confidence + 1e-3
    else:
        assert chance(found) >= confidence - 1e-3
        assert found == 1 or chance(found - 1) <= confidence + 1e-3


def logit(unit):
    return log(unit / (1 - unit))


@pytest.mark.parametrize("least", ["time", "cost"])
@pytest.mark.parametrize("objective", ["auto", "target-accuracy"])
def test_a_target_takes_the_least_time_or_cost_with_epochs_of_its_own(objective, least):
    plan = planned(objective=objective, accuracy=0.5, least=least, price=1.0)
    row = chosen(plan)
    assert 1 < row.trained_epochs < 30
    assert plan.job.epochs == plan.epochs == min(30, 2 * row.trained_epochs)
    quantity = "cost" if least == "cost" else "train_seconds"
    open_to = allowed(plan)
    assert getattr(row, quantity).value == min(getattr(o, quantity).value for o in open_to)
    # Each candidate has its own: its time is of whole epochs, beside the evaluations.
    assert len({one.trained_epochs for one in open_to}) > 1
    for one in open_to:
        assert 0 <= one.train_seconds.value - one.trained_epochs * one.epoch_seconds.value < 10
        assert one.target_seconds == one.train_seconds
        assert one.accuracy.value > 0.5
    asked = PROFILE.job.model_copy(
        update={
            "epochs": row.trained_epochs,
            "workers": row.workers,
            "global_batch": row.global_batch_size,
            "goal": Goal(objective="time", price=1.0),
        }
    )
    alike = chosen(make_plan(PROFILE, asked))
    for name in ("train_seconds", "cost", "accuracy"):
        assert getattr(alike, name) == getattr(row, name)
    assert f"of epochs={30} at most" in reason(plan, "epochs to target").why
    assert "(goal.confidence)" in reason(plan, "global batch").why


def test_more_confidence_takes_more_epochs_and_a_longer_warm_up_sets_the_least():
    half, sure = (chosen(planned(accuracy=0.45, confidence=one)) for one in (0.5, 0.9))
    assert half.trained_epochs < sure.trained_epochs
    job = PROFILE.job.model_copy(update={"warmup_epochs": 25.5})
    warm = PROFILE.model_copy(update={"job": job})
    assert chosen(planned(warm, accuracy=0.45)).trained_epochs == 26


def test_epochs_that_trials_tell_are_not_called_unknown():
    plan = planned(accuracy=0.5)
    assert "as the trials tell" in reason(plan, "epochs to target").why
    assert "no run was given" not in reason(plan, "gradient noise scale").why
    bare = planned(make_profile(job=make_job(scaling="gain")), accuracy=0.5)
    assert "not known, for no run was given" in reason(bare, "gradient noise scale").why


def test_runs_tell_the_epochs_likewise():
    run = make_summary()
    plan = planned(make_profile(), accuracy=0.9, runs=[run])
    row = chosen(plan)
    assert 1 <= plan.epochs < 30
    assert row.epochs.value <= row.trained_epochs <= row.epochs.high + 1
    assert "from the runs given" in reason(plan, "epochs to target").why


def test_where_nothing_tells_the_epochs_stay():
    plan = planned(make_profile(job=make_job(scaling="gain")), accuracy=0.9)
    assert plan.epochs == 30
    assert "number of epochs is not known" in reason(plan, "global batch").why
    unknown = make_profile(noise=None, job=make_job(scaling="gain"))
    with pytest.raises(PlanError, match="no gradient noise scale"):
        planned(unknown, accuracy=0.9, objective="target-accuracy")
    assert planned(unknown, accuracy=0.9).epochs == 30  # by the knee


BARE = PROFILE.model_copy(update={"trials": ()})


def test_other_tasks_tell_a_target_and_refuse_none():
    """By their word alone a target out of reach is tried, and one in reach takes fewer epochs."""
    for target, expected in ((0.98, 30), (0.2, 30)):
        plan = planned(BARE, accuracy=target, epochs=1000 if target < 0.5 else 30)
        told = reason(plan, "epochs to target")
        assert told.source == "assumed"
        assert "as other tasks' trainings lead to expect" in told.why
        assert "less than 1" not in told.value
        assert (plan.target_epochs or plan.epochs) <= expected
        assert all(not one.refused or "least_steps" in one.refused for one in plan.considered)
    assert (
        "the most that may be trained" in reason(planned(BARE, accuracy=0.98), "global batch").why
    )


@pytest.mark.parametrize("objective", ["auto", "target-accuracy"])
def test_a_target_takes_no_batch_that_learns_less_where_nothing_was_observed(objective):
    """Nor does a higher one take less time: chances are not those of independent tries."""
    free = chosen(planned(BARE, epochs=6))
    plans = [
        planned(BARE, epochs=6, accuracy=target, objective=objective)
        for target in (0.11, 0.3, 0.6, 0.9, 0.99)
    ]
    rows = [chosen(plan) for plan in plans]
    assert {row.global_batch_size for row in rows[2:]} == {free.global_batch_size}
    seconds = [row.train_seconds.value for row in rows]
    assert seconds == sorted(seconds)
    assert "the most that may be trained" in reason(plans[-1], "global batch").why


def test_a_deadline_plans_for_the_epochs_that_it_allows_where_nothing_was_observed():
    whole = chosen(planned(BARE, accuracy=0.9))
    plan = planned(BARE, accuracy=0.9, deadline=whole.train_seconds.value / 4)
    row = chosen(plan)
    assert 0 < plan.epochs == row.trained_epochs < 30
    assert row.train_seconds.high <= whole.train_seconds.value / 4
    assert f"after {counted(plan.epochs, 'epoch')}" in reason(plan, "accuracy").why
    assert "the most that may be trained" in reason(plan, "epochs to target").why
    with pytest.raises(PlanError, match="no candidate is trained for 1 epoch within"):
        planned(BARE, accuracy=0.9, deadline=1e-3)


@pytest.mark.parametrize("objective", ["auto", "target-accuracy"])
def test_a_batch_is_explained_by_the_accuracy_that_it_was_taken_for(objective):
    """Not by that of the epochs to the target, which is another number; a candidate has this."""
    plan = planned(BARE, accuracy=0.2, epochs=200, objective=objective)
    row, whole = chosen(plan), {}
    for one in planned(BARE, epochs=200, objective="time").considered:
        whole[one.workers, one.global_batch_size] = one.accuracy.value
    why = reason(plan, "global batch").why
    full = whole[row.workers, row.global_batch_size]
    assert row.trained_epochs < 200
    assert row.accuracy.value < full - EQUAL
    assert f"{percent(full)} held out after all epochs that may be trained" in why
    assert "(goal.objective=target-accuracy)" in why
    best = max(
        (one for one in allowed(plan) if one.workers == row.workers),
        key=lambda one: (whole[one.workers, one.global_batch_size], -one.epoch_seconds.value),
    )
    assert f"A batch of {best.global_batch_size} is " in why
    short = planned(BARE, epochs=row.trained_epochs, objective="time").considered
    (alike,) = (
        one
        for one in short
        if (one.workers, one.global_batch_size) == (row.workers, row.global_batch_size)
    )
    assert row.accuracy == alike.accuracy


def test_a_target_by_cost_says_that_it_is_the_least_cost():
    profile = make_profile(job=make_job(scaling="gain"))
    plan = planned(profile, accuracy=0.9, least="cost", price=1.0)
    assert "The least predicted cost to any accuracy" in reason(plan, "global batch").why


def test_a_target_by_other_tasks_says_how_long_training_takes():
    why = reason(planned(BARE, accuracy=0.5), "global batch").why
    assert "For goal.accuracy=0.5 training takes " in why


@pytest.mark.parametrize("objective", ["auto", "target-accuracy"])
def test_auto_is_advised_without_the_accuracy_that_would_make_it_another_objective(objective):
    """The runs reached less than that, so the plan goes by time to equal progress."""
    goal = {"objective": objective, "accuracy": 0.999, "accuracy_tolerance": 0.0}
    said = reason(planned(make_profile(), runs=[make_summary()], **goal), "global batch").why
    assert ", and a more accurate candidate " in said
    assert said.count("give goal.objective=auto without goal.accuracy.") == 1


@pytest.mark.parametrize(
    ("reached", "given"), [(0.4567, "goal.accuracy=0.456 or less"), (0.0004, "a lower goal.acc")]
)
def test_an_accuracy_to_give_is_one_that_may_be_given(reached, given):
    alone = SimpleNamespace(by_runs=False)
    assert _lower(Estimate(value=reached, low=0.0, high=1.0), alone).startswith(given)


def test_methods_that_are_laid_out_keep_their_epochs():
    job = PROFILE.job.model_copy(
        update={"method": "dual-batch", "optimizer": "sgd", "goal": Goal(accuracy=0.5)}
    )
    assert make_plan(PROFILE, job).epochs == PROFILE.job.epochs


def test_limits_hold_for_the_chosen_epochs():
    free = chosen(planned(accuracy=0.5))
    thirty = chosen(planned()).train_seconds.value
    between = 1.01 * free.train_seconds.high
    assert between < thirty
    assert chosen(planned(accuracy=0.5, deadline=between)) == free


def test_a_schedule_is_longer_than_the_target_takes_where_an_average_is_evaluated():
    plan = planned(accuracy=0.5)
    needed = chosen(plan).trained_epochs
    assert plan.epochs == min(30, 2 * needed) == plan.job.epochs == len(plan.epoch_accuracy)
    assert plan.likely_epochs() == plan.likely_epochs(needed - 1) == plan.target_epochs == needed
    assert plan.likely_epochs(needed) == plan.epochs
    said = reason(plan, "schedule").why
    assert f"likely after {counted(needed, 'epoch')}, but the rate's decay" in said
    job = PROFILE.job.model_copy(update={"average_weights": "off"})
    plain = planned(PROFILE.model_copy(update={"job": job}), accuracy=0.5)
    assert plain.epochs == chosen(plain).trained_epochs == plain.likely_epochs() == needed
    assert not [one for one in plain.reasons if one.choice == "schedule"]


@pytest.mark.parametrize(("every", "stretched"), [(9, True), (1000, False)])
def test_a_schedule_ends_with_the_target_where_training_would_not_end_in_it(every, stretched):
    """Training ends at an evaluation or not at all."""
    job = PROFILE.job.model_copy(update={"evaluate_epochs": every})
    plan = planned(PROFILE.model_copy(update={"job": job}), accuracy=0.5)
    needed = chosen(plan).trained_epochs
    assert needed % 9 == 0
    assert plan.epochs == (min(30, 2 * needed) if stretched else needed)
    assert [one.choice for one in plan.reasons].count("schedule") == stretched


def test_times_are_of_the_epochs_that_the_target_takes():
    plan = planned(accuracy=0.5)
    row = chosen(plan)
    needed, whole = row.trained_epochs, row.train_seconds.value
    assert plan.train_seconds == row.train_seconds
    (simulated,) = simulate(plan).clusters
    assert simulated.seconds.value == pytest.approx(whole, rel=0.1)
    began = make_summary(plan=plan, epochs=())
    assert spending(began).planned == row.train_seconds
    for done, of in ((1, needed), (needed - 1, needed), (needed, plan.epochs)):
        epochs = tuple(make_epoch(epoch) for epoch in range(done))
        stage = plan.stages[0].model_copy(update={"epochs": of})
        ending = plan.model_copy(update={"stages": (stage,), "target_epochs": None})
        told, like = (make_summary(plan=one, epochs=epochs) for one in (plan, ending))
        assert spending(told).expected == spending(like).expected
    on_page = {name: more for name, _, more in Answer(FilledForm({}), plan, PROFILE).tiles}
    assert on_page["The training"].startswith(f"{counted(needed, 'epoch')}: ")


def test_a_longer_schedule_keeps_the_limits():
    free = planned(accuracy=0.5)
    row = chosen(free)
    between = row.train_seconds.high * (row.trained_epochs + 2.5) / row.trained_epochs
    plan = planned(accuracy=0.5, deadline=between)
    assert chosen(plan) == row
    assert plan.epochs == row.trained_epochs + 2 < free.epochs
    assert plan.max_epochs == 30


# ---------------------------------------------------------------------------------- unreachable


def test_a_target_that_is_out_of_reach_names_the_best_to_be_had():
    with pytest.raises(PlanError) as caught:
        planned(accuracy=0.9, epochs=6)
    said = str(caught.value)
    assert "\n" not in said
    best = chosen(planned(objective="accuracy", epochs=6))
    assert f"the best to be had is {percent(best.accuracy.value)} (" in said
    assert f"global batch {best.global_batch_size} and {counted(best.workers, 'worker')}" in said
    assert "in 6 epochs" in said
    assert planned(accuracy=accuracy_to_give(said), epochs=6).epochs <= 6


def accuracy_to_give(said):
    """What a refusal says is to be given in place of what it refuses."""
    return float(re.search(r"give goal\.accuracy=([0-9.]+)", said)[1])


def test_more_epochs_are_named_where_they_would_do():
    with pytest.raises(PlanError, match=r"or epochs=(\d+)$") as caught:
        planned(accuracy=0.5, epochs=3)
    enough = int(str(caught.value).rpartition("=")[2])
    assert planned(accuracy=0.5, epochs=enough).epochs <= enough


def test_a_target_that_no_epochs_are_sure_to_reach_is_tried_with_the_most():
    plan = planned(accuracy=0.5, epochs=14)
    assert plan.epochs == 14
    why = reason(plan, "epochs to target").why
    chance = float(re.search(r"they reach it with probability ([0-9.]+), not 0.8", why)[1])
    assert MIN_CHANCE <= chance < 0.8


def test_a_deadline_before_the_target_leaves_the_epochs_that_it_allows():
    """As long as these have a chance; it is theirs, not that of all epochs."""
    free = planned(accuracy=0.6)
    row = chosen(free)
    deadline = 0.7 * row.train_seconds.value
    plan = planned(accuracy=0.6, deadline=deadline)
    why = reason(plan, "global batch").why
    chance = float(re.search(r"they reach it with probability ([0-9.]+), not 0.8", why)[1])
    assert MIN_CHANCE <= chance < 0.8
    assert "the most that may be trained" in why
    assert chosen(plan).trained_epochs == plan.epochs < 30
    for one in allowed(plan):
        assert one.train_seconds.high <= deadline
    # It is what the choice goes by, and more time is more chance.
    assert chosen(plan).target_seconds.value == min(
        one.target_seconds.value for one in allowed(plan)
    )
    more = planned(accuracy=0.6, deadline=1.2 * deadline)
    assert chosen(more).target_seconds.value <= chosen(plan).target_seconds.value


def test_a_deadline_that_leaves_the_target_no_chance_names_what_is_to_be_had_in_it():
    """More time is advised where it reaches the target; where not, more epochs with it."""
    for target, more in ((0.7, "or raise"), (0.8, "or more epochs and raise")):
        with pytest.raises(PlanError, match=rf"{more} goal\.deadline$") as caught:
            planned(accuracy=target, deadline=8.0)
        assert "epochs=30 and goal.deadline=8;" in str(caught.value)
        plan = planned(accuracy=accuracy_to_give(str(caught.value)), deadline=8.0)
        assert chosen(plan).train_seconds.high <= 8.0
    assert planned(accuracy=0.7).epochs == 30
    with pytest.raises(PlanError, match=r"in 30 epochs, .*, or more epochs$"):
        planned(accuracy=0.8)


@pytest.mark.parametrize(
    ("deadline", "batch"),
    [
        (2.11, 64),
        pytest.param(10.0, 512, marks=pytest.mark.slow),
        pytest.param(3.9, "auto", marks=pytest.mark.slow),
        (8.0, "auto"),
        pytest.param(20.0, 64, marks=pytest.mark.slow),
    ],
)
def test_what_a_deadline_leaves_is_to_be_had_to_the_upper_end_of_its_time(deadline, batch):
    goal = Goal(accuracy=0.95, deadline=deadline)
    job = PROFILE.job.model_copy(update={"epochs": 100, "global_batch": batch, "goal": goal})
    with pytest.raises(PlanError, match="best to be had") as caught:
        make_plan(PROFILE, job)
    lower = goal.model_copy(update={"accuracy": accuracy_to_give(str(caught.value))})
    made = make_plan(PROFILE, job.model_copy(update={"goal": lower}))
    assert chosen(made).train_seconds.high <= deadline


@pytest.mark.parametrize("limits", [{"deadline": 0.01}, {"price": 1.0, "max_cost": 1e-7}])
@pytest.mark.parametrize("batch", [pytest.param(32, marks=pytest.mark.slow), "auto"])
def test_limits_below_one_epoch_name_the_least_that_gives_any_training(limits, batch):
    goal = Goal(accuracy=0.3, **limits)
    job = PROFILE.job.model_copy(update={"global_batch": batch, "goal": goal})
    with pytest.raises(PlanError, match="no candidate is trained for 1 epoch within") as caught:
        make_plan(PROFILE, job)
    said = str(caught.value)
    assert re.search(r"the best to be had is [0-9.]+ % \(.* in 1 epoch, [0-9.]+ s: give", said)
    limit = [*limits][-1]
    least, whole = map(float, re.findall(rf"goal\.{limit}=([0-9.e-]+)(?: and|$)", said))
    assert float(re.search(rf" goal\.{limit}=([0-9.e-]+);", said)[1]) < least < whole
    for accuracy, most in ((accuracy_to_give_with(said), least), (0.3, whole)):
        given = goal.model_copy(update={"accuracy": accuracy, limit: most})
        plan = make_plan(PROFILE, job.model_copy(update={"goal": given}))
        taken = chosen(plan).train_seconds if limit == "deadline" else chosen(plan).cost
        assert taken.high <= most


def test_an_epoch_that_only_may_take_too_long_says_how_long_it_may_take():
    """It was said to take less than the deadline, and to need a later one."""
    job = PROFILE.job.model_copy(update={"global_batch": 32, "goal": Goal(accuracy=0.3)})
    shortest = Goal(accuracy=0.3, deadline=0.01)
    with pytest.raises(PlanError) as refused:
        make_plan(PROFILE, job.model_copy(update={"goal": shortest}))
    takes = float(re.search(r"in 1 epoch, ([0-9.]+) s", str(refused.value))[1])
    assert "may take" not in str(refused.value)
    tight = Goal(accuracy=0.3, deadline=1.01 * takes)
    with pytest.raises(PlanError, match=r"in 1 epoch, .* s, which is expected to .* may take"):
        make_plan(PROFILE, job.model_copy(update={"goal": tight}))


def test_what_a_large_batch_is_said_to_reach_is_after_the_steps_of_which_anything_is_known():
    """One epoch with it has 3, of which nothing is told."""
    goal = Goal(accuracy=0.3, deadline=0.01)
    job = PROFILE.job.model_copy(update={"global_batch": 512, "goal": goal})
    with pytest.raises(PlanError, match="no candidate is trained for 9 epochs within") as caught:
        make_plan(PROFILE, job)
    enough = float(re.search(r"give goal\.deadline=([0-9.]+)$", str(caught.value))[1])
    given = job.model_copy(update={"goal": goal.model_copy(update={"deadline": enough})})
    assert make_plan(PROFILE, given).epochs == 9
    with pytest.raises(PlanError) as refused:
        make_plan(PROFILE, job.model_copy(update={"epochs": 2}))
    assert "within epochs=2 and goal.deadline=0.01;" in str(refused.value)
    (longer,) = as_advised(job, str(refused.value))
    assert chosen(make_plan(PROFILE, longer)).trained_epochs == 9


def accuracy_to_give_with(said):
    return float(re.search(r" and goal\.accuracy=([0-9.]+) or less", said)[1])


def as_advised(job, said):
    """The jobs that a refusal says are to be given in place of one, as far as it names them."""
    found = []
    for one in said.rpartition(": give ")[2].split(", or "):
        keys, lower, goal = {}, {}, {}
        for part in one.split(" and "):
            words = part.removesuffix(" or less")
            name, given, value = words.removeprefix("raise ").partition("=")
            if words == "leave global_batch to the plan":
                keys["global_batch"] = "auto"
            elif given and name == "epochs":
                keys[name] = int(value)
            elif name.startswith("goal."):
                goal[name[5:]] = float(value) if given else 1e9
                lower |= {name[5:]: float(value) / 2} if words != part else {}
            else:
                break  # "a lower goal.accuracy", "more epochs"
        else:
            goals = [goal, goal | lower] if lower else [goal]
            found += [
                job.model_copy(update=keys | {"goal": job.goal.model_copy(update=one)})
                for one in goals
            ]
    return found


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([60, 500, 1437, 6000]),
    st.sampled_from([1, 2, 3, 6, 30]),
    st.sampled_from(["auto", "auto", 16, 128, 500]),
    st.floats(0.02, 0.97),
    st.sampled_from([{}, {"deadline": 0.3}, {"deadline": 3.0}, {"price": 1.0, "max_cost": 1e-3}]),
    st.sampled_from(["auto", "sgd"]),
    st.sampled_from([(), (("muon", 64, 0.5, 10),), (("sgd", 128, 0.3, 1),)]),
)
def test_what_a_refusal_advises_plans(images, epochs, batch, accuracy, limits, optimizer, ran):
    data = PROFILE.data.model_copy(update={"train_samples": images})
    profile = PROFILE.model_copy(update={"data": data})
    runs = [run_of(name, size, reached, epochs=n) for name, size, reached, n in ran]
    keys = {"epochs": epochs, "global_batch": batch, "optimizer": optimizer}
    job = profile.job.model_copy(update=keys | {"goal": Goal(accuracy=accuracy, **limits)})
    if optimizer == "sgd":
        runs = [run for run in runs if run.plan.update == "sgd"]
    try:
        make_plan(profile, job, runs=runs)
    except PlanError as refused:
        said = str(refused)
        for other in as_advised(job, said) if ": give " in said else ():
            made = make_plan(profile, other, runs=runs)
            assert not chosen(made).refused


@pytest.mark.parametrize("target", [0.01, 0.1])
@pytest.mark.parametrize("batch", [500, "auto"])
@pytest.mark.parametrize("by_run", [False, True])
def test_a_target_that_guessing_reaches_is_refused_to_no_training(target, batch, by_run):
    """Not even to one that is too short to tell anything of, or beside a run that took longer."""
    keys = {"epochs": 2, "global_batch": batch, "goal": Goal(accuracy=target)}
    profile, runs = (BARE, [run_of("muon", 16, 0.5, epochs=30)]) if by_run else (PROFILE, [])
    plan = make_plan(profile, PROFILE.job.model_copy(update=keys), runs=runs)
    assert chosen(plan).trained_epochs == 1
    if batch == "auto":
        assert "as guessing reaches it" in reason(plan, "global batch").why


def test_where_one_class_is_larger_guessing_is_right_by_its_share():
    facts = PROFILE.data.model_copy(update={"largest_class": 0.6})
    assert (facts.guessing, facts.even_classes) == (0.6, 1 / 0.6)
    profile = PROFILE.model_copy(update={"data": facts})
    keys = {"epochs": 2, "global_batch": "auto", "goal": Goal(accuracy=0.6)}
    plan = make_plan(profile, profile.job.model_copy(update=keys))
    assert "as guessing reaches it" in reason(plan, "global batch").why
    learnt = learnt_of([profile], profile.job)
    assert learnt.model.classes == 1 / 0.6
    assert learnt_of([PROFILE], PROFILE.job).model.classes == len(facts.classes)


@pytest.mark.parametrize(
    "share", [None, 0.1, 1.0]
)  # an old profile; even classes; one is judged by
def test_even_classes_are_guessed_by_their_number(share):
    facts = PROFILE.data.model_copy(update={"largest_class": share})
    assert facts.guessing == 1 / len(facts.classes)


def test_a_training_too_short_to_tell_anything_of_is_told_how_long_it_has_to_be():
    """A lower target is no help, unless guessing reaches it."""
    job = PROFILE.job.model_copy(
        update={"epochs": 2, "global_batch": 500, "goal": Goal(accuracy=0.2)}
    )
    with pytest.raises(PlanError) as caught:
        make_plan(PROFILE, job)
    said = str(caught.value)
    assert "25 steps from which on accuracy is predicted within epochs=2; with" in said
    assert said.endswith(": give epochs=9, or leave global_batch to the plan")
    longer, free = as_advised(job, said)
    assert make_plan(PROFILE, longer).stages[0].global_batch_size == 500
    assert make_plan(PROFILE, free).job.epochs <= 2


def test_more_time_is_advised_where_the_candidates_have_too_few_steps_in_what_there_is():
    """In that time they are trained for an epoch, and for more."""
    goal = Goal(accuracy=0.3, deadline=3.0)
    job = PROFILE.job.model_copy(update={"global_batch": 512, "goal": goal})
    with pytest.raises(PlanError) as caught:
        make_plan(PROFILE, job)
    said = str(caught.value)
    assert "25 steps from which on accuracy is predicted within epochs=30 and goal.d" in said
    (longer, *_) = as_advised(job, said)
    assert make_plan(PROFILE, longer).job.epochs >= 9


@pytest.mark.parametrize("limit", [{"deadline": 0.01}, {"price": 1.0, "max_cost": 1e-7}])
def test_fewer_epochs_are_advised_only_where_one_keeps_the_limits(limit):
    """Without trials, a target has no batch refused for want of steps, and is no other case."""
    few = {"epochs": 2, "global_batch": 512, "goal": Goal(accuracy=0.3, **limit)}
    for keys in (few, few | {"goal": Goal(**limit)}):
        with pytest.raises(PlanError, match=rf": raise goal\.{[*limit][-1]}$"):
            make_plan(BARE, PROFILE.job.model_copy(update=keys))
    key = [*limit][-1]
    row = chosen(planned(BARE, epochs=1, price=1.0))
    enough = 2 * (row.cost if key == "max_cost" else row.train_seconds).high
    fewer = rf": raise goal\.{key}, or give epochs=(\d+)( or less)?$"
    for objective in ("time", "auto"):
        goal = limit | {key: enough, "objective": objective}
        with pytest.raises(PlanError, match=fewer) as caught:
            planned(BARE, epochs=1000, **goal)
        most = int(re.search(fewer, str(caught.value))[1])
        assert most >= 2
        assert planned(BARE, epochs=most, **goal)
        with pytest.raises(PlanError, match=f"epochs={most} or less"):
            planned(BARE, epochs=most + 1, **goal)


def test_the_one_training_that_is_short_enough_is_named_as_such():
    most = chosen(planned(epochs=1, objective="time")).train_seconds.high
    with pytest.raises(PlanError, match=r", or give epochs=1$"):
        planned(epochs=1000, objective="accuracy", deadline=1.001 * most)


def test_a_candidate_that_several_objectives_take_is_named_once_with_all_of_them():
    others = [one.value for one in reason(planned(), "workers").alternatives]
    assert "2 workers, global batch 142 (goal.objective=knee or time)" in others
    assert len({value.partition(" (")[0] for value in others}) == len(others)


def test_more_memory_is_advised_where_it_is_given():
    kinds = [{"kind": PROFILE.cluster.device_name, "count": 2, "memory": 1000}]
    for goal, where in (
        (Goal(kinds=kinds), "the memory of goal.kinds"),
        (Goal(memory=1000), "goal."),
    ):
        with pytest.raises(PlanError, match=f": raise {where}"):
            make_plan(PROFILE, PROFILE.job.model_copy(update={"goal": goal}))


def test_the_most_accurate_are_not_spoken_of_where_the_limits_leave_nothing_told():
    """The small batches, of which it is, take too long."""
    rows = planned(epochs=1, objective="time").considered
    untold = min(one.train_seconds.high for one in rows if one.accuracy is None and not one.refused)
    assert untold < min(one.train_seconds.high for one in rows if one.accuracy is not None)
    plan = planned(epochs=1, objective="accuracy", deadline=1.0001 * untold)
    assert chosen(plan).accuracy is None
    assert "is not predicted, as all of them have too few steps" in reason(plan, "global batch").why
    for one in ("workers", "global batch"):
        assert "most accurate" not in reason(plan, one).why


def test_a_lower_target_is_named_by_the_law_of_learning_alone():
    """Runs that reached it tell the epochs that it takes: more than the law says, maybe."""
    run = run_beside_trials(0.9)
    for runs, lower in (((), "goal.accuracy="), ([run], "a lower goal.accuracy")):
        with pytest.raises(PlanError, match=f": give {lower}") as caught:
            planned(accuracy=0.95, epochs=6, runs=runs)
        assert "the best to be had is" in str(caught.value)


def test_the_accuracy_objective_is_told_how_long_a_training_has_to_be():
    few = PROFILE.data.model_copy(update={"train_samples": 60})
    profile = PROFILE.model_copy(update={"data": few})
    goal = Goal(objective="accuracy", least_steps=1)
    job = profile.job.model_copy(update={"epochs": 1, "goal": goal})
    with pytest.raises(PlanError, match="for trainings with fewer than 25 steps: give") as caught:
        make_plan(profile, job)
    (longer,) = as_advised(job, str(caught.value))
    assert chosen(make_plan(profile, longer)).accuracy is not None


def test_more_epochs_than_a_deadline_allows_are_named_with_the_deadline():
    with pytest.raises(PlanError, match=r"or epochs=\d+ and raise goal\.deadline$"):
        planned(accuracy=0.4, epochs=3, deadline=2.43)
    with pytest.raises(PlanError, match=r"or epochs=\d+$"):
        planned(accuracy=0.4, epochs=3, deadline=40.0)


def test_the_command_line_ends_with_2_where_the_target_is_out_of_reach(command, tmp_path):
    write_record(PROFILE, tmp_path / "profile.json")
    code, out, err = command("plan", str(tmp_path / "profile.json"), "goal.accuracy=0.99")
    assert (code, out) == (2, "")
    assert "the best to be had is" in err


def test_epochs_below_one_are_not_told_in_figures_and_the_table_has_those_that_are_trained():
    plan = planned(accuracy=0.15)
    assert chosen(plan).trained_epochs == 1
    assert reason(plan, "epochs to target").value.startswith("less than 1 (less than 1 to ")
    table = plan.explain().partition("considered, with")[2]
    assert "s / epoch" in table
    assert "  epochs  " in table
    assert "epochs to target" not in table


def test_epochs_far_beyond_the_job_are_not_told():
    """By a law alone a far target may take decades."""
    plan = planned(objective="time", accuracy=0.99)
    said = reason(plan, "epochs to target")
    assert said.value == "more than 300"
    assert all(one.epochs is None or one.epochs.value <= 300 for one in plan.considered)


# --------------------------------------------------------------------------------- end of training


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "dual-batch"])
def test_training_ends_with_the_first_evaluation_that_reaches_the_target(
    tmp_path, cache, method, forks
):
    """All workers leave together; with a parameter server once their rounds are through."""
    env = {**os.environ, "BATCHWRIGHT_CACHE": str(cache)}
    batchwright = partial(forked.command, cwd=tmp_path, env=env, prints=tmp_path)
    folder = tmp_path / "run"
    keys = ("data=digits", f"method={method}", "workers=2", "global_batch=64", "epochs=8")
    goal = ("goal.accuracy=0.3", "evaluate_epochs=2")
    probe = ("precision=float32", "probe.budget=1", "probe.learning=0")
    done = batchwright("run", *keys, *goal, *probe, "--out", folder)
    assert done.returncode == 0, done.stderr
    summary = read_record(folder / "summary.json", RunSummary)
    reached = [one for one in summary.epochs if one.top1 is not None]
    assert reached[0].epoch == 1
    assert reached[0].top1 >= 0.3
    assert len(summary.epochs) < 8
    assert "goal.accuracy=0.3 is reached" in (folder / "metrics.jsonl").read_text()
    assert (folder / "checkpoints" / "last.pt").exists()
    done = batchwright("run", "--resume", "--out", folder)
    assert done.returncode == 0, done.stderr
    assert "finished already" in done.stderr
    assert read_record(folder / "summary.json", RunSummary).epochs == summary.epochs


# ------------------------------------------------------------------------ before there are trials


@pytest.mark.parametrize("goal", [{"objective": "accuracy"}, {"accuracy": 0.5, "deadline": 0.01}])
def test_what_is_measured_for_a_goal_of_accuracy_does_not_wait_for_trials(goal):
    job = PROFILE.job.model_copy(update={"goal": Goal(**goal)})
    bare = PROFILE.model_copy(update={"trials": (), "job": job})
    with pytest.raises(PlanError):
        make_plan(bare)
    assert plan_to_measure(bare).considered
    job = job.model_copy(update={"goal": Goal(memory=1, **goal)})
    with pytest.raises(PlanError, match=r"goal\.memory"):
        plan_to_measure(bare.model_copy(update={"job": job}))


def test_a_bound_above_the_workers_that_are_measured_does_not_keep_trials_away():
    profile = PROFILE.model_copy(update={"job": asked_of(PROFILE, {"max_workers": 100})})
    with pytest.raises(PlanError, match=r"goal\.max_workers allows 100 workers"):
        make_plan(profile)
    assert plan_to_measure(profile).considered


def test_keys_of_a_target_are_idle_without_one_and_cost_needs_a_price():
    assert idle_keys(Job(goal=Goal(confidence=0.9, least="cost")))
    assert not idle_keys(Job(goal=Goal(confidence=0.9, least="cost", accuracy=0.5, price=1)))
    goal = Goal(confidence=0.9, accuracy=0.5)
    assert not idle_keys(Job(method="dynamic-batch", goal=goal))
    for method in ("cyclic", "dual-batch", "hybrid"):
        assert any(
            "is laid out over epochs" in one for one in idle_keys(Job(method=method, goal=goal))
        )
    with pytest.raises(JobError, match=r"goal\.least=cost needs the price"):
        planned(accuracy=0.5, least="cost")


# ----------------------------------------------------------------------------- runs beside trials


def run_beside_trials(accuracy=0.75, **changes):
    """A whole run of the profile's task with Muon."""
    return run_of("muon", 64, accuracy, epochs=30, **changes)


def test_a_run_sharpens_what_trials_tell_of_other_batches_too():
    alone = {one.global_batch_size: one.accuracy for one in planned().considered}
    beside = planned(runs=[run_beside_trials(alone[64].value + 0.05)])
    for one in beside.considered:
        before, after = alone[one.global_batch_size], one.accuracy
        assert after.high - after.low < 0.7 * (before.high - before.low)
        assert after.value > before.value
    said = reason(beside, "accuracy").why
    assert "trials, short trainings" in said
    assert "and 1 run given" in said


@pytest.mark.parametrize(
    "run",
    [
        run_beside_trials(base=0.7),
        run_beside_trials(weight_decay=0.1),
        run_beside_trials(clip_norm=0.1),
        (lambda one: one.model_copy(update={"epochs": one.epochs[:-1]}))(run_beside_trials()),
    ],
    ids=["another rate", "another decay", "clipped", "left before its end"],
)
def test_runs_that_trained_otherwise_leave_the_law_alone(run):
    assert [one.accuracy for one in planned(runs=[run]).considered] == [
        one.accuracy for one in planned().considered
    ]


def test_without_trials_runs_tell_accuracy_and_other_tasks_what_optimizers_differ_by():
    plan = planned(BARE, runs=[run_beside_trials()])
    assert "by the runs given at equal progress" in reason(plan, "accuracy").why
    assert "By the runs given, and by trainings of other tasks" in reason(plan, "optimizer").why


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_of_few_steps_tells_of_as_few(epochs):
    """It was hidden by trials, which tell nothing of them."""
    job = PROFILE.job.model_copy(update={"epochs": epochs, "global_batch": 128 * epochs})
    assert reason(make_plan(PROFILE, job), "accuracy").value == "not known"
    run = run_of("muon", 128, 0.4, epochs=1)  # 11 steps
    told = reason(make_plan(PROFILE, job, runs=[run]), "accuracy")
    assert "and 1 run given" in told.why
    few = job.model_copy(update={"global_batch": 256 * epochs})
    told = reason(make_plan(PROFILE, few, runs=[run]), "accuracy")
    assert "Trials and the runs given tell nothing of trainings with fewer than 11 " in told.why


def left_early(run):
    return run.model_copy(update={"epochs": run.epochs[:-1]})


def never_evaluated(run):
    epochs = tuple(one.model_copy(update={"val_correct": None}) for one in run.epochs)
    return run.model_copy(update={"epochs": epochs})


def with_another_method(run):
    return run.model_copy(update={"plan": run.plan.model_copy(update={"method": "dual-batch"})})


@pytest.mark.parametrize("made", [left_early, never_evaluated, with_another_method])
def test_runs_that_tell_nothing_leave_the_word_to_other_tasks(made):
    alone, beside = planned(BARE), planned(BARE, runs=[made(run_beside_trials())])
    assert beside.considered == alone.considered
    assert beside.update == alone.update
    for choice in ("accuracy", "optimizer", "global batch"):
        assert reason(beside, choice) == reason(alone, choice)


def test_the_optimizer_is_that_which_needs_fewer_epochs_for_the_target():
    learnt = learnt_of_truth()
    job = PROFILE.job.model_copy(update={"epochs": 30, "goal": Goal(accuracy=0.6)})
    aimed = {one.batch: one for one in learnt.compared(job)}
    needed = {n: learnt.needed(n, 128, 0.6, 0.8, 30) for n in ("sgd", "muon")}
    shortest = min(filter(None, needed.values()))
    assert shortest < 30
    assert aimed[128].muon == pytest.approx(learnt.accuracy("muon", 128, shortest).value)


def test_the_figure_has_measured_steps_where_their_candidates_are():
    """Each as the training of its own epochs."""
    plan = planned(accuracy=0.5)
    for cluster in plan_curves(plan, [PROFILE]).clusters:
        at = {one.global_batch_size: one.seconds[0] for one in cluster.points}
        beside = [one for one in cluster.measured if one.global_batch_size in at]
        assert beside
        for one in beside:
            assert one.seconds[0] == pytest.approx(at[one.global_batch_size], rel=0.2)


def test_the_list_of_candidates_has_their_epochs():
    plan = planned(accuracy=0.5)
    rows = [re.split(" {2,}", line.strip(" *")) for line in explain(plan).splitlines()]
    assert ["batch", "s / epoch", "epochs"] in [row[:3] for row in rows]
    for one in plan.considered:
        told = {row[2] for row in rows if row[0] == str(one.global_batch_size) and len(row) > 5}
        assert str(one.trained_epochs) in told


def test_trials_and_runs_that_contradict_each_other_leave_a_plan():
    right = tuple(one.model_copy(update={"accuracy": 1.0}) for one in PROFILE.trials)
    profile = PROFILE.model_copy(update={"trials": right})
    job = {"global_batch": 64, "goal": Goal(accuracy=0.3, objective="target-accuracy")}
    plan = make_plan(profile, profile.job.model_copy(update=job), runs=[run_beside_trials(0.2)])
    assert chosen(plan).global_batch_size == 64
