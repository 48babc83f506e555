"""Trainings of one task for `benchmarks.methods.gradient_scaling_long`, in this process, kept line
by line.

    python -m benchmarks.methods.gradient_scaling_runs TASK [--data DIR] [--limit-minutes M]
        [--lines FILE]

The head of that benchmark describes what is compared and how rates are tuned. A training that has a
kept line is not repeated as long as its plan is the same. After M minutes no further training is
started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf, log2
from pathlib import Path
from typing import Any, NamedTuple

from batchwright.records import Plan
from batchwright.records.base import Precision
from benchmarks.harness.benchmark import RESULTS, add_gathering, make_parser, say, scratch
from benchmarks.harness.kept_runs import Run, RunLines, RunLinesHere, Wanted
from benchmarks.harness.plans import Opened, job_from, planned, quick_precision, with_rates
from benchmarks.planning.decisions_runs import Task, job_keys, open_images

IMAGES, HELD_OUT, SIDE = 4096, 5000, 8
TASKS: Mapping[str, Task] = {
    f"groups-{network}": Task(
        "cifar100-groups", network, SIDE, IMAGES, look_images=IMAGES, held_out=HELD_OUT
    )
    for network in ("resnet8", "vgg8")
}
LINES = RESULTS / "kept" / "gradient_scaling_long"

SMALL_BATCH = 16
BATCHES = (256, 64)  # large batches, in the order in which they are trained
PARTS = 4
STEPS = (64, 256, 1024)
SEEDS, TUNING_SEED = range(3), 10

RATE_UNIT = 0.1  # rates of SGD are this times powers of 2
FIRST = {"groups-resnet8": 0, "groups-vgg8": -1}  # power of 2 of the small batch's first rate
FARTHEST = 8  # most powers of 2 between the first rate and any other
WARMUP, WARMUP_START = 0.1, 0.1  # of the epochs, and of the peak


class Cell(NamedTuple):
    """A task with a large batch and a length."""

    task: str  # of `TASKS`
    batch: int  # in samples
    steps: int  # with that batch

    @property
    def title(self) -> str:
        """Name of the cell in reports."""
        return f"{self.task}, batch {self.batch}, {self.steps} steps"

    @property
    def epochs(self) -> int:
        """Epochs of all arms."""
        return self.steps * self.batch // IMAGES


class Setting(NamedTuple):
    """How an arm trains in a cell."""

    arm: str  # of `ARMS`
    power: int  # rate as a power of 2, times `RATE_UNIT` or the plan's own rate
    warm: bool  # whether there is a warm-up


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        words: Keys of the job, besides those that all arms share.
        small: Whether it trains with the small batch.
        warm: Variants with and without a warm-up, of which the better counts.
    """

    words: str
    small: bool = False
    warm: tuple[bool, ...] = (True, False)

    @property
    def own_rate(self) -> bool:
        """Whether its rates are multiples of the plan's own."""
        return "optimizer=muon" in self.words


ARMS: Mapping[str, Arm] = {
    "small": Arm("optimizer=sgd scaling=none ags.mode=off", small=True, warm=(False,)),
    "plain": Arm("optimizer=sgd scaling=none ags.mode=off"),
    "norm": Arm("optimizer=sgd scaling=none ags.mode=norm"),
    "gain": Arm("optimizer=sgd scaling=none ags.mode=gain"),
    "muon": Arm("optimizer=muon", warm=(True,)),
}
SCALED = ("norm", "gain")
ROUNDS = (("plain", *SCALED), ("muon", "small"))
"""Arms in the order in which they are trained: first, in all cells, those of the main question."""


def cells(task: str) -> Iterator[Cell]:
    """The cells of a task, in the order in which they are trained."""
    return (Cell(task, batch, steps) for batch, steps in product(BATCHES, STEPS))


# ------------------------------------------------------------------------------------------ plans


def plan_of(cell: Cell, setting: Setting, seed: int, known: Opened) -> Plan:
    """The plan of a training."""
    arm = ARMS[setting.arm]
    batch = SMALL_BATCH if arm.small else cell.batch
    keys: dict[str, Any] = {
        **job_keys(TASKS[cell.task], known, cell.epochs),
        "precision": precision_of(cell.task),
        "global_batch": batch,
        "micro_batch": batch if arm.small else batch // PARTS,
        "base_batch": SMALL_BATCH,
        "seed": seed,
    }
    if arm.own_rate:
        return with_rates(planned(job_from(arm.words, **keys), known), 2.0**setting.power)
    keys |= {
        "learning_rate": RATE_UNIT * 2.0**setting.power,
        "decay": "cosine",
        "warmup_epochs": WARMUP * cell.epochs if setting.warm else 0,
        "warmup_start": WARMUP_START,
    }
    return planned(job_from(arm.words, **keys), known)


def precision_of(task: str) -> Precision:
    """Precision of a task; resnet8's convolutions are too narrow to gain by bfloat16."""
    return "float32" if TASKS[task].network == "resnet8" else quick_precision()


def wanted(cell: Cell, setting: Setting, seed: int, known: Opened) -> Wanted:
    """The run of a training, with the facts for its kept line."""
    plan = plan_of(cell, setting, seed, known)
    batch = plan.stages[-1].global_batch_size
    warm = "" if setting.warm == ARMS[setting.arm].warm[0] else "-cold"
    name = f"{cell.task}-{setting.arm}-{batch}-epochs{cell.epochs}-power{setting.power}{warm}"
    facts = {
        "task": cell.task,
        "arm": setting.arm,
        "batch": batch,
        "epochs": cell.epochs,
        "steps": cell.epochs * IMAGES // batch,
        "power": setting.power,
        "warm": setting.warm,
        "seed": seed,
        "rate": float(f"{plan.learning_rate.peak:.6g}"),
        "precision": plan.precision,
        "held_out": plan.data.val_samples,
    }
    return Wanted(name, seed, plan, facts=facts)


# ----------------------------------------------------------------------------------------- tuning


class OutOfTimeError(Exception):
    """The time limit has passed: no further training is started."""


@dataclass(frozen=True)
class Tuned:
    """The setting that tuning chose for an arm."""

    setting: Setting
    accuracy: float  # on the images that rates are tuned on, in percent

    @property
    def told(self) -> dict[str, Any]:
        """The setting and its accuracy, for a report."""
        return {**self.setting._asdict(), "accuracy": self.accuracy}


def next_power(accuracies: Mapping[int, float], first: int) -> int | None:
    """The power of 2 whose rate is tried next; ``None``: the best one is interior, or too far.

    First comes ``first``, then its neighbours, then the next one beyond the end that is best.
    """
    for power in (first, first - 1, first + 1):
        if power not in accuracies:
            return power
    best = best_power(accuracies)
    beside = (one for one in (best - 1, best + 1) if one not in accuracies)
    return next((one for one in beside if abs(one - first) <= FARTHEST), None)


def best_power(accuracies: Mapping[int, float]) -> int:
    """The power with the highest accuracy; of equally good ones the lowest."""
    return max(accuracies, key=lambda power: (accuracies[power], -power))


class Gathered:
    """A task's trainings: kept ones are reused, others are made when they are needed.

    Args:
        task: Name of the task, from `TASKS`.
        runs: Kept runs of the task.
        data: Folder of the original data.
        folder: Folder for copies of images.
        until: No training is started after this time (`time.monotonic`).
    """

    def __init__(
        self, task: str, runs: RunLines, data: Path, folder: Path, until: float = inf
    ) -> None:
        self._lines, self._until, self._task = runs, until, task
        self._reported = open_images(TASKS[task], data, folder)
        self._tuning = open_images(TASKS[task], data, folder, look=IMAGES)

    def runs(self) -> dict[Cell, dict[str, list[Run]]]:
        """The reported runs, seed by seed, by cell and arm, as far as time allows.

        ``ags`` is the better of the arms with factors, by the accuracy of tuning.
        """
        found: dict[Cell, dict[str, list[Run]]] = {}
        try:
            for arms, cell in product(ROUNDS, cells(self._task)):
                chosen = {arm: self.tuned(cell, arm) for arm in arms}
                made = {arm: self.reported(cell, one.setting) for arm, one in chosen.items()}
                if set(SCALED) <= set(arms):
                    made["ags"] = made[max(SCALED, key=lambda arm: chosen[arm].accuracy)]
                found.setdefault(cell, {}).update(made)
        except OutOfTimeError:
            say(f"{self._task}: not all runs are there")
        return found

    def reported(self, cell: Cell, setting: Setting, seeds: Iterable[int] = SEEDS) -> list[Run]:
        """The runs of a setting that are evaluated on the test images, seed by seed."""
        return [self._run(wanted(cell, setting, seed, self._reported)) for seed in seeds]

    def tuned(self, cell: Cell, arm: str) -> Tuned:
        """An arm's setting with the best accuracy on the images for tuning."""
        before = cell.steps // (STEPS[1] // STEPS[0])
        shorter = self.tuned(cell._replace(steps=before), arm) if before in STEPS else None
        warm = ARMS[arm].warm
        if shorter is not None and cell.steps == STEPS[-1]:
            warm = (shorter.setting.warm,)
        found = []
        for one in warm:
            first = shorter.setting.power if shorter else first_power(cell, arm)
            found.append(self._best(cell, partial(Setting, arm, warm=one), first))
        return max(found, key=lambda one: one.accuracy)

    def _best(self, cell: Cell, at: Any, first: int) -> Tuned:
        accuracies: dict[int, float] = {}
        while (power := next_power(accuracies, first)) is not None:
            run = self._run(wanted(cell, at(power=power), TUNING_SEED, self._tuning))
            accuracies[power] = run.accuracy
        best = best_power(accuracies)
        return Tuned(at(power=best), accuracies[best])

    def _run(self, one: Wanted) -> Run:
        self._lines.gather([one], self._until)
        if (run := self._lines.kept(one)) is None:
            raise OutOfTimeError
        return run


def first_power(cell: Cell, arm: str) -> int:
    """The power of 2 of the first rate of the shortest trainings.

    0, the plan's own rate, for Muon; for SGD that of the small batch, times the square root of the
    ratio of batches for the large batch.
    """
    if ARMS[arm].own_rate:
        return 0
    ratio = 1 if ARMS[arm].small else cell.batch / SMALL_BATCH
    return FIRST[cell.task] + round(log2(ratio) / 2)


# ----------------------------------------------------------------------------------- command line


def main() -> None:
    """Read the command line and make the missing runs of one task."""
    parser = make_parser(__doc__)
    parser.add_argument("task", choices=tuple(TASKS))
    add_gathering(parser, None)
    asked = parser.parse_args()
    lines = asked.lines or LINES / f"{asked.task}.jsonl"
    with scratch() as folder:
        runs = RunLinesHere(lines, folder)
        Gathered(asked.task, runs, asked.data, folder, asked.until).runs()
    say(f"kept in {lines}")


if __name__ == "__main__":
    main()
