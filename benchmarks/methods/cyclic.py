"""Cyclic progressive learning (low resolutions first) against the highest resolution throughout.

Two tasks, `resnet8`, one CPU worker, SGD with Nesterov momentum 0.9, weight decay 5e-4, random
shift or crop and flip, precision as `auto` chooses it (bfloat16 where the processor computes in
it), the same in both arms. Three stages of the learning rate, 0.1, 0.01 and 0.001, take 4, 2 and 1
parts of the epochs, as in the published schedules (80, 40 and 20 of 140 epochs; 60, 30 and 15 of
105). In the arm `cyclic` every stage goes through the resolutions, low to high, in equal parts; in
the arm `fixed` it has the highest throughout. Epochs, rates, batch, initial weights and the order
of samples are the same.

    cifar     CIFAR-100 at 24 and 32 px, batch 128
    folder    imagenette2-160, a subset of ImageNet with 10 classes, at 88, 124 and 160 px, batch 64

Time. `*_time_saved` is 1 - cyclic / fixed of the seconds of training: input, forward, backward,
update, without evaluation. `*_time_saved_with_evaluation` also counts the evaluation after each
epoch, at the highest resolution in both arms. `*_copy_seconds` is what it takes to make the smaller
copies of the stored images, once for a data set, before training. Each training has a process of
its own with all cores; the two arms of a pair follow each other, a different one first in each
pair. Figures are medians over the pairs, with quartiles as spread. Since the time of a step at each
resolution decides, few images are enough: 14 epochs of 3,200 (cifar) and 21 of 256 (folder); 2
pairs with --quick, 4 with --full.

Accuracy. `*_accuracy` is cyclic - fixed of the held-out accuracy after the last epoch over paired
seeds 0 to 4, in points. The goal, no worse, is met if the lower end of the 95 % interval of the
mean is above -1.0. cifar trains 14 epochs of 20,480 images here, and folder 21 epochs of 2,560 at
half of each resolution (44, 62 and 80 px), a quarter of the work; all held-out images are
evaluated. These runs are made two at a time on a core each, so they are not timed.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from batchwright.workload.data.sources import open_data
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, differences
from benchmarks.harness.images import smaller_cifar100, smaller_folder
from benchmarks.harness.kept_runs import KeptRuns, Run, Wanted, accuracies_of, plain_runs
from benchmarks.methods.resolution_arms import Row, Task, Trained, job_of, plan_of, train_whole

STAGE_PARTS, STAGE_RATES = (4, 2, 1), (1.0, 0.1, 0.01)
PAIRS, SEEDS = {False: 2, True: 4}, range(5)  # by --full
EPOCHS = {"cifar": 14, "folder": 21}
ARMS = ("cyclic", "fixed")

BENCHMARK = Benchmark(
    "cyclic",
    "Low resolutions first",
    "`resnet8`, one worker, three stages of the learning rate in the published proportions; the "
    "cycle goes through the resolutions, low to high, in each stage, and is compared with the "
    "highest resolution throughout",
    tuple(
        figure
        for name, words, top, goal in (
            ("cifar", "CIFAR-100, cycle of 24 and 32 px", 32, 0.15),
            ("folder", "image folder, cycle of 88, 124 and 160 px", 80, None),
        )
        for figure in (
            Figure(f"{name}_time_saved", "share", "median",
                   f"{words}: training time saved by the cycle, equal epochs", at_least=goal),
            Figure(f"{name}_time_saved_with_evaluation", "share", "median",
                   f"{words}: time saved by the cycle, evaluation after each epoch included"),
            Figure(f"{name}_accuracy", "points", "interval",
                   f"{words.partition(',')[0]}: accuracy with the cycle, up to {top} px, minus "
                   f"accuracy at {top} px throughout, paired seeds", above=-1.0, full=True),
            Figure(f"{name}_copy_seconds", "s", "median",
                   f"{words}: seconds to make the smaller copies, once for a data set"),
            *(
                Figure(f"{name}_accuracy_{arm}", "%", "mean",
                       f"{words.partition(',')[0]}: accuracy {said}", full=True)
                for arm, said in (
                    ("cyclic", f"with the cycle, up to {top} px"),
                    ("fixed", f"at {top} px throughout"),
                )
            ),
        )
    ),
    seeds=SEEDS,
    needs_data="always",
)  # fmt: skip


def timed_tasks(data: Path) -> dict[str, Task]:
    """The tasks of the timed trainings."""
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
    """The tasks of the trainings for accuracy: copies in ``folder`` with fewer training images."""
    cifar = smaller_cifar100(data, 20_480, folder / "cifar100-20480")
    images = smaller_folder(data / "imagenette2-160", 2560, folder / "imagenette-2560")
    return {
        "cifar": Task(f"cifar100:{cifar}", (24, 32), batch=128),
        "folder": Task(f"imagefolder:{images}", (44, 62, 80), batch=64),
    }


def rows(sides: Sequence[int], epochs: int) -> dict[str, tuple[Row, ...]]:
    """The rows of each arm's plan, for resolutions from low to high.

    Raises:
        ValueError: The epochs do not divide evenly into stages and resolutions.
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


def measure(arguments: Arguments, folder: Path) -> Found:
    """Measure times, and with --full accuracies."""
    found: dict[str, list[float]] = {}
    measurements: dict[str, Any] = {}
    for name, task in timed_tasks(arguments.data).items():
        say(f"{name}: reading images")
        open_data(job_of(task, 0))
        pairs = _timed(name, task, PAIRS[arguments.full], arguments.keep, folder)
        found |= times_found(name, pairs)
        measurements[name] = [{arm: asdict(one) for arm, one in pair.items()} for pair in pairs]
    if arguments.full:
        for name, runs in _judged(arguments.data, arguments.keep, folder).items():
            found |= accuracies_found(name, runs)
            measurements[f"{name}_accuracy"] = plain_runs(runs)
    return found, measurements


def times_found(name: str, pairs: Sequence[Mapping[str, Trained]]) -> dict[str, list[float]]:
    """The figures of time, by name, from timed pairs of trainings by arm."""
    both = [(pair["cyclic"], pair["fixed"]) for pair in pairs]
    return {
        f"{name}_time_saved": [1 - one.training / other.training for one, other in both],
        f"{name}_time_saved_with_evaluation": [
            1 - (one.training + one.evaluation) / (other.training + other.evaluation)
            for one, other in both
        ],
        f"{name}_copy_seconds": [one.copying for one, _ in both],
    }


def accuracies_found(name: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, list[float]]:
    """The figures of accuracy, by name, from runs of both arms over the same seeds."""
    accuracies = accuracies_of(runs)
    return {
        f"{name}_accuracy": differences(accuracies["cyclic"], accuracies["fixed"]),
        **{f"{name}_accuracy_{arm}": accuracies[arm] for arm in ARMS},
    }


def _timed(name: str, task: Task, count: int, keep: Path, folder: Path) -> list[dict[str, Trained]]:
    """Make ``count`` pairs of trainings, one after the other; pairs kept in ``keep`` are reused."""
    arms = rows(task.sides, EPOCHS[name])
    made_by = repr((replace(task, data=name), arms))
    keep.mkdir(parents=True, exist_ok=True)
    pairs = []
    for number in range(count):
        file = keep / f"{name}-pair-{number}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if kept.get("made by") == made_by:
            pairs.append({arm: Trained(**kept[arm]) for arm in ARMS})
            continue
        pair = {
            arm: _apart(task, arms[arm], 0, folder / f"{name}-{number}-{arm}")
            for arm in (ARMS if number % 2 == 0 else reversed(ARMS))
        }
        pairs.append(pair)
        plain = {"made by": made_by, **{arm: asdict(one) for arm, one in pair.items()}}
        file.write_text(json.dumps(plain) + "\n", encoding="utf-8")
        told = (f"{arm} {one.training:.1f} s + {one.evaluation:.1f} s" for arm, one in pair.items())
        say(f"{name}, pair {number + 1} of {count}: " + "  ".join(told))
    return pairs


def _apart(*arguments: Any) -> Trained:
    """Train in a process of its own, with an untouched allocator."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(train_whole, *arguments).result()


def _judged(data: Path, keep: Path, folder: Path) -> dict[str, dict[str, list[Run]]]:
    """Train all tasks: by task and arm, a run for each seed."""
    wanted = []
    tasks = judged_tasks(data, folder)
    opened = {name: open_data(job_of(task, 0)) for name, task in tasks.items()}
    for seed in SEEDS:
        for name, task in tasks.items():
            count = opened[name].facts.train_samples
            for arm, table in rows(task.sides, EPOCHS[name]).items():
                plan = plan_of(task, table, opened[name], count, seed, evaluate_last=True)
                wanted.append(Wanted(f"{name}-{arm}", seed, plan))
    made = KeptRuns(keep, folder).by_arm(wanted)
    return {name: {arm: made[f"{name}-{arm}"] for arm in ARMS} for name in tasks}


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
