"""Rows of the table of jobs, and the records that are made of them."""

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
"""Columns that hold a whole document; they are read only where they are asked for."""

SHOWN = [
    *(column for column in jobs.c if column.name not in DOCUMENTS),
    jobs.c.profile.is_not(None).label("has_profile"),
    jobs.c.plan.is_not(None).label("has_plan"),
]
"""The other columns, and whether there are documents."""

STANDS = [column for column in SHOWN if column.name not in ("job", "needs", "error")]
"""The short columns among these: where a job stands, and whose it is."""

LIVE = jobs.c.ended.is_(None)
HELD = LIVE & jobs.c.lease_expires.is_not(None)
"""Whether an agent has it."""

FREE = LIVE & and_(
    jobs.c.lease_expires.is_(None),
    or_(
        jobs.c.state == "queued",
        and_(jobs.c.state == "planned", or_(jobs.c.auto, jobs.c.approved)),
    ),
)
"""`Standing.leasable` as a condition of a query."""

MAX_NAMED = 5
"""Agents that a line names."""

_LONGEST_KNOWN = 8000
"""Characters of a job that is kept in memory for agents that ask; most have some 2,000."""

_COLUMNS = {"key": "lease_key", "expires": "lease_expires"}
"""Columns whose name in a `Standing` is another."""


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
    wanted = select(*SHOWN).where(which, HELD)
    return list(connection.execute(wanted.with_for_update(skip_locked=skip)).mappings())


def word_of(row: RowMapping) -> tuple[Any, ...]:
    """What changes with each word of a job's agent, for `LeaseAges`."""
    return row["lease_key"], row["lease_expires"], row["kept"]


def standing_of(row: RowMapping) -> Standing:
    """Where a job stands; without ``error`` where the row has none."""
    names = {one.name: _COLUMNS.get(one.name, one.name) for one in fields(Standing)}
    return Standing(**{name: row[column] for name, column in names.items() if column in row})


def columns_of(job: Standing) -> dict[str, Any]:
    """A standing as columns; whether there is a plan, the plan itself says."""
    told = {_COLUMNS.get(name, name): value for name, value in asdict(job).items()}
    del told["has_plan"]
    return told


def needs_in(text: str | None) -> Needs:
    """What a job needs, from what is stored."""
    return Needs() if text is None else Needs.model_validate_json(text)


def info_of(
    row: RowMapping, *, keep: float, silent: bool = False, waiting: str | None = None
) -> JobInfo:
    """A job as it is told.

    Args:
        row: Of it.
        keep: Seconds that its training is kept for its agent, where the job does not say.
        silent: Whether the agent that has it is.
        waiting: Why nobody has it.
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


class Asked(NamedTuple):
    """What rules and offers are held against, of a job."""

    job: Job
    needs: Needs


class Agent(NamedTuple):
    """An agent that asks, or is there."""

    name: str
    rules: Rules
    offer: Offer
    busy: bool = False

    def lacks(self, asked: Asked) -> tuple[str, str] | str:
        """Why it does not carry a job out; empty if it does.

        What is needed and what of it is offered, or the rule in a line.
        """
        return lacking(self.offer, asked.needs) or refusal(self.rules, asked.job)


def agent_of(name: str, allow: str, offer: str | None, *, busy: bool = False) -> Agent:
    """An agent, from what is stored."""
    return Agent(name, _rules(allow), offer_in(offer), busy)


Free = Callable[[RowMapping, str], bool]
"""Whether a job that is not over may be given to an agent, by where it stands."""


Condition = ColumnElement[bool]


def fitting(connection: Connection, agent: Agent, there: Condition, free: Free) -> Iterator[str]:
    """Jobs that an agent may have now, those first that it gets first.

    Args:
        connection: In a transaction.
        agent: Who asks.
        there: Which agents are there.
        free: Says of a row whether it may be given.
    """
    own = func.coalesce(jobs.c.agent, "") == agent.name
    order = (own.desc(), jobs.c.created, jobs.c.id)
    wanted = select(*STANDS).where(LIVE, or_(FREE, HELD)).order_by(*order)
    refused = _refused_by(connection, agent.name)
    elsewhere: dict[str, Agent] | None = None
    for row in connection.execute(wanted).mappings().all():
        if row["id"] in refused or not free(row, agent.name):
            continue
        asked = _asked(connection, row["id"])
        if agent.lacks(asked):
            continue
        if row["agent"] not in (None, agent.name):
            # It is left to who had it, where that one may have it and is free.
            if elsewhere is None:
                elsewhere = {one.name: one for one in _present(connection, there)}
            theirs = elsewhere.get(row["agent"])
            left = theirs is not None and not theirs.busy and not theirs.lacks(asked)
            if left and row["id"] not in _refused_by(connection, row["agent"]):
                continue
        yield row["id"]


class Waiting:
    """Why jobs wait, by who is there now.

    Args:
        connection: In a transaction.
        rows: Of the jobs.
        there: Which agents are there.
        seconds: Of a lease.
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
        self._given_back: dict[str, dict[str, str]] = {}
        for one in connection.execute(select(refusals).where(refusals.c.job_id.in_(waiting))):
            self._given_back.setdefault(one.job_id, {})[one.agent] = one.reason

    def words(self, row: RowMapping, *, silent: float, keep: float) -> str | None:
        """Why no agent has a job, or goes on with one whose agent is silent; `None`: one will soon.

        Args:
            row: Of the job.
            silent: Seconds since the last word of who has it, or gave it back.
            keep: Seconds that a training is kept for its agent.
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
        names = {one.name for one in self._present}
        if job.kept and silent < keep and job.agent not in names:
            return (
                f"agent {job.agent} has the training so far and is not there; the job is kept for "
                f"it for {duration(keep - silent)} more"
            )
        if not names:
            return "no agent is there; start `batchwright agent` on the machine that is to train"
        lacks = self._lacks(row["id"])
        if all(lacks.values()):
            return _nobody(lacks)
        if all(one.busy for one in self._present if not lacks[one.name]):
            return "the agents that carry it out have another job"
        return None

    def _lacks(self, job: str) -> dict[str, tuple[str, str] | str]:
        """Why each agent that is there does not carry a job out; empty for those that do."""
        asked, reasons = _asked(self._connection, job), self._given_back.get(job, {})
        known: dict[tuple[int, int], tuple[str, str] | str] = {}  # most agents are alike
        lacks: dict[str, tuple[str, str] | str] = {}
        for one in self._present:
            alike = id(one.rules), id(one.offer)
            if alike not in known:
                known[alike] = one.lacks(asked)
            lacks[one.name] = reasons.get(one.name) or known[alike]
        return lacks


def _nobody(lacks: dict[str, tuple[str, str] | str]) -> str:
    """Why no agent that is there carries a job out, in a line: what most of them lack."""
    by_reason: dict[str, list[tuple[str, str]]] = {}
    for name, lack in lacks.items():
        reason, offered = lack if isinstance(lack, tuple) else (lack, "")
        by_reason.setdefault(reason, []).append((name, offered))
    told = []
    for reason, who in sorted(by_reason.items(), key=lambda one: -len(one[1])):
        if not who[0][1]:
            told.append(f"{_named([name for name, _ in who])} not carry it out: {reason}")
            continue
        offers: dict[str, list[str]] = {}
        for name, offered in who:
            offers.setdefault(offered, []).append(name)
        those = (f"{_named(names, 'offers', 'offer')} {one}" for one, names in offers.items())
        told.append(f"no agent offers {reason}; {', '.join(those)}")
    return "; ".join(told[:2]) + ("; and others for other reasons" if len(told) > 2 else "")


def _named(names: Sequence[str], one: str = "does", several: str = "do") -> str:
    """Agents by name, with a verb."""
    shown = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"agent {shown} {one}" if len(names) == 1 else f"agents {shown}{more} {several}"


def _present(connection: Connection, there: Condition) -> list[Agent]:
    """Agents that are there, by name, and whether they have a job."""
    busy = select(jobs.c.agent).where(HELD, jobs.c.agent == agents.c.name).exists()
    rows = connection.execute(
        select(agents.c.name, agents.c.allow, agents.c.offer, busy.label("busy"))
        .where(there)
        .order_by(agents.c.name)
    )
    return [agent_of(one.name, one.allow, one.offer, busy=bool(one.busy)) for one in rows]


def _refused_by(connection: Connection, agent: str) -> set[str]:
    wanted = select(refusals.c.job_id).where(refusals.c.agent == agent)
    return set(connection.execute(wanted).scalars())


@lru_cache(maxsize=500)
def _rules(texts: str) -> Rules:
    """What an agent carries out, from what is stored; many agents ask every other second."""
    return rules_of(json.loads(texts))


@lru_cache(maxsize=500)
def offer_in(text: str | None) -> Offer:
    """What an agent offers, from what is stored."""
    return Offer() if text is None else Offer.model_validate_json(text)


_known: dict[str, Asked] = {}
"""What short jobs ask for, by identifier; it never changes."""


def _asked(connection: Connection, identifier: str) -> Asked:
    """What rules and offers look at of a job."""
    found = _known.get(identifier)
    if found is not None:
        return found
    wanted = select(jobs.c.job, jobs.c.needs).where(jobs.c.id == identifier)
    text, needs = connection.execute(wanted).one()
    values = json.loads(text)  # checked when it was submitted; keys that came since are not there
    asked = Asked(
        Job.model_construct(**{key: values[key] for key in DEFAULTS if key in values}),
        needs_in(needs),
    )
    if len(text) <= _LONGEST_KNOWN:
        if len(_known) >= 2000:
            _known.clear()
        _known[identifier] = asked
    return asked
