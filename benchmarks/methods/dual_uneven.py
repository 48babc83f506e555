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

The figures are differences over seeds 0 to 4, paired, with their 95 % interval, in points. All of
it was fixed before a run was made:

    two_over_uniform_points_K    two sizes less the uniform one at k = K
    two_over_large_points_K      less large batches alone
    accuracy_ARM                 mean and range
    updates_ARM                  steps of all workers in a round

--full measures everything and keeps the report in benchmarks/results: 25 runs of some five minutes,
two at a time on a core each. --keep DIR keeps each finished run there, and goes on from what is
there. --quick copies the figures from the newest kept report, and runs large and two-105 with seed
0 again as a check. Without the CIFAR-100 folder nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.records import Plan
from benchmarks.harness.common import (
    Arguments,
    Figure,
    interval_figure,
    kept_figures,
    mean_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.kept_runs import Run
from benchmarks.methods.dual_accuracy import (
    SAMPLE_SECONDS,
    SEEDS,
    STEP_SECONDS,
    WORKERS,
    Keys,
    Runner,
    dual,
)

OVERHEADS = (1.0, 1.0, 0.1, 0.1)
EXTRA_TIMES = {"102": 1.02, "105": 1.05}
CHECKED = ("large", "two-105")


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


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("dual_uneven", __doc__, _measure, full_seeds=SEEDS)


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], dict[str, Any]]:
    if arguments.data is None:
        say("accuracy: it needs the CIFAR-100 folder")
        return [], {}
    runner = Runner(arguments.data, arguments.keep or folder / "kept", folder)
    if not arguments.full:
        checked = {name: arms()[name] for name in CHECKED}
        runs = runner.run(checked, (0,))
        large, two = ([one.accuracy for one in runs[name]] for name in CHECKED)
        gain = interval_figure("two_over_large_check", [two[0] - large[0]], "points")
        return [*kept_figures("dual_uneven", names_of_figures()), gain], _as_values(runs)
    runs = runner.run(arms(), SEEDS)
    updates = {name: updates_of(runner.plan(keys, 0)) for name, keys in arms().items()}
    return figures_of(runs, updates), _as_values(runs)


def updates_of(plan: Plan) -> float:
    """Steps of all workers in a round."""
    (stage,) = plan.stages
    pairs = zip(stage.samples_per_round, stage.local_batch_sizes, strict=True)
    return sum(samples / batch for samples, batch in pairs)


def figures_of(runs: Mapping[str, Sequence[Run]], updates: Mapping[str, float]) -> list[Figure]:
    """The figures, from the runs of all arms over the same seeds, and their steps in a round."""
    accuracies = {name: [one.accuracy for one in some] for name, some in runs.items()}

    def gain(name: str, arm: str, reference: str) -> Figure:
        pairs = zip(accuracies[arm], accuracies[reference], strict=True)
        return interval_figure(name, [one - other for one, other in pairs], "points")

    return [
        *(
            gain(f"two_over_uniform_points_{name}", f"two-{name}", f"uniform-{name}")
            for name in EXTRA_TIMES
        ),
        *(gain(f"two_over_large_points_{name}", f"two-{name}", "large") for name in EXTRA_TIMES),
        *(mean_figure(f"accuracy_{name}", some, "%") for name, some in accuracies.items()),
        *(mean_figure(f"updates_{name}", [count], "steps") for name, count in updates.items()),
    ]


def names_of_figures() -> list[str]:
    """All that a full run gives."""
    return [
        *(f"two_over_uniform_points_{name}" for name in EXTRA_TIMES),
        *(f"two_over_large_points_{name}" for name in EXTRA_TIMES),
        *(f"{what}_{name}" for what in ("accuracy", "updates") for name in arms()),
    ]


def _as_values(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    return {"runs": {name: [one.__dict__ for one in some] for name, some in runs.items()}}


if __name__ == "__main__":
    main()
