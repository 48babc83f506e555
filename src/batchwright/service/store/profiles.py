"""Profiles that were uploaded, to plan from."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from sqlalchemy import delete, insert, select

from batchwright.records import Profile
from batchwright.service.database.tables import profiles
from batchwright.service.problems import Conflict
from batchwright.service.store.part import Part, count, lock_for_insert, missing


class ProfileInfo(NamedTuple):
    """A stored profile, without its measurements."""

    id: str
    name: str
    created: float
    """Unix time in seconds."""
    owner: str | None
    """Name of the token that uploaded it, if that is known."""


class Profiles(Part):
    """The table of profiles."""

    def add(self, name: str, profile: Profile, owner: str | None = None) -> str:
        """Store a profile; returns its identifier.

        Args:
            name: Name of the profile, for people.
            profile: The measurements.
            owner: Name of the token that may delete the profile; `None`: only an admin may.

        Raises:
            Conflict: `Limits.profiles` are stored.
        """
        identifier, most = str(uuid.uuid4()), self._settings.limits.profiles
        info = ProfileInfo(identifier, name, self._clock(), owner)
        with self._database.writing() as connection:
            lock_for_insert(connection, profiles)
            if count(connection, profiles) >= most:
                raise Conflict(f"this service keeps {most} profiles at most: delete some first")
            body = profile.model_dump_json()
            connection.execute(insert(profiles).values(**info._asdict(), body=body))
        return identifier

    def list(self, limit: int = 100) -> list[ProfileInfo]:
        """The newest profiles, newest first."""
        wanted = select(*(profiles.c[name] for name in ProfileInfo._fields))
        newest = (profiles.c.created.desc(), profiles.c.id.desc())
        return [ProfileInfo._make(row) for row in self._read(wanted.order_by(*newest).limit(limit))]

    def get(self, identifier: str) -> Profile:
        """A stored profile."""
        return Profile.model_validate_json(self._value(profiles.c.body, identifier))

    def owner(self, identifier: str) -> str:
        """Name of the token that uploaded a profile; empty if not known, which no token's is."""
        return self._value(profiles.c.owner, identifier) or ""

    def delete_old(self, before: float) -> None:
        """Delete some of the profiles uploaded before a moment."""
        self._delete_oldest(profiles, profiles.c.created, before)

    def delete(self, identifier: str) -> None:
        """Delete a stored profile."""
        if not self._write(delete(profiles).where(profiles.c.id == identifier)):
            raise missing("profile", identifier)
