"""What can become of a job: pure functions from where it stands to where it stands next.

    queued --lease--> probing --plan--> planned --approval, lease--> training --> done
      ^                  |                 ^                            |
      +---- given on ----+                 +--------- given on ---------+

From all of these a job may be cancelled, and from those that an agent has it may fail. With
``auto`` the agent keeps its lease from the plan to the training.

A lease is taken away only by giving the job to somebody: an agent that was cut off for a while and
comes back before goes on as if nothing had been. Leases are numbered, and only who has the key of
the newest is listened to, so whatever the order in which messages arrive, no two agents' words
count at once, and a job never ends twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchwright.records.service import JobState
from batchwright.service.problems import Conflict

ENDED: tuple[JobState, ...] = ("done", "failed", "cancelled")
MAX_LOST = 3
"""Agents that a job may lose without getting any further before it counts as failed: it may be the
job that kills them."""


@dataclass(frozen=True)
class Standing:
    """Where a job stands.

    Attributes:
        state: As told to the world. `probing` and `training` are held; `planned` is, where an agent
            goes on without approval.
        auto: Whether the plan needs no approval.
        approved: Whether somebody approved it.
        cancelling: Whether the agent is to stop; never without one.
        has_plan: Whether there is a plan to approve or to follow.
        agent: Who has the job, or had it last.
        key: Of the newest lease; `None` once the job was taken from its agent.
        expires: When the agent will have been silent for a whole lease, by the wall clock, in
            seconds: each word changes it. `None` if nobody has the job.
        heard: Whether anything was heard from who has the newest lease: its answer did arrive.
        kept: Whether the agent that gave it back has the training so far in its folder.
        trained: Epochs in the newest checkpoint of the agent that has it, or had it last.
        furthest: The most that any agent had.
        attempts: Leases so far; the number of the newest.
        lost: Agents lost since it last got further.
        error: Why it failed.
    """

    state: JobState = "queued"
    auto: bool = False
    approved: bool = False
    cancelling: bool = False
    has_plan: bool = False
    agent: str | None = None
    key: str | None = None
    expires: float | None = None
    heard: bool = False
    kept: bool = False
    trained: float = 0.0
    furthest: float = 0.0
    attempts: int = 0
    lost: int = 0
    error: str | None = None

    @property
    def held(self) -> bool:
        """Whether an agent has it."""
        return self.expires is not None

    @property
    def goes_on(self) -> bool:
        """Whether the plan may be followed."""
        return self.has_plan and (self.auto or self.approved)

    @property
    def leasable(self) -> bool:
        """Whether nobody has it and an agent may."""
        return not self.held and (
            self.state == "queued" or (self.state == "planned" and self.goes_on)
        )

    def free_for(self, agent: str, silent: float, *, seconds: float, keep: float) -> bool:
        """Whether an agent that asks may get it now.

        Args:
            agent: Who asks.
            silent: Seconds since the last word of who has it, or gave it back.
            seconds: Of a lease.
            keep: Seconds that a training is kept for the agent whose folder has it.
        """
        if self.held:
            kept = keep if self.state == "training" else 0.0
            return agent != self.agent and not self.cancelling and silent >= seconds + kept
        return self.leasable and (agent == self.agent or not self.kept or silent >= keep)


# --------------------------------------------------------------------------------- what users do


def approve(job: Standing) -> Standing:
    """The plan may be followed; saying so again changes nothing.

    Raises:
        Conflict: There is no plan that waits, or will not be followed any more.
    """
    if job.state in ENDED or job.cancelling:
        raise Conflict(f"the job is {_doing(job)}: there is nothing to approve")
    if job.state not in ("planned", "training"):
        raise Conflict(f"the job is {job.state}: approve it once it is planned")
    return replace(job, approved=True)


def cancel(job: Standing, *, silent: bool = False) -> Standing:
    """Nobody is to work on the job any more; saying so again changes nothing.

    An agent that has it is told, and the job ends when it says that it stopped or falls silent; at
    once, where it is silent already.

    Raises:
        Conflict: It has ended otherwise.
    """
    if job.state == "cancelled":
        return job
    if job.state in ENDED:
        raise Conflict(f"the job is {job.state} already: there is nothing to cancel")
    cancelling = replace(job, cancelling=job.held)
    return settled(cancelling, silent=silent) if job.held else _ended(job, "cancelled")


# -------------------------------------------------------------------------------- what agents do


def lease(job: Standing, *, agent: str, key: str, expires: float) -> Standing:
    """An agent gets the job: to train where a plan may be followed, else to probe and plan.

    Raises:
        Conflict: It is not to be had.
    """
    if not job.leasable:
        raise Conflict(f"the job is {_doing(job)}: it is not to be leased")
    return replace(
        job,
        state="training" if job.goes_on else "probing",
        agent=agent,
        key=key,
        expires=expires,
        heard=False,
        kept=False,
        trained=job.trained if agent == job.agent else 0.0,
        attempts=job.attempts + 1,
    )


def report(
    job: Standing,
    *,
    key: str,
    expires: float,
    state: JobState | None = None,
    plan: bool = False,
    trained: float | None = None,
    able: bool = True,
    sent: bool = False,
    error: str | None = None,
) -> Standing:
    """The agent says how it stands, however long it was silent before.

    Args:
        job: Where it stands.
        key: Of its lease.
        expires: When it will have been silent for a whole lease, in seconds.
        state: What it has come to; `None`: as before. ``queued`` gives the job back.
        plan: Whether a plan comes along.
        trained: Epochs in its newest checkpoint, if it says so.
        able: With ``queued``: whether the agent could go on with the job.
        sent: With ``queued``: whether the service has all of the training that the agent has.
        error: Why it failed.

    Raises:
        Conflict: The lease is not the newest, or has ended; or the job does not go that way.
    """
    if key != job.key:
        raise Conflict("the lease of this job was lost: stop working on it, and lease again")
    if not job.held:
        if state == job.state or (state == "queued" and job.state == "planned"):
            return job  # it ended its lease with this very message, and missed the answer
        raise Conflict(f"the job is {job.state}, and its lease has ended: lease again")
    job = _further(job, plan, job.trained if trained is None else trained)
    job = replace(job, expires=expires, heard=True, has_plan=job.has_plan or plan)
    if state is None or state == job.state:
        return job
    match state:
        case "queued":
            return _given_back(job, kept=able and not sent)
        case "planned" if job.has_plan and job.state == "probing":
            return replace(job, state="planned") if job.goes_on else _given_back(job)
        case "training" if job.goes_on:
            return replace(job, state="training")
        case "done" if job.state == "training":
            return _ended(job, "done")
        case "failed":
            return _ended(job, "failed", error or f"agent {job.agent} gave no reason")
        case "cancelled" if job.cancelling:
            return _ended(job, "cancelled")
    raise Conflict(
        f"the job is {_doing(job)}: it cannot become {state} from there{_hint(job, state)}"
    )


def settled(job: Standing, *, silent: bool) -> Standing:
    """Where it stands by the clock: nobody waits for a silent agent to stop what was cancelled."""
    return _ended(job, "cancelled") if job.cancelling and silent else job


def lose(job: Standing) -> Standing:
    """The job is taken from its agent, for another or for the same one, which does not know of it
    any more. What it found out stays. A lease whose answer never arrived is no loss.
    """
    job = replace(job, lost=job.lost + job.heard, key=None)
    if job.lost < MAX_LOST or job.cancelling:
        return _given_back(job)
    return _ended(
        job,
        "failed",
        f"it lost its agent {job.lost} times without getting any further, the last time "
        f"{job.agent} while {job.state}: look there at what ended it (memory?), and submit the job "
        "again",
    )


def _further(job: Standing, plan: bool, trained: float) -> Standing:
    """Losses are forgotten once the job gets further than anybody had it before."""
    further = trained > job.furthest or (plan and not job.has_plan)
    return replace(
        job,
        trained=trained,
        furthest=max(job.furthest, trained),
        lost=0 if further else job.lost,
    )


def _given_back(job: Standing, *, kept: bool = True) -> Standing:
    """Nobody has it any more; it waits where another agent, or a person, can go on."""
    if job.cancelling:
        return _ended(job, "cancelled")
    return replace(
        job,
        state="planned" if job.has_plan else "queued",
        expires=None,
        kept=kept and job.state == "training",
    )


def _ended(job: Standing, state: JobState, error: str | None = None) -> Standing:
    return replace(job, state=state, cancelling=False, expires=None, kept=False, error=error)


def _doing(job: Standing) -> str:
    """What the job is doing, for a message."""
    return "being cancelled" if job.cancelling else job.state


def _hint(job: Standing, state: JobState) -> str:
    if state in ("planned", "training") and not job.has_plan:
        return "; send the plan first"
    if state == "training":
        return "; its plan waits for approval"
    return ""
