"""Which agent may have which job, and why a job waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache

from sqlalchemy import Connection, RowMapping, select

from batchwright.records import Job
from batchwright.records.agent_rules import DEFAULTS, Rules, refusal, rules_of
from batchwright.service.database.tables import agents, jobs
from batchwright.service.settings import Settings
from batchwright.service.store.job_rows import standing_of, waiting_jobs
from batchwright.service.store.part import Clock

_LONGEST_KNOWN = 8000
"""Characters of a job that is kept in memory for agents that ask; most have some 2,000."""


class Matching:
    """Compares what jobs ask for with what the agents that are there carry out."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock

    def fitting(self, connection: Connection, agent: str, allow: str) -> Iterator[str]:
        """Jobs that an agent may have now, those first that it gets first."""
        rules = _rules(allow)
        elsewhere = {
            name: _rules(texts)
            for name, (texts, busy) in self._present(connection).items()
            if not busy and name != agent
        }
        for identifier, before, text in connection.execute(waiting_jobs(agent)):
            job = _asked(text)
            theirs = elsewhere.get(before)  # it is left to who had it, where that one may have it
            if not refusal(rules, job) and (theirs is None or refusal(theirs, job)):
                yield identifier

    def waits_for(self, connection: Connection, row: RowMapping) -> str | None:
        """Why no agent that is there has a job that waits for one."""
        if not standing_of(row).leasable:
            return None
        job, present = _asked(row["job"]), self._present(connection)
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

    def _present(self, connection: Connection) -> dict[str, tuple[str, bool]]:
        """Agents that are there: what they carry out, as stored, and whether they have a job."""
        busy = select(jobs.c.agent).where(
            jobs.c.lease_expires.is_not(None), jobs.c.agent.is_not(None)
        )
        there = agents.c.seen > self._clock() - self._settings.lease_seconds
        rows = connection.execute(
            select(agents.c.name, agents.c.allow, agents.c.name.in_(busy))
            .where(there)
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
