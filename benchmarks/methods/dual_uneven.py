"""Two batch sizes against one smaller size where workers differ in the fixed time of a step.

Where all workers are alike, a given time allows the same number of steps, whichever of them have
the small batch (docs/methods.md); `benchmarks.methods.dual_accuracy` compares two sizes with a
uniform smaller one there. Here, two of its four virtual workers need a tenth of the others' fixed
time of a step, as where one kind of worker launches its kernels far faster, and the same time per
sample. So small batches cost less on them, and a given time allows more steps if they alone have
small batches. All else is as there: CIFAR-100 at 16 px, `resnet8`, 12 epochs, large batch 500,
asynchronous.

The arms, with the local batches that the planner gives them:

    large                      500, 500, 500, 500
    two-102, two-105           k = 1.02 and 1.05 (times the time of a round with large batches),
                               small batches on the two fast workers
    uniform-102, uniform-105   the same smaller batch on all workers, in the same time

Figures are differences over paired seeds 0 to 4, with their 95 % interval, in points; accuracies
are means with their range; updates are the steps of all workers in a round. All of this was fixed
before a run was made.

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

OVERHEADS = (1.0, 1.0, 0.1, 0.1)  # fixed time of a step of each worker, over the published one
EXTRA_TIMES = {"102": 1.02, "105": 1.05}
ARMS = ("large", "two-102", "uniform-102", "two-105", "uniform-105")
CHECKED = ("large", "two-105")

BENCHMARK = Benchmark(
    "dual_uneven",
    "Two batch sizes at once: where fixed times differ",
    "CIFAR-100 at 16 px, `resnet8`, 12 epochs, four workers of a virtual cluster with the "
    "published times of a step, but a tenth of its fixed time for two of them, which have the "
    "small batch; five paired seeds; spread of an accuracy: smallest and largest",
    (
        *(
            Figure(f"two_over_{name}_points_{extra}", "points", "interval", "accuracy with two "
                   f"batch sizes minus accuracy with {words}; {times:g} times the time of a round")
            for name, words in (
                ("uniform", "one smaller batch for all workers"),
                ("large", "large batches"),
            )
            for extra, times in EXTRA_TIMES.items()
        ),
        *(
            Figure(f"accuracy_{name}-{extra}", "%", "mean",
                   f"accuracy with {words}; {times:g} times the time of a round")
            for extra, times in EXTRA_TIMES.items()
            for name, words in (
                ("two", "two batch sizes"),
                ("uniform", "one smaller batch for all workers"),
            )
        ),
        Figure("accuracy_large", "%", "mean", "accuracy with large batches"),
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
    """Keys of the job by arm."""
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
    """Train all arms with all seeds."""
    runner = Runner(arguments, folder)
    if not arguments.full:
        figure = BENCHMARK["two_over_large_points_105"]
        return runner.check(figure, {name: arms()[name] for name in CHECKED})
    runs = runner.run(arms(), SEEDS)
    updates = {name: updates_of(plan_of(keys, 0, runner.known)) for name, keys in arms().items()}
    return found_of(runs, updates), {"runs": plain_runs(runs)}


def updates_of(plan: Plan) -> float:
    """Number of steps of all workers together in a round."""
    (stage,) = plan.stages
    pairs = zip(stage.samples_per_round, stage.local_batch_sizes, strict=True)
    return sum(samples / batch for samples, batch in pairs)


def found_of(runs: Runs, updates: Mapping[str, float]) -> dict[str, list[float]]:
    """All figures, by name, from runs of all arms over the same seeds and steps in a round."""
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
