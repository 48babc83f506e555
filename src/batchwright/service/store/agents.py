"""Agents: who carries out jobs, and when they were last heard of."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from batchwright.records.service import AgentInfo, AgentIntroduction
from batchwright.records.text.problems import printable
from batchwright.service.database.tables import agents, jobs
from batchwright.service.problems import Conflict, NotFound, TooMany
from batchwright.service.settings import DAY
from batchwright.service.store.part import Part, count

FORGOTTEN_SECONDS = 30 * DAY
"""An agent silent for so long is forgotten, so that its name is free and the list stays short."""

MOST_AGENTS = 1000


class Agents(Part):
    """The table of agents."""

    def introduce(self, introduction: AgentIntroduction, owner: str) -> AgentInfo:
        """Store an agent, or hear of it again; what it carries out is as it says last.

        Args:
            introduction: Its name and rules.
            owner: Name of the token that may speak for it from now on.

        Raises:
            Conflict: Another token speaks for an agent of this name.
            TooMany: There are too many agents.
        """
        now, name = self._clock(), introduction.name
        told = {"allow": json.dumps(introduction.allow), "seen": now}
        with self._database.writing() as connection:
            connection.execute(delete(agents).where(agents.c.seen < now - FORGOTTEN_SECONDS))
            # One statement, so that of two tokens that come at once one gets the name.
            mine = and_(agents.c.name == name, agents.c.owner == owner)
            if not connection.execute(update(agents).where(mine).values(**told)).rowcount:
                if count(connection, agents) >= MOST_AGENTS:
                    raise TooMany(
                        f"{MOST_AGENTS} agents are known: give yours a fixed --name", 60.0
                    )
                try:
                    connection.execute(insert(agents).values(name=name, owner=owner, **told))
                except IntegrityError:
                    raise Conflict(
                        f"an agent named {printable(name)} belongs to another token: "
                        "choose another --name"
                    ) from None
        return self._infos(agents.c.name == name)[0]

    def list(self) -> list[AgentInfo]:
        """All agents, by name."""
        return [*self._infos()]

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
        at_work = select(func.min(jobs.c.id)).where(
            jobs.c.agent == agents.c.name, jobs.c.lease_expires > self._clock()
        )
        wanted = select(
            agents.c.name, agents.c.allow, agents.c.seen, at_work.scalar_subquery().label("job")
        )
        rows = self._read(wanted.where(*which).order_by(agents.c.name))
        return [
            AgentInfo(name=row.name, allow=tuple(json.loads(row.allow)), seen=row.seen, job=row.job)
            for row in rows
        ]


def missing_agent(name: str) -> NotFound:
    """There is no such agent."""
    return NotFound(f"no agent {printable(name[:120])} has introduced itself")
