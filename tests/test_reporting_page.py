from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import yaml

from batchwright.errors import FileError
from batchwright.records import Estimate, Job, Reason, Refit
from batchwright.reporting.charts.chart import (
    Axis,
    Chart,
    Lane,
    Lanes,
    Mark,
    Point,
    Series,
    batch_axis,
    heights,
    linear_axis,
    log_axis,
)
from batchwright.reporting.charts.run import candidates_chart, epochs_chart
from batchwright.reporting.data.accounting import accounting
from batchwright.reporting.data.plan_words import stage_rows
from batchwright.reporting.pages.page import page, write_page
from batchwright.reporting.pages.style import STYLE
from batchwright.reporting.render.svg import drawn
from browsers import browsing
from clusters import make_choice, make_measured
from samples import make_data, make_epoch, make_job, make_network, make_plan, make_summary

EMPTY = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\u202e"


class Document(HTMLParser):
    """The elements of a page; complains if one is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.seen if name == tag]

    def text(self, tag):
        return "".join(words for inside, words in self.words if inside == tag)


@pytest.fixture(scope="module")
def text():
    return page(make_summary())


def test_the_page_is_well_formed_and_has_its_sections(text):
    document = Document(text)
    assert document.text("h1") == "resnet8 on digits"
    headings = [words for tag, words in document.words if tag == "h2"]
    assert headings == [
        "Learning",
        "Predicted against measured",
        "Where the time went",
        "The plan",
        "The job",
        "Data, network and environment",
    ]


def test_the_page_needs_nothing_from_outside(text):
    document = Document(text)
    tags = {tag for tag, _ in document.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "form", "base", "a", "use"}
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_the_content_policy_allows_the_page_s_own_style_and_nothing_else(text):
    document = Document(text)
    (policy,) = [
        meta["content"]
        for meta in document.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    for tag, attributes in document.seen:
        assert "style" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes), tag


def test_every_class_that_a_mark_has_is_described_by_the_style(text):
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    described = set(re.findall(r"\.([a-z-]+)", style))
    used = {
        name
        for _, attributes in Document(text).seen
        for name in (attributes.get("class") or "").split()
    }
    assert used <= described


def test_every_chart_has_a_title_and_the_numbers_behind_it(text):
    document = Document(text)
    charts = [svg for svg in document.all("svg") if svg.get("role") == "img"]
    assert len(charts) == len(document.all("figure")) == 10
    assert all(chart["aria-label"] for chart in charts)
    for figure in re.findall(r"<figure>.*?</figure>", text, re.DOTALL):
        assert re.search(r"<details><summary>The numbers</summary>.*<table", figure, re.DOTALL)
        (chart,) = re.findall(r'<svg class="chart".*?</svg>', figure, re.DOTALL)
        marks = re.findall(r'<(?:circle|rect|polygon) class="(?:mark|bar|ring)[^>]*>(.{7})', chart)
        assert marks
        assert set(marks) == {"<title>"}


def test_the_numbers_of_the_run_are_on_the_page(text):
    for _, (value,) in stage_rows(make_plan()):
        assert value in text
    for name, _ in accounting(make_summary()):
        assert name in text
    for words in ("5.4 % longer", "inside the 95 % interval", "98.1 % (353 of 360)", "98.6 %"):
        assert words in text
    for reason in make_plan().reasons:
        assert all(f"{sentence}." in text for sentence in reason.why.rstrip(".").split(". "))


def test_the_page_begins_with_pictures_and_gives_reasons_as_a_list(text):
    pictures = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert pictures[:4] == [
        "Loss",
        "Held-out accuracy",
        "Epoch by epoch",
        "Epoch time against global batch",
    ]
    assert text.index("</header>") < text.index("<figcaption>") < text.index("<table")
    (reasons,) = re.findall('<ul class="reasons">(.*?)</ul>', text, re.DOTALL)
    lines = re.findall("<li>(.*?)</li>", reasons, re.DOTALL)
    assert len(lines) == len(make_plan().reasons)
    for line, reason in zip(lines, make_plan().reasons, strict=True):
        shown = line.partition("</summary>")[0]  # what stands there before it is opened
        assert f"<strong>{reason.choice}: {reason.value}</strong>" in shown
        assert reason.why.split(". ")[0] in shown
        assert f'<span class="badge">{reason.source}</span>' in shown
        assert reason.reference in line
        assert (not reason.reference) or reason.reference not in shown


def test_the_page_says_where_accuracy_is_that_of_an_average(text):
    assert "average of the weights" not in text
    averaging = make_plan(average_epochs=0.5)
    shown = page(make_summary(plan=averaging, epochs=(make_epoch(0),)))
    assert "Both are of an average of the weights over 0.5 epoch." in shown


def test_a_wide_table_shows_that_it_goes_on():
    assert STYLE.count("no-repeat local") == STYLE.count("no-repeat scroll") == 2


@pytest.mark.slow
def test_a_phone_shows_every_column_or_where_to_find_it(tmp_path):
    write_page(make_summary(plan=make_choice(), profile=make_measured()), tmp_path / "report.html")
    with browsing(viewport={"width": 390, "height": 800}) as phone:
        phone.goto(f"file://{tmp_path / 'report.html'}")
        wide = "document.documentElement.scrollWidth"
        assert phone.evaluate(wide) <= 390
        phone.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert phone.evaluate(wide) <= 390
        beyond = """[...document.querySelectorAll('table')].filter(one =>
            one.scrollWidth > one.parentElement.clientWidth + 1 &&
            getComputedStyle(one.parentElement).overflowX != 'auto').length"""
        assert phone.evaluate(beyond) == 0


def test_alternatives_knees_and_a_curve_for_each_cluster_are_on_the_page():
    text = page(make_summary(plan=make_choice(), profile=make_measured()))
    assert "<p>Or 256 samples: 7 % more time: 764 s instead of 713 s" in text
    assert "Knees: doubling the batch beyond saves at most 5.0 %" in text
    assert "<td>360 to 620</td>" in text
    document = Document(text)
    marks = [a["class"] for _, a in document.seen if "star" in (a.get("class") or "")]
    assert sorted(set(marks)) == ["mark star blue", "mark star red"]
    for title in ("knee: 2 workers, batch 512", "chosen: 2 workers, batch 512", "11.9 predicted"):
        assert title in text


def test_a_prediction_that_was_too_far_off_is_said_with_what_it_would_have_changed():
    refit = Refit(
        predicted=Estimate(value=0.7, low=0.65, high=0.75),
        measured=0.9,
        error=-0.222,
        tolerance=0.1,
        refitted=Estimate(value=0.88, low=0.8, high=0.96),
        workers=1,
        global_batch_size=64,
    )
    text = page(make_summary(refit=refit))
    assert "took 28.6 % more time, beyond goal.tolerance (10.0 % of the measured time)" in text
    assert "0.880 (0.800 to 0.960) s, and the plan becomes 1 worker with global batch 64." in text
    stays = refit.model_copy(update={"workers": 2, "global_batch_size": 96})
    assert "stays at 2 workers with global batch 96." in page(make_summary(refit=stays))
    assert "Fitted again" not in page(make_summary())


def test_names_from_outside_are_escaped_wherever_they_appear():
    data = make_data(name=HOSTILE, classes=(HOSTILE, "b"), split=HOSTILE)
    reason = Reason(
        choice=HOSTILE, value=HOSTILE, why=HOSTILE, source="published", reference=HOSTILE
    )
    plan = make_plan(
        data=data,
        network=make_network(name=HOSTILE),
        reasons=(reason,),
        job=make_job(data=HOSTILE, network=HOSTILE),
    )
    profile = make_summary().profile
    cluster = profile.cluster.model_copy(update={"device_name": HOSTILE, "allocator": HOSTILE})
    hostile = page(
        make_summary(
            plan=plan,
            run_folder=f"runs/{HOSTILE}",
            profile=profile.model_copy(update={"cluster": cluster}),
        )
    )
    document = Document(hostile)
    assert not document.all("script")
    assert "<script" not in hostile
    assert "\x1b" not in hostile
    assert "\u202e" not in hostile
    assert hostile.count("&lt;script&gt;") >= 10


def test_the_job_on_the_page_reads_back_as_the_job(text):
    assert Job(**yaml.safe_load(Document(text).text("pre"))) == make_job()


def test_the_folders_above_the_run_are_not_shown():
    assert "/home/someone" not in page(make_summary(run_folder="/home/someone/runs/a"))


def test_the_same_summary_gives_the_same_bytes(tmp_path):
    first, second = tmp_path / "a" / "report.html", tmp_path / "b" / "report.html"
    for path in (first, second):
        write_page(make_summary(), path)
    assert first.read_bytes() == second.read_bytes()
    assert list(first.parent.iterdir()) == [first]


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(FileError, match=r"report\.html"):
        write_page(make_summary(), tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def without_predictions():
    stage = make_plan().stages[0]
    bare = stage.model_copy(update={"predicted_epoch_seconds": None, "predicted_bytes": None})
    return make_plan(stages=(bare,), considered=(), reasons=())


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": ()},
        {"profile": None},
        {"plan": without_predictions()},
        {"plan": without_predictions(), "epochs": (), "profile": None, "wall_seconds": 0.0},
        {"epochs": (make_epoch(0),)},
        {"epochs": (make_epoch(0, training_seconds=0.0, train_loss=None),)},
        {"epochs": (make_epoch(0, val_correct=None, val_count=None, val_loss=None),)},
        {"epochs": (make_epoch(4, whole=False), make_epoch(5)), "resumed": 1},
        {"epochs": (make_epoch(0, workers=()),)},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_a_run_of_which_less_is_known_still_has_a_page(changes):
    document = Document(page(make_summary(**changes)))
    for _, attributes in document.seen:
        assert "nan" not in " ".join(str(value) for value in attributes.values()).split()


def test_a_plan_of_several_stages_has_a_column_and_a_band_for_each():
    stage = make_plan().stages[0]
    stages = tuple(stage.model_copy(update={"epochs": 10, "resolution": r}) for r in (16, 24, 32))
    text = page(make_summary(plan=make_plan(stages=stages)))
    assert all(f"<td>{side} px</td>" in text for side in (16, 24, 32))
    (predicted,) = re.findall(r"<h2>Predicted against measured.*?</section>", text, re.DOTALL)
    assert predicted.count('class="band blue" points') == 4


@pytest.mark.parametrize(
    "values",
    [
        *([0.0], [], [5.0], [0.1, 0.1004], [3.0, 1e9], [-2.0, 4.0], [5e-324], [0.0, 1e-323]),
        *([-3.0, -2.0], [1e10, 1e10 + 5], [0.1, 0.1 + 2e-7], [9.9e5, 9.9e5 + 7], [1e300]),
    ],
)
def test_a_linear_axis_has_a_few_ticks_and_holds_its_values(values):
    for from_zero in (True, False):
        axis = linear_axis("", values, from_zero=from_zero)
        assert 2 <= len(axis.ticks) <= 9
        assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
        assert len({label for _, label in axis.ticks}) == len(axis.ticks)


def test_an_axis_from_zero_holds_zero():
    assert linear_axis("", [-3.0, -2.0]).high == 0


@pytest.mark.parametrize("most", [9e4, 144_000, 999_999, 1.2e6, 4e7, 3e12, 1e300, 2e-4, 7e-9])
def test_ticks_are_short_enough_for_the_room_beside_a_chart(most):
    labels = [label for _, label in linear_axis("", [most]).ticks]
    assert max(map(len, labels)) <= 7
    assert labels[0] in ("0", "0.00000", "0.0000")


def test_large_ticks_are_in_thousands_and_millions():
    assert [label for _, label in linear_axis("MiB", [144_000]).ticks] == [
        *("0", "50k", "100k", "150k")
    ]
    assert [label for _, label in linear_axis("images", [1.4e6]).ticks][-1] == "1.5M"


@pytest.mark.parametrize(
    "values", [[3.0], [0.03], [0.03, 0.031], [7.1e-5], [1.0, 1000.0], [26.0], [0.75, 2.9]]
)
def test_a_logarithmic_axis_has_ticks_however_narrow_it_is(values):
    axis = log_axis("", values)
    assert len(axis.ticks) >= 2
    assert all(axis.share(b) - axis.share(a) >= 0.1 for (a, _), (b, _) in pairwise(axis.ticks))
    assert all(0 <= axis.share(at) <= 1 for at, _ in axis.ticks)


def test_an_axis_of_percent_does_not_go_beyond_100():
    assert linear_axis("", [40.0, 100.0], from_zero=False).high == 100


def test_ticks_of_a_batch_axis_keep_apart_and_the_measured_batch_has_one():
    batches = [b for power in range(3, 11) for b in (2**power, 3 * 2 ** (power - 1))]
    axis = batch_axis("", batches, [96])
    places = [axis.share(batch) for batch, _ in axis.ticks]
    assert (96.0, "96") in axis.ticks
    assert min(b - a for a, b in pairwise(places)) >= 0.09


def test_labels_of_large_batches_do_not_overlap():
    axis = batch_axis("", [2**power for power in range(10, 21)])
    for (left, words), (right, more) in pairwise(axis.ticks):
        letters = (len(words) + len(more)) / 2
        assert (axis.share(right) - axis.share(left)) * 346 >= 6.9 * letters


def test_words_above_lanes_do_not_overlap_and_stages_go_first():
    marks = [Mark(at, "", words) for at, words in ((1, "1"), (2, "16 px, rate 0.01"), (3, "3"))]
    axis = Axis("", 0.0, 40.0, ())
    lanes = Lanes("", axis, [Lane("", [])], [], [*marks, Mark(20, "", "20"), Mark(39.9, "", "40")])
    found = re.findall(r'class="tick" x="([0-9.]+)"[^>]*>([^<]*)<', drawn(lanes))
    places = [(float(at), len(words)) for at, words in found if words]
    assert [words for _, words in found if words] == ["16 px, rate 0.01", "20", "40"]
    for (left, letters), (right, more) in pairwise(places):
        assert right - left >= 6.5 * (letters + more) / 2
    assert all(at + 3.5 * letters <= 440 for at, letters in places)


def test_an_interval_far_wider_than_the_others_does_not_flatten_the_curve():
    plan = make_plan()
    *some, last = plan.considered
    wide = last.epoch_seconds.model_copy(update={"high": 1000.0 * last.epoch_seconds.value})
    odd = last.model_copy(update={"epoch_seconds": wide})
    summary = make_summary(plan=plan.model_copy(update={"considered": (*some, odd)}))
    chart, usual = candidates_chart(summary), candidates_chart(make_summary())
    assert chart.y.high <= usual.y.high
    assert all(high <= chart.y.high for band in chart.bands for _, _, high in band.edges)


def test_slow_candidates_and_a_slow_epoch_flatten_nothing():
    plan = make_plan()
    first, *some = plan.considered
    times = {end: 50 * value for end, value in first.epoch_seconds.model_dump().items()}
    slow = first.model_copy(update={"epoch_seconds": Estimate(**times)})
    summary = make_summary(plan=plan.model_copy(update={"considered": (slow, *some)}))
    late = summary.epochs[1].model_copy(update={"training_seconds": 90.0})
    summary = summary.model_copy(update={"epochs": (summary.epochs[0], late, *summary.epochs[2:])})
    for chart in (candidates_chart(summary), epochs_chart(summary)):
        usual = sorted(y for y in heights(chart.series) if y < 10)
        assert chart.y.logarithmic
        assert chart.y.share(usual[0]) > 0
        assert chart.y.share(usual[-1]) > 0.1
        ends = [end for band in chart.bands for _, low, high in band.edges for end in (low, high)]
        assert chart.y.low <= min(ends)
        assert max(ends) <= chart.y.high


def test_names_cannot_act_in_a_chart():
    axis, points = Axis(HOSTILE, 0, 1, ((0.5, HOSTILE),)), (Point(0, 0, HOSTILE, label=HOSTILE),)
    text = drawn(Chart(HOSTILE, axis, axis, [Series(HOSTILE, "blue", points)]))
    assert Document(text).seen
    assert not set("\x1b\u202e") & set(text)
    assert "<script" not in text
