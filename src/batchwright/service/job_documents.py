"""Whether the profile and the plan that an agent sends are of the job that it has.

Another agent may follow them, on another machine. So the job in them is the one that was submitted,
key by key, and the plan is the one that planning makes here from this job and this profile.
"""

from __future__ import annotations

from batchwright.planning.resolution import settled
from batchwright.records import Job, Profile
from batchwright.records.agent_rules import difference, misfit
from batchwright.records.registries.networks import least_side
from batchwright.records.service import JobProgress, PlanRequest
from batchwright.service.plan_answers import planned
from batchwright.service.problems import Refused


def checked(asked: Job, kept: Profile | None, progress: JobProgress) -> JobProgress:
    """What an agent says of its job, with the plan as it was made here.

    Args:
        asked: The job as it was submitted.
        kept: Its profile that is stored already.
        progress: What the agent says.

    Raises:
        Refused: A document is not of this job.
        TooMany: Others plan just now.
    """
    if progress.profile is not None:
        data = progress.profile.data
        expected = settled(asked, data, least_side=least_side(asked.network))
        if problem := misfit(expected, progress.profile.job):
            raise Refused(f"a profile that is not of this job: it has {problem}")
    if progress.plan is None:
        return progress
    profile = progress.profile or kept
    if profile is None:
        raise Refused("a plan without the profile that it was made from: send both")
    # What a person reads before approving is what was made here, words and all.
    plan = planned(PlanRequest(profiles=(profile,)))
    if problem := difference(plan, progress.plan, without=("reasons",)):
        raise Refused(
            f"a plan that is not the one that its profile leads to: {problem}; is the same version "
            "on both sides?"
        )
    return progress.model_copy(update={"plan": plan})
