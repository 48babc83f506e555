"""Job key ``goal.patience``: training ends where accuracy no longer rises."""

from __future__ import annotations

import pytest

from batchwright.algorithms.splicing import why_not
from batchwright.planning.planner import make_plan as planned
from batchwright.planning.planner import plan_without_profile
from batchwright.prediction.accuracy.forecast import forecast
from batchwright.records.job_sections import Goal
from batchwright.records.run import is_over, stalled_epoch, stalled_words
from batchwright.reporting.data.reading import accuracy_words
from batchwright.reporting.pages.page import page
from batchwright.reporting.render.progress import progress
from batchwright.training.recorder import Recorder
from batchwright.training.step.epoch_totals import held_out_fields
from batchwright.workflows.lengthen import lengthened
from samples import (
    make_cyclic_plan,
    make_data,
    make_dual_plan,
    make_epoch,
    make_hybrid_plan,
    make_job,
    make_network,
    make_plan,
    make_profile,
    make_summary,
    reason,
)
from servers import make_server_plan
from test_reporting_progress import a_console, epoch_end
from test_server_coordinator import begun

COUNT = 100


def impatient(plan, patience=2, **goal):
    """The plan with a patience."""
    goal = Goal(patience=patience, **goal)
    return plan.model_copy(update={"job": plan.job.model_copy(update={"goal": goal})})


def epochs_of(*correct):
    """Epochs with these held-out images right, of a hundred; ``None``: not evaluated."""
    return tuple(
        make_epoch(
            n, val_correct=right, val_count=None if right is None else COUNT, learning_rate=0.1
        )
        for n, right in enumerate(correct)
    )


@pytest.mark.parametrize(
    ("correct", "last"),
    [
        ((10, 20, 30, 40), None),
        ((10, 20, 20, 20, 50), 3),  # as good as the best is no rise
        ((10, 20, 15, 21, 20, 21), 5),  # a rise begins anew
        ((30, 10, 20), 2),  # only the best counts
        ((30, 10), None),
        ((30, None, 10, None, 20), 4),  # epochs that are not evaluated do not count
        ((None, None, None), None),
        ((), None),
    ],
)
def test_it_counts_evaluations_since_the_best_one(correct, last):
    plan, epochs = impatient(make_plan()), epochs_of(*correct)
    found = stalled_epoch(plan, epochs)
    assert (found and found.epoch) == last
    assert is_over(plan, epochs) == bool(stalled_words(plan, epochs)) == (last is not None)
    assert not is_over(make_plan(), epochs)


@pytest.mark.parametrize("made", [make_cyclic_plan, make_hybrid_plan])
def test_only_the_last_row_of_a_cycle_counts(made):
    """Accuracy falls with the resolution and rises with the next stage of the rate."""
    *rows, last = made().stages
    stages, first = (*rows, last.model_copy(update={"epochs": 5})), sum(r.epochs for r in rows)
    plan = impatient(made(stages=stages, judged_from=first))
    falling = [90 - epoch for epoch in range(first)]
    assert not is_over(plan, epochs_of(*falling))
    assert not is_over(plan, epochs_of(*falling, 5, 4, 6, 6))  # less than before, but it rises
    assert stalled_epoch(plan, epochs_of(*falling, 5, 4, 5)).epoch == first + 2


def test_an_accuracy_that_is_no_number_is_no_evaluation():
    """A loop of the user's own may measure one."""
    assert held_out_fields({"top1": float("nan")}, 10)["val_correct"] is None
    assert held_out_fields({"top1": 3.0}, 10)["val_correct"] == 3


def test_no_time_is_left_after_the_epoch_that_ends_a_run():
    console, plan = a_console(), impatient(make_plan())
    with progress(console, epochs=plan.epochs, plan=plan) as shown:
        for epoch, accuracy in enumerate((0.3, 0.2, 0.1)):
            shown.update(epoch_end(epoch, **{"val/top1": accuracy}))
    *before, last = console.file.getvalue().splitlines()
    assert all(line.endswith(" left") for line in before)
    assert "left" not in last


def test_a_server_waits_for_evaluations_that_come_later():
    """Else a run that was over would go on, once a better accuracy of an earlier epoch comes."""
    plan = impatient(make_dual_plan())
    assert stalled_epoch(plan, epochs_of(30, 20, None, 20, 20)) is None
    assert stalled_epoch(plan, epochs_of(30, 20, 40, 20, 20)).epoch == 4
    assert stalled_epoch(plan, epochs_of(30, 20, 25, 20, 20)).epoch == 2


def test_it_is_told_once_and_not_again_after_a_resume(tmp_path):
    def notes(recorder):
        said = []
        recorder.note = said.append
        return said

    recorder = Recorder(tmp_path, impatient(make_plan()))
    said = notes(recorder)
    for epoch in epochs_of(30, 20, 25):
        recorder.epochs.append(epoch)
        recorder.epoch(epoch)
    recorder.tell_end()
    assert said == [
        "goal.patience=2 ended training after epoch 3 of 30: no held-out accuracy of 2 evaluations "
        "was above the best one before"
    ]
    again = Recorder(tmp_path, impatient(make_plan()))
    said = notes(again)
    again.restore(recorder.values(), "goes on")
    again.tell_end()
    assert again.over
    assert said == ["the run was finished already"]


def test_a_server_gives_no_more_rounds(tmp_path):
    plan = impatient(make_server_plan((6, 6), epochs=8))
    served = begun(plan, tmp_path)
    for _ in range(3):
        assert not served.coordinator.finished
        served.train(0, 1)  # accuracy is always one half
    served.train(0, 1)
    assert served.coordinator.finished
    assert sum("goal.patience=2 ended training" in one for one in served.notes) == 1
    assert len(served.accuracies) < 8
    again = served.again()
    assert again.coordinator.finished
    assert again.notes[-1] == "the run was finished already"


def test_summary_and_report_say_why_it_ended():
    run = make_summary(plan=impatient(make_plan()), epochs=epochs_of(30, 20, 25))
    assert run.ended
    assert not make_summary(epochs=epochs_of(30, 20, 25)).ended
    said = "goal.patience=2 ended training after epoch 3 of 30: no held-out accuracy of 2 "
    assert accuracy_words(run).startswith(said)
    assert said in page(run)
    missed = run.model_copy(update={"plan": impatient(make_plan(), accuracy=0.9)})
    assert "goal.accuracy=0.9 was not reached: the best is 30.0 %" in accuracy_words(missed)
    assert not any(forecast(run.plan, [1.0] * 30, run.epochs))


def test_such_a_run_gets_no_more_epochs():
    plan = impatient(make_plan(max_epochs=60), accuracy=0.9)
    correct = [*range(28), 10, 10]
    run = make_summary(plan=plan, epochs=epochs_of(*correct))
    assert lengthened(run) is None
    longer = lengthened(run.model_copy(update={"epochs": epochs_of(*range(30))}))
    # The rate, which had come down, rises again: what was reached before is no measure.
    assert not is_over(longer, epochs_of(*range(30), 20, 15, 21, 18))
    assert is_over(longer, epochs_of(*range(30), 20, 15, 18))
    assert why_not(longer, plan, 30) == ""


def test_the_reasons_say_that_times_are_upper_bounds():
    plan = planned(make_profile(), make_job(goal=Goal(patience=3)))
    assert reason(plan, "patience").value == "3 evaluations"
    assert "upper bounds" in reason(plan, "patience").why
    assert "last row" not in reason(plan, "patience").why
    assert not any(one.choice == "patience" for one in planned(make_profile()).reasons)
    job = make_job(method="cyclic", resolutions=(16, 32), goal=Goal(patience=3))
    cyclic = plan_without_profile(job, make_data(), make_network())
    assert "Only those of the last row count" in reason(cyclic, "patience").why
    assert cyclic.judged_from == cyclic.epochs - cyclic.stages[-1].epochs
    assert plan.judged_from == 0
