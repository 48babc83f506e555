"""Rows of the table of jobs, records made of them, and which agent may have which job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, func, or_, select

from batchwright.records import Job
from batchwright.records.agent_rules import (
    DEFAULTS,
    Needs,
    Offer,
    Rules,
    lacking,
    refusal,
    rules_of,
)
from batchwright.records.service import JobInfo
from batchwright.records.text.formatting import duration
from batchwright.service.database.tables import agents, jobs, refusals
from batchwright.service.job_states import Standing
from batchwright.service.store.part import missing

DOCUMENTS = ("profile", "plan")
"""Columns that hold a whole document; few queries read them."""

INFO_COLUMNS = [
    *(column for column in jobs.c if column.name not in DOCUMENTS),
    jobs.c.profile.is_not(None).label("has_profile"),
    jobs.c.plan.is_not(None).label("has_plan"),
]
"""The columns of a `JobInfo`: all others, and whether there are documents."""

STANDING_COLUMNS = [
    column for column in INFO_COLUMNS if column.name not in ("job", "needs", "error")
]
"""The columns of a `Standing`, and other short ones."""

LIVE = jobs.c.ended.is_(None)
"""Condition: a job has not ended."""
HELD = LIVE & jobs.c.lease_expires.is_not(None)
"""Condition: an agent has a job; `Standing.held`."""

FREE = LIVE & and_(
    jobs.c.lease_expires.is_(None),
    or_(
        jobs.c.state == "queued",
        and_(jobs.c.state == "planned", or_(jobs.c.auto, jobs.c.approved)),
    ),
)
"""Condition: no agent has a job and one may; `Standing.leasable`."""

MAX_NAMED = 5
"""Agents that a line names."""

_LONGEST_KNOWN = 8000
"""Maximum characters of a job whose requirements stay in memory; most jobs have some 2,000."""

_COLUMNS = {"key": "lease_key", "expires": "lease_expires"}
"""Fields of `Standing` whose column has another name."""


def job_row(connection: Connection, identifier: str, *, lock: bool = False) -> RowMapping:
    """A job's row; with ``lock`` it is locked until the transaction ends.

    Raises:
        NotFound: There is no such job.
    """
    wanted = select(*INFO_COLUMNS).where(jobs.c.id == identifier)
    result = connection.execute(wanted.with_for_update() if lock else wanted)
    row = result.mappings().one_or_none()
    if row is None:
        raise missing("job", identifier)
    return row


def held_rows(connection: Connection, which: Any, *, skip: bool = False) -> list[RowMapping]:
    """Locked rows of the jobs that an agent has.

    Args:
        connection: Connection in a transaction that writes.
        which: Condition for the jobs.
        skip: Whether to leave out rows that another transaction has locked, to avoid a deadlock.
    """
    wanted = select(*INFO_COLUMNS).where(which, HELD)
    return list(connection.execute(wanted.with_for_update(skip_locked=skip)).mappings())


def report_mark(row: RowMapping) -> tuple[Any, ...]:
    """Values of which one changes with each report of a job's agent, for `LeaseAges`."""
    return row["lease_key"], row["lease_expires"], row["kept"]


def standing_of(row: RowMapping) -> Standing:
    """The standing of a job; without its error where the row lacks that column."""
    names = {field.name: _COLUMNS.get(field.name, field.name) for field in fields(Standing)}
    return Standing(**{name: row[column] for name, column in names.items() if column in row})


def columns_of(job: Standing) -> dict[str, Any]:
    """A standing as columns; without `has_plan`, which is whether the column ``plan`` is null."""
    columns = {_COLUMNS.get(name, name): value for name, value in asdict(job).items()}
    del columns["has_plan"]
    return columns


def needs_in(text: str | None) -> Needs:
    """What a job needs of the agent's machine, from the column ``needs``."""
    return Needs() if text is None else Needs.model_validate_json(text)


def info_of(
    row: RowMapping, *, keep: float, silent: bool = False, waiting: str | None = None
) -> JobInfo:
    """A job as a record.

    Args:
        row: The job's row, of `INFO_COLUMNS`.
        keep: Seconds for which a training is kept for its agent, where the job does not say.
        silent: Whether the agent that has the job is silent.
        waiting: Why the job waits, in a line; `None`: it does not.
    """
    changed = {
        "job": json.loads(row["job"]),
        "run": row["run_id"],
        "needs": needs_in(row["needs"]),
        "keep_seconds": keep if row["keep_seconds"] is None else row["keep_seconds"],
        "silent": silent,
        "waiting": waiting,
    }
    return JobInfo(**{name: row[name] for name in JobInfo.model_fields.keys() - changed}, **changed)


# -------------------------------------------- which agent may have which job, and why a job waits


class Requirements(NamedTuple):
    """What decides whether an agent carries a job out."""

    job: Job
    needs: Needs


class Agent(NamedTuple):
    """An agent, with what it carries out."""

    name: str
    rules: Rules
    offer: Offer
    busy: bool = False  # whether it has a job

    def lacks(self, job: Requirements) -> tuple[str, str] | str:
        """Why the agent does not carry a job out; empty if it does.

        Returns:
            What the job needs and what the agent offers of that, or its rule in a line.
        """
        return lacking(self.offer, job.needs) or refusal(self.rules, job.job)


def agent_of(name: str, allow: str, offer: str | None, *, busy: bool = False) -> Agent:
    """An agent, from its columns."""
    return Agent(name, _rules(allow), offer_in(offer), busy)


Free = Callable[[RowMapping, str], bool]
"""Whether the standing of a job, from its row, lets an agent, by name, have the job."""


Condition = ColumnElement[bool]


def fitting(connection: Connection, agent: Agent, there: Condition, free: Free) -> Iterator[str]:
    """Identifiers of the jobs that an agent may have now, in the order in which it gets them.

    Args:
        connection: Connection in a transaction.
        agent: The agent that asks for a job.
        there: Condition: an agent is there.
        free: Whether the standing of a job lets the agent have it.
    """
    own = func.coalesce(jobs.c.agent, "") == agent.name
    order = (own.desc(), jobs.c.created, jobs.c.id)
    wanted = select(*STANDING_COLUMNS).where(LIVE, or_(FREE, HELD)).order_by(*order)
    refused = _refused_by(connection, agent.name)
    elsewhere: dict[str, Agent] | None = None
    for row in connection.execute(wanted).mappings().all():
        if row["id"] in refused or not free(row, agent.name):
            continue
        required = _requirements(connection, row["id"])
        if agent.lacks(required):
            continue
        if row["agent"] not in (None, agent.name):
            # Left to the agent that had it, if that one is there, free, and carries it out.
            if elsewhere is None:
                elsewhere = {other.name: other for other in _present(connection, there)}
            former = elsewhere.get(row["agent"])
            left = former is not None and not former.busy and not former.lacks(required)
            if left and row["id"] not in _refused_by(connection, row["agent"]):
                continue
        yield row["id"]


class Waiting:
    """Why jobs wait, by the agents that are there now.

    Args:
        connection: Connection in a transaction.
        rows: Rows of the jobs.
        there: Condition: an agent is there.
        seconds: Length of a lease.
    """

    def __init__(
        self,
        connection: Connection,
        rows: Sequence[RowMapping],
        there: Condition,
        seconds: float,
    ) -> None:
        self._connection, self._seconds = connection, seconds
        waiting = [row["id"] for row in rows if standing_of(row).leasable]
        self._present = _present(connection, there) if waiting else []
        self._given_back: dict[str, dict[str, str]] = {}  # by job and agent: the reason
        for row in connection.execute(select(refusals).where(refusals.c.job_id.in_(waiting))):
            self._given_back.setdefault(row.job_id, {})[row.agent] = row.reason

    def words(self, row: RowMapping, *, silent: float, keep: float) -> str | None:
        """Why no agent has a job, or the agent that has it is silent; `None`: an agent works on it,
        or will soon.

        Args:
            row: Row of the job.
            silent: Seconds since the last report of the agent that has the job, or gave it back.
            keep: Seconds for which a training is kept for its agent.
        """
        job = standing_of(row)
        if job.held:
            if silent < self._seconds:
                return None
            kept = self._seconds + (keep if job.state == "training" else 0.0) - silent
            left = f"for {duration(kept)} more" if kept > 0 else "until another one asks for it"
            return (
                f"agent {job.agent} is silent for {duration(silent)}; the job is kept for it {left}"
            )
        if not job.leasable:
            return None
        names = {agent.name for agent in self._present}
        if job.kept and silent < keep and job.agent not in names:
            return (
                f"agent {job.agent} has the training so far and is not there; the job is kept for "
                f"it for {duration(keep - silent)} more"
            )
        if not names:
            return "no agent is there; start `batchwright agent` on the machine that is to train"
        lacks = self._lacks(row["id"])
        if all(lacks.values()):
            return _why_none(lacks)
        if all(agent.busy for agent in self._present if not lacks[agent.name]):
            return "the agents that carry it out have another job"
        return None

    def _lacks(self, job: str) -> dict[str, tuple[str, str] | str]:
        """By agent that is there: why it gave a job back, else `Agent.lacks` of the job."""
        required, reasons = _requirements(self._connection, job), self._given_back.get(job, {})
        known: dict[tuple[int, int], tuple[str, str] | str] = {}  # most agents are alike
        lacks: dict[str, tuple[str, str] | str] = {}
        for agent in self._present:
            alike = id(agent.rules), id(agent.offer)
            if alike not in known:
                known[alike] = agent.lacks(required)
            lacks[agent.name] = reasons.get(agent.name) or known[alike]
        return lacks


def _why_none(lacks: dict[str, tuple[str, str] | str]) -> str:
    """Why no agent that is there carries a job out, in a line: the two most frequent reasons."""
    by_reason: dict[str, list[tuple[str, str]]] = {}
    for name, lack in lacks.items():
        reason, offered = lack if isinstance(lack, tuple) else (lack, "")
        by_reason.setdefault(reason, []).append((name, offered))
    parts = []
    for reason, lacking_agents in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        if not lacking_agents[0][1]:
            names = [name for name, _ in lacking_agents]
            parts.append(f"{_named(names)} not carry it out: {reason}")
            continue
        by_offer: dict[str, list[str]] = {}
        for name, offered in lacking_agents:
            by_offer.setdefault(offered, []).append(name)
        offers = (f"{_named(names, 'offers', 'offer')} {one}" for one, names in by_offer.items())
        parts.append(f"no agent offers {reason}; {', '.join(offers)}")
    return "; ".join(parts[:2]) + ("; and others for other reasons" if len(parts) > 2 else "")


def _named(names: Sequence[str], one: str = "does", several: str = "do") -> str:
    """Agents by name, with a verb: ``one`` of a single agent, else ``several``."""
    shown = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"agent {shown} {one}" if len(names) == 1 else f"agents {shown}{more} {several}"


def _present(connection: Connection, there: Condition) -> list[Agent]:
    """The agents that are there, in the order of their names."""
    busy = select(jobs.c.agent).where(HELD, jobs.c.agent == agents.c.name).exists()
    rows = connection.execute(
        select(agents.c.name, agents.c.allow, agents.c.offer, busy.label("busy"))
        .where(there)
        .order_by(agents.c.name)
    )
    return [agent_of(row.name, row.allow, row.offer, busy=bool(row.busy)) for row in rows]


def _refused_by(connection: Connection, agent: str) -> set[str]:
    """Identifiers of the jobs that an agent gave back because it cannot carry them out."""
    wanted = select(refusals.c.job_id).where(refusals.c.agent == agent)
    return set(connection.execute(wanted).scalars())


@lru_cache(maxsize=500)  # many agents ask every other second
def _rules(texts: str) -> Rules:
    """The rules of an agent, from the column ``allow``."""
    return rules_of(json.loads(texts))


@lru_cache(maxsize=500)
def offer_in(text: str | None) -> Offer:
    """What an agent's machine offers, from the column ``offer``."""
    return Offer() if text is None else Offer.model_validate_json(text)


_known: dict[str, Requirements] = {}
"""Requirements of short jobs, by identifier; those of a job never change."""


def _requirements(connection: Connection, identifier: str) -> Requirements:
    """What decides whether an agent carries a job out."""
    known = _known.get(identifier)
    if known is not None:
        return known
    wanted = select(jobs.c.job, jobs.c.needs).where(jobs.c.id == identifier)
    text, needs = connection.execute(wanted).one()
    values = json.loads(text)  # checked when it was submitted; keys that came since are not there
    required = Requirements(
        Job.model_construct(**{key: values[key] for key in DEFAULTS if key in values}),
        needs_in(needs),
    )
    if len(text) <= _LONGEST_KNOWN:
        if len(_known) >= 2000:
            _known.clear()
        _known[identifier] = required
    return required
