"""Accuracy after each epoch: predicted, told beside what was measured, and when it strays."""

from collections.abc import Sequence
from io import StringIO

import pytest
from benchmarks.tools.epoch_curves import Shortfall, fitted, law_of
from rich.console import Console

from batchwright.algorithms.splicing import spliced
from batchwright.cli.output import result
from batchwright.planning.planner import make_plan
from batchwright.prediction.accuracy.forecast import Forecast, forecast, straying
from batchwright.prediction.accuracy.learning import AT_PEAK, falls_short
from batchwright.prediction.accuracy.trainings import Candidate
from batchwright.records import EpochRecord, Estimate, Plan
from batchwright.records.job_sections import Goal
from batchwright.records.lines.line_files import lines_of
from batchwright.records.text.formatting import percent
from batchwright.reporting.data.reading import (
    accuracy_comparison,
    accuracy_words,
    compared_rows,
    learnt_words,
)
from batchwright.reporting.pages.page import page
from batchwright.reporting.render.figures import write_figures
from batchwright.reporting.render.progress import epoch_words, joined, left_words, progress
from batchwright.training.recorder import Recorder
from samples import make_epoch, make_job, make_summary
from samples import make_plan as bare_plan
from test_learning import made_up, taught, truth

BATCH, HELD_OUT = 32, 1000


def told(*shares: float | None, **changes) -> Plan:
    """A plan of as many epochs, each predicted within five points."""
    plan = bare_plan(**changes)
    stage = plan.stages[0].model_copy(update={"epochs": len(shares)})
    predicted = tuple(
        None if one is None else Estimate(value=one, low=one - 0.05, high=one + 0.05)
        for one in shares
    )
    return plan.model_copy(update={"stages": (stage,), "epoch_accuracy": predicted})


def epochs_of(*shares: float | None):
    """Evaluated epochs; those without a share were not."""
    return tuple(
        make_epoch(
            epoch,
            val_correct=None if share is None else round(share * HELD_OUT),
            val_count=None if share is None else HELD_OUT,
        )
        for epoch, share in enumerate(shares)
    )


# ------------------------------------------------------------------------------------- the plan


def test_a_plan_with_trials_tells_the_accuracy_after_each_epoch():
    plan = make_plan(taught())
    found = plan.epoch_accuracy
    assert len(found) == plan.epochs
    values = [one.value for one in found if one is not None]
    assert values == sorted(values)
    chosen, last = plan.chosen, found[-1]
    assert chosen is not None
    assert chosen.accuracy is not None
    assert last is not None
    assert last == chosen.accuracy


@pytest.mark.parametrize("observed", [True, False])
def test_few_held_out_images_widen_the_interval_and_change_nothing_else(observed):
    """Counting them is in it: as the table of candidates, each epoch and the report have it."""
    profile = taught() if observed else taught().model_copy(update={"trials": ()})

    def plan_of(images):
        data = profile.data.model_copy(update={"val_samples": images})
        job = profile.job.model_copy(update={"global_batch": 64})
        return make_plan(profile.model_copy(update={"data": data}), job)

    few, many = plan_of(48), plan_of(1_000_000)
    assert few.epoch_accuracy[-1] == few.chosen.accuracy
    assert few.chosen.accuracy.value == many.chosen.accuracy.value
    assert few.chosen.accuracy.low < many.chosen.accuracy.low
    assert few.chosen.accuracy.high > many.chosen.accuracy.high


def test_accuracy_is_told_by_epoch_without_trials_too_but_not_where_nothing_tells():
    bare = taught().model_copy(update={"trials": ()})
    end = make_plan(bare).epoch_accuracy[-1]
    assert end.high - end.low > 0.8
    plan = make_plan(bare, bare.job.model_copy(update={"scaling": "gain"}))
    assert plan.epoch_accuracy == ()
    assert "epoch_accuracy" not in plan.model_dump(exclude_defaults=True)


def test_nothing_is_told_after_few_steps():
    profile = taught()
    data = profile.data.model_copy(update={"train_samples": 320})
    profile = profile.model_copy(update={"data": data})
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 64}))
    assert [one is None for one in plan.epoch_accuracy[:5]] == [True] * 4 + [False]


def test_what_falls_short_is_gone_when_the_rate_has_come_down():
    assert falls_short(1.0, 0.0) == AT_PEAK
    assert falls_short(0.0, 0.0) == falls_short(1.0, 1.0) == (0.0, 0.0)
    assert falls_short(0.5, 0.0).error == pytest.approx(AT_PEAK.error / 2)


def test_a_shortfall_lowers_accuracy_and_its_doubt_widens_the_interval():
    model, one = truth(), Candidate("sgd", 64, 60_000)
    whole = model.accuracy(one)
    assert model.evaluated(one, falls_short(0.0, 0.0), None) == whole
    lower = model.evaluated(one, AT_PEAK._replace(mean=0.5), None)
    assert lower.value < whole.value
    assert lower.high - lower.low > whole.high - whole.low
    counted = model.evaluated(one, falls_short(0.0, 0.0), 100)
    assert (counted.value, counted.low < whole.low) == (whole.value, True)


def test_epochs_under_another_batch_are_not_predicted_any_more():
    followed = told(0.3, 0.4, 0.5)
    found = spliced(followed, followed, 1).epoch_accuracy
    assert found == (followed.epoch_accuracy[0], None, None)
    bare = followed.model_copy(update={"epoch_accuracy": ()})
    assert spliced(bare, bare, 1).epoch_accuracy == ()


# ------------------------------------------------------------------------------------- the rest


def long_plan(**goal: float) -> Plan:
    """Twelve epochs of which trials tell."""
    profile = taught()
    job = profile.job.model_copy(update={"epochs": 12})
    plan = make_plan(profile, job.model_copy(update={"global_batch": BATCH, "optimizer": "sgd"}))
    job = plan.job.model_copy(update={"goal": plan.job.goal.model_copy(update=goal)})
    return plan.model_copy(update={"job": job})


def by_the_law(plan: Plan, level: float = 0.3, slope: float = 0.5) -> tuple[EpochRecord, ...]:
    """Epochs of a network that learns so, but for the counting of its right answers."""
    samples, classes = plan.data.train_samples, len(plan.data.classes)
    return epochs_of(
        *(
            made_up(level, slope, 200.0, BATCH, samples * (epoch + 1), classes)
            for epoch in range(plan.epochs)
        )
    )


def ahead(plan: Plan, epochs: Sequence[EpochRecord]) -> Forecast:
    """The rest of a run at a constant rate, where nothing is missing at any time."""
    return forecast(plan, [1.0] * plan.epochs, epochs)


@pytest.mark.parametrize(("level", "slope"), [(0.3, 0.5), (-1.5, 0.9), (1.5, 0.35)])
def test_a_run_tells_its_end_and_the_better_the_further_it_has_come(level, slope):
    plan = long_plan()
    epochs = by_the_law(plan, level, slope)
    found = [ahead(plan, epochs[:done]).end for done in (3, 6, 11)]
    widths = [one.high - one.low for one in found]
    assert widths == sorted(widths, reverse=True)
    assert all(one.low < epochs[-1].top1 < one.high for one in found)
    assert found[1].value == pytest.approx(epochs[-1].top1, abs=0.03)
    assert found[2].value == pytest.approx(epochs[-1].top1, abs=0.01)


def test_nothing_is_told_of_more_than_four_times_what_was_seen_nor_while_the_rate_rises():
    plan = long_plan()
    epochs = by_the_law(plan)
    told = [ahead(plan, epochs[:done]).end is not None for done in range(1, 6)]
    assert told == [False, False, True, True, True]
    rule = plan.learning_rate.model_copy(update={"warmup_epochs": 4.0})
    rising = plan.model_copy(update={"learning_rate": rule})
    told = [ahead(rising, epochs[:done]).end is not None for done in range(1, 6)]
    assert told == [False, False, False, True, True]
    target = long_plan(accuracy=epochs[10].top1 - 0.001)
    assert ahead(target, epochs[:2]) == Forecast()  # it is more than eight epochs away


def test_a_high_rate_widens_what_is_expected_until_it_comes_down():
    plan = long_plan()
    epochs = by_the_law(plan)[:6]
    level = ahead(plan, epochs).end
    falling = forecast(plan, [1 - (epoch / 12) for epoch in range(1, 13)], epochs).end
    assert falling.high - falling.low > level.high - level.low


def test_the_epoch_that_reaches_the_target_is_told_from_the_second_evaluation_on():
    epochs = by_the_law(long_plan())
    plan = long_plan(accuracy=round(epochs[7].top1 - 0.001, 3))
    assert ahead(plan, epochs[:1]) == Forecast()
    assert ahead(plan, epochs[:5]).epochs == pytest.approx(8, abs=1)
    assert ahead(plan, epochs[:7]) == Forecast(epochs=8)  # and so not of the twelfth
    rarely = plan.job.model_copy(update={"evaluate_epochs": 3})
    seen = [one for one in epochs[:6] if one.epoch in (2, 5)]
    assert ahead(plan.model_copy(update={"job": rarely}), seen).epochs == 9
    beyond = ahead(long_plan(accuracy=0.99), epochs[:7])
    assert beyond.epochs == 12
    assert beyond.end.value < 0.99


def test_nothing_is_expected_where_nothing_tells_it_or_nothing_is_left():
    plan = long_plan()
    epochs = by_the_law(plan)
    unseen = epochs[4].model_copy(update={"val_correct": None, "val_count": None})
    other = epochs[4].model_copy(update={"val_correct": 76, "val_count": 1})  # in percent
    for last in (unseen, other):
        assert ahead(plan, [*epochs[:4], last]) == Forecast()
    assert ahead(plan, epochs) == Forecast()
    assert ahead(long_plan(accuracy=epochs[3].top1), epochs[:5]) == Forecast()
    assert ahead(plan.model_copy(update={"epoch_accuracy": ()}), epochs[:5]) == Forecast()
    spliced_in = (*plan.epoch_accuracy[:-1], None)
    assert ahead(plan.model_copy(update={"epoch_accuracy": spliced_in}), epochs[:5]) == Forecast()
    data = plan.data.model_copy(update={"train_samples": 5 * BATCH})
    few = plan.model_copy(update={"data": data})
    found = [ahead(few, epochs[:done]).end is None for done in range(1, 7)]
    assert found == [True] * 4 + [False] * 2


# ------------------------------------------------------------------------------------- straying


def test_an_epoch_outside_its_interval_is_told_at_once_with_what_it_means_for_the_end():
    end = Estimate(value=0.41, low=0.36, high=0.46)
    line = straying(told(0.3, 0.4, 0.5), epochs_of(0.3, 0.32), end)
    assert line == (
        "held-out accuracy after epoch 2 is 32.0 %, below the 35.0 % to 45.0 % that the plan "
        "predicted; at the end about 41.0 % is expected now, not 50.0 %"
    )


def test_more_than_the_guessing_that_was_expected_is_told():
    plan = told(0.1, 0.4)
    guessing = Estimate(value=0.102, low=0.1, high=0.106)
    plan = plan.model_copy(update={"epoch_accuracy": (guessing, plan.epoch_accuracy[1])})
    line = straying(plan, epochs_of(0.2))
    assert "above the 10.0 % to 10.6 % that the plan predicted" in line
    assert "expected now" not in line


@pytest.mark.parametrize(
    ("shares", "told_after"),
    [
        ((0.3, 0.4, 0.5), []),
        ((0.2, 0.3, 0.4), [0]),
        ((0.2, 0.5, 0.4), [0, 1]),
        ((0.3, None, 0.4), [2]),
    ],
)
def test_straying_is_told_once_in_a_direction(shares, told_after):
    plan, epochs = told(0.3, 0.4, 0.5), epochs_of(*shares)
    found = [at for at in range(3) if straying(plan, epochs[: at + 1])]
    assert found == told_after


@pytest.mark.parametrize(("every", "first"), [(1, 3), (4, 4), (5, 5)])
def test_a_line_that_comes_too_soon_to_know_the_end_says_from_when_on_it_is_told(every, first):
    """Later epochs on that side have no line of their own."""
    plan, strayed = long_plan(), by_the_law(long_plan())
    job = plan.job.model_copy(update={"evaluate_epochs": every})
    plan = plan.model_copy(update={"job": job})
    expected = tuple(Estimate(value=0.02, low=0.01, high=0.03) for _ in plan.epoch_accuracy)
    plan = plan.model_copy(update={"epoch_accuracy": expected})
    said = f"; what is expected at the end is told from epoch {first} on"
    assert straying(plan, strayed[:1], ahead(plan, strayed[:1]).end).endswith(said)
    seen = [one for one in strayed[:first] if plan.evaluates_after(one.epoch)]
    assert ahead(plan, seen).end is not None
    assert not any(ahead(plan, strayed[:done]).end for done in range(1, 3))
    goal = job.goal.model_copy(update={"accuracy": 0.99})
    aiming = plan.model_copy(update={"job": job.model_copy(update={"goal": goal})})
    assert straying(aiming, strayed[:1]).endswith("that the plan predicted")


def test_nothing_strays_from_what_was_not_predicted():
    assert straying(told(None, 0.4), epochs_of(0.9)) == ""
    assert straying(bare_plan(), epochs_of(0.9)) == ""


def test_the_last_epoch_says_nothing_of_an_end_to_come():
    assert "expected now" not in straying(told(0.3, 0.4), epochs_of(0.3, 0.2))


def test_the_lines_of_a_run_hold_the_prediction_and_say_so(tmp_path):
    recorder = Recorder(tmp_path, told(0.3, 0.4))
    for one in epochs_of(0.2, 0.3):
        recorder.epochs.append(one)
        recorder.epoch(one)
    lines = list(lines_of(tmp_path))
    assert [line.kind for line in lines] == ["epoch", "note", "epoch"]
    assert lines[0].predicted_top1.value == 0.3
    assert lines[0].predicted_top1.low == pytest.approx(0.25)
    assert "below the 25.0 % to 35.0 %" in lines[1].text
    said = joined(epoch_words(lines[0], brief=False, simulated=False))
    assert "accuracy 20.0 % (predicted 25.0 % to 35.0 %)" in said
    assert "predicted 25" not in joined(epoch_words(lines[0], brief=True, simulated=False))


def test_the_lines_of_a_run_say_what_is_expected_of_its_end(tmp_path):
    epochs = by_the_law(long_plan())
    plan = long_plan(accuracy=round(epochs[7].top1, 3))
    for name, followed in (("end", long_plan()), ("target", plan)):
        (tmp_path / name).mkdir()
        recorder = Recorder(tmp_path / name, followed)
        for one in epochs[:3]:
            recorder.epochs.append(one)
            recorder.epoch(one)
    *_, last = (one for one in lines_of(tmp_path / "end") if one.kind == "epoch")
    assert last.likely_epochs is None
    assert last.expected_top1.low < last.expected_top1.value < last.expected_top1.high
    said = joined(epoch_words(last, brief=False, simulated=False))
    end = last.expected_top1
    ends = f"{percent(end.low)} to {percent(end.high)}"
    assert f", likely {percent(end.value)} ({ends}) at the end" in said
    brief = joined(epoch_words(last, brief=True, simulated=False))
    assert f"{percent(last.record.top1)}, likely {percent(end.value)} at the end" in brief
    *_, last = (one for one in lines_of(tmp_path / "target") if one.kind == "epoch")
    said = joined(epoch_words(last, brief=False, simulated=False))
    assert f", goal.accuracy likely after epoch {last.likely_epochs}" in said
    assert last.expected_top1 is None
    console = Console(file=StringIO(), width=200)
    with progress(console, epochs=plan.epochs, plan=plan) as shown:
        shown.update(last)
    seconds = last.record.training_seconds + last.record.evaluation_seconds
    left = left_words(seconds * (last.likely_epochs - 3))
    assert console.file.getvalue().rstrip().endswith(left)
    reaching = last.model_copy(update={"record": epochs[8], "likely_epochs": None})
    with progress(console, epochs=plan.epochs, plan=plan) as shown:
        shown.update(reaching)
    assert not console.file.getvalue().rstrip().endswith("left")


def test_what_the_benchmark_rests_on_is_at_the_rate_of_a_plan():
    seen = law_of("digits").observed
    assert len({one.training for one in seen}) == len(seen) > 10  # nothing at several rates


# -------------------------------------------------------------------------------------- the report


def run_of(*shares: float | None):
    return make_summary(plan=told(0.3, 0.4, 0.5), epochs=epochs_of(*shares))


def test_the_report_counts_the_epochs_inside_and_names_the_worst():
    words = accuracy_words(run_of(0.31, 0.32, 0.49))
    assert words.startswith("Accuracy lay inside its predicted interval in 2 of 3 epochs")
    assert "after epoch 2, it was 8.0 points less, outside" in words
    assert accuracy_words(make_summary()) == ""


@pytest.mark.parametrize(
    ("shares", "target", "said"),
    [
        ((0.3, 0.32, 0.31), 0.4, "goal.accuracy=0.4 was not reached: the best is 32.0 %."),
        ((None, None, None), 0.4, "goal.accuracy=0.4 was not reached: it was never evaluated."),
        ((0.3, 0.44), 0.4, None),  # it ended there
        ((0.3, 0.32), 0.4, None),  # it may still go on
    ],
)
def test_the_report_says_that_a_target_was_missed(shares, target, said):
    run = run_of(*shares)
    goal = run.plan.job.goal.model_copy(update={"accuracy": target})
    plan = run.plan.model_copy(update={"job": run.plan.job.model_copy(update={"goal": goal})})
    words = accuracy_words(run.model_copy(update={"plan": plan}))
    assert words.startswith(said) if said else "was not reached" not in words
    assert said is None or said in page(run.model_copy(update={"plan": plan}))


def test_the_end_is_judged_by_the_prediction_for_it():
    reached = accuracy_comparison(run_of(0.3, 0.4, 0.42))
    assert (reached.predicted.value, reached.measured, reached.inside) == (0.5, 0.42, False)
    found = result(run_of(0.3, 0.4, 0.42))
    assert found["predicted_accuracy"] == 0.5
    assert found["accuracy_as_predicted"] is False
    assert result(make_summary())["predicted_accuracy"] is None


def test_a_run_that_ended_at_its_target_is_judged_by_the_prediction_for_that_epoch():
    run = run_of(0.31, 0.44)
    goal = run.plan.job.goal.model_copy(update={"accuracy": 0.42})
    plan = run.plan.model_copy(update={"job": run.plan.job.model_copy(update={"goal": goal})})
    run = run.model_copy(update={"plan": plan})
    reached = accuracy_comparison(run)
    assert (reached.predicted.value, reached.measured) == (0.4, 0.44)
    assert "held-out accuracy, epoch 2" in [cells[0] for cells in compared_rows(run)]
    stopped = accuracy_comparison(run_of(0.31, 0.44))  # no target: it may still go on
    assert (stopped.predicted.value, stopped.measured) == (0.5, None)


def test_a_run_that_missed_is_to_be_given_to_the_next_plan():
    words = learnt_words(run_of(0.3, 0.4, 0.42))
    assert "8.0 points less" in words
    assert "--run RUN" in words
    assert learnt_words(run_of(0.3, 0.4, 0.51)) == learnt_words(make_summary()) == ""


def test_no_plan_learns_from_a_run_that_patience_ended_early():
    impatient = Goal(patience=1)
    plan = told(0.3, 0.4, 0.5, job=make_job(goal=impatient))
    early = make_summary(plan=plan, epochs=epochs_of(0.15, 0.14))
    assert accuracy_comparison(early).inside is False
    assert learnt_words(early) == ""
    whole = make_summary(plan=plan, epochs=epochs_of(0.3, 0.4, 0.39))
    assert "--run RUN" in learnt_words(whole)


def test_a_batch_that_grew_has_one_accuracy_of_all_its_stages_from_which_no_plan_learns():
    """Its accuracy is not that of one batch, so plans leave it out."""
    run = run_of(0.3, 0.4, 0.42)
    stage, batches = run.plan.stages[0], (96, 96, 192)
    grown = stage.model_copy(update={"local_batch_sizes": (128, 64)})
    plan = run.plan.model_copy(update={"growth": (grown,)}).as_trained(dict(enumerate(batches)))
    epochs = [
        one.model_copy(update={"global_batch_size": batch})
        for one, batch in zip(run.epochs, batches, strict=True)
    ]
    run = run.model_copy(update={"plan": plan, "epochs": tuple(epochs)})
    names = [cells[0] for cells in compared_rows(run)]
    assert names[1:4] == [*(f"seconds per epoch, stage {n}" for n in (1, 2)), "held-out accuracy"]
    assert accuracy_comparison(run).inside is False
    assert learnt_words(run) == ""


def test_the_page_draws_what_was_predicted_up_to_the_end_of_the_plan():
    text = page(run_of(0.31, 0.32))
    assert "predicted, 95 % interval" in text
    assert "<td>40.0 % (35.0 % to 45.0 %)</td><td>8.0 points less, outside" in text
    assert "inside its predicted interval in 1 of 2 epochs" in text
    assert "its predicted interval" not in page(make_summary())


@pytest.mark.slow
def test_the_figure_draws_it_too(tmp_path):
    with_it, without = tmp_path / "with", tmp_path / "without"
    summary = run_of(0.31, 0.42, 0.49)
    write_figures(summary, with_it)
    bare = summary.plan.model_copy(update={"epoch_accuracy": ()})
    write_figures(summary.model_copy(update={"plan": bare}), without)
    drawn = [(one / "learning.png").read_bytes() for one in (with_it, without)]
    assert drawn[0] != drawn[1]


def test_the_fit_finds_what_curves_were_made_with():
    seen = [
        Shortfall("task", "sgd", factor, 0.4 * factor + sign * 0.2 * factor, 0.01)
        for factor in (0.2, 0.4, 0.6, 0.8, 1.0)
        for sign in (-1, 1)
    ]
    mean, spread = fitted(seen, 1.0)[1]
    assert mean == pytest.approx(0.4, abs=0.01)
    assert spread == pytest.approx(0.2, abs=0.02)
