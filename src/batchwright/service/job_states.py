"""What can become of a job: pure functions from where it stands to where it stands next.

    queued --lease--> probing --plan--> planned --approval, lease--> training --> done
      ^                  |                 ^                            |
      +--- lease lost ---+                 +-------- lease lost --------+

From all of these a job may be cancelled, and from those that an agent has it may fail. With
``auto`` the agent keeps its lease from the plan to the training. A job is `Standing.held` by one
agent at most, and only who has the key of the newest lease is listened to, so whatever the order in
which messages arrive, a job is never worked on twice at once and never ends twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchwright.records.service import JobState
from batchwright.service.problems import Conflict

ENDED: tuple[JobState, ...] = ("done", "failed", "cancelled")
MOST_LOST = 3
"""Agents that may fall silent over a job before it counts as failed: it may be the job that kills
them."""


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
        key: Of the newest lease; `None` once that was lost, so that it opens nothing any more.
        expires: When the lease is lost, in seconds; `None` if nobody has the job.
        attempts: Leases so far.
        lost: Those that were lost.
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
        """Whether an agent may have it now."""
        return not self.held and (
            self.state == "queued" or (self.state == "planned" and self.goes_on)
        )


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


def cancel(job: Standing) -> Standing:
    """Nobody is to work on the job any more; saying so again changes nothing.

    An agent that has it is told, and the job ends when it says that it stopped or falls silent.

    Raises:
        Conflict: It has ended otherwise.
    """
    if job.state == "cancelled":
        return job
    if job.state in ENDED:
        raise Conflict(f"the job is {job.state} already: there is nothing to cancel")
    return replace(job, cancelling=True) if job.held else _ended(job, "cancelled")


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
        attempts=job.attempts + 1,
    )


def report(
    job: Standing,
    *,
    key: str,
    expires: float,
    state: JobState | None = None,
    plan: bool = False,
    error: str | None = None,
) -> Standing:
    """The agent says how it stands; its lease then lasts until ``expires``.

    Args:
        job: Where it stands; `settled` by now.
        key: Of its lease.
        expires: When the lease will be lost, in seconds.
        state: What it has come to; `None`: as before. ``queued`` gives the job back.
        plan: Whether a plan comes along.
        error: Why it failed.

    Raises:
        Conflict: The lease is not the newest or was lost; or the job does not go that way.
    """
    if key != job.key:
        raise Conflict("the lease of this job was lost: stop working on it, and lease again")
    if not job.held:
        if state == job.state or (state == "queued" and job.state == "planned"):
            return job  # it ended its lease with this very message, and missed the answer
        raise Conflict(f"the job is {job.state}, and its lease has ended: lease again")
    job = replace(job, expires=expires, has_plan=job.has_plan or plan)
    if state is None or state == job.state:
        return job
    match state:
        case "queued":
            return _given_back(job)
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


def settled(job: Standing, now: float) -> Standing:
    """Where it stands by the clock: a lease that has expired is lost."""
    return lose(job) if job.expires is not None and now >= job.expires else job


def lose(job: Standing) -> Standing:
    """The agent that has the job is gone; what it found out stays."""
    job = replace(job, lost=job.lost + 1, key=None)
    if job.lost < MOST_LOST or job.cancelling:
        return _given_back(job)
    return _ended(
        job,
        "failed",
        f"its agent fell silent {job.lost} times, the last time {job.agent} while {job.state}: "
        "look there at what killed it (memory?) or whether two agents have one name, and submit "
        "the job again",
    )


def _given_back(job: Standing) -> Standing:
    """Nobody has it any more; it waits where another agent, or a person, can go on."""
    if job.cancelling:
        return _ended(job, "cancelled")
    return replace(job, state="planned" if job.has_plan else "queued", expires=None)


def _ended(job: Standing, state: JobState, error: str | None = None) -> Standing:
    return replace(job, state=state, cancelling=False, expires=None, error=error)


def _doing(job: Standing) -> str:
    """What the job is doing, for a message."""
    return "being cancelled" if job.cancelling else job.state


def _hint(job: Standing, state: JobState) -> str:
    if state in ("planned", "training") and not job.has_plan:
        return "; send the plan first"
    if state == "training":
        return "; its plan waits for approval"
    return ""
