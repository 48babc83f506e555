"""A plan's curves, its figure, and the text that explains it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from batchwright.errors import FileError
from batchwright.records import Estimate, KindCount
from batchwright.records.text.plan_text import (
    MAX_ROWS,
    explain,
    is_chosen,
    kept_candidates,
    knee_rows,
    rivals,
)
from batchwright.reporting.charts.memory import memory_chart
from batchwright.reporting.charts.plan import batch_chart
from batchwright.reporting.data.plan_curves import (
    MAX_CURVES,
    MeasuredPoint,
    plan_curves,
    smooth,
    top_of,
    units_of,
)
from batchwright.reporting.pages.page import page
from batchwright.reporting.pages.page_plan import candidates_table
from batchwright.reporting.render.figures import draw_plan, plan_figure_data, write_plan_figure
from clusters import (
    EPOCHS,
    EVALUATION,
    LOCAL_BATCHES,
    TRAIN,
    make_candidate,
    make_choice,
    make_measured,
    make_step,
    step_seconds,
)
from samples import (
    make_cyclic_plan,
    make_data,
    make_dual_plan,
    make_hybrid_plan,
    make_job,
    make_plan,
    make_prediction,
    make_profile,
    make_summary,
)
from test_optimizer import update

# ------------------------------------------------------------------------------------ the numbers


def test_there_is_a_curve_for_each_cluster_with_its_knee_and_the_chosen_batch():
    one, two = plan_curves(make_choice(), [make_measured()]).clusters
    assert (one.label, two.label) == ("1 worker", "2 workers")
    assert [p.global_batch_size for p in two.points] == [2 * b for b in LOCAL_BATCHES]
    assert (one.knee.global_batch_size, two.knee.global_batch_size) == (256, 512)
    assert two.knee.seconds == two.points[5].seconds[0]
    assert [p.global_batch_size for p in two.points if p.chosen] == [512]
    assert (one.chosen, two.chosen) == (False, True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_measured_step_stands_where_the_training_it_makes_would_be(workers):
    """On the curve where the measurement is what was predicted, at any batch."""
    (curve,) = [
        c for c in plan_curves(make_choice(), [make_measured()]).clusters if c.workers == workers
    ]
    assert [p.global_batch_size for p in curve.measured] == [
        workers * b for b in (8, 32, 96, 256, 512)
    ]
    for point in curve.measured:
        batch = point.global_batch_size
        epoch = TRAIN / batch * step_seconds(workers, batch // workers)
        value, low, high = point.seconds
        assert value == pytest.approx(EPOCHS * epoch + EVALUATION / workers)
        assert low == pytest.approx(0.98 * EPOCHS * epoch + EVALUATION / workers)
        assert high == pytest.approx(1.03 * EPOCHS * epoch + EVALUATION / workers)
        assert point.cost[0] == pytest.approx(0.4 * workers * value / 3600)


def test_a_measured_step_has_the_update_of_the_plan_s_optimizer_as_the_curve_does():
    updates = (update("sgd", 0.01), update("muon", 0.03))
    profile = make_measured(job=make_job(optimizer="auto"), updates=updates)
    sgd, muon = (
        plan_curves(make_choice(update=name), [profile]).clusters[0].measured
        for name in ("sgd", "muon")
    )
    for one, other in zip(sgd, muon, strict=True):
        longer = EPOCHS * TRAIN / one.global_batch_size * 0.02
        assert [b - a for a, b in zip(one.seconds, other.seconds, strict=True)] == [
            pytest.approx(longer)
        ] * 3


def test_points_beyond_the_candidates_or_of_other_workers_and_sides_are_not_drawn():
    profile = make_measured(
        steps=(make_step(1, 4), make_step(2, 2048), make_step(4, 64), make_step(1, 64)),
    )
    other = make_measured(steps=(make_step(1, 64, resolution=16),))
    curves = plan_curves(make_choice(), [profile, other])
    assert [len(one.measured) for one in curves.clusters] == [1, 0]


def test_without_a_price_cost_is_in_worker_hours():
    curves = plan_curves(make_choice(price=None), [make_measured()])
    assert not curves.priced
    for cluster in curves.clusters:
        for point in cluster.points:
            assert point.cost[0] == pytest.approx(cluster.workers * point.seconds[0] / 3600)
    (scale, unit), (worth, currency) = units_of(curves)
    assert (scale, unit) == (60, "minutes")
    assert (worth, currency) == (1 / 60, "worker-minutes")
    assert units_of(plan_curves(make_choice()))[1] == (1.0, "in the price's currency")


def test_epochs_alone_stand_for_the_training_where_evaluation_is_not_known():
    (curve,) = plan_curves(make_plan(), [make_profile()]).clusters
    chosen = next(p for p in curve.points if p.chosen)
    assert chosen.seconds[0] == pytest.approx(30 * make_prediction(96).epoch_seconds.value)


def test_of_many_clusters_the_chosen_and_the_extremes_are_drawn():
    workers = tuple(2**power for power in range(13))
    curves = plan_curves(make_choice(workers=workers, chosen=(256, 128)))
    shown = [one.workers for one in curves.clusters]
    assert len(shown) <= MAX_CURVES
    assert {1, 256} <= set(shown)
    assert curves.left_out == len(workers) - len(shown)


def test_only_the_plans_own_resolution_is_drawn():
    low = tuple(make_candidate(1, b, resolution=16) for b in LOCAL_BATCHES)
    plan = make_choice()
    plan = plan.model_copy(update={"considered": (*low, *plan.considered)})
    curves = plan_curves(plan)
    assert curves.resolution == 32
    assert sum(len(one.points) for one in curves.clusters) == 2 * len(LOCAL_BATCHES)


def test_a_mixed_cluster_has_its_kinds_for_a_name_and_no_measured_points():
    kinds = (KindCount(kind="a100", count=1), KindCount(kind="v100", count=1))
    considered = tuple(make_candidate(2, b, kinds=kinds) for b in LOCAL_BATCHES)
    plan = make_choice(kinds=kinds, considered=considered, knees=())
    (curve,) = plan_curves(plan, [make_measured()]).clusters
    assert curve.label == "1 a100 + 1 v100"
    assert curve.measured == ()
    assert curve.chosen


def test_steps_of_a_kind_are_drawn_on_the_curve_of_that_kind():
    kinds = (KindCount(kind="Xeon Platinum 8481C", count=2),)
    mine = tuple(make_candidate(2, b, kinds=kinds) for b in LOCAL_BATCHES)
    other = tuple(
        make_candidate(2, b, kinds=(KindCount(kind="other", count=2),)) for b in LOCAL_BATCHES
    )
    plan = make_choice(kinds=kinds, considered=(*mine, *other), knees=())
    curves = {one.label: one for one in plan_curves(plan, [make_measured()]).clusters}
    assert len(curves["2 Xeon Platinum 8481C"].measured) == 5
    assert curves["2 other"].measured == ()


@given(
    fixed=some.floats(1e-4, 1.0),
    per_image=some.floats(1e-6, 1e-2),
    batches=some.lists(some.integers(1, 10_000), min_size=2, max_size=12, unique=True),
)
def test_a_smooth_curve_is_exact_between_candidates_where_steps_are_a_line(
    fixed, per_image, batches
):
    def seconds(batch):
        return TRAIN / batch * (fixed + per_image * batch)

    rows = [(b, seconds(b), 0.9 * seconds(b), 1.1 * seconds(b)) for b in sorted(batches)]
    drawn = smooth(rows)
    assert drawn[-1] == rows[-1]
    assert set(rows) <= set(drawn)
    assert all(left[0] < right[0] for left, right in pairwise(drawn))
    for batch, value, low, high in drawn:
        assert value == pytest.approx(seconds(batch))
        assert (low, high) == pytest.approx((0.9 * seconds(batch), 1.1 * seconds(batch)))


def test_a_chart_ends_where_the_curves_are_flat_and_holds_the_chosen_batch():
    curves = plan_curves(make_choice())
    highest = max(p.seconds[2] for c in curves.clusters for p in c.points)
    assert top_of(curves, "seconds") < 1.07 * highest
    small = plan_curves(make_choice(chosen=(2, 8)))
    at = next(p for c in small.clusters for p in c.points if p.chosen)
    assert top_of(small, "seconds") > at.seconds[2]


# ------------------------------------------------------------------------------------- the figure


@pytest.mark.parametrize(
    "suffix", [*(pytest.param(s, marks=pytest.mark.slow) for s in (".png", ".pdf")), ".svg"]
)
def test_the_same_plan_gives_the_same_bytes_in_every_format(tmp_path, suffix):
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"plan{suffix}"
        written.append(write_plan_figure(make_choice(), [make_measured()], path))
    for first, second in zip(*written, strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert {p.name for p in (tmp_path / "a").iterdir()} == {p.name for p in written[0]}
    assert written[0][0].stat().st_size > 10_000


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The figure of a usual plan, and its numbers."""
    path = tmp_path_factory.mktemp("figure") / "plan.png"
    return write_plan_figure(make_choice(), [make_measured()], path)


def test_the_figure_is_a_png_that_says_nothing_of_its_maker(written):
    path, _ = written
    with Image.open(path) as image:
        assert image.width >= 1800
        assert not {"Software", "Creation Time"} & set(image.text)


def test_the_numbers_beside_the_figure_are_those_drawn(written):
    plan, profile = make_choice(), make_measured()
    _, numbers = written
    assert numbers.name == "plan.figure.json"
    held = json.loads(numbers.read_text())
    assert held == json.loads(json.dumps(plan_figure_data(plan, [profile])))
    assert held["format"] == "batchwright-plan-figure/1"
    assert [c["workers"] for c in held["clusters"]] == [1, 2]
    assert held["clusters"][1]["knee"]["global_batch_size"] == 512


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(make_choice(price=None), id="no price"),
        pytest.param(make_choice(workers=(2,), knees=()), id="no knee", marks=pytest.mark.slow),
        pytest.param(
            make_choice(workers=(1, 2, 4, 8, 16, 32, 64), chosen=(64, 512)),
            id="many",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            make_choice(workers=(2,), considered=(make_candidate(2, 256),)),
            id="one candidate",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            make_choice(job=make_job(goal={"deadline": 900.0, "max_cost": 0.2, "price": 0.4})),
            id="limits",
            marks=pytest.mark.slow,
        ),
        pytest.param(make_plan(), id="digits", marks=pytest.mark.slow),
    ],
)
def test_any_plan_with_candidates_has_a_figure_and_a_page(tmp_path, plan):
    for profiles in ([], [make_measured()]):
        write_plan_figure(plan, profiles, tmp_path / "plan.png")
    assert "Time and cost of the training" in page(make_summary(plan=plan, epochs=()))


@pytest.mark.parametrize(
    ("plan", "panels"),
    [
        (make_hybrid_plan(considered=make_plan().considered), 4),
        (make_hybrid_plan(), 2),
        (make_dual_plan(), 2),
        (make_cyclic_plan(), 2),
        (make_plan(), 2),
    ],
    ids=["hybrid", "hybrid without candidates", "dual-batch", "cyclic", "plain"],
)
def test_stages_and_both_batches_are_drawn_below_time_and_cost(plan, panels):
    figure = draw_plan(plan_curves(plan), plan)
    assert len(figure.axes) == panels
    assert [axes.get_title(loc="left") for axes in figure.axes] == [*"abcd"[:panels]]
    if plan.method != "plain":
        resolution, batches = figure.axes[-2:]
        assert resolution.get_title() == "Resolution"
        assert len(batches.lines) == (1 if plan.server is None else 2)


def said(figure):
    """The title and the words of the legends."""
    return [figure.get_suptitle()] + [
        text.get_text() for one in figure.legends for text in one.get_texts()
    ]


def test_the_figure_says_of_which_resolutions_it_is_and_what_is_shaded():
    plan = make_hybrid_plan(considered=make_plan().considered)
    curves = plan_curves(plan)
    words = said(draw_plan(curves, plan))
    assert "resnet8 on digits, 16 to 32 px, 18 epochs; a, b: all epochs at 32 px" in words
    assert "stage 2 of the rate" in words
    assert "stage 2 of the rate" not in said(draw_plan(curves, make_plan()))


def test_a_panel_begins_where_its_first_curve_does_and_measured_points_above_it_are_not_named():
    points = (1e6, 1e5, 4.0, 3.0, 2.0)
    considered = tuple(
        make_candidate(1, b).model_copy(
            update={"train_seconds": Estimate(value=v, low=v, high=v), "cost": None}
        )
        for b, v in zip((2, 4, 8, 16, 32), points, strict=True)
    )
    plan = make_choice(considered=considered, knees=(), price=None)
    curves = plan_curves(plan)
    high = MeasuredPoint(2, (1e6, 1e6, 1e6), (1e6, 1e6, 1e6))
    curves = replace(curves, clusters=(replace(curves.clusters[0], measured=(high,)),))
    figure = draw_plan(curves, plan)
    for axes in figure.axes[:2]:
        assert axes.get_xlim()[0] == pytest.approx(8 / 1.15)
    assert "measured" not in said(figure)


def test_seconds_are_to_the_target_only_where_its_epochs_are_known():
    some_of_it = Estimate(value=9.0, low=8.0, high=10.0)
    for epochs, there, missing in (
        (None, "s to equal progress", "s to target"),
        (some_of_it, "s to target", "s to equal progress"),
    ):
        told = {"target_seconds": some_of_it, "epochs": epochs}
        considered = tuple(make_candidate(1, b).model_copy(update=told) for b in LOCAL_BATCHES)
        plan = make_choice(considered=considered)
        for table in (explain(plan), candidates_table(plan)):
            assert there in table
            assert missing not in table


def test_the_numbers_of_stages_are_beside_the_figure(tmp_path, undrawn):
    plan = make_hybrid_plan()
    path, numbers = write_plan_figure(plan, [], tmp_path / "plan.png")
    assert path.exists()
    held = json.loads(numbers.read_text())
    assert held["clusters"] == []
    assert [one["resolution"] for one in held["stages"]] == [16, 24, 32, 16, 24, 32]
    assert held["stages"][1]["local_batch_sizes"] == [96, 96, 96, 34]
    assert "stages" not in plan_figure_data(make_plan())


def test_a_figure_that_cannot_be_is_refused(tmp_path, undrawn):
    with pytest.raises(FileError, match=r"ends in one of \.png, \.pdf, \.svg"):
        write_plan_figure(make_choice(), [], tmp_path / "plan.jpg")
    with pytest.raises(FileError, match="holds no predictions"):
        write_plan_figure(make_plan(considered=()), [], tmp_path / "plan.png")
    with pytest.raises(FileError, match=r"nowhere.*No such file"):
        write_plan_figure(make_choice(), [], tmp_path / "nowhere" / "plan.png")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------- the text


def test_only_the_candidate_with_the_plans_batch_workers_side_and_kinds_is_chosen():
    plan = make_plan()
    assert [c.global_batch_size for c in plan.considered if is_chosen(plan, c)] == [96]
    assert not is_chosen(plan, make_prediction(96, workers=4))
    assert not is_chosen(plan, make_prediction(96, resolution=16))
    other = (KindCount(kind="other", count=2),)
    assert not is_chosen(plan, make_prediction(96, kinds=other))
    assert is_chosen(plan.model_copy(update={"kinds": other}), make_prediction(96, kinds=other))


def test_rivals_differ_in_the_batch_alone():
    assert {one.workers for one in rivals(make_choice())} == {2}
    assert len(rivals(make_choice())) == len(LOCAL_BATCHES)


def test_a_plan_is_explained_with_alternatives_knees_and_candidates_by_cluster():
    text = make_choice().explain()
    assert "or 256 samples  7 % more time: 764 s instead of 713 s" in text
    assert "knees: the smallest batch whose doubling saves at most 5.0 %" in text
    assert "360 to 620" in text
    one, two = text.split("  1 worker at 32 px\n")[1].split("  2 workers at 32 px\n")
    assert len(one.strip().splitlines()) == len(two.strip().splitlines()) == len(LOCAL_BATCHES) + 1
    (chosen,) = [line for line in text.splitlines() if line.strip().startswith("* ")]
    assert "512" in chosen
    assert "chosen, knee, frontier" in chosen
    assert "extrapolated" in two.splitlines()[-1]


def test_a_long_remark_wraps_before_it_takes_a_table_of_its_own():
    said = "goal.deadline=60: may take as long as 25 min with evaluations and all that it takes"
    plan = make_choice(considered=(make_candidate(2, 256), make_candidate(2, 512, refused=said)))
    table = explain(plan, 140).partition("2 workers at 32 px")[2]
    assert sum(line.split()[:1] == ["batch"] for line in table.splitlines()) == 1
    assert said not in table
    assert said in explain(plan)


def test_the_worth_of_an_image_is_explained_where_it_stands():
    text = make_choice().explain()
    assert "efficiency" not in text
    said = " ".join(text.split())
    assert "worth of an image: how far training on it gets, where one in a batch of 128" in said


@pytest.mark.parametrize("width", [120, 80, 60])
def test_a_plan_is_explained_on_a_narrow_terminal_without_losing_a_word(width):
    whole, text = make_choice().explain(), explain(make_choice(), width)
    assert set(text.split()) == set(whole.split())
    long = [line for line in text.splitlines() if len(line) > width]
    assert not long


def test_a_column_that_no_candidate_fills_is_left_out():
    assert "  cost  " in make_choice().explain()
    text = make_choice(price=None).explain()
    assert "  cost  " not in text
    assert "accuracy" not in text


def test_the_limit_that_a_candidate_misses_is_said():
    said = "goal.deadline=60: may take 25 min"
    considered = (make_candidate(2, 256), make_candidate(2, 512, refused=said))
    assert said in make_choice(considered=considered).explain()


def test_no_knee_and_no_straight_line_are_said():
    plan = make_choice()
    bare = plan.knees[0].model_copy(
        update={
            "global_batch_size": None,
            "low": None,
            "high": None,
            "closed_form": None,
            "kneedle": None,
        }
    )
    _, row = knee_rows(plan.model_copy(update={"knees": (bare,)}))
    assert row == ["1 worker", "32 px", "none: each doubling pays", "-", "not straight", "none"]


def test_a_plan_for_ten_thousand_workers_is_explained_on_two_screens():
    workers = (*(2**power for power in range(14)), 10_000)
    plan = make_choice(workers=workers, chosen=(10_000, 256))
    text = plan.explain()
    assert "10,000 x 256" in text
    assert "more are in the plan" in text
    assert len(text.splitlines()) < 150
    kept = kept_candidates(plan)
    assert len(kept) == MAX_ROWS
    assert any(is_chosen(plan, one) for one in kept)
    assert sum(one.workers == 10_000 for one in kept) == len(LOCAL_BATCHES)
    assert kept == tuple(one for one in plan.considered if one in kept)
    left = len(plan.considered) - MAX_ROWS
    assert f"Candidates ({left} more in plan.json)" in page(make_summary(plan=plan, epochs=()))


def test_candidates_that_may_be_as_good_are_shown_before_those_at_other_resolutions():
    """Of three resolutions the lower ones were shown, and what could have been chosen was not."""
    plan = make_plan()
    lower = [make_prediction(batch, resolution=16) for batch in range(2, 2 * MAX_ROWS, 2)]
    level = make_prediction(20, workers=1, level=True)
    other = make_prediction(22, workers=1)
    plan = plan.model_copy(update={"considered": (*lower, other, level, *plan.considered)})
    kept = kept_candidates(plan)
    assert len(kept) == MAX_ROWS
    assert {level, other, *make_plan().considered} <= set(kept)


def test_a_knee_above_the_chart_is_not_drawn():
    plan = make_choice()
    steep = make_candidate(2, 4, train_seconds=Estimate(value=1e5, low=1e5, high=1e5))
    knee = plan.knees[1].model_copy(update={"global_batch_size": 8})
    changes = {"knees": (knee,), "considered": (steep, *plan.considered)}
    text = page(make_summary(plan=plan.model_copy(update=changes), epochs=()))
    (figure,) = re.findall(
        r"<figcaption>Training time against global batch.*?</figure>", text, re.DOTALL
    )
    assert "mark star" not in figure


def test_names_cannot_act_on_the_terminal_that_shows_the_reasons():
    text = make_plan(data=make_data(name="\x1b[2Jdigits")).explain()
    assert "\\x1b[2Jdigits" in text
    assert "\x1b" not in text


def test_a_cluster_many_times_as_slow_leaves_the_others_readable():
    slow = tuple(
        make_candidate(1, b, train_seconds=Estimate(value=1e4, low=9e3, high=2e4))
        for b in LOCAL_BATCHES
    )
    plan = make_choice(
        considered=(*slow, *(one for one in make_choice().considered if one.workers > 1))
    )
    chart = batch_chart(plan_curves(plan), "seconds")
    assert chart.y.logarithmic
    (ring,) = [one for one in chart.series if one.name == "chosen" and one.points]
    assert chart.y.share(ring.points[0].y) > 0.05
    assert all(
        chart.y.low <= low <= high <= chart.y.high for b in chart.bands for _, low, high in b.edges
    )


def test_a_wide_interval_is_cut_off_at_the_top_and_takes_no_line_away():
    wide = tuple(
        make_candidate(2, b).model_copy(
            update={"train_seconds": Estimate(value=100.0, low=1.0, high=1e6)}
        )
        for b in LOCAL_BATCHES
    )
    text = page(make_summary(plan=make_choice(considered=wide, knees=()), epochs=()))
    (figure,) = re.findall(
        r"<figcaption>Training time against global batch.*?</figure>", text, re.DOTALL
    )
    (chart,) = re.findall(r'<svg class="chart".*?</svg>', figure, re.DOTALL)
    (line,) = re.findall(r'<polyline class="line blue" points="([^"]*)"', chart)
    (band,) = re.findall(r'<polygon class="band blue" points="([^"]*)"', chart)
    assert len(line.split()) == 12 * (len(LOCAL_BATCHES) - 1) + 1
    heights = [float(place.split(",")[1]) for place in band.split()]
    assert min(heights) >= 12.0


def test_memory_is_drawn_over_the_batch_with_what_was_measured_and_the_limit():
    profile, plan = make_measured(), make_plan()
    chart = memory_chart(plan, profile)
    predicted, measured, chosen = chart.series
    batches = [one.micro_batch_size for one in plan.considered if one.workers == plan.workers]
    assert [point.x for point in predicted.points] == batches
    assert len(chart.bands[0].edges) == len(batches)
    there = [one for one in profile.memory if one.workers == plan.workers]
    assert [point.y for point in measured.points] == [one.peak_bytes / 2**20 for one in there]
    assert [point.x for point in chosen.points] == [plan.stages[0].micro_batch_size]
    goal = plan.job.goal.model_copy(update={"memory": 2**26})
    limited = plan.model_copy(update={"job": plan.job.model_copy(update={"goal": goal})})
    *_, limit = memory_chart(limited, profile).series
    assert {point.y for point in limit.points} == {64.0}
    assert memory_chart(make_plan(considered=()), profile) is None
