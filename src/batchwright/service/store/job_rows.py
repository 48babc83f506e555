"""Rows of the table of jobs, and the records that are made of them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, and_, func, or_, select

from batchwright.records.service import JobInfo
from batchwright.service.database.tables import jobs
from batchwright.service.job_states import Standing
from batchwright.service.store.part import missing

DOCUMENTS = ("profile", "plan")
"""Columns that hold a whole document; they are read only where they are asked for."""

SHOWN = [
    *(column for column in jobs.c if column.name not in DOCUMENTS),
    jobs.c.profile.is_not(None).label("has_profile"),
    jobs.c.plan.is_not(None).label("has_plan"),
]
"""The other columns, and whether there are documents."""

_COLUMNS = {"key": "lease_key", "expires": "lease_expires"}
"""Of what has another name in a `Standing`."""

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
    found = connection.execute(wanted.with_for_update() if lock else wanted)
    row = found.mappings().one_or_none()
    if row is None:
        raise missing("job", identifier)
    return row


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
    return Standing(**{one.name: row[_COLUMNS.get(one.name, one.name)] for one in fields(Standing)})


def columns_of(job: Standing) -> dict[str, Any]:
    """A standing as columns; whether there is a plan, the plan itself says."""
    told = {_COLUMNS.get(name, name): value for name, value in asdict(job).items()}
    del told["has_plan"]
    return told


def info_of(row: RowMapping, waiting: str | None = None) -> JobInfo:
    """A job as it is told; ``waiting`` says why nobody has it."""
    changed = {"job": json.loads(row["job"]), "run": row["run_id"], "waiting": waiting}
    return JobInfo(**{name: row[name] for name in JobInfo.model_fields.keys() - changed}, **changed)
