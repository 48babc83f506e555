"""Progress against the batch: epochs to a target and accuracy, by runs, trials and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf, log
from statistics import NormalDist

from batchwright.algorithms.batch_size import as_compared
from batchwright.planning.candidates.learnt import LearningCurve
from batchwright.planning.chosen import Chosen
from batchwright.prediction.accuracy.loss_link import MAX_FACTOR, MIN_MARKS, LossLink
from batchwright.prediction.accuracy.quality import EPOCHS_NOTE, ProgressModel, product
from batchwright.records import Estimate, Job, LearningRateRule, OptimizerName, Reason, Source
from batchwright.records.text.formatting import (
    between,
    counted,
    number,
    percent,
    sentence,
    shares_between,
)

FAR = 10
"""Largest number of epochs that is predicted, over the job's: the curve may not hold further."""


def fewest_epochs(job: Job) -> int:
    """Fewest whole epochs of a training: it is no shorter than its warm-up."""
    return 1 if job.warmup_epochs == "auto" else max(1, ceil(job.warmup_epochs))


@dataclass(frozen=True)
class Progress:
    """Progress of a training against its batch; the figures of each batch are computed once."""

    models: Mapping[OptimizerName, ProgressModel]  # fitted progress model of each optimizer
    optimizer: Callable[[int], OptimizerName]  # batch -> its optimizer
    base_batch: int  # global batch whose progress per sample counts as 1
    planned: int  # epochs of the training; where the plan chooses them, the most
    target: float | None = None  # held-out accuracy to reach, a share; `None` if none is given
    confidence: float = 0.8  # probability with which the chosen epochs are to reach the target
    # Fewest epochs that may be chosen; `None` where the plan does not choose them.
    least: int | None = None
    # The learning curve, fitted to trials or resting on other tasks; `None`: none.
    learnt: LearningCurve | None = None
    # Held-out loss by accuracy with each optimizer that it is known for; `None`: no training of a
    # job like this one would tell it.
    loss_links: Mapping[str, LossLink] | None = None
    guessing: float = 0.0  # accuracy of guessing, a share
    smallest: int = 1  # smallest global batch of a candidate, in samples
    judged: bool = True  # whether the network's answers have an accuracy, as far as is known
    unknown: str = ""  # why accuracy is not predicted, and what decides instead, in sentences
    _needed: dict[tuple[int, int], int | None] = field(default_factory=dict, repr=False)
    _epochs: dict[int, Estimate | None] = field(default_factory=dict, repr=False)
    _to_target: dict[int, Estimate | None] = field(default_factory=dict, repr=False)
    _reached: dict[tuple[int, int], Estimate | None] = field(default_factory=dict, repr=False)

    def model(self, batch: int) -> ProgressModel:
        """The progress model of a batch's optimizer."""
        return self.models[self.optimizer(batch)]

    def efficiency(self, batch: int) -> Estimate | None:
        """Progress per sample over that with the base batch, each at its planned rate.

        It is the ratio of the epochs to the target, where these are known; `None` if not known.
        """
        own, base = self.to_target(batch), self.relative_epochs(self.base_batch)
        if own is None or base is None or base == inf:
            return None
        return Estimate(value=base / own.value, low=base / own.high, high=base / own.low)

    def to_target(self, batch: int) -> Estimate | None:
        """Epochs to the target or, where these are not known, over those with the base batch.

        `None` if not known either, if only runs with another optimizer reached the target, and if
        runs with such a batch missed it.
        """
        if batch not in self._to_target:
            epochs = self.epochs(batch)
            if epochs is None and not self._misses(batch):
                by_curve = self._by_curve(batch, self.base_batch)
                epochs = by_curve or self.model(batch).relative_epochs(batch)
            self._to_target[batch] = epochs
        return self._to_target[batch]

    def _by_curve(self, batch: int, other: int) -> Estimate | None:
        """Epochs with a batch over those with another to the same accuracy, by the curve."""
        if self.learnt is None or self._misses(batch) or self._misses(other):
            return None
        one, another = ((self.optimizer(size), size) for size in (batch, other))
        model = self.learnt.model
        accuracy = model.accuracy(self.learnt.candidate(*another, self.planned)).value
        at_target = self.target and model.samples_compared(one, another, self.target)
        return at_target or model.samples_compared(one, another, accuracy)

    def _misses(self, batch: int) -> bool:
        """Whether runs decide about a batch: some reached the target, or its own missed it."""
        return self._runs_tell or self.model(batch).misses_target(batch)

    @property
    def _runs_tell(self) -> bool:
        """Whether some run reached the target."""
        return any(model.tells_epochs for model in self.models.values())

    def epochs(self, batch: int) -> Estimate | None:
        """Epochs to the target accuracy; `None` if not known."""
        if batch not in self._epochs:
            found = self.model(batch).epochs(batch)
            curve = self.trials(batch)
            if found is None and curve is not None and self.target is not None:
                found = curve.epochs_to(self.optimizer(batch), batch, self.target)
            self._epochs[batch] = found
        return self._epochs[batch]

    @property
    def guessed(self) -> bool:
        """Whether guessing reaches the target, so that any training does."""
        return self.target is not None and self.target <= self.guessing

    def predicted_epochs(self, batch: int) -> Estimate | None:
        """`epochs`, but no fewer than the learning curve predicts anything of."""
        found, trials = self.epochs(batch), self.trials(batch)
        if found is None or trials is None:
            return found
        first = trials.predictable_from(batch)
        return found.mapped(lambda epochs: max(first, epochs))

    @property
    def chooses(self) -> bool:
        """Whether the plan chooses the epochs, and can predict how many the target takes."""
        known = self.learnt is not None or self._runs_tell
        return self.least is not None and self.target is not None and known

    def needed(self, batch: int, most: int | None = None) -> int | None:
        """Fewest whole epochs that reach the target with the probability `confidence`.

        `None` if that takes more than ``most`` epochs (unset: those planned), and where the plan
        does not choose the epochs.
        """
        if not self.chooses:
            return None
        if self.guessed:
            return self.least
        most = most or self.planned
        if (batch, most) not in self._needed:
            trials, found = self.trials(batch), None
            if trials is not None and self.target is not None:
                aim = self.optimizer(batch), batch, self.target, self.confidence
                found = trials.needed(*aim, most)
            elif (epochs := self.epochs(batch)) is not None:
                # The interval is of 95 %, and normal in the logarithm.
                part = NormalDist().inv_cdf(self.confidence) / NormalDist().inv_cdf(0.975)
                sure = epochs.value * (epochs.high / epochs.value) ** part
                found = ceil(sure) if sure <= most else None
            self._needed[batch, most] = found and max(found, self.least or 1)
        return self._needed[batch, most]

    def chance(self, batch: int, most: int | None = None) -> float:
        """Probability that ``most`` epochs (unset: those planned) reach the target.

        0 where it is not known, and 1 where guessing reaches the target.
        """
        if self.target is None:
            return 0.0
        if self.guessed:
            return 1.0
        most = most or self.planned
        if (trials := self.trials(batch)) is not None:
            if not trials.predicts(batch, most):
                return 0.0
            training = trials.candidate(self.optimizer(batch), batch, most)
            return trials.model.probability(training, self.target)
        epochs = self.epochs(batch)
        if epochs is None:
            return 0.0
        if epochs.high <= epochs.value:
            return float(epochs.value <= most)
        # The interval is of 95 %, and normal in the logarithm.
        error = log(epochs.high / epochs.value) / NormalDist().inv_cdf(0.975)
        return NormalDist().cdf(log(most / epochs.value) / error)

    def fewest(self, batch: int) -> int:
        """Fewest epochs that may be chosen and whose accuracy is predicted."""
        predictable = 1 if self.curve is None else ceil(self.curve.predictable_from(batch))
        return max(predictable, self.least or 1)

    def too_short(self, batch: int, epochs: int) -> bool:
        """Whether a training has too few steps for the learning curve to predict it."""
        trials = self.trials(batch)
        return trials is not None and not trials.predicts(batch, epochs)

    def trained(self, batch: int) -> int:
        """Epochs for which a candidate with this batch is trained."""
        return self.needed(batch) or self.planned

    def trials(self, batch: int) -> LearningCurve | None:
        """The learning curve for a batch; `None` where runs decide, which are more certain."""
        return None if self._misses(batch) else self.learnt

    def accuracy(self, batch: int, epochs: float) -> Estimate | None:
        """Held-out accuracy after ``epochs`` epochs, a share; `None` if not known."""
        if self.curve is not None:
            return self.curve.accuracy(self.optimizer(batch), batch, epochs)
        return self.model(batch).accuracy(batch, epochs)

    @property
    def curve(self) -> LearningCurve | None:
        """The learning curve, by which accuracy is predicted; `None` if runs reached the target.

        The curve also rests on runs, and on how optimizers and batches differ.
        """
        return None if self._runs_tell else self.learnt

    @property
    def predictable_steps(self) -> int:
        """Fewest steps of a training whose accuracy is predicted."""
        return 1 if self.curve is None else self.curve.steps

    @property
    def by_runs(self) -> bool:
        """Whether runs of the task were given."""
        return any(model.by_runs for model in self.models.values())

    @property
    def assumed(self) -> bool:
        """Whether predictions of accuracy rest on other tasks alone: nothing was observed."""
        return self.curve is not None and not self.curve.observed

    def reached(self, batch: int, epochs: int | None = None) -> Estimate | None:
        """Held-out accuracy at the end of a training, a share; `None` if not known.

        ``epochs``: Epochs of the training; unset: those for which the batch is trained.
        """
        key = batch, epochs or self.trained(batch)
        if key not in self._reached:
            self._reached[key] = self.accuracy(*key)
        return self._reached[key]

    def end_loss(self, batch: int) -> Estimate | None:
        """Held-out loss at the accuracy that a batch reaches; `None` if not known."""
        accuracy, link = self.reached(batch), self.loss_link(batch)
        if link is None or accuracy is None or self.assumed:
            return None
        return link.at(accuracy)

    def loss_link(self, batch: int) -> LossLink | None:
        """Held-out loss by accuracy with the optimizer of a batch; `None` if not known."""
        return (self.loss_links or {}).get(self.optimizer(batch))

    def within(self, epochs: int) -> Progress:
        """The progress of a training of ``epochs`` epochs at most."""
        return replace(self, planned=epochs, _needed={}, _epochs={}, _to_target={}, _reached={})

    def by_epoch(
        self,
        batch: int,
        epochs: int,
        rule: LearningRateRule,
        *,
        averaged: bool = False,
    ) -> tuple[Estimate | None, ...]:
        """Held-out accuracy after each epoch, by the learning curve; empty without it.

        Arguments and entries are those of `LearningCurve.by_epoch`; ``epochs`` are the schedule's.
        """
        if self.curve is None:
            return ()
        optimizer = self.optimizer(batch)
        return self.curve.by_epoch(optimizer, batch, epochs, rule, averaged=averaged)

    def accuracy_until(self, batch: int, epochs: float) -> float | None:
        """Epochs that the runs covered, if fewer than ``epochs``; else, or with a curve, `None`."""
        return None if self.curve is not None else self.model(batch).accuracy_until(batch, epochs)

    def compared_epochs(self, batch: int, other: int) -> Estimate | None:
        """Epochs to the target with a batch over those with another; `None` if not known."""
        by_curve = self._by_curve(batch, other)
        if by_curve is not None:
            return by_curve
        if self.optimizer(batch) == self.optimizer(other):
            return self.model(batch).compared_epochs(batch, other)
        own, others = self.to_target(batch), self.to_target(other)
        if own is None or others is None:
            return None
        low, high = 1 / others.high, 1 / others.low
        return product(own, Estimate(value=1 / others.value, low=low, high=high))

    def relative_epochs(self, batch: int) -> float | None:
        """The value of `to_target`; infinite where runs with such a batch missed the target."""
        epochs = self.to_target(batch)
        if epochs is None:
            return inf if self._misses(batch) else None
        return epochs.value

    def noise(self, batch: int) -> Estimate | None:
        """Gradient noise scale, in samples, by a batch's progress model; `None`: not known."""
        return self.model(batch).noise_scale

    def doubtful_from(self, batch: int) -> float:
        """Batch beyond which a larger one may lose more progress per image than it saves time.

        It is the upper end of the gradient noise scale, at which samples and steps weigh the same
        (McCandlish et al. 2018, section 2.3), and no less than the base batch; infinite where the
        noise scale is not known.
        """
        noise = self.noise(batch)
        return inf if noise is None else max(self.base_batch, noise.high)

    def worthwhile(self, batches: Sequence[int], seconds: Callable[[int], float]) -> int:
        """The batch with the least time to equal progress, no smaller than `doubtful_from` allows.

        Args:
            batches: Batches, rising. Those up to `doubtful_from` count as worth their time; the
                largest of them and all larger ones are compared.
            seconds: batch -> seconds for some fixed number of samples.
        """
        sure = [batch for batch in batches if batch <= self.doubtful_from(batch)]
        return min(
            batches[max(0, len(sure) - 1) :],
            key=lambda batch: as_compared(seconds(batch) * (self.relative_epochs(batch) or 1.0)),
        )

    def why_no_larger(self, batch: int, larger: int, seconds: float) -> str:
        """Why `worthwhile` takes no larger batch, in a sentence.

        Args:
            batch: The batch that it takes.
            larger: The next larger batch.
            seconds: Seconds of an epoch with the larger batch over those with ``batch``.
        """
        own, others = self.relative_epochs(batch), self.relative_epochs(larger)
        longer = (others or 1.0) * seconds / (own or 1.0) - 1
        end = self.doubtful_from(batch)
        what = "the upper end of the gradient noise scale"
        if end == self.base_batch:
            what = f"base_batch, and {what}"
        return (
            f"Larger batches save time, but beyond {number(end)} samples, {what}, their images are "
            f"worth less: with {larger} as much progress would take {percent(longer, 0)} more time "
            f"than with {batch}."
        )

    @property
    def compares(self) -> bool:
        """Whether it is known how progress depends on the batch."""
        return self.relative_epochs(2 * self.base_batch) is not None

    @property
    def tells_accuracy(self) -> bool:
        """Whether accuracy is predicted for several batches; with the curve, for the smallest."""
        if self.curve is not None:  # larger batches may have too few steps; these are not preferred
            return self.reached(self.smallest) is not None
        base = self.base_batch
        return None not in (self.reached(base), self.reached(2 * base))

    def how_sure(self, batch: int) -> str:
        """The probability with which the planned epochs reach the target, in words."""
        asked = f"{self.confidence:g} (goal.confidence)"
        if self.guessed:
            return "the fewest that may be trained, as guessing reaches it"
        if self.needed(batch) is not None:
            return f"the fewest that reach it with probability {asked}"
        most = "the most that may be trained"
        if self.too_short(batch, self.planned):
            return (
                f"{most}: accuracy is not predicted for fewer than {self.predictable_steps} steps"
            )
        chance = floor(100 * self.chance(batch)) / 100  # rounded up it might equal the confidence
        known = f"{chance:g}" if chance else "below 0.01"
        return f"{most}: they reach it with probability {known}, not {asked}"


def progress_reasons(progress: Progress, batch: int, in_training: str) -> tuple[Reason, ...]:
    """Reasons on progress per sample, on epochs to the target, on accuracy and on held-out loss.

    Args:
        progress: What a batch means for progress.
        batch: Global batch, in samples.
        in_training: A sentence to add on the noise scale; may be empty.
    """
    found = [_noise_scale(progress, batch, in_training).reason("gradient noise scale")]
    epochs = progress.predicted_epochs(batch)
    if epochs is not None:
        found.append(_epochs(progress, batch, epochs).reason("epochs to target"))
    found.append(_accuracy(progress, batch).reason("accuracy"))
    told = progress.loss_links is not None and not progress.assumed
    if told and progress.reached(batch) is not None:
        found.append(_loss(progress, batch).reason("held-out loss"))
    return tuple(found)


def _noise_scale(progress: Progress, batch: int, in_training: str) -> Chosen[str]:
    model = progress.model(batch)
    scale = model.noise_scale
    by_trials = progress.trials(batch) is not None and progress.epochs(batch) is not None
    kept = [one for one in model.notes if not (by_trials and one.startswith(EPOCHS_NOTE))]
    notes = f"{' '.join(map(sentence, kept))} {in_training}".strip()
    if scale is None:
        if not progress.compares:  # neither trials nor the rule for the rate tell it
            notes = f"{notes} The worth of a larger batch is not predicted."
        return Chosen("not known", notes, "assumed")
    share = 1 / (1 + batch / scale.value)
    made = f"a sample makes about {percent(share, 0)} of the progress that it makes at tiny batches"
    if batch > 2 * scale.value:
        why = f"The batch is well above it: {made}, and still less in a larger batch."
    elif batch > scale.value / 2:
        why = f"The batch is about as large: {made}."
    else:
        why = f"The batch is well below it, so little progress per sample is lost: {made}."
    efficiency = progress.efficiency(batch)
    if efficiency is not None:
        expected = f", {_EXPECTED}," if progress.assumed else ""
        why += (
            f" At the planned rate{expected} that is {percent(efficiency.value, 0)} of what a "
            f"sample makes in a batch of {progress.base_batch} (base_batch)."
        )
    value = f"{number(scale.value)} samples ({number(scale.low)} to {number(scale.high)})"
    return Chosen(value, f"{why} {notes}".rstrip(), "measured")


_EXPECTED = "as other tasks' trainings lead to expect"
_ONE_RUN = "The interval is for a run of one seed, counted on the held-out images."


def _epochs(progress: Progress, batch: int, epochs: Estimate) -> Chosen[str]:
    most, trained = FAR * progress.planned, progress.trained(batch)
    whence = "from the runs given"
    if (curve := progress.trials(batch)) is not None:
        whence = f"as {curve.by} tell" if curve.observed else _EXPECTED
    why = f"To goal.accuracy={progress.target:g}, {whence}."
    if progress.chooses:
        of = "" if progress.needed(batch) is None else f" of epochs={progress.planned} at most"
        why += (
            f" The plan counts on {counted(trained, 'epoch')}{of}, {progress.how_sure(batch)}; "
            "training ends with the first evaluation that reaches it."
        )
    elif epochs.value > trained and whence != _EXPECTED:
        enough = f"give epochs={ceil(epochs.value)}" if epochs.value <= most else "far too few"
        why += f" The job trains only {trained}: {enough}."

    def shown(count: float) -> str:
        if count > most:
            return f"more than {most}"
        return "less than 1" if count < 1 else f"{count:.3g}"

    value = shown(epochs.value)
    if whence == _EXPECTED:  # tasks differ from less than one epoch to more than anybody trains
        value = f"{trained} planned" if progress.chooses else "not known"
    elif epochs.value <= most:
        value += f" ({shown(epochs.low)} to {shown(epochs.high)})"
    return Chosen(value, why, "assumed" if whence == _EXPECTED else "predicted")


def _accuracy(progress: Progress, batch: int) -> Chosen[str]:
    accuracy, trained = progress.reached(batch), progress.trained(batch)
    if accuracy is None:
        why = (
            f"{progress.unknown} Finished runs of this task would tell, also those of a loop of "
            "your own: `batchwright plan --run RUN`."
        )
        return Chosen("not known", why, "assumed")
    why, curve = f"Held out, after {counted(trained, 'epoch')}", progress.curve
    source: Source = "predicted"
    if curve is None:
        why += f", by the runs given at equal progress. {_ONE_RUN}"
    elif progress.assumed:
        source = "assumed"
        why += f", {_EXPECTED}: no trial of this training was measured. {_ONE_RUN} {curve.note}"
    else:
        trials = counted(len(curve.model.observed) - curve.runs, "trial")
        up_to = f"{trials}, short trainings of up to {curve.longest:,} images"
        seen = [up_to] * bool(curve.longest)
        seen += [f"{counted(curve.runs, 'run')} given"] * bool(curve.runs)
        why = (
            f"{why}: {' and '.join(seen)}, continued by the learning curve and by what other "
            f"tasks showed. {_ONE_RUN} {curve.note}"
        ).rstrip()
    until = progress.accuracy_until(batch, trained)
    if until is not None:
        why += (
            f" These runs ended after as much as {until:.3g} epochs here. The accuracy is the one "
            "that they reached by then: what more epochs add is not known."
        )
    value = shares_between(accuracy)
    return Chosen(value, f"{why}{_other_lengths(progress, batch, trained)}", source)


def _loss(progress: Progress, batch: int) -> Chosen[str]:
    optimizer, link = progress.optimizer(batch), progress.loss_link(batch)
    found = progress.end_loss(batch)
    if link is None or found is None:
        why = (
            f"To predict it takes at least {MIN_MARKS} trials or given runs with "
            f"optimizer={optimizer} and plain cross entropy. Their accuracies must differ and lie "
            "above guessing, and their losses must fall with rising accuracy and tell it within a "
            f"factor of {MAX_FACTOR:g}."
        )
        return Chosen("not known", why, "assumed")
    trainings = counted(link.marks, "training")
    why = (
        "Held-out cross entropy at the predicted accuracy. It is read from a line through the "
        f"logarithms of loss and of the share of wrong answers in {trainings} of this task with "
        f"optimizer={optimizer}. A network that fits the training images too closely ends above it."
    )
    return Chosen(between(found), why, "predicted")


def _other_lengths(progress: Progress, batch: int, trained: int) -> str:
    """What half and twice the epochs are expected to reach, a sentence; empty if not known."""
    if progress.curve is None:
        return ""
    found = [
        f"{percent(one.value)} after {counted(epochs, 'epoch')}"
        for epochs in dict.fromkeys((max(1, trained // 2), 2 * trained))
        if epochs != trained and (one := progress.accuracy(batch, epochs)) is not None
    ]
    return f" By the same prediction it is {' and '.join(found)}." if found else ""
