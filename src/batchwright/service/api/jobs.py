"""Jobs: submitted and approved by people, carried out by agents."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from batchwright.records import Job, Plan, Profile, Record
from batchwright.records.base import record_text
from batchwright.records.documents import change_job
from batchwright.records.service import (
    Identifier,
    JobInfo,
    JobOrders,
    JobProgress,
    JobState,
    JobSubmission,
)
from batchwright.service.access import need, own, store_of
from batchwright.service.caller import Caller
from batchwright.service.problems import Conflict, NotFound

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JobId = Annotated[Identifier, Path(description="The job.")]
Reader = Annotated[Caller, need("read")]
Submitter = Annotated[Caller, need("submit")]


@router.post("", status_code=201)
def submit_job(request: Request, caller: Submitter, submission: JobSubmission) -> JobInfo:
    """Queue a job. Its keys are checked here; data and network are looked at by its agent."""
    store = store_of(request)
    job = change_job(Job(), submission.job)
    told = store.jobs.submit(submission.name, job, auto=submission.auto, owner=caller.name)
    store.audit.note(caller.name, "job.submit", told.id, submission.name)
    return told


@router.get("")
def list_jobs(
    request: Request,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many.")] = 50,
    before: Annotated[
        Identifier | None, Query(description="The last job of the page before.")
    ] = None,
    state: Annotated[JobState | None, Query(description="Only those in this state.")] = None,
) -> list[JobInfo]:
    """Jobs, those submitted last first."""
    return store_of(request).jobs.list(limit, before, state)


@router.get("/{job}")
def get_job(request: Request, _caller: Reader, job: JobId) -> JobInfo:
    """A job and where it stands."""
    return store_of(request).jobs.get(job)


@router.get(
    "/{job}/profile",
    response_model=None,
    responses={200: {"model": Profile, "description": "The profile."}},
)
def get_profile(request: Request, _caller: Reader, job: JobId) -> Response:
    """What was measured for a job, as the file that `batchwright probe` writes."""
    return _file(store_of(request).jobs.profile(job), "profile")


@router.get(
    "/{job}/plan",
    response_model=None,
    responses={200: {"model": Plan, "description": "The plan."}},
)
def get_plan(request: Request, _caller: Reader, job: JobId) -> Response:
    """The plan of a job, as the file that `batchwright plan` writes."""
    return _file(store_of(request).jobs.plan(job), "plan")


@router.post("/{job}/approve")
def approve_job(request: Request, caller: Submitter, job: JobId) -> JobInfo:
    """Let a job be trained by the plan that waits."""
    store = store_of(request)
    own(caller, store.jobs.owner(job))
    told = store.jobs.approve(job)
    store.audit.note(caller.name, "job.approve", job)
    return told


@router.post("/{job}/cancel")
def cancel_job(request: Request, caller: Submitter, job: JobId) -> JobInfo:
    """End a job; an agent that works on it is told to stop."""
    store = store_of(request)
    own(caller, store.jobs.owner(job))
    told = store.jobs.cancel(job)
    store.audit.note(caller.name, "job.cancel", job)
    return told


@router.post("/{job}/progress")
def report_progress(
    request: Request,
    caller: Annotated[Caller, need("report")],
    job: JobId,
    progress: JobProgress,
) -> JobOrders:
    """Tell of a job that an agent works on; with the lease's key alone it is a heartbeat.

    409 means that the lease was lost: another agent may have the job by now.
    """
    store = store_of(request)
    agent = store.jobs.get(job).agent
    if agent is not None and not caller.owns(store.agents.owner(agent)):
        # Most likely it was the caller's until its agent fell silent: 403 would not tell it so.
        raise Conflict("the lease of this job was lost: stop working on it, and lease again")
    orders = store.jobs.progress(job, progress)
    if progress.state is not None:
        store.audit.note(caller.name, f"job.{progress.state}", job, agent or "")
    return orders


def _file(record: Record | None, what: str) -> Response:
    if record is None:
        raise NotFound(f"this job has no {what} yet")
    return Response(record_text(record), media_type="application/json")
