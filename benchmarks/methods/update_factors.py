"""The server's update factor of small-batch workers: accuracy and held-out loss.

A server of two batch sizes merges a small-batch worker's model with the weight f of its update
factor, as (w + f w_i) / (1 + f): d_S / d_L, its share of data over a large-batch worker's
(`server.update_factor=ratio`, the published rule), the square root of that (`sqrt`), or 1 (`none`).
The paper's figure 5 draws held-out losses over the training by update factor.

The virtual cluster of `benchmarks.methods.dual_accuracy` with the two batch sizes that were best
there: of four workers three have the small batch, in 1.1 times the time. All else is as there:
CIFAR-100 at 16 px, `resnet8`, 12 epochs, asynchronous. Three seeds, paired: the same first weights
and order of samples in all arms.

Figures: accuracy and loss over all test images after the last epoch, and the loss of `ratio` less
that of the other two, with Student's 95 % interval. The factor pays where that interval is below
0. All of it was fixed before a run was made.

--full makes 9 runs of several minutes, two at a time on a core each; --quick checks ratio and none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure, differences
from benchmarks.harness.kept_runs import Runs, accuracies_of, plain_runs
from benchmarks.methods.dual_accuracy import Keys, Runner, dual

SEEDS = range(3)
SMALL_WORKERS, EXTRA_TIME = 3, 1.1
FACTORS: Mapping[str, str] = {"ratio": "d_S / d_L", "sqrt": "its square root", "none": "1"}

BENCHMARK = Benchmark(
    "update_factors",
    "Two batch sizes at once: the update factor",
    "CIFAR-100 at 16 px, `resnet8`, 12 epochs, four workers of a virtual cluster, three of them "
    "with the small batch, 1.1 times the time; three paired seeds",
    (
        *(
            Figure(f"loss_over_{factor}", "nats", "interval", "held-out loss with d_S / d_L less "
                   f"that with {FACTORS[factor]}")
            for factor in ("sqrt", "none")
        ),
        *(
            Figure(f"points_over_{factor}", "points", "interval", "accuracy with d_S / d_L less "
                   f"that with {FACTORS[factor]}")
            for factor in ("sqrt", "none")
        ),
        *(
            Figure(f"loss_{factor}", "nats", "mean", f"held-out loss, update factor {words}")
            for factor, words in FACTORS.items()
        ),
        *(
            Figure(f"accuracy_{factor}", "%", "mean", f"accuracy, update factor {words}")
            for factor, words in FACTORS.items()
        ),
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


def arms() -> dict[str, Keys]:
    """Keys of the job by update factor."""
    sizes = {"dual": dual(SMALL_WORKERS, EXTRA_TIME)}
    return {factor: {**sizes, "server": {"update_factor": factor}} for factor in FACTORS}


def measure(arguments: Arguments, folder: Path) -> Found:
    """All update factors with all seeds."""
    runner = Runner(arguments, folder)
    if not arguments.full:
        figure = BENCHMARK["points_over_none"]
        return runner.check(figure, {name: arms()[name] for name in ("none", "ratio")})
    runs = runner.run(arms(), SEEDS)
    return found_of(runs), {"runs": plain_runs(runs)}


def found_of(runs: Runs) -> dict[str, list[float]]:
    """What the runs say."""
    accuracies = accuracies_of(runs)
    losses = {name: [one.loss for one in some if one.loss] for name, some in runs.items()}
    return {
        **{f"loss_{name}": some for name, some in losses.items()},
        **{f"accuracy_{name}": some for name, some in accuracies.items()},
        **{
            f"{words}_over_{name}": differences(of["ratio"], of[name])
            for name in ("sqrt", "none")
            for words, of in (("loss", losses), ("points", accuracies))
        },
    }


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
