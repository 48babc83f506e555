"""Cyclic progressive learning against the highest resolution throughout.

Two tasks, `resnet8`, one CPU worker, SGD with Nesterov momentum 0.9, weight decay 5e-4, random
shift or crop and flip, precision as `auto` settles it (bfloat16 where the processor computes in
it), the same in both arms. Three stages of the learning rate, 0.1, 0.01 and 0.001, take 4, 2 and 1
parts of the epochs, as in the published schedules (80, 40 and 20 of 140 epochs; 60, 30 and 15 of
105). In the arm `cyclic` every stage goes through the resolutions, low to high, in equal parts; in
`fixed` it has the highest throughout. Epochs, rates, batch, weights at the start and the order of
samples are the same.

    cifar     CIFAR-100 at 24 and 32 px, batch 128
    folder    imagenette2-160, a subset of ImageNet with 10 classes, at 88, 124 and 160 px, batch 64

`*_time_saved` is 1 - cyclic / fixed of the seconds of training: input, forward, backward, update,
without evaluation. `*_time_saved_with_evaluation` counts the evaluation after each epoch too, at
the highest resolution in both arms. Making the smaller copies of the stored images happens once for
a data set, before training, and is `*_copy_seconds`. `*_accuracy` is cyclic - fixed of the held-out
accuracy after the last epoch over paired seeds, in points; no worse means that the lower end of the
95 % interval of the mean is above -1.0.

Each training runs in a process of its own; the arms of a pair follow each other, in turn first.

    --quick    cifar: 14 epochs of 6,400 images; folder: 21 epochs of 256; 2 pairs. Accuracies are
               those of the newest kept report.
    --full     cifar: 28 epochs of 50,000 images; folder: 21 epochs of 2,560, evaluated on 1,000;
               5 pairs, seeds 0 to 4. Kept in benchmarks/results.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from batchwright.workload.sources import open_data
from benchmarks.common import (
    Arguments,
    Figure,
    Measurements,
    difference_figure,
    kept_figures,
    median_figure,
    run_benchmark,
    say,
)
from benchmarks.resolution_arms import Row, Task, Trained, job_of, train_whole

STAGE_PARTS, STAGE_RATES = (4, 2, 1), (1.0, 0.1, 0.01)
QUICK_PAIRS, FULL_SEEDS = 2, tuple(range(5))
QUICK_EPOCHS, FULL_EPOCHS = {"cifar": 14, "folder": 21}, {"cifar": 28, "folder": 21}
GOALS = {"cifar": 0.15, "folder": 0.348}
MARGIN = 1.0  # points
KEPT = ("cifar_accuracy", "folder_accuracy")
Pairs = list[dict[str, Trained]]


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("cyclic", __doc__, _measure, full_seeds=FULL_SEEDS)


def tasks(data: Path, *, full: bool) -> dict[str, Task]:
    """What is trained."""
    cifar = Task(f"cifar100:{data}", (24, 32), batch=128)
    folder = Task(f"imagefolder:{data / 'imagenette2-160'}", (88, 124, 160), batch=64)
    if full:
        return {"cifar": cifar, "folder": replace(folder, images=2560, held_out=1000)}
    return {
        "cifar": replace(cifar, images=6400, held_out=1280),
        "folder": replace(folder, images=256, held_out=64),
    }


def rows(sides: Sequence[int], epochs: int) -> dict[str, tuple[Row, ...]]:
    """The table of each arm.

    Args:
        sides: Resolutions, low to high, in pixels.
        epochs: A multiple of 7 and of the number of resolutions.
    """
    lengths = [epochs * part // sum(STAGE_PARTS) for part in STAGE_PARTS]
    if sum(lengths) != epochs or any(length % len(sides) for length in lengths):
        raise ValueError(f"{epochs} epochs do not divide into stages and {len(sides)} resolutions")
    stages = list(zip(lengths, STAGE_RATES, strict=True))
    return {
        "cyclic": tuple(
            Row(length // len(sides), side, rate) for length, rate in stages for side in sides
        ),
        "fixed": tuple(Row(length, max(sides), rate) for length, rate in stages),
    }


def figures_of(name: str, pairs: Pairs, *, full: bool) -> list[Figure]:
    """What pairs of trainings say; medians with quartiles, accuracy with its interval."""

    def saved(seconds: Callable[[Trained], float]) -> list[float]:
        return [1 - seconds(pair["cyclic"]) / seconds(pair["fixed"]) for pair in pairs]

    found = [
        median_figure(
            f"{name}_time_saved", saved(lambda one: one.training), "share", at_least=GOALS[name]
        ),
        median_figure(
            f"{name}_time_saved_with_evaluation",
            saved(lambda one: one.training + one.evaluation),
            "share",
        ),
        median_figure(f"{name}_copy_seconds", [pair["cyclic"].copying for pair in pairs], "s"),
    ]
    if full:
        points = [[100 * pair[arm].accuracy for pair in pairs] for arm in ("cyclic", "fixed")]
        found.append(difference_figure(f"{name}_accuracy", *points, "points", margin=MARGIN))
    return found


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    if arguments.data is None:
        raise SystemExit("benchmarks.cyclic needs --data DIR, see --help")
    seeds = FULL_SEEDS if arguments.full else (0,) * QUICK_PAIRS
    epochs = FULL_EPOCHS if arguments.full else QUICK_EPOCHS
    figures: list[Figure] = []
    measurements: Measurements = {}
    for name, task in tasks(arguments.data, full=arguments.full).items():
        say(f"{name}: reading images")
        open_data(job_of(task, 0))
        arms = rows(task.sides, epochs[name])
        pairs: Pairs = []
        for number, seed in enumerate(seeds):
            order = list(arms) if number % 2 == 0 else list(reversed(arms))
            pair = {
                arm: _apart(train_whole, task, arms[arm], seed, folder / f"{name}-{number}-{arm}")
                for arm in order
            }
            pairs.append(pair)
            say(
                f"{name}, pair {number + 1} of {len(seeds)}: "
                + "  ".join(map(_shown, pair.items()))
            )
        figures += figures_of(name, pairs, full=arguments.full)
        measurements[name] = [{arm: asdict(one) for arm, one in pair.items()} for pair in pairs]
    if not arguments.full:
        figures += kept_figures("cyclic", KEPT)
    return figures, measurements


def _shown(arm: tuple[str, Trained]) -> str:
    name, one = arm
    return f"{name} {one.training:.1f} s + {one.evaluation:.1f} s, accuracy {one.accuracy:.4f}"


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, with an untouched allocator."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


if __name__ == "__main__":
    main()
