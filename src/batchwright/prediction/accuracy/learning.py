r"""The learning curve of one task: its parameters, fitted to trainings, and what it predicts.

The equation is that of `learning_law`. It is for whole trainings, whose rate has come down by their
end: within a training accuracy is lower (`falls_short`). Far above the best rate trainings fail,
which is no parabola: a training that ends at guessing at another rate, or that diverged, shows only
that so little is reached there, and its pull on the fit is bounded (Huber 1964).

The prior of two optimizers' levels is that of their difference at the best rate of each,
:math:`a + c m^2`: an optimizer whose usual rate is far from its best is far behind at the usual
rate only. The prior (`PRIOR`) and the observations are combined by Bayes' rule, with normal errors
and the curvature of the posterior at its peak (Laplace). So a few short trainings already narrow
the prediction, many determine it, and the interval shows how far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, hypot, inf, log, pi, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from batchwright.prediction.accuracy.learning_law import (
    LOST_STEPS,
    REFERENCE_SAMPLES,
    gain_of,
    logit_of,
    needed_samples,
    rate_places,
    unit_of,
)
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

FORM_ERROR = 0.25
"""Standard error of logit u for each e-fold beyond the longest observed training, as the line may
bend: without it the intervals of trainings four times as long were too narrow (docs/log.md, the
learning curve)."""
SHORTER_ERROR = 0.1
"""Standard error of logit u of an observation for each e-fold below the longest one, which so has
more weight."""

FAILED_ERROR = 1.0
"""Standard error of logit u of a training that failed at its rate. A failed training further below
the curve pulls it no harder."""

_ROUNDS, _SMALL = 50, 1e-6
_MAX_LOG = 60.0  # largest logarithm of a number of samples


@dataclass(frozen=True)
class Prior:
    """The prior of a task's parameters, before any observation; logarithms are natural."""

    level: Normal  # logit u after the reference training
    slope: Normal  # logarithm of the slope of logit u against the logarithm of noiseless steps
    critical: Normal  # logarithm of the critical batch, in samples
    seed: float  # standard deviation of logit u from seed to seed and around the curve
    # Priors of optimizers, in place of those in the registry.
    optimizers: Mapping[str, LearningPrior] = field(default_factory=dict)

    def of(self, optimizer: str) -> LearningPrior:
        """The prior of an optimizer."""
        return self.optimizers.get(optimizer) or OPTIMIZERS[optimizer].learning


PRIOR = Prior(
    level=Normal(-1.0, 2.1), slope=Normal(-0.43, 0.5), critical=Normal(5.15, 0.6), seed=0.06
)
"""Means and spreads over seven tasks; `benchmarks.tools.learning_prior` derives them."""
FEW_TASKS = 1.34
"""Quantile of an eighth task, predicted from the mean and spread of seven, over that of a normal
distribution: Student's t with six degrees of freedom, times sqrt(1 + 1/7)."""
KNOWN_FROM = 32
"""Smallest batch of the trainings behind the prior."""


class Aim(NamedTuple):
    """A training that ends at a given accuracy."""

    samples: float  # samples that it takes
    # Derivatives of the logarithm of the samples by the curve's parameters.
    by_parameters: np.ndarray
    slope: float  # derivative of logit u by the logarithm of the samples


@dataclass(frozen=True)
class LearningModel:
    """The learning curve of one task: accuracy of its trainings, with its error."""

    classes: float  # number of equally large classes with which guessing would be as accurate
    observed: tuple[Observed, ...]  # the observations that it was fitted to
    _names: tuple[str, ...]
    # Level, log slope and log critical batch of each optimizer, one optimizer after the other; then
    # best rate and log weight of each optimizer.
    _mean: np.ndarray
    _covariance: np.ndarray
    _seed: float
    _usual_rate: Callable[[int], float] | None = None

    @cached_property
    def known_from(self) -> int:
        """Smallest batch of the trainings that it rests on, of this task and of others.

        Smaller batches are predicted like this one, as nothing shows that they learn more. A
        training that failed for its rate does not count.
        """
        learnt = (one.batch for one in self.observed if not _fails(one, self.classes))
        return min([KNOWN_FROM, *learnt])

    def accuracy(self, candidate: Candidate) -> Estimate:
        """Held-out accuracy at the end of a training, a share; the interval is of a single seed."""
        return self.evaluated(candidate, Normal(0.0, 0.0), None)

    def reached_with(self, candidate: Candidate, confidence: float) -> float:
        """Accuracy that a single seed reaches with the probability ``confidence``, a share."""
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

    def evaluated(self, candidate: Candidate, short: Normal, held_out: int | None) -> Estimate:
        """Accuracy that an evaluation finds, in or after a training.

        Args:
            candidate: The training up to now.
            short: Logit u of a whole training of these samples less that at the evaluation.
            held_out: Number of images; `None`: so many that counting has no error.

        Returns:
            The median. Without any observation it is the mean: the median of so wide a distribution
            is near 0 or 1 for trainings much longer or shorter than those of other tasks.
        """
        middle, row = self._at(candidate)
        middle -= short.mean
        error = hypot(self._error(row, candidate.samples), short.error)
        counting = _noise(unit_of(middle), held_out, self.classes, 0.0) if held_out else 0.0
        true, wide = (Z_975 * self._few * one for one in (error, hypot(error, counting)))
        value = curve = self._share(middle)
        low, high = self._share(middle - wide), self._share(middle + wide)
        if not self.observed:  # approximate mean for a normal logit (MacKay 1992)
            value = min(high, max(low, self._share(middle / sqrt(1 + pi * error**2 / 8))))
        if held_out:
            # Logits are of accuracies between guessing and 1. A count may lie below guessing, and
            # all images may be right: so the interval also holds that of the counted share.
            half = self._few * _counted(curve, held_out)
            down, up = (hypot(curve - self._share(middle + at), half) for at in (-true, true))
            low, high = max(0.0, min(low, curve - down)), min(1.0, max(high, curve + up))
        return _estimate(value, low, high)

    def residual(self, one: Observed) -> Normal:
        """Distance of logit u of an observed training below the curve, and its standard error.

        The error is that of the curve and of counting right answers.
        """
        curve, row = self._at(one.training)
        target, error = _target(one, self.classes, 0.0)
        return Normal(curve - target, hypot(error, self._error(row, one.samples)))

    def samples_to(self, optimizer: str, batch: int, accuracy: float) -> Estimate | None:
        """Samples of the training that ends at an accuracy; `None` if guessing reaches it.

        Far beyond all observations the interval may span decades.
        """
        aim = self.aim(optimizer, batch, accuracy)
        if aim is None:
            return None
        off = exp(min(_MAX_LOG, Z_975 * self.aim_error(aim)))
        return _estimate(aim.samples, aim.samples / off, aim.samples * off)

    def samples_compared(
        self, one: tuple[str, int], other: tuple[str, int], accuracy: float
    ) -> Estimate | None:
        """`samples_to` of one optimizer and batch over that of another.

        The interval is that of the ratio, without the scatter from seed to seed.
        """
        found, others = (self.aim(*pair, accuracy) for pair in (one, other))
        if found is None or others is None:
            return None
        error = sqrt(self._variance(found.by_parameters - others.by_parameters))
        ratio, off = found.samples / others.samples, exp(min(_MAX_LOG, Z_975 * error))
        return _estimate(ratio, ratio / off, ratio * off)

    def rate_of(self, optimizer: str) -> tuple[float, float]:
        """The parameters of an optimizer's rate: m and the logarithm of c."""
        best, weight = rate_places(self._names, optimizer)
        return float(self._mean[best]), float(self._mean[weight])

    def offset(self, optimizer: str, batch: int | None = None) -> float:
        """Offset of the best rate that is known, within the range of rates that were tried.

        It is rounded to a rate of three digits, as no more are known.

        Args:
            optimizer: The optimizer, as in a job.
            batch: Global batch, in samples; `None`: any batch that was tried.
        """
        known = [one for one in self.observed if one.optimizer == optimizer]
        learnt = [one for one in known if not _fails(one, self.classes)]
        offsets, most = [0.0, *(one.offset for one in learnt)], self.lowest_failing(optimizer)
        high = max((one for one in offsets if one < most), default=0.0)
        best = min(max(self.rate_of(optimizer)[0], min(offsets)), high)
        if batch is not None and self._usual_rate is not None:
            usual = self._usual_rate(batch)
            rates = (self._usual_rate(one.batch) * exp(one.offset) for one in learnt)
            best = min(best, log(max([usual, *rates]) / usual))
        return log(float(f"{exp(best):.3g}"))

    def lowest_failing(self, optimizer: str) -> float:
        """The smallest offset at which a training failed for its rate; infinite without any."""
        known = [one for one in self.observed if one.optimizer == optimizer]
        least = min((one.offset for one in known if not _fails(one, self.classes)), default=inf)
        failing = [one for one in known if _fails(one, self.classes)]
        return min(
            (one.offset for one in failing if one.diverged or one.offset > least), default=inf
        )

    def aim(
        self, optimizer: str, batch: int, accuracy: float, offset: float | None = None
    ) -> Aim | None:
        """The training that ends at an accuracy; `None` where guessing reaches it.

        Args:
            optimizer: The optimizer, as in a job.
            batch: Global batch, in samples.
            accuracy: Held-out accuracy, a share.
            offset: Offset of the rate; `None`: that of the best known rate.
        """
        unit = (accuracy - 1 / self.classes) / (1 - 1 / self.classes)
        if not 0 < unit < 1:
            return None
        slope = exp(self._mean[3 * self._names.index(optimizer) + 1])
        offset = self.offset(optimizer, batch) if offset is None else offset
        batch = max(batch, self.known_from)
        start, _ = self._at(Candidate(optimizer, batch, needed_samples(1.0, batch), offset))
        # At least one sample: contradicting trials may put the accuracy before the first one.
        counted = exp(max(0.0, min(_MAX_LOG, (log(unit / (1 - unit)) - start) / slope)))
        samples = needed_samples(counted, batch)
        _, row = self._at(Candidate(optimizer, batch, samples, offset))
        # The derivative by the logarithm of all samples, including those that do not count.
        slope *= samples / counted if counted >= LOST_STEPS * batch else 2.0
        return Aim(samples, -row / slope, slope)

    def aim_error(self, aim: Aim, trial: Candidate | None = None, held_out: int = 0) -> float:
        """Standard error of the logarithm of an aim's samples, for a single seed.

        Args:
            aim: The training, from `aim`.
            trial: A further trial that will have been observed; `None`: none.
            held_out: Number of images that the trial's accuracy is counted on.
        """
        variance = self._variance(aim.by_parameters)
        longest = [one.samples for one in self.observed]
        if trial is not None:
            variance -= self.variance_removed(trial, held_out, aim.by_parameters)
            longest.append(trial.samples)
        bent = _bent(aim.samples, max(longest, default=REFERENCE_SAMPLES))
        return sqrt(max(0.0, variance) + (self._seed**2 + bent**2) / aim.slope**2)

    def variance_removed_from(self, trial: Candidate, held_out: int, one: Candidate) -> float:
        """Variance of logit u of training ``one`` that a trial would remove."""
        _, row = self._at(one)
        return self.variance_removed(trial, held_out, row)

    def variance_removed(self, trial: Candidate, held_out: int, by_parameters: np.ndarray) -> float:
        """Variance that a trial would remove from a quantity with these derivatives.

        It depends on the trial's optimizer, batch, samples and rate, and not on its result.

        Args:
            trial: The trial.
            held_out: Number of images that its accuracy is counted on.
            by_parameters: Derivatives of the quantity by the curve's parameters.
        """
        at, row = logit_of(self._mean, self._names, trial)  # even if its batch is below known_from
        longest = max([trial.samples, *(one.samples for one in self.observed)])
        noise = _noise(unit_of(at), held_out, self.classes, self._seed) ** 2
        noise += _shorter(trial.samples, longest) ** 2
        shared = float(by_parameters @ self._covariance @ row)
        return shared**2 / (self._variance(row) + noise)

    def _variance(self, by_parameters: np.ndarray) -> float:
        return max(0.0, float(by_parameters @ self._covariance @ by_parameters))

    def difference(self, one: Candidate, other: Candidate) -> tuple[float, float]:
        """Accuracy of one training less that of another, a share, and its standard error.

        Errors that both have in common, such as that of the task's level, cancel.
        """
        apart, slopes = self._difference_by_parameters(one, other)
        return apart, sqrt(self._variance(slopes))

    def error_removed(
        self, trial: Candidate, held_out: int, one: Candidate, other: Candidate
    ) -> float:
        """Share of the standard error of `difference` that a trial would remove, from 0 to 1."""
        _, slopes = self._difference_by_parameters(one, other)
        before = self._variance(slopes)
        if before <= 0:
            return 0.0
        return 1 - sqrt(max(0.0, 1 - self.variance_removed(trial, held_out, slopes) / before))

    def _difference_by_parameters(
        self, one: Candidate, other: Candidate
    ) -> tuple[float, np.ndarray]:
        """`difference`, and its derivatives by the curve's parameters."""
        at, row = self._at(one)
        off, from_row = self._at(other)
        slopes = self._slope(at) * row - self._slope(off) * from_row
        return self._share(at) - self._share(off), slopes

    @property
    def _few(self) -> float:
        """Factor of intervals for the small number of tasks behind the prior."""
        return 1.0 if self.observed else FEW_TASKS

    def _error(self, row: np.ndarray, samples: float) -> float:
        """Standard error of logit u of a single training, by its derivatives ``row``."""
        longest = max((one.samples for one in self.observed), default=REFERENCE_SAMPLES)
        return sqrt(self._variance(row) + self._seed**2 + _bent(samples, longest) ** 2)

    def _at(self, candidate: Candidate) -> tuple[float, np.ndarray]:
        known = candidate._replace(batch=max(candidate.batch, self.known_from))
        return logit_of(self._mean, self._names, known)

    def _share(self, logit: float) -> float:
        """Accuracy, guessing included, whose logit u is ``logit``."""
        return with_guessing(unit_of(logit), self.classes)

    def _slope(self, logit: float) -> float:
        return (1 - 1 / self.classes) * unit_of(logit) * (1 - unit_of(logit))


def fit_learning(
    observed: Sequence[Observed],
    *,
    classes: float,
    optimizers: Iterable[str] = (),
    prior: Prior = PRIOR,
    usual_rate: Callable[[int], float] | None = None,
) -> LearningModel:
    """Fit the learning curve to trainings of a task.

    Args:
        observed: Observed trainings; without any the curve is the prior.
        classes: Number of equally large classes, above 1, with which guessing would be as accurate.
        optimizers: Optimizers to predict for, besides those observed.
        prior: The prior of tasks.
        usual_rate: batch -> its usual rate, up to a factor, for networks in which too high a rate
            ends any training: then no rate is taken above the highest one that has learnt, except
            the usual one.
    """
    names = tuple(dict.fromkeys((SGD.name, *optimizers, *(one.optimizer for one in observed))))
    weights, wanted = _prior_rows(names, prior)
    mean = np.linalg.solve(weights, wanted)  # as many rows as parameters
    longest = max((one.samples for one in observed), default=0)
    targets = [_target(one, classes, prior.seed, longest) for one in observed]

    def linear_at(mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Derivatives and residuals of prior and observations, each over its error."""
        by_prior, values = weights.copy(), weights @ mean
        for place, gain, row in _gain_differences(mean, names, prior):
            by_prior[place] += row
            values[place] += gain
        rows, residuals = [], []
        for one, (target, error) in zip(observed, targets, strict=True):
            value, row = logit_of(mean, names, one.training)
            weight = _pull(target - value) / FAILED_ERROR if _fails(one, classes) else 1 / error
            rows.append(weight * row)
            residuals.append(weight * (target - value))
        return np.vstack([by_prior, *rows]), np.concatenate([wanted - values, residuals])

    jacobian, residual = linear_at(mean)
    for _ in range(_ROUNDS):
        step = np.linalg.solve(jacobian.T @ jacobian, jacobian.T @ residual)
        # Steps are bounded: far away the curve is no longer nearly linear in its parameters.
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), _SMALL))
        before = float(residual @ residual)
        while float(np.abs(step).max()) >= _SMALL:
            jacobian, residual = linear_at(mean + step)
            if float(residual @ residual) <= before:
                break
            step /= 2  # contradicting observations would make full steps oscillate
        else:
            break
        mean = mean + step
    jacobian, _ = linear_at(mean)
    precision = jacobian.T @ jacobian
    covariance = np.linalg.inv(precision)
    return LearningModel(classes, tuple(observed), names, mean, covariance, prior.seed, usual_rate)


AT_PEAK = Normal(0.0, 0.3)
"""Logit u of a whole training less that at the peak of the rate: mean, and spread over tasks,
optimizers and batches (`benchmarks.tools.epoch_curves`; docs/log.md). The noise of a high rate
costs about as much as a short training loses by its steps at a low rate, so the mean is 0."""

AVERAGED = Normal(-0.15, 0.3)
"""`AT_PEAK` for an average of the weights over half an epoch: in 19 trainings its logit was so far
above that of the weights, by least squares over all epochs, and equal to it at the end
(docs/log.md, averages of weights on the way to a target)."""


def falls_short(factor: float, last: float, *, averaged: bool = False) -> Normal:
    r"""Logit u of a whole training less that at an evaluation before the rate has come down.

    It is :math:`d (f - f_E)`, where the rate is the share f of its peak, and ends at :math:`f_E`.
    Where the rate does not come down it is 0, as trials of such a job were trained in the same way.

    Args:
        factor: f at the evaluation.
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
                row[part] = -1.0  # priors of other optimizers are differences to SGD
            rows.append(row / error)
            wanted.append(mean / error)
    for name in names:
        of_rate = prior.of(name).best_rate, prior.of(name).rate_weight
        for place, (mean, error) in zip(rate_places(names, name), of_rate, strict=True):
            row = np.zeros(5 * len(names))
            row[place] = 1 / error
            rows.append(row)
            wanted.append(mean / error)
    return np.array(rows), np.array(wanted)


def _gain_differences(
    mean: np.ndarray, names: Sequence[str], prior: Prior
) -> Iterator[tuple[int, float, np.ndarray]]:
    """The gain c m^2 of each optimizer by its best rate, less that of the first optimizer.

    It belongs to the rows of `_prior_rows` that compare levels, as these are compared at the best
    rates. Yields the index of the row, and the difference and its derivatives over the row's error.
    """
    first, by_first = gain_of(mean, names, names[0])
    for index, name in enumerate(names[1:], start=1):
        gain, by_gain = gain_of(mean, names, name)
        error = prior.of(name).level.error
        yield 3 * index, (gain - first) / error, (by_gain - by_first) / error


def _fails(one: Observed, classes: float) -> bool:
    """Whether a training diverged, or ended at guessing at another rate than the usual one."""
    return one.diverged or (one.offset != 0 and one.guesses(classes))


def _pull(above: float) -> float:
    """Weight of a failed training whose logit is ``above`` the curve's: 0 if it is really above."""
    return 0.0 if above >= 0 else min(1.0, sqrt(FAILED_ERROR / -above))


def _bent(samples: float, longest: float) -> float:
    """Standard error of logit u of a training that is longer than the longest observed."""
    return FORM_ERROR * log(samples / longest) if samples > longest else 0.0


def _shorter(samples: float, longest: float) -> float:
    """Standard error of logit u of a training that is shorter than the longest observed."""
    return SHORTER_ERROR * log(longest / samples) if samples < longest else 0.0


def _target(
    one: Observed, classes: float, seed: float, longest: float = 0.0
) -> tuple[float, float]:
    """Logit u of an observed training, as if it were whole, and its standard error."""
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


def _counted(share: float, held_out: int) -> float:
    """Half of the 95 % interval of a counted accuracy; a count is no finer than an image."""
    return max(Z_975 * sqrt(share * (1 - share) / held_out), 0.5 / held_out)


def _estimate(value: float, low: float, high: float) -> Estimate:
    """An estimate of nine digits: further ones depend on the machine, and plans must not."""
    value, low, high = (float(f"{one:.9g}") for one in (value, low, high))
    return Estimate(value=value, low=low, high=high)
