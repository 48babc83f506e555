"""Figures about the service itself."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from batchwright.service.access import need
from batchwright.service.operating.meters import Meters

router = APIRouter(tags=["operation"])


@router.get(
    "/metrics",
    dependencies=[need("read")],
    response_class=Response,
    response_model=None,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(request: Request) -> Response:
    """Requests, their times and the records taken, in Prometheus' text format."""
    meters: Meters = request.app.state.meters
    return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)
