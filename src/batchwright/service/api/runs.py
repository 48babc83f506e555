"""Runs: introduced and ended by whoever carries them out, read by everybody else; and advice to
them, taken by those that were started with --follow-advice.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from batchwright.records import Plan, Profile, RunSummary
from batchwright.records.service import (
    Advice,
    AdviceTaken,
    Identifier,
    RecordsTaken,
    RunEnd,
    RunInfo,
    RunIntroduction,
    RunState,
)
from batchwright.service.access import Reader, Reporter, StoreDep, need, require_owner
from batchwright.service.api.body_route import BodyRoute
from batchwright.service.problems import NotFound
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=BodyRoute)
advice_router = APIRouter(prefix="/v1/runs/{run}/advice", tags=["advice"], route_class=BodyRoute)

RunId = Annotated[Identifier, Path(description="The run: a UUID that its reporter has chosen.")]


@router.get("")
def list_runs(
    store: StoreDep,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=500, description="Maximum number of runs.")] = 50,
    before: Annotated[
        Identifier | None, Query(description="The last run of the previous page.")
    ] = None,
    state: Annotated[RunState | None, Query(description="Only runs in this state.")] = None,
    query: Annotated[
        str,
        Query(
            max_length=120,
            pattern="^[^\x00]*$",
            description="Only runs with this text in name, network, data or method.",
        ),
    ] = "",
) -> list[RunInfo]:
    """Runs, the newest first."""
    return store.runs.list(limit, before, state, query)


@router.put("/{run}")
def introduce_run(
    store: StoreDep, caller: Reporter, run: RunId, introduction: RunIntroduction
) -> RunInfo:
    """Introduce a run, or announce that a stopped one goes on. The run belongs to this token."""
    info = store.runs.introduce(run, introduction, caller.name)
    store.audit.note(caller.name, "run.introduce", run, introduction.name)
    return info


@router.get("/{run}")
def get_run(store: StoreDep, _caller: Reader, run: RunId) -> RunInfo:
    """A run, without its records."""
    return store.runs.get(run)


@router.put("/{run}/alive")
def alive(store: StoreDep, caller: Reporter, run: RunId) -> RecordsTaken:
    """Report that a run goes on while it has no new lines."""
    require_owner(caller, store.runs.owner(run))
    return store.runs.alive(run)


@router.put("/{run}/end")
def end_run(store: StoreDep, caller: Reporter, run: RunId, end: RunEnd) -> RunInfo:
    """Report how a run ended."""
    require_owner(caller, store.runs.owner(run))
    info = store.runs.end(run, end)
    store.audit.note(caller.name, "run.end", run, end.outcome)
    return info


@router.delete("/{run}", status_code=204)
def delete_run(request: Request, store: StoreDep, caller: Reporter, run: RunId) -> Response:
    """Delete a run with its records and advice: after the answer nobody finds it any more."""
    require_owner(caller, store.runs.owner(run))
    store.runs.delete(run)
    request.app.state.remover.soon()
    store.audit.note(caller.name, "run.delete", run)
    return Response(status_code=204)


@router.get("/{run}/plan")
def get_plan(store: StoreDep, _caller: Reader, run: RunId) -> Plan:
    """The plan that a run follows now."""
    return store.runs.plan(run)


@router.get("/{run}/profile")
def get_profile(store: StoreDep, _caller: Reader, run: RunId) -> Profile:
    """The profile that a run's plan was made from."""
    profile = store.runs.profile(run)
    if profile is None:
        raise NotFound("this run was introduced without a profile")
    return profile


@router.get("/{run}/summary")
def get_summary(store: StoreDep, _caller: Reader, run: RunId) -> RunSummary:
    """The summary of a finished run."""
    summary = store.runs.summary(run)
    if summary is None:
        raise NotFound("this run has no summary: it has not finished")
    return summary


@advice_router.get("")
def list_advice(
    store: StoreDep, caller: Annotated[Caller, need("read", "report")], run: RunId
) -> list[Advice]:
    """All advice to a run, the oldest first. Whoever reports the run may read it, too."""
    if not caller.may("read"):
        require_owner(caller, store.runs.owner(run))
    return store.advice.list(run)


@advice_router.put("/{number}/taken")
def take_advice(
    store: StoreDep,
    caller: Reporter,
    run: RunId,
    number: Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of the advice.")],
    taken: AdviceTaken,
) -> Advice:
    """Report that a run follows advice from an epoch on."""
    require_owner(caller, store.runs.owner(run))
    advice = store.advice.taken(run, number, taken.epoch)
    store.audit.note(caller.name, "advice.take", run, f"{number}, from epoch {taken.epoch + 1}")
    return advice
