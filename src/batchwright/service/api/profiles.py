"""Profiles that were uploaded, to plan from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from batchwright.records import Profile, Record
from batchwright.records.base import NonNegative
from batchwright.records.service import Identifier, Name
from batchwright.service.access import need, store_of
from batchwright.service.caller import Caller

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])

Reader = Annotated[Caller, need("read")]


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
def add_profile(
    request: Request, caller: Annotated[Caller, need("submit")], new: NewProfile
) -> StoredProfile:
    """Keep a profile."""
    store = store_of(request)
    identifier = store.profiles.add(new.name, new.profile)
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
    profile: Annotated[Identifier, Path(description="The profile.")],
) -> Profile:
    """A kept profile."""
    return store_of(request).profiles.get(profile)
