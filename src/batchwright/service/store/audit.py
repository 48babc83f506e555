"""Who changed what, and when. Heartbeats and batches of records are not noted, being most of all
requests; the run that they belong to is.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import delete, insert, select

from batchwright.service.database.tables import audit
from batchwright.service.store.part import Part, share_of


class AuditEntry(NamedTuple):
    """A write that somebody asked for."""

    at: float
    """Unix time in seconds."""
    who: str
    action: str
    subject: str
    detail: str


class Audit(Part):
    """The table of writes; nothing changes its rows, and time alone deletes them."""

    def note(self, who: str, action: str, subject: str, detail: str = "") -> None:
        """Add a row.

        Args:
            who: A token's name, or `browser`, or `operator` for the command line.
            action: Such as `run.end`.
            subject: What it was done to, such as a run's identifier.
            detail: For people.
        """
        told = {"subject": subject[:120], "detail": detail[:2000].replace("\x00", "")}
        self._write(insert(audit).values(at=self._clock(), who=who, action=action, **told))

    def delete_old(self, before: float) -> None:
        """Delete some of the rows from before a moment."""
        old = select(audit.c.id).where(audit.c.at < before).order_by(audit.c.at)
        with self._database.writing() as connection:
            some = old.limit(share_of(connection, audit)).scalar_subquery()
            connection.execute(delete(audit).where(audit.c.id.in_(some)))

    def list(self, limit: int = 100) -> list[AuditEntry]:
        """The newest rows, newest first."""
        wanted = select(*(audit.c[name] for name in AuditEntry._fields))
        rows = self._read(wanted.order_by(audit.c.id.desc()).limit(limit))
        return [AuditEntry._make(row) for row in rows]
