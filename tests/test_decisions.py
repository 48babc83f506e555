"""What the benchmark of decisions trains, and how it scores plans, on made-up grids."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.harness import kept_runs
from benchmarks.harness.kept_runs import Run, RunLines, read_lines
from benchmarks.harness.plans import Opened
from benchmarks.planning import shifted_rates
from benchmarks.planning.decisions import (
    BENCHMARK,
    SHIFTS,
    Candidate,
    Case,
    Decision,
    Truth,
    found_of,
    told,
    truth_of,
)
from benchmarks.planning.decisions_runs import (
    MIN_STEPS,
    OPTIMIZERS,
    RATE_SCALES,
    TASKS,
    WIDEST,
    Cell,
    beyond,
    cells_of,
    draw,
    look_cells,
    plan_of,
    wanted,
)
from benchmarks.planning.shifted_rates import usual_rates_times

from batchwright.algorithms.learning_rate import make_rule
from batchwright.records import Estimate, Job
from samples import make_data, make_network

TASK = "imagenette-resnet8"


def opened(task: str = TASK) -> Opened:
    one = TASKS[task]
    facts = make_data(train_samples=one.images, side=one.side)
    return Opened("digits", facts, make_network(name=one.network))


# ------------------------------------------------------------------------------------------ images


@pytest.mark.parametrize("task", TASKS)
def test_a_look_has_other_images_than_the_truth_and_is_judged_on_others_still(task: str) -> None:
    one = TASKS[task]
    total = {"digits": 1437, "cifar100": 50_000, "cifar100-groups": 25_000, "imagenette": 9469}
    truth = draw(one, total[one.data])
    look = draw(one, total[one.data], look=one.look_images)
    assert len(set(truth.train)) == one.images
    assert truth.held_out is None
    assert len(set(look.train)) == one.look_images
    assert look.held_out is not None
    assert len(set(look.held_out)) == one.held_out
    assert not set(look.train) & set(look.held_out)
    shared = set(truth.train) & {*look.train, *look.held_out}
    assert not shared or task == "digits"
    few = draw(one, total[one.data], look=one.look_images // 2)
    assert set(few.train) < set(look.train)
    assert few.held_out == look.held_out


# ------------------------------------------------------------------------------------------- grid


def test_batches_leave_enough_steps_and_rates_of_plans_come_first() -> None:
    assert TASKS["digits"].batches == (32, 64, 128, 256, 359)
    assert TASKS["cifar-vgg8"].batches[-1] == 2048
    cells = [cell for task in TASKS for cell in cells_of(task)]
    assert len(cells) == len(set(cells))
    for task in TASKS:
        scales = [cell.rate_scale for cell in cells_of(task)]
        assert scales == sorted(scales, key=RATE_SCALES.index)
    for cell in cells:
        assert TASKS[cell.task].images // cell.batch >= MIN_STEPS
    for one in TASKS.values():
        assert one.epochs[1] >= 4 * one.epochs[0]


def test_a_look_goes_from_a_sixteenth_of_the_samples_to_all() -> None:
    samples = {images * cell.epochs for cell, images in look_cells("cifar-vgg8")}
    assert samples == {6144, 24_576, 98_304}
    batches = {cell.batch for cell, _ in look_cells("digits")}
    assert batches == {32, 128, 256}


def test_a_cell_trains_with_a_multiple_of_the_plans_rate() -> None:
    usual, thrice = (plan_of(Cell(TASK, 64, "muon", scale, 8), 1, opened()) for scale in (1, 3))
    assert thrice.learning_rate.peak == pytest.approx(3 * usual.learning_rate.peak)
    assert (usual.update, usual.epochs, usual.job.seed) == ("muon", 8, 1)
    assert usual.stages[0].global_batch_size == 64


def test_rates_go_on_beyond_an_end_that_is_best_up_to_a_limit() -> None:
    assert beyond({1 / 3: 20.0, 1.0: 30.0, 3.0: 10.0}) is None
    assert beyond({1 / 3: 20.0, 1.0: 30.0, 3.0: 31.0}) == pytest.approx(9)
    assert beyond({1 / 3: 32.0, 1.0: 30.0, 3.0: 31.0}) == pytest.approx(1 / 9)
    assert beyond({1.0: 30.0, 3.0: 31.0, 9.0: 32.0}) == pytest.approx(WIDEST[1])
    assert beyond({9.0: 32.0, 27.0: 33.0}) is None


def test_runs_are_kept_as_lines_that_count_for_the_very_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = wanted(Cell(TASK, 64, "sgd", 1.0, 2), 0, opened())
    other = wanted(Cell(TASK, 64, "sgd", 3.0, 2), 0, opened())
    lines = tmp_path / "lines.jsonl"
    runs = RunLines(lines, tmp_path)
    assert runs.kept(one) is None
    made = Run(33.25, 1.5, (64,), noise_scale=812.0)
    runs._store(one, made)
    runs._store(other, Run(10.0, 0.0, (64,), diverged=True))
    first, second = read_lines(lines)
    assert (first["task"], first["batch"], first["optimizer"]) == (TASK, 64, "sgd")
    assert (first["accuracy"], first["noise_scale"], first["digest"]) == (33.25, 812.0, one.digest)
    assert "diverged" not in first
    assert second["diverged"]
    again = RunLines(lines, tmp_path)
    assert again.kept(one) == made
    assert again.kept(other) == Run(10.0, 0.0, (64,), diverged=True)
    assert again.kept(wanted(Cell(TASK, 64, "sgd", 1.0, 2), 1, opened())) is None
    assert again.kept(replace(one, plan=one.alike[0], alike=(one.plan,))) == made
    assert again.kept(replace(one, plan=one.alike[0], alike=())) is None
    monkeypatch.setattr(kept_runs.subprocess, "Popen", None)  # nothing is started
    again.gather([one, other], until=time.monotonic() + 60)
    again.gather([wanted(Cell(TASK, 32, "sgd", 1.0, 2), 0, opened())], until=time.monotonic())


# ------------------------------------------------------------------------------------------- truth


def made_lines(epochs: int = 8, seeds: int = 1) -> list[dict[str, object]]:
    grid = product(TASKS[TASK].batches, OPTIMIZERS, RATE_SCALES, range(seeds))
    return [
        {
            "task": TASK,
            "batch": batch,
            "optimizer": optimizer,
            "rate_scale": float(f"{scale:.6g}"),
            "rate": 0.1 * float(f"{scale:.6g}"),
            "epochs": epochs,
            "seed": seed,
            "accuracy": 50.0 + seed,
        }
        for batch, optimizer, scale, seed in grid
    ]


def test_a_truth_needs_the_whole_grid_of_seed_0_and_has_the_seeds_that_all_have() -> None:
    lines = made_lines(seeds=2)
    assert truth_of(lines, TASK, 2) is None
    assert truth_of(lines[1:], TASK, 8) is None
    truth = truth_of(lines, TASK, 8)
    assert truth is not None
    assert truth.reached[Candidate(64, "sgd")][1.0] == (50.0, 51.0)
    assert truth.rates[Candidate(64, "sgd")] == pytest.approx(0.1)
    partly = truth_of([*lines[:-1], {**lines[0], "rate_scale": 9.0}], TASK, 8)
    assert partly is not None
    assert set(map(len, partly.reached[Candidate(64, "muon")].values())) == {1}
    assert 9.0 in partly.reached[Candidate(32, "sgd")]
    extra = truth_of([*lines, {**lines[0], "rate_scale": 9.0}], TASK, 8)
    assert extra is not None
    assert 9.0 not in extra.reached[Candidate(32, "sgd")]


def test_of_two_lines_of_a_training_the_later_counts() -> None:
    lines = made_lines()
    truth = truth_of([*lines, {**lines[0], "accuracy": 60.0}], TASK, 8)
    assert truth is not None
    assert truth.reached[Candidate(32, "sgd")][1.0] == (60.0,)


A, B, C = Candidate(64, "sgd"), Candidate(256, "sgd"), Candidate(256, "muon")


def one_rate(**means: float) -> Truth:
    """Candidates that reach as much at a rate of 0.1, and less at others."""
    candidates = {"a": A, "b": B, "c": C}
    return Truth(
        {
            candidates[name]: {0.3333: (m - 8,), 1.0: (m,), 3.0: (m - 4,)}
            for name, m in means.items()
        },
        dict.fromkeys(candidates.values(), 0.1),
    )


def test_between_batches_and_rates_accuracy_is_on_a_line_over_the_logarithm() -> None:
    truth = one_rate(a=60.0, b=50.0)
    assert truth.accuracies(A, 0.1) == pytest.approx([60])
    assert truth.accuracies(A, 0.1 * 3**0.5) == pytest.approx([58])
    assert truth.accuracies(A, 100.0) == pytest.approx([56])
    assert truth.accuracies(Candidate(128, "sgd"), 0.1) == pytest.approx([55])
    assert truth.accuracies(Candidate(8, "sgd"), 0.1) == pytest.approx([60])
    assert truth.accuracies(Candidate(512, "sgd"), 0.3) == pytest.approx([46])


def test_what_is_best_is_said_by_the_other_seeds() -> None:
    lucky = {A: {1.0: (60.0, 40.0, 40.0)}, B: {1.0: (45.0, 45.0, 45.0)}}
    truth = Truth(lucky, {A: 0.1, B: 0.1})
    # Only seed 0 favours A: the two others take B for it, and with it each takes A.
    assert truth.best([A, B]) == pytest.approx((45 + 40 + 40) / 3)
    assert truth.best([B]) == pytest.approx(45)
    assert one_rate(a=60.0, b=50.0).best([A, B]) == pytest.approx(60)


# ----------------------------------------------------------------------------------------- scoring


def made_case(
    chosen: Candidate = B, rate: float = 0.1, knee: Candidate = C, trials: float = 5.0
) -> Case:
    seconds = {A: 200.0, B: 100.0, C: 105.0}

    def taken(one: Candidate, rate: float) -> Decision:
        return Decision(one, rate, seconds[one])

    return Case(
        one_rate(a=70.0, b=60.0, c=62.0),
        seconds,
        {
            A: (0.1, Estimate(value=0.69, low=0.6, high=0.75)),
            B: (0.1, Estimate(value=0.7, low=0.65, high=0.75)),
        },
        informed=taken(chosen, rate),
        knee=taken(knee, 0.1),
        trials_seconds=trials,
        shifted={1 / 3: taken(C, 0.1), 3.0: taken(B, 0.3)},
    )


def test_regret_is_against_what_is_about_as_fast() -> None:
    case = made_case()
    assert case.regret(case.informed) == pytest.approx(2)  # C, not the slower A
    assert case.regret(case.knee) == pytest.approx(0)
    slow = made_case(A)
    assert slow.regret(slow.informed) == pytest.approx(0)
    badly_tuned = made_case(B, rate=0.3)
    assert badly_tuned.regret(badly_tuned.informed) == pytest.approx(6)


def test_time_regret_is_against_what_is_as_accurate_within_a_point() -> None:
    case = made_case(A)
    assert case.time_regret(case.informed) == pytest.approx(1)
    worse = made_case(A, rate=0.3 * 3)  # it reaches 66: no other does
    assert worse.time_regret(worse.informed) == pytest.approx(1)
    as_good = made_case(C)  # B lacks 2 points
    assert as_good.time_regret(as_good.informed) == pytest.approx(1)
    poor = made_case(C, rate=0.1 / 3)  # 54 points, and B has 60
    assert poor.time_regret(poor.informed) == pytest.approx(1.05)


def test_a_predicted_accuracy_is_compared_at_the_rate_of_its_plan() -> None:
    case = replace(made_case(), predicted={A: (0.3, Estimate(value=0.66, low=0.65, high=0.67))})
    assert case.errors() == pytest.approx([0])  # 70 at the usual rate
    assert case.covered() == [1.0]


def test_figures_are_of_all_cases_and_trials_of_the_longer_trainings() -> None:
    cases = {("one", 0, 2): made_case(trials=50.0), ("one", 0, 8): made_case(A, trials=20.0)}
    figures = BENCHMARK.values(found_of(cases))
    assert tuple(figures) == tuple(one.name for one in BENCHMARK.figures)
    values = {name: figure.value for name, figure in figures.items()}
    assert values["regret_points"] == pytest.approx(1)
    assert values["worst_regret_points"] == pytest.approx(2)
    assert values["regret_points_knee"] == pytest.approx(0)
    assert values["time_regret"] == pytest.approx(1)
    assert values["accuracy_error_points"] == pytest.approx(5.5)  # 1 and 10
    assert values["accuracy_coverage"] == pytest.approx(0.5)
    assert values["accuracy_half_width_points"] == pytest.approx(6.25)
    assert values["trials_share"] == pytest.approx(0.1)
    assert values["trials_share_shorter"] == pytest.approx(0.5)
    # By length: 60 and 70 points, 62 and 56 with rates that are off; worst 70 less 56.
    assert values["shifted_rate_points"] == pytest.approx((-2 + 4 + 8 + 14) / 4)
    assert values["worst_shifted_rate_points"] == pytest.approx(14)
    assert values["shifted_rate_points_untried"] == pytest.approx((8 + 4) / 2, abs=0.01)
    assert figures["regret_points"].met
    assert not figures["accuracy_coverage"].met
    assert json.dumps(told(cases["one", 0, 2]), allow_nan=False)
    assert told(cases["one", 0, 2])["shifted"]["3"]["times_usual_rate"] == pytest.approx(3)


def test_what_rates_that_are_off_cost_is_the_mean_over_the_probes_of_a_task() -> None:
    cases = {("one", 0, 2): made_case(A), ("one", 1, 2): made_case(B), ("other", 0, 2): made_case()}
    costs = found_of(cases)["shifted_rate_points"]
    assert costs == pytest.approx([(8 - 2) / 2, (14 + 4) / 2, -2, 4])


# ------------------------------------------------------------------------------ rates that are off


def usual_rates() -> dict[str, float]:
    return {
        f"{name} {batch_norm}": make_rule(Job(), 128, 1, name, batch_norm=batch_norm).base
        for name, batch_norm in product(OPTIMIZERS, (True, False))
    }


def test_default_rates_are_off_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = usual_rates()
    assert before["muon True"] > before["muon False"]
    for factor in SHIFTS:
        with usual_rates_times(factor):
            assert usual_rates() == {
                one: pytest.approx(factor * rate) for one, rate in before.items()
            }
        assert usual_rates() == before
    seen: list[object] = []
    monkeypatch.setattr(
        shifted_rates.commands, "main", lambda: seen.extend([usual_rates(), *sys.argv[1:]])
    )
    monkeypatch.setattr(sys, "argv", ["", "3", "probe", "data=digits"])
    shifted_rates.main()
    assert seen[0] != before
    assert seen[1:] == ["probe", "data=digits"]
