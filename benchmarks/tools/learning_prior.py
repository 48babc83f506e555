"""Derive the prior of the learning curve from trainings, and print it beside the shipped one.

    python -m benchmarks.tools.learning_prior [--check]

Seven tasks: the six of the look set of `benchmarks.planning.decisions`, in trainings of `MIN_STEPS`
steps or more, and `TEN_CLASSES`. No line of the truth is used.

- Level, slope and critical batch, and Muon's slope and critical batch relative to SGD's: the curve
  is fitted to each task's trainings at the usual rate, with hardly any prior knowledge (`WIDE`).
  Means and spreads over the tasks, with the errors of the fits in the spreads, are the prior of a
  second fit, which gives the numbers in the same way.
- Rates, and Muon's level relative to SGD's at the best rate of each: the curve is fitted to the
  trainings of the look set at all rates, with `WIDE`. The usual rate is what is expected, so the
  spread of the best one is around it.
- The scatter from seed to seed and around the curve: with it, the squares of the distances to the
  curves of the second fit, each over its variance, add up to the degrees of freedom.

A number's tolerance is the standard error of a mean, or of a spread, over so few tasks, so that a
shipped number within it cannot be told from the derived one, and 0.2 at most. `DIFFERENT` says why
others differ. AdamW's prior is assumed: no task had it.

--check leaves each task in turn out of the prior, and gives it trials of a 16th of its longer
training with one batch: at a third, once and three times the usual rate, and one further out if the
best of them is at an end. This is done with the usual rate, and with a rate that is three times too
low or too high, for which the look set has trainings as well. The rate that the trials lead to is
judged on the trainings of a 4th and of all samples: its regret is the accuracy at the best of their
rates minus the accuracy at this rate, interpolated linearly over the logarithm of the rate; the
regret of the usual rate is printed beside it. The best of five looks better than it is, so regret
is rather too high than too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, hypot, log, sqrt
from statistics import fmean, median, pstdev, stdev
from typing import Any, NamedTuple

import numpy as np

from batchwright.planning.candidates.trial_choice import RATE_STEP
from batchwright.prediction.accuracy import learning
from batchwright.prediction.accuracy.learning import (
    FEW_TASKS,
    PRIOR,
    LearningModel,
    Prior,
    fit_learning,
)
from batchwright.prediction.accuracy.learning_law import gain_of, rate_places
from batchwright.prediction.accuracy.trainings import MIN_STEPS, OFFSET_DIGITS, Observed
from batchwright.prediction.fit import Z_975, student_t_975
from batchwright.records.registries.optimizers import LearningPrior, Normal
from batchwright.workload.task import build_network, has_batch_norm
from benchmarks.harness.benchmark import make_parser, say
from benchmarks.harness.kept_runs import read_lines
from benchmarks.planning.decisions_runs import LOOK_LINES, OPTIMIZERS, TASKS

PARTS = ("level", "slope", "critical")
RATES = {"best_rate": Normal(0.0, 3.0), "rate_weight": Normal(-1.5, 1.5)}
WIDE = Prior(
    level=Normal(0.0, 3.0),
    slope=Normal(-0.5, 1.0),
    critical=Normal(5.0, 1.5),
    seed=PRIOR.seed,
    optimizers={
        "sgd": LearningPrior(**RATES),
        "muon": LearningPrior(Normal(0.5, 1.5), Normal(0.0, 0.5), Normal(1.0, 1.5), **RATES),
    },
)
"""A prior with hardly any knowledge."""
ROUNDS = 2
MIN_SPREAD = 0.7  # least spread of weights: single trainings differ by more than tasks do

MAX_TOLERANCE = 0.2
_EARLIER = "derived before decisions 86 to 90 and before the whole trainings at other rates"
DIFFERENT = {
    "muon level": "the one at the usual rates, 0.89, which decision 90 left",
    "critical, spread": "wider than the second fit makes it: the first gives 0.57",
    "sgd best_rate, spread": _EARLIER,
    "sgd rate_weight": _EARLIER,
}
"""By name, why a number is shipped otherwise than it is derived now; docs/log.md ("The prior,
derived anew") has what that changes."""

# ------------------------------------------------------------------------------------------- tasks

TEN_CLASSES, TEN_IMAGES = "ten-classes", 20_000
"""The first task on which the curve was tried: `resnet8`, ten classes at 32 px."""
_SGD = {16: 66.8, 32: 65.9, 64: 63.5, 128: 59.6, 256: 54.0}
_MUON = {32: 74.0, 64: 73.1, 128: 71.5, 256: 70.0, 512: 68.7, 1024: 65.9, 2000: 59.0}
"""By batch, accuracy on 10,000 held-out images after 6 epochs, in percent."""
_SHORTER = {(128, 2): 59.7, (512, 2): 52.9, (512, 3): 59.4}
"""The same with Muon, by batch and epochs."""


def ten_classes() -> list[Observed]:
    """The trainings of `TEN_CLASSES`."""
    rows = [("sgd", batch, 6, share) for batch, share in _SGD.items()]
    rows += [("muon", batch, 6, share) for batch, share in _MUON.items()]
    rows += [("muon", batch, epochs, share) for (batch, epochs), share in _SHORTER.items()]
    return [
        Observed(name, batch, epochs * TEN_IMAGES, share / 100, 10_000)
        for name, batch, epochs, share in rows
    ]


Tasks = Mapping[str, Sequence[Observed]]
"""Trainings by task."""


@cache
def _lines() -> list[dict[str, Any]]:
    return read_lines(LOOK_LINES)


def trainings() -> Tasks:
    """The trainings of all tasks, at all rates."""
    found: dict[str, list[Observed]] = {name: [] for name in TASKS}
    for line in _lines():
        if line["steps"] >= MIN_STEPS:
            one = Observed(
                line["optimizer"],
                line["batch"],
                line["samples"],
                line["accuracy"] / 100,
                line["held_out"],
                round(log(line["rate_scale"]), OFFSET_DIGITS),
                line.get("diverged", False),
            )
            found[line["task"]].append(one)
    return {**found, TEN_CLASSES: ten_classes()}


def at_usual_rates(tasks: Tasks) -> Tasks:
    """The trainings at the usual rate."""
    return {task: [one for one in seen if not one.offset] for task, seen in tasks.items()}


def has_rates(seen: Sequence[Observed]) -> bool:
    """Whether a task was trained at several rates."""
    return any(one.offset for one in seen)


def classes_of(task: str) -> int:
    """Number of classes of a task."""
    found = (line["classes"] for line in _lines() if line["task"] == task)
    return 10 if task == TEN_CLASSES else next(found)


@cache
def normalized(task: str) -> bool:
    """Whether a task's network has batch normalization."""
    one = TASKS[task]
    return has_batch_norm(build_network(one.network, classes=classes_of(task), side=one.side))


# ------------------------------------------------------------------------------------- derivation

Numbers = Mapping[tuple[str, str], Normal]
"""The curve's parameters, each with its error, by optimizer and field of `LearningPrior`. SGD's
level, slope and critical batch are those of the task, Muon's are relative to them."""


def fitted(task: str, seen: Sequence[Observed], prior: Prior) -> LearningModel:
    """The curve of a task."""
    return fit_learning(seen, classes=classes_of(task), optimizers=OPTIMIZERS, prior=prior)


def numbers_of(model: LearningModel) -> Numbers:
    """The parameters of a fitted curve; levels are compared at the best rates that it has."""
    names, mean = model._names, model._mean
    unit, found = np.eye(len(mean)), {}
    gains = {name: gain_of(mean, names, name) for name in names}
    for index, name in enumerate(names):
        values = dict(zip(RATES, unit[list(rate_places(names, name))], strict=True))
        values |= {part: unit[3 * index + place] for place, part in enumerate(PARTS)}
        if index:
            values |= {part: values[part] - unit[place] for place, part in enumerate(PARTS)}
        for part, row in values.items():
            more, by_more = 0.0, np.zeros_like(mean)
            if index and part == "level":
                (own, by_own), (first, by_first) = gains[name], gains[names[0]]
                more, by_more = own - first, by_own - by_first
            error = sqrt(model._variance(row + by_more))
            found[name, part] = Normal(float(row @ mean) + more, error)
    return found


def over_tasks(some: Iterable[Normal]) -> Normal:
    """Mean and spread of a number over tasks, with the errors of the fits in the spread."""
    means, errors = zip(*some, strict=True)
    return Normal(fmean(means), hypot(stdev(means), sqrt(fmean(one**2 for one in errors))))


def by_usual_rates(tasks: Tasks) -> Prior:
    """The prior by trainings at the usual rate; of rates it knows nothing."""
    prior = WIDE
    for _ in range(ROUNDS):
        found = [numbers_of(fitted(task, seen, prior)) for task, seen in tasks.items()]
        own, muon = (
            {part: over_tasks(one[name, part] for one in found) for part in PARTS}
            for name in OPTIMIZERS
        )
        known = {"sgd": WIDE.of("sgd"), "muon": WIDE.of("muon")._replace(**muon)}
        prior = Prior(**own, seed=WIDE.seed, optimizers=known)
    return prior


def derived(tasks: Tasks) -> Prior:
    """The prior by some tasks."""
    prior = by_usual_rates(at_usual_rates(tasks))
    found = [
        numbers_of(fitted(task, seen, WIDE)) for task, seen in tasks.items() if has_rates(seen)
    ]
    known: dict[str, LearningPrior] = {}
    for name in OPTIMIZERS:
        # The usual rate may be a factor of 3 off, whatever it was on these tasks.
        off = sqrt(fmean(one[name, "best_rate"].mean ** 2 for one in found))
        weights = [one[name, "rate_weight"].mean for one in found]
        known[name] = prior.of(name)._replace(
            best_rate=Normal(0.0, max(RATE_STEP, off)),
            rate_weight=Normal(fmean(weights), max(MIN_SPREAD, pstdev(weights))),
        )
    known["muon"] = known["muon"]._replace(level=over_tasks(one["muon", "level"] for one in found))
    return replace(prior, optimizers=known)


def scatter(tasks: Tasks, prior: Prior) -> Normal:
    """Scatter of logit u by trainings at the usual rate, and its standard error upwards.

    The squares of the distances scatter by the root of twice the degrees of freedom.
    """

    def excess(seed: float, errors: float) -> float:
        squares, free = 0.0, 0.0
        for task, seen in tasks.items():
            model = fitted(task, seen, replace(prior, seed=seed))
            longest = max(one.samples for one in seen)
            for one in seen:
                target, error = learning._target(one, classes_of(task), seed, longest)
                value, row = model._at(one.training)
                squares += ((target - value) / error) ** 2
                free += 1 - model._variance(row) / error**2
        return squares - free + errors * sqrt(2 * free)

    def seed_at(errors: float) -> float:
        low, high = log(0.003), log(1.0)
        while high - low > 0.01:
            middle = (low + high) / 2
            low, high = (middle, high) if excess(exp(middle), errors) > 0 else (low, middle)
        return exp(low)

    seed = seed_at(0.0)
    return Normal(seed, seed_at(1.0) - seed)


# ------------------------------------------------------------------------------------- comparison


class Number(NamedTuple):
    """A number of the prior, as derived and as shipped."""

    name: str
    derived: float
    shipped: float
    tolerance: float  # largest difference that counts as none

    @property
    def agrees(self) -> bool:
        """Whether the shipped number is within the tolerance."""
        return abs(self.derived - self.shipped) <= self.tolerance


def compared(tasks: Tasks) -> list[Number]:
    """All numbers of the prior."""
    usual, prior = at_usual_rates(tasks), derived(tasks)
    few, with_rates = len(tasks), sum(map(has_rates, tasks.values()))
    rows: list[tuple[str, Normal, Normal, int]] = [
        (part, getattr(prior, part), getattr(PRIOR, part), few) for part in PARTS
    ]
    for name, part in product(OPTIMIZERS, LearningPrior._fields):
        if name != "sgd" or part in RATES:
            own, shipped = (getattr(one.of(name), part) for one in (prior, PRIOR))
            count = with_rates if part in ("level", *RATES) else few
            rows.append((f"{name} {part}", own, shipped, count))
    found = []
    for what, own, shipped, count in rows:
        mean_error, spread_error = (
            min(MAX_TOLERANCE, own.error / sqrt(one)) for one in (count, 2 * (count - 1))
        )
        found.append(Number(what, own.mean, shipped.mean, mean_error))
        found.append(Number(f"{what}, spread", own.error, shipped.error, spread_error))
    seed = scatter(usual, prior)
    found.append(Number("seed", seed.mean, PRIOR.seed, seed.error))
    wider = student_t_975(few - 1) / Z_975 * sqrt(1 + 1 / few)
    found.append(Number("FEW_TASKS", wider, FEW_TASKS, 0.01))
    return found


# ------------------------------------------------------------------------------------------ check


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


def check(tasks: Tasks) -> None:
    """Print what the rates lose that trials lead to, each task left out of the prior."""
    regrets: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
    for task in TASKS:
        prior = derived({one: seen for one, seen in tasks.items() if one != task})
        cells: dict[tuple[str, int, float], list[Observed]] = {}
        for one in tasks[task]:
            cells.setdefault((one.optimizer, one.batch, one.samples), []).append(one)
        several = [some for some in cells.values() if len(some) > 2]
        shortest = min(one.samples for one in tasks[task])
        for trials, longer in product(several, several):
            (name, batch, length, *_), (judged, larger, samples, *_) = trials[0], longer[0]
            if name != judged or length != shortest or samples == shortest:
                continue
            for wrong in (-1, 0, 1):
                found = found_offset(trials, wrong, task, prior, larger)
                best = max(100 * one.accuracy for one in longer)
                regret, without = (
                    best - accuracy_at(longer, x + wrong * RATE_STEP) for x in (found, 0.0)
                )
                words = f"{task} {batch} for {larger}: {found / RATE_STEP:+.2f}"
                regrets.setdefault((name, wrong), []).append((regret, without, words))
    for (name, wrong), some in sorted(regrets.items()):
        lost, untried, _ = zip(*some, strict=True)
        say(
            f"{name}, usual rate times 3^{wrong:+d}: regret {fmean(lost):.2f} points, median "
            f"{median(lost):.2f}, worst {max(some)[0]:.2f} ({max(some)[2]}); without trials "
            f"{fmean(untried):.2f}, worst {max(untried):.2f}"
        )


def main(words: Sequence[str] | None = None) -> None:
    """Print the prior's numbers, or with --check what the rates of trials lose."""
    parser = make_parser(__doc__)
    parser.add_argument("--check", action="store_true")
    tasks = trainings()
    if parser.parse_args(words).check:
        check(tasks)
        return
    usual = at_usual_rates(tasks)
    prior = by_usual_rates(usual)
    for some, by in ((usual, prior), (tasks, WIDE)):
        say("at the usual rate" if some is usual else "at all rates")
        for task, seen in some.items():
            found = numbers_of(fitted(task, seen, by)).items()
            shown = (f"{name} {part} {one.mean:+.2f}" for (name, part), one in found)
            say(f"  {task}: {', '.join(shown)}")
    say(f"{'':24} derived  shipped  tolerance")
    for one in compared(tasks):
        why = "" if one.agrees else f"differs: {DIFFERENT.get(one.name, 'not known why')}"
        say(f"{one.name:24} {one.derived:7.3f}  {one.shipped:7.3f}  {one.tolerance:9.3f}  {why}")


if __name__ == "__main__":
    main()
