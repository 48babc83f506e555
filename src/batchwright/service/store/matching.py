"""Which agent may have which job, and why a job waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache

from sqlalchemy import Connection, RowMapping, select

from batchwright.records import Job
from batchwright.records.agent_rules import DEFAULTS, Rules, refusal, rules_of
from batchwright.service.database.tables import agents, jobs
from batchwright.service.store.job_rows import standing_of, waiting_jobs

_LONGEST_KNOWN = 8000
"""Characters of a job that is kept in memory for agents that ask; most have some 2,000."""


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
