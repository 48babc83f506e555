"""Several runs beside each other."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from PIL import Image

from batchwright.errors import FileError
from batchwright.reporting.charts.chart import look
from batchwright.reporting.charts.comparison import comparison_charts
from batchwright.reporting.data.comparison import compared, comparison_rows, setting_rows
from batchwright.reporting.data.plan_curves import time_unit
from batchwright.reporting.pages.page_comparison import comparison_page
from batchwright.reporting.render.figures import draw_comparison
from batchwright.reporting.render.tables import comparison_table
from batchwright.workflows import verbs
from samples import (
    VAL,
    make_data,
    make_epoch,
    make_hybrid_plan,
    make_job,
    make_plan,
    make_summary,
    shown,
)
from test_reporting_page import HOSTILE, Document


def a_run(name, corrects, *, method="plain", seed=0, seconds=1.0, simulated=False, **changes):
    """A run of an epoch for each count of right images; each epoch takes ``seconds``."""
    epochs = tuple(
        make_epoch(at, val_correct=correct, training_seconds=seconds)
        for at, correct in enumerate(corrects)
    )
    (stage,) = make_plan().stages
    plan = make_plan(considered=(), stages=(stage.model_copy(update={"epochs": len(corrects)}),))
    plan = make_hybrid_plan() if method == "hybrid" else plan
    keys = {"resolutions": (24, 32)} if method == "hybrid" else {}
    job = make_job(method=method, seed=seed, workers=plan.workers, **keys)
    plan = plan.model_copy(update={"job": job, **changes})
    return make_summary(run_folder=f"runs/{name}", plan=plan, epochs=epochs, simulated=simulated)


@pytest.fixture(scope="module")
def mixed():
    return compared(
        [
            a_run("plain", [100, 200, 300], seconds=10.0),
            a_run("again", [110, 190, 290], seconds=12.0, seed=1),
            a_run("both", [150, 280, 330], method="hybrid", seconds=4.0, simulated=True),
        ]
    )


def test_the_common_accuracy_is_the_highest_that_every_run_reached(mixed):
    assert mixed.common == 290 / VAL
    assert [one.reached for one in mixed.runs] == [30.0, 36.0, 12.0]


def test_a_run_without_an_evaluation_leaves_no_accuracy_in_common():
    blind = make_summary(epochs=(make_epoch(0, val_correct=None, val_count=None),))
    told = compared([blind, make_summary()])
    assert told.common is None
    assert [one.reached for one in told.runs] == [None, None]
    assert "A run was never evaluated" in comparison_page(told)
    assert draw_comparison(told)


def test_runs_that_differ_in_the_seed_alone_are_one_setting(mixed):
    assert [one.setting for one in mixed.runs] == [0, 0, 1]
    assert [one.label for one in mixed.runs] == ["plain", "plain", "hybrid"]
    _, (label, count, mean, *ends, seconds) = setting_rows(mixed)
    assert (label, count) == ("plain", "2")
    assert [mean, *ends] == ["81.9 %", "80.6 %", "83.3 %"]
    assert seconds == "33.0 s"


def test_runs_that_have_not_ended_are_in_no_mean_and_are_named():
    going = a_run("going", [100])
    (stage,) = going.plan.stages
    longer = going.plan.model_copy(update={"stages": (stage.model_copy(update={"epochs": 9}),)})
    going = going.model_copy(update={"plan": longer})
    told = compared([a_run("one", [200]), a_run("two", [300], seed=1), going])
    told_too = compared([a_run("one", [200]), going])
    assert [row[4] for row in comparison_rows(told)[1:]] == ["1", "1", "1 of 9"]
    assert len({one.setting for one in told.runs}) == 1
    (_, (_, count, mean, *_)) = setting_rows(told)
    assert (count, mean) == ("2", "69.4 %")
    assert setting_rows(told_too)[1:] == []
    assert "Not all epochs are trained of going" in comparison_page(told)
    assert "Not all epochs" not in comparison_page(compared([a_run("a", [1]), a_run("b", [2])]))


def test_a_run_many_times_as_long_leaves_room_for_the_short_ones():
    told = compared([a_run("short", [100, 200]), a_run("long", [100, 200], seconds=50.0)])
    by_epoch, *others = (chart for chart, _ in comparison_charts(told))
    assert not by_epoch.x.logarithmic
    assert [chart.x.logarithmic for chart in others] == [True, True]
    alike = compared([a_run("one", [100, 200]), a_run("two", [100, 200], seconds=2.0)])
    assert not any(chart.x.logarithmic for chart, _ in comparison_charts(alike))


def test_runs_are_told_apart_by_their_marks_too():
    looks = [look(number) for number in range(20)]
    assert len(set(looks)) == 20
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks))


def test_settings_of_one_method_are_told_apart_by_a_run_s_name():
    other = a_run("wide", [100])
    other = other.model_copy(
        update={"plan": other.plan.model_copy(update={"job": make_job(global_batch=64)})}
    )
    told = compared([a_run("narrow", [100]), other])
    assert [one.label for one in told.runs] == ["plain (narrow)", "plain (wide)"]


def test_runs_of_one_name_are_told_apart_by_the_folders_above():
    first, second = (a_run(f"{folder}/run", [100]) for folder in ("a", "b"))
    assert [one.name for one in compared([first, second]).runs] == ["a/run", "b/run"]


def test_runs_in_the_root_folder_have_a_name():
    runs = [a_run("a", [100]).model_copy(update={"run_folder": "/"}) for _ in range(2)]
    assert [one.name for one in compared(runs).runs] == ["/", "/"]


@pytest.mark.parametrize(
    "data",
    [{"digest": "ab" * 32}, {"val_samples": 10}, {"split": "another"}],
    ids=lambda d: next(iter(d)),
)
def test_runs_of_other_data_are_refused_in_a_line(data):
    with pytest.raises(
        FileError, match=r"runs/b holds a run on other data .* than runs/a"
    ) as error:
        compared([a_run("a", [1]), a_run("b", [1], data=make_data(**data))])
    assert "\n" not in str(error.value)
    with pytest.raises(FileError, match="at least two"):
        compared([a_run("a", [1])])


def test_simulated_seconds_say_so_and_have_a_chart_of_their_own(mixed):
    rows = comparison_rows(mixed)
    assert [row[-2] for row in rows[1:]] == ["30.0 s", "36.0 s", "12.0 s simulated"]
    text = comparison_page(mixed)
    charts = dict(
        re.findall(r"<figure><figcaption>(.*?)</figcaption>(.*?)</figure>", text, re.DOTALL)
    )
    assert list(charts) == [
        "Accuracy against epochs",
        "Accuracy against real time",
        "Accuracy against cost",
        "Accuracy against simulated time",
        "Accuracy against simulated cost",
    ]
    lines = [chart.count("<polyline") for chart in charts.values()]
    assert lines == [3, 2, 2, 1, 1]
    assert "simulated seconds of training" in charts["Accuracy against simulated time"]
    assert "training times of both are those of simulated clusters" in text
    labels = [axes.get_xlabel() for axes in draw_comparison(mixed).axes]
    assert labels == ["epochs", "seconds of training", "simulated seconds of training"]
    real = compared([one.summary for one in mixed.runs[:2]])
    assert "simulated" not in comparison_page(real).split("</style>")[1]
    assert len(draw_comparison(real).axes) == 2


def test_the_page_is_well_formed_and_every_mark_has_a_title(mixed):
    text = comparison_page(mixed)
    document = Document(text)
    assert document.text("h1") == "resnet8 on digits"
    assert not {tag for tag, _ in document.seen} & {"script", "link", "img", "a"}
    for chart in re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL):
        marks = re.findall(r'<(?:circle|rect|polygon) class="mark[^>]*>(.{7})', chart)
        assert marks
        assert set(marks) == {"<title>"}
    assert "both, epoch 2: 77.8 %" in text
    assert "the highest held-out accuracy that every run reached" in text


def test_names_of_runs_are_only_text(mixed):
    told = compared([a_run(HOSTILE, [100, 200]), a_run("b", [100, 200], method="hybrid")])
    assert "<script" not in comparison_page(told)
    assert "\x1b" not in comparison_page(told)
    assert "\x1b" not in shown(comparison_table(told))
    assert draw_comparison(told)


def test_the_terminal_s_table_has_a_row_for_each_run(mixed):
    text = shown(comparison_table(mixed))
    for name in ("plain", "again", "both"):
        assert re.search(rf"^ +{name} ", text, re.MULTILINE)
    assert "…" not in text
    assert "runs that differ in the seed alone" in text


def test_nothing_of_the_terminal_s_table_is_cut_off_at_80_columns():
    names = ("two-batches-8", "two-batches-64")
    runs = [a_run(name, [300], method="hybrid", simulated=True) for name in names]
    text, _, _ = shown(comparison_table(compared(runs))).partition("runs that differ")
    assert "to 83.3 %" in text
    assert text.count("simulated") == 4


def test_page_and_figure_are_written_and_reading_again_gives_the_same(mixed, tmp_path):
    runs = [one.summary for one in mixed.runs]
    page = verbs.report(*runs, out=tmp_path / "pages")
    assert page == tmp_path / "pages" / "comparison.html"
    assert page.read_text() == comparison_page(mixed)
    with Image.open(page.with_suffix(".png")) as image:
        assert image.width >= 1000
        assert not image.text


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0.0, "seconds"), (119, "seconds"), (121, "minutes"), (7200, "hours")]
)
def test_long_times_are_in_readable_units(seconds, unit):
    assert time_unit(seconds)[1] == unit
