"""Profiles that were uploaded, to plan from."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from sqlalchemy import delete, func, insert, select

from batchwright.records import Profile
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import profiles
from batchwright.service.problems import Conflict, NotFound
from batchwright.service.settings import DAY, Settings
from batchwright.service.store.clock import Clock


class ProfileInfo(NamedTuple):
    """A stored profile, without what is in it."""

    id: str
    name: str
    created: float
    """Unix time in seconds."""
    owner: str | None
    """Name of the token that uploaded it, if that is known."""


class Profiles:
    """The table of profiles."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

    def add(self, name: str, profile: Profile, owner: str | None = None) -> str:
        """Store a profile; returns its identifier.

        Args:
            name: For people.
            profile: What was measured.
            owner: Name of the token that may delete it; `None`: an admin alone may.

        Raises:
            Conflict: There are too many.
        """
        identifier, most = str(uuid.uuid4()), self._settings.limits.profiles
        with self._database.writing() as connection:
            count = select(func.count()).select_from(profiles)
            if (connection.execute(count).scalar() or 0) >= most:
                raise Conflict(f"this service keeps {most} profiles at most: delete some first")
            connection.execute(
                insert(profiles).values(
                    id=identifier,
                    name=name,
                    created=self._clock(),
                    body=profile.model_dump_json(),
                    owner=owner,
                )
            )
        return identifier

    def list(self, limit: int = 100) -> list[ProfileInfo]:
        """The newest profiles, newest first."""
        columns = (profiles.c.id, profiles.c.name, profiles.c.created, profiles.c.owner)
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
        return Profile.model_validate_json(self._column(identifier, "body"))

    def owner(self, identifier: str) -> str:
        """Name of the token that uploaded a profile; empty, which no token is, if nobody knows.

        Raises:
            NotFound: There is none with this identifier.
        """
        return self._column(identifier, "owner") or ""

    def _column(self, identifier: str, name: str) -> Any:
        with self._database.reading() as connection:
            wanted = select(profiles.c[name]).where(profiles.c.id == identifier)
            found = connection.execute(wanted).one_or_none()
        if found is None:
            raise NotFound(f"there is no profile {identifier}")
        return found[0]

    def delete_old(self) -> None:
        """Delete profiles uploaded longer ago than `Settings.retention_days`."""
        days = self._settings.retention_days
        if days is None:
            return
        with self._database.writing() as connection:
            old = profiles.c.created < self._clock() - days * DAY
            connection.execute(delete(profiles).where(old))

    def delete(self, identifier: str) -> None:
        """Delete a stored profile.

        Raises:
            NotFound: There is none with this identifier.
        """
        with self._database.writing() as connection:
            done = connection.execute(delete(profiles).where(profiles.c.id == identifier))
            if not done.rowcount:
                raise NotFound(f"there is no profile {identifier}")
