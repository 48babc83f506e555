"""The script that people write by default against `batchwright run`: seconds to the same accuracy.

    groups-resnet8  short  resnet8, 32 px, 25,000 images of CIFAR-100, its first ten superclasses
    imagenette-64   short  resnet8, 64 px,  9,469 images, imagenette2-160, ten classes
    groups-vgg8     short  vgg8,    32 px, 25,000 images, as above
    cifar-resnet8   long   resnet8, 32 px, 50,000 images of CIFAR-100, 100 classes
    imagenette-96   long   resnet8, 96 px,  9,469 images, as above

Scripts: `benchmarks/planning/plain_torch.py`, a loop written by hand, and
`benchmarks/planning/plain_lightning.py`. Both decode and change images one by one with Pillow in a
Dataset (crops out of a border of an eighth, flips), feed batches of 128 by a DataLoader, and train
the same networks as ours from the same kind of weights by SGD with Nesterov momentum 0.9, weight
decay 5e-4 and a cosine over the epochs, in float32, with PyTorch's own threads, one process, an
evaluation of all test images each epoch. What they are given is settled by looks with seed 10 at a
quarter of the training images:

1. Loader processes 0, 1 or 2, for each script: the least seconds from the first evaluation to the
   second one, at rate 0.1.
2. Epochs: the fewest with which the loop by hand takes 120 s on a short task and 640 s on a long
   one, if an epoch takes four times those seconds.
3. Rate 0.03, 0.1 or 0.3: the best accuracy of the loop by hand after as many epochs of a quarter of
   the images, over other training images (a twentieth, not trained on). Lightning has the same.

Ours: `batchwright run data= network= resolutions= epochs= goal.accuracy= seed=`, with the script's
epochs as the most and the accuracy of the script's last evaluation as the goal, all else left to
the plan, from an empty cache: the start, decoding, the probe, trials, the plan, training and
evaluations count. Seeds 0 to 2, in turns: each script, and after each one ours to what it reached.
All arms use all cores, alone on the machine: a run begins when others use less than a tenth of a
core, and does not count where they used more meanwhile.

Seconds of both are from the start of the process to the first evaluation that reaches the script's
last accuracy. Where ours ends below it, or its plan sees no way to it, the command is given again,
cold, with twice the epochs as the most, and then with four times as many; the time of all of them
counts. A goal that is still not reached counts as a tenth of the script's speed.

A task's ratio is the geometric mean over the seeds, with that of the two scripts that is better
for the script. A task is long where the script takes ten minutes or more.

    time_to_accuracy_all       script's seconds over ours, geometric mean over long tasks; at
                               least 5
    time_to_accuracy_short     the same over short ones; at least 2.5
    time_to_accuracy_training  the same over all tasks, our probe with its trials not counted; at
                               least 8
    time_to_accuracy_least     the least ratio of a task; at least 1.5
    time_to_accuracy_missed    goals that the first command did not reach, a share
    time_to_accuracy_uneven    the ratio with a program that never waits on one of the cores, from
                               start to end; groups-resnet8 and imagenette-64, loop by hand, seed 0
    ratio_TASK                 each task's ratio

Their spread is the range over the seeds. From the same runs of ours, as far as they were trained
and beside no other program:

    training_seconds_error     |predicted - measured| / measured of a training with its evaluations,
                               as the plan has it before it begins, the epochs that were not needed
                               left out in proportion; median at most 5 %
    training_seconds_worst     the largest; at most 12 %
    training_cost_error        the same of cost, where what is paid are all workers for the whole
                               time of the training command, its start and end included; median at
                               most 5 %
    training_cost_worst        the largest; at most 12 %
    resident_memory_error      the same of the largest resident size of a worker; median at most
                               10 %

Their spread is the quartiles. Runs are made by

    python -m benchmarks.planning.time_to_accuracy_runs --data DIR --lightning-python PATH

in the order of seeds, short tasks first, the uneven pair last. --full scores the lines that are in
benchmarks/results/time-to-accuracy-runs.jsonl and keeps the report; a task counts from its first
pair on. --quick copies the figures from the newest kept report and, with a data folder, makes one
pair of 1,000 images and two epochs as a check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.harness.common import (
    Arguments,
    Figure,
    Measurements,
    kept_figures,
    mean_figure,
    median_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.kept_runs import read_lines
from benchmarks.planning.time_to_accuracy_runs import (
    CHECK,
    LINES,
    SEEDS,
    TASKS,
    Asked,
    Bench,
)

TEN_MINUTES = 600.0
MISSED = 0.1  # of the script's speed
LEAST_LONG, LEAST_SHORT, LEAST_TRAINING, LEAST_TASK = 5.0, 2.5, 8.0, 1.5
MOST_ERROR, MOST_WORST, MOST_MEMORY = 0.05, 0.12, 0.10

NAMES = (
    "time_to_accuracy_all",
    "time_to_accuracy_short",
    "time_to_accuracy_training",
    "time_to_accuracy_least",
    "time_to_accuracy_missed",
    "time_to_accuracy_uneven",
    *(f"ratio_{task}" for task in TASKS),
    "training_seconds_error",
    "training_seconds_worst",
    "training_cost_error",
    "training_cost_worst",
    "resident_memory_error",
)


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("time_to_accuracy", __doc__, _measure, full_seeds=SEEDS)


@dataclass(frozen=True)
class Pair:
    """A script's run, and ours to its accuracy.

    Attributes:
        theirs: Line of the script.
        ours: Line of the command.
    """

    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """Script's seconds over ours."""
        return self._over(self.ours["seconds"])

    @property
    def training_ratio(self) -> float:
        """The same without our probe."""
        return self._over(self.ours["training_seconds"])

    def _over(self, seconds: float) -> float:
        return float(self.theirs["seconds"] / seconds) if self.ours["reached"] else MISSED


def pairs_of(lines: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """All pairs that are whole, by the newest line of each run."""
    found: dict[tuple[Any, ...], Pair] = {}
    for ours in lines:
        if ours["arm"] != "ours":
            continue
        script = [
            line
            for line in lines
            if not line["look"]
            and (line["task"], line["arm"], line["seed"], line["burner"])
            == (ours["task"], ours["against"], ours["seed"], ours["burner"])
        ]
        if script and script[-1]["accuracy"] == ours["target"]:
            key = ours["task"], ours["against"], ours["seed"], ours["burner"]
            found[key] = Pair(script[-1], ours)
    return list(found.values())


@dataclass(frozen=True)
class Score:
    """Pairs of a task with the script that counts.

    Attributes:
        pairs: By seed.
    """

    pairs: Mapping[int, Pair]

    @property
    def ratio(self) -> float:
        """Geometric mean over the seeds."""
        return geometric_mean(pair.ratio for pair in self.pairs.values())

    @property
    def long(self) -> bool:
        """Whether the script takes ten minutes."""
        return fmean(pair.theirs["whole_seconds"] for pair in self.pairs.values()) >= TEN_MINUTES


def scores_of(pairs: Iterable[Pair]) -> dict[str, Score]:
    """By task, with the script that leaves us the smaller ratio."""
    found: dict[str, dict[str, dict[int, Pair]]] = {}
    for pair in pairs:
        by_script = found.setdefault(pair.ours["task"], {})
        by_script.setdefault(pair.ours["against"], {})[pair.ours["seed"]] = pair
    return {
        task: min(map(Score, by_script.values()), key=lambda one: one.ratio)
        for task, by_script in found.items()
    }


def figures_of(pairs: Sequence[Pair]) -> list[Figure]:
    """All figures that the pairs tell."""
    even = [pair for pair in pairs if not pair.ours["burner"]]
    scores = scores_of(even)
    by_length = {
        long: [one for one in scores.values() if one.long == long] for long in (True, False)
    }
    figures = []
    for name, some, training, goal in (
        ("time_to_accuracy_all", by_length[True], False, LEAST_LONG),
        ("time_to_accuracy_short", by_length[False], False, LEAST_SHORT),
        ("time_to_accuracy_training", list(scores.values()), True, LEAST_TRAINING),
    ):
        if some:
            figures.append(ratio_of(name, some, training=training, at_least=goal))
    if scores:
        least = min(scores.values(), key=lambda one: one.ratio)
        missed = [float(len(pair.ours["tries"]) > 1 or not pair.ours["reached"]) for pair in even]
        figures += [
            ratio_of("time_to_accuracy_least", [least], at_least=LEAST_TASK),
            mean_figure("time_to_accuracy_missed", missed, "share"),
        ]
    if uneven := scores_of(pair for pair in pairs if pair.ours["burner"]):
        figures.append(ratio_of("time_to_accuracy_uneven", list(uneven.values())))
    figures += [ratio_of(f"ratio_{task}", [scores[task]]) for task in TASKS if task in scores]
    return figures + error_figures(even)


def ratio_of(
    name: str, scores: Sequence[Score], *, training: bool = False, at_least: float | None = None
) -> Figure:
    """Geometric mean over tasks and seeds; the spread is the range over seeds that all have."""

    def of(pair: Pair) -> float:
        return pair.training_ratio if training else pair.ratio

    value = geometric_mean(
        geometric_mean(of(pair) for pair in score.pairs.values()) for score in scores
    )
    seeds = set.intersection(*(set(score.pairs) for score in scores))
    means = [geometric_mean(of(score.pairs[seed]) for score in scores) for seed in sorted(seeds)]
    return Figure(
        name=name,
        value=value,
        unit="ratio",
        low=min(means, default=value),
        high=max(means, default=value),
        repeats=sum(len(score.pairs) for score in scores),
        goal=at_least,
        met=value >= at_least if at_least is not None else None,
    )


def error_figures(pairs: Iterable[Pair]) -> list[Figure]:
    """How far predictions of time, cost and memory were off, over all trainings."""
    tries = [one for pair in pairs for one in pair.ours["tries"] if not one.get("refused")]

    def errors(predicted: str, measured: str) -> list[float]:
        both = [(one[predicted], one[measured]) for one in tries]
        return [abs(a - b) / b for a, b in both if a is not None and b]

    figures = []
    for name, measured in (("seconds", "measured_seconds"), ("cost", "billed_seconds")):
        # The price and the number of workers are the same in both costs.
        if found := errors("predicted_seconds", measured):
            figures += [
                median_figure(f"training_{name}_error", found, "share", at_most=MOST_ERROR),
                mean_figure(f"training_{name}_worst", [max(found)], "share", at_most=MOST_WORST),
            ]
    if found := errors("predicted_resident_bytes", "resident_bytes"):
        figures.append(median_figure("resident_memory_error", found, "share", at_most=MOST_MEMORY))
    return figures


def told(pair: Pair) -> dict[str, Any]:
    """What a report says of a pair; the rest is in its lines."""
    of_ours = ("task", "against", "seed", "burner", "target", "seconds", "training_seconds")
    of_last = ("method", "workers", "batch", "optimizer", "rate", "precision", "planned_epochs",
               "epochs", "probe_seconds", "trials_seconds")  # fmt: skip
    last = pair.ours["tries"][-1]
    return {
        **{name: pair.ours[name] for name in of_ours},
        **{name: last[name] for name in of_last if name in last},
        "tries": len(pair.ours["tries"]),
        "ratio": pair.ratio,
        "commit": pair.ours["commit"],
        "script_seconds": pair.theirs["seconds"],
        **{f"script_{name}": pair.theirs[name] for name in ("epochs", "loaders", "rate")},
    }


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    if arguments.full:
        pairs = pairs_of(read_lines(LINES))
        if not pairs:
            raise SystemExit(f"{LINES.name} has no pairs yet: make some first, see --help")
        return figures_of(pairs), {"pairs": [told(pair) for pair in pairs]}
    figures = kept_figures("time_to_accuracy", NAMES)
    if arguments.data is None:
        return figures, {}
    say("a script and our command on 1,000 images, two epochs")
    bench = Bench(folder / "lines.jsonl", arguments.data, folder, busy=True, tasks={"check": CHECK})
    theirs = bench.made(Asked("check", "torch", 0, 2, 0, 0.1))
    ours = bench.made(Asked("check", "ours", 0, 2, against="torch", target=theirs["accuracy"]))
    pair = Pair(theirs, ours)
    return [*figures, mean_figure("ratio_check", [pair.ratio], "ratio")], {"check": told(pair)}


if __name__ == "__main__":
    main()
