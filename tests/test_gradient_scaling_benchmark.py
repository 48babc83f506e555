"""What the benchmark of gradient scaling in longer trainings compares, and how it tunes rates."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.harness import kept_runs
from benchmarks.harness.kept_runs import Run, RunLinesHere, Wanted
from benchmarks.harness.plans import Opened
from benchmarks.methods import gradient_scaling_runs
from benchmarks.methods.gradient_scaling_long import BENCHMARK, found_of
from benchmarks.methods.gradient_scaling_runs import (
    ARMS,
    BATCHES,
    IMAGES,
    PARTS,
    SEEDS,
    STEPS,
    TASKS,
    TUNING_SEED,
    Cell,
    Gathered,
    Setting,
    best_power,
    cells,
    first_power,
    next_power,
    plan_of,
)

from batchwright.errors import TrainingError
from batchwright.records import Plan
from batchwright.workload.host import worker_threads
from samples import make_data, make_network

CELL = Cell("groups-resnet8", 256, 256)


def opened(held_out: int = 5000) -> Opened:
    facts = make_data(train_samples=IMAGES, val_samples=held_out, side=8)
    return Opened("digits", facts, make_network(name="resnet8"))


def plans(cell: Cell) -> dict[str, Plan]:
    return {
        name: plan_of(cell, Setting(name, 1, arm.warm[0]), 3, opened())
        for name, arm in ARMS.items()
    }


@pytest.mark.parametrize("cell", list(cells("groups-resnet8")))
def test_arms_of_a_cell_have_equal_epochs_and_large_batches_equal_parts(cell: Cell) -> None:
    for name, plan in plans(cell).items():
        (stage,) = plan.stages
        assert plan.epochs == cell.epochs
        if name == "small":
            assert stage.accumulation_steps == 1
        else:
            assert (stage.global_batch_size, stage.accumulation_steps) == (cell.batch, PARTS)
            assert cell.epochs * IMAGES == cell.steps * cell.batch


def test_arms_with_factors_differ_from_plain_in_nothing_else_and_have_their_whole_range() -> None:
    found = plans(CELL)
    for mode, most in (("norm", 4.0), ("gain", 16.0)):
        plan, plain = found[mode], found["plain"]
        assert plan.ags is not None
        assert plan.ags.mode == mode
        assert (plan.learning_rate, plan.stages) == (plain.learning_rate, plain.stages)
        told = next(one for one in plan.reasons if one.choice == "gradient scaling")
        assert f"factors of 1 to {most:g}" in told.value
    assert found["plain"].ags is None
    assert found["plain"].learning_rate.warmup_start == pytest.approx(0.1)
    assert found["muon"].update == "muon"


def test_a_power_of_two_is_that_of_the_rate_for_muon_of_the_plans_own() -> None:
    sgd, muon = (
        [plan_of(CELL, Setting(arm, power, True), 0, opened()) for power in (0, 2)]
        for arm in ("norm", "muon")
    )
    assert [one.stages[0].learning_rate for one in sgd] == pytest.approx([0.1, 0.4])
    assert muon[1].stages[0].learning_rate == pytest.approx(4 * muon[0].stages[0].learning_rate)


# ----------------------------------------------------------------------------------------- tuning


def powers_tried(first: int, best: int) -> list[int]:
    """In order, where accuracy falls on both sides of the best power."""
    accuracies: dict[int, float] = {}
    while (power := next_power(accuracies, first)) is not None:
        accuracies[power] = 50.0 - abs(power - best)
    assert best_power(accuracies) == best
    return list(accuracies)


def test_a_grid_is_widened_until_its_best_rate_is_interior() -> None:
    assert powers_tried(0, 0) == [0, -1, 1]
    assert powers_tried(0, 1) == [0, -1, 1, 2]
    assert powers_tried(2, -1) == [2, 1, 3, 0, -1, -2]


def test_where_all_rates_learn_nothing_the_grid_goes_down_to_its_bound() -> None:
    accuracies: dict[int, float] = {}
    while (power := next_power(accuracies, 0)) is not None:
        accuracies[power] = 10.0
    assert min(accuracies) == -gradient_scaling_runs.FARTHEST


class MadeUp:
    """Keeps runs whose accuracy says who made them: 40 at power 3, less elsewhere."""

    def __init__(self, most: float = inf) -> None:
        self.made: dict[str, Wanted] = {}
        self._most = most

    def gather(self, wanted: list[Wanted], until: float) -> None:
        for one in wanted:
            if len(self.made) < self._most:
                self.made.setdefault(one.digest, one)

    def kept(self, one: Wanted) -> Run | None:
        if one.digest not in self.made:
            return None
        facts: Mapping[str, object] = one.facts
        warm = 1.0 if facts["warm"] or facts["arm"] == "small" else 0.0
        more = {"gain": 5.0, "norm": 2.0}.get(str(facts["arm"]), 0.0)
        return Run(40 + more + warm - abs(int(str(facts["power"])) - 3), 1.0, (1,))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """f(runs) -> a task over them, with no images."""
    monkeypatch.setattr(
        gradient_scaling_runs,
        "open_images",
        lambda *_, look=None: opened(4000 if look is None else 5000),
    )
    return lambda runs: Gathered("groups-resnet8", runs, tmp_path, tmp_path)


@pytest.mark.slow
def test_rates_are_tuned_on_one_seed_and_other_images_and_reported_on_the_others(gathered) -> None:
    runs = MadeUp()
    found = gathered(runs).runs()
    assert list(found) == list(cells("groups-resnet8"))
    for one in runs.made.values():
        tuning = one.facts["seed"] == TUNING_SEED
        assert tuning or one.facts["seed"] in SEEDS
        assert one.facts["held_out"] == (5000 if tuning else 4000)
        if not tuning:
            assert (one.facts["power"], one.facts["warm"]) == (3, one.facts["arm"] != "small")
    for arms in found.values():
        assert set(arms) == {*ARMS, "ags"}
        assert arms["ags"] == arms["gain"]


@pytest.mark.slow
def test_the_longest_trainings_have_the_better_warm_up_of_shorter_ones_alone(gathered) -> None:
    runs = MadeUp()
    gathered(runs).runs()
    cold = {
        one.facts["epochs"] * IMAGES // one.facts["batch"]
        for one in runs.made.values()
        if not one.facts["warm"] and one.facts["arm"] == "plain"
    }
    assert cold == set(STEPS[:-1])


@pytest.mark.slow
def test_without_time_what_is_there_is_told_and_the_question_comes_first(gathered) -> None:
    everything = MadeUp()
    gathered(everything).runs()
    some = gathered(MadeUp(most=len(everything.made) // 2)).runs()
    first = next(iter(some.values()))
    assert {"plain", "norm", "gain", "ags"} <= set(first)
    assert "small" not in first


def test_first_rates_of_large_batches_are_the_root_of_the_ratio_above_the_small_ones() -> None:
    for task in TASKS:
        small = first_power(Cell(task, 256, 64), "small")
        assert first_power(Cell(task, 256, 64), "plain") == small + 2
        assert first_power(Cell(task, 64, 64), "norm") == small + 1
        assert first_power(Cell(task, 256, 64), "muon") == 0


def test_a_training_that_gives_up_counts_as_guessing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(plan: Plan, *, run_folder: Path, resume: bool) -> None:
        run_folder.mkdir()
        raise TrainingError(f"the {kept_runs.DIVERGED} for 10 steps")

    monkeypatch.setattr(kept_runs, "train", fails)
    monkeypatch.setenv("BATCHWRIGHT_THREADS", "")  # set anew, and back after the test
    plan = plan_of(CELL, Setting("plain", 0, True), 0, opened())
    runs = RunLinesHere(tmp_path / "lines.jsonl", tmp_path)
    (run,) = runs.make([Wanted("plain", 0, plan)])
    assert worker_threads(1) == 1
    assert (run.diverged, run.accuracy) == (True, 100 / len(plan.data.classes))


# ---------------------------------------------------------------------------------------- figures


def test_differences_are_paired_and_of_both_tasks_only_where_both_are_there() -> None:
    def arms(over: float) -> dict[str, list[float]]:
        plain = [30.0 + seed for seed in SEEDS]
        usual = dict.fromkeys(ARMS, plain)
        return {**usual, "ags": [one + over + seed / 10 for seed, one in enumerate(plain)]}

    first, second = TASKS
    found = found_of({Cell(first, 256, 64): arms(1), Cell(second, 256, 64): arms(3)})
    values = BENCHMARK.values(found)
    both = values["ags_over_plain_points_256_64"]
    assert (both.value, both.met) == (pytest.approx(2.1), True)
    assert values[f"ags_over_plain_points_{first}_256_64"].value == pytest.approx(1.1)
    assert values["norm_over_plain_points_256_64"].value == 0
    one = found_of({Cell(first, 256, 64): arms(1)})
    assert "ags_over_plain_points_256_64" not in one
    assert f"ags_over_plain_points_{first}_256_64" in one


def test_all_cells_give_all_figures() -> None:
    usual = {name: [30.0] * len(SEEDS) for name in (*ARMS, "ags")}
    found = found_of({cell: usual for task in TASKS for cell in cells(task)})
    assert set(BENCHMARK.values(found)) == {one.name for one in BENCHMARK.figures}
    assert {cell.batch for cell in cells("groups-vgg8")} == set(BATCHES)
