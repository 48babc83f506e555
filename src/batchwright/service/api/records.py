"""Records of runs: taken in order and once each, handed out all or evenly spaced."""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from batchwright.records.service import RecordBatch, RecordPage, RecordsTaken
from batchwright.service.access import Reader, Reporter, Stored
from batchwright.service.api.runs import RunId
from batchwright.service.middleware.bodies import is_json
from batchwright.service.problems import Refused
from batchwright.service.store.lines import read_batch
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/v1/runs", tags=["records"])

BATCH = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/RecordBatch"}}},
}
"""The body of the request, for the description: it is read here, straight from its bytes."""


class Sent(NamedTuple):
    """Records that came, and from whom."""

    batch: RecordBatch
    caller: Caller


async def sent_in(request: Request, store: Stored, caller: Reporter, run: RunId) -> Sent:
    """The records that a request brings; who may not report is told so before they are read.

    Raises:
        Refused: They are none, or no JSON.
    """
    if not is_json(request.headers.get("content-type", "application/json")):  # else it is unchecked
        raise Refused("the body must be application/json")
    body = await request.body()
    batch = await run_in_threadpool(read_batch, body, partial(store.records.data, run))
    return Sent(batch, caller)


Kind = Annotated[
    str | None,
    Query(
        pattern=r"^[a-z][a-z0-9_-]{0,19}$",
        description="Of this kind: `step`, `epoch`, `round`, `shares`, `note`; else all.",
    ),
]


@router.post("/{run}/records", openapi_extra={"requestBody": BATCH})
def append_records(
    request: Request,
    store: Stored,
    run: RunId,
    sent: Annotated[Sent, Depends(sent_in)],
) -> RecordsTaken:
    """Store records. When this answers they are there for good; what was sent before is skipped.

    A batch that leaves a gap, or that follows on other lines than those that are stored, is
    answered with 409, whose `next` says which record is wanted.
    """
    taken = store.records.append(run, sent.batch, sent.caller)
    request.app.state.meters.records.inc(len(sent.batch.records))
    if any(line.kind == "epoch" for line in sent.batch.records):
        request.app.state.adviser.add(run)
    return taken


@router.get(
    "/{run}/records",
    response_model=None,
    responses={200: {"model": RecordPage, "description": "The records."}},
)
def get_records(
    store: Stored,
    _caller: Reader,
    run: RunId,
    kind: Kind = None,
    most: Annotated[
        int | None,
        Query(ge=1, le=5000, description="Evenly spaced ones, so many at most and the newest."),
    ] = None,
    after: Annotated[
        int, Query(ge=-1, le=2**53, description="All that come after this sequence number.")
    ] = -1,
    limit: Annotated[
        int, Query(ge=1, le=5000, description="At most so many of them, fewer where they are long.")
    ] = 1000,
) -> StreamingResponse:
    """Records: with `most` and `kind` evenly spaced ones of the whole run, else page by page."""
    if most is not None and kind is not None:
        found = store.records.spaced(run, kind, most)
    else:
        found = store.records.following(run, kind, after, limit)
    return StreamingResponse(found.pieces(), media_type="application/json")
