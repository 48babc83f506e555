"""Fit the prior of learning rates to the look set, and check it there.

    python -m benchmarks.tools.rates_prior [--simulate N]

For each task of the look set of `benchmarks.planning.decisions` and each optimizer, the
learning curve is fitted to all its trainings of `MIN_STEPS` steps or more, with hardly any prior
knowledge of rates. Over the tasks, the spread of the best rates around the usual one, and mean and
spread of the logarithms of their weights, are the values of `prediction.accuracy.learning.PRIOR`.

Then each task in turn is left out of the fit, and given trials of a 16th of its longer training
with one batch: at a third, once and three times the usual rate, and one further out if the best of
them is at an end. This is done with the usual rate, and with a rate that is three times too low or
too high, for which the look set has trainings as well. The rate that the trials lead to is judged
on the trainings of a 4th: its regret is the accuracy at the best of their rates minus the accuracy
at this rate, interpolated linearly over the logarithm of the rate; the regret of the usual rate is
printed beside it. The best of five looks better than it is, so regret is rather too high than too
low. No line of the truth is used.

--simulate N draws N tasks from the prior, and chooses trials for a tenth of their time, with and
without trials of rates, for three sizes of the training. Batch, optimizer and rate are then chosen
as a plan chooses them. Regret is the accuracy with the best batch, optimizer and rate that take at
most 1.1 times as long, minus the accuracy with the chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from batchwright.planning.candidates.trial_choice import RATE_STEP, Arm, Question
from batchwright.prediction.accuracy.learning import PRIOR, LearningModel, Prior, fit_learning
from batchwright.prediction.accuracy.trainings import MIN_STEPS, OFFSET_DIGITS, Candidate, Observed
from batchwright.records.registries.optimizers import Normal
from batchwright.workload.task import build_network, has_batch_norm
from benchmarks.harness.benchmark import make_parser, say
from benchmarks.harness.kept_runs import read_lines
from benchmarks.planning.decisions_runs import LOOK_LINES, OPTIMIZERS, TASKS

OPEN = {
    name: PRIOR.of(name)._replace(best_rate=Normal(0.0, 3.0), rate_weight=Normal(-1.5, 1.5))
    for name in ("sgd", "muon", "adamw")
}
"""A prior with hardly any knowledge of the best rate."""
MIN_SPREAD = 0.7  # least spread of weights: single trainings differ by more than tasks do


class Cell(NamedTuple):
    """Trainings of the look set that differ in the rate alone."""

    task: str
    optimizer: str
    batch: int
    samples: int


def look_set() -> dict[Cell, list[Observed]]:
    """The look set's trainings of enough steps, by cell."""
    cells: dict[Cell, list[Observed]] = {}
    for line in read_lines(LOOK_LINES):
        if line["steps"] >= MIN_STEPS:
            cell = Cell(line["task"], line["optimizer"], line["batch"], line["samples"])
            cells.setdefault(cell, []).append(_observed(line))
    return cells


def _observed(line: Mapping[str, Any]) -> Observed:
    offset = round(log(line["rate_scale"]), OFFSET_DIGITS)
    return Observed(
        line["optimizer"],
        line["batch"],
        line["samples"],
        line["accuracy"] / 100,
        line["held_out"],
        offset,
        line.get("diverged", False),
    )


def classes_of(task: str) -> int:
    """Number of classes of a task."""
    return next(line["classes"] for line in read_lines(LOOK_LINES) if line["task"] == task)


@cache
def normalized(task: str) -> bool:
    """Whether a task's network has batch normalization."""
    one = TASKS[task]
    return has_batch_norm(build_network(one.network, classes=classes_of(task), side=one.side))


def best_and_weight(
    cells: Mapping[Cell, Sequence[Observed]], task: str, optimizer: str
) -> tuple[float, float]:
    """Logarithms of a task's best rate over the usual one, and of the rate's weight."""
    seen = [one for cell in cells if cell.task == task for one in cells[cell]]
    prior = replace(PRIOR, optimizers=OPEN)
    model = fit_learning(seen, classes=classes_of(task), optimizers=OPTIMIZERS, prior=prior)
    return model.rate_of(optimizer)


def prior_of(numbers: Mapping[tuple[str, str], tuple[float, float]], tasks: Iterable[str]) -> Prior:
    """The prior of rates by some tasks."""
    known = {}
    for name in OPTIMIZERS:
        bests, weights = zip(*(numbers[task, name] for task in tasks), strict=True)
        # The usual rate may be a factor of 3 off, whatever it was on these tasks.
        best = Normal(0.0, max(RATE_STEP, sqrt(fmean(one**2 for one in bests))))
        mean = fmean(weights)
        spread = sqrt(fmean((one - mean) ** 2 for one in weights))
        weight = Normal(mean, max(MIN_SPREAD, spread))
        known[name] = PRIOR.of(name)._replace(best_rate=best, rate_weight=weight)
    return replace(PRIOR, optimizers=known)


def found_offset(
    trials: Sequence[Observed], wrong: int, task: str, prior: Prior, batch: int
) -> float:
    """Offset of the rate that trials lead to with a batch, if the usual rate is 3 to the power of
    ``wrong`` off.
    """
    shifted = {round(one.offset / RATE_STEP) - wrong: one for one in trials}
    given = [step for step in (-1, 0, 1) if step in shifted]
    best = max(given, key=lambda step: shifted[step].accuracy)
    given += [step for step in (2 * best,) if best and step in shifted]
    seen = [shifted[step]._replace(offset=round(step * RATE_STEP, OFFSET_DIGITS)) for step in given]
    name = trials[0].optimizer
    usual_rate = None if normalized(task) else sqrt
    known: dict[str, Any] = {"prior": prior, "usual_rate": usual_rate}
    model = fit_learning(seen, classes=classes_of(task), optimizers=OPTIMIZERS, **known)
    return model.offset(name, batch)


def accuracy_at(trainings: Sequence[Observed], offset: float) -> float:
    """Accuracy in percent at an offset, interpolated between the two nearest trainings."""
    points = sorted((one.offset, 100 * one.accuracy) for one in trainings)
    return float(np.interp(offset, *zip(*points, strict=True)))


# -------------------------------------------------------------------------------------- simulated

EPOCH_SECONDS = {32: 12.4, 64: 10.3, 128: 8.8, 256: 8.0, 512: 7.7, 1024: 7.5, 2048: 7.4}
"""By batch, for 20,000 images: measured (docs/log.md, the learning curve)."""
SIZES = ((20_000, 6, 10), (20_000, 24, 10), (50_000, 20, 100))  # images, epochs, classes
SHARE, SLOWER, TOLERANCE = 0.1, 1.1, 0.01


def invented(classes: int, seed: int, *, apart: bool) -> LearningModel:
    """A task drawn from the prior; with ``apart`` its best rates differ from the usual ones.

    Tasks that are learnt at once or never are not drawn.
    """
    blank, numbers = fit_learning([], classes=classes, optimizers=OPTIMIZERS), None
    source = np.random.default_rng(seed)
    while numbers is None or not (-3 < numbers[0] < 3 and exp(min(numbers[1], numbers[4])) > 0.2):
        numbers = source.multivariate_normal(blank._mean, blank._covariance)
    rates = 3 * len(OPTIMIZERS)  # of each the best one and the logarithm of its weight
    if not apart:
        numbers[rates::2] = 0.0
    gains = np.exp(numbers[rates + 1 :: 2]) * numbers[rates::2] ** 2
    numbers[:rates:3] -= gains - gains[0]  # levels were drawn as they are at the best rates
    return replace(blank, _mean=numbers)


def invented_question(task: LearningModel, images: int, epochs: int, *, rates: bool) -> Question:
    """The planner's question for an invented task; an epoch takes as long as it has images."""
    size = images / 20_000
    return Question(
        arms=tuple(
            Arm(name, batch, 1, batch, size * one)
            for batch, one in EPOCH_SECONDS.items()
            for name in OPTIMIZERS
        ),
        epochs=epochs,
        samples=images,
        classes=task.classes,
        tolerance=TOLERANCE,
        judging_seconds=0.15 * size,
        rates=rates,
    )


def trials_of(task: LearningModel, question: Question, seed: int) -> list[Observed]:
    """The trials that are chosen for an invented task, within `SHARE` of its training's time."""
    noise = np.random.default_rng(seed)
    budget = SHARE * question.epochs * EPOCH_SECONDS[256] * question.samples / 20_000
    seen, spent = list[Observed](), 0.0
    while (wanted := question.next_trial(seen, budget=budget, left=budget - spent)) is not None:
        guess = 1 / task.classes
        unit = (task.accuracy(wanted.training).value - guess) / (1 - guess)
        unit = 1 / (1 + exp(-log(unit / (1 - unit)) - PRIOR.seed * noise.normal()))
        right = noise.binomial(question.held_out, guess + (1 - guess) * unit)
        reached = float(right / question.held_out)
        seen.append(Observed(*wanted.training[:3], reached, question.held_out, wanted.offset))
        spent += wanted.seconds
    return seen


def simulated(task: LearningModel, images: int, epochs: int, *, rates: bool, seed: int) -> float:
    """Regret on an invented task, in points."""
    question = invented_question(task, images, epochs, rates=rates)
    seen = trials_of(task, question, seed)
    model = fit_learning(seen, classes=task.classes, optimizers=OPTIMIZERS)
    options = {
        Candidate(name, batch, images * epochs, model.offset(name)): EPOCH_SECONDS[batch]
        for name, batch in product(OPTIMIZERS, EPOCH_SECONDS)
    }
    predicted = {one: model.accuracy(one).value for one in options}
    least = max(predicted.values()) - TOLERANCE
    taken = min((one for one in options if predicted[one] >= least), key=options.__getitem__)
    best = max(
        task.accuracy(one._replace(offset=offset)).value
        for one in options
        for offset in np.linspace(-3 * RATE_STEP, 3 * RATE_STEP, 31)
        if options[one] <= SLOWER * options[taken]
    )
    return 100 * (best - task.accuracy(taken).value)


def simulate(count: int) -> None:
    """Print regrets with and without trials of rates."""
    for apart, (images, epochs, classes) in product((True, False), SIZES):
        tasks = [invented(classes, seed, apart=apart) for seed in range(count)]
        for rates in (False, True):
            regrets = [
                simulated(task, images, epochs, rates=rates, seed=seed)
                for seed, task in enumerate(tasks)
            ]
            say(
                f"{images} images, {epochs} epochs, {classes} classes, best rates "
                f"{'others' if apart else 'the usual ones'}, tried {rates}: regret "
                f"{fmean(regrets):.2f} points, median {median(regrets):.2f}, worst "
                f"{max(regrets):.1f}"
            )


def main(words: Sequence[str] | None = None) -> None:
    """Print the fitted prior and the check's regrets, or with --simulate those of simulations."""
    parser = make_parser(__doc__)
    parser.add_argument("--simulate", type=int, metavar="N")
    asked = parser.parse_args(words)
    if asked.simulate:
        simulate(asked.simulate)
        return
    cells = look_set()
    numbers = {
        (task, name): best_and_weight(cells, task, name) for task in TASKS for name in OPTIMIZERS
    }
    for (task, name), (best, weight) in numbers.items():
        say(f"{task:22}{name:6} best rate {best:+.2f}, weight {weight:+.2f}")
    fitted = prior_of(numbers, TASKS)
    for name, one in fitted.optimizers.items():
        say(f"{name}: best_rate={one.best_rate}, rate_weight={one.rate_weight}")
    regrets: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
    for cell, trials in cells.items():
        if len(trials) < 3 or cell.samples != min(_lengths(cells, cell.task)):
            continue
        prior = prior_of(numbers, [task for task in TASKS if task != cell.task])
        for judged, longer in cells.items():
            alike = judged.task == cell.task and judged.optimizer == cell.optimizer
            if not alike or judged.samples == cell.samples or len(longer) < 3:
                continue
            for wrong in (-1, 0, 1):
                found = found_offset(trials, wrong, cell.task, prior, judged.batch)
                best = max(100 * one.accuracy for one in longer)
                regret, without = (
                    best - accuracy_at(longer, x + wrong * RATE_STEP) for x in (found, 0.0)
                )
                words = f"{cell.task} {cell.batch} for {judged.batch}: {found / RATE_STEP:+.2f}"
                regrets.setdefault((cell.optimizer, wrong), []).append((regret, without, words))
    for (name, wrong), some in sorted(regrets.items()):
        regret, without, _ = zip(*some, strict=True)
        say(
            f"{name}, usual rate times 3^{wrong:+d}: regret {fmean(regret):.2f} points, median "
            f"{median(regret):.2f}, worst {max(some)[0]:.2f} ({max(some)[2]}); without trials "
            f"{fmean(without):.2f}, worst {max(without):.2f}"
        )


def _lengths(cells: Iterable[Cell], task: str) -> list[int]:
    return [cell.samples for cell in cells if cell.task == task]


if __name__ == "__main__":
    main()
