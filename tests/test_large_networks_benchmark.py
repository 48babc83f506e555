"""The arithmetic of the benchmark of large networks, on made-up runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.planning.large_networks import BENCHMARK, NETWORKS, found_of

from batchwright.records import Estimate
from samples import make_epoch, make_plan, make_summary


def ran(seconds, peak):
    """A run of three epochs, 10 s and 1,000 bytes predicted."""
    (stage,) = make_plan().stages
    told = {
        "predicted_epoch_seconds": Estimate(value=10.0, low=9.0, high=11.0),
        "predicted_bytes": Estimate(value=1000.0, low=900.0, high=1100.0),
    }
    plan = make_plan(stages=(stage.model_copy(update=told),))
    first, *later = (
        make_epoch(number, training_seconds=one) for number, one in enumerate((99.0, *seconds))
    )
    largest = later[0].workers[0].model_copy(update={"peak_bytes": peak})
    later[0] = later[0].model_copy(update={"workers": (largest, *later[0].workers[1:])})
    return make_summary(plan=plan, epochs=(first, *later))


def test_the_first_epoch_does_not_count_and_errors_are_relative_to_what_was_measured():
    found = found_of({"alexnet": ran((12.0, 13.0), 800), "vgg11": ran((8.0, 8.0), 1000)})
    assert found["epoch_over_predicted_alexnet"] == pytest.approx([1.25])
    assert found["large_epoch_error"] == pytest.approx([0.2, 0.25])
    assert found["large_memory_error"] == pytest.approx([0.25, 0.0])


def test_a_full_run_gives_the_named_figures():
    found = found_of({name: ran((10.0, 10.0), 1000) for name in NETWORKS})
    assert set(BENCHMARK.values(found)) == {one.name for one in BENCHMARK.figures}
