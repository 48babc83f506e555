"""Trainings, short or long, as inputs of the learning curve."""

from __future__ import annotations

from collections.abc import Iterable
from math import log, sqrt
from typing import NamedTuple

from batchwright.records import Trial
from batchwright.records.registries.optimizers import Normal

MIN_STEPS = 25
"""Fewest steps of a trial, and of a training that trials predict. With fewer than about twenty,
statistics of batch normalization have not settled, and accuracy is that of guessing."""
OFFSET_DIGITS = 6
"""Digits to which offsets of rates are rounded, so that equal rates compare equal."""
MIN_LEARNT = 0.01
"""Least accuracy u above guessing that is distinguished from none."""


def above_guessing(accuracy: float, classes: float, most: float) -> float:
    """Accuracy u freed of guessing, a share, bounded by `MIN_LEARNT` and ``most``."""
    return min(most, max(MIN_LEARNT, (accuracy - 1 / classes) / (1 - 1 / classes)))


def with_guessing(unit: float, classes: float) -> float:
    """The accuracy, a share, whose part above guessing is ``unit``: the u of the curve."""
    return 1 / classes + (1 - 1 / classes) * unit


class Observed(NamedTuple):
    """An observed training of the task: a whole one, or one whose rate is still high."""

    optimizer: str  # the optimizer, as in a job
    batch: int  # global batch, in samples
    samples: float  # samples trained on; a sample that was seen twice counts twice
    accuracy: float  # held-out accuracy, a share
    held_out: int  # number of images that the accuracy was counted on
    offset: float = 0.0  # logarithm of its rate over the usual one, as in a `Candidate`
    diverged: bool = False  # whether gradients or the loss were not finite
    # Logit u of a whole training of these samples less that of this one.
    short: Normal = Normal(0.0, 0.0)
    loss: float | None = None  # mean held-out cross entropy; `None` where it is not known

    @property
    def training(self) -> Candidate:
        """The training, without its result."""
        return Candidate(self.optimizer, self.batch, self.samples, self.offset)

    def guesses(self, classes: float) -> bool:
        """Whether its accuracy may be that of guessing, as far as counting images tells."""
        error = sqrt((1 - 1 / classes) / classes / self.held_out)
        return self.accuracy < 1 / classes + 2 * error


class Candidate(NamedTuple):
    """A training to predict."""

    optimizer: str  # the optimizer, as in a job
    batch: int  # global batch, in samples
    samples: float  # samples trained on
    # Natural logarithm of its rate over the usual one, which is the rate of a plan without trials.
    offset: float = 0.0


def offset_of(ratio: float) -> float:
    """Offset of a rate, from its ratio to the usual one."""
    return round(log(ratio), OFFSET_DIGITS)


def of_trials(trials: Iterable[Trial]) -> list[Observed]:
    """Trials as observations."""
    return [
        Observed(
            one.optimizer,
            one.global_batch_size,
            one.samples,
            one.accuracy,
            one.held_out,
            offset_of(one.rate / one.usual_rate),
            one.loss is None,
            loss=one.loss,
        )
        for one in trials
    ]
