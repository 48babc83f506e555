"""Plans for clients, by the function that the command line calls; and what they may cost: figures
from clients that the service's time and memory grow with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING

from batchwright.planning.merging import merge_profiles
from batchwright.planning.validation import planning_job
from batchwright.records import EpochRecord, Job, Plan, Profile
from batchwright.records.documents import change_job
from batchwright.records.service import Advice, PlanRequest
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
"""Most visits to one measured point."""

PLAN_SECONDS = 60.0
"""Longest that planning may take."""

PATIENCE_SECONDS = 10.0
"""How long a client waits for its turn; most plans take some hundredths of a second."""

MAX_AT_ONCE = 4
"""Plans that are made or wait. Each that waits keeps a thread from all other requests, which have
forty of them."""

_BUSY = "the service is busy with other plans: come again"
_PLACES = BoundedSemaphore(MAX_AT_ONCE)
PLANNING = Lock()
"""Held by who plans: two plans at once take twice as long, and all other requests wait for both."""
_PLANNERS = Workers(most=1)


def planned(request: PlanRequest) -> Plan:
    """The plan that ``batchwright plan`` would write, made in a process beside this one.

    Raises:
        BatchwrightError: As there; what planning cannot cope with is refused, too.
        TooMany: Others are waiting already, or it was not this one's turn for too long.
    """
    with _turn():
        return _PLANNERS.call(PLAN_SECONDS, make_plan, request)


def advised(
    plan: Plan, profile: Profile, epochs: Sequence[EpochRecord], offered: Sequence[Advice]
) -> Offer | None:
    """As `advising.advice_for`, in the process that plans; waits for its turn.

    Raises:
        BatchwrightError: As there, or it took too long.
    """
    from batchwright.service.advising import advice_for  # the planner

    with PLANNING:
        return _PLANNERS.call(PLAN_SECONDS, advice_for, plan, profile, epochs, offered)


def make_plan(request: PlanRequest) -> Plan:
    """`planned`, in this process."""
    from batchwright.planning import planner  # the service itself does without it

    try:
        job = change_job(planning_job(*merge_profiles(request.profiles)), request.keys)
        refuse_costly(job, request.profiles)
        return planner.make_plan(request.profiles, job, runs=request.runs)
    except (ArithmeticError, LookupError, ValueError, AssertionError):
        # All that went in came from the client; no probe measures what makes planning fail so.
        raise Refused("no plan comes of these figures: were they measured by a probe?") from None


@contextmanager
def _turn() -> Iterator[None]:
    """Inside, nobody else plans."""
    if not _PLACES.acquire(blocking=False):
        raise TooMany(_BUSY, 1.0)
    try:
        if not PLANNING.acquire(timeout=PATIENCE_SECONDS):
            raise TooMany(_BUSY, PATIENCE_SECONDS)
        try:
            yield
        finally:
            PLANNING.release()
    finally:
        _PLACES.release()


def refuse_costly(job: Job, profiles: Sequence[Profile]) -> None:
    """Nothing, if planning takes a few seconds at most.

    Raises:
        Refused: A figure is beyond what any training needs; the command line takes it.
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
