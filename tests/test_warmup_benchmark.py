"""The arithmetic of the warm-up benchmark, on made-up sweeps and images."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.methods import scaling_long, warmup_long
from benchmarks.methods.warmup import (
    BATCHES,
    BENCHMARK,
    EPOCHS,
    GRIDS,
    LARGE,
    SEEDS,
    TRAIN_IMAGES,
    batches_found,
    job_of,
    warmups_found,
)

from batchwright.algorithms.learning_rate import make_rule
from batchwright.workflows.sweep.gathering import settings_of
from batchwright.workflows.sweep.grid import cells_of, read_grid
from sweeps import make_cell, make_sweep


def swept(name, accuracy):
    """A benchmark's sweep with accuracy(values, seed)."""
    keys = read_grid(job_of(Path("x")), GRIDS[name])
    cells = tuple(
        make_cell(cell.values, cell.seed, [0.1, accuracy(cell.values, cell.seed)])
        for cell in cells_of(job_of(Path("x")), keys, SEEDS[name])
    )
    return make_sweep(keys=keys, cells=cells, seeds=len(SEEDS[name]), settings=settings_of(cells))


def test_rates_are_the_posters():
    job = job_of(Path("x"))
    rates = [make_rule(job, batch, job.epochs, "sgd").peak for batch in LARGE]
    assert rates == pytest.approx([0.75, 3.0])


def test_the_best_warm_up_is_told_in_the_posters_epochs_with_those_as_good():
    best = {LARGE[0]: 1.0, LARGE[1]: 2.0}

    def accuracy(values, seed):
        batch, warmup = values
        return 0.5 - 0.02 * abs(warmup - best[batch]) + 0.03 * seed

    figures = BENCHMARK.values(warmups_found(swept("warmup", accuracy), BENCHMARK, EPOCHS))
    small, large = (figures[f"warmup_best_epochs_{batch}"] for batch in LARGE)
    assert (small.value, small.low, small.high) == (5, 0, 10)
    assert (large.value, large.low, large.high, large.repeats) == (10, 5, 10, 5)
    gain = figures[f"warmup_gain_points_{LARGE[1]}"]
    assert gain.value == pytest.approx(4.0)
    assert (gain.goal, gain.met, gain.repeats) == (None, None, 5)


def test_scaling_is_compared_within_each_batch_over_paired_seeds():
    def accuracy(values, seed):
        return 0.3 + 0.01 * seed + (0.02 if values[1] == "linear" else 0.0)

    figures = BENCHMARK.values(batches_found(swept("batch", accuracy), BATCHES))
    for batch in BATCHES:
        one = figures[f"scaled_over_unscaled_points_{batch}"]
        assert (one.value, one.low) == pytest.approx((2.0, 2.0))
        assert figures[f"accuracy_none_{batch}"].value == pytest.approx(31.0)


def test_a_full_run_gives_the_named_figures():
    def accuracy(values, seed):
        return 0.5 + 0.01 * seed

    warmups = warmups_found(swept("warmup", accuracy), BENCHMARK, EPOCHS)
    found = warmups | batches_found(swept("batch", accuracy), BATCHES)
    assert set(BENCHMARK.values(found)) == {one.name for one in BENCHMARK.figures}


def test_the_long_trainings_have_a_thousand_steps_and_the_posters_rates_and_warm_ups():
    job = warmup_long.job_at(Path("x"))
    rates = [make_rule(job, batch, job.epochs, "sgd").peak for batch in warmup_long.BATCHES]
    assert rates == pytest.approx([0.75, 3.0])
    steps = -(-TRAIN_IMAGES // warmup_long.BATCHES[1]) * job.epochs
    assert 1000 <= steps <= 1010
    shares = [warmup / job.epochs for warmup in warmup_long.WARMUPS]
    assert shares == pytest.approx([warmup / EPOCHS for warmup in (0.0, 1.0, 2.0, 4.0)], abs=1e-4)
    grid = read_grid(job, {"global_batch": warmup_long.BATCHES, "warmup_epochs": shares})
    cells = [
        make_cell(cell.values, cell.seed, [0.1, 0.3])
        for cell in cells_of(job, grid, warmup_long.SEEDS)
    ]
    sweep = make_sweep(keys=grid, cells=cells, seeds=3, settings=settings_of(cells))
    found = warmups_found(sweep, warmup_long.BENCHMARK, warmup_long.EPOCHS)
    named = {one.name for one in warmup_long.BENCHMARK.figures}
    assert set(warmup_long.BENCHMARK.values(found)) == named


def test_the_rule_for_the_rate_is_compared_at_the_batches_of_the_long_trainings():
    grid = read_grid(
        warmup_long.job_at(Path("x")),
        {"global_batch": warmup_long.BATCHES, "scaling": ("none", "linear")},
    )
    job = warmup_long.job_at(Path("x"))
    cells = [
        make_cell(cell.values, cell.seed, [0.1, 0.32 if cell.values[1] == "linear" else 0.3])
        for cell in cells_of(job, grid, scaling_long.SEEDS)
    ]
    sweep = make_sweep(keys=grid, cells=cells, seeds=3, settings=settings_of(cells))
    found = scaling_long.BENCHMARK.values(batches_found(sweep, warmup_long.BATCHES))
    assert set(found) == {one.name for one in scaling_long.BENCHMARK.figures}
    assert found["scaled_over_unscaled_points_960"].value == pytest.approx(2.0)
