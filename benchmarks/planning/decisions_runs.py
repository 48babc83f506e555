"""Trainings for `planning.decisions`: two at a time, kept line by line in the repository.

    python -m benchmarks.planning.decisions_runs look|look-rates|truth
        [--data DIR] [--task NAME] [--limit-minutes M] [--lines FILE]

The head of `benchmarks.planning.decisions` describes tasks, sizes and the purpose of both sets. A
training that has a kept line is not repeated as long as its plan is the same, so either set can be
gathered over several days. After M minutes no further training is started.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from batchwright.records import Job, Plan
from batchwright.records.documents import change_job
from batchwright.workload.data.arrays import find_folder, read_classes
from batchwright.workload.data.sources import open_data
from benchmarks.harness.benchmark import RESULTS, add_gathering, make_parser, say, scratch
from benchmarks.harness.images import CIFAR100, PICKLE, evenly, link_folder, write_cifar
from benchmarks.harness.kept_runs import Run, RunLines, Wanted
from benchmarks.harness.plans import (
    ONE_WORKER,
    Opened,
    opened,
    planned,
    quick_precision,
    with_rates,
)

Optimizer = Literal["sgd", "muon"]
Precision = Literal["float32", "bfloat16"]

OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "muon")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
MIN_STEPS = 4  # fewest steps of an epoch
RATE_SCALES = (1.0, 1 / 3, 3.0)  # factors of the rate that a plan gives, in the order of the runs
WIDEST = (1 / 27, 27.0)  # smallest and largest factor that is tried where the best is at an end
SEEDS = (0, 1, 2)
GROUPS = 10  # superclasses of CIFAR-100, the first ones in the order of its coarse labels

LOOK_SEED = 10
LOOK_BATCHES = (32, 128, 512, 2048)
LOOK_PARTS = (16, 4, 1)  # lengths: the long training, divided by these
LOOK_RATES = (1 / 3, 3.0, 1 / 9, 9.0)  # factors of the rate that a plan gives
# batches by the number that divides the long training
LOOK_RATES_BATCHES = {16: (32, 128), 4: (32, 128, 512), 1: (128, 512)}
LOOK_RATES_NEAR = 2  # trainings longer than a 16th have these first factors alone
LOOK_RATES_STEPS = 25  # trainings with fewer steps say nothing about rates
LOOK_RATES_MAX = 12_288
"""Most samples of a training with batch 32, whose steps take the longest for what they show."""

TRUTH_LINES = RESULTS / "decisions-runs.jsonl"
LOOK_LINES = RESULTS / "learning-curves.jsonl"


@dataclass(frozen=True)
class Task:
    """Images and network of a task."""

    data: str  # ``digits``, ``cifar100``, ``cifar100-groups`` or ``imagenette``
    network: str  # as in a job
    side: int  # of the images, in pixels
    images: int  # training images of the truth
    epochs: tuple[int, int] = (0, 0)  # the two lengths
    # training images of the look set, others than those of the truth if there are enough
    look_images: int = 0
    held_out: int = 0  # images held out from the training set for the look set

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches of the truth: each that leaves `MIN_STEPS` steps an epoch, and the largest."""
        most = min(self.images // MIN_STEPS, BATCHES[-1])
        return (*(batch for batch in BATCHES if batch < most), most)

    @property
    def look_batches(self) -> tuple[int, ...]:
        """Batches of the look set; the largest that leaves `MIN_STEPS` stands for larger ones."""
        most = max(one for one in BATCHES if one * MIN_STEPS <= self.look_images)
        return tuple(sorted({min(batch, most) for batch in LOOK_BATCHES}))


# in the order of their trainings' time, the shortest first
TASKS = {
    "digits": Task("digits", "resnet8", 8, 1437, (3, 12), 1152, 285),
    "cifar-resnet8": Task("cifar100", "resnet8", 16, 8192, (3, 12), 8192, 2000),
    "groups-resnet8": Task("cifar100-groups", "resnet8", 16, 8192, (3, 12), 8192, 2000),
    "cifar-vgg8": Task("cifar100", "vgg8", 16, 8192, (3, 12), 8192, 2000),
    "imagenette-mobilenet": Task("imagenette", "mobilenet_small", 32, 2048, (2, 8), 2048, 1000),
    "imagenette-resnet8": Task("imagenette", "resnet8", 64, 2048, (2, 8), 2048, 1000),
}

# ------------------------------------------------------------------------------------------ images


@dataclass(frozen=True)
class Draw:
    """The images that a training uses, by their indices in the original training set."""

    train: tuple[int, ...]  # training images
    held_out: tuple[int, ...] | None = None  # images for evaluation; ``None``: the test images


def draw(task: Task, total: int, *, look: int | None = None) -> Draw:
    """Images drawn evenly over the ``total`` ones of a training set, in the order of the original.

    ``look``: training images for a training of the look set; ``None``: those of the truth.
    """
    truth = evenly(total, task.images)
    if look is None:
        return Draw(tuple(truth))
    rest = sorted(set(range(total)) - set(truth)) or truth
    taken = [rest[i] for i in evenly(len(rest), task.look_images + task.held_out)]
    held_out = {taken[i] for i in evenly(len(taken), task.held_out)}
    train = [one for one in taken if one not in held_out]
    return Draw(tuple(train[i] for i in evenly(len(train), look)), tuple(sorted(held_out)))


def copy_images(task: Task, data: Path, folder: Path, *, look: int | None = None) -> str:
    """Copy the drawn images of a task into the folder, unless they are there: a job's `data`.

    ``data`` holds ``cifar-100-python/`` and ``imagenette2-160/``; ``look`` is as for `draw`.
    """
    if task.data == "digits" and look is None:
        return "digits"
    copy = folder / f"{task.data}-{task.side}-{'truth' if look is None else f'look-{look}'}"
    make = {"imagenette": _copy_imagenette, "digits": _copy_digits}.get(task.data, _copy_cifar)
    if not copy.exists():
        make(task, data, copy, look)
    return f"{'cifar100' if make is _copy_cifar else 'imagefolder'}:{copy}"


def open_images(task: Task, data: Path, folder: Path, *, look: int | None = None) -> Opened:
    """Copy the drawn images of a task by `copy_images`, and open the copy."""
    return opened(copy_images(task, data, folder, look=look), task.network, task.side)


def _copy_cifar(task: Task, data: Path, copy: Path, look: int | None) -> None:
    original = find_folder(CIFAR100, data)
    grouped = task.data == "cifar100-groups"
    train, test = (_cifar_file(original / name, grouped) for name in ("train", "test"))
    drawn = draw(task, len(train[1]), look=look)
    if drawn.held_out is not None:
        test = tuple(one[list(drawn.held_out)] for one in train)
    names = read_classes(CIFAR100, original)
    if grouped:
        names = _unpickled(original / "meta")["coarse_label_names"][:GROUPS]
    folder = copy / CIFAR100.folder
    folder.mkdir(parents=True)
    places = list(drawn.train)
    write_cifar(folder / "train", train[0][places], train[1][places])
    write_cifar(folder / "test", *test)
    content = {CIFAR100.name_key: list(names)}
    (folder / "meta").write_bytes(pickle.dumps(content, protocol=PICKLE))


def _cifar_file(path: Path, grouped: bool) -> tuple[np.ndarray[Any, Any], ...]:
    """Pixels (n, 3072) and labels (n): all images, or those of the first superclasses."""
    content = _unpickled(path)
    if not grouped:
        return content["data"], np.array(content["fine_labels"])
    labels = np.array(content["coarse_labels"])
    return content["data"][labels < GROUPS], labels[labels < GROUPS]


def _unpickled(path: Path) -> dict[str, Any]:
    """Content of an original file of CIFAR-100, which is a pickle of the user's own."""
    content: dict[str, Any] = pickle.loads(path.read_bytes(), encoding="latin1")  # noqa: S301
    return content


def _copy_imagenette(task: Task, data: Path, copy: Path, look: int | None) -> None:
    original = data / "imagenette2-160"
    files, tests = (sorted((original / part).glob("*/*")) for part in ("train", "val"))
    drawn = draw(task, len(files), look=look)
    held_out = tests if drawn.held_out is None else [files[i] for i in drawn.held_out]
    link_folder(copy, {"train": [files[i] for i in drawn.train], "val": held_out})


def _copy_digits(task: Task, _: Path, copy: Path, look: int | None) -> None:
    train: Any = open_data(Job(data="digits", resolutions=(task.side,))).train
    drawn = draw(task, len(train.labels), look=look)
    for part, places in (("train", drawn.train), ("val", drawn.held_out or ())):
        for place in places:
            folder = copy / part / str(int(train.labels[place]))
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(train.images[place].numpy()).save(folder / f"{place:04}.png")


# ------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Cell:
    """A training of the grid without its seed."""

    task: str  # name, of `TASKS`
    batch: int  # in samples
    optimizer: Optimizer  # as in a job
    rate_scale: float  # factor of the rate that a plan gives
    epochs: int  # length

    @property
    def arm(self) -> str:
        """Name of the training in file names and messages."""
        return f"{self.optimizer}-{self.batch}-rate{self.rate_scale:.3g}-epochs{self.epochs}"


def job_keys(
    task: Task, known: Opened, epochs: int, precision: Precision | None = None
) -> dict[str, Any]:
    """Keys of a job for a task; a command line takes them too.

    ``precision=None``: `quick_precision`.
    """
    return {
        "data": known.data,
        "network": task.network,
        "precision": precision or quick_precision(),
        **dict(word.split("=") for word in ONE_WORKER.split()),
        "resolutions": task.side,
        "augment": "crop" if task.data == "digits" else "crop-flip",
        "epochs": epochs,
        "evaluate_epochs": epochs,
    }


def plan_of(cell: Cell, seed: int, known: Opened, precision: Precision | None = None) -> Plan:
    """The plan of a training: the planner chooses what the job leaves open, except the rate."""
    asked = {"global_batch": cell.batch, "optimizer": cell.optimizer, "seed": seed}
    keys = job_keys(TASKS[cell.task], known, cell.epochs, precision)
    job = change_job(Job(), {**keys, **asked})
    plan = planned(job, known)
    return with_rates(plan, cell.rate_scale) if cell.rate_scale != 1 else plan


def wanted(cell: Cell, seed: int, known: Opened, *, prefix: str = "") -> Wanted:
    """The run of a training, with the facts for its kept line."""
    plan = plan_of(cell, seed, known)
    facts = {
        "task": cell.task,
        "arm": cell.arm,
        "batch": cell.batch,
        "optimizer": cell.optimizer,
        "rate_scale": float(f"{cell.rate_scale:.6g}"),
        "epochs": cell.epochs,
        "seed": seed,
        "precision": plan.precision,
        "rate": float(f"{plan.learning_rate.peak:.6g}"),
        "images": plan.data.train_samples,
    }
    # Accuracies of the two precisions are level (the head of `benchmarks.planning.decisions`), so
    # any machine can go on where another one stopped.
    others = (one for one in PRECISIONS if one != plan.precision)
    alike = tuple(plan_of(cell, seed, known, precision=one) for one in others)
    return Wanted(f"{prefix}{cell.task}-{cell.arm}", seed, plan, facts=facts, alike=alike)


# ------------------------------------------------------------------------------------------- looks


def look_cells(name: str) -> list[tuple[Cell, int]]:
    """Trainings of a task's look set, the shortest first, each with its number of images."""
    task, cells = TASKS[name], []
    for part in LOOK_PARTS:
        samples = max(task.epochs) * task.look_images // part
        images = min(samples, task.look_images)
        for batch, optimizer in product(task.look_batches, OPTIMIZERS):
            cells.append((Cell(name, batch, optimizer, 1.0, samples // images), images))
    return cells


def look_rate_cells(name: str) -> list[tuple[Cell, int]]:
    """Trainings of a task's look set at other rates, each with its number of images."""
    task, cells = TASKS[name], []
    for part, batches in LOOK_RATES_BATCHES.items():
        samples = max(task.epochs) * task.look_images // part
        images = min(samples, task.look_images)
        rates = LOOK_RATES if part == max(LOOK_PARTS) else LOOK_RATES[:LOOK_RATES_NEAR]
        for scale, batch, optimizer in product(rates, batches, OPTIMIZERS):
            enough = samples // batch >= LOOK_RATES_STEPS and batch in task.look_batches
            if enough and (batch > LOOK_RATES_BATCHES[16][0] or samples <= LOOK_RATES_MAX):
                cells.append((Cell(name, batch, optimizer, scale, samples // images), images))
    return cells


def gather_look(
    runs: RunLines,
    data: Path,
    folder: Path,
    until: float,
    tasks: Sequence[str] = tuple(TASKS),
    cells_of: Callable[[str], list[tuple[Cell, int]]] = look_cells,
) -> None:
    """Make the look set: the shortest trainings first, among them those with the nearest rates."""

    @cache
    def images_of(name: str, images: int) -> Opened:
        return open_images(TASKS[name], data, folder, look=images)

    def one(cell: Cell, images: int) -> Wanted:
        known, prefix = images_of(cell.task, images), f"look-{images}-images-"
        made = wanted(cell, LOOK_SEED, known, prefix=prefix)
        more = {
            "samples": images * cell.epochs,
            "steps": -(-images // cell.batch) * cell.epochs,
            "classes": len(made.plan.data.classes),
            "held_out": made.plan.data.val_samples,
        }
        return replace(made, facts={**made.facts, **more})

    def turn(pair: tuple[Cell, int]) -> tuple[int, float]:
        cell, images = pair
        task = TASKS[cell.task]
        part = max(task.epochs) * task.look_images // (images * cell.epochs)
        return -part, abs(log(cell.rate_scale))

    cells = sorted((pair for name in tasks for pair in cells_of(name)), key=turn)
    runs.gather((one(cell, images) for cell, images in cells), until)


# ------------------------------------------------------------------------------------------- truth


def cells_of(name: str) -> Iterator[Cell]:
    """The grid of a task: first all trainings at the rate of a plan."""
    task = TASKS[name]
    grid = product(RATE_SCALES, task.epochs, task.batches, OPTIMIZERS)
    for scale, epochs, batch, optimizer in grid:
        yield Cell(name, batch, optimizer, scale, epochs)


def beyond(accuracies: Mapping[float, float]) -> float | None:
    """The next rate scale to try, from the accuracies at others; ``None``: the best is no end."""
    best = max(accuracies, key=lambda scale: accuracies[scale])
    further = {min(accuracies): best / 3, max(accuracies): best * 3}.get(best)
    low, high = WIDEST
    return further if further and low * 0.99 < further < high * 1.01 else None


def gather_truth(
    runs: RunLines, data: Path, folder: Path, until: float, tasks: Sequence[str] = tuple(TASKS)
) -> None:
    """Make the grid seed by seed, for each seed task by task, with the rates beyond the ends where
    the best rate with seed 0 is at an end.
    """

    @cache
    def images_of(name: str) -> Opened:
        return open_images(TASKS[name], data, folder)

    def one(cell: Cell, seed: int = SEEDS[0]) -> Wanted:
        return wanted(cell, seed, images_of(cell.task))

    grid: list[Cell] = []
    for name in tasks:
        cells = more = list(cells_of(name))
        while more and time.monotonic() < until:
            runs.gather(map(one, more), until)
            more = _cells_beyond(cells, lambda cell: runs.kept(one(cell)))
            cells += more
        grid += cells
    for seed in SEEDS[1:]:
        runs.gather((one(cell, seed) for cell in grid), until)


def _cells_beyond(cells: Sequence[Cell], found: Callable[[Cell], Run | None]) -> list[Cell]:
    """One more rate for each batch, optimizer and length whose best rate is at an end."""
    rates: dict[Cell, dict[float, float]] = {}
    for cell in cells:
        if (run := found(cell)) is not None:
            rates.setdefault(replace(cell, rate_scale=1.0), {})[cell.rate_scale] = run.accuracy
    return [
        replace(cell, rate_scale=scale)
        for cell, accuracies in rates.items()
        if (scale := beyond(accuracies)) is not None
    ]


# ------------------------------------------------------------------------------------ command line

GATHERED = {
    "look": gather_look,
    "look-rates": partial(gather_look, cells_of=look_rate_cells),
    "truth": gather_truth,
}


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and gather one of the sets."""
    parser = make_parser(__doc__)
    parser.add_argument("which", choices=tuple(GATHERED))
    parser.add_argument("--task", choices=TASKS, help="this one alone")
    add_gathering(parser, None)
    asked = parser.parse_args(words)
    lines = asked.lines or (TRUTH_LINES if asked.which == "truth" else LOOK_LINES)
    tasks = (asked.task,) if asked.task else tuple(TASKS)
    with scratch() as folder:
        GATHERED[asked.which](RunLines(lines, folder), asked.data, folder, asked.until, tasks)
    say(f"kept in {lines}")


if __name__ == "__main__":
    main()
