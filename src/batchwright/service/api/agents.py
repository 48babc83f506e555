"""Agents: they introduce themselves, and ask for something to do."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from batchwright.records.service import AgentInfo, AgentIntroduction, Lease, Name
from batchwright.service.access import need, own, store_of
from batchwright.service.caller import Caller
from batchwright.service.problems import Refused

router = APIRouter(prefix="/v1/agents", tags=["agents"])

AgentName = Annotated[Name, Path(description="The agent's name.")]
Agent = Annotated[Caller, need("report")]


@router.get("")
def list_agents(request: Request, _caller: Annotated[Caller, need("read")]) -> list[AgentInfo]:
    """All agents, by name."""
    return store_of(request).agents.list()


@router.put("/{agent}")
def introduce_agent(
    request: Request, caller: Agent, agent: AgentName, introduction: AgentIntroduction
) -> AgentInfo:
    """Tell that an agent is there, and what it carries out. Its name belongs to this token."""
    if introduction.name != agent:
        raise Refused("the name in the address and the one in the body differ: send the same")
    store = store_of(request)
    told = store.agents.introduce(introduction, caller.name)
    store.audit.note(caller.name, "agent.introduce", agent, ", ".join(introduction.allow))
    return told


@router.post(
    "/{agent}/lease",
    response_model=None,
    responses={
        200: {"model": Lease, "description": "Something to do."},
        204: {"description": "Nothing to do: ask again in a second or two."},
    },
)
def lease_job(request: Request, caller: Agent, agent: AgentName) -> Response:
    """Ask for something to do. Of several agents that ask, one gets a job."""
    store = store_of(request)
    own(caller, store.agents.owner(agent))
    lease = store.jobs.lease(agent)
    if lease is None:
        return Response(status_code=204)
    store.audit.note(caller.name, "job.lease", lease.job.id, agent)
    return Response(lease.model_dump_json(), media_type="application/json")
