r"""The law of learning: held-out accuracy against optimizer, batch, rate and samples.

A training that sees S samples in steps of B is worth as many steps of noiseless gradients as

.. math:: \tau = \frac{S}{B + K}

with the optimizer's critical batch K (McCandlish et al. 2018, arXiv 1812.06162, who find
:math:`(S / S_{min} - 1)^{-1} = B / K`, which is the same with :math:`S_{min} = K \tau`): well below
K samples count, well above it steps. Accuracy p on held-out images of C classes, freed of guessing,
is u, and its odds follow

.. math::

    \frac{1 - u}{u} = e^{-v} + e^{-\lambda}, \qquad
    v = a + \beta \ln \frac{\tau}{\tau_0}, \qquad
    u = \frac{p - 1 / C}{1 - 1 / C}

so accuracy begins at guessing, and what is missing of its end L, :math:`\lambda =
\operatorname{logit} L`, falls as a power of the steps once it is small, as learning curves do
(Hestness et al. 2017, arXiv 1712.00409); the same is :math:`u = L \operatorname{sigmoid}(v - \ln
L)`. :math:`\tau_0` is of a training of `REFERENCE_SAMPLES` with `REFERENCE_BATCH`. All of it is for
whole trainings, whose rate has come down by their end: within one, accuracy is another
(`falls_short`).

At another rate than the usual one, with x the logarithm of their ratio, v is higher by

.. math:: c \, (m^2 - (x - m)^2) = c \, (2 m x - x^2)

so m is where the best rate lies and c how much depends on it; both are of the optimizer, for all
batches and lengths.

Level a, slope :math:`\beta` and critical batch are the task's, for each optimizer; the end is the
task's, for all of them. A law is a vector of these: level, slope and log critical batch of each
optimizer, one after the other; then best rate and log weight of each; then the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple

import numpy as np

from batchwright.prediction.accuracy.trainings import Candidate
from batchwright.records.registries.optimizers import OPTIMIZERS, LearningPrior, Normal

REFERENCE_BATCH, REFERENCE_SAMPLES = 128, 50_000
"""Training after which the level is read; around it tasks and optimizers are compared."""

_FLATTEST = 0.05  # slope; a fit to few trainings may have one that no training has
_LEAST_LEFT = 0.05  # of the slope, near the end and beyond it
_MAX_LOG = 60.0  # of samples: more than anybody has


@dataclass(frozen=True)
class Prior:
    """What is known of a task before anything of it was observed; logarithms are natural."""

    level: Normal  # v after the training of reference
    slope: Normal  # of it against the logarithm of steps of noiseless gradients
    critical: Normal  # logarithm of the critical batch, in samples
    end: Normal  # by how much the end's logit is above the level
    seed: float  # scatter of logit u from seed to seed and around the law
    # In place of what the registry says.
    optimizers: Mapping[str, LearningPrior] = field(default_factory=dict)

    def of(self, optimizer: str) -> LearningPrior:
        """What is known of an optimizer."""
        return self.optimizers.get(optimizer) or OPTIMIZERS[optimizer].learning

    @property
    def usual_slope(self) -> float:
        """Of logit u against the logarithm of steps, around the training of reference."""
        return self.slope.mean * unit_of(self.end.mean)


PRIOR = Prior(
    level=Normal(0.0, 2.4),
    slope=Normal(0.85, 0.45),
    critical=Normal(4.9, 0.6),
    end=Normal(2.0, 1.0),
    seed=0.06,
)
"""Means and spreads over seven tasks (docs/log.md)."""


def prior_rows(names: Sequence[str], prior: Prior) -> tuple[np.ndarray, np.ndarray]:
    """The prior as equations in the parameters, each over its error: matrix and right side."""
    count = 5 * len(names) + 1
    rows, wanted = [], []

    def know(what: Normal, place: int, beside: int | None = None) -> None:
        """That a parameter, or how far it is above another, is so much."""
        row = np.zeros(count)
        row[place] = 1.0
        if beside is not None:
            row[beside] = -1.0
        rows.append(row / what.error)
        wanted.append(what.mean / what.error)

    for index, name in enumerate(names):
        known = prior if index == 0 else prior.of(name)
        for part, what in enumerate((known.level, known.slope, known.critical)):
            # The others are known by how far they are from SGD.
            know(what, 3 * index + part, part if index else None)
    for name in names:
        best, weight = rate_places(names, name)
        know(prior.of(name).best_rate, best)
        know(prior.of(name).rate_weight, weight)
    know(prior.end, count - 1, 0)
    return np.array(rows), np.array(wanted)


def rate_places(names: Sequence[str], optimizer: str) -> tuple[int, int]:
    """Where the parameters of an optimizer's rate are: best rate and weight."""
    first = 3 * len(names) + 2 * names.index(optimizer)
    return first, first + 1


def logit_of(
    law: np.ndarray, names: Sequence[str], candidate: Candidate
) -> tuple[float, np.ndarray]:
    """Logit u of a training, and its derivatives by the parameters."""
    value, row = _unended(law, names, candidate)
    left = unit_of(law[-1] - value)
    row *= left
    row[-1] = 1 - left
    return _below(value, law[-1]), row


class Solved(NamedTuple):
    """A training that ends at an accuracy."""

    samples: float  # it takes
    slope: float  # of logit u in their logarithm


def solved(law: np.ndarray, names: Sequence[str], first: Candidate, logit: float) -> Solved:
    """How long a training reaches a logit u, by a law.

    An accuracy at the end or beyond counts as one close below, far away: whether it is beyond is
    as uncertain as the end is.

    Args:
        law: Its parameters.
        names: Of the optimizers that it is of.
        first: The training of a single sample.
        logit: To be reached.
    """
    left = max(_LEAST_LEFT, 1 - exp(min(0.0, logit - law[-1])))  # of the slope there
    slope = max(float(law[3 * names.index(first.optimizer) + 1]), _FLATTEST)
    start, _ = _unended(law, names, first)
    # At least one sample: trials that contradict each other may put a target before the first.
    samples = exp(max(0.0, min(_MAX_LOG, (logit - log(left) - start) / slope)))
    return Solved(samples, slope * left)


def unit_of(logit: float) -> float:
    """What is learnt, a share, by its logit."""
    return float(1 / (1 + exp(-logit)))


def _below(value: float, end: float) -> float:
    r""":math:`-\ln(e^{-v} + e^{-\lambda})`, both of any size."""
    return float(-np.logaddexp(-value, -end))


def _unended(
    law: np.ndarray, names: Sequence[str], candidate: Candidate
) -> tuple[float, np.ndarray]:
    """What logit u would be without an end, v, and its derivatives by the parameters."""
    first = 3 * names.index(candidate.optimizer)
    level, slope, critical = law[first : first + 3]
    size = exp(critical)
    batch = candidate.batch
    steps = log(candidate.samples / REFERENCE_SAMPLES * (REFERENCE_BATCH + size) / (batch + size))
    row = np.zeros_like(law)
    by_size = size / (REFERENCE_BATCH + size) - size / (batch + size)
    row[first : first + 3] = 1.0, steps, slope * by_size
    value = float(level + slope * steps)
    offset = candidate.offset
    if offset:
        best, log_weight = rate_places(names, candidate.optimizer)
        weight = exp(law[log_weight])
        row[best] = 2 * weight * offset
        row[log_weight] = weight * (2 * law[best] * offset - offset**2)
        value += float(row[log_weight])
    return value, row
