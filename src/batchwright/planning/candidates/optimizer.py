"""Which optimizer a batch is given: `optimizer=auto`, and what the other one's update takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, log2

from batchwright.planning.chosen import Chosen
from batchwright.prediction.drift import HANDING_OVER
from batchwright.prediction.fit import Z_975
from batchwright.records import Estimate, Job, OptimizerName, Profile, Reason, UpdateTime
from batchwright.records.registries.optimizers import AUTO, SGD
from batchwright.records.text.formatting import percent


@dataclass(frozen=True)
class Compared:
    """A batch with which runs of the task had SGD, and others Muon; or would, as predicted.

    Attributes:
        batch: Global batch, in samples.
        sgd: Mean held-out accuracy at the end with SGD, a share.
        muon: The same with Muon.
        error: Standard error of their difference.
        runs: How many, of both; 0: a prediction, in which all is that is known beforehand.
        by: What a prediction rests on beside other tasks' trainings; empty: on these alone.
        longer: How many times the epochs with Muon SGD was given: those that take as long.
        steps: Of the training that is predicted, where the planned one has too few to tell anything
            of; 0: it is that one.
    """

    batch: int
    sgd: float
    muon: float
    error: float
    runs: int
    by: str = ""
    longer: float = 1.0
    steps: int = 0

    @property
    def better(self) -> OptimizerName | None:
        """The one that reached more; `None` if runs differ by no more than chance."""
        if self.runs and abs(self.muon - self.sgd) <= Z_975 * self.error:
            return None
        return AUTO[self.muon > self.sgd]


def optimizers_of(job: Job) -> tuple[OptimizerName, ...]:
    """The optimizers that a job can come to."""
    return AUTO if job.optimizer == "auto" else (job.optimizer,)


def optimizers_to_try(job: Job, updates: Sequence[UpdateTime]) -> tuple[OptimizerName, ...]:
    """Optimizers worth a trial: none that the job speaks against or the network has no use for.

    ``updates`` are of the optimizers that `auto` may come to, where they were timed.
    """
    names = AUTO[:1] if job.optimizer == "auto" and _against_muon(job) else optimizers_of(job)
    timed = {one.optimizer for one in updates}
    return tuple(name for name in names if not timed or name in timed)


def chosen_optimizer(job: Job, batch: float, compared: Sequence[Compared] = ()) -> OptimizerName:
    """The optimizer for a global batch: as asked, as runs showed, or as predicted; else SGD.

    ``compared`` are batches with both; one within a factor of two counts, the nearest.
    """
    return _chosen(job, batch, compared).value


def optimizer_reason(
    asked: Job, batch: int, compared: Sequence[Compared] = ()
) -> tuple[Reason, ...]:
    """Why `auto` comes to what it comes to; nothing where the optimizer was asked for."""
    if asked.optimizer != "auto":
        return ()
    return (_chosen(asked, batch, compared).reason("optimizer"),)


def _chosen(job: Job, batch: float, compared: Sequence[Compared]) -> Chosen[OptimizerName]:
    if job.optimizer != "auto":
        return Chosen(job.optimizer, "Asked for.", "asked")
    if against := _against_muon(job):
        return Chosen(SGD.name, against, "assumed")
    # The nearest batch that ran with both, and the nearest prediction, if within a factor of two.
    near = [one for one in compared if abs(log2(one.batch / batch)) <= 1]
    near.sort(key=lambda one: abs(log2(one.batch / batch)))
    ran, told = (
        next((one for one in near if bool(one.runs) is had), None) for had in (True, False)
    )
    measured = ""
    if ran:
        measured = (
            f"In the {ran.runs} runs given with batch {ran.batch}, SGD reached {percent(ran.sgd)} "
            f"held out and Muon {percent(ran.muon)}"
        )
        if ran.better:
            return Chosen(ran.better, f"{measured}.", "measured")
        measured += ", no further apart than chance may set them. "
    if told is None:
        return Chosen(SGD.name, f"{measured}{_UNTOLD}", "assumed")
    why = f"{measured}{_predicted(told)}."
    if told.better != SGD.name:
        why += " In a loop of your own: `bw.muon(model, lr=...)`; `optimizer=sgd` keeps SGD."
    return Chosen(told.better or SGD.name, why, "predicted" if told.by else "assumed")


def _predicted(told: Compared) -> str:
    """Which would reach more, by how much, and how sure that is.

    Not what each reaches: runs may tell that by their curves, and the reason `accuracy` says it.
    """
    by = "There are no trials: by what other tasks' trainings showed"
    if told.by:
        by = f"By {told.by}, and what other tasks showed where these say nothing"
    apart, takes = 100 * (told.muon - told.sgd), ""
    if told.longer > 1:
        takes = f"; a step with Muon takes {told.longer:.3g} times as long"
    few = f" in a training of {told.steps} steps" if told.steps else ""
    when = " in the same time" if told.longer > 1 else ""
    return (
        f"{by}, Muon would reach {abs(apart):.1f} points {'more' if apart > 0 else 'less'} held "
        f"out than SGD{few}{when}, give or take {100 * Z_975 * told.error:.1f}{takes}"
    )


_UNTOLD = (
    "The usual one: there are no trials, and weights were learnt before, there are no classes, or "
    "rates are others, of which other tasks' trainings tell nothing; optimizer=muon takes Muon in "
    "any case."
)


def _against_muon(job: Job) -> str:
    """What in a job speaks for SGD at any batch, in a sentence; empty if nothing does."""
    if not job.method_spec.same_steps:
        return f"method={job.method} is as published: with SGD."
    if job.learning_rate != "auto":
        return (
            f"learning_rate={job.learning_rate:g} is given, and a rate of SGD's is none of Muon's. "
            "Without it, trials or other tasks' trainings decide; optimizer=muon takes Muon in any "
            "case, with the default rate of its own if learning_rate is left out."
        )
    if job.frozen:
        return (
            "With layers frozen, weights are some that were learnt before, and Muon's steps go as "
            "far from them as from random ones; optimizer=muon takes it in any case."
        )
    if job.ags.factors != "off" or job.rate_scaling == "gain":
        return "Factors by gradient noise act on SGD; Muon's updates have a size of their own."
    if job.momentum == 0:
        return "Without momentum there is nothing to make orthogonal."
    if not job.nesterov:
        return "Plain momentum is asked for, which is SGD's; optimizer=muon takes Muon in any case."
    return ""


# ------------------------------------------------------------------------------------------ times


def extra_seconds(
    job: Job, profile: Profile, name: OptimizerName, workers: int, speed: float = 1.0
) -> Estimate | None:
    """What an update takes more than one of the optimizer that was measured with.

    Args:
        job: To plan for.
        profile: Measured, with SGD where `updates` says what others take.
        name: The optimizer that the batch in question is given.
        workers: That compute at the same time; updates of the nearest number count.
        speed: Of the workers in question, as a multiple of the measured one.

    Returns:
        In seconds, at least 0; `None` where it is the same optimizer, where nothing was measured,
        and for a virtual cluster, whose clock goes by the steps alone.
    """
    if profile.job.optimizer != "auto" or name == SGD.name or job.launcher.simulated:
        return None
    usual, other = (_of(profile.updates, one, workers) for one in (SGD.name, name))
    if usual is None or other is None:
        return None
    value = max(0.0, other.seconds - usual.seconds)
    # An update is the same for any batch, so all of it is of the kind that lasting drift is of.
    factor = exp(Z_975 * HANDING_OVER) if profile.cluster.several_cores else 1.0
    return Estimate(
        value=value / speed,
        low=min(value / factor, max(0.0, other.low - usual.high)) / speed,
        high=max(value * factor, other.high - usual.low) / speed,
    )


def _of(updates: Sequence[UpdateTime], name: str, workers: int) -> UpdateTime | None:
    return min(
        (one for one in updates if one.optimizer == name),
        key=lambda one: abs(log(one.workers / workers)) if one.workers else inf,
        default=None,
    )
