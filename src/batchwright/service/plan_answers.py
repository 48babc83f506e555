"""Plans for clients, by the function that the command line calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore

from batchwright.planning.merging import merge_profiles
from batchwright.planning.validation import planning_job
from batchwright.records import Plan
from batchwright.records.documents import change_job
from batchwright.records.service import PlanRequest
from batchwright.service.bounds import PLANNING, refuse_costly
from batchwright.service.problems import Refused, TooMany

log = logging.getLogger("batchwright.service")

PATIENCE_SECONDS = 10.0
"""How long a client waits for its turn; most plans take some hundredths of a second."""

MOST_AT_ONCE = 4
"""Plans that are made or wait. Each that waits keeps a thread from all other requests, which have
forty of them."""

_BUSY = "the service is busy with other plans: come again"
_PLACES = BoundedSemaphore(MOST_AT_ONCE)


def planned(request: PlanRequest) -> Plan:
    """The plan that ``batchwright plan`` would write.

    Raises:
        BatchwrightError: As there; what planning cannot cope with is refused, too.
        TooMany: Others are waiting already, or it was not this one's turn for too long.
    """
    from batchwright.workflows.plan_from_profiles import (
        decide,  # the planner; the service starts before it is there
    )

    try:
        job = change_job(planning_job(*merge_profiles(request.profiles)), request.keys)
        refuse_costly(job, request.profiles)
        with _turn():
            return decide(request.profiles, request.keys, runs=request.runs)
    except (ArithmeticError, LookupError, ValueError, AssertionError) as error:
        # All that went in came from the client; no probe measures what makes planning fail so.
        log.warning("a plan failed", exc_info=error)
        raise Refused("no plan comes of these figures: were they measured by a probe?") from None


@contextmanager
def _turn() -> Iterator[None]:
    """Inside, nobody else plans.

    Raises:
        TooMany: As `planned` says.
    """
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
