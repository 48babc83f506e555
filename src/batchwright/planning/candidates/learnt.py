"""Predicts how the planned training learns: its accuracy, and which optimizer learns more.

The learning curve is fitted to trials and runs of the task. Without any, it rests on trainings of
other tasks alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING

from batchwright.algorithms.learning_rate import rate_factor, scaled_rate
from batchwright.planning.candidates.optimizer import Compared, optimizers_of, optimizers_to_try
from batchwright.planning.resolution import sides
from batchwright.prediction.accuracy.loss_link import LossLink, fit_loss
from batchwright.prediction.accuracy.trainings import MIN_STEPS, Candidate, Observed, of_trials
from batchwright.records import (
    DataFacts,
    Estimate,
    FirstAnswers,
    Job,
    LearningRateRule,
    NetworkFacts,
    OptimizerName,
    Profile,
    Trial,
)
from batchwright.records.registries.optimizers import AUTO, OPTIMIZERS, SGD, UNSEEN, Normal
from batchwright.records.text.formatting import sentence

if TYPE_CHECKING:
    from batchwright.prediction.accuracy.learning import LearningModel

MAX_EPOCHS = 1000
"""Most epochs of a plan that lists accuracy epoch by epoch: longer lists would fill the memory."""


@dataclass(frozen=True)
class LearningCurve:
    """The learning curve, fitted to trials and to runs that trained as trials do."""

    model: LearningModel  # the fitted curve
    optimizers: tuple[OptimizerName, ...]  # optimizers that the job may get
    train_samples: int  # samples of an epoch
    held_out: int  # held-out images that accuracy is counted on
    longest: int = 0  # samples of the longest trial; 0 without trials
    runs: int = 0  # number of runs that it was fitted to, besides trials
    note: str = ""  # why there are no more trials, in a sentence; empty where there was no need
    steps: int = MIN_STEPS  # fewest steps of a training that it predicts
    _known: dict[tuple[OptimizerName, int, float], Estimate] = field(
        default_factory=dict, repr=False
    )

    @property
    def observed(self) -> bool:
        """Whether trials or runs of the task were; else all rests on other tasks' trainings."""
        return bool(self.model.observed)

    @property
    def by(self) -> str:
        """What it rests on besides other tasks, in words; empty if nothing."""
        trials = ["the trials"] if self.longest else []
        return " and ".join([*trials, "the runs given"] if self.runs else trials)

    def predicts(self, batch: int, epochs: float) -> bool:
        """Whether a training has enough steps to be predicted."""
        return epochs >= self.predictable_from(batch)

    def predictable_from(self, batch: int) -> float:
        """Fewest epochs with which a training has enough steps to be predicted."""
        return self.steps * batch / self.train_samples

    def accuracy(self, optimizer: OptimizerName, batch: int, epochs: float) -> Estimate | None:
        """Held-out accuracy at the end of a training, a share; `None` if it has too few steps.

        The interval includes the chance in counting on `held_out` images, as that of the last epoch
        of `by_epoch`.
        """
        if not self.predicts(batch, epochs):
            return None
        key = optimizer, batch, epochs
        if key not in self._known:
            self._known[key] = self.model.evaluated(
                self.candidate(*key), Normal(0.0, 0.0), self.held_out
            )
        return self._known[key]

    def by_epoch(
        self,
        optimizer: OptimizerName,
        batch: int,
        epochs: int,
        rule: LearningRateRule,
        *,
        averaged: bool = False,
    ) -> tuple[Estimate | None, ...]:
        """Held-out accuracy after each epoch of a training, a share.

        Args:
            optimizer: The optimizer.
            batch: Global batch, in samples.
            epochs: Epochs of the training.
            rule: The learning rate.
            averaged: Whether an average of the weights is evaluated.

        Returns:
            One entry for each epoch, `None` for epochs after too few steps; empty for more than
            `MAX_EPOCHS` epochs.
        """
        if epochs > MAX_EPOCHS:
            return ()
        from batchwright.prediction.accuracy.learning import falls_short

        factors = [
            rate_factor(
                epoch * self.train_samples,
                rule=rule,
                samples_per_epoch=self.train_samples,
                epochs=epochs,
            )
            for epoch in range(1, epochs + 1)
        ]
        return tuple(
            self.model.evaluated(
                self.candidate(optimizer, batch, epoch),
                falls_short(factor, factors[-1], averaged=averaged),
                self.held_out,
            )
            if self.predicts(batch, epoch)
            else None
            for epoch, factor in enumerate(factors, 1)
        )

    def epochs_to(self, optimizer: OptimizerName, batch: int, accuracy: float) -> Estimate | None:
        """Epochs of the shortest training that reaches an accuracy; `None` if guessing does."""
        found = self.model.samples_to(optimizer, batch, accuracy)
        return None if found is None else found.mapped(lambda one: one / self.train_samples)

    def needed(
        self, optimizer: OptimizerName, batch: int, accuracy: float, confidence: float, most: int
    ) -> int | None:
        """Fewest whole epochs that reach an accuracy with a probability; `None` if above ``most``.

        The accuracy reached with that probability rises with the epochs or, as its error grows with
        them, rises and then falls. So the fewest epochs lie below the first power of two that
        reaches it.
        """

        def reached(epochs: int) -> bool:
            training = self.candidate(optimizer, batch, epochs)
            sure = self.model.reached_with(training, confidence) >= accuracy
            return sure and self.predicts(batch, epochs)

        doublings = (min(2**power, most) for power in range(most.bit_length() + 1))
        longest = next(filter(reached, doublings), None)
        if longest is None:
            return None
        return 1 + bisect_left(range(1, longest), True, key=reached)

    def candidate(self, optimizer: OptimizerName, batch: int, epochs: float) -> Candidate:
        """A training at the best known rate, as an input of the curve."""
        offset = self.model.offset(optimizer, batch)
        return Candidate(optimizer, batch, epochs * self.train_samples, offset)

    def rate_scale(self, optimizer: OptimizerName, batch: int) -> float:
        """The best known rate over the usual one; 1 if no trial had another rate."""
        return exp(self.model.offset(optimizer, batch))

    def compared(
        self, job: Job, longer: Callable[[int], float] | None = None
    ) -> tuple[Compared, ...]:
        """Accuracies that a training would reach with SGD and with Muon, in the same time.

        A training has the job's epochs or, if the plan chooses them, the fewest that reach the
        target with either optimizer; and no fewer than the curve predicts. Medians are compared:
        where nothing was observed, means would also differ by the widths of the distributions.

        Args:
            job: Resolved.
            longer: batch -> seconds of a step with Muon over those with SGD; unset: 1.

        Returns:
            One entry for each power of two up to the training samples; empty where the job leaves
            no choice of the optimizer.
        """
        if len(self.optimizers) < 2:
            return ()
        found = []
        for batch in (2**power for power in range(self.train_samples.bit_length())):
            length, fewest = self._length(batch, job), self.predictable_from(batch)
            epochs, steps = max(length, fewest), self.steps if length < fewest else 0
            times = longer(batch) if longer else 1.0
            sgd, muon = (
                self.candidate(name, batch, epochs * (times if name == SGD.name else 1.0))
                for name in AUTO
            )
            apart, error = self.model.difference(muon, sgd)
            usual = self.model.reached_with(sgd, 0.5)
            found.append(Compared(batch, usual, usual + apart, error, 0, self.by, times, steps))
        return tuple(found)

    def _length(self, batch: int, job: Job) -> int:
        """Epochs of the training: the job's, or the fewest that reach its target."""
        goal = job.goal
        if goal.target is None:
            return job.epochs
        needed = [
            self.needed(name, batch, goal.target, goal.confidence, job.epochs)
            for name in self.optimizers
        ]
        return min((one for one in needed if one is not None), default=job.epochs)


def learnt_of(
    profiles: Sequence[Profile], job: Job, runs: Sequence[tuple[Job, Observed]] = ()
) -> LearningCurve | None:
    """The learning curve for a job, fitted to the profiles' trials and to runs of the task.

    Only trials at the job's highest resolution count, with its rule of rates, clipping, labels and
    sampling, and at its own rate where it gives one. Trials with another optimizer count: the curve
    ties the optimizers of a task to each other.

    Args:
        profiles: What was measured.
        job: Resolved.
        runs: Runs as observations, each with its job.

    Returns:
        The curve. Without any observation it rests on other tasks. `None` if other tasks do not
        predict this one either (see `_expects`), or if the job scales rate or gradients by gradient
        noise.
    """
    if not teaches(job):
        return None
    profile = profiles[0]
    names = optimizers_to_try(job, profile.updates)
    trials = _trials_like(profiles, job)
    # Equal trials count once; on another machine a loss may have other last digits.
    observed = [*dict.fromkeys(one._replace(loss=None) for one in of_trials(trials))]
    if job.learning_rate != "auto":
        observed = [one for one in observed if not one.offset]
    whole = [
        one
        for trained, one in runs
        if one.optimizer in names and _alike(trained, job, _MEASURED_KEYS)
    ]
    known = observed or whole or _at_usual_rates(job)
    if not known or not (observed or _expects(job, profile.data, _first_answers(profiles))):
        return None
    longest = max((one.samples for one in trials), default=0) if observed else 0
    note = _note(profiles) if observed else why_unknown(profiles, job)
    if not (observed or whole) and job.augmentation not in _USUAL_AUGMENTATION:
        note += (
            " The prediction does not count what "
            f"augment={job.augmentation} does to accuracy: trainings of other tasks shifted their "
            "images, and flipped photographs."
        )
    usual_rate = bounded_rate(job, profile.network)
    return LearningCurve(
        model=_curve([*observed, *whole], profile.data, names, usual_rate),
        optimizers=names,
        train_samples=profile.data.train_samples,
        held_out=profile.data.val_samples,
        longest=longest,
        runs=len(whole),
        note=note,
        # A run with fewer steps than any trial has extends the predictions to so few steps.
        steps=min([MIN_STEPS, *(max(1, int(one.samples // one.batch)) for one in whole)]),
    )


def loss_links_of(
    profiles: Sequence[Profile], job: Job, runs: Sequence[tuple[Job, Observed]] = ()
) -> dict[str, LossLink] | None:
    """Lines from accuracy to held-out loss, through the trials and the runs of `learnt_of`.

    Each optimizer has its own, unless it has too few: at equal accuracy losses differ between
    optimizers, as early trainings with one are surer of their answers than with another. Trials
    measure the loss that they train with, evaluations plain cross entropy, so where these differ
    only runs count. `None` if no training would count, as the job does not train as trials do.
    """
    if not teaches(job):
        return None
    marks = [one for trained, one in runs if _alike(trained, job, _MEASURED_KEYS)]
    if job.loss == "cross_entropy" and not job.label_smoothing:
        marks += of_trials(_trials_like(profiles, job))
    # Equal trainings count once, or the line would seem surer; see `learnt_of`.
    each_once = {one._replace(loss=None): one for one in marks}.values()
    data = profiles[0].data
    links = {
        name: fit_loss(
            [one for one in each_once if one.optimizer == name],
            classes=data.even_classes,
            held_out=data.val_samples,
        )
        for name in {one.optimizer for one in each_once}
    }
    return {name: link for name, link in links.items() if link is not None}


def _trials_like(profiles: Sequence[Profile], job: Job) -> list[Trial]:
    """The trials at the job's highest resolution that trained as it does."""
    return [
        one
        for measured in profiles
        for one in measured.trials
        if one.resolution == max(sides(job)) and _alike(measured.job, job)
    ]


def expected_of(job: Job, data: DataFacts) -> LearningCurve | None:
    """The learning curve for a job without a profile: by other tasks; `None` if these differ."""
    if not (teaches(job) and _expects(job, data) and _at_usual_rates(job)):
        return None
    names = optimizers_to_try(job, ())
    return LearningCurve(_curve([], data, names), names, data.train_samples, data.val_samples)


def _curve(
    observed: Sequence[Observed],
    data: DataFacts,
    optimizers: tuple[OptimizerName, ...],
    usual_rate: Callable[[int], float] | None = None,
) -> LearningModel:
    # The import loads NumPy, which a plan by time alone does not need.
    from batchwright.prediction.accuracy.learning import fit_learning

    return fit_learning(
        observed, classes=data.even_classes, optimizers=optimizers, usual_rate=usual_rate
    )


def bounded_rate(job: Job, network: NetworkFacts) -> Callable[[int], float] | None:
    """The usual rate against the batch, up to a factor, for networks without batch normalization.

    In these, a rate above the highest one that was seen to learn is not safe: rates that suit short
    trainings ended longer ones with a larger batch, whose usual rate is higher (docs/log.md).
    `None` for other networks.
    """
    if network.batch_norm:
        return None
    return lambda batch: scaled_rate(1.0, job.base_batch, batch, job.rate_scaling)


def _expects(job: Job, data: DataFacts, first: FirstAnswers | None = None) -> bool:
    """Whether trainings of other tasks predict a job.

    Those trainings are judged by accuracy, began with random weights, and had optimizers that the
    curve knows.
    """
    learnt_before = job.weights or job.frozen or job.network_args.get("pretrained")
    seen = all(OPTIMIZERS[name].learning != UNSEEN for name in optimizers_of(job))
    judged = len(data.classes) > 1 and (first is None or first.images > 0)
    return judged and seen and not (learnt_before or (first is not None and first.knowing))


def _first_answers(profiles: Sequence[Profile]) -> FirstAnswers | None:
    return next((one.first_answers for one in profiles if one.first_answers), None)


def _at_usual_rates(job: Job) -> bool:
    """Whether a job's rates are those that other tasks were trained at."""
    usual = type(job)()
    given = job.learning_rate != usual.learning_rate or job.base_batch != usual.base_batch
    given = given or job.body_rate != usual.body_rate
    return not given and job.scaling in ("auto", "sqrt")  # `auto` becomes `sqrt`


def why_unknown(profiles: Sequence[Profile], job: Job, learnt: LearningCurve | None = None) -> str:
    """Why the accuracy of a job is not predicted, and what would allow it, in sentences.

    Args:
        profiles: What was measured.
        job: Resolved.
        learnt: The learning curve, if there is one: then the reason is too few steps.
    """
    if learnt is not None:
        by = (learnt.by.removeprefix("the ") or "trainings of other tasks").capitalize()
        return f"{by} tell nothing of trainings with fewer than {learnt.steps} steps."
    if not teaches(job):
        return f"Trials do not train {untaught(job)}, so they do not tell its accuracy."
    if any(one.trials for one in profiles):
        return "The probe's trials had another rate, resolution, loss or sampling."
    first = _first_answers(profiles)
    if any(one.without_accuracy for one in profiles):
        return sentence(NO_ACCURACY)
    why = _note(profiles) or "The probe had no trials: probe.learning gives it time for them."
    if first is not None and first.knowing:
        why += (
            f" Before any training the network answers {first.right} of {first.images} held-out "
            "images right: it has learnt before, and other tasks' trainings tell nothing of that."
        )
    return why


def _note(profiles: Sequence[Profile]) -> str:
    if any(one.trials_open for one in profiles):
        return "The probe was stopped during its trials: probe again as before to go on with them."
    return sentence(next((one.trials_note for one in profiles if one.trials_note), ""))


ACCURACY_TAKES = (
    "two classes or more, a number for each of them from the network, and one of them as label of "
    "each image"
)
NO_ACCURACY = f"there are no trials, as they go by accuracy, which takes {ACCURACY_TAKES}"


def teaches(job: Job) -> bool:
    """Whether a job trains as trials do: the same steps, nothing scaled by gradient noise."""
    factors = job.ags.factors != "off" or job.rate_scaling == "gain"
    return job.method_spec.same_steps and not factors


def untaught(job: Job) -> str:
    """What the job does and no trial does, in words that follow "do not train"."""
    if job.method_spec.same_steps:
        return "with rates or gradients scaled by gradient noise"
    return f"as method={job.method} does"


def _alike(measured: Job, planned: Job, keys: Sequence[str] = ()) -> bool:
    """Whether two jobs train alike: they agree in `TRAINED_KEYS` and in further ``keys``."""
    return all(getattr(measured, key) == getattr(planned, key) for key in (*TRAINED_KEYS, *keys))


_USUAL_AUGMENTATION = ("crop", "crop-flip")
"""What other tasks' trainings did to their images."""
TRAINED_KEYS = (
    *("learning_rate", "base_batch", "scaling", "decay", "warmup_epochs", "warmup_start"),
    *("warmup_law", "clip_norm", "label_smoothing", "sampling"),
)
"""Keys that may change after measuring, although the trials were trained with them."""
_MEASURED_KEYS = (
    *("augment", "batch_norm", "betas", "body_rate", "crop_scale", "dropout", "eps", "frozen"),
    *("loss", "momentum", "nesterov", "normalize", "rotation", "weight_decay", "weights", "zoom"),
)
"""Keys that the profile fixes; runs may differ from it in them."""
