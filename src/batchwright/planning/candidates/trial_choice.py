"""Which short training comes next: the one that tells most, a second, of what is to be decided.

The decision is the planner's: of the candidates as accurate as the best, the quickest. What it may
lose is, for each other candidate, by how much more accurate that one may be than the chosen one. A
trial is worth what it takes off that doubt, and costs its seconds; where it lies matters, not what
comes of it, so it can be judged before it is made (Chaloner and Verdinelli 1995, Bayesian
experimental design). Another learning rate is another candidate, as quick as the usual one.

It may lose time as well, where a quicker candidate is as accurate as the best after all. A plan
trades no accuracy beyond the tolerance for any time, so nothing has to say what one is worth in
the other: doubts of accuracy are settled first. Then a trial is worth the seconds of training that
a quicker candidate saves, times the probability that the trial shows it to be as accurate, and is
made if that is more than its own seconds.

Where an accuracy is to be reached, the decision is the quickest candidate and how long it is to be
trained. A trial saves time there in two ways: less is trained to be sure, and another candidate may
prove quicker. It is made if that is more than it takes. The first one is made in any case, as
nothing is told of the target without; so it is wherever a plan knows nothing without.
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
MIN_BATCH = 16
"""The law is known from 32 on; statistics of normalization over a few samples are others."""
HELD_OUT = 1000
"""Most images that a trial is judged on."""
HELD_OUT_SHARE = 0.1
"""Most of the training images that are held out for that."""
SETTLED = 0.002
"""Expected loss of accuracy, a share, below which no further trial pays."""

RATE_STEP = log(3)
"""Between rates that are tried: closer ones are hardly told apart."""
MAX_RATE_STEPS = 3
"""Either way from the usual rate."""

_LONGEST = 1 / 3  # of the budget: three trials tell of slope and level, one of neither
_SHORTER = (1, 2, 4)  # a trial may be so many times shorter than the longest
_LONGEST_TO_TARGET, _SHORTER_TO_TARGET = 1.0, (1, 2, 4, 8)  # there each has to pay


class Arm(NamedTuple):
    """An optimizer and a batch that a plan may choose.

    Attributes:
        optimizer: To train with.
        batch: Global batch, in samples.
        workers: That train it quickest.
        micro_batch: Most samples in one forward pass of theirs.
        epoch_seconds: Of training on all images once.
        slowness: What a trial takes here over what is planned; the time planned may be simulated.
    """

    optimizer: OptimizerName
    batch: int
    workers: int
    micro_batch: int
    epoch_seconds: float
    slowness: float = 1.0


class Wanted(NamedTuple):
    """A trial to be made.

    Attributes:
        arm: Its optimizer, batch and workers.
        samples: To train on.
        seconds: It should take.
        offset: Of its rate: as of a `Candidate`.
    """

    arm: Arm
    samples: int
    seconds: float
    offset: float = 0.0

    @property
    def training(self) -> Candidate:
        """The trial as an input of the law of learning."""
        return Candidate(self.arm.optimizer, self.arm.batch, self.samples, self.offset)

    @property
    def rate_scale(self) -> float:
        """Its rate over the usual one."""
        return exp(self.offset)

    def __str__(self) -> str:
        rate = f", {self.rate_scale:.3g} x the usual rate" if self.offset else ""
        return f"{self.arm.optimizer}, batch {self.arm.batch}, {self.samples:,} images{rate}"


class _Aimed(NamedTuple):
    """A candidate's way to the target: what it takes, in logarithms of seconds."""

    aim: Aim
    arm: Arm
    open: bool  # at the rate that a plan would take
    expected: float
    surely: float  # with the probability that is asked for


@dataclass(frozen=True)
class Question:
    """What the trials are to decide.

    Attributes:
        arms: To choose from.
        epochs: Of the planned training.
        samples: Training images.
        classes: Of the data, as many even ones as guessing is right by.
        tolerance: Accuracy that is given up for time, a share.
        judging_seconds: What judging a trial takes.
        rates: Whether the learning rate is open, too.
        target: Accuracy to reach, a share; `None`: what counts is accuracy after all epochs.
        confidence: Probability with which it is to be reached.
        usual_rate: As for `fit_learning`.
        blind: Whether a plan knows nothing of accuracy without trials, though the law expects
            something of other tasks: then one is made in any case.
    """

    arms: tuple[Arm, ...]
    epochs: int
    samples: int
    classes: float
    tolerance: float
    judging_seconds: float
    rates: bool = False
    target: float | None = None
    confidence: float = 0.8
    usual_rate: Callable[[int], float] | None = None
    blind: bool = False

    @property
    def optimizers(self) -> tuple[OptimizerName, ...]:
        """To choose from."""
        return tuple(dict.fromkeys(arm.optimizer for arm in self.arms))

    @property
    def held_out(self) -> int:
        """Images that trials are judged on."""
        return min(HELD_OUT, int(HELD_OUT_SHARE * self.samples))

    @property
    def least_budget(self) -> float:
        """Seconds that do for a trial at some batch; infinite where the training is too short."""
        found = [
            self._seconds(arm, samples) / self._longest
            for arm in self.arms
            if (samples := -(-_least_samples(arm) // arm.batch) * arm.batch)
            <= self.epochs * self.samples
        ]
        return min(found, default=inf)

    def next_trial(
        self, observed: Sequence[Observed], *, budget: float, left: float
    ) -> Wanted | None:
        """The trial to make next; `None` if all is settled or no time is left for one.

        Args:
            observed: What trials have shown so far.
            budget: Seconds for all of them.
            left: Seconds of it that are left.
        """
        if not self.held_out:
            return None
        model = self._model(observed)
        offsets = {name: self.offsets(model, name) for name in self.optimizers}
        made = {one.training for one in observed}  # the same again would end the same
        trials = [
            one
            for one in self._affordable(budget, offsets)
            if one.seconds <= left and one.training not in made
        ]
        # A rate tells little of itself beside none, and nothing of the other optimizer, which would
        # be decided against unseen.
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
            if self.epochs * self.samples >= MIN_STEPS * arm.batch  # or the plan takes none such
            for offset in {model.offset(arm.optimizer, arm.batch), *offsets[arm.optimizer]}
        }
        accuracies = {one: model.accuracy(one).value for one in trainings}
        open_ = [one for one in trainings if one.offset == model.offset(one.optimizer, one.batch)]
        best = max(open_, key=accuracies.__getitem__)
        near = [one for one in open_ if accuracies[one] >= accuracies[best] - self.tolerance]
        chosen = min(near, key=lambda one: trainings[one].epoch_seconds)
        if self.blind and not observed:
            return max(
                trials, key=lambda one: model.would_narrow(one.training, self.held_out, chosen)
            )
        losses = {
            one: _expected_above(*model.apart(one, chosen), self.tolerance)
            for one in trainings
            if one != chosen
        }
        doubted = max(losses, key=losses.__getitem__, default=None)
        if doubted is None or losses[doubted] < SETTLED:
            return self._sooner(model, trials, {one: trainings[one] for one in open_}, best, chosen)
        return max(
            trials,
            key=lambda one: (
                model.would_tell(one.training, self.held_out, chosen, doubted) / one.seconds
            ),
            default=None,
        )

    def _sooner(
        self,
        model: LearningModel,
        trials: Sequence[Wanted],
        trainings: Mapping[Candidate, Arm],
        best: Candidate,
        chosen: Candidate,
    ) -> Wanted | None:
        """The trial that saves most seconds of the chosen training beyond its own, if any."""
        arm = trainings[chosen]
        whole = self.epochs * self.samples * self._each(arm)
        saved = {
            one: whole * (1 - other.epoch_seconds / arm.epoch_seconds)
            for one, other in trainings.items()
            if other.epoch_seconds < arm.epoch_seconds
        }

        def gain(trial: Wanted) -> float:
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
        """Probability that by a trial a candidate is within the tolerance, which it is not yet."""
        apart, error = model.apart(one, best)
        left = 1 - model.would_tell(trial, self.held_out, one, best)
        moved = error * sqrt(1 - left**2)
        return NormalDist().cdf((apart + self.tolerance) / moved) if moved else 0.0

    def _saving_most(
        self,
        model: LearningModel,
        trials: Sequence[Wanted],
        offsets: Mapping[OptimizerName, Sequence[float]],
        target: float,
    ) -> Wanted | None:
        """The trial that saves most seconds of training to the target beyond its own, if any."""
        aims = self._aims(model, offsets, target)
        if not aims:
            return None
        sure = NormalDist().inv_cdf(self.confidence)
        chosen = min((one for one in aims if one.open), key=lambda one: one.surely)
        trained = self._trained(chosen, chosen.surely)

        def saved(trial: Wanted) -> float:
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
        """Seconds for all trials: a share of what the target is likely to take, by what is known.

        That is the geometric mean of what it takes in the middle and of what suffices with
        `confidence`: by the middle alone little is spent where little is known, by the other
        several times what comes to be trained. The first trial may take what it needs, within
        the share of the latter. 0 where guessing reaches the target.
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
    ) -> list[_Aimed]:
        """What each candidate takes to the target; none where guessing reaches it."""
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
                    found.append(_Aimed(aim, arm, offset == best, seconds, surely))
        return found

    def _trained(self, one: _Aimed, log_seconds: float) -> float:
        """Seconds of training that is to take so long: it ends at all epochs by and by."""
        most = self.epochs * self.samples * self._each(one.arm)
        return most / (1 + exp(log(most) - max(self._least(one.arm), log_seconds)))

    def _least(self, arm: Arm) -> float:
        """Logarithm of the seconds of so few steps that a plan takes no fewer."""
        return log(MIN_STEPS * arm.batch * self._each(arm))

    def _moved(self, model: LearningModel, trial: Candidate, one: Aim, other: Aim) -> float:
        """Standard deviation by which a trial moves the ratio of two aims, in logarithms."""
        apart = one.by_parameters - other.by_parameters
        return sqrt(model.told(trial, self.held_out, apart))

    def offsets(self, model: LearningModel, name: OptimizerName) -> list[float]:
        """Rates to weigh: those tried, the usual one, and one beyond an end that is best."""
        if not self.rates:
            return [0.0]
        known = [one for one in model.observed if one.optimizer == name]
        tried = {round(one.offset / RATE_STEP) for one in known} or {0}
        low, high, best = min(tried), max(tried), model.offset(name) / RATE_STEP
        further = {low - 1} if best < low + 0.5 else set[int]()
        further |= {high + 1} if best > high - 0.5 else set()
        most = model.least_failing(name) - RATE_STEP / 2
        return [
            round(step * RATE_STEP, OFFSET_DIGITS)
            for step in sorted(tried | further)
            if abs(step) <= MAX_RATE_STEPS and step * RATE_STEP < most
        ]

    def _affordable(
        self, budget: float, offsets: Mapping[OptimizerName, Sequence[float]]
    ) -> Iterator[Wanted]:
        for arm in self.arms:
            most = min(
                (self._longest * budget - self.judging_seconds) / self._each(arm),
                self.epochs * self.samples,
            )
            for times in _SHORTER if self.target is None else _SHORTER_TO_TARGET:
                samples = int(most / times) // arm.batch * arm.batch
                if samples >= _least_samples(arm):
                    seconds = self._seconds(arm, samples)
                    for offset in offsets[arm.optimizer]:
                        yield Wanted(arm, samples, seconds, offset)

    def _seconds(self, arm: Arm, samples: int) -> float:
        """What a trial takes."""
        return samples * self._each(arm) + self.judging_seconds

    def _each(self, arm: Arm) -> float:
        """Seconds of training for each sample, here."""
        return arm.slowness * arm.epoch_seconds / self.samples

    @property
    def _longest(self) -> float:
        """Longest that one trial may take, as a share of the time for all of them."""
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
