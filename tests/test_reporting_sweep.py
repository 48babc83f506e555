"""A sweep in words, tables, charts, on its page and while it runs."""

from __future__ import annotations

import csv
import io

import pytest
from PIL import Image
from rich.console import Console

from batchwright.records import Sweep
from batchwright.records.documents import read_record, write_record
from batchwright.reporting.charts.sweep import against_chart
from batchwright.reporting.data.sweep_curves import (
    MAX_LINES,
    against,
    best_setting,
    curves,
    scale_of,
    setting_head,
    setting_rows,
    sweep_csv,
    varying,
)
from batchwright.reporting.pages.page_sweep import sweep_page
from batchwright.reporting.render.figures import (
    draw_against,
    draw_curves,
    write_sweep_figures,
)
from batchwright.reporting.render.svg import drawn, legend
from batchwright.reporting.render.sweep_progress import SweepProgress
from batchwright.reporting.render.tables import sweep_table
from run_lines import typed
from samples import make_job, shown
from sweeps import make_cell, make_sweep
from test_reporting_page import HOSTILE, Document

FAILED = {"state": "failed", "error": "every gradient is infinite", "accuracy": None}
EMPTY = {"state": "waiting", "accuracy": None, "best_accuracy": None, "accuracies": ()}


def test_a_sweep_reads_back_from_its_file(tmp_path):
    sweep = make_sweep({"resolutions": [[32], [24, 32]], "clip_norm": [None, 1.0]})
    write_record(sweep, tmp_path / "sweep.json")
    assert read_record(tmp_path / "sweep.json", Sweep) == sweep


def test_a_setting_is_told_by_mean_and_standard_error_of_its_seeds():
    row = setting_rows(make_sweep(replaced={6: FAILED}))[0]
    assert row == ["0", "256", "2 of 3, 1 failed", "61.00 ± 1.00 %", "61.00 ± 1.00 %", "11.0 s"]
    (setting, *_) = make_sweep(seeds=1).settings
    assert setting.accuracy.standard_error is None


def test_a_best_setting_that_the_seeds_cannot_tell_from_the_next_is_told_with_it():
    one_key = make_sweep({"warmup_epochs": [0.0, 1.0, 2.0]})
    assert best_setting(one_key) == "best: warmup_epochs=2, 71.00 ± 0.58 %"
    assert best_setting(make_sweep()) == (
        "best: warmup_epochs=2 global_batch=256, 71.00 ± 0.58 %; the seeds cannot tell it from "
        "warmup_epochs=2 global_batch=1024, 71.00 ± 0.58 %"
    )
    near = make_sweep(
        {"clip_norm": [1.0], "warmup_epochs": [0.0, 1.0, 2.0]}, replaced={2: {"accuracy": 0.62}}
    )
    assert best_setting(near) == (
        "best: clip_norm=1 warmup_epochs=2, 61.67 ± 0.33 %; the seeds cannot tell it from "
        "clip_norm=1 warmup_epochs=0, 61.00 ± 0.58 % and 1 more"
    )
    single = make_sweep(seeds=1)  # whose errors nobody knows
    assert best_setting(single) == (
        "best: warmup_epochs=2 global_batch=256, 70.00 %; single runs do not tell what of that is "
        "chance: give more --seeds"
    )
    alone = make_sweep({"warmup_epochs": [0.0]}, seeds=1)
    assert best_setting(alone) == "best: warmup_epochs=0, 60.00 %"


def test_of_runs_that_end_at_a_target_the_best_is_the_quickest():
    ended = {at: {"training_seconds": 30.0 - 9 * (at % 3)} for at in range(9)}
    job = make_job(workers=1, goal={"accuracy": 0.6})
    grid = {"warmup_epochs": [0.0, 1.0, 2.0]}
    short = {at: {"accuracy": 0.59} for at in (2, 5, 8)}  # the quickest, which came to less
    assert best_setting(make_sweep(grid, replaced=ended, job=job)) == (
        "quickest to goal.accuracy=0.6: warmup_epochs=2, 12.0 s ± 0 s of training"
    )
    missed = make_sweep(grid, replaced={at: ended[at] | short.get(at, {}) for at in ended}, job=job)
    assert best_setting(missed).startswith("quickest to goal.accuracy=0.6: warmup_epochs=1, 21.0 s")
    far = make_job(workers=1, goal={"accuracy": 0.9})
    assert best_setting(make_sweep(grid, job=far)) == "best: warmup_epochs=2, 71.00 ± 0.58 %"


def test_a_setting_whose_runs_failed_is_not_the_quickest_and_the_best_is_told_with_them():
    ended = {at: {"training_seconds": 30.0 - 9 * (at % 3)} for at in range(9)}
    grid = {"warmup_epochs": [0.0, 1.0, 2.0]}
    job = make_job(workers=1, goal={"accuracy": 0.6})
    failing = make_sweep(grid, replaced=ended | {8: FAILED}, job=job)
    quickest = "quickest to goal.accuracy=0.6: warmup_epochs=1, 21.0 s"
    assert best_setting(failing).startswith(quickest)
    assert best_setting(make_sweep(grid, replaced={8: FAILED})) == (
        "best: warmup_epochs=2, 70.50 ± 0.50 % (1 run failed)"
    )


def test_the_table_has_a_row_for_each_setting():
    text = shown(sweep_table(make_sweep(replaced={0: FAILED})), width=120)
    assert text.count("±") == 1 + 2 * 6
    assert "2 of 3, 1 failed" in text


def test_a_narrow_terminal_leaves_keys_whole():
    sweep = make_sweep({"dual.small_workers": [1, 3], "label_smoothing": [0.0, 0.1]})
    text = shown(sweep_table(sweep))
    assert "dual.small_workers" in text
    assert "label_smoothing" in text


def test_each_block_of_a_narrow_table_says_of_which_setting_a_row_is():
    sweep = make_sweep({"learning_rate": [0.1], "global_batch": [64, 256], "warmup_epochs": [0, 1]})
    text = shown(sweep_table(sweep), width=80)
    assert "(continued)" in text
    for key in ("learning_rate", "global_batch", "warmup_epochs"):
        assert text.count(key) == 2


def test_the_rate_that_was_used_is_in_the_table_where_it_is_another_than_asked():
    halved = {at: {"learning_rate": 0.05 * (1 + at % 2)} for at in range(6)}
    scaled = make_sweep({"learning_rate": [0.1, 0.2]}, replaced=halved)
    assert setting_head(scaled)[:3] == ["learning_rate", "rate used", "runs"]
    assert [row[:2] for row in setting_rows(scaled)] == [["0.1", "0.05"], ["0.2", "0.1"]]
    by_batch = make_sweep({"global_batch": [64, 128]}, replaced=halved)
    assert [row[1] for row in setting_rows(by_batch)] == ["0.05", "0.1"]
    as_asked = make_sweep({"learning_rate": [0.05, 0.1]}, replaced=halved)
    failed = {"learning_rate": None, "state": "failed"}
    again = make_sweep({"learning_rate": [0.1]}, 2, {1: failed})
    unplanned = make_sweep({"warmup_epochs": [0.0, 1.0]}, 1, {0: failed})
    for plain in (as_asked, make_sweep(), again, unplanned):
        assert "rate used" not in setting_head(plain)
        assert len(setting_rows(plain)[0]) == len(setting_head(plain))


def test_simulated_time_is_named_so():
    simulated = {at: {"simulated": True} for at in range(18)}
    assert setting_head(make_sweep(replaced=simulated))[-1] == "simulated training"
    mixed = make_sweep(replaced={at: {"simulated": True} for at in (0, 6, 12)})
    assert [row[-1] for row in setting_rows(mixed)][:2] == ["11.0 s simulated", "11.0 s"]


def test_the_spreadsheet_has_a_row_for_each_run_with_full_numbers():
    rows = list(csv.DictReader(io.StringIO(sweep_csv(make_sweep(replaced={0: FAILED})))))
    assert len(rows) == 18
    assert rows[0]["error"] == "every gradient is infinite"
    assert (rows[0]["accuracy"], rows[1]["accuracy"]) == ("", str(0.3 + 0.1 * 3))
    assert (rows[1]["warmup_epochs"], rows[1]["planned_warmup_epochs"]) == ("0", "0.0")


def test_curves_have_a_line_for_each_value_and_a_panel_for_the_other_keys():
    sweep = make_sweep()
    panels = curves(sweep, "warmup_epochs")
    assert [panel.title for panel in panels] == ["global_batch=256", "global_batch=1024"]
    line = panels[0].lines[2]
    assert (line.label, len(line.spots), line.spots[3].count) == ("warmup_epochs=2", 4, 3)
    assert (line.spots[3].x, line.spots[3].mean) == (4, pytest.approx(71.0))
    assert line.spots[3].error == pytest.approx(1 / 3**0.5)
    assert [spot.mean for spot in against(sweep, "warmup_epochs").lines[0].spots] == pytest.approx(
        [61.0, 66.0, 71.0]
    )


def test_a_curve_ends_with_the_first_of_its_runs():
    """Those that go on after a target was reached are the slowest, whose mean would fall."""
    runs = [[0.3, 0.5, 0.7], [0.2, 0.4, 0.5, 0.6, 0.7]]
    cells = tuple(make_cell(["sqrt"], seed, run) for seed, run in enumerate(runs))
    (panel,) = curves(make_sweep({"scaling": ["sqrt"]}, seeds=2, cells=cells), "scaling")
    assert [spot.mean for spot in panel.lines[0].spots] == pytest.approx([25.0, 45.0, 60.0])


def test_a_setting_without_runs_keeps_the_others_colours():
    panels = curves(make_sweep(seeds=1, replaced={0: EMPTY}), "warmup_epochs")
    assert [[line.number for line in panel.lines] for panel in panels] == [[1, 2], [0, 1, 2]]


def test_an_epoch_that_was_not_evaluated_is_left_out():
    cell = make_cell(["sqrt"], 0, [0.1, 0.2]).model_copy(update={"accuracies": (None, 0.2)})
    sweep = make_sweep({"scaling": ["sqrt"]}, seeds=1, cells=(cell,))
    (panel,) = curves(sweep, "scaling")
    assert [spot.x for spot in panel.lines[0].spots] == [2]
    assert [one.key for one in varying(sweep)] == ["scaling"]


def test_numbers_stand_where_they_are_and_other_values_side_by_side():
    assert scale_of([0.0, 5.0, 10.0]).places == (0.0, 5.0, 10.0)
    assert not scale_of([0.0, 5.0, 10.0]).logarithmic
    assert scale_of([64, 128, 1024]).logarithmic
    assert scale_of(["auto", 5.0]).places == (0.0, 1.0)
    assert not scale_of([[24], [24, 32]]).numeric
    yes_and_no = scale_of([True, False])  # in Python these are whole numbers
    assert (yes_and_no.places, yes_and_no.numeric) == ((0.0, 1.0), False)


def test_what_has_no_room_is_said_to_be_in_the_table():
    sweep = make_sweep({"epochs": [1, 2], "base_batch": list(range(1, 14))}, seeds=1)
    (panel, _) = curves(sweep, "base_batch")
    assert (len(panel.lines), panel.left_out) == (MAX_LINES, 3)
    panels = curves(sweep, "epochs")
    assert len(panels) == 13
    assert "1 more in the table" in legend_of(draw_curves(sweep, sweep.keys[0]))
    assert "3 more in the table" in legend_of(draw_against(sweep, sweep.keys[0]))


def test_values_that_are_no_numbers_are_named_on_marks_and_in_the_numbers_of_a_chart():
    long = "my_project.networks:" + 5 * "resnet_"
    page = Document(sweep_page(make_sweep({"network": ["vgg8", long], "global_batch": [64, 256]})))
    titles = page.text("title")
    assert f"global_batch=64, {long}: " in titles
    heads = [words for tag, words in page.words if tag == "th"]
    assert heads.count(long) == 2 + 1 + 6  # settings, the numbers of a chart, runs
    ticks = [words for tag, words in page.words if tag == "text"]
    assert "vgg8" in ticks
    assert long not in ticks
    assert f"{long[:23]}…" in ticks


def test_single_points_have_their_standard_errors_on_the_page():
    chart = against_chart(sweep := make_sweep({"scaling": ["none", "sqrt"]}), sweep.keys[0])
    assert drawn(chart).count('class="line thin') == 2
    assert [name for name, _ in legend(chart)] == ["all runs"]


def test_a_band_goes_on_where_all_seeds_came_to_the_same():
    same = {at: {"accuracy": 0.5} for at in (2, 5, 8)}
    sweep = make_sweep({"learning_rate": [0.1, 0.2, 5.0]}, replaced=same)
    (band,) = against_chart(sweep, sweep.keys[0]).bands
    assert [at for at, _, _ in band.edges] == [0.1, 0.2, 5.0]
    assert band.edges[-1][1:] == pytest.approx((50.0, 50.0))


def test_values_that_lie_close_together_do_not_overlap_on_their_axis():
    sweep = make_sweep({"learning_rate": [0.1, 0.11, 0.3, 1e20]})
    ticks = [words for _, words in against_chart(sweep, sweep.keys[0]).x.ticks]
    assert ticks == ["0.11", "1e+20"]
    even = make_sweep({"learning_rate": [0.05, 0.1, 0.2]})
    assert len(against_chart(even, even.keys[0]).x.ticks) == 3


def test_the_page_says_what_has_no_room():
    sweep = make_sweep({"epochs": [1, 2], "base_batch": list(range(1, 14))}, seeds=1)
    text = " ".join(word for _, word in Document(sweep_page(sweep)).words)
    assert "There is no room to draw 3 lines of the first chart, 1 chart." in text  # of epochs
    assert "There is no room to draw 3 lines of each other chart." in text  # of base_batch


def legend_of(figure):
    (legend,) = figure.legends
    return legend.get_title().get_text()


def test_figures_are_written_for_each_key_with_several_values(tmp_path):
    sweep = make_sweep({"global_batch": [64, 1024], "scaling": ["none", "a$b$"], "epochs": [4]})
    files = write_sweep_figures(sweep, tmp_path / "figures")
    assert [path.name for path in files] == [
        *("curves_global_batch.png", "accuracy_global_batch.png"),
        *("curves_scaling.png", "accuracy_scaling.png"),
    ]
    for path in files:
        with Image.open(path) as image:
            assert min(image.size) > 300
    assert not write_sweep_figures(make_sweep(seeds=1, cells=()), tmp_path / "none")


def test_the_page_is_sound_and_says_what_failed():
    page = Document(sweep_page(make_sweep(replaced={0: FAILED, 1: EMPTY})))
    text = " ".join(word for _, word in page.words)
    assert "16 of 18 runs done, 1 failed, 1 to go" in text
    assert "failed: every gradient is infinite" in text
    assert "Last accuracy against warmup_epochs" in text
    assert Document(sweep_page(make_sweep(seeds=1, cells=(), settings=())))


def test_what_comes_from_outside_cannot_act_on_the_page():
    values = {"network": [HOSTILE, "b"]}
    page = sweep_page(make_sweep(values, replaced={0: FAILED | {"error": HOSTILE}}))
    assert "<script" not in page
    assert "\x1b" not in page


# ---------------------------------------------------------------------------------- while it runs


def step(epoch, number):
    return typed({"kind": "step", "epoch": epoch, "step": number, "steps": 10})


def epoch_end(epoch, top1=0.5):
    return typed({"kind": "epoch", "epoch": epoch, "val/top1": top1})


def watched(console, seconds):
    clock = iter(seconds)
    words = {name: f"{name}=0.9,0.95 seed=0" for name in "abc"}
    return SweepProgress(total=4, done=1, words=words, console=console, clock=lambda: next(clock))


def test_elsewhere_there_is_a_line_when_a_run_ends():
    console = Console(file=io.StringIO(), width=100)
    with watched(console, [0.0, 10.0, 11.0]) as progress:
        progress.expect({"a": 4, "b": 4, "c": 4})
        progress.began("a", 4)
        progress.wrote("a", step(0, 5))
        progress.wrote("a", epoch_end(3))
        progress.ended(make_cell(["x"], 0, [0.4, 0.5], name="a"))
        progress.ended(make_cell(["x"], 1, [0.4], name="b", **FAILED))
        progress.ended(make_cell(["x"], 2, [0.4], name="c", **EMPTY | {"state": "stopped"}))
    assert console.file.getvalue().splitlines() == [
        "1 run of 4 done before",
        "2 of 4, a=0.9,0.95 seed=0: accuracy 50.0 %, 10.0 s of training, 20 s left",
        "3 of 4, b=0.9,0.95 seed=0: failed: every gradient is infinite, 6 s left",
        "c=0.9,0.95 seed=0: stopped",
    ]


def test_a_terminal_shows_one_bar_and_where_each_run_is():
    progress = watched(Console(file=io.StringIO(), width=100), [0.0, 5.0, 6.0, 7.0])
    progress.expect({"a": 4, "b": 4})
    progress.began("a", 4)
    progress.began("b", 4)
    progress.wrote("a", epoch_end(0))
    progress.wrote("a", step(1, 5))
    text = shown(progress.picture(), width=120)
    assert "1 of 4 runs, 22 s left" in text
    assert "a=0.9,0.95 seed=0 epoch 2/4, accuracy 50.0 %" in " ".join(text.split())
    assert "starting" in text
