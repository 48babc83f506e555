"""The audit log: who changed what, and when. Heartbeats and batches of records are not in it, as
most requests are such; the introduction and the end of their run are.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import insert, select

from batchwright.service.database.tables import audit
from batchwright.service.store.part import Part


class AuditEntry(NamedTuple):
    """A change that a client asked for."""

    at: float
    """Unix time in seconds."""
    who: str
    action: str
    subject: str
    detail: str


class Audit(Part):
    """The table of the audit log; its rows are never changed, and deleted only when too old."""

    def note(self, who: str, action: str, subject: str, detail: str = "") -> None:
        """Add a row.

        Args:
            who: A token's name, or `browser`, or `operator` for the command line.
            action: What was done, such as `run.end`.
            subject: Identifier of the run, job or other thing that was changed.
            detail: Details, for people.
        """
        text = {"subject": subject[:120], "detail": detail[:2000].replace("\x00", "")}
        self._write(insert(audit).values(at=self._clock(), who=who, action=action, **text))

    def delete_old(self, before: float) -> None:
        """Delete some of the rows from before a moment."""
        self._delete_oldest(audit, audit.c.at, before)

    def list(self, limit: int = 100) -> list[AuditEntry]:
        """The newest rows, newest first."""
        wanted = select(*(audit.c[name] for name in AuditEntry._fields))
        rows = self._read(wanted.order_by(audit.c.id.desc()).limit(limit))
        return [AuditEntry._make(row) for row in rows]
