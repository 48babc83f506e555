"""Records of runs: taken in order and once each, handed out all or evenly spaced."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from batchwright.records.service import RecordBatch, RecordPage, RecordsTaken
from batchwright.service.access import store_of
from batchwright.service.api.quick import QuickRoute
from batchwright.service.api.runs import Reader, Reporter, RunId
from batchwright.service.operating.meters import Meters

router = APIRouter(prefix="/v1/runs", tags=["records"], route_class=QuickRoute)

Kind = Annotated[
    str | None,
    Query(
        pattern=r"^[a-z][a-z0-9_-]{0,19}$",
        description="Of this kind: `step`, `epoch`, `round`, `shares`, `note`; else all.",
    ),
]


@router.post("/{run}/records")
def append_records(
    request: Request, caller: Reporter, run: RunId, batch: RecordBatch
) -> RecordsTaken:
    """Store records. When this answers they are there for good; what was sent before is skipped.

    A batch that leaves a gap is answered with 409, whose `next` says which record is wanted.
    """
    taken = store_of(request).records.append(run, batch, caller)
    meters: Meters = request.app.state.meters
    meters.records.inc(len(batch.records))
    if any(record.get("kind") == "epoch" for record in batch.records):
        request.app.state.adviser.heard(run)
    return taken


@router.get("/{run}/records")
def get_records(
    request: Request,
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
) -> RecordPage:
    """Records: with `most` and `kind` evenly spaced ones of the whole run, else page by page."""
    store = store_of(request)
    if most is not None and kind is not None:
        return store.records.page(run, kind, most)
    return store.records.after(run, kind, after, limit)
