"""The batches of the look at a batch that follows the gradient noise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.planning.decisions_runs import TASKS
from benchmarks.tools.growing_batch import BATCHES, FIRST, LEAST_STEPS, factors_of, plan_of, table

from test_decisions import opened

IMAGENETTE = "imagenette-resnet8"


def test_a_batch_follows_the_noise_in_powers_of_two_up_to_its_room_and_never_back() -> None:
    noise = [100.0, None, 210.0, 150.0, 420.0, 900.0, 5000.0]
    assert factors_of("follow", 8, 7, noise) == [1, 1, 1, 2, 2, 4, 8]
    assert factors_of("follow-root", 2, 7, noise) == [1, 1, 1, 2, 2, 2, 2]
    assert factors_of("fixed", 8, 8, []) == factors_of("fixed-root", 8, 8, [])
    assert factors_of("fixed", 8, 8, []) == [1, 1, 1, 1, 2, 2, 4, 4]
    assert factors_of("double", 8, 2, noise) == [2, 2]
    assert factors_of("base", 8, 2, noise) == [1, 1]


@pytest.mark.parametrize("arm", ["follow", "follow-root"])
def test_rows_follow_the_noise_and_leave_an_epoch_its_steps(arm: str) -> None:
    noise = [100.0, 200.0, 900.0, 900.0, 900.0, 900.0, 900.0, 900.0]
    made = plan_of((IMAGENETTE, "sgd"), arm, 11, opened(), noise)
    rows = [(row.epochs, row.global_batch_size) for row in made.stages]
    assert rows == [(2, 32), (1, 64), (5, 128)]
    assert TASKS[IMAGENETTE].look_images // rows[-1][1] >= LEAST_STEPS
    assert {row.micro_batch_size for row in made.stages} == {16}
    ratio = made.stages[-1].learning_rate / made.stages[0].learning_rate
    assert ratio == pytest.approx(2 if arm == "follow-root" else 1)


def test_twice_the_batch_from_the_start_has_its_plans_rate_and_the_same_micro_batches() -> None:
    base, double = (
        plan_of((IMAGENETTE, "sgd"), arm, 11, opened(), ()) for arm in ("base", "double")
    )
    assert [one.stages[0].global_batch_size for one in (base, double)] == [32, 64]
    assert double.stages[0].micro_batch_size == base.stages[0].micro_batch_size
    assert double.learning_rate.peak == pytest.approx(2**0.5 * base.learning_rate.peak)


def test_an_arm_pays_for_less_time_at_the_same_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {pair: {32: 2.0, 64: 1.5, 128: 1.2} for pair in BATCHES}
    lines = [
        {
            "arm": arm,
            "pair": [name, "sgd", 11],
            "batches": batches,
            "accuracy": accuracy,
            "noise": [100.0, 400.0, 400.0, 400.0],
        }
        for name in ("groups-resnet8", IMAGENETTE)
        for arm, batches, accuracy in (
            ("base", [32, 32, 32, 32], 60.0),
            ("follow", [32, 32, 64, 64], 59.9),
            ("fixed", [32, 32, 64, 64], 59.0 if name == IMAGENETTE else 60.0),
        )
    ]
    table(FIRST, lines, seconds)
    follow, fixed = capsys.readouterr().err.splitlines()
    assert follow == "follow, 2 pairs: -0.10 (0.00) points, worst -0.10, 0.875: pays"
    assert fixed == "fixed, 2 pairs: -0.50 (0.50) points, worst -1.00, 0.875: does not pay"


def test_a_batch_that_never_grew_counts_as_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {pair: {32: 2.0, 64: 1.5} for pair in BATCHES}
    lines = [
        {"arm": arm, "pair": [IMAGENETTE, "sgd", seed], "batches": batches, "accuracy": accuracy}
        | {"noise": [100.0, later, later]}
        for arm, seed, batches, accuracy, later in (
            ("base", 11, [32, 32, 32], 60.0, 250.0),
            ("follow", 11, [32, 32, 64], 59.0, 250.0),
            ("base", 12, [32, 32, 32], 60.0, 150.0),
        )
    ]
    table(FIRST, lines, seconds)
    (follow,) = capsys.readouterr().err.splitlines()
    assert follow.startswith("follow, 2 pairs: -0.50")
