r"""The equation of the learning curve: held-out accuracy against optimizer, batch and samples.

A training that sees S samples in steps of B makes the progress of

.. math:: \tau = \frac{S - n_0 B}{B + K}

steps of noiseless gradients, with the optimizer's critical batch K (McCandlish et al. 2018, arXiv
1812.06162, who find :math:`(S / S_{min} - 1)^{-1} = B / K`, which is the same with
:math:`S_{min} = K \tau`). The first :math:`n_0` steps (`LOST_STEPS`), in which little is learnt, do
not count. Well below K samples count, well above it steps. Accuracy p on held-out images of C
classes, freed of guessing, follows

.. math::

    \operatorname{logit} u = a + \beta \ln \frac{\tau}{\tau_0}, \qquad
    u = \frac{p - 1 / C}{1 - 1 / C}

so the share still to be learnt falls as a power of the steps once it is small, as learning curves
do (Hestness et al. 2017, arXiv 1712.00409), and accuracy begins at guessing (where one class is
larger than the others, 1 / C is its share). :math:`\tau_0` belongs to a training of
`REFERENCE_SAMPLES` with `REFERENCE_BATCH`, so that a is the logit which that training reaches.

At another rate than the usual one, with x the logarithm of their ratio, the logit is higher by

.. math:: c \, (m^2 - (x - m)^2) = c \, (2 m x - x^2)

so m is the offset of the best rate and c the weight of the rate; both belong to the optimizer, for
all batches and lengths. Level a, slope :math:`\beta` and critical batch are parameters of the task,
for each optimizer; the latter two, which are positive, by their logarithms, as is c.

The parameters of n optimizers are one vector, (5 n,): level, log slope and log critical batch of
each optimizer, one optimizer after the other; then best rate and log weight of each. Derivatives by
the parameters have its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt

import numpy as np

from batchwright.prediction.accuracy.trainings import Candidate

REFERENCE_BATCH, REFERENCE_SAMPLES = 32, 10_000
"""The training that defines the level, at which tasks and optimizers are compared. It is short, as
trials are: after long trainings, tasks with steep slopes are ahead of others, so that a prior of
the level there would bend what short trials show of the slope (docs/log.md)."""

LOST_STEPS = 14.0
"""Steps at the start of a training that do not count: statistics of normalization settle in them,
and the rate comes up. Without them, the few steps of large batches in short trainings look like a
small critical batch, and long trainings are predicted to lose more by a large batch than they do
(docs/log.md)."""

_MAX_EXP = 700.0  # largest exponent: `exp` of 710 overflows


def logit_of(
    mean: np.ndarray, names: Sequence[str], candidate: Candidate
) -> tuple[float, np.ndarray]:
    """Logit u of a training, and its derivatives by the parameters."""
    first = 3 * names.index(candidate.optimizer)
    level = mean[first]
    slope, size = exp(mean[first + 1]), exp(mean[first + 2])
    batch = candidate.batch
    reference = counted_samples(REFERENCE_SAMPLES, REFERENCE_BATCH)
    samples = counted_samples(candidate.samples, batch) / reference
    steps = log(samples * (REFERENCE_BATCH + size) / (batch + size))
    row = np.zeros_like(mean)
    by_size = size / (REFERENCE_BATCH + size) - size / (batch + size)
    row[first : first + 3] = 1.0, slope * steps, slope * by_size
    value = float(level + slope * steps)
    offset = candidate.offset
    if offset:
        best, log_weight = rate_places(names, candidate.optimizer)
        weight = exp(mean[log_weight])
        row[best] = 2 * weight * offset
        row[log_weight] = weight * (2 * mean[best] * offset - offset**2)
        value += float(row[log_weight])
    return value, row


def gain_of(mean: np.ndarray, names: Sequence[str], optimizer: str) -> tuple[float, np.ndarray]:
    """Logit u at the best rate less that at the usual one, and its derivatives."""
    best, log_weight = rate_places(names, optimizer)
    weight = exp(mean[log_weight])
    row = np.zeros_like(mean)
    row[best] = 2 * weight * mean[best]
    row[log_weight] = gain = weight * mean[best] ** 2
    return float(gain), row


def rate_places(names: Sequence[str], optimizer: str) -> tuple[int, int]:
    """Indices of the parameters of an optimizer's rate: best rate and log weight."""
    first = 3 * len(names) + 2 * names.index(optimizer)
    return first, first + 1


def counted_samples(samples: float, batch: int) -> float:
    """Samples S of a training without those of its lost steps.

    If half of them or more are lost it is :math:`S^2 / (4 n_0 B)`, which continues the difference
    smoothly and stays positive, so that it has a logarithm.
    """
    lost = LOST_STEPS * batch
    return samples - lost if samples >= 2 * lost else samples**2 / (4 * lost)


def needed_samples(counted: float, batch: int) -> float:
    """The samples of a training of which ``counted`` count: the inverse of `counted_samples`."""
    lost = LOST_STEPS * batch
    return counted + lost if counted >= lost else 2 * sqrt(counted * lost)


def unit_of(logit: float) -> float:
    """The accuracy u, freed of guessing, with this logit."""
    # Counted on few images of nearly one class, the ends of an interval lie beyond any number.
    return 1 / (1 + exp(min(_MAX_EXP, -logit)))
