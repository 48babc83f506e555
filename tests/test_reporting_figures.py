from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from PIL import Image

from batchwright.errors import FileError
from batchwright.reporting.charts.chart import Axis, Chart, Point, Series
from batchwright.reporting.render.figures import write_figures
from batchwright.reporting.render.image import figure, file_bytes
from samples import make_epoch, make_plan, make_summary, only_drawn


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_figures(make_summary(), tmp_path_factory.mktemp("run") / "figures")


PNGS = ["plan.png", "epoch_seconds.png", "learning.png", "time.png", "workers.png"]


def test_a_run_has_five_figures_that_are_whole_png_files(written):
    assert [p.name for p in written if p.suffix == ".png"] == PNGS
    for path in (p for p in written if p.suffix == ".png"):
        with Image.open(path) as image:
            image.verify()
            assert image.format == "PNG"
            assert image.width >= 1000


@pytest.mark.slow
def test_the_same_summary_gives_the_same_bytes(written, tmp_path):
    again = write_figures(make_summary(), tmp_path)
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in written]


def test_no_date_and_no_version_goes_into_a_file(written):
    for path in (p for p in written if p.suffix == ".png"):
        with Image.open(path) as image:
            assert not image.text


def test_nothing_else_is_left_in_the_folder(written):
    assert {path.name for path in written[0].parent.iterdir()} == {path.name for path in written}


@pytest.mark.slow
def test_a_run_that_stopped_early_has_the_figures_that_can_be_drawn(tmp_path):
    names = [path.name for path in write_figures(make_summary(epochs=()), tmp_path)]
    assert names == ["plan.png", "plan.figure.json", "epoch_seconds.png"]
    assert write_figures(make_summary(epochs=(), plan=make_plan(considered=())), tmp_path) == []


@pytest.mark.slow
def test_missing_losses_and_evaluations_are_gaps_not_errors(tmp_path):
    epochs = (
        make_epoch(0, train_loss=None, val_loss=None, val_correct=None, val_count=None),
        make_epoch(1, whole=False),
    )
    stage = make_plan().stages[0].model_copy(update={"predicted_epoch_seconds": None})
    plan = make_plan(considered=(), stages=(stage,))
    assert len(write_figures(make_summary(plan=plan, epochs=epochs), tmp_path)) == 5
    assert len(write_figures(make_summary(epochs=epochs[:1]), tmp_path)) == 7
    assert len(write_figures(make_summary(plan=plan, epochs=epochs[1:]), tmp_path)) == 5


def test_the_legend_of_the_epochs_lies_on_no_interval():
    summary = make_summary()
    figure = only_drawn(summary, "epoch_seconds.png")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    top = legend.get_window_extent().y1
    assert all(axes.get_tightbbox().y0 > top for axes in figure.axes)


def test_a_legend_of_many_names_is_no_wider_than_its_figure():
    names = ("1 worker", "2 workers", "most in that time", "chosen, 95 % intervals")
    names += ("beyond what was measured", "measured, 1 worker", "measured, 2 workers", "chosen")
    names += ("within 1 point of the best", "95 % interval")
    axis, points = Axis("x", 0, 1, ()), (Point(0, 0), Point(1, 1))
    series = [Series(name, "blue", points) for name in names]
    drawn = figure([(3.0, [Chart("chart", axis, axis, series)])])
    drawn.draw_without_rendering()
    (legend,) = drawn.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= drawn.bbox.width


def test_long_names_stay_inside_the_figure():
    name = "a_very_long_name_" * 12
    axis, points = Axis("x", 0, 1, ()), (Point(0, 0), Point(1, 1))
    chart = Chart(name, axis, axis, [Series(f"of {name}", "blue", points)])
    drawn = figure([(3.0, [chart, chart, chart])], title=name)
    drawn.draw_without_rendering()
    (legend,) = drawn.legends
    titles = [axes.title for axes in drawn.axes]
    boxes = [one.get_window_extent() for one in (*titles, drawn._suptitle, legend)]
    assert all(box.x0 >= 0 and box.x1 <= drawn.bbox.width for box in boxes)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes[:3]))


def test_letters_that_no_font_has_are_drawn_without_a_word(recwarn):
    axis = Axis("x", 0, 1, ())
    file_bytes(figure([(2.0, [Chart("花", axis, axis, [])])]))
    assert not [one for one in recwarn if "Glyph" in str(one.message)]


def test_a_figure_has_the_same_bytes_in_any_style_of_the_caller():
    matplotlib = pytest.importorskip("matplotlib")
    axis, points = Axis("x", 0, 1, ((0.5, "half"),)), (Point(0, 0), Point(1, 1))
    rows = [(2.0, [Chart("chart", axis, axis, [Series("chosen", "ink", points)])])]
    plain = file_bytes(figure(rows))
    style = {"figure.facecolor": "black", "text.color": "white", "font.family": "monospace"}
    with matplotlib.rc_context(style):
        assert file_bytes(figure(rows)) == plain
        assert {key: matplotlib.rcParams[key] for key in style} == style | {
            "font.family": ["monospace"]
        }


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FileError, match="taken"):
        write_figures(make_summary(), tmp_path / "taken" / "figures")


def test_reporting_is_imported_without_the_libraries_that_draw():
    code = (
        "import sys, batchwright.reporting.render.figures, batchwright.reporting.render.tables,"
        "batchwright.reporting.render.progress\n"
        "print([m for m in ('matplotlib', 'rich', 'torch', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
