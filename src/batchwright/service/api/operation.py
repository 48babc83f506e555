"""Health, metrics and the OpenAPI description, for operators and programs."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from batchwright.errors import BatchwrightError
from batchwright.records import Record
from batchwright.records.service import RecordBatch
from batchwright.service.access import StoreDep, need, open_to_all
from batchwright.service.problems import Unavailable

router = APIRouter(tags=["operation"])


class Health(Record):
    """Answer of a service that is well; any other gives an error."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", dependencies=[open_to_all()])
async def healthz() -> Health:
    """Whether the process answers, whatever the state of the database."""
    return Health()


@router.get("/readyz", dependencies=[open_to_all()])
def readyz(store: StoreDep) -> Health:
    """Whether the database answers, is of this version, and takes writes."""
    try:
        store.check()
    except (SQLAlchemyError, BatchwrightError):
        raise Unavailable("the database does not answer, or is of another version") from None
    try:
        store.database.check_writes()
    except SQLAlchemyError:
        raise Unavailable(
            "the database takes no writes: is its disk full? What is stored can be read"
        ) from None
    return Health()


@router.get("/v1/openapi.json", dependencies=[need("read")], include_in_schema=False)
def openapi(request: Request) -> dict[str, Any]:
    """The OpenAPI description of all routes for programs."""
    description: dict[str, Any] = request.app.openapi()  # made once
    schemas = description["components"]["schemas"]
    if "RecordBatch" not in schemas:  # its route reads the body by itself
        batch = RecordBatch.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(batch.pop("$defs") | {"RecordBatch": batch})
    return description


@router.get(
    "/metrics",
    dependencies=[need("read")],
    response_class=Response,
    response_model=None,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(request: Request) -> Response:
    """Metrics, in Prometheus' text format."""
    registry = request.app.state.meters.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
