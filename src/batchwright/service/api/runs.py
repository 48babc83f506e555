"""Runs: introduced and ended by whoever carries them out, read by everybody else."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from batchwright.records import Plan, Profile, RunSummary
from batchwright.records.service import (
    Identifier,
    RecordsTaken,
    RunEnd,
    RunInfo,
    RunIntroduction,
    RunState,
)
from batchwright.service.access import need, own, store_of
from batchwright.service.caller import Caller
from batchwright.service.problems import NotFound

router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[
    Identifier, Path(description="The run: a UUID that whoever carries it out has chosen.")
]
Reader = Annotated[Caller, need("read")]
Reporter = Annotated[Caller, need("report")]


@router.get("")
def list_runs(
    request: Request,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many.")] = 50,
    before: Annotated[
        Identifier | None, Query(description="The last run of the page before.")
    ] = None,
    state: Annotated[RunState | None, Query(description="Only those in this state.")] = None,
    query: Annotated[
        str,
        Query(
            max_length=120,
            pattern="^[^\x00]*$",
            description="Only those with this in name, network, data or method.",
        ),
    ] = "",
) -> list[RunInfo]:
    """Runs, those introduced last first."""
    return store_of(request).runs.list(limit, before, state, query)


@router.put("/{run}")
def introduce_run(
    request: Request, caller: Reporter, run: RunId, introduction: RunIntroduction
) -> RunInfo:
    """Introduce a run, or tell that one which had stopped goes on. It belongs to this token."""
    store = store_of(request)
    told = store.runs.introduce(run, introduction, caller.name)
    store.audit.note(caller.name, "run.introduce", run, introduction.name)
    return told


@router.get("/{run}")
def get_run(request: Request, _caller: Reader, run: RunId) -> RunInfo:
    """A run, without its records."""
    return store_of(request).runs.get(run)


@router.put("/{run}/alive")
def alive(request: Request, caller: Reporter, run: RunId) -> RecordsTaken:
    """Tell that a run goes on while it has nothing to report."""
    store = store_of(request)
    own(caller, store.runs.owner(run))
    return store.runs.alive(run)


@router.put("/{run}/end")
def end_run(request: Request, caller: Reporter, run: RunId, end: RunEnd) -> RunInfo:
    """Tell how a run ended."""
    store = store_of(request)
    own(caller, store.runs.owner(run))
    told = store.runs.end(run, end)
    store.audit.note(caller.name, "run.end", run, end.outcome)
    return told


@router.delete("/{run}", status_code=204)
def delete_run(request: Request, caller: Reporter, run: RunId) -> Response:
    """Delete a run with its records and advice: nobody finds it any more when this answers."""
    store = store_of(request)
    own(caller, store.runs.owner(run))
    store.runs.delete(run)
    request.app.state.remover.soon()
    store.audit.note(caller.name, "run.delete", run)
    return Response(status_code=204)


@router.get("/{run}/plan")
def get_plan(request: Request, _caller: Reader, run: RunId) -> Plan:
    """The plan that a run follows now."""
    return store_of(request).runs.plan(run)


@router.get("/{run}/profile")
def get_profile(request: Request, _caller: Reader, run: RunId) -> Profile:
    """What a run's plan was made from."""
    found = store_of(request).runs.profile(run)
    if found is None:
        raise NotFound("this run was introduced without a profile")
    return found


@router.get("/{run}/summary")
def get_summary(request: Request, _caller: Reader, run: RunId) -> RunSummary:
    """The summary of a finished run."""
    found = store_of(request).runs.summary(run)
    if found is None:
        raise NotFound("this run has no summary: it has not finished")
    return found
