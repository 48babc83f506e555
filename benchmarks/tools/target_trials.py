"""Seconds to a target on invented tasks: which trials are made for it, and when it is refused.

    python -m benchmarks.tools.target_trials N [--first SEED] [--stray LOGIT] [--arms NAME ...]

draws N tasks from the prior of the law of learning for each of three sizes, as
`benchmarks.tools.rates_prior` does, the usual rates being best. The target is what SGD with
batch 128 reaches after all epochs. Trials are chosen for the accuracy after all epochs or for the
target. Then the candidate is trained that a plan takes: the fewest epochs that reach the target
with probability 0.8, of all candidates the least time. Where there are none, all epochs with the
least time over its chance, if that is a tenth or more; or, "sure alone", the target is refused.
Where the target is missed or refused, the same is done again with twice as many epochs at most,
what was trained being known by then, and a third time with four times as many; then it counts as
four times all epochs. Seconds are of trials and trainings, each until it reaches the target.

"Averaged": the schedule is of twice the epochs and training ends at the target, as where an average
of the weights is evaluated. Trials for it may take a tenth of all epochs or, "likely", a tenth of
what the target is likely to take.
Trials are off the law by --stray in the logit for each e-fold that they are shorter than half of
all epochs.
"""

from __future__ import annotations

from itertools import product
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from batchwright.planning.averaging import STRETCH
from batchwright.planning.candidates.choice import MIN_CHANCE
from batchwright.prediction.accuracy.learning import LearningModel, fit_learning
from batchwright.prediction.accuracy.trainings import Candidate, Observed
from benchmarks.harness.benchmark import make_parser, say
from benchmarks.planning.decisions_runs import OPTIMIZERS
from benchmarks.tools.rates_prior import (
    EPOCH_SECONDS,
    SIZES,
    invented,
    invented_question,
    trials_of,
)

CONFIDENCE = 0.8
HELD_OUT = 1000
ATTEMPTS = 3


class Taken(NamedTuple):
    """What a plan trains."""

    training: Candidate
    epochs: int


def planned(
    model: LearningModel, images: int, most: int, target: float, *, sure_alone: bool
) -> Taken | None:
    """The candidate that is trained; `None`: the target is refused."""
    options: dict[Taken, float] = {}
    for name, batch in product(OPTIMIZERS, EPOCH_SECONDS):
        whole = Candidate(name, batch, most * images, model.offset(name))
        lengths = (whole._replace(samples=epochs * images) for epochs in range(1, most + 1))
        found = (one for one in lengths if model.surely(one, CONFIDENCE) >= target)
        chance = 1.0
        if (training := next(found, None)) is None:
            training, chance = whole, model.probability(whole, target)
            if sure_alone or chance < MIN_CHANCE:
                continue
        epochs = round(training.samples / images)
        options[Taken(training, epochs)] = epochs * EPOCH_SECONDS[batch] / chance
    return min(options, key=options.__getitem__, default=None)


def seconds_to_target(
    task: LearningModel,
    images: int,
    epochs: int,
    seed: int,
    *,
    for_target: bool,
    sure_alone: bool = False,
    stretch: int = 1,
    likely: bool = False,
    stray: float = 0.0,
) -> tuple[float, float, bool]:
    """Seconds of trials and trainings, those of trials, and whether the first plan was refused."""
    size = images / 20_000
    target = task.accuracy(Candidate("sgd", 128, epochs * images)).value
    asked: dict[str, Any] = {"target": target, "confidence": CONFIDENCE} if for_target else {}
    question = invented_question(task, images, epochs, rates=True, **asked)
    seen, trials = trials_of(task, question, seed, likely=likely, stray=stray)
    spent, refused = trials, False
    for attempt in range(ATTEMPTS):
        model = fit_learning(seen, classes=task.classes, optimizers=OPTIMIZERS)
        most = epochs * 2**attempt
        taken = planned(model, images, most, target, sure_alone=sure_alone)
        if taken is None:
            refused = refused or not attempt
            continue
        each = size * EPOCH_SECONDS[taken.training.batch]
        last = min(most, stretch * taken.epochs)
        for epoch in range(1, last + 1):
            part = taken.training._replace(samples=epoch * images)
            reached = task.accuracy(part).value
            if reached >= target:
                return spent + epoch * each, trials, refused
        spent += last * each
        seen = [*seen, Observed(*part[:3], reached, HELD_OUT, part.offset)]
    return spent + 4 * epochs * size * EPOCH_SECONDS[128], trials, refused


def main() -> None:
    """Print the geometric means."""
    averaged: dict[str, Any] = {"for_target": True, "stretch": STRETCH}
    arms: dict[str, dict[str, Any]] = {
        "accuracy": {"for_target": False},
        "target": {"for_target": True},
        "target, sure alone": {"for_target": True, "sure_alone": True},
        "averaged": averaged,
        "averaged, likely": averaged | {"likely": True},
    }
    parser = make_parser(__doc__)
    parser.add_argument("count", type=int, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--stray", type=float, default=0.0, metavar="LOGIT")
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    given = parser.parse_args()
    for images, epochs, classes in SIZES:
        seeds = range(given.first, given.first + given.count)
        tasks = [invented(classes, seed, apart=False) for seed in seeds]
        for name in given.arms:
            told = [
                seconds_to_target(task, images, epochs, seed, stray=given.stray, **arms[name])
                for seed, task in zip(seeds, tasks, strict=True)
            ]
            seconds, trials, refused = zip(*told, strict=True)
            say(
                f"{images} images, {epochs} epochs, {classes} classes, trials for {name}: "
                f"{geometric_mean(seconds):.1f} s, trials {fmean(trials):.1f} s or "
                f"{sum(trials) / (sum(seconds) - sum(trials)):.3f} of the training, refused "
                f"{fmean(refused):.2f}"
            )


if __name__ == "__main__":
    main()
