"""The server's update factor of small-batch workers: held-out loss over the training, and accuracy.

A server with two batch sizes merges a small-batch worker's model w_i into its own as
(w + f w_i) / (1 + f). The update factor f is d_S / d_L, the worker's share of data over that of a
large-batch worker (`server.update_factor=ratio`, the published rule), its square root (`sqrt`), or
1 (`none`). The paper's figure 5 draws held-out losses over the training by update factor; its table
3 has two and three small-batch workers of four.

Here they train in the virtual cluster of `benchmarks.methods.dual_accuracy` with two and with three
small-batch workers of four, in 1.1 times the time. All else is as there, except that every epoch is
evaluated: CIFAR-100 at 16 px, `resnet8`, 12 epochs, asynchronous. Three seeds are paired: the same
initial weights and order of samples in all arms.

The figures, for each number of small-batch workers: loss and accuracy over all test images after
the last epoch; `ratio` minus each of the other two, in loss and accuracy after the last epoch and
in the mean loss of all epochs; each with Student's 95 % interval. The factor pays off where the
interval of the loss is below 0. All of this was fixed before a run of these arms was made (the last
epoch of those with three small-batch workers had been seen before).

--full makes 18 runs of several minutes, two at a time on a core each; --quick checks ratio and none
with three small-batch workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure, differences
from benchmarks.harness.kept_runs import Runs, accuracies_of, plain_runs
from benchmarks.methods.dual_accuracy import Keys, Runner, dual

SEEDS = range(3)
SMALL_WORKERS: Mapping[int, str] = {
    2: "two small-batch workers of four",
    3: "three small-batch workers of four",
}
EXTRA_TIME = 1.1
FACTORS: Mapping[str, str] = {"ratio": "d_S / d_L", "sqrt": "sqrt(d_S / d_L)", "none": "1"}

BENCHMARK = Benchmark(
    "update_factors",
    "Two batch sizes at once: the update factor",
    "CIFAR-100 at 16 px, `resnet8`, 12 epochs, four workers of a virtual cluster, two or three of "
    "them with the small batch, 1.1 times the time of a round; the update factor is the weight of "
    "a small-batch worker's model at the server: d_S / d_L (share of data over that of a "
    "large-batch worker), its square root, or 1; three paired seeds",
    tuple(
        Figure(f"{name}_{count}", unit, spread, f"{words}; {workers}")
        for count, workers in SMALL_WORKERS.items()
        for name, unit, spread, words in (
            *(
                one
                for factor, other in FACTORS.items()
                if factor != "ratio"
                for one in (
                    (f"loss_over_{factor}", "nats", "interval",
                     f"held-out loss with update factor d_S / d_L minus that with {other}"),
                    (f"losses_over_{factor}", "nats", "interval", "mean held-out loss of all "
                     f"epochs with update factor d_S / d_L minus that with {other}"),
                    (f"points_over_{factor}", "points", "interval",
                     f"accuracy with update factor d_S / d_L minus that with {other}"),
                )
            ),
            *(
                one
                for factor, of in FACTORS.items()
                for one in (
                    (f"loss_{factor}", "nats", "mean", f"held-out loss with update factor {of}"),
                    (f"accuracy_{factor}", "%", "mean", f"accuracy with update factor {of}"),
                )
            ),
        )
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


def arms() -> dict[str, Keys]:
    """Keys of the job by number of small-batch workers and update factor."""
    return {
        f"{factor}-{count}": {
            "dual": dual(count, EXTRA_TIME),
            "server": {"update_factor": factor},
            "evaluate_epochs": 1,
        }
        for count in reversed(SMALL_WORKERS)
        for factor in FACTORS
    }


def measure(arguments: Arguments, folder: Path) -> Found:
    """Train with all update factors and seeds."""
    runner = Runner(arguments, folder)
    if not arguments.full:
        figure = BENCHMARK["points_over_none_3"]
        return runner.check(figure, {name: arms()[name] for name in ("none-3", "ratio-3")})
    runs = runner.run(arms(), SEEDS)
    return found_of(runs), {"runs": plain_runs(runs)}


def found_of(runs: Runs) -> dict[str, list[float]]:
    """All figures, by name, from runs of all arms over the same seeds."""
    accuracies = accuracies_of(runs)
    last = {name: [one.losses[-1] for one in some] for name, some in runs.items()}
    all_epochs = {name: [fmean(one.losses) for one in some] for name, some in runs.items()}
    found: dict[str, list[float]] = {}
    for count in SMALL_WORKERS:
        for words, of in (("loss", last), ("losses", all_epochs), ("points", accuracies)):
            found |= {
                f"{words}_over_{factor}_{count}": differences(
                    of[f"ratio-{count}"], of[f"{factor}-{count}"]
                )
                for factor in ("sqrt", "none")
            }
        for factor in FACTORS:
            found[f"loss_{factor}_{count}"] = last[f"{factor}-{count}"]
            found[f"accuracy_{factor}_{count}"] = accuracies[f"{factor}-{count}"]
    return found


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
