"""Rows of the table of jobs, and the records that are made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, and_, func, or_, select

from batchwright.records import Job
from batchwright.records.agent_rules import DEFAULTS, Rules, refusal, rules_of
from batchwright.records.service import JobInfo
from batchwright.service.database.tables import agents, jobs
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

_LONGEST_KNOWN = 8000
"""Characters of a job that is kept in memory for agents that ask; most have some 2,000."""

_COLUMNS = {"key": "lease_key", "expires": "lease_expires"}
"""Of what has another name in a `Standing`."""

FREE = and_(
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
        .where(FREE)
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


# -------------------------------------------- which agent may have which job, and why a job waits


def fitting(connection: Connection, agent: str, allow: str, since: float) -> Iterator[str]:
    """Jobs that an agent may have now, those first that it gets first.

    Args:
        connection: In a transaction.
        agent: Its name.
        allow: What it carries out, as stored.
        since: Agents heard of after this are there, in seconds of Unix time.
    """
    rules = _rules(allow)
    elsewhere = {
        name: _rules(texts)
        for name, (texts, busy) in _present(connection, since).items()
        if not busy and name != agent
    }
    for identifier, before, text in connection.execute(waiting_jobs(agent)):
        job = _asked(text)
        theirs = elsewhere.get(before)  # it is left to who had it, where that one may have it
        if not refusal(rules, job) and (theirs is None or refusal(theirs, job)):
            yield identifier


def waits_for(connection: Connection, row: RowMapping, since: float) -> str | None:
    """Why no agent that is there, as for `fitting`, has a job that waits for one."""
    if not standing_of(row).leasable:
        return None
    job, present = _asked(row["job"]), _present(connection, since)
    if not present:
        return "no agent is there; start `batchwright agent` on the machine that is to train"
    refused = {name: refusal(_rules(allow), job) for name, (allow, _) in present.items()}
    if all(refused.values()):
        many = f"the {len(refused)} agents that are there do"
        who = "the agent that is there does" if len(refused) == 1 else many
        return f"{who} not carry it out: {next(iter(refused.values()))}"
    if all(busy for name, (_, busy) in present.items() if not refused[name]):
        return "the agents that carry it out have another job"
    return None


def _present(connection: Connection, since: float) -> dict[str, tuple[str, bool]]:
    """Agents that are there: what they carry out, as stored, and whether they have a job."""
    busy = select(jobs.c.agent).where(jobs.c.lease_expires.is_not(None), jobs.c.agent.is_not(None))
    rows = connection.execute(
        select(agents.c.name, agents.c.allow, agents.c.name.in_(busy))
        .where(agents.c.seen > since)
        .order_by(agents.c.name)
    )
    return {name: (allow, bool(has_job)) for name, allow, has_job in rows}


@lru_cache(maxsize=500)
def _rules(texts: str) -> Rules:
    """What an agent carries out, from what is stored; many agents ask every other second."""
    return rules_of(json.loads(texts))


def _asked(text: str) -> Job:
    """What rules look at of a job, from what is stored, which never changes."""
    return _job_of(text) if len(text) <= _LONGEST_KNOWN else _job_of.__wrapped__(text)


@lru_cache(maxsize=1000)
def _job_of(text: str) -> Job:
    values = json.loads(text)  # checked when it was submitted
    return Job.model_construct(**{key: values[key] for key in DEFAULTS})
