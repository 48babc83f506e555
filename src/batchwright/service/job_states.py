"""The states of a job: pure functions from its standing to the next one.

    queued --lease--> probing --plan--> planned --approval, lease--> training --> done
      ^                  |                 ^                            |
      +---- given on ----+                 +--------- given on ---------+

From all of these a job may be cancelled, and while an agent has it, it may fail. With ``auto`` the
agent keeps its lease from the plan to the training.

A lease is lost only when the job is leased again: an agent that was cut off for a while, and comes
back before that, goes on as if nothing had happened. Leases are numbered, and only reports with the
key of the newest lease are taken. So whatever the order in which messages arrive, the reports of
two agents never count at the same time, and a job never ends twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchwright.records.service import JobState
from batchwright.service.problems import Conflict

ENDED: tuple[JobState, ...] = ("done", "failed", "cancelled")
MAX_LOST = 3
"""Agents that a job may lose, without getting any further, before it fails: the job may be what
kills them."""
LEASE_LOST = "the lease of this job was lost: stop working on it, and lease again"
"""Message to an agent whose lease is not the job's newest."""


@dataclass(frozen=True)
class Standing:
    """The state of a job, and all that decides on the next one.

    Attributes:
        state: State as clients see it. An agent has a job that is `probing` or `training`, and one
            that is `planned` if it goes on without approval.
        auto: Whether the plan needs no approval.
        approved: Whether somebody approved the plan.
        cancelling: Whether the agent is to stop; false where no agent has the job.
        has_plan: Whether there is a plan to approve or to follow.
        agent: Name of the agent that has the job, or had it last.
        key: Key of the newest lease; `None` once the job was taken from its agent.
        expires: When the agent will have been silent for a whole lease, by the wall clock, in
            seconds: each report changes it. `None` if no agent has the job.
        heard: Whether the agent has sent a report by the newest lease, which had arrived then.
        kept: Whether the agent that gave the job back has the training so far in its folder.
        trained: Epochs in the newest checkpoint of the agent that has the job, or had it last.
        furthest: Maximum of `trained` over all agents.
        attempts: Number of leases so far; the number of the newest.
        lost: Agents lost since the job last got further.
        error: Why the job failed.
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
        """Whether an agent has the job."""
        return self.expires is not None

    @property
    def goes_on(self) -> bool:
        """Whether there is a plan that may be followed."""
        return self.has_plan and (self.auto or self.approved)

    @property
    def leasable(self) -> bool:
        """Whether no agent has the job and one may have it."""
        return not self.held and (
            self.state == "queued" or (self.state == "planned" and self.goes_on)
        )

    def free_for(self, agent: str, silent: float, *, seconds: float, keep: float) -> bool:
        """Whether an agent may have the job now.

        Args:
            agent: Name of the agent.
            silent: Seconds since the last report of the agent that has the job, or gave it back.
            seconds: Length of a lease.
            keep: Seconds for which a training is kept for the agent whose folder has it.
        """
        if self.held:
            kept = keep if self.state == "training" else 0.0
            return agent != self.agent and not self.cancelling and silent >= seconds + kept
        return self.leasable and (agent == self.agent or not self.kept or silent >= keep)


# --------------------------------------------------------------------------------- what users do


def approve(job: Standing) -> Standing:
    """Approve the plan; once more changes nothing.

    Raises:
        Conflict: There is no plan that waits, or the job has ended or is being cancelled.
    """
    if job.state in ENDED or job.cancelling:
        raise Conflict(f"the job is {_doing(job)}: there is nothing to approve")
    if job.state not in ("planned", "training"):
        raise Conflict(f"the job is {job.state}: approve it once it is planned")
    return replace(job, approved=True)


def cancel(job: Standing, *, silent: bool = False) -> Standing:
    """Cancel the job; once more changes nothing.

    If an agent has the job, it is ordered to stop, and the job ends when the agent reports that it
    has stopped, or falls silent; at once where it is silent already.

    Args:
        job: Standing of the job.
        silent: Whether the agent that has the job is silent.

    Raises:
        Conflict: The job has ended otherwise.
    """
    if job.state == "cancelled":
        return job
    if job.state in ENDED:
        raise Conflict(f"the job is {job.state} already: there is nothing to cancel")
    cancelling = replace(job, cancelling=job.held)
    return settled(cancelling, silent=silent) if job.held else _ended(job, "cancelled")


# -------------------------------------------------------------------------------- what agents do


def lease(job: Standing, *, agent: str, key: str, expires: float) -> Standing:
    """Lease the job to an agent: to train where a plan may be followed, else to probe and plan.

    Args:
        job: Standing of the job.
        agent: Name of the agent.
        key: Key of the lease.
        expires: When the agent will have been silent for a whole lease, in seconds.

    Raises:
        Conflict: The job is not leasable.
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
    """Apply an agent's report, however long the agent was silent before.

    Args:
        job: Standing of the job.
        key: Key of the agent's lease.
        expires: When the agent will have been silent for a whole lease, in seconds.
        state: New state; `None`: as before. ``queued`` gives the job back.
        plan: Whether the report brings a plan.
        trained: Epochs in the agent's newest checkpoint; `None`: as before.
        able: With ``queued``: whether the agent can carry the job out.
        sent: With ``queued``: whether the service has the newest checkpoint of the agent.
        error: Why the job failed.

    Raises:
        Conflict: The lease is not the newest, or has ended; or the job cannot get to ``state``.
    """
    if key != job.key:
        raise Conflict(LEASE_LOST)
    if not job.held:
        if state == job.state or (state == "queued" and job.state == "planned"):
            return job  # this very report has ended the lease, and its answer was lost
        raise Conflict(f"the job is {job.state}, and its lease has ended: lease again")
    trained = job.trained if trained is None else trained
    # Once the job is further than ever before, losses are forgotten.
    further = trained > job.furthest or (plan and not job.has_plan)
    job = replace(
        job,
        expires=expires,
        heard=True,
        has_plan=job.has_plan or plan,
        trained=trained,
        furthest=max(job.furthest, trained),
        lost=0 if further else job.lost,
    )
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
    """End a job that is being cancelled, if its agent is silent."""
    return _ended(job, "cancelled") if job.cancelling and silent else job


def lose(job: Standing) -> Standing:
    """Take the job from its agent, for another agent, or for the same one after it has forgotten
    the job. Its profile and plan stay. A lease that the agent never reported by counts as no loss.
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


def _given_back(job: Standing, *, kept: bool = True) -> Standing:
    """End the lease: the job waits for another agent, or for approval."""
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
