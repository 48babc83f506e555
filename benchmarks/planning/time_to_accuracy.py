"""Seconds to the same accuracy: a usual PyTorch or Lightning script against `batchwright run`.

The tasks are five. A task is short or long by the time that the script takes:

    task            script takes   network  side   training images
    groups-resnet8  1.6 to 3 min   resnet8  32 px  25,000 of CIFAR-100, its first ten superclasses
    imagenette-64   1.6 to 3 min   resnet8  64 px   9,469 of imagenette2-160, ten classes
    groups-vgg8     1.6 to 3 min   vgg8     32 px  25,000, those of groups-resnet8
    cifar-resnet8   8 to 13 min    resnet8  32 px  50,000 of CIFAR-100, 100 classes
    imagenette-96   8 to 13 min    resnet8  96 px   9,469, those of imagenette-64

The scripts are `benchmarks/planning/plain_torch.py`, a loop written by hand, and
`benchmarks/planning/plain_lightning.py`. Both decode and augment images one by one with Pillow in a
Dataset (random crops out of a border of an eighth of the side, random flips) and read batches of
128 from a DataLoader. They train the same networks as Batchwright, with the same initialization, by
SGD with Nesterov momentum 0.9, weight decay 5e-4 and a cosine schedule that takes a step after each
epoch, as Lightning's do by default, in float32, in one process with PyTorch's default threads, and
evaluate all test images after each epoch. Their settings are tuned first, with seed 10 and a
quarter of the training images:

1. Loader processes, for each script: 0, 1 or 2, whichever has the fewest seconds from the end of
   the first evaluation to the end of the second one, at rate 0.1.
2. Epochs: as many as the loop by hand needs to train for at least 120 s on a short task and 640 s
   on a long one, if an epoch takes four times the seconds of step 1.
3. Learning rate, a first look: 0.03, 0.1 and 0.3, by the accuracy of the loop by hand after that
   many epochs on a twentieth of the training images that it is not trained on. Where that is 0.03
   or 0.3, the next one beyond it (0.01, 0.003; 1, 3) is tried as well, until the best lies between
   two others.
4. Learning rate: a quarter of the images is a quarter of the steps, for which another rate may be
   best. So the loop by hand makes whole trainings, seed 0, at all rates that were at most ten
   points below the best one in step 3. The rate with the best accuracy on the test images counts,
   for both scripts and all seeds.

Our command is `batchwright run data= network= resolutions= epochs= goal.accuracy= seed=`, with
the script's number of epochs as the maximum and the accuracy of the script's last evaluation as the
goal. The plan decides everything else. The cache is empty, and everything counts: start, decoding,
probe, trials, planning, training and evaluations.

Seconds are counted, for both, from the start of the process to the end of the first evaluation
that reaches the script's last accuracy. Where our command ends below that accuracy, or its plan
finds no way to it, it is started again from an empty cache with twice the maximum number of epochs,
and then with four times that number; the time of all attempts counts. A goal that is still not
reached counts as a tenth of the script's speed.

Pairs. Seeds are 0 to 2. Each run of a script is followed at once by our command, since the
machine's speed varies by a factor of up to 1.4 over the hours; a pair counts only as a whole. All
runs use all cores and have the machine to themselves: a run begins when other programs use less
than a tenth of a core, and a pair does not count where they used more while it ran.

Ratios are the script's seconds over ours. A task's ratio is the geometric mean over its seeds,
against whichever script makes that ratio smaller. Figures over several tasks are geometric means
over tasks and seeds; their spread is the range over the seeds, where a task that lacks a seed has
its mean. `time_to_accuracy_training` leaves out our probe and trials. `time_to_accuracy_uneven` is
measured while a program that never waits runs on one of the cores, from start to end of both runs:
groups-resnet8 and imagenette-64, loop by hand, seed 0.

Errors of predictions, |predicted - measured| / measured, are of the trainings by our command on
a machine without other programs: seconds of training and evaluations, as the plan predicts them
before training begins (in proportion to the epochs that were then trained);
cost, where all workers are paid for the whole time of the training command, its start and end
included; and the peak resident memory of a worker process.

The runs are made by

    python -m benchmarks.planning.time_to_accuracy_runs --data DIR --lightning-python PATH

seed by seed, short tasks first, the runs beside a busy program last. --full scores the kept runs in
benchmarks/results/time-to-accuracy-runs.jsonl, of the processor that the last line names; a task
counts as soon as it has one pair. --quick makes one pair of 1,000 images and two epochs as a check,
with a data folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.benchmark import COMMITS, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value, errors
from benchmarks.harness.kept_runs import read_lines
from benchmarks.planning.time_to_accuracy_runs import (
    CHECK,
    LINES,
    LONG,
    SEEDS,
    TASKS,
    Asked,
    Bench,
)

MISSED = 0.1  # ratio of a pair whose goal was not reached: a tenth of the script's speed

BENCHMARK = Benchmark(
    "time_to_accuracy",
    "Time to an accuracy",
    "Plain script: a PyTorch loop written by hand or Lightning, whichever is better, each with its "
    "best number of loader processes and SGD at the best of its rates. `batchwright run` "
    "gets the script's last accuracy as `goal.accuracy`; its seconds include start, decoding, "
    "probe and trials. Ratios are geometric means over tasks and seeds, their spread is the range "
    "over the seeds; errors are |predicted - measured| / measured, their spread is the quartiles",
    (
        Figure("time_to_accuracy_all", "ratio", "mean", "seconds to the same accuracy, plain "
               "script over `batchwright run`; tasks that take the script some ten minutes",
               at_least=5.0),
        Figure("time_to_accuracy_short", "ratio", "mean", "seconds to the same accuracy, plain "
               "script over `batchwright run`; tasks that take the script some two minutes",
               at_least=2.5),
        Figure("time_to_accuracy_training", "ratio", "mean", "seconds to the same accuracy, plain "
               "script over `batchwright run` without its probe and trials; all tasks",
               at_least=8.0),
        Figure("time_to_accuracy_least", "ratio", "mean", "seconds to the same accuracy, plain "
               "script over `batchwright run`; the task with the smallest ratio", at_least=1.5),
        Figure("time_to_accuracy_missed", "share", "mean", "share of the pairs in which the first "
               "`batchwright run` did not reach the script's accuracy"),
        Figure("time_to_accuracy_uneven", "ratio", "mean", "seconds to the same accuracy, plain "
               "script over `batchwright run`, both beside a program that never waits on one of "
               "the cores; two short tasks"),
        *(
            Figure(f"ratio_{task}", "ratio", "mean",
                   f"seconds to the same accuracy, plain script over `batchwright run`; {words}")
            for task, words in (
                ("groups-resnet8", "25,000 images of CIFAR-100 in ten groups, `resnet8`"),
                ("imagenette-64", "Imagenette at 64 px, `resnet8`"),
                ("groups-vgg8", "25,000 images of CIFAR-100 in ten groups, `vgg8`"),
                ("cifar-resnet8", "CIFAR-100, `resnet8`"),
                ("imagenette-96", "Imagenette at 96 px, `resnet8`"),
            )
        ),
        Figure("training_seconds_error", "share", "median",
               "error of the predicted seconds of a whole training, median", at_most=0.05),
        Figure("training_seconds_worst", "share", "mean",
               "error of the predicted seconds of a whole training, largest", at_most=0.12),
        Figure("training_cost_error", "share", "median",
               "error of the predicted cost of a whole training, median", at_most=0.05),
        Figure("training_cost_worst", "share", "mean",
               "error of the predicted cost of a whole training, largest", at_most=0.12),
        Figure("resident_memory_error", "share", "median",
               "error of the predicted peak resident memory of a worker process, median",
               at_most=0.10),
        Figure("resident_memory_worst", "share", "mean",
               "error of the predicted peak resident memory of a worker process, largest",
               at_most=0.10),
    ),
    seeds=sorted({line["seed"] for line in read_lines(LINES) if not line["look"]}),
    copies=True,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A run of a script, and the run of our command with the script's accuracy as its goal."""

    theirs: Mapping[str, Any]  # kept line of the script's run
    ours: Mapping[str, Any]  # kept line of our command's run

    @property
    def ratio(self) -> float:
        """Script's seconds over ours."""
        return self._over(self.ours["seconds"])

    @property
    def training_ratio(self) -> float:
        """Script's seconds over ours without our probe and trials."""
        return self._over(self.ours["training_seconds"])

    def _over(self, seconds: float) -> float:
        return float(self.theirs["seconds"] / seconds) if self.ours["reached"] else MISSED


def pairs_of(lines: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """All complete pairs, by the newest line of each run, on the processor of the last line.

    A task counts at the rate with which the loop by hand ends at its best accuracy, seed 0, and a
    script with the loader processes of its newest run there.
    """
    lines = [line for line in lines if line["processor"] == lines[-1]["processor"]]
    scripts = [line for line in lines if not line["look"] and line["arm"] != "ours"]
    whole = [line for line in scripts if (line["arm"], line["seed"]) == ("torch", SEEDS[0])]
    by_accuracy = sorted(whole, key=itemgetter("accuracy"))
    rates = {line["task"]: line["rate"] for line in by_accuracy}  # the last of a task counts
    scripts = [line for line in scripts if line["rate"] == rates.get(line["task"], line["rate"])]
    loaders = {(line["task"], line["arm"]): line["loaders"] for line in scripts}
    found: dict[tuple[Any, ...], Pair] = {}
    for ours in lines:
        if ours["arm"] != "ours":
            continue
        script = [
            line
            for line in scripts
            if (line["task"], line["arm"], line["seed"], line["burner"])
            == (ours["task"], ours["against"], ours["seed"], ours["burner"])
            and line["loaders"] == loaders[line["task"], line["arm"]]
        ]
        if script and script[-1]["accuracy"] == ours["target"]:
            key = ours["task"], ours["against"], ours["seed"], ours["burner"]
            found[key] = Pair(script[-1], ours)
    return list(found.values())


@dataclass(frozen=True)
class Score:
    """The pairs of a task with one of the two scripts."""

    pairs: Mapping[int, Pair]  # by seed

    @property
    def ratio(self) -> float:
        """Geometric mean of the pairs' ratios over the seeds."""
        return geometric_mean(pair.ratio for pair in self.pairs.values())

    @property
    def long(self) -> bool:
        """Whether the task is one of the long ones."""
        first = next(iter(self.pairs.values()))
        return TASKS[first.ours["task"]].seconds >= LONG


def scores_of(pairs: Iterable[Pair]) -> dict[str, Score]:
    """The score of each task, by its name: against whichever script makes the ratio smaller."""
    found: dict[str, dict[str, dict[int, Pair]]] = {}
    for pair in pairs:
        by_script = found.setdefault(pair.ours["task"], {})
        by_script.setdefault(pair.ours["against"], {})[pair.ours["seed"]] = pair
    return {
        task: min(map(Score, by_script.values()), key=lambda one: one.ratio)
        for task, by_script in found.items()
    }


def found_of(pairs: Sequence[Pair]) -> dict[str, Sequence[float] | Value]:
    """All figures, by name, from all pairs."""
    even = [pair for pair in pairs if not pair.ours["burner"]]
    scores = scores_of(even)
    every = list(scores.values())
    beside = list(scores_of(pair for pair in pairs if pair.ours["burner"]).values())
    some = {
        "time_to_accuracy_all": [one for one in every if one.long],
        "time_to_accuracy_short": [one for one in every if not one.long],
        "time_to_accuracy_training": every,
        "time_to_accuracy_least": sorted(every, key=lambda one: one.ratio)[:1],
        "time_to_accuracy_uneven": beside,
        **{f"ratio_{task}": [score] for task, score in scores.items()},
    }
    missed = [float(len(pair.ours["tries"]) > 1 or not pair.ours["reached"]) for pair in even]
    return {
        **{name: ratio_of(name, those) for name, those in some.items() if those},
        "time_to_accuracy_missed": missed,
        **errors_found(even),
    }


def ratio_of(name: str, scores: Sequence[Score]) -> Value:
    """Geometric mean over tasks and seeds; its spread is the range over the seeds.

    A task that lacks a seed counts with its mean there, so the value lies within the range.
    """

    def of(pair: Pair) -> float:
        return pair.training_ratio if name == "time_to_accuracy_training" else pair.ratio

    tasks = [{seed: of(pair) for seed, pair in score.pairs.items()} for score in scores]
    middles = [geometric_mean(task.values()) for task in tasks]
    means = [
        geometric_mean(task.get(seed, middle) for task, middle in zip(tasks, middles, strict=True))
        for seed in set[int]().union(*tasks)
    ]
    repeats = sum(len(score.pairs) for score in scores)
    return BENCHMARK[name].made(geometric_mean(middles), min(means), max(means), repeats)


def errors_found(pairs: Iterable[Pair]) -> dict[str, list[float]]:
    """Relative errors of predicted seconds, cost and memory, one for each training, by figure."""
    tries = [one for pair in pairs for one in pair.ours["tries"] if not one.get("refused")]

    def off(predicted: str, measured: str) -> list[float]:
        both = [(one[predicted], one[measured]) for one in tries]
        known = [(a, b) for a, b in both if a is not None and b]
        return errors(*zip(*known, strict=True)) if known else []

    # Price and number of workers cancel in the error of the cost, which leaves its seconds.
    seconds = off("predicted_seconds", "measured_seconds")
    cost = off("predicted_seconds", "billed_seconds")
    memory = off("predicted_resident_bytes", "resident_bytes")
    return {
        "training_seconds_error": seconds,
        "training_seconds_worst": sorted(seconds)[-1:],
        "training_cost_error": cost,
        "training_cost_worst": sorted(cost)[-1:],
        "resident_memory_error": memory,
        "resident_memory_worst": sorted(memory)[-1:],
    }


def told(pair: Pair) -> dict[str, Any]:
    """What a report has of a pair; the kept lines have the rest."""
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


def measure(arguments: Arguments, folder: Path) -> Found:
    """With --full score the kept runs; else make and score one small pair."""
    if arguments.full:
        pairs = pairs_of(read_lines(LINES))
        if not pairs:
            raise SystemExit(f"{LINES.name} has no pairs yet: make some first, see --help")
        commits = Counter(pair.ours["commit"] for pair in pairs)
        return found_of(pairs), {"pairs": [told(pair) for pair in pairs], COMMITS: commits}
    if arguments.data is None:
        return {}, {}
    say("a script and our command on 1,000 images, two epochs")
    bench = Bench(folder / "lines.jsonl", arguments.data, folder, busy=True, tasks={"check": CHECK})
    theirs = bench.made(Asked("check", "torch", 0, 2, 0, 0.1))
    ours = bench.made(Asked("check", "ours", 0, 2, against="torch", target=theirs["accuracy"]))
    pair = Pair(theirs, ours)
    check = Figure("ratio_check", "ratio", "mean").of([pair.ratio])
    return {check.name: check}, {"check": told(pair)}


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
