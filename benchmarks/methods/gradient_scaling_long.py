"""Adaptive gradient scaling in longer trainings, every arm at its own best rate.

`benchmarks.methods.large_batch` trains for 15 to 160 steps and tunes no rate at the large batch.
Here trainings have 64, 256 and 1,024 steps of the large batch, and every arm has the best of a grid
of rates. The question: with which batches and numbers of steps is SGD with gradient scaling
(`ags.mode`) more accurate than SGD with the same large batch, both at their best rates?

Two tasks, 4,096 training images at 8 px of the first ten superclasses of CIFAR-100, drawn evenly
from the training set:

    groups-resnet8   resnet8, batch normalization; float32
    groups-vgg8      vgg8, no normalization; bfloat16 where the processor computes in it

The small batch is 16. The large ones are 256 (4, 16 and 64 epochs) and 64 (1, 4 and 16 epochs),
each in 4 equal parts. One worker has one thread; random crops and flips. SGD has Nesterov momentum
0.9, weight decay 5e-4 and half a cosine. A warm-up is a straight line from a tenth of the peak
rate, over a tenth of the epochs. All arms of a cell (task, large batch, steps) have equal epochs:

    small   SGD with the small batch, no warm-up
    plain   SGD with the large batch, with and without warm-up
    norm    plain with `ags.mode=norm`, base batch 16, default bounds and look-back, with and
            without warm-up
    gain    norm with `ags.mode=gain`
    muon    Muon, which a plan chooses by itself for a large batch, with the plan's own schedule

Rates. The rates of an arm's grid are multiples of 0.1 (for Muon, of the plan's own) by powers of 2.
`scaling` is none: a rule that scales the rate once gives a rate of the grid. A grid begins with
three neighbouring rates. At 64 steps the middle one is a guess: 0.1 for resnet8 and 0.05 for vgg8,
at the large batch times the square root of the ratio of batches; Muon's own. At more steps it is
the best one at a quarter of the steps. While the best rate is at an end of the grid, the next rate
beyond that end is added, up to 2^8 from the first one; so every best rate is interior. Of equally
good rates the lowest is taken. Trainings with and without warm-up have a grid each, and the better
of the two counts; at 1,024 steps only the one that was better at 256 is made. A training that ends
because its gradients stay infinite counts as guessing.

Rates are tuned with seed 10 on other images: 4,096 training images that are not among those above,
and 5,000 held out from the training set. Reported is the accuracy on all 5,000 test images after
the last epoch, with seeds 0 to 2 (the same initial weights and order of images in all arms); no
rate is chosen by it. As a single seed chooses the rates, an arm may have the neighbour of its best
rate.

`ags` is the better of norm and gain, cell by cell, by the accuracy of tuning. Differences are
paired, in points (hundredths of a share), with Student's 95 % interval. For each batch and number
of steps, the mean over both tasks is taken seed by seed; each task is given besides. An arm gains
where the interval is above 0.

Not among the arms, to save time: LARS, which `large_batch` has at its published rate; AdaScale
(`scaling=gain`); and batches with hardly any gradient noise.

--full makes the missing runs, with one process for each task (`gradient_scaling_runs`, which can be
stopped and continued): plain, norm and gain of all cells first, then muon and small; some 400 runs
of 1 to 60 s. --quick makes plain and norm at the middle rates for 64 steps of 256 of
`groups-resnet8`, once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.benchmark import COMMITS, ROOT, Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure, differences
from benchmarks.harness.kept_runs import Run, RunLines, RunLinesHere, accuracies_of, plain_runs
from benchmarks.methods.gradient_scaling_runs import (
    ARMS,
    BATCHES,
    SEEDS,
    STEPS,
    TASKS,
    Cell,
    Gathered,
    Setting,
    first_power,
)

COMPARED = ("ags", "norm", "gain", "muon", "small")  # each minus plain
WORDS = {
    "ags": "accuracy with gradient scaling (the better of `norm` and `gain`) minus SGD",
    "norm": "accuracy with `ags.mode=norm` minus SGD",
    "gain": "accuracy with `ags.mode=gain` minus SGD",
    "muon": "accuracy with Muon minus SGD",
    "small": "accuracy of SGD with batch 16 minus SGD with the large batch",
}
ORDER = tuple(product(sorted(BATCHES), STEPS))

BENCHMARK = Benchmark(
    "gradient_scaling_long",
    "Gradient scaling in longer trainings",
    "4,096 images of CIFAR-100 at 8 px in ten groups, `resnet8` and `vgg8`, base batch 16; arms "
    "have the same large batch and equal epochs, each at its best rate, tuned with another seed "
    "and on other images; three paired seeds; mean over both tasks unless one is named",
    (
        *(
            Figure(f"{arm}_over_plain_points_{batch}_{steps}", "points", "interval",
                   f"{WORDS[arm]}; batch {batch}, {steps:,} steps",
                   above=0.0 if arm == "ags" else None)
            for arm in COMPARED
            for batch, steps in ORDER
        ),
        *(
            Figure(f"ags_over_plain_points_{task}_{batch}_{steps}", "points", "interval",
                   f"{WORDS['ags']}, `{task}`; batch {batch}, {steps:,} steps", above=0.0)
            for task in TASKS
            for batch, steps in ORDER
        ),
        *(
            Figure(f"accuracy_{task}_{batch}_{steps}_{arm}", "%", "mean")
            for task in TASKS
            for batch, steps in ORDER
            for arm in ARMS
        ),
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip

Accuracies = Mapping[Cell, Mapping[str, Sequence[float]]]
"""By cell and arm, in percent, seed by seed."""


# ------------------------------------------------------------------------------------------- runs


def measure(arguments: Arguments, folder: Path) -> Found:
    """With --full make the missing runs; score the kept ones; with --quick check one cell."""
    data, keep = arguments.data, arguments.keep
    assert data is not None
    assert keep is not None
    keep.mkdir(parents=True, exist_ok=True)
    lines = {task: keep / f"{task}.jsonl" for task in TASKS}
    if arguments.full:
        _gather(lines, data)
    found: dict[Cell, dict[str, list[Run]]] = {}
    told: dict[str, Any] = {}
    commits: Counter[str] = Counter()
    for task, file in lines.items():
        runs = RunLines(file, folder)
        gathered = Gathered(task, runs, data, folder, until=0)
        for cell, arms in gathered.runs().items():
            found[cell] = arms
            rates = {arm: gathered.tuned(cell, arm).told for arm in arms if arm in ARMS}
            told[cell.title] = {"rates": rates, "runs": plain_runs(arms)}
        commits += runs.commits
    figures = found_of({cell: accuracies_of(arms) for cell, arms in found.items()})
    if not arguments.full:
        figures |= _checked(data, folder)
    return figures, {**told, COMMITS: commits}


def _checked(data: Path, folder: Path) -> dict[str, list[float]]:
    """Train plain and norm in one short cell at the middle rates, with one seed."""
    cell = Cell("groups-resnet8", BATCHES[0], STEPS[0])
    gathered = Gathered(cell.task, RunLinesHere(folder / "check.jsonl", folder), data, folder)
    plain, norm = (
        gathered.reported(cell, Setting(arm, first_power(cell, arm), warm=True), SEEDS[:1])
        for arm in ("plain", "norm")
    )
    name = f"norm_over_plain_points_{cell.batch}_{cell.steps}_check"
    return {name: [norm[0].accuracy - plain[0].accuracy]}


def _gather(lines: Mapping[str, Path], data: Path) -> None:
    """Make the missing runs in one process a task, each with one thread."""
    module = "benchmarks.methods.gradient_scaling_runs"
    processes = {
        task: subprocess.Popen(
            [sys.executable, "-m", module, task, "--data", str(data), "--lines", str(file)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for task, file in lines.items()
    }
    try:
        for task, process in processes.items():
            if code := process.wait():
                raise SystemExit(f"gathering {task} ended with exit code {code}")
    finally:
        for process in processes.values():
            process.terminate()
            process.wait()


# ---------------------------------------------------------------------------------------- figures


def found_of(found: Accuracies) -> dict[str, list[float]]:
    """All figures, by name, that the accuracies at hand allow."""
    made: dict[str, list[float]] = {}
    for batch, steps in ORDER:
        there = {task: found[cell] for task in TASKS if (cell := Cell(task, batch, steps)) in found}
        where = f"{batch}_{steps}"
        for arm in COMPARED:
            over = [differences(arms[arm], arms["plain"]) for arms in there.values() if arm in arms]
            if len(over) == len(TASKS):
                made[f"{arm}_over_plain_points_{where}"] = [
                    fmean(values) for values in zip(*over, strict=True)
                ]
        for task, arms in there.items():
            made[f"ags_over_plain_points_{task}_{where}"] = differences(arms["ags"], arms["plain"])
            made |= {
                f"accuracy_{task}_{where}_{arm}": list(arms[arm]) for arm in ARMS if arm in arms
            }
    return made


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
