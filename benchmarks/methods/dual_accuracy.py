"""Accuracy with two batch sizes, resolutions in cycles and both, in a virtual cluster.

CIFAR-100 at half its side, 16 px (a run at 32 px takes four times as long, and some 50 are made),
all 50,000 images, `resnet8`, bfloat16 where the processor computes in it, four virtual workers and
a parameter server; 12 epochs, so 12 rounds of each worker; local batch 500 (the paper's) of
large-batch workers at every resolution; a step of x samples takes 0.00056607 x + 0.014041204 s (the
paper's line, whose ratio makes its small batches: 83 to 242), over the link that is assumed where a
job states none. SGD, rate 0.1 at batch 128 and sqrt scaling to the local batch of 500, a tenth of
the epochs warm-up, half a cosine; asynchronous (`asp`), rule `journal`, factor `ratio`, and the
rest as a job has it by default. Accuracy is of the last epoch, over 10,000 held-out images; times
are simulated. Seeds are paired: the same first weights and order of samples.

The arms:

    large            all workers with the large batch
    k105-1 ... -4    k = 1.05 with one to four small-batch workers; with four the batch is uniform
    k110-1 ... -4    k = 1.1
    sqrt, none       the best of those with one to three small-batch workers, other update factor
    bsp, ssp         the same, all waiting for all; none more than 3 rounds ahead
    large-stages     all large, the rate in three stages (4, 2 and 1 parts of the epochs, each a
                     tenth of the one before) in place of the cosine: what the next three are held
                     against
    cyclic           the same through 12 and 16 px (the paper's proportion) in each stage
    one-pass         the same, once from 12 to 16 px over the whole training
    hybrid           `cyclic` with the two batch sizes of the best

All arms are made with seeds 0 and 1, which also choose the best: the one with the highest mean.
Those that the first three figures are about (large, the best, its control, large-stages and
hybrid) are made with seeds 0 to 4.

The figures, in points (hundredths of a share), mean difference over the seeds and its 95 %
interval:

    dual_accuracy_gain         the best with one to three small-batch workers, less large
    dual_over_uniform_points   the same less four small-batch workers at the same k: what two sizes
                               gain over one smaller size in the same time; without a goal
    hybrid_accuracy_gain       hybrid less large-stages
    accuracy_ARM               of each arm, mean and range
    seconds_over_large_ARM     simulated training time of each arm over large's, mean and range

The first two seeds chose the best, so its gain is a little flattered; goal and interval know
nothing of that.

--full measures everything and keeps the report in benchmarks/results: some 50 runs of several
minutes, two at a time on a core each. --keep DIR keeps each finished run there, and goes on from
what is there. --quick copies the figures from the newest kept report, and runs large and k105-3
with seed 0 again as a check. Without the CIFAR-100 folder nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from batchwright.planning.planner import plan_without_profile
from batchwright.records import DataFacts, Job, NetworkFacts, Plan
from batchwright.workflows.prepare_job import resolve
from batchwright.workload.data.sources import open_data
from batchwright.workload.task import build_network, network_facts
from benchmarks.harness.common import (
    Arguments,
    Figure,
    difference_figure,
    kept_figures,
    mean_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.kept_runs import KeptRuns, Run, Wanted, quick_precision

NETWORK, WORKERS, EPOCHS = "resnet8", 4, 12
SEEDS, CHOOSING_SEEDS = tuple(range(5)), (0, 1)
LARGE_BATCH = 500
SAMPLE_SECONDS, STEP_SECONDS = 0.00056607, 0.014041204  # the paper's a and b
SIDE, SIDES = 16, (12, 16)
EXTRA_TIMES = {"k105": 1.05, "k110": 1.1}
CHECKED = ("large", "k105-3")

Keys = Mapping[str, Any]  # of a job


# ------------------------------------------------------------------------------------------- arms


def dual(small: int, extra: float) -> Keys:
    """Keys of two batch sizes."""
    return {"small_workers": small, "extra_time": extra, "large_batches": (LARGE_BATCH,)}


def first_arms() -> dict[str, Keys]:
    """Large batches alone, and with every number of small-batch workers."""
    arms: dict[str, Keys] = {"large": {"dual": dual(0, 1.0)}}
    for name, extra in EXTRA_TIMES.items():
        arms |= {f"{name}-{small}": {"dual": dual(small, extra)} for small in range(1, WORKERS + 1)}
    return arms


def later_arms(best: str) -> dict[str, Keys]:
    """What is tried with the ``best`` of the first, and the schedules of resolutions."""
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
    """The arm with small batches alone that takes as long."""
    return f"{best.partition('-')[0]}-{WORKERS}"


def compared_arms(best: str) -> tuple[str, ...]:
    """The arms that differences are taken of."""
    return "large", best, uniform_beside(best), "large-stages", "hybrid"


def plan_of(keys: Keys, seed: int, data: Path, facts: DataFacts, network: NetworkFacts) -> Plan:
    """The plan of an arm.

    Args:
        keys: Of the arm.
        seed: Of weights, order and augmentation.
        data: Holds ``cifar-100-python/``.
        facts: Of these data.
        network: Of the network.
    """
    job = Job.model_validate(
        {
            "data": f"cifar100:{data}",
            "network": NETWORK,
            "precision": quick_precision(),
            "device": "cpu",
            "method": "dual-batch",
            "launch": "virtual",
            "workers": WORKERS,
            "global_batch": WORKERS * LARGE_BATCH,
            "resolutions": (SIDE,),
            "epochs": EPOCHS,
            "evaluate_epochs": EPOCHS,
            "learning_rate": 0.1,
            "base_batch": 128,
            "scaling": "sqrt",
            "warmup_epochs": EPOCHS / 10,
            "decay": "cosine",
            "seed": seed,
            "virtual": {"sample_seconds": SAMPLE_SECONDS, "step_seconds": STEP_SECONDS},
            **keys,
        }
    )
    return plan_without_profile(resolve(job, facts), facts, network)


# ------------------------------------------------------------------------------------------- runs


class Runner:
    """Makes the runs of arms.

    Args:
        data: Holds ``cifar-100-python/``.
        keep: Takes a file for each finished run.
        folder: Takes run folders.
    """

    def __init__(self, data: Path, keep: Path, folder: Path) -> None:
        self._data, self._runs = data, KeptRuns(keep, folder)
        self._facts = open_data(Job(data=f"cifar100:{data}")).facts
        network = build_network(NETWORK, classes=len(self._facts.classes), side=SIDE)
        self._network = network_facts(NETWORK, network, SIDE)

    def plan(self, keys: Keys, seed: int) -> Plan:
        """The plan of an arm."""
        return plan_of(keys, seed, self._data, self._facts, self._network)

    def run(self, arms: Mapping[str, Keys], seeds: Iterable[int]) -> dict[str, list[Run]]:
        """By arm, a run for each seed; what is kept is not run again."""
        wanted = [
            Wanted(name, seed, self.plan(keys, seed))
            for seed in seeds
            for name, keys in arms.items()
        ]
        found: dict[str, list[Run]] = {name: [] for name in arms}
        for one, run in zip(wanted, self._runs.make(wanted), strict=True):
            found[one.name].append(run)
        return found


# ---------------------------------------------------------------------------------------- figures


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("dual_accuracy", __doc__, _measure, full_seeds=SEEDS)


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], dict[str, Any]]:
    if arguments.data is None:
        say("accuracy: it needs the CIFAR-100 folder")
        return [], {}
    runner = Runner(arguments.data, arguments.keep or folder / "kept", folder)
    if not arguments.full:
        return _checked(runner)
    runs = runner.run(first_arms(), CHOOSING_SEEDS)
    best = best_of(_accuracies(runs))
    say(f"the best with two batch sizes: {best}")
    arms = {**first_arms(), **later_arms(best)}
    runs |= runner.run({name: arms[name] for name in compared_arms(best)}, SEEDS)
    runs |= runner.run({name: arms[name] for name in arms if name not in runs}, CHOOSING_SEEDS)
    measurements = {
        "best": best,
        "runs": {name: [one.__dict__ for one in some] for name, some in runs.items()},
    }
    return accuracy_figures(runs, best), measurements


def _checked(runner: Runner) -> tuple[list[Figure], dict[str, Any]]:
    arms = {name: first_arms()[name] for name in CHECKED}
    runs = runner.run(arms, (0,))
    large, other = (_accuracies(runs)[name] for name in CHECKED)
    gain = difference_figure("dual_accuracy_gain_check", other, large, "points", margin=0.0)
    kept = kept_figures("dual_accuracy", names_of_figures())
    return [*kept, gain], {
        "runs": {name: [one.__dict__ for one in some] for name, some in runs.items()}
    }


def names_of_figures() -> list[str]:
    """All that a full run gives."""
    arms = (*first_arms(), *later_arms("k105-3"))
    return [
        "dual_accuracy_gain",
        "dual_over_uniform_points",
        "hybrid_accuracy_gain",
        *(f"accuracy_{name}" for name in arms),
        *(f"seconds_over_large_{name}" for name in arms if name != "large"),
    ]


def accuracy_figures(runs: Mapping[str, Sequence[Run]], best: str) -> list[Figure]:
    """The figures, from the runs of all arms over the same seeds."""
    accuracies = _accuracies(runs)

    def gain(name: str, arm: str, reference: str) -> Figure:
        points = accuracies[arm], accuracies[reference]
        figure = difference_figure(name, *points, "points", margin=0.0)
        return replace(figure, goal=0.0) if figure.goal is not None else figure

    uniform = gain("dual_over_uniform_points", best, uniform_beside(best))
    seconds = {name: [one.seconds for one in some] for name, some in runs.items()}
    return [
        gain("dual_accuracy_gain", best, "large"),
        replace(uniform, goal=None, met=None),
        gain("hybrid_accuracy_gain", "hybrid", "large-stages"),
        *(mean_figure(f"accuracy_{name}", some, "%") for name, some in accuracies.items()),
        *(
            mean_figure(
                f"seconds_over_large_{name}",
                [one / large for one, large in zip(some, seconds["large"], strict=False)],
                "ratio",
            )
            for name, some in seconds.items()
            if name != "large"
        ),
    ]


def _accuracies(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[float]]:
    return {name: [one.accuracy for one in some] for name, some in runs.items()}


if __name__ == "__main__":
    main()
