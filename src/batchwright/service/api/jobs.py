"""Jobs, which people submit and approve; and agents, which lease them and report on them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response

from batchwright.records import Job, Plan, Profile, Record
from batchwright.records.base import record_text
from batchwright.records.documents import change_job
from batchwright.records.service import (
    AgentInfo,
    AgentIntroduction,
    Identifier,
    JobInfo,
    JobOrders,
    JobProgress,
    JobState,
    JobSubmission,
    Lease,
    LeaseRequest,
    Name,
)
from batchwright.service.access import Reader, Reporter, StoreDep, Submitter, require_owner
from batchwright.service.api.body_route import BodyRoute
from batchwright.service.job_states import LEASE_LOST
from batchwright.service.plan_answers import checked_documents
from batchwright.service.problems import Conflict, NotFound, Refused

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=BodyRoute)
agents_router = APIRouter(prefix="/v1/agents", tags=["agents"], route_class=BodyRoute)

JobId = Annotated[Identifier, Path(description="The job.")]
AgentName = Annotated[Name, Path(description="The agent's name.")]


@router.post("", status_code=201)
def submit_job(store: StoreDep, caller: Submitter, submission: JobSubmission) -> JobInfo:
    """Queue a job. The service checks its keys; its agent checks data and network."""
    job = change_job(Job(), submission.job)
    info = store.jobs.submit(
        submission.name,
        job,
        auto=submission.auto,
        owner=caller.name,
        needs=submission.needs,
        keep_seconds=submission.keep_seconds,
    )
    store.audit.note(caller.name, "job.submit", info.id, submission.name)
    return info


@router.get("")
def list_jobs(
    store: StoreDep,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=500, description="Maximum number of jobs.")] = 50,
    before: Annotated[
        Identifier | None, Query(description="The last job of the previous page.")
    ] = None,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
) -> list[JobInfo]:
    """Jobs, the newest first."""
    return [*store.jobs.list(limit, before, state)]


@router.get("/{job}")
def get_job(store: StoreDep, _caller: Reader, job: JobId) -> JobInfo:
    """A job and its state."""
    return store.jobs.get(job)


@router.get(
    "/{job}/profile",
    response_model=None,
    responses={200: {"model": Profile, "description": "The profile."}},
)
def get_profile(store: StoreDep, _caller: Reader, job: JobId) -> Response:
    """The profile of a job, as the file that `batchwright probe` writes."""
    return _file(store.jobs.profile(job), "profile")


@router.get(
    "/{job}/plan",
    response_model=None,
    responses={200: {"model": Plan, "description": "The plan."}},
)
def get_plan(store: StoreDep, _caller: Reader, job: JobId) -> Response:
    """The plan of a job, as the file that `batchwright plan` writes."""
    return _file(store.jobs.plan(job), "plan")


@router.post("/{job}/approve")
def approve_job(store: StoreDep, caller: Submitter, job: JobId) -> JobInfo:
    """Approve the plan of a job, so that the job is trained."""
    require_owner(caller, store.jobs.owner(job))
    info = store.jobs.approve(job)
    store.audit.note(caller.name, "job.approve", job)
    return info


@router.post("/{job}/cancel")
def cancel_job(store: StoreDep, caller: Submitter, job: JobId) -> JobInfo:
    """Cancel a job; an agent that works on it is told to stop."""
    require_owner(caller, store.jobs.owner(job))
    info = store.jobs.cancel(job)
    store.audit.note(caller.name, "job.cancel", job)
    return info


@router.post("/{job}/progress")
def report_progress(
    store: StoreDep, caller: Reporter, job: JobId, progress: JobProgress
) -> JobOrders:
    """Report on a job that an agent works on; with the lease's key alone it is a heartbeat.

    409 means that the lease was lost: another agent may have the job by now.
    """
    agent = store.jobs.agent(job)
    if agent is not None and not caller.owns(store.agents.owner(agent)):
        # Not 403: most likely the caller's agent had the job until it fell silent.
        raise Conflict(LEASE_LOST)
    documents = progress.profile is not None or progress.plan is not None
    if documents and (asked := store.jobs.asked(job, progress.key)) is not None:
        progress = checked_documents(*asked, progress)
    orders = store.jobs.progress(job, progress)
    if progress.state is not None:
        said = f"{agent or ''}{f': {progress.reason}' if progress.reason else ''}"
        store.audit.note(caller.name, f"job.{progress.state}", job, said)
    return orders


def _file(record: Record | None, what: str) -> Response:
    if record is None:
        raise NotFound(f"this job has no {what} yet")
    return Response(record_text(record), media_type="application/json")


@agents_router.get("")
def list_agents(store: StoreDep, _caller: Reader) -> list[AgentInfo]:
    """All agents, by name."""
    return store.agents.list()


@agents_router.put("/{agent}")
def introduce_agent(
    store: StoreDep, caller: Reporter, agent: AgentName, introduction: AgentIntroduction
) -> AgentInfo:
    """Introduce an agent, with the jobs that it carries out.

    Its name belongs to this token and to the agent's folder. If nobody chose the name, the answer
    may have another one.
    """
    if introduction.name != agent:
        raise Refused("the name in the address and the one in the body differ: send the same")
    info = store.agents.introduce(introduction, caller.name)
    store.audit.note(caller.name, "agent.introduce", info.name, ", ".join(introduction.allow))
    return info


@agents_router.post(
    "/{agent}/lease",
    response_model=None,
    responses={
        200: {"model": Lease, "description": "A job."},
        204: {"description": "There is no job: ask again in a second or two."},
    },
)
def lease_job(
    store: StoreDep,
    caller: Reporter,
    agent: AgentName,
    request: Annotated[LeaseRequest, Body(default_factory=LeaseRequest)],
) -> Response:
    """Ask for a job. Each job is given to one agent."""
    require_owner(caller, store.agents.owner(agent))
    lease = store.jobs.lease(agent, request.session)
    if lease is None:
        return Response(status_code=204)
    store.audit.note(caller.name, "job.lease", lease.job.id, agent)
    return Response(lease.model_dump_json(), media_type="application/json")


@agents_router.post("/{agent}/leave", status_code=204)
def agent_leaves(
    store: StoreDep,
    caller: Reporter,
    agent: AgentName,
    request: Annotated[LeaseRequest, Body(default_factory=LeaseRequest)],
) -> Response:
    """Say that an agent ends, so that its jobs do not wait until it has been silent for long."""
    require_owner(caller, store.agents.owner(agent))
    store.agents.leave(agent, request.session)
    store.audit.note(caller.name, "agent.leave", agent)
    return Response(status_code=204)
