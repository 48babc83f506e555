"""However long a plan or a run is, so much of it is drawn and no more, and the page says so."""

from __future__ import annotations

import cProfile
import pstats
from itertools import pairwise
from typing import NamedTuple

import pytest

from batchwright.planning.schedule import rate_schedule
from batchwright.records import Alternative, Estimate, Knee, Reason
from batchwright.reporting.charts.chart import rounded
from batchwright.reporting.charts.run import learning_charts
from batchwright.reporting.data.live_run import RunLines
from batchwright.reporting.data.outline import (
    MAXIMUM_CANDIDATES,
    MAXIMUM_ROWS,
    outline_words,
    outlined,
)
from batchwright.reporting.data.reading import comparisons
from batchwright.reporting.data.spending import spending
from batchwright.reporting.data.worker_curves import worker_curves
from batchwright.reporting.pages.live_page import RunStory, plan_parts, run_parts, tiles
from batchwright.reporting.pages.page import job_text, page
from samples import make_epoch, make_job, make_plan, make_prediction, make_profile, make_summary
from services import epoch_line

SIDES = (16, 24, 32)


def long_plan(rows, candidates=6, reasons=4):
    """A plan whose resolution goes round and round, an epoch of each."""
    (one,) = make_plan().stages
    seconds = {side: Estimate(value=side / 64, low=side / 80, high=side / 50) for side in SIDES}
    stages = tuple(
        one.model_copy(
            update={
                "epochs": 1,
                "resolution": SIDES[at % 3],
                "learning_rate": 0.1 - 0.05 * at / rows,
                "rate_stage": at // 3,
                "predicted_epoch_seconds": seconds[SIDES[at % 3]],
            }
        )
        for at in range(rows)
    )
    considered = some_candidates(candidates, range(candidates))
    told = Reason(choice="rate", value="0.1", why="So. It is.", source="assumed")
    return make_plan(stages=stages, considered=considered, reasons=(told,) * reasons)


def some_candidates(count, frontier):
    one = make_prediction(96)
    return tuple(
        one.model_copy(update={"global_batch_size": 8 + 2 * at, "frontier": at in frontier})
        for at in range(count)
    )


def epochs_of(count):
    return tuple(make_epoch(at % 30).model_copy(update={"epoch": at}) for at in range(count))


def story_of(plan, lines=160):
    told = tuple(epoch_line(at, len(plan.stages)) for at in range(lines))
    schedule = rate_schedule(outlined(plan))
    return RunStory("long", plan, make_profile(), schedule, RunLines(epochs=told))


def drawn(plan):
    story = story_of(plan)
    parts = [*run_parts(story), *plan_parts(plan, None)]
    return "".join(str(part) for part in parts) + str(tiles(story))


def test_a_plan_of_usual_length_is_drawn_as_it_is():
    plan = long_plan(MAXIMUM_ROWS)
    assert outlined(plan) is plan
    assert outline_words(plan) == ""
    assert "plan.json" not in drawn(long_plan(9))


@pytest.mark.slow
def test_of_a_long_plan_the_sums_and_ends_stay():
    whole = long_plan(5000, 3000, 500)
    cut = outlined(whole)
    assert len(cut.stages) <= MAXIMUM_ROWS
    assert len(cut.considered) <= MAXIMUM_CANDIDATES
    assert cut.epochs == whole.epochs
    assert {stage.resolution for stage in cut.stages} == {min(SIDES), max(SIDES)}
    assert cut.top_resolution == whole.top_resolution
    ends = [
        spending(make_summary(plan=plan, profile=None, epochs=())).planned for plan in (whole, cut)
    ]
    assert ends[0].value == pytest.approx(ends[1].value)
    assert ends[0].high == pytest.approx(ends[1].high)
    assert "Of 5,000 stages 200 are shown" in outline_words(whole)
    assert "Of 3,000 candidates" in outline_words(whole)
    assert outline_words(whole) in drawn(whole)


def test_a_block_of_equal_rows_is_one_row():
    (one,) = make_plan().stages
    cut = outlined(make_plan(stages=(one.model_copy(update={"epochs": 2}),) * 1000))
    assert len(cut.stages) == MAXIMUM_ROWS // 2
    assert cut.epochs == 2000
    assert cut.stages[0].predicted_epoch_seconds.value == pytest.approx(
        one.predicted_epoch_seconds.value
    )


def test_what_was_chosen_and_the_frontier_are_among_the_candidates_that_are_drawn():
    cut = outlined(make_plan(considered=some_candidates(4000, [777])))
    shown = {one.global_batch_size for one in cut.considered}
    assert {96, 8 + 2 * 777, 8, 8 + 2 * 3999} <= shown


@pytest.mark.parametrize("rows", [1000, pytest.param(18_000, marks=pytest.mark.slow)])
def test_the_page_of_a_long_plan_is_no_longer_than_that_of_a_shorter_one(rows):
    usual, found = len(drawn(long_plan(MAXIMUM_ROWS, 48))), len(drawn(long_plan(rows, 3000, 900)))
    assert found < 2 * usual + 300_000


def calls(do):
    """How many functions a call calls: what it costs, whatever else the machine does."""
    profiler = cProfile.Profile()
    profiler.runcall(do)
    return pstats.Stats(profiler).total_calls


@pytest.mark.slow
def test_drawing_a_plan_nine_times_as_long_costs_hardly_more():
    short, long = long_plan(2000), long_plan(18_000)
    drawn(short)  # what is done once
    few, many = calls(lambda: drawn(short)), calls(lambda: drawn(long))
    assert many < 2 * few + 300_000


def test_ticks_are_found_without_going_through_the_epochs():
    class Ends(NamedTuple):
        start: int
        stop: int

    assert rounded(Ends(1, 9 * 10**15), 10) == [at * 10**15 for at in range(1, 9)]


@pytest.mark.parametrize("seconds", [2e-6, 0.3, 3e4, 1.3e6])
def test_long_seconds_below_the_learning_curves_leave_each_other_room(seconds):
    epochs = tuple(make_epoch(at, training_seconds=seconds) for at in range(12))
    x = learning_charts(make_summary(epochs=epochs))[0].x
    places = [(x.share(at), len(words.partition("\n")[2])) for at, words in x.ticks]
    assert len(places) > 2
    for (one, _), (other, letters) in pairwise(sorted(places)):
        assert other - one > 0.018 * letters


def test_curves_of_workers_take_no_steps_for_each_pair_of_workers():
    def run(count):
        return make_summary(epochs=(make_epoch(0, workers=make_epoch(0).workers[:1] * count),))

    short, long = run(200), run(2000)
    few, many = calls(lambda: worker_curves(short)), calls(lambda: worker_curves(long))
    assert many < 15 * few


def test_comparing_takes_no_steps_for_each_pair_of_stage_and_epoch():
    def run(count):
        return make_summary(plan=long_plan(count), profile=None, epochs=epochs_of(count))

    short, long = run(300), run(1200)
    assert len(comparisons(long)) == 1200
    assert calls(lambda: comparisons(long)) < 6 * calls(lambda: comparisons(short))


@pytest.mark.slow
def test_the_report_of_a_run_of_very_many_epochs_draws_some_and_adds_up_all():
    usual, many = (
        make_summary(
            plan=make_plan(stages=(make_plan().stages[0].model_copy(update={"epochs": count}),)),
            epochs=epochs_of(count),
        )
        for count in (200, 4000)
    )
    text = page(many)
    assert len(text) < 1.5 * len(page(usual))
    assert "4000 of 4000 epochs" in text
    assert "of 4,000; all are in summary.json" in text


def test_reasons_alternatives_and_jobs_without_end_are_cut():
    told = Reason(
        choice="rate",
        value="0.1",
        why="x" * 100_000,
        source="assumed",
        alternatives=tuple(Alternative(value="y", loss="z" * 9000) for _ in range(900)),
    )
    knee = Knee(workers=2, resolution=32, global_batch_size=96)
    cut = outlined(make_plan(reasons=(told,) * 400, knees=(knee,) * 4000))
    assert len(cut.model_dump_json()) < 4_000_000
    assert len(cut.knees) == 100
    assert "too long to be shown" in job_text(make_job(frozen=("layer",) * 20_000))


def test_a_job_is_shown_by_what_it_asks_for_and_every_key_behind_it():
    text = job_text(make_job(epochs=7))
    asked, every = text.split("<details>")
    assert "<pre>" in asked  # one column: a list is not torn from its key
    assert "epochs: 7" in asked
    assert "momentum" not in asked
    assert "momentum" in every


@pytest.mark.slow
def test_workers_without_end_are_drawn_as_sixteen():
    (one,) = make_epoch(0).workers[:1]
    crowd = tuple(one.model_copy(update={"place": f"node{at}/cpu"}) for at in range(600))
    epochs = tuple(make_epoch(at, workers=crowd) for at in range(3))
    text = page(make_summary(epochs=epochs))
    assert text.count("<td>node") + text.count(": node") < 4000
    assert len(text) < 700_000
