"""What a plan may cost the service: figures from clients that its time and memory grow with."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from batchwright.records import Job, Profile
from batchwright.service.problems import Refused

PLANNING = Lock()
"""Held by who plans: two plans at once take twice as long, and all other requests wait for both."""

MOST_WORKERS = 4096
MOST_RESOLUTIONS = 32
MOST_KINDS = 32
MOST_POINTS = 2000
"""Measured points of all profiles; a thorough probe has some fifty."""
MOST_VISITS = 200
"""Of one measured point."""


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
        ("workers", workers, MOST_WORKERS),
        ("resolutions", 0 if job.resolutions == "auto" else len(job.resolutions), MOST_RESOLUTIONS),
        ("kinds of workers", len(job.goal.kinds), MOST_KINDS),
        ("measured points", len(points), MOST_POINTS),
        ("visits to a point", max(visits, default=0), MOST_VISITS),
    ):
        if found > most:
            raise Refused(
                f"{found:,} {name}: the service plans for {most:,} at most; "
                "`batchwright plan` takes more"
            )
