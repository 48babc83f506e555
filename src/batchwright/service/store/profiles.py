"""Profiles that were uploaded, to plan from."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from sqlalchemy import delete, insert, select

from batchwright.records import Profile
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import profiles
from batchwright.service.problems import NotFound
from batchwright.service.settings import Settings
from batchwright.service.store.clock import Clock


class ProfileInfo(NamedTuple):
    """A stored profile, without what is in it."""

    id: str
    name: str
    created: float
    """Unix time in seconds."""


class Profiles:
    """The table of profiles."""

    def __init__(self, database: Database, _settings: Settings, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def add(self, name: str, profile: Profile) -> str:
        """Store a profile; returns its identifier."""
        identifier = str(uuid.uuid4())
        with self._database.writing() as connection:
            connection.execute(
                insert(profiles).values(
                    id=identifier,
                    name=name,
                    created=self._clock(),
                    body=profile.model_dump_json(),
                )
            )
        return identifier

    def list(self, limit: int = 100) -> list[ProfileInfo]:
        """The newest profiles, newest first."""
        columns = (profiles.c.id, profiles.c.name, profiles.c.created)
        with self._database.reading() as connection:
            rows = connection.execute(
                select(*columns)
                .order_by(profiles.c.created.desc(), profiles.c.id.desc())
                .limit(limit)
            ).all()
        return [ProfileInfo(*row) for row in rows]

    def get(self, identifier: str) -> Profile:
        """A stored profile.

        Raises:
            NotFound: There is none with this identifier.
        """
        with self._database.reading() as connection:
            body = connection.execute(
                select(profiles.c.body).where(profiles.c.id == identifier)
            ).scalar()
        if body is None:
            raise NotFound(f"there is no profile {identifier}")
        return Profile.model_validate_json(body)

    def delete(self, identifier: str) -> None:
        """Delete a stored profile.

        Raises:
            NotFound: There is none with this identifier.
        """
        with self._database.writing() as connection:
            done = connection.execute(delete(profiles).where(profiles.c.id == identifier))
            if not done.rowcount:
                raise NotFound(f"there is no profile {identifier}")
