"""The table of agents: which jobs they carry out, and when they were last heard of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from sqlalchemy import ColumnElement, Connection, and_, delete, or_, select, update

from batchwright.records.service import AgentInfo, AgentIntroduction
from batchwright.records.text.formatting import duration
from batchwright.records.text.problems import printable
from batchwright.service.database.tables import agents, jobs, refusals
from batchwright.service.problems import Conflict, NotFound, TooMany
from batchwright.service.settings import DAY
from batchwright.service.store.job_rows import HELD, LIVE, offer_in
from batchwright.service.store.part import Common, Part, count, lock_for_insert

FORGOTTEN_SECONDS = 30 * DAY
"""An agent silent for so long is forgotten, so that its name is free and the list stays short."""

LEFT = ""
"""Session of an agent whose process has said that it ends."""

MAX_AGENTS = 1000


class Agents(Part):
    """The table of agents.

    Args:
        common: What all parts share.
        kept_for: `Jobs.kept_for`.
        note_restart: `Jobs.note_restart`.
    """

    def __init__(
        self,
        common: Common,
        kept_for: Callable[[Connection, str], float],
        note_restart: Callable[[Connection, str], None],
    ) -> None:
        super().__init__(common)
        self._kept_for, self._note_restart = kept_for, note_restart

    def introduce(self, introduction: AgentIntroduction, owner: str) -> AgentInfo:
        """Store an agent; rules and machine of one that is known are replaced.

        A name belongs to the folder of the agent that had it first, for as long as that agent is
        there or a job is kept for it. Where nobody chose the name and it is taken, the agent gets
        another name, and the same one again when it comes back.

        Args:
            introduction: Name, folder, rules and machine of the agent.
            owner: Name of the token that reports for the agent from now on.

        Raises:
            Conflict: The name is another token's, or another folder's.
            TooMany: `MAX_AGENTS` are known.
        """
        now = self._clock()
        values = {
            "allow": json.dumps(introduction.allow),
            "offer": introduction.offer.model_dump_json(),
            "folder": introduction.folder,
            "session": introduction.session,
            "seen": now,
        }
        with self._database.writing() as connection:
            lock_for_insert(connection, agents)  # names and their number stay as they are read
            working = select(jobs.c.id).where(jobs.c.agent == agents.c.name, LIVE).exists()
            old = agents.c.seen < now - FORGOTTEN_SECONDS
            connection.execute(delete(agents).where(old, ~working))
            name = self._name_for(connection, introduction, owner)
            own = and_(agents.c.name == name, agents.c.owner == owner)
            if not connection.execute(update(agents).where(own).values(**values)).rowcount:
                if count(connection, agents) >= MAX_AGENTS:
                    raise TooMany(f"{MAX_AGENTS} agents are known: give yours a fixed --name", 60.0)
                row = self._insert_if_new(agents, name=name, owner=owner, **values)
                if connection.execute(row.returning(agents.c.name)).first() is None:
                    raise _of_another_token(name)
            # It may be able by now to carry out jobs that it refused.
            connection.execute(delete(refusals).where(refusals.c.agent == name))
            self._note_restart(connection, name)
        return self._infos(agents.c.name == name)[0]

    def _name_for(self, connection: Connection, introduction: AgentIntroduction, owner: str) -> str:
        """The name that an agent gets.

        Raises:
            Conflict: Somebody chose the name, and another agent has it.
        """
        folder, asked = introduction.folder, introduction.name
        former = None
        if folder is not None:
            same = and_(agents.c.folder == folder, agents.c.owner == owner)
            former = connection.execute(select(agents.c.name).where(same)).scalar()
        if former is not None and not introduction.chosen:
            return str(former)
        there = heard_lately(self._clock(), self._settings.lease_seconds).label("there")
        wanted = select(agents.c.name, agents.c.owner, agents.c.folder, there)
        holders = {row.name: row for row in connection.execute(wanted)}
        for name in (asked, *(f"{asked[:110]}-{number}" for number in range(2, MAX_AGENTS + 2))):
            holder = holders.get(name)
            if holder is None or (holder.owner == owner and holder.folder == folder):
                break
            kept = 0.0 if holder.there else self._kept_for(connection, name)
            if holder.owner == owner and not (holder.there or kept > 0):
                break
            if introduction.chosen:
                if holder.owner != owner:
                    raise _of_another_token(name)
                if holder.there:
                    raise Conflict(
                        f"an agent named {printable(name)} is there already, from another folder: "
                        "choose another --name, or stop that one"
                    )
                raise Conflict(
                    f"a job is kept for agent {printable(name)}, which has another folder, for "
                    f"{duration(kept)} more: start it in that folder, or come again then"
                )
        if former is not None and former != name:  # it was started under another --name
            connection.execute(delete(agents).where(agents.c.name == former))
            connection.execute(update(jobs).where(jobs.c.agent == former, LIVE).values(agent=name))
        return name

    def leave(self, name: str, session: str | None) -> None:
        """Note that an agent is not there any more, as its process ends.

        Args:
            name: Name of the agent.
            session: Session of that process; one that has introduced itself since stays there.
        """
        this = [agents.c.name == name]
        if session is not None:
            this.append(agents.c.session == session)
        self._write(update(agents).where(*this).values(session=LEFT))

    def list(self) -> list[AgentInfo]:
        """All agents, by name."""
        return [*self._infos()]

    def left(self) -> set[str]:
        """Names of the agents whose process has said that it ends."""
        return {
            row.name for row in self._read(select(agents.c.name).where(agents.c.session == LEFT))
        }

    def owner(self, name: str) -> str:
        """Name of the token that speaks for an agent.

        Raises:
            NotFound: No agent of this name has introduced itself.
        """
        found = self._read(select(agents.c.owner).where(agents.c.name == name))
        if not found:
            raise missing_agent(name)
        return str(found[0].owner)

    def _infos(self, *which: ColumnElement[bool]) -> Sequence[AgentInfo]:
        wanted = select(agents, jobs.c.id.label("job"), jobs.c.name.label("job_name")).outerjoin(
            jobs, and_(jobs.c.agent == agents.c.name, HELD)
        )
        rows = self._read(wanted.where(*which).order_by(agents.c.name))
        return [
            AgentInfo(
                name=row.name,
                allow=tuple(json.loads(row.allow)),
                seen=row.seen,
                job=row.job,
                job_name=row.job_name,
                offer=offer_in(row.offer),
            )
            for row in {row.name: row for row in rows}.values()
        ]


def missing_agent(name: str) -> NotFound:
    """The error that says that no agent has a name."""
    return NotFound(f"no agent {printable(name[:120])} has introduced itself")


def refuse_former_session(name: str, newest: str | None, session: str | None) -> None:
    """Refuse a process of an agent after another one has introduced itself under its name.

    Args:
        name: Name of the agent.
        newest: Session of the process that introduced itself last.
        session: Session of the process that asks; `None` is not refused.

    Raises:
        Conflict: The two are different processes.
    """
    if session is not None and newest != session:
        raise Conflict(
            f"another agent has introduced itself as {printable(name)} since: this one ends; start "
            "it with a --folder and a --name of its own"
        )


def heard_lately(now: float, seconds: float) -> ColumnElement[bool]:
    """Condition: an agent was heard of less than ``seconds`` ago, and has not left. One that was
    heard of long in the future, before the clock was set back, is not there.
    """
    stays = or_(agents.c.session.is_(None), agents.c.session != LEFT)
    return and_(agents.c.seen > now - seconds, agents.c.seen < now + seconds, stays)


def _of_another_token(name: str) -> Conflict:
    return Conflict(
        f"an agent named {printable(name)} belongs to another token: choose another --name"
    )
