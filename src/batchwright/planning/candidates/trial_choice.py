"""Chooses the next trial: the short training that reduces the doubt of the decision most a second.

The planner decides for the quickest of the candidates that are as accurate as the best. The
decision loses accuracy if another candidate is more accurate than the chosen one. A trial is worth
the part of that uncertainty which it removes, and costs its seconds. How much it removes depends on
its optimizer, batch and length and not on its result, so it can be judged before it is made
(Chaloner and Verdinelli 1995, Bayesian experimental design). Another learning rate is another
candidate, as quick as the usual one.

The decision loses time if a quicker candidate is as accurate as the best after all. A plan gives up
no accuracy beyond the tolerance for any time, so the two losses need not be weighed against each
other: doubts of accuracy come first. Then a trial is worth the seconds of training that a quicker
candidate saves, times the probability that the trial shows it to be as accurate. It is made if that
is more than its own seconds.

With an accuracy to reach, the decision is the quickest candidate and its number of epochs. A trial
saves time in two ways: fewer epochs suffice to be sure, and another candidate may prove quicker. It
is made if it saves more than it takes. The first trial is made in any case, as there is no
prediction without it; so it is wherever a plan knows nothing of accuracy without trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import erf, exp, inf, log, pi, sqrt
from statistics import NormalDist
from typing import NamedTuple

from batchwright.prediction.accuracy.learning import Aim, LearningModel, fit_learning
from batchwright.prediction.accuracy.trainings import MIN_STEPS, OFFSET_DIGITS, Candidate, Observed
from batchwright.records import OptimizerName

MIN_SAMPLES = 512
"""Fewest samples of a trial."""
MIN_BATCH = 16
"""Smallest batch of a trial. The curve is known from 32 on, and with few samples the statistics of
batch normalization differ."""
HELD_OUT = 1000
"""Most held-out images that the accuracy of a trial is counted on."""
HELD_OUT_SHARE = 0.1
"""Largest share of the training images that is held out for trials."""
SETTLED = 0.002
"""Expected loss of accuracy, a share, below which no further trial pays."""

RATE_STEP = log(3)
"""Logarithm of the ratio of neighbouring rates that are tried: closer rates differ too little."""
MAX_RATE_STEPS = 3
"""Most such steps up or down from the usual rate."""

_LONGEST = 1 / 3
"""Share of the budget for the longest trial: slope and level of the curve take three trials. Where
no trial is so short, one may take all of the budget: it tells the level at least."""
_SHORTER = (1, 2, 4)
"""Length of the longest trial over the lengths that are considered."""
_LONGEST_TO_TARGET, _SHORTER_TO_TARGET = 1.0, (1, 2, 4, 8)
"""`_LONGEST` and `_SHORTER` where an accuracy is to be reached: each trial has to save its time."""


class Arm(NamedTuple):
    """An optimizer and a batch that a plan may choose: an arm of the experiment."""

    optimizer: OptimizerName  # the optimizer
    batch: int  # global batch, in samples
    workers: int  # number of workers that train it quickest
    micro_batch: int  # most samples in one forward pass of a worker
    epoch_seconds: float  # planned seconds of training on all images once
    # Seconds that a trial takes here over those planned, which may be simulated.
    slowness: float = 1.0


class TrialPlan(NamedTuple):
    """A trial to be made."""

    arm: Arm  # its optimizer, batch and workers
    samples: int  # samples to train on
    seconds: float  # predicted seconds, judging included
    offset: float = 0.0  # logarithm of its rate over the usual one, as in a `Candidate`

    @property
    def training(self) -> Candidate:
        """The trial as an input of the learning curve."""
        return Candidate(self.arm.optimizer, self.arm.batch, self.samples, self.offset)

    @property
    def rate_scale(self) -> float:
        """Its rate over the usual one."""
        return exp(self.offset)

    def __str__(self) -> str:
        rate = f", {self.rate_scale:.3g} x the usual rate" if self.offset else ""
        return f"{self.arm.optimizer}, batch {self.arm.batch}, {self.samples:,} images{rate}"


class _TrainingToTarget(NamedTuple):
    """A training of an arm to the target; seconds are given by their natural logarithms."""

    aim: Aim  # the training
    arm: Arm  # its optimizer and batch
    open: bool  # whether it has the rate that a plan would take, so that it may be chosen
    expected: float  # median of the logarithm of its seconds
    surely: float  # logarithm of the seconds that reach the target with the confidence asked for


@dataclass(frozen=True)
class Question:
    """The decision that trials are made for."""

    arms: tuple[Arm, ...]  # optimizers and batches to choose from
    epochs: int  # epochs of the planned training; the most where there is a target
    samples: int  # training images
    classes: float  # number of equally large classes with which guessing would be as accurate
    tolerance: float  # accuracy that is given up for time, a share
    judging_seconds: float  # seconds of evaluating a trial
    rates: bool = False  # whether the learning rate is to be decided, too
    # Accuracy to reach, a share; `None`: the accuracy after all epochs counts.
    target: float | None = None
    confidence: float = 0.8  # probability with which the target is to be reached
    usual_rate: Callable[[int], float] | None = None  # as for `fit_learning`
    # Whether a plan would not predict accuracy without trials, although the curve expects something
    # from other tasks: then one trial is made in any case.
    blind: bool = False

    @property
    def optimizers(self) -> tuple[OptimizerName, ...]:
        """The optimizers of the arms."""
        return tuple(dict.fromkeys(arm.optimizer for arm in self.arms))

    @property
    def held_out(self) -> int:
        """Number of held-out images that the accuracy of trials is counted on."""
        return min(HELD_OUT, int(HELD_OUT_SHARE * self.samples))

    @property
    def least_budget(self) -> float:
        """Least budget, in seconds, that allows a trial; infinite if the training is too short."""
        found = [
            self._seconds(arm, samples)
            for arm in self.arms
            if (samples := -(-_least_samples(arm) // arm.batch) * arm.batch)
            <= self.epochs * self.samples
        ]
        return min(found, default=inf)

    def next_trial(
        self, observed: Sequence[Observed], *, budget: float, left: float
    ) -> TrialPlan | None:
        """The trial to make next; `None` if none pays, or if no time is left for one.

        Args:
            observed: The trials so far.
            budget: Seconds for all trials.
            left: Seconds of the budget that are left.
        """
        if not self.held_out:
            return None
        model = self._model(observed)
        offsets = {name: self.offsets(model, name) for name in self.optimizers}
        made = {one.training for one in observed}  # repeating a trial gives the same result
        trials = [
            one
            for one in self._affordable(budget, offsets)
            if one.seconds <= left and one.training not in made
        ]
        # Each optimizer is tried at its usual rate before any is tried at another: a second rate
        # says little alone, and nothing of an optimizer that was not tried.
        tried = {one.optimizer for one in observed}
        if {one.arm.optimizer for one in trials if not one.offset} <= tried:
            trials = [one for one in trials if one.arm.optimizer in tried]
        else:
            trials = [one for one in trials if not one.offset]
        if not trials:
            return None
        if self.target is not None:
            return self._saving_most(model, trials, offsets, self.target)
        trainings = {
            Candidate(arm.optimizer, arm.batch, self.epochs * self.samples, offset): arm
            for arm in self.arms
            if self.epochs * self.samples >= MIN_STEPS * arm.batch  # a plan takes no fewer steps
            for offset in {model.offset(arm.optimizer, arm.batch), *offsets[arm.optimizer]}
        }
        accuracies = {one: model.accuracy(one).value for one in trainings}
        open_ = [one for one in trainings if one.offset == model.offset(one.optimizer, one.batch)]
        best = max(open_, key=accuracies.__getitem__)
        near = [one for one in open_ if accuracies[one] >= accuracies[best] - self.tolerance]
        chosen = min(near, key=lambda one: trainings[one].epoch_seconds)
        if self.blind and not observed:
            return max(
                trials,
                key=lambda one: model.variance_removed_from(one.training, self.held_out, chosen),
            )
        losses = {
            one: _expected_above(*model.difference(one, chosen), self.tolerance)
            for one in trainings
            if one != chosen
        }
        doubted = max(losses, key=losses.__getitem__, default=None)
        if doubted is None or losses[doubted] < SETTLED:
            return self._sooner(model, trials, {one: trainings[one] for one in open_}, best, chosen)
        return max(
            trials,
            key=lambda one: (
                model.error_removed(one.training, self.held_out, chosen, doubted) / one.seconds
            ),
            default=None,
        )

    def _sooner(
        self,
        model: LearningModel,
        trials: Sequence[TrialPlan],
        trainings: Mapping[Candidate, Arm],
        best: Candidate,
        chosen: Candidate,
    ) -> TrialPlan | None:
        """The trial whose expected saving of training time exceeds its own seconds most, if any."""
        arm = trainings[chosen]
        whole = self.epochs * self.samples * self._each(arm)
        saved = {
            one: whole * (1 - other.epoch_seconds / arm.epoch_seconds)
            for one, other in trainings.items()
            if other.epoch_seconds < arm.epoch_seconds
        }

        def gain(trial: TrialPlan) -> float:
            shown = (
                seconds * self._shown(model, trial.training, one, best)
                for one, seconds in saved.items()
            )
            return max(shown, default=0.0) - trial.seconds

        found = max(trials, key=gain)
        return found if gain(found) > 0 else None

    def _shown(
        self, model: LearningModel, trial: Candidate, one: Candidate, best: Candidate
    ) -> float:
        """Probability that a trial brings training ``one`` within the tolerance of the best."""
        apart, error = model.difference(one, best)
        left = 1 - model.error_removed(trial, self.held_out, one, best)
        moved = error * sqrt(1 - left**2)
        return NormalDist().cdf((apart + self.tolerance) / moved) if moved else 0.0

    def _saving_most(
        self,
        model: LearningModel,
        trials: Sequence[TrialPlan],
        offsets: Mapping[OptimizerName, Sequence[float]],
        target: float,
    ) -> TrialPlan | None:
        """The trial that saves the most seconds of training to the target beyond its own, if any.

        The first trial is chosen even if it saves less than it takes.
        """
        aims = self._aims(model, offsets, target)
        if not aims:
            return None
        sure = NormalDist().inv_cdf(self.confidence)
        chosen = min((one for one in aims if one.open), key=lambda one: one.surely)
        trained = self._trained(chosen, chosen.surely)

        def saved(trial: TrialPlan) -> float:
            at = trial.training
            other = max(
                _expected_above(
                    chosen.surely - one.surely, self._moved(model, at, one.aim, chosen.aim), 0.0
                )
                for one in aims
            )
            after = chosen.expected + sure * model.aim_error(chosen.aim, at, self.held_out)
            gain = trained - self._trained(chosen, after)
            return gain + trained * (1 - exp(-other)) - trial.seconds

        best = max(trials, key=saved, default=None)
        return best if best is not None and (not model.observed or saved(best) > 0) else None

    def time_to_target(self, observed: Sequence[Observed], share: float) -> float:
        """Seconds for all trials: a share of the seconds that the target is likely to take.

        These are the geometric mean of the median seconds and of those that suffice with
        `confidence`: the former alone would allow too little where little is known, the latter
        alone several times the training itself. The first trial may take the least budget that
        allows one, up to the share of the latter. 0 where guessing reaches the target.

        Args:
            observed: The trials so far.
            share: The share of the training's time.

        Raises:
            ValueError: There is no target.
        """
        if self.target is None:
            raise ValueError("there is no target")
        model = self._model(observed)
        offsets = {name: self.offsets(model, name) for name in self.optimizers}
        aims = [one for one in self._aims(model, offsets, self.target) if one.open]
        if not aims:
            return 0.0
        chosen = min(aims, key=lambda one: one.surely)
        surely = self._trained(chosen, chosen.surely)
        likely = sqrt(self._trained(chosen, chosen.expected) * surely)
        if observed:
            return share * likely
        return max(share * likely, min(share * surely, self.least_budget))

    def _model(self, observed: Sequence[Observed]) -> LearningModel:
        return fit_learning(
            observed,
            classes=self.classes,
            optimizers=self.optimizers,
            usual_rate=self.usual_rate,
        )

    def _aims(
        self, model: LearningModel, offsets: Mapping[OptimizerName, Sequence[float]], target: float
    ) -> list[_TrainingToTarget]:
        """Trainings of all arms to the target, at each rate; empty if guessing reaches it."""
        sure = NormalDist().inv_cdf(self.confidence)
        found = []
        for arm in self.arms:
            name = arm.optimizer
            best = model.offset(name, arm.batch)
            for offset in {best, *offsets[name]}:
                aim = model.aim(name, arm.batch, target, offset)
                if aim is not None:
                    seconds = log(aim.samples * self._each(arm))
                    surely = max(self._least(arm), seconds + sure * model.aim_error(aim))
                    found.append(_TrainingToTarget(aim, arm, offset == best, seconds, surely))
        return found

    def _trained(self, one: _TrainingToTarget, log_seconds: float) -> float:
        """Seconds of a training, ``exp(log_seconds)`` smoothly bounded by those of all epochs."""
        most = self.epochs * self.samples * self._each(one.arm)
        return most / (1 + exp(log(most) - max(self._least(one.arm), log_seconds)))

    def _least(self, arm: Arm) -> float:
        """Logarithm of the seconds of the fewest steps that a plan takes."""
        return log(MIN_STEPS * arm.batch * self._each(arm))

    def _moved(self, model: LearningModel, trial: Candidate, one: Aim, other: Aim) -> float:
        """Standard deviation by which a trial moves the logarithm of the ratio of two aims."""
        apart = one.by_parameters - other.by_parameters
        return sqrt(model.variance_removed(trial, self.held_out, apart))

    def offsets(self, model: LearningModel, name: OptimizerName) -> list[float]:
        """Offsets of the rates to compare: those tried, and one beyond an end that is the best.

        Without any trial of the optimizer the usual rate counts as tried.
        """
        if not self.rates:
            return [0.0]
        known = [one for one in model.observed if one.optimizer == name]
        tried = {round(one.offset / RATE_STEP) for one in known} or {0}
        low, high, best = min(tried), max(tried), model.offset(name) / RATE_STEP
        further = {low - 1} if best < low + 0.5 else set[int]()
        further |= {high + 1} if best > high - 0.5 else set()
        most = model.lowest_failing(name) - RATE_STEP / 2
        return [
            round(step * RATE_STEP, OFFSET_DIGITS)
            for step in sorted(tried | further)
            if abs(step) <= MAX_RATE_STEPS and step * RATE_STEP < most
        ]

    def _affordable(
        self, budget: float, offsets: Mapping[OptimizerName, Sequence[float]]
    ) -> Iterator[TrialPlan]:
        longest = self._longest * budget
        if longest < self.least_budget:
            longest = budget
        for arm in self.arms:
            most = min(
                (longest - self.judging_seconds) / self._each(arm),
                self.epochs * self.samples,
            )
            for times in _SHORTER if self.target is None else _SHORTER_TO_TARGET:
                samples = int(most / times) // arm.batch * arm.batch
                if samples >= _least_samples(arm):
                    seconds = self._seconds(arm, samples)
                    for offset in offsets[arm.optimizer]:
                        yield TrialPlan(arm, samples, seconds, offset)

    def _seconds(self, arm: Arm, samples: int) -> float:
        return samples * self._each(arm) + self.judging_seconds

    def _each(self, arm: Arm) -> float:
        """Seconds of training for each sample on this machine."""
        return arm.slowness * arm.epoch_seconds / self.samples

    @property
    def _longest(self) -> float:
        """Seconds of the longest trial, as a share of the budget."""
        return _LONGEST if self.target is None else _LONGEST_TO_TARGET


def _least_samples(arm: Arm) -> int:
    return max(MIN_SAMPLES, MIN_STEPS * arm.batch)


def _expected_above(mean: float, error: float, threshold: float) -> float:
    """Expected excess of a normal variable over a threshold."""
    if error <= 0:
        return max(0.0, mean - threshold)
    z = (mean - threshold) / error
    density = exp(-(z**2) / 2) / sqrt(2 * pi)
    return error * (density + z * (1 + erf(z / sqrt(2))) / 2)
