"""Trainings, short or long, as the law of learning sees them."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import NamedTuple

from batchwright.records import Trial
from batchwright.records.registries.optimizers import Normal

MIN_STEPS = 25
"""Below some twenty, accuracy is that of guessing whatever was learnt: statistics of batch
normalization have not settled. So trials have as many, and tell nothing of fewer."""
OFFSET_DIGITS = 6
"""After the point: a rate is the same whatever its last bits are."""
MIN_LEARNT = 0.01
"""Less than this above guessing, as a share of what is above it, is not told from nothing."""


def above_guessing(accuracy: float, classes: float, most: float) -> float:
    """Accuracy u freed of guessing, a share, held between `MIN_LEARNT` and ``most``."""
    return min(most, max(MIN_LEARNT, (accuracy - 1 / classes) / (1 - 1 / classes)))


def with_guessing(unit: float, classes: float) -> float:
    """The accuracy, a share, whose part above guessing is u."""
    return 1 / classes + (1 - 1 / classes) * unit


class Observed(NamedTuple):
    """A training, short or long, of the task; a whole one, or one whose rate is still high."""

    optimizer: str  # as in a job
    batch: int  # global batch, in samples
    samples: float  # trained on; a sample twice counts twice
    accuracy: float  # held out, a share
    held_out: int  # images that this is over
    offset: float = 0.0  # as of a `Candidate`
    diverged: bool = False  # whether gradients or the loss were not finite
    short: Normal = Normal(0.0, 0.0)  # logit u of a whole training of these samples, less its own

    @property
    def training(self) -> Candidate:
        """What was trained."""
        return Candidate(self.optimizer, self.batch, self.samples, self.offset)


class Candidate(NamedTuple):
    """A training to predict: optimizer, global batch, samples trained on, and its rate.

    The rate is given by its offset: the natural logarithm of it over the usual one, that which a
    plan without trials gives.
    """

    optimizer: str
    batch: int
    samples: float
    offset: float = 0.0


def offset_of(ratio: float) -> float:
    """Offset of a rate, by it over the usual one."""
    return round(log(ratio), OFFSET_DIGITS)


def of_trials(trials: Iterable[Trial]) -> list[Observed]:
    """What trials showed."""
    return [
        Observed(
            one.optimizer,
            one.global_batch_size,
            one.samples,
            one.accuracy,
            one.held_out,
            offset_of(one.rate / one.usual_rate),
            one.loss is None,
        )
        for one in trials
    ]
