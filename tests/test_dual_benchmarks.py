"""The arithmetic of the benchmarks of two batch sizes, on made-up rounds and runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.harness.kept_runs import Run
from benchmarks.harness.plans import Opened
from benchmarks.methods import dual_accuracy, dual_uneven, hybrid, hybrid_virtual, update_factors
from benchmarks.methods.dual_accuracy import (
    CHOOSING_SEEDS,
    SEEDS,
    best_of,
    compared_arms,
    first_arms,
    found_of,
    later_arms,
    plan_of,
    uniform_beside,
)
from benchmarks.methods.dual_batch import BENCHMARK, Round, rounds_found
from benchmarks.methods.served_arms import pushes_per_second

from samples import make_data, make_network

# ----------------------------------------------------------------------------------------- rounds


SAMPLES = {"large": (500, 500), "k105": (525, 475), "k110": (550, 450)}


def rounds_of(exchange: float = 0.0, **seconds: tuple[float, float]) -> dict[str, Round]:
    return {
        name: Round(both, (exchange, exchange), SAMPLES[name]) for name, both in seconds.items()
    }


def test_rounds_are_held_against_large_ones_of_the_same_turn() -> None:
    slow = rounds_of(large=(20.0, 20.0), k105=(20.8, 21.2), k110=(24.0, 24.4))
    quick = rounds_of(0.5, large=(10.0, 10.0), k105=(10.6, 10.6), k110=(12.0, 12.2))
    figures = BENCHMARK.values(rounds_found([slow, quick]))
    assert figures["round_over_large_k105"].value == pytest.approx(1.055)
    assert (figures["round_over_large_k105"].goal, figures["round_over_large_k105"].met) == (
        *(1.05, True),
    )
    assert figures["round_over_large_k110"].value == pytest.approx(1.21)
    assert figures["round_over_large_k110"].met is False
    spread = figures["finish_spread"]
    assert (spread.repeats, spread.met) == (4, True)
    assert spread.value == pytest.approx((0.4 / 24.2 + 0.2 / 12.1) / 2)
    share = figures["server_share_of_round"]
    assert (share.repeats, share.met) == (12, False)
    assert share.high == pytest.approx(0.5 / 10.6, rel=0.1)
    pace = figures["pace_beside_small_k110"]
    assert pace.value == pytest.approx(1.2 / 1.1)


@pytest.mark.slow
def test_pushes_are_counted_while_two_processes_push_and_pull() -> None:
    assert pushes_per_second(2, 0.2) > 0


# --------------------------------------------------------------------------------------- accuracy


def cifar() -> Opened:
    data = make_data(name="cifar100", train_samples=50_000, val_samples=10_000, side=32)
    return Opened("cifar100:nowhere", data, make_network())


def test_the_arms_are_the_papers_pairs() -> None:
    known = cifar()
    batches = {
        name: plan_of(keys, 0, known).stages[0].local_batch_sizes
        for name, keys in first_arms().items()
    }
    assert batches["large"] == (500,) * 4
    small = [batches[f"k105-{n}"][-1] for n in range(1, 5)] + [
        batches[f"k110-{n}"][-1] for n in range(1, 5)
    ]
    assert small == pytest.approx([83, 154, 205, 242, 38, 87, 127, 160], abs=1.01)
    assert batches["k110-1"][:3] == (500,) * 3
    hybrid = plan_of(later_arms("k105-3")["hybrid"], 0, known)
    assert {row.resolution for row in hybrid.stages} == set(dual_accuracy.SIDES)
    assert sum(row.epochs for row in hybrid.stages) == dual_accuracy.EPOCHS
    assert hybrid.stages[-1].local_batch_sizes == batches["k105-3"]


def test_where_fixed_times_differ_two_sizes_make_more_updates_in_the_time() -> None:
    plans = {name: plan_of(keys, 0, cifar()) for name, keys in dual_uneven.arms().items()}
    for extra, sizes in (("102", (500, 500, 55, 55)), ("105", (500, 500, 23, 23))):
        two, uniform = plans[f"two-{extra}"], plans[f"uniform-{extra}"]
        assert two.stages[0].local_batch_sizes == sizes
        assert len(set(uniform.stages[0].local_batch_sizes)) == 1
        times = [plan.stages[0].predicted_epoch_seconds.value for plan in (two, uniform)]
        assert times[0] == pytest.approx(times[1], rel=0.01)
        assert dual_uneven.updates_of(two) > 2 * dual_uneven.updates_of(uniform)
    runs = {name: [Run(one, 1.0, (1,)) for one in (10.0, 12.0, 14.0)] for name in plans}
    runs["two-105"] = [Run(one, 1.0, (1,)) for one in (12.0, 13.0, 18.0)]
    found = dual_uneven.BENCHMARK.values(dual_uneven.found_of(runs, dict.fromkeys(plans, 7.0)))
    assert set(found) == {one.name for one in dual_uneven.BENCHMARK.figures}
    assert found["two_over_uniform_points_105"].value == pytest.approx(7 / 3)
    assert found["two_over_uniform_points_102"].value == 0
    assert found["updates_large"].value == 7


def runs_of(**accuracies: list[float]) -> dict[str, list[Run]]:
    usual = {
        name: [30.0] * len(SEEDS if name in compared_arms("k105-3") else CHOOSING_SEEDS)
        for name in (*first_arms(), *later_arms("k105-3"))
    }
    return {
        name: [Run(one, 100.0 if name == "large" else 105.0, (500,) * 4) for one in some]
        for name, some in {**usual, **accuracies}.items()
    }


def test_the_best_is_one_of_two_sizes_and_its_control_takes_as_long() -> None:
    accuracies = {name: [30.0, 31.0] for name in first_arms()}
    accuracies |= {"k105-4": [40.0, 40.0], "k110-2": [33.0, 35.0], "k105-3": [36.0, 31.0]}
    assert best_of(accuracies) == "k110-2"
    assert uniform_beside("k110-2") == "k110-4"


def test_gains_are_paired_and_only_a_clear_one_reaches_its_goal() -> None:
    steady, wild = [33.0, 33.5, 32.5, 33.0, 33.0], [20.0, 40.0, 30.0, 25.0, 38.0]
    found = runs_of(**{"k105-3": steady, "k105-4": [35.0] * 5, "hybrid": wild})
    figures = dual_accuracy.BENCHMARK.values(found_of(found, "k105-3"))
    assert set(figures) == {one.name for one in dual_accuracy.BENCHMARK.figures}
    gain = figures["dual_accuracy_gain"]
    assert (gain.value, gain.goal, gain.met) == (pytest.approx(3.0), 0.0, True)
    assert gain.low < 3.0 < gain.high
    uniform = figures["dual_over_uniform_points"]
    assert (uniform.value, uniform.goal, uniform.met) == (pytest.approx(-2.0), None, None)
    assert figures["hybrid_accuracy_gain"].met is False
    assert figures["seconds_over_large_k105-3"].value == pytest.approx(1.05)


def test_update_factors_are_told_apart_by_loss_and_accuracy_of_the_same_seed() -> None:
    plans = {name: plan_of(keys, 0, cifar()) for name, keys in update_factors.arms().items()}
    assert {plan.job.server.update_factor for plan in plans.values()} == set(update_factors.FACTORS)
    for count in update_factors.SMALL_WORKERS:
        beside = plan_of(first_arms()[f"k110-{count}"], 0, cifar())
        batches = {
            plan.stages[0].local_batch_sizes
            for name, plan in plans.items()
            if name.endswith(f"-{count}")
        }
        assert batches == {beside.stages[0].local_batch_sizes}
    runs = {
        f"{name}-{count}": [
            Run(30 + seed + less, 1.0, (1,), losses=(4.0, 2.0 + seed - less)) for seed in range(3)
        ]
        for name, less in (("ratio", 0.0), ("sqrt", 0.1), ("none", 0.2))
        for count in update_factors.SMALL_WORKERS
    }
    found = update_factors.BENCHMARK.values(update_factors.found_of(runs))
    assert set(found) == {one.name for one in update_factors.BENCHMARK.figures}
    assert found["loss_over_none_2"].value == pytest.approx(0.2)
    assert found["losses_over_none_2"].value == pytest.approx(0.1)
    assert found["points_over_sqrt_3"].value == pytest.approx(-0.1)


# ----------------------------------------------------------------------------------------- hybrid


def test_the_hybrid_is_held_against_large_batches_and_each_half_of_the_same_seed() -> None:
    seconds = {"large": 100.0, "dual": 110.0, "cyclic": 80.0, "hybrid": 90.0}
    points = {"large": 13.0, "dual": 23.0, "cyclic": 13.5, "hybrid": 21.0}
    runs = {
        arm: [
            Run(points[arm] + seed, seconds[arm] * (1 + seed), (500, 40)) for seed in hybrid.SEEDS
        ]
        for arm in hybrid.ARMS
    }
    figures = hybrid.BENCHMARK.values(hybrid.found_of(runs))
    values = {name: one.value for name, one in figures.items()}
    assert values["hybrid_time_saved"] == pytest.approx(0.1)
    assert values["seconds_dual_over_large"] == pytest.approx(1.1)
    assert values["hybrid_accuracy_points"] == pytest.approx(8)
    assert values["hybrid_over_dual_points"] == pytest.approx(-2)
    assert values["hybrid_over_cyclic_points"] == pytest.approx(7.5)
    assert figures["hybrid_time_saved"].met
    assert figures["hybrid_accuracy_points"].met


def test_each_seed_begins_with_another_arm_of_the_hybrids_benchmark() -> None:
    known = cifar()
    plans = {name: plan_of(first_arms()["large"], 0, known) for name in hybrid.ARMS}
    wanted = hybrid.in_turns(plans, range(2))
    assert [one.title for one in wanted] == [
        *("large-0", "dual-0", "cyclic-0", "hybrid-0"),
        *("dual-1", "cyclic-1", "hybrid-1", "large-1"),
    ]
    assert [one.plan.job.seed for one in wanted] == [0] * 4 + [1] * 4


def test_the_arms_of_the_virtual_hybrid_differ_in_batches_and_resolutions_alone() -> None:
    plans = {name: plan_of(keys, 0, cifar()) for name, keys in hybrid_virtual.arms().items()}
    rates = {
        name: sorted({row.learning_rate for row in plan.stages}) for name, plan in plans.items()
    }
    assert all(one == pytest.approx(rates["large"]) for one in rates.values())
    assert len(rates["large"]) == 3
    sides = {name: sorted({row.resolution for row in plan.stages}) for name, plan in plans.items()}
    assert sides == {"large": [16], "dual": [16], "cyclic": [12, 16], "hybrid": [12, 16]}
    top = {name: plan.stages[-1].local_batch_sizes for name, plan in plans.items()}
    assert top["large"] == top["cyclic"] == (500,) * 4
    assert top["dual"] == top["hybrid"] == (500, 128, 128, 128)
