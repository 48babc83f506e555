"""Two batch sizes against one smaller size where a step's fixed time differs from worker to worker.

Where all workers are alike, a given time is enough for as many steps in all whichever of them have
the small batch (docs/methods.md), and `benchmarks.methods.dual_accuracy` holds two sizes against a
uniform smaller one. Here two of its four virtual workers spend a tenth of the others' fixed time on
a step, as where one kind launches its kernels far quicker, and are as fast per sample. So small
batches cost less on them, and the same time is enough for more steps if they alone have them. All
else is as there: CIFAR-100 at 16 px, `resnet8`, 12 epochs, large batch 500, asynchronous.

The arms, with the local batches that the planner gives them:

    large                      500, 500, 500, 500
    two-102, two-105           k = 1.02 and 1.05, small batches on the two quick workers
    uniform-102, uniform-105   all workers the same smaller batch, in the same time

The figures are differences over seeds 0 to 4, paired, with their 95 % interval, in points;
accuracies are means with their range, updates the steps of all workers in a round. All of it was
fixed before a run was made.

--full makes 25 runs of some five minutes, two at a time on a core each; --quick checks large and
two-105.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchwright.records import Plan
from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure, differences
from benchmarks.harness.kept_runs import Runs, accuracies_of, plain_runs
from benchmarks.methods.dual_accuracy import (
    SAMPLE_SECONDS,
    SEEDS,
    STEP_SECONDS,
    WORKERS,
    Keys,
    Runner,
    dual,
    plan_of,
)

OVERHEADS = (1.0, 1.0, 0.1, 0.1)
EXTRA_TIMES = {"102": 1.02, "105": 1.05}
ARMS = ("large", "two-102", "uniform-102", "two-105", "uniform-105")
CHECKED = ("large", "two-105")

BENCHMARK = Benchmark(
    "dual_uneven",
    "Two batch sizes at once: where fixed times differ",
    "The same, where two of the four workers have a tenth of the fixed time of a step",
    (
        Figure("two_over_uniform_points_102", "points", "interval", "accuracy with two batch "
               "sizes, the small one where steps cost a tenth, less one smaller batch for all, in "
               "1.02 times the time"),
        Figure("two_over_uniform_points_105", "points", "interval",
               "the same in 1.05 times the time"),
        Figure("two_over_large_points_102", "points", "interval",
               "two sizes less the large batch alone, 1.02 times the time"),
        Figure("two_over_large_points_105", "points", "interval",
               "the same in 1.05 times the time"),
        Figure("accuracy_two-102", "%", "mean", "accuracy with two sizes, 1.02 times the time"),
        Figure("accuracy_uniform-102", "%", "mean",
               "with one smaller batch for all, 1.02 times the time"),
        Figure("accuracy_two-105", "%", "mean", "with two sizes, 1.05 times the time"),
        Figure("accuracy_uniform-105", "%", "mean",
               "with one smaller batch for all, 1.05 times the time"),
        Figure("accuracy_large", "%", "mean", "with large batches alone"),
        *(
            Figure(f"updates_{arm}", "steps", "mean", f"steps of all workers in a round, `{arm}`")
            for arm in ARMS
        ),
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


def arms() -> dict[str, Keys]:
    """All of them."""
    virtual = {
        "sample_seconds": SAMPLE_SECONDS,
        "step_seconds": STEP_SECONDS,
        "overheads": OVERHEADS,
    }
    found: dict[str, Keys] = {"large": {"dual": dual(0, 1.0)}}
    for name, extra in EXTRA_TIMES.items():
        found[f"two-{name}"] = {"dual": dual(OVERHEADS.count(min(OVERHEADS)), extra)}
        found[f"uniform-{name}"] = {"dual": dual(WORKERS, extra)}
    return {name: {**keys, "virtual": virtual} for name, keys in found.items()}


def measure(arguments: Arguments, folder: Path) -> Found:
    """All arms with all seeds."""
    runner = Runner(arguments, folder)
    if not arguments.full:
        figure = BENCHMARK["two_over_large_points_105"]
        return runner.check(figure, {name: arms()[name] for name in CHECKED})
    runs = runner.run(arms(), SEEDS)
    updates = {name: updates_of(plan_of(keys, 0, runner.known)) for name, keys in arms().items()}
    return found_of(runs, updates), {"runs": plain_runs(runs)}


def updates_of(plan: Plan) -> float:
    """Steps of all workers in a round."""
    (stage,) = plan.stages
    pairs = zip(stage.samples_per_round, stage.local_batch_sizes, strict=True)
    return sum(samples / batch for samples, batch in pairs)


def found_of(runs: Runs, updates: Mapping[str, float]) -> dict[str, list[float]]:
    """What the runs of all arms over the same seeds say, and their steps in a round."""
    accuracies = accuracies_of(runs)
    found = {}
    for name in EXTRA_TIMES:
        for figure, other in (("uniform", f"uniform-{name}"), ("large", "large")):
            gains = differences(accuracies[f"two-{name}"], accuracies[other])
            found[f"two_over_{figure}_points_{name}"] = gains
    found |= {f"accuracy_{name}": some for name, some in accuracies.items()}
    return found | {f"updates_{name}": [count] for name, count in updates.items()}


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
