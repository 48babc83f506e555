"""How good batch and optimizer are that a plan takes, where it knows how the network learns.

The truth is a grid of whole trainings. For each task, each of two lengths, each batch of 32, 64,
... 2,048 that leaves 4 steps an epoch, the largest that does besides, SGD and Muon, there is a
training with the learning rate that a plan gives without trials, with a third of it and with three
times it; where the best of them with seed 0 is at an end, with one rate more beyond, until the best
is no end or is 27 times or a 27th of the plan's. Seeds 0 to 2. One worker in one process on one
core, all else as a job leaves it (a cosine, roots of batches in the rates, no micro-batches, usual
augmentation). Trainings are in bfloat16 where the processor computes in it, else in float32; 36
that were made in both by older and newer code differ by 0.1 points in the mean (float32 less
bfloat16, standard error 0.2), so a line of either precision counts, and says which it is:

    digits                resnet8,          8 px, 1,437 images,  3 and 12 epochs, batch  32 to   359
    cifar-resnet8         resnet8,         16 px, 8,192 images,  3 and 12 epochs, batch  32 to 2,048
    cifar-vgg8            vgg8,            16 px, 8,192 images,  3 and 12 epochs, batch  32 to 2,048
    groups-resnet8        resnet8,         16 px, 8,192 images,  3 and 12 epochs, batch  32 to 2,048
    imagenette-resnet8    resnet8,         64 px, 2,048 images,  2 and  8 epochs, batch  32 to   512
    imagenette-mobilenet  mobilenet_small, 32 px, 2,048 images,  2 and  8 epochs, batch  32 to   512

The CIFAR tasks are CIFAR-100's 100 classes, and as groups the first ten of its superclasses in the
order of its coarse labels, five classes each: aquatic mammals, fish, flowers, food containers,
fruit and vegetables, household electrical devices, household furniture, insects, large carnivores,
large man-made outdoor things; all at half their side. imagenette2-160 is ten classes of ImageNet.
Half a side and 32 px for mobilenet_small are for the sake of time: a training takes about a
minute at most, and there are more than 1,200. Training images are drawn evenly over the originals;
the accuracy is that of all test images after the last epoch. Test images serve this score alone.

A prior of the model of learning may be tuned on another set, the look set: the same tasks with seed
10, other training images (drawn evenly over those that are left), and an accuracy over images held
out from the training set (2,000 of CIFAR, 1,000 of Imagenette). Batches 32, 128, 512 and 2,048, SGD
and Muon at the rate of a plan, and three lengths: a 16th, a 4th and all of the samples of the
longer training, less than an epoch being an epoch of fewer images. The 1,437 digits leave no
others: their look set has 1,152 of them, 285 are held out, and 256 is the largest batch.

What is known beforehand of rates is tuned on the look set, too: there each training of a 16th with
batch 32 or 128, of a 4th with batch 128 or 512 (of Imagenette and the digits with 32 as well), and
of all samples with batch 128 or 512 that has at least 25 steps is made with a third and three times
the rate of a plan besides, those of a 16th with a ninth and nine times it, too.

    python -m benchmarks.planning.decisions_runs look|look-rates|truth
        [--data DIR] [--task NAME] [--limit-minutes M]

makes the runs that are missing, and adds a line for each to benchmarks/results/decisions-runs.jsonl
or benchmarks/results/learning-curves.jsonl. The order is: seed 0, task by task, those of the
shortest trainings first, each at the plan's rate, at the others and beyond the ends; then seed 1,
then seed 2.

What is scored are plans of each task for each of its lengths, from each of three probes, a case
each: from a profile of the task with trials, `goal.objective=auto`; from the same profile without
them, `goal.objective=knee`. One profile serves both lengths. `goal.least_steps` is 4. A candidate
is a batch of the grid with SGD or Muon. Its time is that which the plan predicts, the trials aside.
Its accuracy is the mean over the seeds at the best of its rates. The accuracy of the chosen one is
that at the rate which it was given: between two of the grid's it is on the straight line over the
logarithm of the rate, beyond them it is that of the nearest; and for a batch that is none of the
grid's likewise, over the logarithm of the batch. A training that gave up counts as guessing.

What is best among many noisy means looks better than it is. So wherever something is called best,
candidate or rate, the choice is made by the other seeds: for each seed, that which is best by the
mean of the others is taken and what it reached with this one counts; the mean over the seeds is
the accuracy. With a single seed so far, it chooses itself.

The regret is the accuracy of the best candidate that takes at most 1.1 times as long as the chosen
one, less that of the chosen one; with trials, and (knee) by the rule without. The time regret is
the time of the chosen one over the least among the candidates that are at most a point less
accurate than it, itself among them. The error of accuracy is |predicted - measured| of the
candidates of all cases, predicted by the plan that is asked for the candidate's optimizer, measured
at the rate of a plan without trials, mean over the seeds; its coverage the share of the single
trainings that lie within the predicted interval, which is for a single seed, and of which half the
width is given. The trials' share is their time over the predicted time of the chosen training, over
the longer ones.

Spread is the range for means and the quartiles for medians. All are in points of accuracy
(hundredths of a share) but for the time regret, which is a ratio, and the shares. A case counts
when seed 0 of its grid is whole.

--full probes each task three times on one core, with trials for a tenth of the longer training's
time, and scores the plans by the lines that are there; --quick checks digits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from batchwright import plan
from batchwright.records import Estimate, Plan, Profile
from batchwright.records.documents import read_record
from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure
from benchmarks.harness.kept_runs import read_lines
from benchmarks.planning.decisions_runs import (
    MIN_STEPS,
    OPTIMIZERS,
    RATE_SCALES,
    SEEDS,
    TASKS,
    TRUTH_LINES,
    job_keys,
    open_images,
)

LEARNING = 0.1  # of the longer training's time, for trials
PROBES = 3  # of each task: trials of seconds differ from one to the next, and so do plans
SLOWER = 1.1  # a candidate may take so many times as long as the chosen one
AS_ACCURATE = 1.0  # points

BENCHMARK = Benchmark(
    "decisions",
    "Decisions",
    "Plans of tasks of which whole trainings are made (docs/log.md says which), two lengths each",
    (
        Figure("regret_points", "points", "mean", "accuracy of the best candidate that is about as "
               "fast less that of the one that the plan takes", at_most=1.0),
        Figure("worst_regret_points", "points", "mean", "the largest of them", at_most=3.0),
        Figure("regret_points_knee", "points", "mean", "the same mean for the "
               "knee of time alone, from the same profile without trials"),
        Figure("time_regret", "ratio", "mean", "time of the one taken over the least of those "
               "about as accurate", at_most=1.15),
        Figure("accuracy_error_points", "points", "median", "predicted against measured accuracy "
               "of all candidates, median error", at_most=2.0),
        Figure("accuracy_coverage", "share", "mean",
               "share of the trainings inside the predicted interval", at_least=0.9),
        Figure("accuracy_half_width_points", "points", "median", "half that interval"),
        Figure("trials_share", "share", "mean", "time of the trials over that of the longer "
               "training", at_most=0.1),
    ),
    seeds=SEEDS,
    needs_data="full",
    copies=True,
)  # fmt: skip

# ------------------------------------------------------------------------------------------- truth


class Candidate(NamedTuple):
    """What a plan can take."""

    batch: int  # global batch, in samples
    optimizer: str  # as in a job


@dataclass(frozen=True)
class Truth:
    """What the trainings of a task with one length reached, all with the same seeds."""

    # by candidate and rate scale: accuracy with each seed, in percent
    reached: Mapping[Candidate, Mapping[float, Sequence[float]]]
    # by candidate: the rate that a plan without trials gives, per step
    rates: Mapping[Candidate, float]

    def best(self, among: Iterable[Candidate]) -> float:
        """Accuracy of the best of some candidates at the best of its rates.

        For each seed it is the others that say which that is; a single seed says so itself.
        """
        options = [values for one in among for values in self.reached[one].values()]
        seeds = range(len(options[0]))
        return fmean(_best_by_others(options, seed)[seed] for seed in seeds)

    def accuracy(self, candidate: Candidate, rate: float) -> float:
        """Accuracy of any batch at any rate: mean over the seeds."""
        batch, optimizer = candidate
        batches = sorted(one.batch for one in self.reached if one.optimizer == optimizer)
        known = {one: Candidate(one, optimizer) for one in batches}
        usual = exp(_between(batch, {b: log(self.rates[one]) for b, one in known.items()}))
        scale = rate / usual
        return _between(batch, {b: self._at(one, scale) for b, one in known.items()})

    def _at(self, candidate: Candidate, scale: float) -> float:
        means = {one: fmean(values) for one, values in self.reached[candidate].items()}
        return _between(scale, means)


def _best_by_others(options: Sequence[Sequence[float]], seed: int) -> Sequence[float]:
    others = [one for one in range(len(options[0])) if one != seed] or [seed]
    return max(options, key=lambda values: fmean(values[one] for one in others))


def _between(x: float, points: Mapping[float, float]) -> float:
    """The straight line over the logarithm between two points; beyond the ends the nearest."""
    known = sorted(points)
    return float(np.interp(log(x), [log(one) for one in known], [points[one] for one in known]))


def truth_of(lines: Iterable[Mapping[str, Any]], task: str, epochs: int) -> Truth | None:
    """The truth that lines of runs tell; of two lines of one training the later counts.

    With as many seeds as the whole grid of the task and length has; ``None`` without seed 0 of it.
    """
    found: dict[Candidate, dict[float, dict[int, float]]] = {}
    rates: dict[Candidate, float] = {}
    for line in lines:
        if (line["task"], line["epochs"]) != (task, epochs):
            continue
        one = Candidate(line["batch"], line["optimizer"])
        scale = round(line["rate_scale"], 4)
        found.setdefault(one, {}).setdefault(scale, {})[line["seed"]] = line["accuracy"]
        rates[one] = line["rate"] / line["rate_scale"]
    grid = [
        found.get(Candidate(batch, optimizer), {}).get(round(scale, 4), {})
        for batch, optimizer, scale in product(TASKS[task].batches, OPTIMIZERS, RATE_SCALES)
    ]
    whole = 0
    while whole in SEEDS and all(whole in seeds for seeds in grid):
        whole += 1
    if not whole:
        return None
    reached = {
        one: {
            scale: tuple(seeds[seed] for seed in range(whole))
            for scale, seeds in scales.items()
            if all(seed in seeds for seed in range(whole))
        }
        for one, scales in found.items()
    }
    return Truth(reached, rates)


# ----------------------------------------------------------------------------------------- scoring


@dataclass(frozen=True)
class Decision:
    """What a plan takes."""

    candidate: Candidate  # batch and optimizer
    rate: float  # highest of the training, per step
    seconds: float  # of the whole training, as predicted


@dataclass(frozen=True)
class Case:
    """A task with one length, its candidates as plans predict them, and what plans take."""

    truth: Truth  # what the trainings reached
    seconds: Mapping[Candidate, float]  # by candidate, of the whole training, as predicted
    # by candidate: accuracy, a share; none where nothing is predicted
    predicted: Mapping[Candidate, Estimate]
    informed: Decision  # taken with trials
    knee: Decision  # taken without
    trials_seconds: float  # of the profile's trials

    def regret(self, decision: Decision) -> float:
        """Points that the best candidate which is about as fast reaches more."""
        as_fast = [
            one for one, seconds in self._candidates.items() if seconds <= SLOWER * decision.seconds
        ]
        return self.truth.best(as_fast) - self._accuracy(decision) if as_fast else 0.0

    def time_regret(self, decision: Decision) -> float:
        """Time over the least of candidates that are as accurate."""
        enough = self._accuracy(decision) - AS_ACCURATE
        as_accurate = [
            seconds for one, seconds in self._candidates.items() if self.truth.best([one]) >= enough
        ]
        return decision.seconds / min([*as_accurate, decision.seconds])

    def errors(self) -> list[float]:
        """Points between predicted and measured accuracy, by candidate."""
        return [
            abs(100 * estimate.value - fmean(self._usual(one)))
            for one, estimate in self.predicted.items()
            if one in self.truth.reached
        ]

    def covered(self) -> list[float]:
        """For each training at the usual rate 1 within the predicted interval, else 0."""
        return [
            float(100 * estimate.low <= accuracy <= 100 * estimate.high)
            for one, estimate in self.predicted.items()
            if one in self.truth.reached
            for accuracy in self._usual(one)
        ]

    def half_widths(self) -> list[float]:
        """Half of each predicted interval, in points."""
        return [50 * (one.high - one.low) for one in self.predicted.values()]

    @property
    def _candidates(self) -> dict[Candidate, float]:
        return {one: self.seconds[one] for one in self.truth.reached if one in self.seconds}

    def _usual(self, candidate: Candidate) -> Sequence[float]:
        return self.truth.reached[candidate][1.0]

    def _accuracy(self, decision: Decision) -> float:
        return self.truth.accuracy(decision.candidate, decision.rate)


def found_of(cases: Mapping[tuple[str, int, int], Case]) -> dict[str, list[float]]:
    """What all cases say, by task, probe and epochs."""
    every = list(cases.values())
    longest = {(task, probe): epochs for task, probe, epochs in sorted(cases)}
    regrets = [case.regret(case.informed) for case in every]
    return {
        "regret_points": regrets,
        "worst_regret_points": [max(regrets)],
        "regret_points_knee": [case.regret(case.knee) for case in every],
        "time_regret": [case.time_regret(case.informed) for case in every],
        "accuracy_error_points": [one for case in every for one in case.errors()],
        "accuracy_coverage": [one for case in every for one in case.covered()],
        "accuracy_half_width_points": [one for case in every for one in case.half_widths()],
        "trials_share": [
            cases[(*probed, epochs)].trials_seconds / cases[(*probed, epochs)].informed.seconds
            for probed, epochs in longest.items()
        ],
    }


# ------------------------------------------------------------------------------------------- plans


def case_of(profile: Profile, truth: Truth, epochs: int) -> Case:
    """Plan for one length of a task, of which there are a profile with trials and the truth."""

    def planned(profile: Profile, objective: str, **keys: Any) -> Plan:
        goal = {"objective": objective, "least_steps": MIN_STEPS}
        return plan(profile, epochs=epochs, evaluate_epochs=epochs, goal=goal, **keys)

    seconds: dict[Candidate, float] = {}
    predicted: dict[Candidate, Estimate] = {}
    for optimizer in OPTIMIZERS:
        for row in planned(profile, "auto", optimizer=optimizer).considered:
            one = Candidate(row.global_batch_size, optimizer)
            if one in truth.reached and row.train_seconds is not None:
                seconds[one] = row.train_seconds.value
                if row.accuracy is not None:
                    predicted[one] = row.accuracy
    untold = profile.model_copy(update={"trials": ()})
    return Case(
        truth,
        seconds,
        predicted,
        informed=decision_of(planned(profile, "auto")),
        knee=decision_of(planned(untold, "knee")),
        trials_seconds=sum(trial.seconds for trial in profile.trials),
    )


def decision_of(made: Plan) -> Decision:
    """What a plan takes."""
    batch = made.stages[-1].global_batch_size
    row = next(one for one in made.considered if one.global_batch_size == batch)
    assert row.train_seconds is not None
    return Decision(Candidate(batch, made.update), made.learning_rate.peak, row.train_seconds.value)


def _profile(name: str, data: Path, folder: Path) -> Profile:
    """Probe a task on one core."""
    say(f"probing {name}")
    task, made = TASKS[name], folder / f"{name}.json"
    keys = {
        **job_keys(task, open_images(task, data, folder), max(task.epochs)),
        "goal.least_steps": MIN_STEPS,
        "probe.learning": LEARNING,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "batchwright.cli.commands", "probe", *words, "--out", str(made)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})  # before it has any threads
    if code := process.wait():
        raise SystemExit(f"probing {name} ended with exit code {code}")
    return read_record(made, Profile)


def measure(arguments: Arguments, folder: Path) -> Found:
    """Score the tasks whose truth is there."""
    lines = read_lines(TRUTH_LINES)
    cases: dict[tuple[str, int, int], Case] = {}
    for name in TASKS if arguments.full else ("digits",):
        truths = {epochs: truth_of(lines, name, epochs) for epochs in TASKS[name].epochs}
        if not any(truths.values()):
            say(f"{name}: seed 0 is not whole yet")
            continue
        for probe in range(PROBES if arguments.full else 1):
            profile = _profile(name, arguments.data or folder, folder)
            for epochs, truth in truths.items():
                if truth is not None:
                    cases[name, probe, epochs] = case_of(profile, truth, epochs)
    measurements = {
        f"{name}, {epochs} epochs, probe {probe}": told(one)
        for (name, probe, epochs), one in cases.items()
    }
    found = found_of(cases) if cases else {}
    if arguments.full:
        return found, measurements
    checks = BENCHMARK.values(found).values()  # of one task: its goals are for all of them
    named = {f"{one.name}_digits_check": one for one in checks}
    return {
        name: replace(one, name=name, goal=None, met=None) for name, one in named.items()
    }, measurements


def told(case: Case) -> dict[str, Any]:
    """What a report says of a case."""

    def taken(decision: Decision) -> dict[str, Any]:
        return {
            **decision.candidate._asdict(),
            "rate": decision.rate,
            "seconds": decision.seconds,
            "regret_points": case.regret(decision),
            "time_regret": case.time_regret(decision),
        }

    return {
        "with_trials": taken(case.informed),
        "knee": taken(case.knee),
        "trials_seconds": case.trials_seconds,
        "predicted": {
            f"{one.optimizer}-{one.batch}": estimate.model_dump()
            for one, estimate in case.predicted.items()
        },
    }


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
