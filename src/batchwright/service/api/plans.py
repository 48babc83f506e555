"""Plans on demand, from profiles and job keys; and stored profiles to plan from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from batchwright.records import Plan, Profile, Record
from batchwright.records.base import NonNegative, record_text
from batchwright.records.service import Identifier, NewProfile, PlanRequest
from batchwright.service.access import Reader, StoreDep, Submitter, require_owner
from batchwright.service.api.body_route import BodyRoute
from batchwright.service.plan_answers import planned

router = APIRouter(prefix="/v1/plans", tags=["plans"], route_class=BodyRoute)
profiles_router = APIRouter(prefix="/v1/profiles", tags=["profiles"], route_class=BodyRoute)

ProfileId = Annotated[Identifier, Path(description="The profile.")]


class StoredProfile(Record):
    """A stored profile, without its measurements."""

    id: Identifier
    name: str
    created: NonNegative


@router.post("", response_model=None, responses={200: {"model": Plan, "description": "The plan."}})
def make_plan(_caller: Reader, request: PlanRequest) -> Response:
    """Make a plan. The answer is byte for byte the file that `batchwright plan` writes."""
    return Response(record_text(planned(request)), media_type="application/json")


@profiles_router.post("", status_code=201)
def add_profile(store: StoreDep, caller: Submitter, new: NewProfile) -> StoredProfile:
    """Store a profile; it belongs to this token."""
    identifier = store.profiles.add(new.name, new.profile, caller.name)
    store.audit.note(caller.name, "profile.add", identifier, new.name)
    return StoredProfile(id=identifier, name=new.name, created=store.clock())


@profiles_router.get("")
def list_profiles(
    store: StoreDep,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=500, description="Maximum number of profiles.")] = 100,
) -> list[StoredProfile]:
    """Stored profiles, the newest first."""
    infos = store.profiles.list(limit)
    return [StoredProfile(id=info.id, name=info.name, created=info.created) for info in infos]


@profiles_router.get("/{profile}")
def get_profile(store: StoreDep, _caller: Reader, profile: ProfileId) -> Profile:
    """A stored profile."""
    return store.profiles.get(profile)


@profiles_router.delete("/{profile}", status_code=204)
def delete_profile(store: StoreDep, caller: Submitter, profile: ProfileId) -> Response:
    """Delete a stored profile; plans that were made from it stay."""
    require_owner(caller, store.profiles.owner(profile))
    store.profiles.delete(profile)
    store.audit.note(caller.name, "profile.delete", profile)
    return Response(status_code=204)
