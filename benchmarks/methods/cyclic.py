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
a data set, before training, and is `*_copy_seconds`. Each training has a process of its own with
all cores; the arms of a pair follow each other, in turn first; medians over the pairs, quartiles as
spread. What counts is the time of a step at each resolution, so few images do: 14 epochs of 3,200
(cifar) and 21 of 256 (folder); 2 pairs with --quick, 4 with --full.

`*_accuracy` is cyclic - fixed of the held-out accuracy after the last epoch over paired seeds 0 to
4, in points; no worse means that the lower end of the 95 % interval of the mean is above -1.0.
cifar trains 14 epochs of 20,480 images there, and folder 21 epochs of 2,560 at half of each
resolution (44, 62 and 80 px), a quarter of the work; all held-out images are evaluated. These
runs are made two at a time on a core each, and their time says nothing.

--full measures all and is kept in benchmarks/results; --keep DIR keeps finished runs, and goes on
from what is there. --quick repeats the accuracies of the newest kept report.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from batchwright.workload.data.sources import open_data
from benchmarks.harness.common import (
    Arguments,
    Figure,
    Measurements,
    difference_figure,
    kept_figures,
    mean_figure,
    median_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.kept_runs import KeptRuns, Run, Wanted
from benchmarks.harness.smaller import smaller_cifar100, smaller_folder
from benchmarks.methods.resolution_arms import Row, Task, Trained, job_of, plan_of, train_whole

STAGE_PARTS, STAGE_RATES = (4, 2, 1), (1.0, 0.1, 0.01)
QUICK_PAIRS, FULL_PAIRS, SEEDS = 2, 4, tuple(range(5))
EPOCHS = {"cifar": 14, "folder": 21}
ARMS = ("cyclic", "fixed")
GOALS = {"cifar": 0.15, "folder": 0.348}
MARGIN = 1.0  # points
KEPT = tuple(
    f"{name}_accuracy{arm}" for name in GOALS for arm in ("", *(f"_{arm}" for arm in ARMS))
)
Pairs = list[dict[str, Trained]]


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("cyclic", __doc__, _measure, full_seeds=SEEDS)


def timed_tasks(data: Path) -> dict[str, Task]:
    """What is trained for its time."""
    return {
        "cifar": Task(f"cifar100:{data}", (24, 32), batch=128, images=3200, held_out=640),
        "folder": Task(
            f"imagefolder:{data / 'imagenette2-160'}",
            (88, 124, 160),
            batch=64,
            images=256,
            held_out=64,
        ),
    }


def judged_tasks(data: Path, folder: Path) -> dict[str, Task]:
    """What is trained for its accuracy: copies of the data with fewer training images.

    Args:
        data: Holds the originals.
        folder: Takes the copies.
    """
    cifar = smaller_cifar100(data, 20_480, folder / "cifar100-20480")
    images = smaller_folder(data / "imagenette2-160", 2560, folder / "imagenette-2560")
    return {
        "cifar": Task(f"cifar100:{cifar}", (24, 32), batch=128),
        "folder": Task(f"imagefolder:{images}", (44, 62, 80), batch=64),
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


def time_figures(name: str, pairs: Pairs) -> list[Figure]:
    """What pairs of trainings say of time; medians with quartiles."""

    def saved(seconds: Callable[[Trained], float]) -> list[float]:
        return [1 - seconds(pair["cyclic"]) / seconds(pair["fixed"]) for pair in pairs]

    return [
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


def accuracy_figures(name: str, runs: Mapping[str, Sequence[Run]]) -> list[Figure]:
    """What runs of both arms over the same seeds say of accuracy."""
    cyclic, fixed = ([run.accuracy for run in runs[arm]] for arm in ARMS)
    return [
        difference_figure(f"{name}_accuracy", cyclic, fixed, "points", margin=MARGIN),
        mean_figure(f"{name}_accuracy_cyclic", cyclic, "%"),
        mean_figure(f"{name}_accuracy_fixed", fixed, "%"),
    ]


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    if arguments.data is None:
        raise SystemExit("benchmarks.methods.cyclic needs --data DIR, see --help")
    figures: list[Figure] = []
    measurements: Measurements = {}
    for name, task in timed_tasks(arguments.data).items():
        say(f"{name}: reading images")
        open_data(job_of(task, 0))
        pairs = _timed(
            *(name, task, FULL_PAIRS if arguments.full else QUICK_PAIRS),
            *(arguments.keep or folder / "kept", folder),
        )
        figures += time_figures(name, pairs)
        measurements[name] = [{arm: asdict(one) for arm, one in pair.items()} for pair in pairs]
    if not arguments.full:
        return [*figures, *kept_figures("cyclic", KEPT)], measurements
    for name, runs in _judged(arguments.data, arguments.keep or folder / "kept", folder).items():
        figures += accuracy_figures(name, runs)
        measurements[f"{name}_accuracy"] = {
            arm: [asdict(run) for run in some] for arm, some in runs.items()
        }
    return figures, measurements


def _timed(name: str, task: Task, count: int, keep: Path, folder: Path) -> Pairs:
    """So many pairs of trainings, one after the other; those in ``keep`` are not made again."""
    arms = rows(task.sides, EPOCHS[name])
    made_by = repr((replace(task, data=name), arms))
    keep.mkdir(parents=True, exist_ok=True)
    pairs: Pairs = []
    for number in range(count):
        file = keep / f"{name}-pair-{number}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if kept.get("made by") == made_by:
            pairs.append({arm: Trained(**kept[arm]) for arm in ARMS})
            continue
        pair = {
            arm: _apart(train_whole, task, arms[arm], 0, folder / f"{name}-{number}-{arm}")
            for arm in (ARMS if number % 2 == 0 else reversed(ARMS))
        }
        pairs.append(pair)
        plain = {"made by": made_by, **{arm: asdict(one) for arm, one in pair.items()}}
        file.write_text(json.dumps(plain) + "\n", encoding="utf-8")
        say(f"{name}, pair {number + 1} of {count}: " + "  ".join(map(_shown, pair.items())))
    return pairs


def _judged(data: Path, keep: Path, folder: Path) -> dict[str, dict[str, list[Run]]]:
    """By task and arm a run for each seed."""
    wanted: list[tuple[str, str, Wanted]] = []
    tasks = judged_tasks(data, folder)
    opened = {name: open_data(job_of(task, 0)) for name, task in tasks.items()}
    for seed in SEEDS:
        for name, task in tasks.items():
            table = rows(task.sides, EPOCHS[name])
            for arm in ARMS:
                count = opened[name].facts.train_samples
                plan = plan_of(task, table[arm], opened[name], count, seed, evaluate_last=True)
                wanted.append((name, arm, Wanted(f"{name}-{arm}", seed, plan)))
    found: dict[str, dict[str, list[Run]]] = {name: {arm: [] for arm in ARMS} for name in tasks}
    made = KeptRuns(keep, folder).make([one for _, _, one in wanted])
    for (name, arm, _), run in zip(wanted, made, strict=True):
        found[name][arm].append(run)
    return found


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
