"""Predicted accuracy over training time: one description, drawn on the page and in the figure."""

import re

import pytest

from batchwright.records import Estimate
from batchwright.reporting.data.accuracy_curves import accuracy_picture
from batchwright.reporting.data.plan_curves import plan_curves
from batchwright.reporting.pages.page_plan import accuracy_chart, choice_charts
from batchwright.reporting.render.figures import draw_plan, plan_figure_data
from clusters import make_choice
from pages import Document


def learning(plan, lost: float = 0.02, wide: float = 0.03):
    """The plan with accuracies that fall by as much whenever the batch doubles."""
    considered = []
    for one in plan.considered:
        doublings = one.global_batch_size.bit_length()
        value = 0.9 - lost * doublings
        accuracy = Estimate(value=value, low=value - wide, high=value + wide)
        considered.append(one.model_copy(update={"accuracy": accuracy}))
    return plan.model_copy(update={"considered": tuple(considered)})


def picture_of(plan):
    return accuracy_picture(plan_curves(plan))


def test_there_is_no_picture_where_nothing_tells_accuracy():
    assert picture_of(make_choice()) is None
    assert accuracy_chart(make_choice()) == ""
    assert "What is learnt" not in choice_charts(make_choice(), None)


def test_equal_accuracies_beside_a_choice_of_which_nothing_is_told_are_drawn():
    plan = learning(make_choice(), lost=0.0, wide=0.0)
    kept = plan.chosen
    plan = plan.model_copy(
        update={
            "considered": tuple(
                one.model_copy(update={"accuracy": None}) if one == kept else one
                for one in plan.considered
            )
        }
    )
    low, high = picture_of(plan).percents
    assert low < 90 < high


def test_the_legend_of_the_figure_names_the_frontier():
    legend = [
        text.get_text()
        for plan in (learning(make_choice()), make_choice())
        for one in draw_plan(plan_curves(plan), plan).legends
        for text in one.get_texts()
    ]
    assert legend.count("most in that time") == 1


def test_the_title_tells_the_epochs_that_the_times_are_of():
    plan = make_choice()
    to_target = plan.model_copy(update={"target_epochs": plan.epochs - 1})
    titles = [draw_plan(plan_curves(one), one).get_suptitle() for one in (plan, to_target)]
    assert all(f"{plan.epochs - back} epoch" in title for back, title in enumerate(titles))


def test_every_line_holds_the_candidates_of_a_cluster_that_are_inside():
    plan = learning(make_choice())
    curves, picture = plan_curves(plan), picture_of(plan)
    for cluster, line in zip(curves.clusters, picture.lines, strict=True):
        inside = [one for one in cluster.points if one.seconds[0] <= picture.seconds]
        assert [one.candidate for one in line] == inside


def test_the_frontier_is_what_can_be_had_in_the_time():
    picture = picture_of(learning(make_choice()))
    best = [one for line in picture.lines for one in line if one.best]
    every = [one for line in picture.lines for one in line]
    for one in every:
        beaten = any(
            other.seconds[0] <= one.seconds[0] and other.accuracy[0] > one.accuracy[0]
            for other in every
        )
        assert not (one.best and beaten)
    times, shares = zip(*picture.frontier, strict=True)
    assert list(times) == sorted(times)
    assert list(shares) == sorted(shares)
    assert times[-1] == picture.seconds
    assert {one.accuracy[0] for one in best} == set(shares)


def test_a_refused_candidate_is_neither_best_nor_on_the_frontier():
    plan = learning(make_choice())
    top = max(plan.considered, key=lambda one: one.accuracy.value if one.workers == 2 else 0)
    considered = tuple(
        one.model_copy(update={"refused": "too long"})
        if one.accuracy.value >= top.accuracy.value
        else one
        for one in plan.considered
    )
    picture = picture_of(plan.model_copy(update={"considered": considered}))
    refused = [one for line in picture.lines for one in line if one.candidate.refused]
    assert not any(one.best for one in refused)
    assert all(one.accuracy[0] > picture.band[1] for one in refused)


def test_the_band_is_what_the_goal_takes_for_equal():
    plan = learning(make_choice())
    goal = plan.job.goal.model_copy(update={"accuracy_tolerance": 0.03})
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"goal": goal})})
    low, high = picture_of(plan).band
    assert high - low == pytest.approx(3)
    assert "within 3 points of the best" in accuracy_chart(plan)
    assert "within 1 point of the best" in accuracy_chart(learning(make_choice()))


def test_the_chosen_candidate_is_named_and_a_wide_interval_does_not_hide_the_others():
    picture = picture_of(learning(make_choice(), wide=0.4))
    every = [one for line in picture.lines for one in line]
    (chosen,) = [one for one in every if one.candidate.chosen]
    assert chosen.named
    values = [one.accuracy[0] for one in every]
    low, high = picture.percents
    assert low <= min(values) <= max(values) <= high
    assert high - low <= 2 * max(8, max(values) - min(values))


def test_the_page_draws_points_band_steps_and_intervals():
    plan = learning(make_choice())
    text = accuracy_chart(plan)
    titles = Document(text).text("title")
    assert "2 workers, batch 512" in titles
    assert "chosen" in titles
    assert text.count('class="line thin ink"') == 2
    assert re.search(r'<text class="tick"[^>]*text-anchor="start">512</text>', text)
    assert "The most accurate in the time" in text
    assert text in choice_charts(plan, None)
    assert "What is learnt" not in choice_charts(plan, None, learning=False)


def test_the_numbers_of_the_figure_hold_accuracies():
    clusters = plan_figure_data(learning(make_choice()))["clusters"]
    assert all(point["accuracy"] for one in clusters for point in one["points"])


@pytest.mark.slow
def test_the_figure_has_the_picture_above_time_and_cost():
    plan = learning(make_choice())
    first, *others = draw_plan(plan_curves(plan), plan).axes
    assert first.get_ylabel() == "predicted accuracy (%)"
    assert [axes.get_title(loc="left") for axes in (first, *others)] == ["a", "b", "c"]
    assert "512" in [text.get_text() for text in first.texts]
    assert len(draw_plan(plan_curves(make_choice()), make_choice()).axes) == 2
