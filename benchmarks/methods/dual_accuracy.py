"""Accuracy with two batch sizes, resolutions in cycles and both, in a virtual cluster.

CIFAR-100 at half its side, 16 px (a run at 32 px takes four times as long, and some 50 are made),
all 50,000 images, `resnet8`, bfloat16 where the processor computes in it, four virtual workers and
a parameter server; 12 epochs, so 12 rounds of each worker. Workers with the large batch have local
batch 500, the paper's, at every resolution. A step of x samples takes 0.00056607 x + 0.014041204 s,
the paper's line, whose coefficients determine the small batches, 83 to 242; the link is the one
that is assumed where a job names none. SGD, rate 0.1 at batch 128, scaled with the square root to
the local batch of 500, half a cosine; asynchronous (`asp`), rule `journal`, factor `ratio`, and a
job's defaults for the rest. Accuracy is that of the last epoch, over 10,000 held-out images; times
are simulated. Seeds are paired: the same initial weights and order of samples.

All arms warm up for a tenth of the epochs: 1.2 of 12, from half the rate of 0.198. In the paper the
baseline, large batches alone, warms up for 5 of 140 epochs from a fifth of the rate, and by its
authors' logs is 1.1 points better for it. No arm has that warm-up; docs/methods.md has its keys.

The arms:

    large            all workers with the large batch
    k105-1 ... -4    one to four workers with the small batch, k = 1.05 (the extra time that a round
                     may take); with four the batch is uniform
    k110-1 ... -4    the same with k = 1.1
    sqrt, none       the best of those with one to three small-batch workers, with that
                     `server.update_factor` in place of `ratio`
    bsp, ssp         the same best arm where every worker waits for all, or where none is more than
                     3 rounds ahead, in place of `asp`
    large-stages     all workers with the large batch, and in place of the cosine a rate in three
                     stages (4, 2 and 1 parts of the epochs, each with a tenth of the rate before);
                     the next three arms are compared with it
    cyclic           large-stages through 12 and 16 px (the paper's proportion) in each stage
    one-pass         large-stages with 12 px first and then 16 px, once over the whole training
    hybrid           cyclic with the two batch sizes of the best arm

All arms are made with seeds 0 and 1, which also choose the best one: that with the highest mean.
The arms of the first three figures (large, the best, its uniform control, large-stages and hybrid)
are made with seeds 0 to 4.

Figures are mean differences over the seeds in points (hundredths of a share), with their 95 %
interval; `benchmarks.methods.update_factors` has held-out losses by update factor.
`dual_over_uniform_points` compares with four small-batch workers at the same k: what two sizes gain
over one smaller size in the same time; it has no goal. `seconds_over_large_ARM` is of simulated
training times. As the first two seeds chose the best arm, its gain is slightly flattered, which
goal and interval do not take into account.

--full makes some 50 runs of several minutes, two at a time on a core each; --quick checks large and
k105-3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from batchwright.records import Plan
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, differences, ratios
from benchmarks.harness.kept_runs import (
    KeptRuns,
    Run,
    Runs,
    Wanted,
    accuracies_of,
    plain_runs,
)
from benchmarks.harness.plans import Opened, job_from, opened, planned, quick_precision

NETWORK, WORKERS, EPOCHS = "resnet8", 4, 12
SEEDS, CHOOSING_SEEDS = range(5), (0, 1)
LARGE_BATCH = 500
SAMPLE_SECONDS, STEP_SECONDS = 0.00056607, 0.014041204  # the paper's a and b
SIDE, SIDES = 16, (12, 16)
EXTRA_TIMES = {"k105": 1.05, "k110": 1.1}
CHECKED = ("large", "k105-3")

Keys = Mapping[str, Any]  # of a job

ARM_WORDS = {
    "large": "large batches",
    **{
        f"k{k}-{count}": f"{words} with the small batch, {times} times the time of a round"
        for k, times in (("105", "1.05"), ("110", "1.1"))
        for count, words in (
            (1, "one of four workers"),
            (2, "two of four workers"),
            (3, "three of four workers"),
            (4, "all four workers"),
        )
    },
    "sqrt": "best arm with one to three small-batch workers, `server.update_factor=sqrt`",
    "none": "best arm with one to three small-batch workers, `server.update_factor=none`",
    "bsp": "best arm with one to three small-batch workers, `server.consistency=bsp`",
    "ssp": "best arm with one to three small-batch workers, `server.consistency=ssp` (three rounds "
    "ahead at most)",
    "large-stages": "large batches, rate in three stages, 16 px",
    "cyclic": "large batches, rate in three stages, 12 and 16 px in each stage",
    "one-pass": "large batches, rate in three stages, 12 px first, then 16 px",
    "hybrid": "`hybrid`: batches of the best arm, rate in three stages, 12 and 16 px in each stage",
}

BENCHMARK = Benchmark(
    "dual_accuracy",
    "Two batch sizes at once: accuracy",
    "CIFAR-100 at 16 px, `resnet8`, 12 epochs, four workers of a virtual cluster with the "
    "published times of a step; five paired seeds for the first three figures and the arms that "
    "they compare, two for the rest; spread of an accuracy: smallest and largest",
    (
        Figure("dual_accuracy_gain", "points", "interval", "accuracy with two batch sizes (best "
               "number of small-batch workers) minus accuracy with large batches, paired seeds",
               above=0.0),
        Figure("dual_over_uniform_points", "points", "interval", "accuracy with two batch sizes "
               "minus accuracy with one smaller batch for all workers, in the same time"),
        Figure("hybrid_accuracy_gain", "points", "interval", "accuracy of `hybrid` minus accuracy "
               "with large batches at 16 px, rate in three stages in both", above=0.0),
        *(
            Figure(f"accuracy_{arm}", "%", "mean", f"accuracy: {words}")
            for arm, words in ARM_WORDS.items()
        ),
        *(
            Figure(f"seconds_over_large_{arm}", "ratio", "mean",
                   f"simulated seconds of training over those of large batches: {words}")
            for arm, words in ARM_WORDS.items()
            if arm != "large"
        ),
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


# ------------------------------------------------------------------------------------------- arms


def dual(small: int, extra: float) -> Keys:
    """The job's key `dual`: number of small-batch workers, and extra time of a round."""
    return {"small_workers": small, "extra_time": extra, "large_batches": (LARGE_BATCH,)}


def first_arms() -> dict[str, Keys]:
    """Keys of the job by arm: large batches alone, and every number of small-batch workers."""
    arms: dict[str, Keys] = {"large": {"dual": dual(0, 1.0)}}
    for name, extra in EXTRA_TIMES.items():
        arms |= {f"{name}-{small}": {"dual": dual(small, extra)} for small in range(1, WORKERS + 1)}
    return arms


def later_arms(best: str) -> dict[str, Keys]:
    """Keys of the job by arm: variants of the ``best`` first arm, and schedules of resolutions."""
    pair, large = first_arms()[best], first_arms()["large"]
    hybrid: Keys = {"method": "hybrid", "resolutions": SIDES}
    return {
        "sqrt": {**pair, "server": {"update_factor": "sqrt"}},
        "none": {**pair, "server": {"update_factor": "none"}},
        "bsp": {**pair, "server": {"consistency": "bsp"}},
        "ssp": {**pair, "server": {"consistency": "ssp", "staleness": 3}},
        "large-stages": {**large, **hybrid, "resolutions": (SIDE,), "cycle": {"order": "fixed"}},
        "cyclic": {**large, **hybrid},
        "one-pass": {**large, **hybrid, "cycle": {"order": "one-pass"}},
        "hybrid": {**pair, **hybrid},
    }


def best_of(accuracies: Mapping[str, Sequence[float]]) -> str:
    """The arm with one to three small-batch workers that has the highest mean."""
    mixed = [f"{name}-{small}" for name in EXTRA_TIMES for small in range(1, WORKERS)]
    return max(mixed, key=lambda name: fmean(accuracies[name]))


def uniform_beside(best: str) -> str:
    """The arm whose workers all have the small batch, in the same time as ``best``."""
    return f"{best.partition('-')[0]}-{WORKERS}"


def compared_arms(best: str) -> tuple[str, ...]:
    """The arms of the first three figures, which are made with all seeds."""
    return "large", best, uniform_beside(best), "large-stages", "hybrid"


def plan_of(keys: Keys, seed: int, known: Opened) -> Plan:
    """The plan of an arm from its keys of the job."""
    words = (
        f"network={NETWORK} precision={quick_precision()} device=cpu method=dual-batch "
        f"launch=virtual workers={WORKERS} global_batch={WORKERS * LARGE_BATCH} "
        f"resolutions={SIDE} epochs={EPOCHS} evaluate_epochs={EPOCHS} learning_rate=0.1 "
        f"base_batch=128 scaling=sqrt warmup_epochs={EPOCHS / 10} decay=cosine seed={seed}"
    )
    virtual = {"sample_seconds": SAMPLE_SECONDS, "step_seconds": STEP_SECONDS}
    return planned(job_from(words, **{"data": known.data, "virtual": virtual, **keys}), known)


# ------------------------------------------------------------------------------------------- runs


class Runner:
    """Makes the runs of arms and keeps their results."""

    def __init__(self, arguments: Arguments, folder: Path) -> None:
        self.known = opened(f"cifar100:{arguments.data}", NETWORK, SIDE)
        self._runs = KeptRuns(arguments.keep, folder)

    def run(self, arms: Mapping[str, Keys], seeds: Iterable[int]) -> dict[str, list[Run]]:
        """Make a run of each arm with each seed, by arm; kept runs are reused."""
        return self._runs.by_arm(
            [
                Wanted(name, seed, plan_of(keys, seed, self.known))
                for seed in seeds
                for name, keys in arms.items()
            ]
        )

    def check(self, figure: Figure, arms: Mapping[str, Keys]) -> Found:
        """Accuracy of the second of two arms minus that of the first, with seed 0 alone."""
        runs = self.run(arms, (0,))
        first, second = accuracies_of(runs).values()
        made = figure.of(differences(second, first), suffix="_check")
        return {made.name: made}, {"runs": plain_runs(runs)}


def measure(arguments: Arguments, folder: Path) -> Found:
    """Make all arms with the choosing seeds, then the compared arms with all seeds."""
    runner = Runner(arguments, folder)
    if not arguments.full:
        figure = BENCHMARK["dual_accuracy_gain"]
        return runner.check(figure, {name: first_arms()[name] for name in CHECKED})
    runs = runner.run(first_arms(), CHOOSING_SEEDS)
    best = best_of(accuracies_of(runs))
    say(f"the best with two batch sizes: {best}")
    arms = {**first_arms(), **later_arms(best)}
    runs |= runner.run({name: arms[name] for name in compared_arms(best)}, SEEDS)
    runs |= runner.run({name: arms[name] for name in arms if name not in runs}, CHOOSING_SEEDS)
    return found_of(runs, best), {"best": best, "runs": plain_runs(runs)}


def found_of(runs: Runs, best: str) -> dict[str, list[float]]:
    """All figures, by name, from runs of all arms over the same seeds."""
    accuracies = accuracies_of(runs)
    seconds = {name: [one.seconds for one in some] for name, some in runs.items()}
    return {
        "dual_accuracy_gain": differences(accuracies[best], accuracies["large"]),
        "dual_over_uniform_points": differences(accuracies[best], accuracies[uniform_beside(best)]),
        "hybrid_accuracy_gain": differences(accuracies["hybrid"], accuracies["large-stages"]),
        **{f"accuracy_{name}": some for name, some in accuracies.items()},
        **{
            f"seconds_over_large_{name}": ratios(some, seconds["large"][: len(some)])
            for name, some in seconds.items()
            if name != "large"
        },
    }


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
