"""Chooses the optimizer of a batch for `optimizer=auto`; extra time of an optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log2

from batchwright.algorithms.batch_size import as_compared
from batchwright.planning.candidates.worker_types import WorkerType
from batchwright.planning.chosen import Chosen
from batchwright.planning.resolution import sides
from batchwright.prediction.drift import HANDING_OVER
from batchwright.prediction.fit import Z_975
from batchwright.records import Estimate, Job, OptimizerName, Profile, Reason, UpdateTime
from batchwright.records.registries.optimizers import AUTO, SGD
from batchwright.records.text.formatting import percent


@dataclass(frozen=True)
class Compared:
    """Accuracies with SGD and with Muon at one batch, by runs of the task or by prediction."""

    batch: int  # global batch, in samples
    sgd: float  # mean held-out accuracy at the end with SGD, a share
    muon: float  # mean held-out accuracy at the end with Muon, a share
    error: float  # standard error of their difference
    runs: int  # number of runs with either; 0: a prediction
    by: str = ""  # what a prediction rests on besides other tasks' trainings; empty: on these alone
    longer: float = 1.0  # epochs with SGD over those with Muon, so that both take the same time
    # Steps of the training that is predicted in place of the planned one, which has too few; 0: the
    # planned one is predicted.
    steps: int = 0

    @property
    def better(self) -> OptimizerName | None:
        """The optimizer that reaches more; `None` if runs differ by no more than chance."""
        if self.runs and abs(self.muon - self.sgd) <= Z_975 * self.error:
            return None
        return AUTO[as_compared(self.muon) > as_compared(self.sgd)]


def optimizers_of(job: Job) -> tuple[OptimizerName, ...]:
    """The optimizers that a job may get."""
    return AUTO if job.optimizer == "auto" else (job.optimizer,)


def optimizers_to_try(job: Job, updates: Sequence[UpdateTime]) -> tuple[OptimizerName, ...]:
    """Optimizers worth a trial: those that suit the job's settings and the network.

    Args:
        job: The job.
        updates: Update times of the optimizers that suit the network; empty: not timed.
    """
    names = AUTO[:1] if job.optimizer == "auto" and _against_muon(job) else optimizers_of(job)
    timed = {one.optimizer for one in updates}
    return tuple(name for name in names if not timed or name in timed)


def chosen_optimizer(job: Job, batch: float, compared: Sequence[Compared] = ()) -> OptimizerName:
    """The optimizer for a global batch: as asked, else by runs, else by prediction, else SGD.

    Args:
        job: The job.
        batch: Global batch, in samples.
        compared: Accuracies with both optimizers. The batch nearest to ``batch`` within a factor of
            two counts.
    """
    return _chosen(job, batch, compared).value


def optimizer_reason(
    asked: Job, batch: int, compared: Sequence[Compared] = ()
) -> tuple[Reason, ...]:
    """The reason for the optimizer of `optimizer=auto`; empty where the job names one."""
    if asked.optimizer != "auto":
        return ()
    return (_chosen(asked, batch, compared).reason("optimizer"),)


def _chosen(job: Job, batch: float, compared: Sequence[Compared]) -> Chosen[OptimizerName]:
    if job.optimizer != "auto":
        return Chosen(job.optimizer, "Asked for.", "asked")
    if against := _against_muon(job):
        return Chosen(SGD.name, against, "assumed")
    near = [one for one in compared if abs(log2(one.batch / batch)) <= 1]
    near.sort(key=lambda one: abs(log2(one.batch / batch)))
    ran = next((one for one in near if one.runs), None)
    predicted = next((one for one in near if not one.runs), None)
    measured = ""
    if ran:
        measured = (
            f"In the {ran.runs} runs given with batch {ran.batch}, SGD reached {percent(ran.sgd)} "
            f"held out and Muon {percent(ran.muon)}"
        )
        if ran.better:
            return Chosen(ran.better, f"{measured}.", "measured")
        measured += ", a difference that may be chance. "
    if predicted is None:
        return Chosen(SGD.name, f"{measured}{_NOT_PREDICTED}", "assumed")
    why = f"{measured}{_prediction_words(predicted)}."
    if predicted.better != SGD.name:
        why += " In a loop of your own: `bw.muon(model, lr=...)`; `optimizer=sgd` keeps SGD."
    return Chosen(predicted.better or SGD.name, why, "predicted" if predicted.by else "assumed")


def _prediction_words(found: Compared) -> str:
    """Which optimizer would reach more, by how much, and how certain that is.

    The accuracy itself is left to the reason `accuracy`: runs may predict it better.
    """
    by = "No trial of this training was measured. By trainings of other tasks"
    if found.by:
        by = f"By {found.by}, and by trainings of other tasks where these say nothing"
    apart, takes = 100 * (found.muon - found.sgd), ""
    if found.longer > 1:
        takes = f"; a step with Muon takes {found.longer:.3g} times as long"
    reach = f"{abs(apart):.1f} points {'more' if apart > 0 else 'less'} accurate than SGD"
    reach = "as accurate as SGD" if reach.startswith("0.0 ") else reach
    few = f" in a training of {found.steps} steps" if found.steps else ""
    when = " in the same time" if found.longer > 1 else ""
    return (
        f"{by}, Muon would be {reach} on held-out images{few}{when}, give or take "
        f"{100 * Z_975 * found.error:.1f}{takes}"
    )


_NOT_PREDICTED = (
    "SGD is the usual one, and nothing tells whether Muon would do better: no trial of this "
    "training was measured, and trainings of other tasks do not count where weights were learnt "
    "before, where there are no classes, or at other rates. optimizer=muon takes Muon in any case."
)


def _against_muon(job: Job) -> str:
    """The setting of a job that calls for SGD at any batch, in a sentence; empty if none does."""
    if not job.method_spec.same_steps:
        return f"method={job.method} was published with SGD, and is trained with it."
    if job.learning_rate != "auto":
        return (
            f"learning_rate={job.learning_rate:g} is given and taken as one for SGD, as Muon needs "
            "other rates. Without it, trials or other tasks' trainings decide; optimizer=muon "
            "takes Muon in any case, with the default rate of its own if learning_rate is left out."
        )
    if job.frozen:
        return (
            "Some layers are frozen, so the weights were learnt before, and Muon's steps go as far "
            "from them as from random ones; optimizer=muon takes Muon in any case."
        )
    if job.ags.factors != "off" or job.rate_scaling == "gain":
        return (
            "Factors by gradient noise (ags.mode, scaling=gain) act on SGD: Muon's updates have "
            "the same size whatever the gradients are."
        )
    if job.momentum == 0:
        return "Muon makes the momentum orthogonal, and momentum=0 leaves none."
    if not job.nesterov:
        return (
            "nesterov=false asks for plain momentum, which is SGD's; optimizer=muon takes Muon in "
            "any case."
        )
    return ""


# ------------------------------------------------------------------------------------------ times


def extra_seconds(
    job: Job, profile: Profile, name: OptimizerName, workers: int, speed: float = 1.0
) -> Estimate | None:
    """Seconds that an optimizer's update takes more than that of the measured steps.

    Args:
        job: The job to plan for.
        profile: What was measured; with `optimizer=auto` its steps are SGD's, and its `updates`
            have the update of each optimizer.
        name: The optimizer.
        workers: Workers that compute at the same time; updates of the nearest number count.
        speed: Speed of the workers over that of the measured ones.

    Returns:
        Seconds, at least 0; `None` where it is the same optimizer, where updates were not measured,
        and for a virtual cluster, whose clock counts steps alone.
    """
    if profile.job.optimizer != "auto" or name == SGD.name or job.launcher.simulated:
        return None
    usual, other = (profile.update_time(one, workers) for one in (SGD.name, name))
    if usual is None or other is None:
        return None
    value = max(0.0, other.seconds - usual.seconds)
    # An update takes the same time whatever the batch, so all of it is subject to `HANDING_OVER`.
    factor = exp(Z_975 * HANDING_OVER) if profile.cluster.several_cores else 1.0
    return Estimate(
        value=value / speed,
        low=min(value / factor, max(0.0, other.low - usual.high)) / speed,
        high=max(value * factor, other.high - usual.low) / speed,
    )


def longer_with_muon(kinds: Sequence[WorkerType], job: Job) -> Callable[[int], float]:
    """Seconds of a step with Muon over those of a step with SGD, as a function of the global batch.

    The number of workers is the one that the job asks for, or the largest measured one where that
    was not measured. Of several kinds of workers the one with the largest ratio counts.
    """
    side = max(sides(job))

    def times(kind: WorkerType, batch: int) -> float:
        asked = job.workers
        workers = asked if isinstance(asked, int) and asked in kind.measured else kind.measured[-1]
        extra = extra_seconds(job, kind.profile, "muon", workers, kind.speed)
        if extra is None:
            return 1.0
        local = max(kind.least, ceil(batch / workers))
        return 1.0 + extra.value / kind.seconds(workers, side, local)

    return lambda batch: max(times(kind, batch) for kind in kinds)
