"""Records of runs: taken in order and once each, handed out all or evenly spaced."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from batchwright.records.service import RecordBatch, RecordPage, RecordsTaken
from batchwright.service.access import Reader, Reporter, Stored
from batchwright.service.api.runs import RunId


class QuickRequest(Request):
    """A request whose large body is parsed quickly: pydantic's own parser takes a quarter of the
    time of Python's, and meanwhile nobody else is answered.
    """

    async def json(self) -> Any:
        """The body's value.

        Raises:
            JSONDecodeError: It is no JSON; NaN and infinity are none.
        """
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class QuickRoute(APIRoute):
    """A route that gets its requests as `QuickRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, called with such a request."""
        handle = super().get_route_handler()

        async def quickly(request: Request) -> Response:
            return await handle(QuickRequest(request.scope, request.receive))

        return quickly


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
    request: Request, store: Stored, caller: Reporter, run: RunId, batch: RecordBatch
) -> RecordsTaken:
    """Store records. When this answers they are there for good; what was sent before is skipped.

    A batch that leaves a gap is answered with 409, whose `next` says which record is wanted.
    """
    taken = store.records.append(run, batch, caller)
    request.app.state.meters.records.inc(len(batch.records))
    if any(record.get("kind") == "epoch" for record in batch.records):
        request.app.state.adviser.add(run)
    return taken


@router.get("/{run}/records")
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
) -> RecordPage:
    """Records: with `most` and `kind` evenly spaced ones of the whole run, else page by page."""
    if most is not None and kind is not None:
        return store.records.page(run, kind, most)
    return store.records.after(run, kind, after, limit)
