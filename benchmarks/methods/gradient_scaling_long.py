"""Adaptive gradient scaling in longer trainings, every arm at its own best rate.

`benchmarks.methods.large_batch` has 15 to 160 steps and no rate is tuned at the large batch. Here
lengths are 64, 256 and 1,024 steps of the large batch, and every arm has the best of a grid of
rates. The question: where, by steps and batch, is SGD with gradient scaling (`ags.mode`) more
accurate than SGD with the same large batch, both at their best?

Two tasks, 4,096 training images at 8 px of the first ten superclasses of CIFAR-100, drawn evenly
from the training set:

    groups-resnet8   resnet8, batch normalization; float32
    groups-vgg8      vgg8, no normalization; bfloat16 where the processor computes in it

Small batch 16; large ones 256 (4, 16 and 64 epochs) and 64 (1, 4 and 16 epochs), each in 4 equal
parts. One worker with one thread, random crops and flips. SGD has Nesterov momentum 0.9, decay
5e-4, half a cosine. A warm-up is a line from a tenth of the peak over a tenth of the epochs. Arms
of a cell (task, batch, steps) have equal epochs:

    small   SGD with the small batch, no warm-up
    plain   SGD with the large batch, with and without warm-up
    norm    the same with `ags.mode=norm`, base batch 16, bounds and look-back as by default, with
            and without warm-up
    gain    the same with `ags.mode=gain`
    muon    Muon, which a plan takes by itself for a large batch, its schedule as a plan has it

Rates. Each arm's rates (for Muon the plan's own) differ by factors of 2. `scaling` is none: any
rule that scales the rate once is a rate of the grid. A grid begins with three rates, the middle one
at 64 steps a guess (0.1 for resnet8, 0.05 for vgg8, at the large batch times the root of the ratio
of batches; Muon's own), at more steps the best one of a quarter of the steps. While the best one is
at an end, the rate beyond that end is added, up to 2^8 from where the grid began; so every best
rate is interior. Of equal ones the lowest is taken. With and without warm-up are two grids, of
which the better counts; at 1,024 steps only that which was better at 256 is made. A training that
ends because its gradients stay infinite counts as guessing.

Rates are tuned with seed 10 on other images: 4,096 training images that are not among those above,
and 5,000 held out from the training set. What is reported is of seeds 0 to 2 (the same first
weights and order of images in all arms), accuracy on all 5,000 test images after the last epoch. No
rate is chosen by it. As rates are chosen by one seed, an arm may stand at the neighbour of its best
rate.

`ags` is the better of norm and gain, cell by cell, by the accuracy that tuning saw. Differences are
paired, in points (hundredths of a share), with Student's 95 % interval; for each batch and number
of steps the mean over both tasks is taken seed by seed, and each task is given besides. A gain is
an interval above 0.

Not among the arms: LARS, which `large_batch` has at its published rate, for the sake of the time;
AdaScale (`scaling=gain`); batches whose noise is all but gone.

--full gathers what is not there yet, one process a task (`gradient_scaling_runs`, which can be
stopped and gone on with): plain, norm and gain of all cells first, then muon and small; some 400
runs of 1 to 60 s. --quick makes plain and norm at the
middle rates, 64 steps of 256, `groups-resnet8`, once.
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

COMPARED = ("ags", "norm", "gain", "muon", "small")  # each less plain
WORDS = {
    "ags": "test accuracy with gradient scaling less that of SGD with the same large batch, both "
    "at their best rates",
    "norm": "`ags.mode=norm`: the same",
    "gain": "`ags.mode=gain`: the same",
    "muon": "Muon less SGD with the same large batch, both at their best rates",
    "small": "SGD with batch 16 less SGD with the large batch",
}
ORDER = tuple(product(sorted(BATCHES), STEPS))


def _where(batch: int, steps: int, first: str) -> str:
    """Words of a row: in full in the first one of a kind."""
    place = f"batch {batch}, {steps:,} steps"
    return f"{first}; {place}" if (batch, steps) == ORDER[0] else place


BENCHMARK = Benchmark(
    "gradient_scaling_long",
    "Gradient scaling in longer trainings",
    "4,096 images of CIFAR-100 at 8 px in ten groups, `resnet8` and `vgg8`, base batch 16, equal "
    "epochs, every arm at the best interior rate (other seed, other images), three paired seeds; "
    "mean over both tasks unless one is named",
    (
        *(
            Figure(f"{arm}_over_plain_points_{batch}_{steps}", "points", "interval",
                   _where(batch, steps, WORDS[arm]), above=0.0 if arm == "ags" else None)
            for arm in COMPARED
            for batch, steps in ORDER
        ),
        *(
            Figure(f"ags_over_plain_points_{task}_{batch}_{steps}", "points", "interval",
                   _where(batch, steps, f"`{task}`: gradient scaling less SGD"), above=0.0)
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
    """Gather what is not there, and score; with --quick score what is there, and check."""
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
    """One short cell at the middle rates, with one seed."""
    cell = Cell("groups-resnet8", BATCHES[0], STEPS[0])
    gathered = Gathered(cell.task, RunLinesHere(folder / "check.jsonl", folder), data, folder)
    plain, norm = (
        gathered.reported(cell, Setting(arm, first_power(cell, arm), warm=True), SEEDS[:1])
        for arm in ("plain", "norm")
    )
    name = f"norm_over_plain_points_{cell.batch}_{cell.steps}_check"
    return {name: [norm[0].accuracy - plain[0].accuracy]}


def _gather(lines: Mapping[str, Path], data: Path) -> None:
    """One process a task, each with one thread, until all have ended."""
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
    """What the arms that are there say."""
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
