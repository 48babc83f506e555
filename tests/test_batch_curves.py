"""The arithmetic of the benchmark of curves against the batch, on made-up curves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.planning.batch_curves import BENCHMARK, NETWORKS, Curve, Point, found_of


def curve(accuracy: float | None = 0.5) -> Curve:
    """Steps of 1 ms and 10 microseconds a sample, predicted; measured 10 and 20 % longer."""
    points = tuple(
        Point(
            batch,
            0.001 + 1e-5 * batch,
            1000 * (0.001 / batch + 1e-5),
            0.01,
            accuracy and accuracy - batch / 10_000,
        )
        for batch in (128, 512, 2048)
    )
    visits = {one.batch: (1.1 * one.step_seconds, 1.2 * one.step_seconds) for one in points}
    return Curve(points, points[1], points[0], visits)


def test_ratios_are_of_seconds_of_an_epoch_and_measured_visit_by_visit() -> None:
    found = found_of({"vgg8": curve()})
    least = 0.001 / 2048 + 1e-5
    assert found["knee_over_least"] == pytest.approx([(0.001 / 512 + 1e-5) / least])
    assert found["knee_over_fastest"] == [0.25]
    assert found["speedup_over_128"] == pytest.approx([(0.001 / 128 + 1e-5) / least])
    assert found["speedup_over_128_vgg8"] == pytest.approx(found["speedup_over_128"] * 2)
    assert found["accuracy_lost_points"] == pytest.approx([19.2])
    assert found["curve_error"] == pytest.approx([1 - 1 / 1.1, 1 - 1 / 1.2] * 3)


def test_all_networks_with_trials_give_all_figures_and_without_all_but_accuracy() -> None:
    names = {one.name for one in BENCHMARK.figures}
    assert set(BENCHMARK.values(found_of({name: curve() for name in NETWORKS}))) == names
    untold = set(BENCHMARK.values(found_of({name: curve(None) for name in NETWORKS})))
    assert names - untold == {"accuracy_lost_points"}


def test_a_figure_of_all_networks_is_the_largest_and_20_times_as_quick_is_a_goal() -> None:
    found = found_of({name: curve() for name in NETWORKS})
    value = BENCHMARK.values({**found, "speedup_over_128": [1.5, 21.0]})["speedup_over_128"]
    assert (value.low, value.value, value.met) == (1.5, 21.0, True)
