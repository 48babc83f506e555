"""A run that goes on, drawn from its lines by what draws a finished one."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.planning.schedule import rate_schedule
from batchwright.records import Estimate, KindCount, Plan
from batchwright.records.lines.flat_lines import flat_values, from_flat
from batchwright.records.lines.run_lines import note
from batchwright.records.text.formatting import duration
from batchwright.reporting.data.comparison import compared
from batchwright.reporting.data.live_run import (
    RunLines,
    epoch_now,
    forecast_so_far,
    forecast_words,
    rounds_of,
    summary_so_far,
    workers_now,
)
from batchwright.reporting.data.reading import training_clock
from batchwright.reporting.data.spending import hourly_price, spending
from batchwright.reporting.pages.live_page import RunStory, happened, plan_parts, run_parts, tiles
from batchwright.reporting.pages.page_plan import pareto_part
from batchwright.reporting.render.progress import epoch_words, joined
from batchwright.service.pages.run_page import seconds_left
from clusters import make_choice
from run_lines import typed
from samples import (
    EPOCHS,
    TRAIN,
    VAL,
    make_data,
    make_dual_plan,
    make_hybrid_plan,
    make_job,
    make_plan,
    make_summary,
)
from services import epoch_line as epoch
from services import flat_epoch, flat_step
from services import step_line as step
from test_reporting_page import HOSTILE, Document


def shares(epoch_number, step_number, sizes, **changes):
    """A line of kind ``shares``; ``changes`` have flat names."""
    line = {"kind": "shares", "epoch": epoch_number, "step": step_number, "steps": 40}
    for rank, size in enumerate(sizes):
        line |= {f"batch/local/{rank}": size, f"place/{rank}": f"node{rank}/cpu"}
    return typed(line | changes)


def a_round(number, worker, **changes):
    line = {
        "kind": "round",
        "round": number,
        "worker": worker,
        "epoch": 0,
        "resolution": 32,
        "batch/local": 64,
        "samples": 300,
        "steps": 5,
        "factor": 1.0,
        "train/loss": 2.0,
        "lr": 0.1,
        "lead": 0,
        "committed": 300 * (number + 1),
        "time/start_s": 1.0 * number,
        "time/compute_s": 0.8,
        "time/exchange_s": 0.1,
        "time/wait_s": 0.05,
        "time/eval_s": 0.0,
    }
    return typed(line | changes)


def a_story(plan: Plan | None = None, **lines):
    plan = plan or make_plan()
    return RunStory("digits", plan, None, rate_schedule(plan), RunLines(**lines))


def names_of(parts):
    return [part.name for part in parts]


def test_epoch_lines_become_the_epochs_of_a_summary():
    told = summary_so_far("a", make_plan(), None, RunLines(epochs=[epoch(0), epoch(1)]))
    assert [one.epoch for one in told.epochs] == [0, 1]
    first = told.epochs[0]
    assert (first.training_seconds, first.evaluation_seconds) == (0.5, 0.05)
    assert first.samples == round(2874.0 * 0.5)
    assert first.val_count == VAL
    assert first.top1 == pytest.approx(0.1, abs=1 / VAL)
    assert len(first.workers) == 2
    assert told.wall_seconds == pytest.approx(2 * 0.56)


def test_an_epoch_that_was_told_twice_counts_as_told_last():
    lines = RunLines.of([epoch(0), epoch(1), epoch(1, **{"time/epoch_s": 9.0})])
    assert [
        one.training_seconds for one in summary_so_far("a", make_plan(), None, lines).epochs
    ] == [
        0.5,
        9.0,
    ]


def test_local_batches_hold_until_the_next_line_about_them():
    lines = RunLines(
        epochs=[epoch(0), epoch(1), epoch(2)],
        shares=[shares(0, 0, (16, 16)), shares(1, 20, (20, 12))],
    )
    told = summary_so_far("a", make_plan(), None, lines)
    assert [[(s.step, s.sizes) for s in one.shares] for one in told.epochs] == [
        [(0, (16, 16))],
        [(0, (16, 16)), (20, (20, 12))],
        [(0, (20, 12))],
    ]
    assert [one.place for one in told.epochs[0].workers] == ["node0/cpu", "node1/cpu"]


def test_the_epoch_in_progress_is_that_of_the_newest_step():
    now = epoch_now(
        make_plan(), RunLines(epochs=[epoch(0)], steps=[step(9, 1, **{"time/train_s": 2.0})])
    )
    assert (now.epoch, now.step, now.steps, now.seconds) == (1, 9, 45, 2.0)
    assert now.expected_seconds == pytest.approx(2.0 * 45 / 9)
    assert epoch_now(make_plan(), RunLines(epochs=[epoch(0)], steps=[step(44, 0)])) is None
    assert epoch_now(make_plan(), RunLines()) is None


def test_the_epoch_in_progress_after_a_kill_is_not_over():
    again = RunLines.of([epoch(0), epoch(1), epoch(2), step(9, 1)])
    assert (epoch_now(make_plan(), again).epoch, len(again.epochs)) == (1, 1)


def test_workers_are_told_by_the_newest_step():
    told = workers_now(RunLines(steps=[step(1), step(2)], shares=[shares(0, 0, (16, 16))]))
    assert [(one.rank, one.place, one.share) for one in told] == [
        (0, "node0/cpu", 0.5),
        (1, "node1/cpu", 0.5),
    ]
    assert told[1].wait_seconds == 0.001


def test_all_that_a_live_run_tells_is_on_its_page():
    story = a_story(
        epochs=[epoch(0), epoch(1)],
        steps=[step(1, 2), step(20, 2)],
        shares=[shares(0, 0, (16, 16))],
        notes=[note("resumed from epoch 1")],
    )
    parts = {part.name: part.content for part in run_parts(story)}
    assert list(parts) == [
        "predicted",
        "accuracy",
        "schedule",
        "workers",
        "cost",
        "time",
        "notes",
    ]
    for content in parts.values():
        Document(content)
    assert "in progress, by its pace" in parts["predicted"]
    assert "Throughout: resolution 32 px." in parts["schedule"]
    for title in ("Learning rate", "Global batch", "Speed"):
        assert f"<figcaption>{title}</figcaption>" in parts["schedule"]
    assert "A step now, worker by worker" in parts["workers"]
    assert "local batches 2 x 16" in parts["workers"]
    assert "worker-hours" in parts["cost"]
    assert "resumed from epoch 1" in parts["notes"]
    told = {name: value for name, value, _ in tiles(story, left=60.0)}
    assert told["Epochs done"] == "2 of 30"
    assert happened(story).startswith("Epoch 2 of 30 finished, held-out accuracy")


def test_a_run_of_which_nothing_is_heard_yet_says_so():
    story = a_story()
    parts = {part.name: part.content for part in run_parts(story)}
    assert "is not finished yet" in parts["predicted"]
    assert "no finished epoch yet" in parts["accuracy"]
    assert "workers" not in parts
    assert happened(story) == "No epoch is finished yet."
    assert tiles(story)[1][1] == "not evaluated yet"


def test_a_finished_run_is_told_by_its_summary():
    plan, summary = make_plan(), make_summary()
    story = RunStory("a", plan, None, rate_schedule(plan), RunLines(), summary, ended=True)
    assert story.so_far is summary
    assert story.now is None
    parts = {part.name: part.content for part in run_parts(story)}
    assert "A step now" not in parts["workers"]


def test_rounds_show_the_newest_of_each_worker_and_how_far_the_epoch_is():
    plan = make_dual_plan()
    lines = [a_round(number, number % 4) for number in range(3)]
    story = a_story(plan, rounds=lines)
    assert (story.now.unit, story.now.step, story.now.steps) == ("sample", 900, TRAIN)
    assert story.now.expected_seconds is None
    (rounds,) = [part for part in run_parts(story) if part.name == "rounds"]
    assert "The newest rounds" in rounds.content
    assert "2 large" in rounds.content
    Document(rounds.content)


def test_a_plan_of_several_rows_is_drawn_as_steps():
    story = a_story(make_hybrid_plan(), epochs=[epoch(0, 6)])
    (part,) = [one for one in run_parts(story) if one.name == "schedule"]
    assert part.content.count('class="line blue"') >= 3
    assert names_of(plan_parts(story.plan, None)) == ["plan", "job", "environment"]


def foreseen_plan(**changes):
    """A plan that predicts accuracy for each epoch, as those have whose runs tell their end."""
    predicted = (Estimate(value=0.6, low=0.4, high=0.9),) * EPOCHS
    return make_plan(epoch_accuracy=predicted, **changes)


def foretold(end=None, epoch_number=None):
    """What a line tells of the end of its run, under flat names."""
    names = ("run/expected_top1_low", "run/expected_top1", "run/expected_top1_high")
    shares = dict(zip(names, (end - 0.1, end, end + 0.1), strict=True)) if end else {}
    return shares | ({"run/likely_epochs": epoch_number} if epoch_number else {})


def shown(story):
    """All that the page says and draws of accuracy, and the sentence read aloud."""
    (part,) = [one.content for one in run_parts(story) if one.name == "accuracy"]
    return part, {name: more for name, _, more in tiles(story)}["Held-out accuracy"]


def test_what_a_run_expects_of_its_end_is_on_its_page_in_the_words_of_the_terminal():
    plan, line = foreseen_plan(), epoch(7, **foretold(0.8))
    story = a_story(plan, epochs=[epoch(6), line])
    words = forecast_words(line)
    assert words == "likely 80.0 % (70.0 % to 90.0 %) at the end"
    assert f", {words}" in joined(epoch_words(line, brief=False, simulated=False))
    part, tile = shown(story)
    assert tile.startswith(f"{words}, best ")
    assert f"</strong>, {words}. Best:" in part
    assert f"<title>{words}</title>" in part
    assert "likely, by the epochs so far" in part
    assert 'class="line thin purple"' in part
    assert happened(story).endswith(", likely 80.0 % at the end.")


def test_what_is_not_measured_yet_is_no_measurement_that_is_missing():
    story = a_story(foreseen_plan(), epochs=[epoch(6)])
    (part,) = [one.content for one in run_parts(story) if one.name == "predicted"]
    (line,) = [row for row in part.split("<tr") if ">held-out accuracy</th>" in row]
    assert line.count("not yet") == 2
    assert "nothing was measured" not in part


def test_the_epoch_that_is_likely_to_reach_the_target_is_told_and_drawn():
    plan = foreseen_plan(job=make_job(goal={"accuracy": 0.95}))
    story = a_story(plan, epochs=[epoch(7, **foretold(epoch_number=12))])
    words = "goal.accuracy likely after epoch 12"
    part, tile = shown(story)
    assert tile.startswith(f"{words}, best ")
    assert f"<title>{words}</title>" in part
    assert happened(story).endswith(f", {words}.")


def test_a_run_that_is_over_or_says_nothing_of_its_end_shows_nothing_of_it():
    plan, line = foreseen_plan(), epoch(7, **foretold(0.8))
    for summary in (None, make_summary(plan=plan)):
        lines = RunLines(epochs=[line])
        over = RunStory("a", plan, None, rate_schedule(plan), lines, summary, ended=True)
        assert all("likely" not in text for text in (*shown(over), happened(over)))
    silent = a_story(plan, epochs=[epoch(7)])
    assert all("likely" not in text for text in (*shown(silent), happened(silent)))


def test_only_the_newest_evaluation_tells_of_the_end_and_only_what_fits_the_plan():
    plan, line = foreseen_plan(), epoch(7, **foretold(0.8))
    unseen = {"val/top1": None}

    def found(*lines, plan=plan):
        return forecast_so_far(plan, RunLines(epochs=lines))

    assert found(line, epoch(8, **unseen)) == line
    assert found(line, epoch(8)) is None
    assert found(line, epoch(EPOCHS - 1, **unseen)) is None
    early = epoch(7, **foretold(epoch_number=9))
    assert found(early) == early
    assert found(early, epoch(8, **unseen)) is None
    assert found(line, plan=make_plan()) is None
    for strange in (
        epoch(7, **foretold(5.0)),
        epoch(7, **foretold(epoch_number=EPOCHS + 1)),
        epoch(7, EPOCHS + 1, **foretold(0.8)),
    ):
        assert found(strange) is None


KINDS = {"epoch": "epochs", "step": "steps", "shares": "shares", "round": "rounds", "note": "notes"}
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.sampled_from((0, 1, 2**53, 1e300, 5e-324)),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)
WHOLE = [
    flat_epoch(3, **foretold(0.8)),
    *(flat_epoch(0), flat_step(0), flat_values(shares(0, 0, (1, 1)))),
    *(flat_values(a_round(0, 0)), {"kind": "note", "text": "a"}),
]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_whatever_a_line_holds_it_is_refused_or_the_page_is_drawn(data):
    lines = []
    for _ in range(data.draw(st.integers(1, 4))):
        whole = data.draw(st.sampled_from(WHOLE))
        changes = data.draw(st.dictionaries(st.sampled_from(sorted(whole)), ANYTHING, max_size=3))
        with suppress(ValueError):
            lines.append(from_flat(whole | changes, make_data))
    told = {kind: [one for one in lines if one.kind == kind] for kind in KINDS}
    for plan in (make_plan(), make_dual_plan(), foreseen_plan()):
        story = a_story(plan, **{KINDS[kind]: some for kind, some in told.items()})
        for part in run_parts(story):
            Document(part.content)
        tiles(story)
        happened(story)


def test_words_from_outside_are_text():
    story = a_story(
        steps=[step(1)],
        shares=[shares(0, 0, (16, 16), **{"place/0": HOSTILE})],
        notes=[note(HOSTILE)],
    )
    text = "".join(part.content for part in run_parts(story))
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_rounds_of_workers_that_the_plan_has_not_are_left_out():
    plan = make_dual_plan()
    assert rounds_of(plan, [a_round(0, 99), a_round(1, 0, epoch=99)]) == []


# ------------------------------------------------------------------------------------------- cost


def test_cost_counts_training_evaluation_and_checkpoints():
    plan = make_plan(job=make_job(goal={"price": 0.36}))
    told = spending(summary_so_far("a", plan, None, RunLines(epochs=[epoch(0), epoch(1)])))
    assert told.priced
    assert told.hourly == pytest.approx(0.72)
    assert told.so_far == pytest.approx(2 * 0.56)
    assert told.cost(3600.0) == pytest.approx(0.72)
    assert told.expected == pytest.approx(EPOCHS * 0.56, rel=0.01)


def test_epochs_that_are_not_among_the_lines_cost_as_much_as_those_that_are():
    lines = RunLines(epochs=[epoch(0), epoch(2), epoch(4)], stride=2)
    told = spending(summary_so_far("a", make_plan(), None, lines), stride=2)
    assert told.so_far == pytest.approx(5 * 0.56)


def test_the_clock_of_a_long_run_counts_epochs_that_are_not_among_the_lines():
    lines = [epoch(at) for at in (1, 3, 5)]  # as `rows_of` spaces them
    story = a_story(epochs=lines, stride=2)
    each = story.so_far.epochs[0].training_seconds
    assert training_clock(story.so_far) == pytest.approx([2 * each, 4 * each, 6 * each])
    runs = compared([story.so_far.model_copy(update={"run_folder": name}) for name in "ab"]).runs
    assert runs[0].seconds == pytest.approx(6 * each)
    parts = {part.name: part.content for part in run_parts(story)}
    assert "In 3 of 6 epochs, evenly spaced." in parts["time"]
    parts = {part.name: part.content for part in run_parts(a_story(epochs=[epoch(0)]))}
    assert "evenly spaced" not in parts["time"]


def test_time_left_and_cost_go_by_the_epoch_that_the_run_itself_expects():
    plan = foreseen_plan(job=make_job(goal={"accuracy": 0.95}))
    story = a_story(plan, epochs=[epoch(0), epoch(1, **foretold(epoch_number=5))])
    assert story.spending.expected == pytest.approx(5 * 0.56, rel=0.01)
    info = SimpleNamespace(created=10.0, changed=14.0)
    assert seconds_left(story, info) == pytest.approx(3 * 0.56, rel=0.01)
    (cost,) = [part.content for part in run_parts(story) if part.name == "cost"]
    assert f">{duration(story.spending.expected)}<" in cost
    virtual = foreseen_plan(job=make_job(launch="virtual", goal={"accuracy": 0.95}))
    story = a_story(virtual, epochs=[epoch(0), epoch(1, **foretold(epoch_number=5))])
    assert seconds_left(story, info) == pytest.approx(4.0 * 3 / 2)


def test_without_a_price_cost_is_hours_of_work():
    assert hourly_price(make_plan()) == (2.0, False)


def test_kinds_of_workers_have_their_own_prices():
    kinds = ({"kind": "a", "count": 2, "price": 1.0}, {"kind": "b", "count": 4})
    plan = make_plan(
        job=make_job(goal={"kinds": kinds, "price": 0.25}),
        kinds=(KindCount(kind="a", count=1), KindCount(kind="b", count=1)),
    )
    assert hourly_price(plan) == (1.25, True)


# ----------------------------------------------------------------------------------------- Pareto


def test_the_frontier_rises_in_time_and_falls_in_cost():
    plan = make_choice()
    text = pareto_part(plan)
    document = Document(text)
    titles = document.text("title")
    assert "chosen: " in titles
    assert "knee: " in titles
    assert "on the frontier" in titles
    assert 'class="line thin' in text
    numbers = re.search(r"<caption>The frontier.*?</table>", text, re.DOTALL)
    assert numbers
    assert json.dumps(titles)


def test_the_frontier_has_accuracy_where_it_is_predicted():
    """A candidate that is neither quickest nor cheapest is on it if it is the most accurate."""
    accuracies = {256: Estimate(value=0.8, low=0.75, high=0.85)}
    plan = make_choice(workers=(1,), chosen=(1, 256))
    plan = plan.model_copy(
        update={
            "considered": tuple(
                one.model_copy(update={"accuracy": accuracies.get(one.local_batch_size)})
                for one in plan.considered
            )
        }
    )
    known, unknown = (
        re.search(r"<caption>The frontier.*?</table>", pareto_part(one), re.DOTALL)[0]
        for one in (plan, make_choice())
    )
    assert "The frontier of time, cost and accuracy, with 95 % intervals" in known
    assert known.count("batch 256") == known.count("80.0 (75.0 to 85.0)") == 1
    assert "ccuracy" not in unknown


def test_a_plan_without_candidates_has_no_pareto_chart():
    assert pareto_part(make_plan(considered=())) == ""
