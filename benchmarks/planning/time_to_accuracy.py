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
evaluations count. Seeds 0 to 2, in turns: each script, and right after it ours to what it reached,
the two as one or not at all, as the machine's speed moves by 1.4. All arms use all cores, alone on
the machine: a run begins when others use less than a tenth of a core, and a pair does not count
where they used more meanwhile.

Seconds of both are from the start of the process to the first evaluation that reaches the script's
last accuracy. Where ours ends below it, or its plan sees no way to it, the command is given again,
cold, with twice the epochs as the most, and then with four times as many; the time of all of them
counts. A goal that is still not reached counts as a tenth of the script's speed.

A task's ratio is the geometric mean over the seeds, with that of the two scripts that is better
for the script. Tasks are long or short as the table says, also where a script takes less than the
looks had it: 8 to 13 minutes, and 1.6 to 3.

Ratios are geometric means over tasks and seeds, their spread the range over the seeds, where a task
that lacks one has its mean; without probe and trials is `_training`. From the same runs of ours, as
far as they were trained and beside no other program: |predicted - measured| / measured of a
training with its evaluations, as the plan has it before it begins, the epochs that were not needed
left out in proportion; the same of cost, where what is paid are all workers for the whole time of
the training command, its start and end included; and the same of the largest resident size of a
worker. The uneven ratio is with a program that never waits on one of the cores, from start to end;
groups-resnet8 and imagenette-64, loop by hand, seed 0. Runs are made by

    python -m benchmarks.planning.time_to_accuracy_runs --data DIR --lightning-python PATH

in the order of seeds, short tasks first, the uneven pair last. --full scores the lines that are in
benchmarks/results/time-to-accuracy-runs.jsonl, those of the processor that the last one is of; a
task counts from its first pair on. --quick makes
one pair of 1,000 images and two epochs as a check, with a data folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.benchmark import COMMITS, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value, errors
from benchmarks.harness.kept_runs import read_lines
from benchmarks.planning.time_to_accuracy_runs import CHECK, LINES, LONG, TASKS, Asked, Bench

MISSED = 0.1  # of the script's speed

BENCHMARK = Benchmark(
    "time_to_accuracy",
    "Time to an accuracy",
    "A loop written by hand and Lightning, each with its best number of loader processes and SGD "
    "at the best of three rates, whichever is better; `batchwright run` has the script's last "
    "accuracy as `goal.accuracy`; spread: range over the seeds, quartiles for errors",
    (
        Figure("time_to_accuracy_all", "ratio", "mean", "script's seconds over those of "
               "`batchwright run` to the accuracy that the script reached, everything counted, "
               "tasks where the script takes some ten minutes", at_least=5.0),
        Figure("time_to_accuracy_short", "ratio", "mean", "script's seconds over those of "
               "`batchwright run` to the accuracy that the script reached, everything counted, "
               "tasks where the script takes two minutes", at_least=2.5),
        Figure("time_to_accuracy_training", "ratio", "mean",
               "the same of all tasks, without probe and trials", at_least=8.0),
        Figure("time_to_accuracy_least", "ratio", "mean",
               "the task with the least of these ratios", at_least=1.5),
        Figure("time_to_accuracy_missed", "share", "mean",
               "goals that the first command did not reach"),
        Figure("time_to_accuracy_uneven", "ratio", "mean", "the ratio beside a program that never "
               "waits on one of the cores, two short tasks"),
        *(
            Figure(f"ratio_{task}", "ratio", "mean", words)
            for task, words in (
                ("groups-resnet8", "the ratio for 25,000 images of CIFAR-100 in ten groups, "
                 "`resnet8`"),
                ("imagenette-64", "Imagenette at 64 px, `resnet8`"),
                ("groups-vgg8", "25,000 images of CIFAR-100 in ten groups, `vgg8`"),
                ("cifar-resnet8", "CIFAR-100, `resnet8`"),
                ("imagenette-96", "Imagenette at 96 px, `resnet8`"),
            )
        ),
        Figure("training_seconds_error", "share", "median", "predicted against measured seconds of "
               "these whole trainings, median error", at_most=0.05),
        Figure("training_seconds_worst", "share", "mean", "the largest of these errors",
               at_most=0.12),
        Figure("training_cost_error", "share", "median", "the same of cost, median error",
               at_most=0.05),
        Figure("training_cost_worst", "share", "mean", "the largest of these errors", at_most=0.12),
        Figure("resident_memory_error", "share", "median",
               "the same of the largest resident size of a worker, median error", at_most=0.10),
    ),
    seeds=sorted({line["seed"] for line in read_lines(LINES) if not line["look"]}),
    copies=True,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A script's run, and ours to its accuracy."""

    theirs: Mapping[str, Any]  # line of the script
    ours: Mapping[str, Any]  # line of the command

    @property
    def ratio(self) -> float:
        """Script's seconds over ours."""
        return self._over(self.ours["seconds"])

    @property
    def training_ratio(self) -> float:
        """Script's seconds over ours without our probe."""
        return self._over(self.ours["training_seconds"])

    def _over(self, seconds: float) -> float:
        return float(self.theirs["seconds"] / seconds) if self.ours["reached"] else MISSED


def pairs_of(lines: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """All pairs that are whole, by each run's newest line on the processor of the last line."""
    lines = [line for line in lines if line["processor"] == lines[-1]["processor"]]
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
    """Pairs of a task with the script that counts."""

    pairs: Mapping[int, Pair]  # by seed

    @property
    def ratio(self) -> float:
        """Geometric mean over the seeds."""
        return geometric_mean(pair.ratio for pair in self.pairs.values())

    @property
    def long(self) -> bool:
        """Whether the script is to take some ten minutes."""
        first = next(iter(self.pairs.values()))
        return TASKS[first.ours["task"]].seconds >= LONG


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


def found_of(pairs: Sequence[Pair]) -> dict[str, Sequence[float] | Value]:
    """All that the pairs tell."""
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
    """Geometric mean over tasks and seeds; the spread is the range over the seeds.

    A task that lacks a seed has its mean there, so the value lies within the range.
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
    """How far predictions of time, cost and memory were off, over all trainings."""
    tries = [one for pair in pairs for one in pair.ours["tries"] if not one.get("refused")]

    def off(predicted: str, measured: str) -> list[float]:
        both = [(one[predicted], one[measured]) for one in tries]
        known = [(a, b) for a, b in both if a is not None and b]
        return errors(*zip(*known, strict=True)) if known else []

    # The price and the number of workers are the same in both costs.
    seconds = off("predicted_seconds", "measured_seconds")
    cost = off("predicted_seconds", "billed_seconds")
    return {
        "training_seconds_error": seconds,
        "training_seconds_worst": sorted(seconds)[-1:],
        "training_cost_error": cost,
        "training_cost_worst": sorted(cost)[-1:],
        "resident_memory_error": off("predicted_resident_bytes", "resident_bytes"),
    }


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


def measure(arguments: Arguments, folder: Path) -> Found:
    """Score what was gathered, or make one small pair."""
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
