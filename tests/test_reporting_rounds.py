"""What is told of rounds with a parameter server, of several stages, and of simulated time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from matplotlib.colors import to_rgba
from PIL import Image

from batchwright.records import RoundRecord
from batchwright.reporting.charts.rounds import evenness_charts, newest_rounds, timelines
from batchwright.reporting.charts.stages import stage_charts
from batchwright.reporting.data.accounting import accounting
from batchwright.reporting.data.plan_words import decided_words, local_range, split_rows, stage_rows
from batchwright.reporting.data.reading import comparisons, overall
from batchwright.reporting.data.round_curves import (
    MAX_ROUNDS,
    all_rounds,
    bin_count,
    bins,
    end_of,
    epoch_rounds,
    first_seconds,
    lanes,
    last_seconds,
    marks,
    one_clock,
    round_rows,
    server_words,
)
from batchwright.reporting.data.spending import spending
from batchwright.reporting.data.worker_curves import worker_curves
from batchwright.reporting.pages.page import page
from batchwright.reporting.pages.page_rounds import rounds_part
from batchwright.reporting.render.figures import write_figures
from batchwright.reporting.render.image import COLOURS
from batchwright.reporting.render.tables import summary_table
from samples import (
    TRAIN,
    make_cyclic_plan,
    make_dual_plan,
    make_hybrid_plan,
    make_job,
    make_plan,
    make_row,
    make_server,
    make_server_summary,
    make_summary,
    only_drawn,
    shown,
)
from test_reporting_page import Document


@pytest.fixture(scope="module")
def hybrid():
    return make_server_summary()


@pytest.fixture(scope="module")
def text(hybrid):
    return page(hybrid)


def section(text, title):
    return re.findall(rf"<h2>{title}</h2>(.*?)</section>", text, re.DOTALL)[0]


def round_of(worker, number, start=0.0, compute=1.0, **changes):
    factors = (1.0, 1.0, 1.0, 0.9)
    fields = {
        "worker": worker,
        "number": number,
        "epoch": 0,
        "resolution": 32,
        "local_batch_size": 64,
        "samples": 360,
        "steps": 6,
        "update_factor": factors[min(worker, 3)],
        "loss": 1.0,
        "start": start,
        "compute_seconds": compute,
        "exchange_seconds": 0.1,
        "wait_seconds": 0.0,
    }
    return RoundRecord(**(fields | changes))


def run_of(*rounds, plan=None):
    return make_summary(plan=plan or make_dual_plan(), rounds=rounds, epochs=())


# ---------------------------------------------------------------------------------------- numbers


def test_large_workers_come_first_and_every_worker_has_a_lane(hybrid):
    assert [lane.label for lane in lanes(hybrid)] == ["0 large", "1 large", "2 large", "3 small"]
    (first, *others) = lanes(run_of(round_of(0, 0)))
    assert len(first.rounds) == 1
    assert [lane.rounds for lane in others] == [(), (), ()]


def test_a_clock_that_begins_anew_with_a_resume_goes_on():
    rounds = [round_of(0, 0, 0.0), round_of(1, 1, 0.0, 1.2), round_of(0, 2, 1.1), round_of(0, 3)]
    starts = [one.start for one in one_clock(rounds)]
    assert starts[:3] == [0.0, 0.0, 1.1]
    assert starts[3] == pytest.approx(end_of(rounds[2]))
    assert [one.start for one in one_clock(rounds[:3])] == starts[:3]


def test_epochs_end_when_their_samples_are_there_and_say_which_stage_begins(hybrid):
    told = marks(hybrid)
    assert [one.epoch for one in told] == list(range(1, hybrid.plan.epochs + 1))
    assert [one.seconds for one in told] == sorted(one.seconds for one in told)
    assert {one.epoch: one.row for one in told if one.row} == {
        4: "24 px",
        8: "32 px",
        12: "16 px, rate 0.01",
        14: "24 px",
        16: "32 px",
    }


def test_an_epoch_ends_with_its_slowest_round_wherever_that_is_on_record():
    compute = (3.0, 1.0, 2.0, 1.0)  # all wait for worker 0, and are booked in rank order
    rounds = [
        round_of(w, w, compute=compute[w], wait_seconds=3.0 - compute[w], samples=-(-TRAIN // 4))
        for w in range(4)
    ]
    assert [one.seconds for one in marks(run_of(*rounds))] == [pytest.approx(3.1)]


@settings(max_examples=30)
@given(some.integers(1, 200))
def test_stretches_hold_every_second_of_a_worker(count):
    lane = lanes(make_server_summary(make_dual_plan()))[0]
    until = last_seconds([lane])
    told = bins(lane, until, count)
    inside = sum(sum(one.shares.values()) * (one.end - one.start) for one in told)
    parts = sum(lane.seconds(part) for part in ("compute", "exchange", "wait", "evaluation"))
    assert inside == pytest.approx(parts)
    assert all(sum(one.shares.values()) <= 1 + 1e-9 for one in told)


def test_a_stretch_has_whole_rounds_or_a_quarter_of_one():
    lane = lanes(make_server_summary(make_dual_plan()))[:1]
    rounds = len(lane[0].rounds)
    assert bin_count(lane, 1000) == 4 * rounds
    assert bin_count(lane, rounds) == rounds
    assert bin_count(lane, rounds - 1) == -(-rounds // 2)


def test_the_spread_is_that_of_the_training_in_a_round():
    rounds = [round_of(0, 0, compute=1.0), round_of(1, 1, compute=1.2, wait_seconds=9.0)]
    (one,) = epoch_rounds(run_of(*rounds))
    assert one.spread == pytest.approx(0.2 / 1.1)
    assert one.exchange_share == pytest.approx(0.2 / 2.4)
    assert one.wait_share == pytest.approx(9 / 11.4)
    (alone,) = epoch_rounds(run_of(round_of(0, 0)))
    assert alone.spread is None


def test_a_round_is_compared_with_what_was_predicted_for_one():
    plan = make_dual_plan()
    predicted = plan.stages[0].predicted_epoch_seconds.value
    rounds = [round_of(w, w, compute=1.1 * predicted, exchange_seconds=0.0) for w in range(4)]
    assert all_rounds(run_of(*rounds, plan=plan)).over_predicted == pytest.approx(1.1)


def test_where_workers_exchange_every_few_steps_their_part_of_an_epoch_is_compared():
    plan = make_dual_plan(server=make_server(exchange_steps=2))
    row = plan.stages[0]
    predicted = row.predicted_epoch_seconds.value
    rounds = [
        round_of(w, n, samples=128, compute=predicted * 128 / row.samples_per_round[w])
        for w in range(3)
        for n in range(3)
    ]
    told = all_rounds(run_of(*rounds, plan=plan))
    assert told.spread == pytest.approx(0.0, abs=1e-9)
    assert told.over_predicted == pytest.approx(
        1 + 0.1 * row.samples_per_round[0] / 128 / predicted
    )


def test_the_last_round_of_the_training_which_is_cut_short_is_not_compared():
    rounds = [round_of(0, 0), round_of(1, 1), round_of(2, 2, compute=0.1, update_factor=0.1)]
    assert epoch_rounds(run_of(*rounds))[0].spread == 0.0


def test_nothing_predicted_is_nothing_compared():
    row = make_row(6).model_copy(update={"predicted_epoch_seconds": None})
    plan = make_dual_plan(stages=(row,))
    assert all_rounds(run_of(round_of(0, 0), plan=plan)).over_predicted is None
    assert "nothing was predicted" in page(run_of(round_of(0, 0), plan=plan))
    assert all_rounds(make_summary()) is None


def test_leads_are_those_of_the_plan_s_bound():
    plan = make_dual_plan(server=make_server(consistency="ssp", staleness=1))
    summary = make_server_summary(plan, speeds=(1, 1, 1, 0.5))
    assert all_rounds(summary).lead == 2 - 1
    head, *rows = round_rows(summary)
    assert [row[head.index("lead")] for row in rows] == ["1", "1", "1", "0"]
    waits = {row[0]: row[head.index("wait")] for row in rows}
    assert waits["3 small"] == "0 s"
    assert waits["0 large"] != "0 s"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "nobody waits (ASP), merge journal, factor ratio, once a round, momentum keep"),
        (
            {"consistency": "ssp", "staleness": 2, "exchange_steps": 5},
            "at most 2 rounds ahead of the slowest (SSP), merge journal, factor ratio, every 5 "
            "steps, momentum keep",
        ),
        (
            {"consistency": "bsp"},
            "all wait for each other (BSP), factor ratio, once a round, momentum keep",
        ),
    ],
)
def test_a_server_is_told_in_a_few_words(changes, words):
    assert server_words(make_dual_plan(server=make_server(**changes))) == words
    assert server_words(make_plan()) == ""


# ------------------------------------------------------------------------------------------ stages


def test_what_all_stages_share_is_told_once():
    common, (head, *rows) = split_rows(make_hybrid_plan())
    assert ("workers", "4") in common
    assert head[:5] == ["stage", "epochs", "rate stage", "side", "rate"]
    assert [row[head.index("large + small")] for row in rows][:2] == ["3 x 192 + 66", "3 x 96 + 34"]
    assert split_rows(make_plan())[0] == []


def test_a_plan_with_two_batches_names_both_in_few_words():
    plan = make_hybrid_plan()
    assert decided_words(plan) == "batches 64 to 192 and 22 to 66"
    assert local_range(plan) == "64 to 192 + 22 to 66"
    assert dict(stage_rows(make_dual_plan()))["update factors"] == ["3 x 1 + 0.9"]
    assert decided_words(make_cyclic_plan()) == "global batch 128 to 384"
    assert decided_words(make_plan()) == "global batch 96"
    all_small = make_dual_plan(
        server=make_server(small_workers=4), stages=(make_row(2, batches=(8,) * 4, small=4),)
    )
    assert decided_words(all_small) == "global batch 32"


def test_the_charts_of_stages_go_up_and_down_in_steps():
    charts = {one.title: one for one in stage_charts(make_hybrid_plan())}
    assert list(charts) == ["Resolution", "Local batch", "Learning rate", "Dropout"]
    resolution, _ = charts["Resolution"].series  # a line, and what a page shows of its starts
    places = [(point.x, point.y) for point in resolution.points]
    assert places[:4] == [(0, 16), (4, 16), (4, 24), (8, 24)]
    assert [one.name for one in charts["Local batch"].series[:2]] == ["large", "small"]
    alone = {one.title: one for one in stage_charts(make_cyclic_plan())}["Local batch"].series
    assert {one.name for one in alone} == {"each worker"}
    (shade,) = charts["Dropout"].bands
    assert (shade.name, [at for at, *_ in shade.edges]) == ("stage 2 of the rate", [12, 18])


def test_every_stage_has_its_own_prediction_and_the_headline_their_mean(hybrid):
    told = comparisons(hybrid)
    assert len(told) == 6
    whole = overall(hybrid)
    epochs = [stage.epochs for stage in hybrid.plan.stages]
    assert whole.measured == pytest.approx(
        sum(n * one.measured for n, one in zip(epochs, told, strict=True)) / sum(epochs)
    )
    assert whole.predicted.low < whole.predicted.value < whole.predicted.high
    assert overall(make_summary()) == comparisons(make_summary())[0]
    unfinished = hybrid.model_copy(update={"epochs": hybrid.epochs[:5]})
    assert overall(unfinished).measured == pytest.approx(
        (4 * comparisons(unfinished)[0].measured + 4 * comparisons(unfinished)[1].measured) / 8
    )
    assert overall(hybrid.model_copy(update={"epochs": ()})).measured is None


def test_the_terminal_has_a_row_for_each_stage_and_each_worker(hybrid):
    said = shown(summary_table(hybrid), width=120)
    rows = [line.split(" stage ")[1] for line in said.splitlines() if " px " in line]
    assert [row[:2] for row in rows] == ["1:", "2:", "3:", "4:", "5:", "6:"]
    assert all("%" in row for row in rows)
    assert [w for w in ("0 large", "1 large", "2 large", "3 small") if w in said][-1] == "3 small"
    assert "…" not in said
    assert len(said.splitlines()) < 60


# -------------------------------------------------------------------------------------- the page


def test_the_page_of_rounds_is_well_formed_and_every_mark_has_a_title(text):
    document = Document(text)
    headings = [words for tag, words in document.words if tag == "h2"]
    assert headings[1:3] == ["Predicted against measured", "Rounds"]
    figures = re.findall(r"<figure>.*?</figure>", section(text, "Rounds"), re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        assert re.search(r"<details><summary>The numbers</summary>.*<table", figure, re.DOTALL)
        (chart,) = re.findall(r'<svg class="chart".*?</svg>', figure, re.DOTALL)
        marks_of = re.findall(r'<(?:circle|rect|line class="epoch")[^>]*>(.{7})', chart)
        assert marks_of
        assert set(marks_of) == {"<title>"}
    described = set(re.findall(r"\.([a-z-]+)", re.findall(r"<style>(.*?)</style>", text, re.S)[0]))
    used = {n for _, a in document.seen for n in (a.get("class") or "").split()}
    assert used <= described


def test_the_timeline_tells_large_from_small_by_height_and_words_and_shows_every_part(text):
    first, whole, *_ = re.findall(r"<figure>.*?</figure>", section(text, "Rounds"), re.DOTALL)
    lanes_of = first[first.index('class="chart"') :]
    heights = {
        kind: set(re.findall(rf'class="bar part-{kind}"[^>]* height="([0-9.]+)"', lanes_of))
        for kind in ("large", "small")
    }
    assert len(heights["large"]) == len(heights["small"]) == 1
    assert heights["large"].isdisjoint(heights["small"])
    assert "worker 3 small, round 4, epoch 1, 16 px, batch 66, 333 samples: training" in first
    for part in ("exchange", "evaluation"):
        assert f'class="box part-{part}"' in first
        assert f'class="box part-{part}"' in whole
    assert 'class="box part-wait"' not in first  # nobody waits
    assert ">16 px, rate 0.01<" in whole
    assert "4 epochs done, then 24 px" in first


def test_waits_are_on_the_timeline():
    plan = make_dual_plan(server=make_server(consistency="bsp"))
    assert 'class="box part-wait"' in page(make_server_summary(plan))


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "workers"), [(2, 2), (20, 8), (75, 8)])
def test_a_timeline_of_few_or_many_rounds_stays_readable(epochs, workers):
    batches = (64,) * (workers - 1) + (22,)
    plan = make_dual_plan(
        job=make_job(method="dual-batch", workers=workers), stages=(make_row(epochs, 32, batches),)
    )
    summary = make_server_summary(plan)
    told = lanes(summary)
    boxes = [sum(one.start < first_seconds(told) for one in lane.rounds) for lane in told]
    assert max(boxes) <= MAX_ROUNDS + 1
    rounds = rounds_part(summary)
    assert rounds.count("<rect class=") < 3500
    assert len(only_drawn(summary, "rounds.png").axes) == (2 if epochs > MAX_ROUNDS else 1)


def test_of_very_many_workers_some_of_each_kind_have_a_lane_and_the_title_says_so():
    workers = 200  # lanes of some more would make a file that is too large to be drawn
    batches = (64,) * (workers // 2) + (22,) * (workers // 2)
    server = make_server(small_workers=workers // 2)
    job = make_job(method="dual-batch", workers=workers)
    plan = make_dual_plan(
        job=job, stages=(make_row(1, 32, batches, small=workers // 2),), server=server
    )
    rounds = [round_of(at, at, update_factor=1.0) for at in range(workers)]
    for chart in (*timelines(run_of(*rounds, plan=plan)), newest_rounds(plan, rounds)):
        assert 2 < len(chart.lanes) <= 64
        assert {lane.name for lane in chart.lanes} >= {"0 large", "199 small"}
    (first,) = timelines(run_of(*rounds, plan=plan))
    assert first.title == "The rounds (64 of 200 workers)"


def test_lines_of_one_chart_differ_in_more_than_colour(hybrid):
    for chart in evenness_charts(hybrid):
        drawn = [one for one in chart.series if one.marker != "none"]
        assert len({one.marker for one in drawn}) == len(drawn)


def test_tables_of_very_many_epochs_and_workers_show_some_and_say_so(hybrid):
    rounds = tuple(round_of(0, at, start=2.0 * at, epoch=at) for at in range(300))
    plan = make_dual_plan(stages=(make_row(300, 32, (64, 64, 64, 22)),))
    told = rounds_part(run_of(*rounds, plan=plan))
    assert "Rounds by the epoch in which they began (100 of 300)" in told


def test_a_plan_of_several_stages_has_its_charts_and_a_row_for_each(text):
    plan = section(text, "The plan")
    for title in ("Resolution", "Local batch", "Learning rate", "Dropout"):
        assert f"<figcaption>{title}</figcaption>" in plan
    assert "stage 2 of the rate" in plan
    assert "small: 34.0 from epoch 5" in plan
    assert "<td>3 x 96 + 34</td>" in plan
    assert "<h3>Over the epochs</h3>" not in page(make_summary())
    predicted = section(text, "Predicted against measured")
    assert all(f"seconds per epoch, stage {n}: " in predicted for n in range(1, 7))


def test_candidates_of_several_resolutions_have_a_line_each():
    considered = tuple(
        one.model_copy(update={"resolution": side})
        for side in (16, 24, 32)
        for one in make_plan().considered
    )
    text = page(make_summary(plan=make_cyclic_plan(considered=considered), epochs=()))
    (chart,) = re.findall(r"<figcaption>Epoch time against.*?</figure>", text, re.DOTALL)
    assert chart.count("<polyline") == 3
    assert "predicted, 24 px" in chart


# ------------------------------------------------------------------------------- simulated time


def test_no_second_of_a_simulated_run_is_told_without_saying_so(hybrid):
    simulated = hybrid.model_copy(update={"simulated": True})
    text = page(simulated)
    assert "This cluster was simulated" in text
    assert "s simulated" in re.findall(r"<span>Time</span><strong>(.*?)</strong>", text)[0]
    axes = re.findall(r'class="axis"[^>]*>([^<]*)</text>', text)
    timed = [words for words in axes if "second" in words or "time" in words]
    assert len(timed) >= 8
    assert all("simulated" in words for words in timed)
    assert "measured" not in section(text, "Predicted against measured").lower().replace(
        "predicted against measured", ""
    )
    said = shown(summary_table(simulated), width=100)
    assert "predicted and simulated" in said
    # Its times come from those that were predicted: they prove nothing.
    for told in (text, said):
        assert "longer" not in told
        assert "% more" not in told
        assert "do not test its prediction" in " ".join(told.split())
        assert "predicted round" not in told
    assert "<strong>not tested</strong>" in text
    assert "where the simulated time went" in said
    assert "computing it, real time" in said
    for words in ("measured", "simulated"):
        assert (words in shown(summary_table(hybrid))) is (words == "measured")


def test_an_evaluation_of_one_worker_is_no_time_of_the_others(hybrid):
    setup, time = hybrid.setup_seconds, last_seconds(lanes(hybrid))
    summary = hybrid.model_copy(update={"wall_seconds": setup + time})
    for worker in (None, *worker_curves(summary)):
        parts = accounting(summary, worker)
        assert sum(seconds for _, seconds in parts) == pytest.approx(setup + time)
    assert spending(summary).so_far <= time
    single = [dict(accounting(summary, one))["evaluation"] for one in worker_curves(summary)]
    assert dict(accounting(summary))["evaluation"] == pytest.approx(sum(single) / len(single))


def test_simulated_seconds_are_not_added_to_real_ones(hybrid):
    simulated = hybrid.model_copy(update={"simulated": True, "wall_seconds": 1e6})
    parts = dict(accounting(simulated))
    assert "set-up" not in parts
    assert sum(parts.values()) == pytest.approx(
        sum(epoch.training_seconds for epoch in hybrid.epochs)
    )


def labels_of(figure):
    return [f() for axes in figure.axes for f in (axes.get_xlabel, axes.get_ylabel)]


def test_figures_of_simulated_time_say_so(hybrid, tmp_path):
    simulated = hybrid.model_copy(update={"simulated": True})
    timed = [words for words in labels_of(only_drawn(simulated, "rounds.png")) if "second" in words]
    assert timed == ["simulated seconds since training began"] * 2


# --------------------------------------------------------------------------------------- figures


@pytest.mark.slow
def test_a_run_with_rounds_and_stages_has_both_figures(hybrid, tmp_path):
    bare = hybrid.model_copy(update={"epochs": ()})  # other figures take their time
    written = {path.name: path for path in write_figures(bare, tmp_path)}
    assert set(written) == {"rounds.png", "stages.png"}
    for name in ("rounds.png", "stages.png"):
        with Image.open(written[name]) as image:
            assert image.width >= 1000
            assert not image.text
    dual = make_server_summary(make_dual_plan(), epochs=())
    assert [path.name for path in write_figures(dual, tmp_path / "dual")] == ["rounds.png"]


def test_the_figure_of_stages_has_a_panel_for_each_quantity(hybrid):
    figure = only_drawn(hybrid, "stages.png")
    assert [axes.get_title() for axes in figure.axes] == [
        *("Resolution", "Local batch", "Learning rate", "Dropout")
    ]
    assert "stage 2 of the rate" in [text.get_text() for text in figure.legends[0].get_texts()]
    rates = figure.axes[2].get_lines()[1].get_ydata()
    assert len(rates) == hybrid.plan.epochs


def test_the_timeline_draws_every_round_of_its_first_panel(hybrid):
    first, whole = only_drawn(hybrid, "rounds.png").axes
    until = first_seconds(lanes(hybrid))
    begun = sum(one.start < until for lane in lanes(hybrid) for one in lane.rounds)
    colours = {to_rgba(COLOURS[f"part-{kind}"]) for kind in ("large", "small")}
    trained = [one for one in first.collections if tuple(one.get_facecolor()[0]) in colours]
    assert sum(len(one.get_paths()) for one in trained) == begun
    (hatched,) = [one for one in first.collections if one.get_hatch()]
    assert len(hatched.get_paths()) == sum(one.start < until for one in lanes(hybrid)[3].rounds)
    assert [text.get_text() for text in whole.get_yticklabels()][-1] == "3 small"


def test_the_samples_are_what_a_run_would_write(hybrid):
    assert sum(one.samples for one in hybrid.rounds) == TRAIN * hybrid.plan.epochs
    assert len(hybrid.epochs) == hybrid.plan.epochs


def test_resolutions_are_read_at_their_own_values():
    ticks = only_drawn(make_summary(plan=make_hybrid_plan()), "stages.png").axes[0].get_yticks()
    assert list(ticks) == [32, 24, 16, 0]
