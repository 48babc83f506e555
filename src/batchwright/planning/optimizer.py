"""Which optimizer a batch is given: `optimizer=auto`, and what the other one's update takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from batchwright.records import Estimate, Job, Profile, Reason, UpdateTime

MUON_ABOVE = 2.0
"""Global batch over base batch beyond which `auto` takes Muon."""

JORDAN = "Jordan et al. 2024, Muon; measured in docs/log.md"

_KEPT = "It takes more than twice the batch that the rate is for to gain anything by Muon."


def chosen_optimizer(job: Job, batch: int) -> Literal["sgd", "adamw", "muon"]:
    """The optimizer for a global batch, in samples: as asked, or by the rule of `auto`."""
    if job.optimizer != "auto":
        return job.optimizer
    return "sgd" if _against_muon(job) or batch <= MUON_ABOVE * job.base_batch else "muon"


def optimizer_reason(asked: Job, batch: int) -> tuple[Reason, ...]:
    """Why `auto` comes to what it comes to; nothing where the optimizer was asked for."""
    if asked.optimizer != "auto":
        return ()
    ratio = batch / asked.base_batch
    against = _against_muon(asked)
    if chosen_optimizer(asked, batch) == "muon":
        return (
            Reason(
                choice="optimizer",
                value="muon",
                why=f"The batch is {ratio:.3g} times the one that the rate is for. Momentum made "
                "orthogonal loses less to small batches than SGD with any scaled rate, in as many "
                "epochs. In a loop of your own: `bw.muon(model, lr=...)`; `optimizer=sgd` keeps "
                "SGD.",
                source="published",
                reference=JORDAN,
            ),
        )
    return (
        Reason(
            choice="optimizer",
            value="sgd",
            why=against or f"The batch is {ratio:.3g} times the one that the rate is for. {_KEPT}",
            source="assumed",
        ),
    )


def _against_muon(job: Job) -> str:
    """What in a job speaks for SGD at any batch, in a sentence; empty if nothing does."""
    if job.method not in ("plain", "dynamic-batch"):
        return f"method={job.method} is as published: with SGD."
    if job.learning_rate != "auto":
        return (
            f"learning_rate={job.learning_rate:g} is given, and a rate of SGD's is none of Muon's."
        )
    if job.ags.mode != "off" or job.scaling == "gain":
        return "Factors by gradient noise act on SGD; Muon's updates have a size of their own."
    if job.momentum == 0:
        return "Without momentum there is nothing to make orthogonal."
    return ""


# ------------------------------------------------------------------------------------------ times


def extra_seconds(job: Job, profile: Profile, batch: int) -> Estimate | None:
    """What an update takes more than one of the optimizer that was measured with.

    Args:
        job: To plan for; its optimizer may be `auto`.
        profile: Measured, with SGD where `updates` says what others take.
        batch: Global batch, in samples.

    Returns:
        In seconds, at least 0; `None` where it is the same optimizer, where nothing was measured,
        and for a virtual cluster, whose clock goes by the steps alone.
    """
    name = chosen_optimizer(job, batch)
    if profile.job.optimizer != "auto" or name == "sgd" or job.launch == "virtual":
        return None
    usual, other = _of(profile.updates, "sgd"), _of(profile.updates, name)
    if usual is None or other is None:
        return None
    return Estimate(
        value=max(0.0, other.seconds - usual.seconds),
        low=max(0.0, other.low - usual.high),
        high=max(0.0, other.high - usual.low),
    )


def _of(updates: Sequence[UpdateTime], name: str) -> UpdateTime | None:
    return next((one for one in updates if one.optimizer == name), None)
