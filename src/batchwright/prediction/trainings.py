"""Whole trainings, short or long, as the law of learning sees them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose
from typing import NamedTuple

from batchwright.records import Trial


class Observed(NamedTuple):
    """A whole training, short or long, of the task.

    Attributes:
        optimizer: As in a job.
        batch: Global batch, in samples.
        samples: Trained on; a sample twice counts twice.
        accuracy: Held out, a share.
        held_out: Images that this is over.
    """

    optimizer: str
    batch: int
    samples: float
    accuracy: float
    held_out: int


class Candidate(NamedTuple):
    """A training to predict: optimizer, global batch and samples trained on."""

    optimizer: str
    batch: int
    samples: float


def of_trials(trials: Iterable[Trial]) -> list[Observed]:
    """What trials showed, those at another rate than a plan would give left out."""
    return [
        Observed(one.optimizer, one.global_batch_size, one.samples, one.accuracy, one.held_out)
        for one in trials
        if isclose(one.rate, one.usual_rate)
    ]
