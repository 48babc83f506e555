"""Records of runs: stored in order and once each; read page by page, or evenly spaced."""

from __future__ import annotations

from asyncio import wrap_future
from concurrent.futures import Future
from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from batchwright.records.service import RecordBatch, RecordPage, RecordsTaken
from batchwright.service.access import Reader, Reporter, StoreDep
from batchwright.service.api.runs import RunId
from batchwright.service.middleware.bodies import body_of, is_json
from batchwright.service.problems import Refused
from batchwright.service.store.lines import read_batch

router = APIRouter(prefix="/v1/runs", tags=["records"])

READERS = 2
"""Threads that parse batches: more of them would only take turns with Python's lock."""

BATCH = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/RecordBatch"}}},
}
"""The body of the request, for the OpenAPI description: the route parses it itself."""


Kind = Annotated[
    str | None,
    Query(
        pattern=r"^[a-z][a-z0-9_-]{0,19}$",
        description="Of this kind: `step`, `epoch`, `round`, `shares`, `note`; else all.",
    ),
]


@router.post("/{run}/records", openapi_extra={"requestBody": BATCH})
async def append_records(
    request: Request, store: StoreDep, caller: Reporter, run: RunId
) -> RecordsTaken:
    """Store records. After the answer they are stored for good; those sent before are skipped.

    A batch that leaves a gap, or that follows other lines than the stored ones, is answered with
    409, whose `next` says which record is wanted.
    """
    if not is_json(request.headers.get("content-type", "application/json")):  # else it is unchecked
        raise Refused("the body must be application/json")
    body = body_of(request.scope)

    def read() -> tuple[RecordBatch, Future[RecordsTaken]]:
        batch = read_batch(body, partial(store.records.data, run))
        return batch, store.records.deliver(run, batch, caller)

    batch, result = await to_thread.run_sync(read, limiter=request.app.state.readers)
    taken = await wrap_future(result)
    request.app.state.meters.records.inc(len(batch.records))
    if any(line.kind == "epoch" for line in batch.records):
        request.app.state.adviser.add(run)
    return taken


@router.get(
    "/{run}/records",
    response_model=None,
    responses={200: {"model": RecordPage, "description": "The records."}},
)
def get_records(
    store: StoreDep,
    _caller: Reader,
    run: RunId,
    kind: Kind = None,
    most: Annotated[
        int | None,
        Query(ge=1, le=5000, description="Maximum number of spaced records, besides the newest."),
    ] = None,
    after: Annotated[
        int, Query(ge=-1, le=2**53, description="Only records after this sequence number.")
    ] = -1,
    limit: Annotated[
        int, Query(ge=1, le=5000, description="Maximum number of records; of long ones fewer come.")
    ] = 1000,
) -> StreamingResponse:
    """Records: with `most` and `kind` evenly spaced ones of the whole run, else page by page."""
    if most is not None and kind is not None:
        stored = store.records.spaced(run, kind, most)
    else:
        stored = store.records.following(run, kind, after, limit)
    return StreamingResponse(stored.pieces(), media_type="application/json")
