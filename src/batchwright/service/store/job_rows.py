"""Rows of the table of jobs, and the records that are made of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, and_, func, or_, select

from batchwright.records import Plan, Profile, Record
from batchwright.records.service import JobInfo
from batchwright.service.database.tables import jobs
from batchwright.service.job_states import Standing
from batchwright.service.problems import NotFound

DOCUMENTS: dict[str, type[Record]] = {"profile": Profile, "plan": Plan}
"""Columns that hold a whole document; they are read only where they are asked for."""

SHOWN = [
    *(column for column in jobs.c if column.name not in DOCUMENTS),
    jobs.c.profile.is_not(None).label("has_profile"),
    jobs.c.plan.is_not(None).label("has_plan"),
]
"""The other columns, and whether there are documents."""

_FREE = and_(
    jobs.c.lease_expires.is_(None),
    or_(
        jobs.c.state == "queued",
        and_(jobs.c.state == "planned", or_(jobs.c.auto, jobs.c.approved)),
    ),
)
"""As `Standing.leasable`, for a query."""


def job_row(connection: Connection, identifier: str, *, lock: bool = False) -> RowMapping:
    """A job's row; with ``lock`` nobody else changes it in this transaction.

    Raises:
        NotFound: There is no such job.
    """
    wanted = select(*SHOWN).where(jobs.c.id == identifier)
    if lock:
        wanted = wanted.with_for_update()
    row = connection.execute(wanted).mappings().one_or_none()
    if row is None:
        raise missing_job(identifier)
    return row


def locked_row(connection: Connection, identifier: str) -> RowMapping | None:
    """A job's row, locked; `None` if somebody else changes it just now."""
    wanted = select(*SHOWN).where(jobs.c.id == identifier).with_for_update(skip_locked=True)
    return connection.execute(wanted).mappings().one_or_none()


def held_rows(connection: Connection, which: Any, *, skip: bool = False) -> list[RowMapping]:
    """Rows, locked, of the jobs among ``which`` that an agent has.

    Args:
        connection: In a transaction that writes.
        which: A condition.
        skip: Leave out what somebody else changes just now, so that nobody waits in a circle.
    """
    wanted = select(*SHOWN).where(which, jobs.c.lease_expires.is_not(None))
    return list(connection.execute(wanted.with_for_update(skip_locked=skip)).mappings())


def waiting_jobs(agent: str) -> Select[Any]:
    """A query of jobs that may be leased, those that the agent had before first, then by age."""
    own = func.coalesce(jobs.c.agent, "") == agent
    return (
        select(jobs.c.id, jobs.c.agent, jobs.c.job)
        .where(_FREE)
        .order_by(own.desc(), jobs.c.created, jobs.c.id)
    )


def standing_of(row: RowMapping) -> Standing:
    """Where a job stands."""
    return Standing(
        state=row["state"],
        auto=row["auto"],
        approved=row["approved"],
        cancelling=row["cancelling"],
        has_plan=row["has_plan"],
        agent=row["agent"],
        key=row["lease_key"],
        expires=row["lease_expires"],
        attempts=row["attempts"],
        lost=row["lost"],
        error=row["error"],
    )


def columns_of(job: Standing) -> dict[str, Any]:
    """A standing as columns; whether there is a plan, the plan itself says."""
    names = {"key": "lease_key", "expires": "lease_expires"}
    return {
        names.get(name, name): value for name, value in asdict(job).items() if name != "has_plan"
    }


def info_of(row: RowMapping, waiting: str | None = None) -> JobInfo:
    """A job as it is told; ``waiting`` says why nobody has it."""
    return JobInfo(
        id=row["id"],
        name=row["name"],
        state=row["state"],
        auto=row["auto"],
        approved=row["approved"],
        created=row["created"],
        changed=row["changed"],
        job=json.loads(row["job"]),
        run=row["run_id"],
        agent=row["agent"],
        attempts=row["attempts"],
        cancelling=row["cancelling"],
        error=row["error"],
        has_profile=row["has_profile"],
        has_plan=row["has_plan"],
        waiting=waiting,
    )


def missing_job(identifier: str) -> NotFound:
    """What is raised where there is no such job."""
    return NotFound(f"there is no job {identifier[:36]}")
