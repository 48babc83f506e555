"""Whether the service lives and may be asked, and what it can be asked."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from sqlalchemy.exc import SQLAlchemyError

from batchwright.errors import BatchwrightError
from batchwright.records import Record
from batchwright.service.access import need, open_to_all, store_of
from batchwright.service.api.openapi import described
from batchwright.service.problems import Unavailable

router = APIRouter(tags=["operation"])


class Health(Record):
    """That it is well; else there is another answer."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", dependencies=[open_to_all()])
async def healthz() -> Health:
    """Whether the process answers. It says nothing of the database."""
    return Health()


@router.get("/readyz", dependencies=[open_to_all()])
def readyz(request: Request) -> Health:
    """Whether the database answers, and is of this version."""
    try:
        store_of(request).check()
    except (SQLAlchemyError, BatchwrightError):
        raise Unavailable("the database does not answer, or is of another version") from None
    return Health()


@router.get("/v1/openapi.json", dependencies=[need("read")], include_in_schema=False)
def openapi(request: Request) -> dict[str, Any]:
    """What can be asked, as an OpenAPI description."""
    return described(request.app)
