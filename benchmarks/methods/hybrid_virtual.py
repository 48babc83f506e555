"""The hybrid in a virtual cluster: time and accuracy against large batches and each half alone.

Cluster, images, epochs and times of a step are those of `benchmarks.methods.dual_accuracy`:
CIFAR-100 at 16 px, all 50,000 images, `resnet8`, 12 epochs, four virtual workers and a parameter
server (`asp`). The two batch sizes are those that were best there: three of four workers have the
small batch, in 1.1 times the time. The rate decreases in three stages (4, 2 and 1 parts of the
epochs, each with a tenth of the rate before) in all arms, which differ in nothing but:

    large     all workers with local batch 500, the paper's, at 16 px
    dual      three workers with the small batch, at 16 px
    cyclic    all with 500, each stage through 12 and 16 px (the paper's proportion)
    hybrid    the batches of `dual` through the resolutions of `cyclic`

Seeds 0 to 4 are paired: the same initial weights, the same order of samples. Accuracy is that of
the last epoch, over 10,000 held-out images; times are simulated, so they have no spread. The goal
is a gain of the hybrid over large batches whose 95 % interval is above 0. All of this was fixed
before a run was made.

--full makes 20 runs of some four minutes, two at a time on a core each; --quick checks large and
hybrid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.kept_runs import plain_runs
from benchmarks.methods.dual_accuracy import SEEDS, SIDE, SIDES, Keys, Runner, dual
from benchmarks.methods.hybrid import figures_of, found_of

SMALL_WORKERS, EXTRA_TIME = 3, 1.1

ARM_WORDS = {
    "large": "large batches at 16 px",
    "dual": "two batch sizes at 16 px",
    "cyclic": "large batches through 12 and 16 px in each stage",
    "hybrid": "`hybrid`, two batch sizes through 12 and 16 px in each stage",
}

BENCHMARK = Benchmark(
    "hybrid_virtual",
    "Two batch sizes and low resolutions first, in a virtual cluster",
    "CIFAR-100 at 16 px, `resnet8`, 12 epochs in three stages of the rate, four workers of a "
    "virtual cluster with the published times of a step, three of them with the small batch in 1.1 "
    "times the time; five paired seeds; spread of an accuracy: smallest and largest",
    figures_of(ARM_WORDS, "simulated training time"),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


def arms() -> Mapping[str, Keys]:
    """Keys of the job by arm."""
    one_size = {"method": "hybrid", "dual": dual(0, 1.0)}
    two_sizes = {"method": "hybrid", "dual": dual(SMALL_WORKERS, EXTRA_TIME)}
    one_side: Keys = {"resolutions": (SIDE,), "cycle": {"order": "fixed"}}
    both_sides: Keys = {"resolutions": SIDES}
    return {
        "large": {**one_size, **one_side},
        "dual": {**two_sizes, **one_side},
        "cyclic": {**one_size, **both_sides},
        "hybrid": {**two_sizes, **both_sides},
    }


def measure(arguments: Arguments, folder: Path) -> Found:
    """Train all arms with all seeds."""
    runner = Runner(arguments, folder)
    if not arguments.full:
        figure = BENCHMARK["hybrid_accuracy_points"]
        return runner.check(figure, {name: arms()[name] for name in ("large", "hybrid")})
    runs = runner.run(arms(), SEEDS)
    return found_of(runs), {"runs": plain_runs(runs)}


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
