"""What is known beforehand of the law of learning: fitted to the look set, and checked on it.

    python -m benchmarks.tools.learning_prior

Seven tasks: the look set of `benchmarks.planning.decisions` at the usual rate, trainings of
`MIN_STEPS` steps or more, and the table of decision 43. Each is fitted with a wide prior; means and
spreads of what comes of it over the tasks, with the mean error of it, make a second prior, and what
comes of that is what `prediction.accuracy.law.PRIOR` and the optimizers' registry hold, rounded.

Then each task of the look set is left out of that and given its trainings of a 16th of the longest,
or of a 16th and a quarter; the longest are predicted: median and mean |error| and mean error in
points, how many are inside the 95 % interval, its half width, and the mean log likelihood of their
logits, counting of right answers included. That is done with an end of the law and with one so far
off that there is none. Means and spreads of the end are tried besides, all else as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, log, pi, sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple

import numpy as np

from batchwright.prediction.accuracy.law import PRIOR, Prior
from batchwright.prediction.accuracy.learning import fit_learning
from batchwright.prediction.accuracy.trainings import Observed
from batchwright.records.registries.optimizers import Normal
from benchmarks.harness.benchmark import make_parser, say
from benchmarks.planning.decisions_runs import OPTIMIZERS, TASKS
from benchmarks.tools.rates_prior import classes_of, look_set

WIDE = {
    "level": Normal(-0.1, 2.5),
    "slope": Normal(0.75, 0.5),
    "critical": Normal(4.9, 0.8),
    "end": Normal(2.5, 1.5),
}
WIDE_MUON = {
    "level": Normal(0.9, 0.7),
    "slope": Normal(-0.1, 0.3),
    "critical": Normal(1.2, 1.0),
}
LEAST_SPREAD = {"level": 0.5, "slope": 0.1, "critical": 0.3, "end": 0.5}
LEAST_SPREAD_MUON = {"level": 0.2, "slope": 0.08, "critical": 0.3}
NO_END = Normal(12.0, 0.01)

TEN_CLASSES, TEN_IMAGES = "ten-classes", 20_000
SGD = {16: 66.8, 32: 65.9, 64: 63.5, 128: 59.6, 256: 54.0}
MUON = {32: 74.0, 64: 73.1, 128: 71.5, 256: 70.0, 512: 68.7, 1024: 65.9, 2000: 59.0}
SHORTER = {(128, 2): 59.7, (512, 2): 52.9, (512, 3): 59.4}


class Told(NamedTuple):
    """What a task's trainings tell: each number of the law, with its error."""

    own: dict[str, Normal]  # of the task, by SGD
    muon: dict[str, Normal]  # Muon's, beside it


def trainings() -> dict[str, list[Observed]]:
    """By task, at the usual rate."""
    found: dict[str, list[Observed]] = {name: [] for name in TASKS}
    for cell, some in look_set().items():
        found[cell.task] += [one for one in some if not one.offset]
    rows = [("sgd", batch, 6, share) for batch, share in SGD.items()]
    rows += [("muon", batch, 6, share) for batch, share in MUON.items()]
    rows += [("muon", batch, epochs, share) for (batch, epochs), share in SHORTER.items()]
    found[TEN_CLASSES] = [
        Observed(name, batch, epochs * TEN_IMAGES, share / 100, 10_000)
        for name, batch, epochs, share in rows
    ]
    return found


def told(task: str, seen: Sequence[Observed], prior: Prior) -> Told:
    """What its trainings tell of a task."""
    classes = 10 if task == TEN_CLASSES else classes_of(task)
    law = fit_learning(seen, classes=classes, optimizers=OPTIMIZERS, prior=prior)
    count = len(law._mean)

    def beside(place: int, other: int | None = None) -> Normal:
        row = np.zeros(count)
        row[place] = 1.0
        if other is not None:
            row[other] = -1.0
        return Normal(float(row @ law._mean), sqrt(float(row @ law._covariance @ row)))

    parts = ("level", "slope", "critical")
    own = {part: beside(place) for place, part in enumerate(parts)}
    muon = {part: beside(3 + place, place) for place, part in enumerate(parts)}
    return Told({**own, "end": beside(count - 1, 0)}, muon)


def prior_with(own: dict[str, Normal], muon: dict[str, Normal], end: Normal | None) -> Prior:
    """A prior of these numbers, with another end if one is given."""
    known = {"muon": PRIOR.of("muon")._replace(**muon)}
    changed = own if end is None else {**own, "end": end}
    return replace(PRIOR, optimizers=known, **changed)


def spread(some: Sequence[Normal], least: float) -> Normal:
    """Mean and spread over tasks, the error of each in it."""
    means = [one.mean for one in some]
    error = sqrt(fmean(one.error**2 for one in some))
    return Normal(fmean(means), max(least, hypot(stdev(means), error)))


def prior_of(tasks: dict[str, list[Observed]], end: Normal | None = None) -> Prior:
    """What these tasks tell of another one."""
    prior = prior_with(WIDE, WIDE_MUON, end)
    for _ in range(2):
        found = [told(task, seen, prior) for task, seen in tasks.items()]
        own = {
            part: spread([one.own[part] for one in found], least)
            for part, least in LEAST_SPREAD.items()
        }
        muon = {
            part: spread([one.muon[part] for one in found], least)
            for part, least in LEAST_SPREAD_MUON.items()
        }
        prior = prior_with(own, muon, end)
    return prior


def check(tasks: dict[str, list[Observed]], priors: dict[str, Prior], part: int) -> str:
    """How the longest trainings are predicted by those of this part of it at most, in words."""
    off, inside, widths, likely = [], [], [], []
    for task in TASKS:
        seen, classes = tasks[task], classes_of(task)
        longest = max(one.samples for one in seen)
        given = [one for one in seen if one.samples < 1.6 * longest / part]
        law = fit_learning(given, classes=classes, optimizers=OPTIMIZERS, prior=priors[task])
        for one in seen:
            if one.samples == longest:
                found, (mean, error) = law.accuracy(one.training), law.off(one)
                off.append(100 * (found.value - one.accuracy))
                inside.append(found.low <= one.accuracy <= found.high)
                widths.append(50 * (found.high - found.low))
                likely.append(-((mean / error) ** 2) / 2 - log(error * sqrt(2 * pi)))
    return (
        f"median {median(map(abs, off)):.2f}, mean {fmean(map(abs, off)):.2f}, bias "
        f"{fmean(off):+.2f} points, {sum(inside)} of {len(inside)} inside, half width "
        f"{median(widths):.1f}, log likelihood {fmean(likely):.3f}"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Print what was fitted, and how the checks came out."""
    make_parser(__doc__).parse_args(words)
    tasks = trainings()
    fitted = prior_of(tasks)
    for part in WIDE:
        mean, error = getattr(fitted, part)
        say(f"{part}: {mean:.2f} +- {error:.2f}")
    for part in WIDE_MUON:
        mean, error = getattr(fitted.of("muon"), part)
        say(f"Muon's {part} beside it: {mean:.2f} +- {error:.2f}")
    ends = [None, NO_END, *(Normal(mean, 1.0) for mean in (0.5, 1.0, 1.5, 2.0, 3.0))]
    for end in ends:
        name = "end fitted" if end is None else f"end {end.mean:g} +- {end.error:g}"
        priors = {
            task: prior_of({one: tasks[one] for one in tasks if one != task}, end) for task in TASKS
        }
        for part in (16, 4):
            say(f"{name}, a {part}th given: {check(tasks, priors, part)}")


if __name__ == "__main__":
    main()
