"""The arithmetic of the benchmarks of two batch sizes, on made-up rounds and runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks import dual_accuracy, dual_batch
from benchmarks.dual_accuracy import (
    SEEDS,
    accuracy_figures,
    best_of,
    first_arms,
    later_arms,
    names_of_figures,
    plan_of,
    uniform_beside,
)
from benchmarks.dual_batch import counted, finish_spreads, round_figures
from benchmarks.kept_runs import Run

from batchwright.records import RoundRecord
from samples import make_data, make_network, make_summary


def make_round(worker: int, number: int, seconds: float, exchange: float = 0.0) -> RoundRecord:
    return RoundRecord(
        worker=worker,
        number=number,
        epoch=number // 2,
        resolution=32,
        local_batch_size=500,
        samples=25_000,
        steps=50,
        update_factor=1.0,
        loss=None,
        start=0.0,
        compute_seconds=0.75 * (seconds - exchange),
        exchange_seconds=exchange,
        wait_seconds=0.25 * (seconds - exchange),
        evaluation_seconds=9.0,
    )


def rounds_of(*pairs: tuple[float, float], exchange: float = 0.0) -> list[RoundRecord]:
    return [
        make_round(worker, 2 * index + worker, seconds, exchange)
        for index, both in enumerate(pairs)
        for worker, seconds in enumerate(both)
    ]


# ----------------------------------------------------------------------------------------- rounds


def test_the_first_and_the_last_round_of_each_worker_do_not_count() -> None:
    late = rounds_of((30.0, 40.0), (10.0, 11.0), (12.0, 13.0), (3.0, 4.0))
    shuffled = [late[index] for index in (3, 0, 5, 7, 1, 4, 2, 6)]
    kept = counted(make_summary(rounds=tuple(shuffled)))
    assert [(one.worker, dual_batch.seconds_of(one)) for one in kept] == [
        *((0, 10.0), (0, 12.0)),
        *((1, 11.0), (1, 13.0)),
    ]


def test_a_spread_is_over_rounds_of_the_same_number() -> None:
    rounds = [*rounds_of((10.0, 11.0), (12.0, 12.0)), make_round(0, 9, 99.0)]
    assert finish_spreads(rounds) == [pytest.approx(1 / 10.5), 0.0]


def test_rounds_are_held_against_large_ones_of_the_same_turn() -> None:
    slow = {
        "large": rounds_of((20.0, 20.0)),
        "k105": rounds_of((21.0, 21.0)),
        "k110": rounds_of((24.0, 24.4), exchange=1.0),
    }
    quick = {
        "large": rounds_of((10.0, 10.0)),
        "k105": rounds_of((10.6, 10.6)),
        "k110": rounds_of((12.0, 12.2), exchange=0.5),
    }
    figures = {one.name: one for one in round_figures([slow, quick])}
    assert figures["round_over_large_k105"].value == pytest.approx(1.055)
    assert (figures["round_over_large_k105"].goal, figures["round_over_large_k105"].met) == (
        *(1.05, True),
    )
    assert figures["round_over_large_k110"].value == pytest.approx(1.21)
    assert figures["round_over_large_k110"].met is False
    spread = figures["finish_spread"]
    assert (spread.repeats, spread.met) == (4, True)
    assert spread.value == pytest.approx((0 + 0.4 / 24.2) / 2)
    share = figures["server_share_of_round"]
    assert (share.repeats, share.value, share.met) == (12, 0.0, True)
    assert share.high > 0


# --------------------------------------------------------------------------------------- accuracy


def test_the_arms_are_the_papers_pairs() -> None:
    data = make_data(name="cifar100", train_samples=50_000, val_samples=10_000, side=32)
    network = make_network()
    batches = {
        name: plan_of(keys, 0, Path("nowhere"), data, network).stages[0].local_batch_sizes
        for name, keys in first_arms().items()
    }
    assert batches["large"] == (500,) * 4
    small = [batches[f"k105-{n}"][-1] for n in range(1, 5)] + [
        batches[f"k110-{n}"][-1] for n in range(1, 5)
    ]
    assert small == pytest.approx([83, 154, 205, 242, 38, 87, 127, 160], abs=1.01)
    assert batches["k110-1"][:3] == (500,) * 3
    hybrid = plan_of(later_arms("k105-3")["hybrid"], 0, Path("nowhere"), data, network)
    assert {row.resolution for row in hybrid.stages} == {24, 32}
    assert sum(row.epochs for row in hybrid.stages) == dual_accuracy.EPOCHS
    assert hybrid.stages[-1].local_batch_sizes == batches["k105-3"]


def runs_of(**accuracies: list[float]) -> dict[str, list[Run]]:
    usual = {name: [30.0] * len(SEEDS) for name in (*first_arms(), *later_arms("k105-3"))}
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
    figures = {one.name: one for one in accuracy_figures(found, "k105-3")}
    assert set(figures) == set(names_of_figures())
    gain = figures["dual_accuracy_gain"]
    assert (gain.value, gain.goal, gain.met) == (pytest.approx(3.0), 0.0, True)
    assert gain.low < 3.0 < gain.high
    uniform = figures["dual_over_uniform_points"]
    assert (uniform.value, uniform.goal, uniform.met) == (pytest.approx(-2.0), None, None)
    assert figures["hybrid_accuracy_gain"].met is False
    assert figures["seconds_over_large_k105-3"].value == pytest.approx(1.05)
