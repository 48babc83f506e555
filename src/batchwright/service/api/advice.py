"""Advice to runs: offered by the service, taken by those that were started with --follow-advice."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from batchwright.records.service import Advice, AdviceTaken
from batchwright.service.access import need, own, store_of
from batchwright.service.api.runs import Reporter, RunId
from batchwright.service.caller import Caller

router = APIRouter(prefix="/v1/runs/{run}/advice", tags=["advice"])


@router.get("")
def list_advice(
    request: Request, caller: Annotated[Caller, need("read", "report")], run: RunId
) -> list[Advice]:
    """All advice to a run, the oldest first. Whoever reports the run may read it, too."""
    store = store_of(request)
    if not caller.may("read"):
        own(caller, store.runs.owner(run))
    return store.advice.list(run)


@router.put("/{number}/taken")
def take_advice(
    request: Request,
    caller: Reporter,
    run: RunId,
    number: Annotated[int, Path(ge=1, le=2**31 - 1, description="Of the advice.")],
    taken: AdviceTaken,
) -> Advice:
    """Tell that a run follows an advice from an epoch on."""
    store = store_of(request)
    own(caller, store.runs.owner(run))
    told = store.advice.taken(run, number, taken.epoch)
    store.audit.note(caller.name, "advice.take", run, f"{number}, from epoch {taken.epoch + 1}")
    return told
