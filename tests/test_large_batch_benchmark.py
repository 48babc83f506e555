"""What the benchmark of large batches compares, and the arithmetic of its figures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.harness.kept_runs import Run, accuracies_of
from benchmarks.harness.plans import Opened
from benchmarks.methods.large_batch import (
    AGS_ARM,
    BENCHMARK,
    WITHOUT_FACTORS,
    arms_of_round,
    best_of,
    found_of,
)
from benchmarks.methods.large_batch_arms import (
    AGS,
    CHOOSING_SEEDS,
    LARS_RATE,
    PARTS,
    PICKED,
    PLAIN,
    SEEDS,
    SMALL,
    SMALL_MUON,
    TASKS,
    UNTUNED,
    arms_of,
    plan_of,
    precision_of,
    wanted,
)

from batchwright.records import Plan
from samples import make_data, make_network

SGD = (*SMALL, *PLAIN, "linear-warmup", "sqrt-warmup", "lars", "lamb")


def opened(task: str) -> Opened:
    one = TASKS[task]
    facts = make_data(train_samples=one.images, side=one.side)
    return Opened("digits", facts, make_network(name=one.network))


def plans(task: str, names: tuple[str, ...] = SGD) -> dict[str, Plan]:
    arms = arms_of(TASKS[task])
    return {name: plan_of(TASKS[task], arms[name], 3, opened(task)) for name in names}


@pytest.mark.parametrize("task", TASKS)
def test_all_arms_have_the_same_epochs_and_large_batches_the_same_parts(task: str) -> None:
    for name, plan in plans(task).items():
        (stage,) = plan.stages
        assert (plan.epochs, plan.workers) == (TASKS[task].epochs, 1)
        assert plan.precision == precision_of(TASKS[task])
        small = name in SMALL
        assert stage.global_batch_size == (TASKS[task].small if small else TASKS[task].large)
        assert stage.accumulation_steps == (1 if small else PARTS)
        assert plan.job.seed == 3
        assert plan.learning_rate.decay == "cosine"
    # the last step of an epoch is no tiny one
    assert TASKS[task].images % TASKS[task].large == 0


@pytest.mark.parametrize("task", TASKS)
def test_what_gradient_scaling_is_compared_with_lacks_factors_and_nothing_else(task: str) -> None:
    found = plans(task, (AGS_ARM, WITHOUT_FACTORS))
    one, other = found[AGS_ARM], found[WITHOUT_FACTORS]
    assert one.ags is not None
    assert other.ags is None
    assert one.learning_rate == other.learning_rate
    assert [row.micro_batch_size for row in one.stages] == [
        row.micro_batch_size for row in other.stages
    ]


@pytest.mark.parametrize("task", TASKS)
def test_rates_follow_their_rules_and_warm_ups_are_where_they_are_said_to_be(task: str) -> None:
    one, found = TASKS[task], plans(task)
    ratio = one.large / one.small
    peaks = {name: plan.stages[0].learning_rate for name, plan in found.items()}
    assert [peaks[name] / one.rate for name in SMALL] == pytest.approx([0.5, 1, 2])
    assert found["small-half"].learning_rate.base == pytest.approx(one.rate / 2)
    assert peaks["unscaled"] == one.rate
    assert peaks["linear"] == pytest.approx(one.rate * ratio)
    assert peaks["linear-warmup"] == peaks["linear"]
    assert peaks["sqrt-warmup"] == pytest.approx(one.rate * ratio**0.5)
    assert peaks["lars"] == pytest.approx(LARS_RATE)
    assert peaks["lamb"] == pytest.approx(0.005 * (one.large / 512) ** 0.5)
    warm = {name for name, plan in found.items() if plan.learning_rate.warmup_epochs}
    assert warm == {"linear-warmup", "sqrt-warmup", "lars", "lamb"}
    assert found["lamb"].learning_rate.warmup_epochs == pytest.approx(one.epochs / 10)


def test_arms_with_gradient_scaling_differ_from_plain_in_nothing_else() -> None:
    pytest.importorskip("batchwright.training.step.gradient_scaling")
    found = plans("cifar-resnet8", ("unscaled", "sqrt-warmup", *AGS))
    for name in AGS:
        plan, without = found[name], found["unscaled" if name.endswith("none") else "sqrt-warmup"]
        assert plan.ags is not None
        assert plan.ags.mode == name.split("-")[1]
        assert plan.update == "sgd"
        assert plan.learning_rate == without.learning_rate
        assert plan.stages == without.stages


def test_the_rates_picked_arms_differ_by_are_a_factor_of_three_apart() -> None:
    found = plans("digits", PICKED)
    low, middle, high = (found[name].stages[0].learning_rate for name in PICKED)
    assert high / low == pytest.approx(3)
    assert middle**2 == pytest.approx(low * high)
    assert found["picked"].stages[0].accumulation_steps >= PARTS


def test_each_task_has_all_arms_and_runs_have_names_of_their_own() -> None:
    names = [list(arms_of(task)) for task in TASKS.values()]
    assert all(one == names[0] for one in names)
    assert {*SMALL, *SMALL_MUON, *UNTUNED, *AGS, *PICKED, "muon"} == set(names[0])
    assert AGS_ARM in AGS
    titles = {wanted(t, TASKS[t], arm, 1, opened(t)).title for t in TASKS for arm in SGD}
    assert len(titles) == len(TASKS) * len(SGD)
    lars = wanted("digits", TASKS["digits"], "lars", 0, opened("digits"))
    assert lars.words == (
        "benchmarks.methods.other_optimizers",
        "lars",
        f"{TASKS['digits'].rate:g}",
    )


# ---------------------------------------------------------------------------------------- figures


def accuracies(**special: list[float]) -> dict[str, dict[str, list[float]]]:
    """All tasks alike: small 50 (at double rate, with seeds that differ), plain 30."""
    usual = dict.fromkeys(arms_of(TASKS["digits"]), 20.0)
    usual |= {"small": 48.0, "small-double": 50.0, "small-muon": 60.0, "linear": 30.0}
    usual |= {"sqrt-warmup": 37.0, "muon": 58.0, "picked": 49.0, "picked-high": 48.5}
    usual |= {"picked-low": 49.5, AGS_ARM: 41.0}
    compared = {"small-double", "small-muon", "linear", "sqrt-warmup", AGS_ARM, "muon", "picked"}
    arms = {
        name: [value + s / 10 for s in (SEEDS if name in compared else CHOOSING_SEEDS)]
        for name, value in usual.items()
    }
    return {task: {**arms, **special} for task in TASKS}


def test_figures_are_paired_and_held_against_the_best_of_each_kind() -> None:
    found = accuracies()
    found["digits"] = {**found["digits"], AGS_ARM: [29.0 + seed / 10 for seed in SEEDS]}
    figures = BENCHMARK.values(found_of(found))
    assert set(figures) == {one.name for one in BENCHMARK.figures}
    over = figures["ags_over_plain_points"]
    assert (over.value, over.goal, over.repeats) == (pytest.approx(8.0), 9.0, len(SEEDS))
    assert over.met is False
    assert over.low == pytest.approx(over.high)  # all seeds say the same
    least = figures["ags_least_over_plain_points"]
    assert (least.value, least.met) == (pytest.approx(-1.0), False)
    assert figures["ags_over_best_untuned_points"].value == pytest.approx((3 * 4 - 8) / 4)
    assert figures["gap_closed"].value == pytest.approx((3 * 0.55 - 0.05) / 4)
    picked = figures["picked_gap_closed"]
    assert (picked.value, picked.goal) == (pytest.approx(0.95), 0.95)
    assert figures["picked_under_best_small_points"].value == pytest.approx(11.0)
    spread = figures["picked_rate_spread_points"]
    assert (spread.value, spread.goal, spread.met) == (pytest.approx(1.0), 2.0, True)
    assert figures["muon_over_plain_points"].value == pytest.approx(28.0)
    loses = figures["plain_loses_points_cifar-vgg8"]
    assert (loses.value, loses.met) == (pytest.approx(20.0), True)
    assert figures["accuracy_digits_small-double"].repeats == len(SEEDS)


def test_an_interval_widens_with_the_seeds_that_differ() -> None:
    wild = [31.0, 45.0, 38.0, 41.0, 50.0]
    figures = BENCHMARK.values(found_of(accuracies(**{AGS_ARM: wild})))
    over = figures["ags_over_plain_points"]
    assert over.value == pytest.approx(fmean(wild) - 30.2)
    assert over.met is True  # the goal is on the mean
    assert over.low < 9.0 < over.high


def test_later_seeds_are_for_what_differences_are_taken_of() -> None:
    both = {
        task: {name: some[:2] for name, some in arms.items()} for task, arms in accuracies().items()
    }
    assert best_of(both["digits"], SMALL) == "small-double"
    first, later = (arms_of_round("digits", both["digits"], seed) for seed in (1, 2))
    assert set(first) == set(arms_of(TASKS["digits"]))
    kept = ["small-double", "linear", AGS_ARM, "picked", "sqrt-warmup", "muon", "small-muon"]
    assert later == kept


def test_accuracies_are_those_of_the_runs() -> None:
    runs: Mapping[str, list[Run]] = {"small": [Run(91.0, 1.0, (32,))]}
    assert accuracies_of(runs) == {"small": [91.0]}


def test_the_readme_explains_every_figure_with_a_goal() -> None:
    assert all(one.words for one in BENCHMARK.figures if one.at_least is not None)
