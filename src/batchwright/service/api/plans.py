"""Plans on demand: profiles and a goal in, a plan with its reasons out."""

from __future__ import annotations

from fastapi import APIRouter, Response

from batchwright.records import Plan
from batchwright.records.base import record_text
from batchwright.records.service import PlanRequest
from batchwright.service.access import need
from batchwright.service.plan_answers import planned

router = APIRouter(prefix="/v1/plans", tags=["plans"])


@router.post(
    "",
    dependencies=[need("read")],
    response_model=None,
    responses={200: {"model": Plan, "description": "The plan."}},
)
def make_plan(request: PlanRequest) -> Response:
    """Plan. The answer is byte for byte the file that `batchwright plan` writes."""
    return Response(record_text(planned(request)), media_type="application/json")
