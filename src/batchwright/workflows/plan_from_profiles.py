"""A plan from profiles and job keys: what ``batchwright plan`` and the service both call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchwright.planning.merging import merge_profiles
from batchwright.planning.planner import make_plan
from batchwright.planning.validation import planning_job
from batchwright.records import Job, Plan, Profile, RunSummary
from batchwright.records.documents import change_job


def decide(
    profiles: Sequence[Profile],
    keys: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    *,
    runs: Sequence[RunSummary] = (),
) -> Plan:
    """Decide how to train what was measured, for the first profile's job with keys changed.

    Args:
        profiles: At least one; the number of workers is open if they measured several.
        keys: Job keys to change, nested or with dots.
        overrides: ``key=value`` texts, as on the command line; these come last.
        runs: Finished runs of the same task.

    Raises:
        JobError: A key or a value is wrong.
        PlanError: The profiles do not fit the job, or nothing fits the limits.
    """
    job, _ = job_asked(profiles, keys, overrides)
    return make_plan(profiles, job, runs=runs)


def job_asked(
    profiles: Sequence[Profile],
    keys: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> tuple[Job, tuple[Profile, ...]]:
    """The job that is to be planned, and a profile of each kind; arguments as for `decide`."""
    measured = merge_profiles(profiles)
    return change_job(planning_job(*measured), keys, overrides), measured
