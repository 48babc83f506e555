r"""How a network learns from its images: held-out accuracy against optimizer, batch and samples.

A training that sees S samples in steps of B is worth as many steps of noiseless gradients as

.. math:: \tau = \frac{S - n_0 B}{B + K}

with the optimizer's critical batch K (McCandlish et al. 2018, arXiv 1812.06162, who find
:math:`(S / S_{min} - 1)^{-1} = B / K`, which is the same with :math:`S_{min} = K \tau`), without
the first :math:`n_0` steps (`LOST_STEPS`), in which little is learnt: well below K samples count,
well above it steps. Accuracy p on held-out images of C classes, freed of guessing, follows

.. math::

    \operatorname{logit} u = a + \beta \ln \frac{\tau}{\tau_0}, \qquad
    u = \frac{p - 1 / C}{1 - 1 / C}

so the share still to be learnt falls as a power of the steps once it is small, as learning curves
do (Hestness et al. 2017, arXiv 1712.00409), and accuracy begins at guessing (where one class is
larger than the others, 1 / C is its share); :math:`\tau_0` is of
a training of `REFERENCE_SAMPLES` with `REFERENCE_BATCH`, so that a is what that one reaches. All of
it is for whole trainings, whose rate has come down by their end: within one, accuracy is lower
(`falls_short`).

At another rate than the usual one, with x the logarithm of their ratio, the logit is higher by

.. math:: c \, (m^2 - (x - m)^2) = c \, (2 m x - x^2)

so m is where the best rate lies and c how much depends on it; both are of the optimizer, for all
batches and lengths. Far above the best rate trainings fail, which is no parabola: one that ends at
guessing at another rate, or diverged, tells only that so little is reached there, and its pull has
a limit (Huber 1964).

Level a, slope :math:`\beta` and critical batch are the task's, for each optimizer; the latter two,
which are positive, by their logarithms. Beforehand two optimizers' levels are known against each
other at the best rate of each, :math:`a + c m^2`: one whose usual rate is far from its best is far
behind at the usual one, and not at the other. What is known of them beforehand (`PRIOR`) and what
was observed are brought together by Bayes' rule: normal errors, the curvature of the posterior at
its peak (Laplace). So few short trainings already tell something, many tell nearly all, and the
interval says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, hypot, inf, log, pi, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from batchwright.prediction.accuracy.trainings import (
    MIN_LEARNT,
    Candidate,
    Observed,
    above_guessing,
    with_guessing,
)
from batchwright.prediction.fit import Z_975
from batchwright.records import Estimate
from batchwright.records.registries.optimizers import OPTIMIZERS, SGD, LearningPrior, Normal

REFERENCE_BATCH, REFERENCE_SAMPLES = 32, 10_000
"""Training after which the level is read; around it tasks and optimizers are compared. It is short,
as trials are: after long ones, tasks of steep slopes are ahead of others, and a level that is known
by itself there bends what short trials say of the slope (docs/log.md)."""

LOST_STEPS = 14.0
"""Steps at the start of a training that do not count: statistics of normalization settle in them,
and the rate comes up. Without them the few steps of large batches in short trainings pass for a
small critical batch, and long trainings are expected to lose more by a large batch than they do
(docs/log.md)."""

FORM_ERROR = 0.25
"""Standard error of logit u for each e-fold beyond the longest training that was observed, by which
the line may bend. Without it the intervals of trainings four times as long held 28 of 42."""
SHORTER_ERROR = 0.1
"""The same of what was observed, for each e-fold below the longest, which so counts for more."""

FAILED_ERROR = 1.0
"""Of logit u, as of a training that failed at its rate; beyond so much it pulls no harder."""

_ROUNDS, _SMALL = 50, 1e-6
_MAX_LOG = 60.0  # of samples: more than anybody has


@dataclass(frozen=True)
class Prior:
    """What is known of a task before anything of it was observed; logarithms are natural."""

    level: Normal  # logit u after the training of reference
    slope: Normal  # logarithm of its slope against that of steps of noiseless gradients
    critical: Normal  # logarithm of the critical batch, in samples
    seed: float  # scatter of logit u from seed to seed and around the law
    # In place of what the registry says.
    optimizers: Mapping[str, LearningPrior] = field(default_factory=dict)

    def of(self, optimizer: str) -> LearningPrior:
        """What is known of an optimizer."""
        return self.optimizers.get(optimizer) or OPTIMIZERS[optimizer].learning


PRIOR = Prior(
    level=Normal(-1.0, 2.1), slope=Normal(-0.43, 0.5), critical=Normal(5.15, 0.6), seed=0.06
)
"""Means and spreads over seven tasks (docs/log.md)."""
FEW_TASKS = 1.34
"""Quantile of an eighth task by the mean and spread of seven over the normal one: Student's t with
six degrees of freedom, times sqrt(1 + 1/7)."""
KNOWN_FROM = 32
"""Least batch of these trainings."""


class Aim(NamedTuple):
    """A training that ends at an accuracy."""

    samples: float  # it takes
    by_parameters: np.ndarray  # derivatives of their logarithm by the law's parameters
    slope: float  # of logit u in that logarithm


@dataclass(frozen=True)
class LearningModel:
    """Accuracy of trainings of one task, with its error."""

    classes: float  # of the data
    observed: tuple[Observed, ...]  # what it rests on
    _names: tuple[str, ...]
    # Level, log slope and log critical batch of each optimizer, one after the other; then of each
    # best rate and weight.
    _mean: np.ndarray
    _covariance: np.ndarray
    _seed: float
    _usual_rate: Callable[[int], float] | None = None

    @cached_property
    def known_from(self) -> int:
        """Least batch of the trainings that it rests on, of the task and of others.

        Nothing shows that smaller ones learn more, so no more is expected of them. A training that
        failed for its rate shows nothing of its batch.
        """
        learnt = (one.batch for one in self.observed if not _fails(one, self.classes))
        return min([KNOWN_FROM, *learnt])

    def accuracy(self, candidate: Candidate) -> Estimate:
        """Held-out accuracy at the end, a share; the interval is for a single seed."""
        return self.counted(candidate, Normal(0.0, 0.0), None)

    def surely(self, candidate: Candidate, confidence: float) -> float:
        """Accuracy that a single seed reaches or exceeds with this probability, a share."""
        middle, row = self._at(candidate)
        error = self._few * self._error(row, candidate.samples)
        below = NormalDist().inv_cdf(confidence) * error
        return self._share(middle - below)

    def probability(self, candidate: Candidate, accuracy: float) -> float:
        """Probability that a single seed reaches an accuracy; 1 if guessing reaches it."""
        unit = (accuracy - 1 / self.classes) / (1 - 1 / self.classes)
        if not 0 < unit < 1:
            return float(unit <= 0)
        middle, row = self._at(candidate)
        above = middle - log(unit / (1 - unit))
        return NormalDist().cdf(above / (self._few * self._error(row, candidate.samples)))

    def counted(self, candidate: Candidate, short: Normal, held_out: int | None) -> Estimate:
        """Accuracy of a training that falls short of whole ones, as an evaluation would count it.

        Args:
            candidate: The training up to now.
            short: By how much logit u is below that of a whole training of these samples.
            held_out: Images that are counted; `None`: as many as make no difference.

        Returns:
            The median. Where nothing was observed the mean: the median of so wide a distribution
            is all or nothing for trainings much longer or shorter than those of other tasks.
        """
        law, row = self._at(candidate)
        middle = law - short.mean
        error = hypot(self._error(row, candidate.samples), short.error)
        counting = _noise(_unit(middle), held_out, self.classes, 0.0) if held_out else 0.0
        wide = Z_975 * hypot(error, counting) * self._few
        low, high = middle - wide, middle + wide
        if not self.observed:  # the usual approximation (MacKay 1992) of a normal logit's mean
            middle = min(high, max(low, middle / sqrt(1 + pi * error**2 / 8)))
        return _estimate(*(self._share(at) for at in (middle, low, high)))

    def off(self, one: Observed) -> Normal:
        """How far logit u of a training is below the law, and the error of that distance.

        The error is the law's own, and that of counting right answers.
        """
        law, row = self._at(one.training)
        target, error = _target(one, self.classes, 0.0)
        return Normal(law - target, hypot(error, self._error(row, one.samples)))

    def samples_to(self, optimizer: str, batch: int, accuracy: float) -> Estimate | None:
        """Samples of the training whose accuracy at its end is this; `None` below guessing.

        Beyond all that was observed it is a guess, and the interval says so: it may span decades.
        """
        aim = self.aim(optimizer, batch, accuracy)
        if aim is None:
            return None
        off = exp(min(_MAX_LOG, Z_975 * self.aim_error(aim)))
        return _estimate(aim.samples, aim.samples / off, aim.samples * off)

    def samples_compared(
        self, one: tuple[str, int], other: tuple[str, int], accuracy: float
    ) -> Estimate | None:
        """`samples_to` of one optimizer and batch over that of others, by what sets them apart.

        Scatter from seed to seed is not in it.
        """
        found, others = (self.aim(*pair, accuracy) for pair in (one, other))
        if found is None or others is None:
            return None
        error = sqrt(self._variance(found.by_parameters - others.by_parameters))
        ratio, off = found.samples / others.samples, exp(min(_MAX_LOG, Z_975 * error))
        return _estimate(ratio, ratio / off, ratio * off)

    def rate_of(self, optimizer: str) -> tuple[float, float]:
        """Best rate and weight of an optimizer: m and the logarithm of c."""
        best, weight = _rate_places(self._names, optimizer)
        return float(self._mean[best]), float(self._mean[weight])

    def offset(self, optimizer: str, batch: int | None = None) -> float:
        """Offset of the best rate by what is known, as of a `Candidate`, within what was tried.

        Rounded to a rate of three digits: more would look as if they were known.

        Args:
            optimizer: As in a job.
            batch: Global batch, in samples; `None`: of those that were tried.
        """
        known = [one for one in self.observed if one.optimizer == optimizer]
        learnt = [one for one in known if not _fails(one, self.classes)]
        offsets, most = [0.0, *(one.offset for one in learnt)], self.least_failing(optimizer)
        high = max((one for one in offsets if one < most), default=0.0)
        best = min(max(self.rate_of(optimizer)[0], min(offsets)), high)
        if batch is not None and self._usual_rate is not None:
            usual = self._usual_rate(batch)
            rates = (self._usual_rate(one.batch) * exp(one.offset) for one in learnt)
            best = min(best, log(max([usual, *rates]) / usual))
        return log(float(f"{exp(best):.3g}"))

    def least_failing(self, optimizer: str) -> float:
        """The least offset at which a training failed for its rate; infinite without any."""
        known = [one for one in self.observed if one.optimizer == optimizer]
        least = min((one.offset for one in known if not _fails(one, self.classes)), default=inf)
        failing = [one for one in known if _fails(one, self.classes)]
        return min(
            (one.offset for one in failing if one.diverged or one.offset > least), default=inf
        )

    def aim(
        self, optimizer: str, batch: int, accuracy: float, offset: float | None = None
    ) -> Aim | None:
        """The training that ends at an accuracy; `None` where that is no better than guessing.

        Args:
            optimizer: As in a job.
            batch: Global batch, in samples.
            accuracy: Held out, a share.
            offset: Of the rate; `None`: of the best one by what is known.
        """
        unit = (accuracy - 1 / self.classes) / (1 - 1 / self.classes)
        if not 0 < unit < 1:
            return None
        slope = exp(self._mean[3 * self._names.index(optimizer) + 1])
        offset = self.offset(optimizer, batch) if offset is None else offset
        batch = max(batch, self.known_from)
        start, _ = self._at(Candidate(optimizer, batch, _needed(1.0, batch), offset))
        # At least one sample: trials that contradict each other may put a target before the first.
        counted = exp(max(0.0, min(_MAX_LOG, (log(unit / (1 - unit)) - start) / slope)))
        samples = _needed(counted, batch)
        _, row = self._at(Candidate(optimizer, batch, samples, offset))
        # In the logarithm of all samples, of which some do not count.
        slope *= samples / counted if counted >= LOST_STEPS * batch else 2.0
        return Aim(samples, -row / slope, slope)

    def aim_error(self, aim: Aim, trial: Candidate | None = None, held_out: int = 0) -> float:
        """Standard error of the logarithm of an aim's samples, for a single seed.

        Args:
            aim: From `aim`.
            trial: One more training that is known by then.
            held_out: Images that it is judged on.
        """
        variance = self._variance(aim.by_parameters)
        longest = [one.samples for one in self.observed]
        if trial is not None:
            variance -= self.told(trial, held_out, aim.by_parameters)
            longest.append(trial.samples)
        bent = _bent(aim.samples, max(longest, default=REFERENCE_SAMPLES))
        return sqrt(max(0.0, variance) + (self._seed**2 + bent**2) / aim.slope**2)

    def would_narrow(self, trial: Candidate, held_out: int, one: Candidate) -> float:
        """Variance of logit u that a trial would take from a training."""
        _, row = self._at(one)
        return self.told(trial, held_out, row)

    def told(self, trial: Candidate, held_out: int, by_parameters: np.ndarray) -> float:
        """Variance that a trial would take from a quantity with these derivatives.

        It depends on where a trial is, not on what comes of it.
        """
        at, row = _logit(self._mean, self._names, trial)  # with its batch, whichever that is
        longest = max([trial.samples, *(one.samples for one in self.observed)])
        noise = _noise(_unit(at), held_out, self.classes, self._seed) ** 2
        noise += _shorter(trial.samples, longest) ** 2
        shared = float(by_parameters @ self._covariance @ row)
        return shared**2 / (self._variance(row) + noise)

    def _variance(self, by_parameters: np.ndarray) -> float:
        return max(0.0, float(by_parameters @ self._covariance @ by_parameters))

    def apart(self, one: Candidate, other: Candidate) -> tuple[float, float]:
        """Accuracy of one training less that of another, and the standard error of that.

        What both have in common, such as the level of the task, is not in the error.
        """
        apart, slopes = self._difference(one, other)
        return apart, sqrt(self._variance(slopes))

    def would_tell(
        self, trial: Candidate, held_out: int, one: Candidate, other: Candidate
    ) -> float:
        """Share of the standard error of `apart` that a trial would take away, 0 to 1."""
        _, slopes = self._difference(one, other)
        before = self._variance(slopes)
        if before <= 0:
            return 0.0
        return 1 - sqrt(max(0.0, 1 - self.told(trial, held_out, slopes) / before))

    def _difference(self, one: Candidate, other: Candidate) -> tuple[float, np.ndarray]:
        """Accuracy of one training less that of another, and its derivatives by the parameters."""
        at, row = self._at(one)
        off, from_row = self._at(other)
        slopes = self._slope(at) * row - self._slope(off) * from_row
        return self._share(at) - self._share(off), slopes

    @property
    def _few(self) -> float:
        """By how much single trainings are less sure than their error says."""
        return 1.0 if self.observed else FEW_TASKS

    def _error(self, row: np.ndarray, samples: float) -> float:
        """Standard error of logit u of one training, from its derivatives by the parameters."""
        longest = max((one.samples for one in self.observed), default=REFERENCE_SAMPLES)
        return sqrt(self._variance(row) + self._seed**2 + _bent(samples, longest) ** 2)

    def _at(self, candidate: Candidate) -> tuple[float, np.ndarray]:
        known = candidate._replace(batch=max(candidate.batch, self.known_from))
        return _logit(self._mean, self._names, known)

    def _share(self, logit: float) -> float:
        """Accuracy at a logit, guessing included."""
        return with_guessing(_unit(logit), self.classes)

    def _slope(self, logit: float) -> float:
        """Accuracy gained per unit of the logit."""
        return (1 - 1 / self.classes) * _unit(logit) * (1 - _unit(logit))


def fit_learning(
    observed: Sequence[Observed],
    *,
    classes: float,
    optimizers: Iterable[str] = (),
    prior: Prior = PRIOR,
    usual_rate: Callable[[int], float] | None = None,
) -> LearningModel:
    """The law for a task.

    Args:
        observed: Trainings of it; without any, the prior alone speaks.
        classes: Of the data, above 1: as many even ones as guessing is right by.
        optimizers: To predict for, beside those observed.
        prior: What is known of tasks.
        usual_rate: Usual rate of a batch, or so many times it, of a network in which too high a
            rate ends training whatever the batch: none is then taken above the highest that has
            learnt, but the usual one.
    """
    names = tuple(dict.fromkeys((SGD.name, *optimizers, *(one.optimizer for one in observed))))
    weights, wanted = _prior_rows(names, prior)
    mean = np.linalg.solve(weights, wanted)  # as many rows as parameters
    longest = max((one.samples for one in observed), default=0)
    targets = [_target(one, classes, prior.seed, longest) for one in observed]

    def linear_at(mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Derivatives of all that is to be met, each over its error, and what is left of it."""
        known, met = weights.copy(), weights @ mean
        for place, apart, row in _gains_apart(mean, names, prior):
            known[place] += row
            met[place] += apart
        rows, off = [], []
        for one, (target, error) in zip(observed, targets, strict=True):
            value, row = _logit(mean, names, one.training)
            weight = _pull(target - value) / FAILED_ERROR if _fails(one, classes) else 1 / error
            rows.append(weight * row)
            off.append(weight * (target - value))
        return np.vstack([known, *rows]), np.concatenate([wanted - met, off])

    jacobian, residual = linear_at(mean)
    for _ in range(_ROUNDS):
        step = np.linalg.solve(jacobian.T @ jacobian, jacobian.T @ residual)
        # A long step leaves the range where the law is nearly straight in its parameters.
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), _SMALL))
        before = float(residual @ residual)
        while float(np.abs(step).max()) >= _SMALL:
            jacobian, residual = linear_at(mean + step)
            if float(residual @ residual) <= before:
                break
            step /= 2  # observations that contradict each other would make it go to and fro
        else:
            break
        mean = mean + step
    jacobian, _ = linear_at(mean)
    precision = jacobian.T @ jacobian
    covariance = np.linalg.inv(precision)
    return LearningModel(classes, tuple(observed), names, mean, covariance, prior.seed, usual_rate)


AT_PEAK = Normal(0.0, 0.3)
"""Distance of the logit below the law at the peak of the rate: mean, and spread over tasks,
optimizers and batches (`benchmarks.tools.epoch_curves`; docs/log.md). Noise of a high rate costs
about as much as the short training loses by its few steps at a low one, here a little less and
there a little more, so what is left is the spread."""

AVERAGED = Normal(-0.15, 0.3)
"""The same of an average of the weights over half an epoch: in 19 trainings it was that much above
the weights, by least squares over all epochs, and no different at the end."""


def falls_short(factor: float, last: float, *, averaged: bool = False) -> Normal:
    r"""Distance of logit u below that of a whole training, before the rate has come down.

    Where it is the share f of its peak, and ends at :math:`f_E`, by :math:`d (f - f_E)`. Trials of
    a job whose rate never comes down were trained in that way, so nothing is missing there.

    Args:
        factor: f now.
        last: f at the training's end.
        averaged: Whether an average of the weights is evaluated.
    """
    share, at_peak = max(0.0, factor - last), AVERAGED if averaged else AT_PEAK
    return Normal(at_peak.mean * share, at_peak.error * share)


def _prior_rows(names: Sequence[str], prior: Prior) -> tuple[np.ndarray, np.ndarray]:
    """The prior as equations in the parameters, each over its error: matrix and right side."""
    rows, wanted = [], []
    for index, name in enumerate(names):
        known = prior if index == 0 else prior.of(name)
        for part, (mean, error) in enumerate((known.level, known.slope, known.critical)):
            row = np.zeros(5 * len(names))
            row[3 * index + part] = 1.0
            if index:
                row[part] = -1.0  # the others are known by how far they are from SGD
            rows.append(row / error)
            wanted.append(mean / error)
    for name in names:
        of_rate = prior.of(name).best_rate, prior.of(name).rate_weight
        for place, (mean, error) in zip(_rate_places(names, name), of_rate, strict=True):
            row = np.zeros(5 * len(names))
            row[place] = 1 / error
            rows.append(row)
            wanted.append(mean / error)
    return np.array(rows), np.array(wanted)


def _gains_apart(
    mean: np.ndarray, names: Sequence[str], prior: Prior
) -> Iterator[tuple[int, float, np.ndarray]]:
    """What the best rate gives an optimizer more than it gives the first one, c m^2 each.

    As levels are compared at the best rates, that belongs to the rows of `_prior_rows` which do so:
    for each its place, the gain over the row's error, and its derivatives likewise.
    """
    first, by_first = _gain(mean, names, names[0])
    for index, name in enumerate(names[1:], start=1):
        gain, by_gain = _gain(mean, names, name)
        error = prior.of(name).level.error
        yield 3 * index, (gain - first) / error, (by_gain - by_first) / error


def _gain(mean: np.ndarray, names: Sequence[str], optimizer: str) -> tuple[float, np.ndarray]:
    """Logit u at the best rate less that at the usual one, and its derivatives."""
    best, log_weight = _rate_places(names, optimizer)
    weight = exp(mean[log_weight])
    row = np.zeros_like(mean)
    row[best] = 2 * weight * mean[best]
    row[log_weight] = gain = weight * mean[best] ** 2
    return float(gain), row


def _logit(
    mean: np.ndarray, names: Sequence[str], candidate: Candidate
) -> tuple[float, np.ndarray]:
    """Logit u of a training, and its derivatives by the parameters."""
    first = 3 * names.index(candidate.optimizer)
    level = mean[first]
    slope, size = exp(mean[first + 1]), exp(mean[first + 2])
    batch = candidate.batch
    told = _counted(candidate.samples, batch) / _counted(REFERENCE_SAMPLES, REFERENCE_BATCH)
    steps = log(told * (REFERENCE_BATCH + size) / (batch + size))
    row = np.zeros_like(mean)
    by_size = size / (REFERENCE_BATCH + size) - size / (batch + size)
    row[first : first + 3] = 1.0, slope * steps, slope * by_size
    value = float(level + slope * steps)
    offset = candidate.offset
    if offset:
        best, log_weight = _rate_places(names, candidate.optimizer)
        weight = exp(mean[log_weight])
        row[best] = 2 * weight * offset
        row[log_weight] = weight * (2 * mean[best] * offset - offset**2)
        value += float(row[log_weight])
    return value, row


def _counted(samples: float, batch: int) -> float:
    """Samples S of a training without those of its lost steps.

    Of so few that half of them or more are lost it is :math:`S^2 / (4 n_0 B)`, which goes on
    smoothly, as there is no logarithm of less than none.
    """
    lost = LOST_STEPS * batch
    return samples - lost if samples >= 2 * lost else samples**2 / (4 * lost)


def _needed(counted: float, batch: int) -> float:
    """The samples of which so many are `_counted`."""
    lost = LOST_STEPS * batch
    return counted + lost if counted >= lost else 2 * sqrt(counted * lost)


def _rate_places(names: Sequence[str], optimizer: str) -> tuple[int, int]:
    """Where the parameters of an optimizer's rate are: best rate and weight."""
    first = 3 * len(names) + 2 * names.index(optimizer)
    return first, first + 1


def _fails(one: Observed, classes: float) -> bool:
    """Whether a training may have learnt nothing because of its rate."""
    guessed = sqrt((1 - 1 / classes) / classes / one.held_out)
    return one.diverged or (one.offset != 0 and one.accuracy < 1 / classes + 2 * guessed)


def _pull(above: float) -> float:
    """Weight of a failed training whose logit is so far above what the law says of it."""
    return 0.0 if above >= 0 else min(1.0, sqrt(FAILED_ERROR / -above))


def _bent(samples: float, longest: float) -> float:
    """Standard error of logit u of a training beyond the longest observed."""
    return FORM_ERROR * log(samples / longest) if samples > longest else 0.0


def _shorter(samples: float, longest: float) -> float:
    """Standard error of logit u of a training below the longest observed."""
    return SHORTER_ERROR * log(longest / samples) if samples < longest else 0.0


def _target(
    one: Observed, classes: float, seed: float, longest: float = 0.0
) -> tuple[float, float]:
    """Logit u of what was observed, were it whole, and its standard error beside the longest."""
    unit = above_guessing(one.accuracy, classes, 1 - 0.5 / one.held_out)
    error = _noise(unit, one.held_out, classes, seed)
    error = hypot(error, _shorter(one.samples, longest), one.short.error)
    return log(unit / (1 - unit)) + one.short.mean, error


def _noise(unit: float, held_out: int, classes: float, seed: float) -> float:
    """Standard error of logit u: of counting right answers, and from seed to seed."""
    unit = min(1 - 0.5 / held_out, max(MIN_LEARNT, unit))
    share = with_guessing(unit, classes)
    counted = sqrt(share * (1 - share) / held_out) / ((1 - 1 / classes) * unit * (1 - unit))
    return sqrt(counted**2 + seed**2)


def _estimate(value: float, low: float, high: float) -> Estimate:
    """To nine digits: the last ones depend on the machine's linear algebra, and plans must not."""
    value, low, high = (float(f"{one:.9g}") for one in (value, low, high))
    return Estimate(value=value, low=low, high=high)


def _unit(logit: float) -> float:
    return 1 / (1 + exp(-logit))
