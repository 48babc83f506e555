"""Profiles that were uploaded, to plan from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from batchwright.records import Profile, Record
from batchwright.records.base import NonNegative
from batchwright.records.service import Identifier, Name
from batchwright.service.access import need, own, store_of
from batchwright.service.caller import Caller

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])

ProfileId = Annotated[Identifier, Path(description="The profile.")]
Reader = Annotated[Caller, need("read")]
Submitter = Annotated[Caller, need("submit")]


class NewProfile(Record):
    """A profile to keep."""

    name: Name
    profile: Profile


class StoredProfile(Record):
    """A profile that is kept, without what is in it."""

    id: Identifier
    name: str
    created: NonNegative


@router.post("", status_code=201)
def add_profile(request: Request, caller: Submitter, new: NewProfile) -> StoredProfile:
    """Keep a profile; it belongs to this token."""
    store = store_of(request)
    identifier = store.profiles.add(new.name, new.profile, caller.name)
    store.audit.note(caller.name, "profile.add", identifier, new.name)
    return StoredProfile(id=identifier, name=new.name, created=store.clock())


@router.get("")
def list_profiles(
    request: Request,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many.")] = 100,
) -> list[StoredProfile]:
    """Kept profiles, newest first."""
    found = store_of(request).profiles.list(limit)
    return [StoredProfile(id=one.id, name=one.name, created=one.created) for one in found]


@router.get("/{profile}")
def get_profile(
    request: Request,
    _caller: Reader,
    profile: ProfileId,
) -> Profile:
    """A kept profile."""
    return store_of(request).profiles.get(profile)


@router.delete("/{profile}", status_code=204)
def delete_profile(request: Request, caller: Submitter, profile: ProfileId) -> Response:
    """Delete a kept profile; plans that came of it stay."""
    store = store_of(request)
    own(caller, store.profiles.owner(profile))
    store.profiles.delete(profile)
    store.audit.note(caller.name, "profile.delete", profile)
    return Response(status_code=204)
