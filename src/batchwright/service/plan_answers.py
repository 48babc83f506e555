"""Plans for clients, by the function that the command line calls, within limits on the figures with
which time and memory of planning grow; and the check of documents that agents send.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchwright.planning.merging import merge_profiles
from batchwright.planning.resolution import settled
from batchwright.planning.validation import planning_job
from batchwright.records import EpochRecord, Job, Plan, Profile
from batchwright.records.agent_rules import bounding_keys, misfit, other_choice
from batchwright.records.documents import change_job
from batchwright.records.registries.networks import least_side
from batchwright.records.service import Advice, JobProgress, PlanRequest
from batchwright.service.problems import Refused, TooMany
from batchwright.service.processes import Workers

if TYPE_CHECKING:
    from batchwright.service.advising import Offer


MAX_WORKERS = 4096
MAX_RESOLUTIONS = 32
MAX_KINDS = 32
MAX_POINTS = 2000
"""Measured points of all profiles; a thorough probe has some fifty."""
MAX_VISITS = 200
"""Visits to one measured point."""

PLAN_SECONDS = 60.0
"""Maximum duration of planning."""

PLANNERS = Workers(most=1, waiting=3)
"""The process that plans: one plan after the other, as two at once would take twice as long."""


def planned(request: PlanRequest) -> Plan:
    """The plan that ``batchwright plan`` would write, made in a process beside this one.

    Raises:
        BatchwrightError: There is no such plan, or the figures are beyond the limits.
        TooMany: Too many plans wait already, or the turn of this one did not come.
        Unavailable: Planning took too long, or the system ended its process.
    """
    return PLANNERS.call(PLAN_SECONDS, make_plan, request)


def checked_documents(asked: Job, stored: Profile | None, progress: JobProgress) -> JobProgress:
    """An agent's report on its job, with the plan as it was made here.

    Other agents may follow profile and plan, on other machines. So the job in them must be the one
    that was submitted, key by key, and the plan the one that planning makes here of the profile.

    Args:
        asked: The job as it was submitted.
        stored: The job's profile that is stored already.
        progress: The report.

    Raises:
        Refused: The profile or the plan is not of this job.
        TooMany: The service is busy with other plans.
    """
    if progress.profile is not None:
        data = progress.profile.data
        expected = settled(asked, data, least_side=least_side(asked.network))
        if problem := misfit(expected, progress.profile.job):
            raise Refused(f"a profile that is not of this job: it has {problem}")
    if progress.plan is None:
        return progress
    profile = progress.profile or stored
    if profile is None:
        raise Refused("a plan without the profile that it was made from: send both")
    # The plan of this process is stored: its reasons are what a person reads before approving.
    plan = planned(PlanRequest(profiles=(profile,), keys=bounding_keys(profile)))
    if problem := other_choice(plan, progress.plan):
        raise Refused(
            f"a plan that is not the one that its profile leads to: {problem}; is the same version "
            "on both sides?"
        )
    return progress.model_copy(update={"plan": plan})


def advised(
    plan: Plan, profile: Profile, epochs: Sequence[EpochRecord], offered: Sequence[Advice]
) -> Offer | None:
    """`advising.advice_for`, in the process that plans; waits for its turn, however long.

    Raises:
        BatchwrightError: Plan and profile do not fit together, no plan comes of them, or planning
            took too long.
    """
    from batchwright.service.advising import advice_for  # the planner

    while True:
        try:
            return PLANNERS.call(PLAN_SECONDS, advice_for, plan, profile, epochs, offered)
        except TooMany as busy:
            time.sleep(busy.retry_after)


def make_plan(request: PlanRequest) -> Plan:
    """The plan of a request, made in this process.

    Raises:
        BatchwrightError: There is no such plan, or the figures are beyond the limits.
    """
    from batchwright.planning import planner  # the service itself does without it

    try:
        job = change_job(planning_job(*merge_profiles(request.profiles)), request.keys)
        refuse_costly(job, request.profiles)
        return planner.make_plan(request.profiles, job, runs=request.runs)
    except (ArithmeticError, LookupError, ValueError, AssertionError):
        # The input is the client's alone; no probe measures figures with which planning fails so.
        raise Refused("no plan comes of these figures: were they measured by a probe?") from None


def refuse_costly(job: Job, profiles: Sequence[Profile]) -> None:
    """Refuse figures with which planning would take more than a few seconds.

    Raises:
        Refused: A figure is larger than any training needs; the command line takes it.
    """
    counts = [job.workers, job.goal.max_workers, job.dual.small_workers]
    counts += [kind.count for kind in job.goal.kinds]
    counts += [point.workers for profile in profiles for point in profile.steps]
    workers = max((count for count in counts if isinstance(count, int)), default=0)
    points = [
        point
        for profile in profiles
        for point in (*profile.steps, *profile.memory, *profile.collectives, *profile.pairs)
    ]
    visits = [len(point.visits) for profile in profiles for point in profile.steps]
    visits += [len(pair.ratios) for profile in profiles for pair in profile.pairs]
    for name, found, most in (
        ("workers", workers, MAX_WORKERS),
        ("resolutions", 0 if job.resolutions == "auto" else len(job.resolutions), MAX_RESOLUTIONS),
        ("kinds of workers", len(job.goal.kinds), MAX_KINDS),
        ("measured points", len(points), MAX_POINTS),
        ("visits to a point", max(visits, default=0), MAX_VISITS),
    ):
        if found > most:
            raise Refused(
                f"{found:,} {name}: the service plans for {most:,} at most; "
                "`batchwright plan` takes more"
            )
