"""What trials tell of the training that is planned: accuracy, and which optimizer learns more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchwright.planning.inputs import sides
from batchwright.planning.optimizer import Compared, OptimizerName, optimizers_of
from batchwright.prediction.trainings import Candidate, of_trials
from batchwright.records import Estimate, Job, Profile

if TYPE_CHECKING:
    from batchwright.prediction.learning import LearningModel

TAUGHT = ("plain", "dynamic-batch", "auto")
"""Methods that train as trials do: one batch, one resolution; what `auto` compares others with."""


@dataclass(frozen=True)
class Learnt:
    """The law of learning, fitted to trials.

    Attributes:
        model: The law.
        optimizers: That the job can come to.
        train_samples: Samples of an epoch.
        longest: Samples of the longest trial.
    """

    model: LearningModel
    optimizers: tuple[OptimizerName, ...]
    train_samples: int
    longest: int
    _known: dict[tuple[OptimizerName, int, float], Estimate] = field(
        default_factory=dict, repr=False
    )

    def accuracy(self, optimizer: OptimizerName, batch: int, epochs: float) -> Estimate:
        """Held-out accuracy at the end of a training, a share."""
        key = optimizer, batch, epochs
        if key not in self._known:
            self._known[key] = self.model.accuracy(self.candidate(*key))
        return self._known[key]

    def epochs_to(self, optimizer: OptimizerName, batch: int, accuracy: float) -> Estimate | None:
        """Epochs of the shortest training that reaches an accuracy; `None` below guessing."""
        found = self.model.samples_to(optimizer, batch, accuracy)
        if found is None:
            return None
        values = {end: getattr(found, end) / self.train_samples for end in ("value", "low", "high")}
        return Estimate(**values)

    def candidate(self, optimizer: OptimizerName, batch: int, epochs: float) -> Candidate:
        """A training as the law sees it."""
        return Candidate(optimizer, batch, epochs * self.train_samples)

    def compared(self, epochs: float) -> tuple[Compared, ...]:
        """What a training would reach with SGD and with Muon, by powers of two of the batch.

        Nothing where the job leaves no choice.
        """
        if len(self.optimizers) < 2:
            return ()
        return tuple(
            self._both(2**power, epochs) for power in range(self.train_samples.bit_length())
        )

    def _both(self, batch: int, epochs: float) -> Compared:
        muon, sgd = (self.candidate(name, batch, epochs) for name in ("muon", "sgd"))
        apart, error = self.model.apart(muon, sgd)
        reached = self.model.accuracy(sgd).value
        return Compared(batch, reached, reached + apart, error, runs=0)


def learnt_of(profiles: Sequence[Profile], job: Job) -> Learnt | None:
    """What the profiles' trials tell of a job; `None` if there are none that train as it does.

    Trials at another resolution than the job's highest count for nothing, nor do those with an
    optimizer that it cannot come to, or with other rates, clipping, labels or sampling.
    Where a job scales rate or gradients by gradient noise, there are none.
    """
    if not teaches(job):
        return None
    profile = profiles[0]
    names, side = optimizers_of(job), max(sides(job))
    trials = [
        one
        for measured in profiles
        for one in measured.trials
        if one.optimizer in names and one.resolution == side and _alike(measured.job, job)
    ]
    observed = [*dict.fromkeys(of_trials(trials))]  # the same again tells nothing more
    if not observed:
        return None
    # It loads NumPy, which no plan without trials needs.
    from batchwright.prediction.learning import fit_learning

    model = fit_learning(observed, classes=len(profile.data.classes), optimizers=names)
    return Learnt(model, names, profile.data.train_samples, max(one.samples for one in trials))


def teaches(job: Job) -> bool:
    """Whether a job's trainings are like trials, in which nothing is scaled by gradient noise."""
    factors = job.ags.factors != "off" or job.rate_scaling == "gain"
    return job.method in TAUGHT and not factors


def _alike(measured: Job, planned: Job) -> bool:
    """Whether two jobs of one workload train alike for as long."""
    return all(getattr(measured, key) == getattr(planned, key) for key in _TRAINING_KEYS)


_TRAINING_KEYS = (
    *("learning_rate", "base_batch", "scaling", "decay", "warmup_epochs"),
    *("clip_norm", "label_smoothing", "sampling"),
)
"""Of those that may change after measuring, what a trial is trained with."""
