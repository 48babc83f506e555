"""Which optimizer a batch is given: `optimizer=auto`, and what the other one's update takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from batchwright.planning.chosen import Chosen
from batchwright.prediction.fit import Z_975
from batchwright.records import Estimate, Job, OptimizerName, Profile, Reason, UpdateTime
from batchwright.records.registries.optimizers import AUTO, MUON, SGD

MUON_ABOVE = 2.0
"""Global batch over base batch beyond which `auto` takes Muon, where no runs tell better."""

JORDAN = "Jordan et al. 2024, Muon; measured in docs/log.md"

_KEPT = (
    "Up to twice that one, SGD is kept: Muon reached more in trainings of 5 to 10 epochs, and no "
    "more in one of 40; optimizer=muon takes it."
)


@dataclass(frozen=True)
class Compared:
    """A batch with which runs of the task had SGD, and others Muon; or would, as trials say.

    Attributes:
        batch: Global batch, in samples.
        sgd: Mean held-out accuracy at the end with SGD, a share.
        muon: The same with Muon.
        error: Standard error of their difference.
        runs: How many, of both; 0: a prediction, in which all is that is known beforehand.
    """

    batch: int
    sgd: float
    muon: float
    error: float
    runs: int

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
    return tuple(name for name in names if not updates or _of(updates, name))


def chosen_optimizer(job: Job, batch: float, compared: Sequence[Compared] = ()) -> OptimizerName:
    """The optimizer for a global batch: as asked, as runs showed, or by the rule of `auto`.

    ``compared`` are batches that ran with both; one within a factor of two counts, the nearest.
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
    # The nearest batch that ran with both, if within a factor of two.
    away, nearest = min(
        ((abs(log2(one.batch / batch)), one) for one in compared),
        key=lambda pair: pair[0],
        default=(2.0, None),
    )
    near = nearest if away <= 1 else None
    measured = ""
    if near and not near.runs:
        why = (
            "By the trials, and what other tasks showed where these say nothing, this training "
            f"would reach {near.sgd:.1%} held out with SGD and {near.muon:.1%} with Muon, give or "
            f"take {100 * Z_975 * near.error:.1f} points between them."
        )
        return Chosen(near.better or SGD.name, why, "predicted")
    if near:
        measured = (
            f"In the {near.runs} runs given with batch {near.batch}, SGD reached {near.sgd:.1%} "
            f"held out and Muon {near.muon:.1%}"
        )
        if near.better:
            return Chosen(near.better, f"{measured}.", "measured")
        measured += ", no further apart than seeds are. "
    times = batch / job.base_batch
    why = f"{measured}The batch is {times:.3g} times the one that the rate is for."
    if batch <= MUON_ABOVE * job.base_batch:
        return Chosen(SGD.name, f"{why} {_KEPT}", "assumed")
    why += (
        " Momentum made orthogonal loses less to small batches than SGD with any scaled rate, in "
        "as many epochs. In a loop of your own: `bw.muon(model, lr=...)`; `optimizer=sgd` keeps "
        "SGD."
    )
    return Chosen(MUON.name, why, "published", JORDAN)


def _against_muon(job: Job) -> str:
    """What in a job speaks for SGD at any batch, in a sentence; empty if nothing does."""
    if not job.method_spec.same_steps:
        return f"method={job.method} is as published: with SGD."
    if job.learning_rate != "auto":
        return (
            f"learning_rate={job.learning_rate:g} is given, and a rate of SGD's is none of Muon's. "
            "Without it the batch decides; optimizer=muon takes Muon in any case, with the default "
            "rate of its own if learning_rate is left out."
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
    job: Job, profile: Profile, name: OptimizerName, speed: float = 1.0
) -> Estimate | None:
    """What an update takes more than one of the optimizer that was measured with.

    Args:
        job: To plan for.
        profile: Measured, with SGD where `updates` says what others take.
        name: The optimizer that the batch in question is given.
        speed: Of the workers in question, as a multiple of the measured one.

    Returns:
        In seconds, at least 0; `None` where it is the same optimizer, where nothing was measured,
        and for a virtual cluster, whose clock goes by the steps alone.
    """
    if profile.job.optimizer != "auto" or name == SGD.name or job.launcher.simulated:
        return None
    usual, other = _of(profile.updates, SGD.name), _of(profile.updates, name)
    if usual is None or other is None:
        return None
    return Estimate(
        value=max(0.0, other.seconds - usual.seconds) / speed,
        low=max(0.0, other.low - usual.high) / speed,
        high=max(0.0, other.high - usual.low) / speed,
    )


def _of(updates: Sequence[UpdateTime], name: str) -> UpdateTime | None:
    return next((one for one in updates if one.optimizer == name), None)
