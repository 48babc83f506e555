"""Seconds to a target on invented tasks: which trials are made for it, and when it is refused.

    python -m benchmarks.tools.target_trials N

draws N tasks from the prior of the law of learning for each of three sizes, as
`benchmarks.tools.rates_prior` does, the usual rates being best. The target is what SGD with
batch 128 reaches after all epochs. Trials are chosen for the accuracy after all epochs or for the
target. Then the candidate is trained that a plan takes: the fewest epochs that reach the target
with probability 0.8, of all candidates the least time. Where there are none, all epochs with the
least time over its chance, if that is a tenth or more; or, "sure alone", the target is refused.
Where the target is missed or refused, the same is done again with twice as many epochs at most,
what was trained being known by then, and a third time with four times as many; then it counts as
four times all epochs. Seconds are of trials and trainings, each until it reaches the target.
"""

from __future__ import annotations

from itertools import product
from statistics import fmean, geometric_mean
from typing import NamedTuple

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
) -> tuple[float, bool]:
    """Seconds of trials and trainings, and whether the first plan was refused."""
    size = images / 20_000
    target = task.accuracy(Candidate("sgd", 128, epochs * images)).value
    asked = {"target": target, "confidence": CONFIDENCE} if for_target else {}
    question = invented_question(task, images, epochs, rates=True, **asked)
    seen, spent = trials_of(task, question, seed)
    refused = False
    for attempt in range(ATTEMPTS):
        model = fit_learning(seen, classes=task.classes, optimizers=OPTIMIZERS)
        most = epochs * 2**attempt
        taken = planned(model, images, most, target, sure_alone=sure_alone)
        if taken is None:
            refused = refused or not attempt
            continue
        each = size * EPOCH_SECONDS[taken.training.batch]
        for epoch in range(1, taken.epochs + 1):
            part = taken.training._replace(samples=epoch * images)
            reached = task.accuracy(part).value
            if reached >= target:
                return spent + epoch * each, refused
        spent += taken.epochs * each
        seen = [*seen, Observed(*taken.training[:3], reached, HELD_OUT, taken.training.offset)]
    return spent + 4 * epochs * size * EPOCH_SECONDS[128], refused


def main() -> None:
    """Print the geometric means."""
    parser = make_parser(__doc__)
    parser.add_argument("count", type=int, metavar="N")
    count = parser.parse_args().count
    arms = {
        "trials for the accuracy": {"for_target": False},
        "trials for the target": {"for_target": True},
        "trials for the target, sure alone": {"for_target": True, "sure_alone": True},
    }
    for images, epochs, classes in SIZES:
        tasks = [invented(classes, seed, apart=False) for seed in range(count)]
        for name, keys in arms.items():
            told = [
                seconds_to_target(task, images, epochs, seed, **keys)
                for seed, task in enumerate(tasks)
            ]
            seconds, refused = zip(*told, strict=True)
            say(
                f"{images} images, {epochs} epochs, {classes} classes, {name}: "
                f"{geometric_mean(seconds):.1f} s, refused {fmean(refused):.2f}"
            )


if __name__ == "__main__":
    main()
