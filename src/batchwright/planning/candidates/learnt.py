"""What is known of how the planned training learns: accuracy, and which optimizer learns more.

By trials and runs of the task; where there are none, by what other tasks' trainings showed.
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
)
from batchwright.records.registries.optimizers import AUTO, OPTIMIZERS, SGD, UNSEEN, Normal

if TYPE_CHECKING:
    from batchwright.prediction.accuracy.learning import LearningModel

MAX_EPOCHS = 1000
"""Beyond so many a plan does not list accuracy epoch by epoch: it would not fit into memory."""


@dataclass(frozen=True)
class Learnt:
    """The law of learning, fitted to trials and to runs that trained as they do, if any.

    Attributes:
        model: The law.
        optimizers: That the job can come to.
        train_samples: Samples of an epoch.
        held_out: Images that its accuracy is counted on.
        longest: Samples of the longest trial; 0 without any.
        runs: How many runs it rests on, beside trials.
        note: Why there are no more trials, in a sentence; empty where there was no need.
        steps: Fewest of a training that it tells anything of.
    """

    model: LearningModel
    optimizers: tuple[OptimizerName, ...]
    train_samples: int
    held_out: int
    longest: int = 0
    runs: int = 0
    note: str = ""
    steps: int = MIN_STEPS
    _known: dict[tuple[OptimizerName, int, float], Estimate] = field(
        default_factory=dict, repr=False
    )

    @property
    def observed(self) -> bool:
        """Whether anything of the task was; else all is expected from other tasks' trainings."""
        return bool(self.model.observed)

    @property
    def by(self) -> str:
        """What it rests on beside other tasks, in words; empty if nothing."""
        told = ["the trials"] if self.longest else []
        return " and ".join([*told, "the runs given"] if self.runs else told)

    def tells(self, batch: int, epochs: float) -> bool:
        """Whether the law knows of trainings of as few steps."""
        return epochs >= self.told_from(batch)

    def told_from(self, batch: int) -> float:
        """Epochs from which on it `tells`."""
        return self.steps * batch / self.train_samples

    def accuracy(self, optimizer: OptimizerName, batch: int, epochs: float) -> Estimate | None:
        """Held-out accuracy at the end of a training, a share; `None` where nothing `tells`.

        As a run counts it, as in `by_epoch`: so the interval is that of the last epoch.
        """
        if not self.tells(batch, epochs):
            return None
        key = optimizer, batch, epochs
        if key not in self._known:
            self._known[key] = self.model.counted(
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

        ``averaged``: whether an average of the weights is evaluated.
        `None` as long as nothing `tells`: that is as good as guessing.
        Nothing for more than `MAX_EPOCHS`.
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
            self.model.counted(
                self.candidate(optimizer, batch, epoch),
                falls_short(factor, factors[-1], averaged=averaged),
                self.held_out,
            )
            if self.tells(batch, epoch)
            else None
            for epoch, factor in enumerate(factors, 1)
        )

    def epochs_to(self, optimizer: OptimizerName, batch: int, accuracy: float) -> Estimate | None:
        """Epochs of the shortest training that reaches an accuracy; `None` below guessing."""
        found = self.model.samples_to(optimizer, batch, accuracy)
        if found is None:
            return None
        values = {end: getattr(found, end) / self.train_samples for end in ("value", "low", "high")}
        return Estimate(**values)

    def needed(
        self, optimizer: OptimizerName, batch: int, accuracy: float, confidence: float, most: int
    ) -> int | None:
        """Fewest whole epochs that reach an accuracy with this probability; `None` beyond ``most``.

        What is reached so rises with the epochs or, as the error grows with them, rises and falls
        once: so the first doubling that reaches it has the fewest below it.
        """

        def reached(epochs: int) -> bool:
            training = self.candidate(optimizer, batch, epochs)
            sure = self.model.surely(training, confidence) >= accuracy
            return sure and self.tells(batch, epochs)

        doublings = (min(2**power, most) for power in range(most.bit_length() + 1))
        longest = next(filter(reached, doublings), None)
        if longest is None:
            return None
        return 1 + bisect_left(range(1, longest), True, key=reached)

    def candidate(self, optimizer: OptimizerName, batch: int, epochs: float) -> Candidate:
        """A training as the law sees it."""
        offset = self.model.offset(optimizer, batch)
        return Candidate(optimizer, batch, epochs * self.train_samples, offset)

    def rate_scale(self, optimizer: OptimizerName, batch: int) -> float:
        """The best rate over the usual one, as far as trials had other rates."""
        return exp(self.model.offset(optimizer, batch))

    def compared(
        self, job: Job, longer: Callable[[int], float] | None = None
    ) -> tuple[Compared, ...]:
        """What a training would reach with SGD and with Muon, by powers of two of the batch.

        After the job's epochs or, if the plan chooses them, the fewest that reach the target with
        either; where it tells nothing of so few, after the first of which it does. Nothing where
        the job leaves no choice.

        They are compared in the same time: ``longer`` is how many times as long a step with Muon
        takes, by the batch. Medians are, as only these differ by what sets the two apart; where
        nothing was observed means differ by how wide the distributions are, too.
        """
        if len(self.optimizers) < 2:
            return ()
        found = []
        for batch in (2**power for power in range(self.train_samples.bit_length())):
            length, told = self._length(batch, job), self.told_from(batch)
            epochs, steps = max(length, told), self.steps if length < told else 0
            times = longer(batch) if longer else 1.0
            sgd, muon = (
                self.candidate(name, batch, epochs * (times if name == SGD.name else 1.0))
                for name in AUTO
            )
            apart, error = self.model.apart(muon, sgd)
            usual = self.model.surely(sgd, 0.5)
            found.append(Compared(batch, usual, usual + apart, error, 0, self.by, times, steps))
        return tuple(found)

    def _length(self, batch: int, job: Job) -> int:
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
) -> Learnt | None:
    """What the profiles' trials tell of a job, and runs of the task, each with its job.

    Without any that train as it does, what other tasks lead to expect. `None` where they do not
    tell it: see `_expects`.

    Trials at another resolution than the job's highest count for nothing, nor do those with another
    rule of rates, clipping, labels or sampling, or at other rates where the job gives one. Those
    with another optimizer do: what they tell of the task, the law ties to its own.
    Where a job scales rate or gradients by gradient noise, there are none.
    """
    if not teaches(job):
        return None
    profile = profiles[0]
    names, side = optimizers_to_try(job, profile.updates), max(sides(job))
    trials = [
        one
        for measured in profiles
        for one in measured.trials
        if one.resolution == side and _alike(measured.job, job)
    ]
    observed = [*dict.fromkeys(of_trials(trials))]  # the same again tells nothing more
    if job.learning_rate != "auto":
        observed = [one for one in observed if not one.offset]
    whole = [
        one
        for trained, one in runs
        if one.optimizer in names and _alike(trained, job, _MEASURED_KEYS)
    ]
    told = observed or whole or _at_usual_rates(job)
    if not told or not (observed or _expects(job, profile.data, _first_answers(profiles))):
        return None
    longest = max((one.samples for one in trials), default=0) if observed else 0
    note = _note(profiles) if observed else why_unknown(profiles, job)
    # A run of fewer steps than any trial has shows what comes of so few.
    steps = min([MIN_STEPS, *(max(1, int(one.samples // one.batch)) for one in whole)])
    usual = bounded_rate(job, profile.network)
    found = [*observed, *whole]
    return _fitted(found, names, profile.data, longest, len(whole), note, steps, usual)


def expected_of(job: Job, data: DataFacts) -> Learnt | None:
    """What other tasks lead to expect of a job of which nothing was measured; `None`: nothing."""
    if not (teaches(job) and _expects(job, data) and _at_usual_rates(job)):
        return None
    return _fitted([], optimizers_to_try(job, ()), data)


def _fitted(
    observed: Sequence[Observed],
    optimizers: tuple[OptimizerName, ...],
    data: DataFacts,
    longest: int = 0,
    runs: int = 0,
    note: str = "",
    steps: int = MIN_STEPS,
    usual_rate: Callable[[int], float] | None = None,
) -> Learnt:
    # It loads NumPy, which a plan that goes by time alone does not need.
    from batchwright.prediction.accuracy.learning import fit_learning

    model = fit_learning(
        observed, classes=data.even_classes, optimizers=optimizers, usual_rate=usual_rate
    )
    counts = data.train_samples, data.val_samples
    return Learnt(model, optimizers, *counts, longest, runs, note, steps)


def bounded_rate(job: Job, network: NetworkFacts) -> Callable[[int], float] | None:
    """So many times the usual rate, by the batch, where no rate above one that learnt is safe.

    That is in networks without batch normalization: rates that short trainings like end longer ones
    with a larger batch, whose usual rate is higher (docs/log.md). `None` for others.
    """
    if network.batch_norm:
        return None
    return lambda batch: scaled_rate(1.0, job.base_batch, batch, job.rate_scaling)


def _expects(job: Job, data: DataFacts, first: FirstAnswers | None = None) -> bool:
    """Whether other tasks tell of a job.

    They are judged by accuracy, began at random, and had optimizers of which that is known.
    ``first`` is what its network answers before any training, where that is known.
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
    return not given and job.scaling in ("auto", "sqrt")  # which is what it comes to


def why_unknown(profiles: Sequence[Profile], job: Job, learnt: Learnt | None = None) -> str:
    """Why trials tell nothing of the accuracy of a job or a batch, and what may, in sentences."""
    if learnt is not None:
        by = learnt.by.removeprefix("the ") or "other tasks' trainings"
        return f"Of trainings with fewer than {learnt.steps} steps {by} tell nothing."
    if not teaches(job):
        return f"Trials do not train {untaught(job)}, so they do not tell its accuracy."
    if any(one.trials for one in profiles):
        return "The probe's trials had another rate, resolution, loss or sampling."
    first = _first_answers(profiles)
    if any(one.without_accuracy for one in profiles):
        return _sentence(NO_ACCURACY)
    why = _note(profiles) or "The probe had no trials: probe.learning gives it time for them."
    if first is not None and first.knowing:
        why += (
            f" Before any training the network answers {first.right} of {first.images} held-out "
            "images right: it has learnt before, of which other tasks' trainings tell nothing."
        )
    return why


def _note(profiles: Sequence[Profile]) -> str:
    if any(one.trials_open for one in profiles):
        return "The probe was stopped during its trials: probe again as before to go on with them."
    return _sentence(next((one.trials_note for one in profiles if one.trials_note), ""))


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}." if note else ""


ACCURACY_TAKES = (
    "two classes or more, a number for each of them from the network, and one of them as label of "
    "each image"
)
NO_ACCURACY = f"there are no trials, as they go by accuracy, which takes {ACCURACY_TAKES}"


def teaches(job: Job) -> bool:
    """Whether a job's trainings are like trials, in which nothing is scaled by gradient noise."""
    factors = job.ags.factors != "off" or job.rate_scaling == "gain"
    return job.method_spec.same_steps and not factors


def untaught(job: Job) -> str:
    """What of a job no trial does, in words that follow "do not train"."""
    if job.method_spec.same_steps:
        return "with rates or gradients scaled by gradient noise"
    return f"as method={job.method} does"


def _alike(measured: Job, planned: Job, keys: Sequence[str] = ()) -> bool:
    """Whether two jobs of one workload train alike for as long, and agree in further keys."""
    return all(getattr(measured, key) == getattr(planned, key) for key in (*TRAINED_KEYS, *keys))


TRAINED_KEYS = (
    *("learning_rate", "base_batch", "scaling", "decay", "warmup_epochs", "warmup_start"),
    *("warmup_law", "clip_norm", "label_smoothing", "sampling"),
)
"""Keys that may change after measuring, but with which the trials were trained."""
_MEASURED_KEYS = (
    *("augment", "batch_norm", "dropout", "frozen", "loss", "momentum", "nesterov", "rotation"),
    *("weight_decay", "weights", "zoom"),
)
"""Keys that are fixed by measuring; runs that are not of this profile may differ in them."""
