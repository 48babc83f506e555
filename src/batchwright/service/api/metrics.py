"""Figures about the service itself."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from batchwright.service.access import need
from batchwright.service.meters import Meters

router = APIRouter(tags=["operation"])


@router.get(
    "/metrics", dependencies=[need("read")], response_class=PlainTextResponse, response_model=None
)
def metrics(request: Request) -> PlainTextResponse:
    """Requests, their times and the records taken, in Prometheus' text format."""
    meters: Meters = request.app.state.meters
    return PlainTextResponse(meters.text(), media_type=CONTENT_TYPE_LATEST)
