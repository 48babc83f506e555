r"""Accuracy within a training, epoch by epoch: measured curves, and models fitted to them.

    python -m benchmarks.tools.epoch_curves gather [--data DIR] [--limit-minutes M]
        [--lines FILE]
    python -m benchmarks.tools.epoch_curves fit
    python -m benchmarks.tools.epoch_curves forecast

`gather` makes trainings of the look set of `benchmarks.planning.decisions` at full length (seed 10,
images held out from the training set, no test images), evaluated after every epoch. `fit` prints
how much accuracy within a training falls short of that of a whole training of as many samples.
`forecast` prints how well the accuracies so far predict a training's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import cos, inf, pi
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from batchwright.prediction.accuracy.learning import LearningModel, falls_short, fit_learning
from batchwright.prediction.accuracy.trainings import MIN_STEPS, Candidate, Observed
from batchwright.records.registries.optimizers import Normal
from benchmarks.harness.benchmark import RESULTS, add_gathering, make_parser, say, scratch
from benchmarks.harness.kept_runs import RunLines, Wanted, read_lines
from benchmarks.harness.plans import Opened
from benchmarks.planning.decisions_runs import (
    LOOK_LINES,
    LOOK_SEED,
    OPTIMIZERS,
    TASKS,
    Cell,
    open_images,
    wanted,
)

LINES = RESULTS / "epoch-curves.jsonl"
BATCHES = (128, 512)
SMALLER = {"digits": (32, 128)}  # 1,152 images make too few steps with 512


def cells() -> Iterator[Cell]:
    """The trainings to make; all tasks with one batch and optimizer come before the next pair."""
    for place in range(len(BATCHES)):
        for optimizer in OPTIMIZERS:
            for name, task in TASKS.items():
                batch = SMALLER.get(name, BATCHES)[place]
                yield Cell(name, batch, optimizer, 1.0, max(task.epochs))


def gather(runs: RunLines, data: Path, folder: Path, until: float) -> None:
    """Make the trainings that are not kept yet."""

    @cache
    def images_of(name: str) -> Opened:
        return open_images(TASKS[name], data, folder, look=TASKS[name].look_images)

    def one(cell: Cell) -> Wanted:
        made = wanted(cell, LOOK_SEED, images_of(cell.task), prefix="curve-")
        plan = made.plan.model_copy(
            update={"job": made.plan.job.model_copy(update={"evaluate_epochs": 1})}
        )
        more = {"classes": len(plan.data.classes), "held_out": plan.data.val_samples}
        return replace(made, plan=plan, facts={**made.facts, **more})

    runs.gather(map(one, cells()), until)


# ------------------------------------------------------------------------------------------ a fit


class Shortfall(NamedTuple):
    """An evaluation within a training."""

    task: str  # name, from `TASKS`
    optimizer: str  # as in a job
    factor: float  # learning rate at the time, as a share of the peak rate
    short: float  # logit of a whole training of these samples, by the law, minus the measured one
    error: float  # standard error of `short`: the law's own, and that of counting images


def law_of(task: str, *, most: float = inf) -> LearningModel:
    """The learning curve by a task's whole trainings in the look set, of at most ``most`` samples.

    Only trainings at the rate of a plan count, which the curves have, too.
    """
    lines = [one for one in read_lines(LOOK_LINES) if one["task"] == task]
    seen = [
        Observed(
            one["optimizer"], one["batch"], one["samples"], one["accuracy"] / 100, one["held_out"]
        )
        for one in lines
        if one["rate_scale"] == 1 and one["steps"] >= MIN_STEPS and one["samples"] <= most
    ]
    return fit_learning(seen, classes=lines[0]["classes"], optimizers=OPTIMIZERS)


def factors_of(epochs: int) -> list[float]:
    """Share of the peak rate at the end of each epoch: cosine, as the curves were trained."""
    return [(1 + cos(pi * epoch / epochs)) / 2 for epoch in range(1, epochs + 1)]


def shortfalls(lines: Iterable[dict[str, Any]]) -> Iterator[Shortfall]:
    """The shortfall of each evaluation of the curves except the last."""
    for one in lines:
        law, curve = law_of(one["task"]), [share / 100 for share in one["curve"]]
        samples = one["images"]
        for epoch, factor in enumerate(factors_of(len(curve))[:-1], 1):
            if epoch * samples >= MIN_STEPS * one["batch"]:
                seen = (one["optimizer"], one["batch"], epoch * samples, curve[epoch - 1])
                short, error = law.residual(Observed(*seen, one["held_out"]))
                yield Shortfall(one["task"], one["optimizer"], factor, short, error)


def fitted(seen: Sequence[Shortfall], power: float) -> tuple[float, Normal]:
    """Log likelihood, and mean and spread of the shortfall at the peak rate: the likeliest."""
    shares = np.array([one.factor**power for one in seen])
    short = np.array([one.short for one in seen])
    noise = np.array([one.error for one in seen])
    best = (-inf, Normal(0.0, 0.0))
    for spread in np.linspace(0.02, 1.5, 149):
        variance = (spread * shares) ** 2 + noise**2
        mean = float((short * shares / variance).sum() / (shares**2 / variance).sum())
        likelihood = float(
            (-((short - mean * shares) ** 2) / variance - np.log(variance)).sum() / 2
        )
        best = max(best, (likelihood, Normal(mean, float(spread))))
    return best


def coverage(lines: Iterable[dict[str, Any]], short: Mapping[str, Normal]) -> str:
    """Evaluations inside their intervals, by laws of trainings at most a quarter as long."""
    inside, widths = [], []
    for one in lines:
        samples = one["images"]
        law = law_of(one["task"], most=samples * one["epochs"] / 4)
        for epoch, factor in enumerate(factors_of(one["epochs"]), 1):
            if epoch * samples < MIN_STEPS * one["batch"]:
                continue
            candidate = Candidate(one["optimizer"], one["batch"], epoch * samples)
            mean, spread = short[one["optimizer"]]
            missing = Normal(mean * factor, spread * factor)
            told = law.evaluated(candidate, missing, one["held_out"])
            inside.append(told.low <= one["curve"][epoch - 1] / 100 <= told.high)
            widths.append(50 * (told.high - told.low))
    return f"{sum(inside)} of {len(inside)} inside, half width {median(widths):.1f} points"


def fit(lines: Sequence[dict[str, Any]]) -> None:
    """Print the values of `prediction.accuracy.learning.AT_PEAK`, and how well they fit."""
    seen = list(shortfalls(lines))
    for name in (*OPTIMIZERS, "all"):
        own = [one for one in seen if name in (one.optimizer, "all")]
        for power in (0.5, 1.0, 2.0):
            likelihood, (mean, spread) = fitted(own, power)
            say(f"{name}, power {power:g}: {mean:.2f} +- {spread:.2f}, likelihood {likelihood:.1f}")
    for task in TASKS:
        others = [one for one in seen if one.task != task]
        short = fitted(others, 1.0)[1]
        own = [one for one in lines if one["task"] == task]
        if own and others:
            told = coverage(own, dict.fromkeys(OPTIMIZERS, short))
            say(f"{task}, by the other tasks' {short.mean:.2f} +- {short.error:.2f}: {told}")
    for spread in (0.0, 0.1, 0.2, 0.3, 0.4):
        told = coverage(lines, dict.fromkeys(OPTIMIZERS, Normal(0.0, spread)))
        say(f"all, by 0 +- {spread:g}: {told}")


# ------------------------------------------------------------------------------------- forecasts

TAKEN: Mapping[str, Callable[[Sequence[Observed]], Sequence[Observed]]] = {
    "the last": lambda seen: seen[-1:],
    "the first and the last": lambda seen: seen[:1] + seen[1:][-1:],
    "all": lambda seen: seen,
}
"""Rules for the evaluations of a run so far that predict its end."""


class Forecast(NamedTuple):
    """A prediction of a training's last accuracy by its evaluations up to some epoch, in points."""

    done: float  # share of the epochs
    off: float  # predicted minus measured
    inside: bool  # whether the measured accuracy is inside the 95 % interval
    half_width: float  # half width of the interval
    to_come: float  # last accuracy minus that of the newest evaluation


def predicted_ends(
    lines: Iterable[dict[str, Any]], take: Callable[[Sequence[Observed]], Sequence[Observed]]
) -> Iterator[Forecast]:
    """Predict the ends of curves after each evaluation but the last."""
    for one in lines:
        kind, batch, of_epoch = one["optimizer"], one["batch"], one["images"]
        curve, factors = [share / 100 for share in one["curve"]], factors_of(one["epochs"])
        short = [falls_short(factor, factors[-1]) for factor in factors]
        seen: list[Observed] = []
        for epoch, reached in enumerate(curve[:-1], 1):
            if epoch * of_epoch < MIN_STEPS * batch:
                continue
            seen.append(
                Observed(
                    *(kind, batch, epoch * of_epoch, reached, one["held_out"]),
                    short=short[epoch - 1],
                )
            )
            law = fit_learning(take(seen), classes=one["classes"], optimizers=(kind,))
            training = Candidate(kind, batch, one["epochs"] * of_epoch)
            end = law.evaluated(training, short[-1], one["held_out"])
            yield Forecast(
                epoch / one["epochs"],
                100 * (end.value - curve[-1]),
                end.low <= curve[-1] <= end.high,
                50 * (end.high - end.low),
                100 * (curve[-1] - reached),
            )


def forecast(lines: Sequence[dict[str, Any]]) -> None:
    """Print the errors of `prediction.accuracy.forecast`, and of other rules."""
    for name, take in TAKEN.items():
        found = list(predicted_ends(lines, take))
        for low, high in pairwise((0.0, 0.25, 0.5, 0.75, 1.0)):
            own = [one for one in found if low < one.done <= high]
            say(
                f"by {name}, {low:g} to {high:g} of the epochs done: "
                f"{median(abs(one.off) for one in own):.1f} points off, "
                f"{sum(one.inside for one in own)} of {len(own)} inside, "
                f"half width {median(one.half_width for one in own):.1f}, "
                f"still to come {median(one.to_come for one in own):.1f}"
            )


# ------------------------------------------------------------------------------------ command line


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and gather, fit or forecast."""
    parser = make_parser(__doc__)
    kinds = parser.add_subparsers(dest="which", required=True)
    told = {"fit": fit, "forecast": forecast}
    for name in told:
        kinds.add_parser(name).add_argument("--lines", type=Path, default=LINES, metavar="FILE")
    add_gathering(kinds.add_parser("gather"), LINES)
    asked = parser.parse_args(words)
    if asked.which in told:
        told[asked.which](read_lines(asked.lines))
        return
    with scratch() as folder:
        gather(RunLines(asked.lines, folder), asked.data, folder, asked.until)
    say(f"kept in {asked.lines}")


if __name__ == "__main__":
    main()
