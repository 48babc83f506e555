"""How good the batch and the optimizer are that a plan takes, judged by a grid of whole trainings.

The truth is a grid of trainings: for each task, each of two lengths, SGD and Muon, each batch
of 32, 64, ... 2,048 that leaves at least 4 steps an epoch (and the largest batch that does),
and three learning rates: the one that a plan without trials gives, a third of it and three times
it. Where the best rate with seed 0 is at an end of those, the next factor of 3 beyond that end is
added, until the best rate is interior or 27 times or a 27th of the plan's. Seeds are 0 to 2. One
worker trains in one process on one core; everything else is the job's default (cosine schedule,
rates scaled with the square root of the batch, no micro-batches, usual augmentation).

    task                  network          side   training images  epochs    batches
    digits                resnet8           8 px  1,437            3 and 12  32 to   359
    cifar-resnet8         resnet8          16 px  8,192            3 and 12  32 to 2,048
    cifar-vgg8            vgg8             16 px  8,192            3 and 12  32 to 2,048
    groups-resnet8        resnet8          16 px  8,192            3 and 12  32 to 2,048
    imagenette-resnet8    resnet8          64 px  2,048            2 and  8  32 to   512
    imagenette-mobilenet  mobilenet_small  32 px  2,048            2 and  8  32 to   512

Precision is bfloat16 where the processor computes in it, else float32. A kept line of either
counts, and says which it is: 36 trainings in both differ by 0.1 points in the mean (float32 minus
bfloat16, standard error 0.2; until 2026-11-28).

The cifar tasks have CIFAR-100's 100 classes; groups-resnet8 has the first ten of its superclasses
in the order of its coarse labels, five classes each: aquatic mammals, fish, flowers, food
containers, fruit and vegetables, household electrical devices, household furniture, insects, large
carnivores, large man-made outdoor things; all at half their side. imagenette2-160 is ten classes
of ImageNet. The small sides save time: a training takes about a minute at most, and there are
more than 1,200. Training images are drawn evenly over the originals. Accuracy is that of all test
images after the last epoch. Test images are used for this score alone.

The look set is another set of trainings, which the prior of the learning model may be tuned
on: the same tasks with seed 10, other training images (drawn evenly over those that are left),
and accuracy on images held out from the training set (2,000 of CIFAR, 1,000 of Imagenette). It
has batches 32, 128, 512 and 2,048, SGD and Muon at the plan's rate, and three lengths: a 16th,
a 4th and all of the samples of the longer training, where less than an epoch is an epoch of fewer
images. No digits are left beside the 1,437, so their look set trains on 1,152 of them, holds out
285, and has 256 as its largest batch.

What is assumed about rates is tuned on the look set, too. For that, some of its trainings are made
with a third and three times the plan's rate besides: those of a 16th with batch 32 or 128 (also
with a ninth and nine times), those of a 4th with batch 128 or 512 (with 32 as well for Imagenette
and the digits), and those of all samples with batch 128 or 512 that have at least 25 steps.

    python -m benchmarks.planning.decisions_runs look|look-rates|truth
        [--data DIR] [--task NAME] [--limit-minutes M]

makes the missing runs and adds a line for each to benchmarks/results/decisions-runs.jsonl (truth)
or benchmarks/results/learning-curves.jsonl (look, look-rates). The truth is made in this order:
seed 0, task by task, the tasks with the shortest trainings first, each at the plan's rate, at the
other two and beyond the ends; then seed 1, then seed 2.

The cases are plans for each task, each of its two lengths and each of three probes. Two plans
are scored in a case: `goal.objective=auto`, from the profile with its trials, and
`goal.objective=knee`, from the same profile without them. One profile serves both lengths.
`goal.least_steps` is 4. A case counts as soon as seed 0 of its grid is complete.

A *candidate* is a batch of the grid with SGD or Muon. Its time is the one that the plan predicts,
without trials. Its accuracy is the mean over the seeds at the best of its rates. The accuracy of
the *chosen* batch and optimizer is the one at the rate that the plan chose: a rate between two
of the grid is interpolated linearly over its logarithm, a rate beyond them counts as the nearest
one; batches that the grid lacks are interpolated in the same way. A training that gave up counts
as guessing.

The best of many noisy means looks better than it is. So wherever the best candidate or rate is
needed, it is chosen by the other seeds: for each seed, the one with the best mean over the other
seeds is taken, and its result with this seed counts; the mean over the seeds is the accuracy. While
there is a single seed, it chooses for itself.

Default rates that are off. An optimizer's default rate may suit a task badly, and trials are to
make up for it: a factor of 3 must not cost 2 points. So each task is probed twice more, with the
default rates of both optimizers a factor of 3 too low, and too high, in the probe and in the plans
from it (`shifted_rates`); its trials then try rates around the shifted one. What is compared was
written down before anything was measured: accuracy with the choice of `goal.objective=auto` as it
is, mean over the task's probes, minus accuracy with the choice where the rates are off. A choice is
batch, optimizer and rate, and a rate is judged as above; where a plan's rate lies beyond the grid,
the cost is understated (the report has each rate over the usual one). For comparison, what would be
lost without trials of rates: the same with the choice as it is, at its rate times the factor.

The figures, in points of accuracy (hundredths of a share) but for the ratio and the shares, with
the range as the spread of a mean and the quartiles as that of a median:

    regret_points          accuracy of the best candidate that takes at most 1.1 times as long as
                           the chosen one, minus that of the chosen one
    regret_points_knee     the same for the plan without trials
    time_regret            time of the chosen one over the shortest time of a candidate that is at
                           most a point less accurate (the chosen one included)
    accuracy_error_points  |predicted - measured| accuracy of all candidates of all cases: predicted
                           by the plan for the candidate's batch and optimizer, measured at the rate
                           of that plan (interpolated as above), mean over the seeds
    accuracy_coverage      share of the candidates' accuracies with each seed, at the plan's rate,
                           within the predicted 95 % interval, which is for a single seed;
                           accuracy_half_width_points is half its width
    trials_share           time of the trials over the predicted time of the chosen training, of the
                           longer of the two lengths, which the trials are made for
    trials_share_shorter   the same of the shorter length, whose plan uses the same trials; no goal
    shifted_rate_points    accuracy with the chosen one minus that with default rates a factor of 3
                           off, mean over tasks, lengths and both directions;
                           worst_shifted_rate_points is the largest, and
                           shifted_rate_points_untried what the factor costs without trials

--full probes each task three times on one core, with trials for a tenth of the longer training's
time, and twice with shifted rates, and scores the plans by the kept lines; --quick does so for
digits alone, with one probe in place of the three.
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
from benchmarks.planning.shifted_rates import usual_rates_times

LEARNING = 0.1  # time for trials, as a share of the longer training's time
PROBES = 3  # probes of each task: trials of seconds differ from probe to probe, and so do plans
SLOWER = 1.1  # most time of a candidate over that of the chosen one, to count for the regret
AS_ACCURATE = 1.0  # points that a candidate may be less accurate, to count for the time regret
SHIFTS = (1 / 3, 3.0)  # factors by which default rates are off
SHIFTED = "benchmarks.planning.shifted_rates"  # the command with such default rates

BENCHMARK = Benchmark(
    "decisions",
    "Decisions",
    "Plans for six tasks, two training lengths and three probes each, judged by whole trainings "
    "with every batch (32 to 2,048, or until an epoch has 4 steps), SGD and Muon, and several "
    "rates (the candidates). Spread: the range of a mean, the quartiles of a median",
    (
        Figure("regret_points", "points", "mean", "accuracy that the plan loses: the best "
               "candidate that takes at most 1.1 times as long, minus the plan's batch and "
               "optimizer", at_most=1.0),
        Figure("worst_regret_points", "points", "mean", "accuracy that the plan loses to the best "
               "candidate that takes at most 1.1 times as long, largest of all cases",
               at_most=3.0),
        Figure("regret_points_knee", "points", "mean", "accuracy that a plan without trials loses, "
               "which takes the knee of time (`goal.objective=knee`)"),
        Figure("time_regret", "ratio", "mean", "time with the plan's batch and optimizer over the "
               "shortest time of a candidate at most a point less accurate", at_most=1.15),
        Figure("accuracy_error_points", "points", "median", "error of the predicted accuracy of a "
               "candidate, median", at_most=2.0),
        Figure("accuracy_coverage", "share", "share", "share of the candidates' accuracies with "
               "each seed, at the plan's rate, that lie in the predicted 95 % interval",
               at_least=0.9),
        Figure("accuracy_half_width_points", "points", "median",
               "half width of the predicted interval of accuracy, median"),
        Figure("trials_share", "share", "mean", "time of the trials over the predicted time of the "
               "longer training, which the trials are made for", at_most=0.1),
        Figure("trials_share_shorter", "share", "mean", "time of the same trials over the "
               "predicted time of the shorter training, whose plan uses them, too"),
        Figure("shifted_rate_points", "points", "mean", "accuracy that default rates a factor of 3 "
               "too low or too high cost, with trials", at_most=2.0),
        Figure("worst_shifted_rate_points", "points", "mean", "accuracy that default rates a "
               "factor of 3 off cost, with trials, largest of tasks, lengths and directions"),
        Figure("shifted_rate_points_untried", "points", "mean", "accuracy that a factor of 3 in "
               "the plan's rate costs where batch and optimizer stay: without trials of rates"),
    ),
    seeds=SEEDS,
    needs_data="full",
    copies=True,
)  # fmt: skip

# ------------------------------------------------------------------------------------------- truth


class Candidate(NamedTuple):
    """A batch and an optimizer that a plan can choose."""

    batch: int  # global batch, in samples
    optimizer: str  # as in a job


@dataclass(frozen=True)
class Truth:
    """Measured accuracies of a task's trainings of one length, all with the same seeds."""

    # by candidate and rate scale: accuracy with each seed, in percent
    reached: Mapping[Candidate, Mapping[float, Sequence[float]]]
    # by candidate: the rate that a plan without trials gives, per step
    rates: Mapping[Candidate, float]

    def best(self, among: Iterable[Candidate]) -> float:
        """Accuracy of the best of some candidates at the best of its rates, in percent.

        For each seed, the other seeds choose candidate and rate; a single seed chooses for itself.
        """
        options = [values for one in among for values in self.reached[one].values()]
        seeds = range(len(options[0]))
        return fmean(_best_by_others(options, seed)[seed] for seed in seeds)

    def accuracies(self, candidate: Candidate, rate: float) -> list[float]:
        """Accuracy with each seed at any batch and rate, interpolated, in percent."""
        batch, optimizer = candidate
        known = self._by_batch(optimizer)
        usual = self.usual_rate(candidate)
        by_batch = {
            b: [
                _between(rate / usual, dict(zip(scales, values, strict=True)))
                for values in zip(*scales.values(), strict=True)
            ]
            for b, one in known.items()
            for scales in [self.reached[one]]
        }
        return [
            _between(batch, dict(zip(by_batch, values, strict=True)))
            for values in zip(*by_batch.values(), strict=True)
        ]

    def usual_rate(self, candidate: Candidate) -> float:
        """The rate that a plan without trials gives at any batch, interpolated, per step."""
        known = self._by_batch(candidate.optimizer)
        return exp(_between(candidate.batch, {b: log(self.rates[one]) for b, one in known.items()}))

    def _by_batch(self, optimizer: str) -> dict[int, Candidate]:
        return {one.batch: one for one in sorted(self.reached) if one.optimizer == optimizer}


def _best_by_others(options: Sequence[Sequence[float]], seed: int) -> Sequence[float]:
    others = [one for one in range(len(options[0])) if one != seed] or [seed]
    return max(options, key=lambda values: fmean(values[one] for one in others))


def _between(x: float, points: Mapping[float, float]) -> float:
    """Linear interpolation over the logarithm of ``x``; beyond the ends the nearest point."""
    known = sorted(points)
    return float(np.interp(log(x), [log(one) for one in known], [points[one] for one in known]))


def truth_of(lines: Iterable[Mapping[str, Any]], task: str, epochs: int) -> Truth | None:
    """The truth by the kept lines of runs; of two lines of the same training the later counts.

    It has the seeds that the whole grid was trained with; ``None`` without seed 0.
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
    """The choice of a plan."""

    candidate: Candidate  # batch and optimizer
    rate: float  # highest of the training, per step
    seconds: float  # of the whole training, as predicted


@dataclass(frozen=True)
class Case:
    """A task with one length: its candidates as plans predict them, and the plans' choices."""

    truth: Truth  # what the trainings reached
    seconds: Mapping[Candidate, float]  # by candidate, of the whole training, as predicted
    # by candidate: highest rate per step and accuracy, a share; those not predicted are absent
    predicted: Mapping[Candidate, tuple[float, Estimate]]
    informed: Decision  # choice of the plan with trials
    knee: Decision  # choice of the plan without trials, by the knee of time
    trials_seconds: float  # of the profile's trials
    # By factor, choice of a plan with trials, from a probe, where the default rates are so far off.
    shifted: Mapping[float, Decision]

    def regret(self, decision: Decision) -> float:
        """Points by which the best candidate that is about as fast is more accurate."""
        as_fast = [
            one for one, seconds in self._candidates.items() if seconds <= SLOWER * decision.seconds
        ]
        return self.truth.best(as_fast) - self._accuracy(decision) if as_fast else 0.0

    def time_regret(self, decision: Decision) -> float:
        """Time of a choice over the shortest time of a candidate that is about as accurate."""
        enough = self._accuracy(decision) - AS_ACCURATE
        as_accurate = [
            seconds for one, seconds in self._candidates.items() if self.truth.best([one]) >= enough
        ]
        return decision.seconds / min([*as_accurate, decision.seconds])

    def shift_cost(self, factor: float) -> float:
        """Points by which the choice is less accurate where default rates are off."""
        return self._accuracy(self.informed) - self._accuracy(self.shifted[factor])

    def shift_cost_untried(self, factor: float) -> float:
        """Points by which a factor in the rate of the choice makes it less accurate."""
        off = replace(self.informed, rate=factor * self.informed.rate)
        return self._accuracy(self.informed) - self._accuracy(off)

    def errors(self) -> list[float]:
        """Points between predicted and measured accuracy, one value for each candidate."""
        return [
            abs(100 * estimate.value - fmean(self.truth.accuracies(one, rate)))
            for one, (rate, estimate) in self.predicted.items()
        ]

    def covered(self) -> list[float]:
        """For each candidate and seed 1 within the predicted interval, else 0."""
        return [
            float(100 * estimate.low <= accuracy <= 100 * estimate.high)
            for one, (rate, estimate) in self.predicted.items()
            for accuracy in self.truth.accuracies(one, rate)
        ]

    def half_widths(self) -> list[float]:
        """Half of each predicted interval, in points."""
        return [50 * (one.high - one.low) for _, one in self.predicted.values()]

    @property
    def _candidates(self) -> dict[Candidate, float]:
        return {one: self.seconds[one] for one in self.truth.reached if one in self.seconds}

    def _accuracy(self, decision: Decision) -> float:
        return fmean(self.truth.accuracies(decision.candidate, decision.rate))


def found_of(cases: Mapping[tuple[str, int, int], Case]) -> dict[str, list[float]]:
    """All figures, by name, from cases by task, number of the probe and epochs."""
    every = list(cases.values())
    shares: dict[tuple[str, int], list[float]] = {}  # by task and probe, the shorter length first
    for (task, probe, _), case in sorted(cases.items()):
        share = case.trials_seconds / case.informed.seconds
        shares.setdefault((task, probe), []).append(share)
    regrets = [case.regret(case.informed) for case in every]
    costs: dict[tuple[str, int, float], list[float]] = {}  # by task, epochs and factor
    for (task, _, epochs), case in cases.items():
        for factor in case.shifted:
            costs.setdefault((task, epochs, factor), []).append(case.shift_cost(factor))
    means = [fmean(of_probes) for of_probes in costs.values()]
    return {
        "regret_points": regrets,
        "worst_regret_points": [max(regrets)],
        "regret_points_knee": [case.regret(case.knee) for case in every],
        "time_regret": [case.time_regret(case.informed) for case in every],
        "accuracy_error_points": [one for case in every for one in case.errors()],
        "accuracy_coverage": [one for case in every for one in case.covered()],
        "accuracy_half_width_points": [one for case in every for one in case.half_widths()],
        "trials_share": [both[-1] for both in shares.values()],
        "trials_share_shorter": [both[0] for both in shares.values()],
        "shifted_rate_points": means,
        "worst_shifted_rate_points": [max(means)],
        "shifted_rate_points_untried": [
            case.shift_cost_untried(factor) for case in every for factor in case.shifted
        ],
    }


# ------------------------------------------------------------------------------------------- plans


def planned(profile: Profile, epochs: int, objective: str = "auto", **keys: Any) -> Plan:
    """A plan of a case."""
    goal = {"objective": objective, "least_steps": MIN_STEPS}
    return plan(profile, epochs=epochs, evaluate_epochs=epochs, goal=goal, **keys)


def case_of(profile: Profile, truth: Truth, epochs: int, shifted: Mapping[float, Decision]) -> Case:
    """Make the plans of a case: a task with one length, from a profile with trials."""
    seconds: dict[Candidate, float] = {}
    predicted: dict[Candidate, tuple[float, Estimate]] = {}
    for optimizer in OPTIMIZERS:
        for row in planned(profile, epochs, optimizer=optimizer).considered:
            one = Candidate(row.global_batch_size, optimizer)
            if one in truth.reached and row.train_seconds is not None:
                seconds[one] = row.train_seconds.value
                if row.accuracy is not None:
                    made = planned(profile, epochs, optimizer=optimizer, global_batch=one.batch)
                    predicted[one] = made.learning_rate.peak, row.accuracy
    without_trials = profile.model_copy(update={"trials": ()})
    return Case(
        truth,
        seconds,
        predicted,
        informed=decision_of(planned(profile, epochs)),
        knee=decision_of(planned(without_trials, epochs, "knee")),
        trials_seconds=sum(trial.seconds for trial in profile.trials),
        shifted=shifted,
    )


def decision_of(made: Plan) -> Decision:
    """The choice of a plan."""
    batch = made.stages[-1].global_batch_size
    row = next(one for one in made.considered if one.global_batch_size == batch)
    assert row.train_seconds is not None
    return Decision(Candidate(batch, made.update), made.learning_rate.peak, row.train_seconds.value)


def shifted_decision(profile: Profile, epochs: int, factor: float) -> Decision:
    """The choice of a plan where default rates are off, as in the probe of ``profile``."""
    with usual_rates_times(factor):
        return decision_of(planned(profile, epochs))


def _profile(name: str, data: Path, folder: Path, factor: float = 1.0) -> Profile:
    """Probe a task on one core, with ``factor`` times the default rates."""
    say(f"probing {name}" + (f", default rates times {factor:.3g}" if factor != 1 else ""))
    task, made = TASKS[name], folder / f"{name}-{factor:.3g}.json"
    keys = {
        **job_keys(task, open_images(task, data, folder), max(task.epochs)),
        "goal.least_steps": MIN_STEPS,
        "probe.learning": LEARNING,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", SHIFTED, str(factor), "probe", *words, "--out", str(made)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})  # before it has any threads
    if code := process.wait():
        raise SystemExit(f"probing {name} ended with exit code {code}")
    return read_record(made, Profile)


def measure(arguments: Arguments, folder: Path) -> Found:
    """Score plans for the tasks whose truth has been gathered."""
    lines = read_lines(TRUTH_LINES)
    cases: dict[tuple[str, int, int], Case] = {}
    for name in TASKS if arguments.full else ("digits",):
        truths = {epochs: truth_of(lines, name, epochs) for epochs in TASKS[name].epochs}
        if not any(truths.values()):
            say(f"{name}: seed 0 is not whole yet")
            continue
        data = arguments.data or folder
        off = {factor: _profile(name, data, folder, factor) for factor in SHIFTS}
        shifted = {
            epochs: {factor: shifted_decision(one, epochs, factor) for factor, one in off.items()}
            for epochs in truths
        }
        for probe in range(PROBES if arguments.full else 1):
            profile = _profile(name, data, folder)
            for epochs, truth in truths.items():
                if truth is not None:
                    cases[name, probe, epochs] = case_of(profile, truth, epochs, shifted[epochs])
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
    """What a report has of a case."""

    def taken(decision: Decision) -> dict[str, Any]:
        return {
            **decision.candidate._asdict(),
            "rate": decision.rate,
            "times_usual_rate": decision.rate / case.truth.usual_rate(decision.candidate),
            "seconds": decision.seconds,
            "regret_points": case.regret(decision),
            "time_regret": case.time_regret(decision),
        }

    return {
        "with_trials": taken(case.informed),
        "knee": taken(case.knee),
        "shifted": {
            f"{factor:.3g}": {**taken(decision), "cost_points": case.shift_cost(factor)}
            for factor, decision in case.shifted.items()
        },
        "trials_seconds": case.trials_seconds,
        "predicted": {
            f"{one.optimizer}-{one.batch}": {"rate": rate, **estimate.model_dump()}
            for one, (rate, estimate) in case.predicted.items()
        },
    }


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
