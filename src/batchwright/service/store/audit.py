"""Who changed what, and when. Heartbeats and batches of records are not noted, being most of all
requests; the run that they belong to is.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import delete, insert, select

from batchwright.service.database.engine import Database
from batchwright.service.database.tables import audit
from batchwright.service.settings import DAY, Settings
from batchwright.service.store.clock import Clock


class AuditEntry(NamedTuple):
    """One write."""

    at: float
    """Unix time in seconds."""
    who: str
    action: str
    subject: str
    detail: str


class Audit:
    """The table of writes; nothing changes its rows, and time alone deletes them."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

    def note(self, who: str, action: str, subject: str, detail: str = "") -> None:
        """Add a row.

        Args:
            who: A token's name, or `browser`, or `operator` for the command line.
            action: Such as `run.end`.
            subject: What it was done to, such as a run's identifier.
            detail: For people.
        """
        with self._database.writing() as connection:
            connection.execute(
                insert(audit).values(
                    at=self._clock(),
                    who=who,
                    action=action,
                    subject=subject[:120],
                    detail=detail[:2000].replace("\x00", ""),
                )
            )

    def delete_old(self) -> None:
        """Delete rows older than `Settings.retention_days`."""
        days = self._settings.retention_days
        if days is None:
            return
        with self._database.writing() as connection:
            connection.execute(delete(audit).where(audit.c.at < self._clock() - days * DAY))

    def list(self, limit: int = 100) -> list[AuditEntry]:
        """The newest rows, newest first."""
        with self._database.reading() as connection:
            rows = connection.execute(select(audit).order_by(audit.c.id.desc()).limit(limit)).all()
        return [AuditEntry(row.at, row.who, row.action, row.subject, row.detail) for row in rows]
