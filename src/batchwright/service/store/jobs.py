"""Jobs: submitted, handed to agents, followed to their end.

What may happen when is `job_states`' to say. Here each change is one transaction that locks the
job's row: it reads where the job stands, settles what the clock has decided meanwhile, and stores
where it stands next. A lease is decided in one transaction that locks the agent's row too.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from itertools import product
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, RowMapping, delete, insert, select, tuple_, update

from batchwright.records import Job, Plan, Profile
from batchwright.records.agent_rules import DEFAULTS
from batchwright.records.service import JobInfo, JobOrders, JobProgress, JobState, Lease
from batchwright.records.text.problems import first_problem, printable
from batchwright.service import job_states
from batchwright.service.database.tables import agents, jobs
from batchwright.service.job_states import ENDED, Standing
from batchwright.service.problems import Conflict, Refused, TooMany
from batchwright.service.store.agents import missing_agent
from batchwright.service.store.job_rows import (
    DOCUMENTS,
    SHOWN,
    columns_of,
    fitting,
    held_rows,
    info_of,
    job_row,
    standing_of,
    waits_for,
)
from batchwright.service.store.part import Part, count, opened

log = logging.getLogger("batchwright.service")

NOTED_SHARE = 1 / 6
"""Of a lease: who asks for work and gets none is noted to be there again after so long only."""


class Jobs(Part):
    """The table of jobs.

    Attributes:
        leases_lost: Those that this process has taken from silent agents.
    """

    leases_lost = 0

    @property
    def _since(self) -> float:
        """Agents heard of after this are there."""
        return self._clock() - self._settings.lease_seconds

    # ------------------------------------------------------------------------------------ users

    def submit(self, name: str, job: Job, *, auto: bool, owner: str) -> JobInfo:
        """Queue a job.

        Args:
            name: For people.
            job: What to do; an agent resolves what is `auto` in it.
            auto: Whether to train without approval of the plan.
            owner: Name of the token, or `browser`.

        Raises:
            TooMany: `Limits.open_jobs` of them have not ended.
        """
        now, identifier = self._clock(), str(uuid.uuid4())
        most = self._settings.limits.open_jobs
        self.settle()
        with self._database.writing() as connection:
            if count(connection, jobs, jobs.c.state.not_in(ENDED)) >= most:
                raise TooMany(
                    f"{most} jobs have not ended: wait for some of them, or cancel some", 60.0
                )
            connection.execute(
                insert(jobs).values(
                    id=identifier,
                    name=name,
                    owner=owner,
                    created=now,
                    changed=now,
                    job=job.model_dump_json(),
                    **columns_of(Standing(auto=auto)),
                )
            )
            return self._told(connection, identifier)

    def get(self, identifier: str) -> JobInfo:
        """A job."""
        self.settle()
        with self._database.reading() as connection:
            return self._told(connection, identifier)

    def _told(self, connection: Connection, identifier: str) -> JobInfo:
        row = job_row(connection, identifier)
        return info_of(row, waits_for(connection, row, self._since))

    def list(
        self, limit: int = 50, before: str | None = None, state: JobState | None = None
    ) -> list[JobInfo]:
        """Jobs, those submitted last first.

        Args:
            limit: At most so many.
            before: Those that come after this job in the list: the last one of the page before.
            state: Only those in this state.

        Raises:
            NotFound: There is no job ``before``.
        """
        self.settle()
        wanted = select(*SHOWN).order_by(jobs.c.created.desc(), jobs.c.id.desc()).limit(limit)
        if state is not None:
            wanted = wanted.where(jobs.c.state == state)
        with self._database.reading() as connection:
            if before is not None:
                last = tuple_(job_row(connection, before)["created"], before)
                wanted = wanted.where(tuple_(jobs.c.created, jobs.c.id) < last)
            rows = connection.execute(wanted).mappings().all()
        return [info_of(row) for row in rows]

    def owner(self, identifier: str) -> str:
        """Name of the token that submitted a job."""
        return str(self._value(jobs.c.owner, identifier))

    def profile(self, identifier: str) -> Profile | None:
        """What was measured for a job, if anything."""
        return opened(Profile, self._value(jobs.c.profile, identifier))

    def plan(self, identifier: str) -> Plan | None:
        """The plan of a job, if there is one."""
        return opened(Plan, self._value(jobs.c.plan, identifier))

    def approve(self, identifier: str) -> JobInfo:
        """Let a job's plan be followed; again changes nothing.

        Raises:
            Conflict: No plan of it waits.
        """
        return info_of(self._change(identifier, job_states.approve))

    def cancel(self, identifier: str) -> JobInfo:
        """End a job, or have its agent end it; again changes nothing.

        Raises:
            Conflict: It has ended otherwise.
        """
        return info_of(self._change(identifier, job_states.cancel))

    # ----------------------------------------------------------------------------------- agents

    def lease(self, agent: str) -> Lease | None:
        """Hand an agent the oldest job that it carries out, its own ones first.

        An agent that asks while it has a job does not know of it any more: that lease is lost. A
        job that another agent had is left to that one while it is there and free, since profile
        and checkpoints are of its machine.

        Args:
            agent: Its name; this also says that it is there.

        Raises:
            NotFound: No agent of this name has introduced itself.
        """
        self.settle()
        if self._has_nothing_for(agent):
            return None
        with self._database.writing() as connection:
            # In SQLite everybody else waits, in PostgreSQL whoever asks for the same agent.
            allow = connection.execute(
                update(agents)
                .where(agents.c.name == agent)
                .values(seen=self._clock())
                .returning(agents.c.allow)
            ).scalar()
            if allow is None:
                raise missing_agent(agent)
            for row in held_rows(connection, jobs.c.agent == agent):
                self._store(connection, row, job_states.lose(standing_of(row)))
            key = str(uuid.uuid4())
            for job in fitting(connection, agent, allow, self._since):
                leased = self._lease(connection, job, agent, key)
                if leased is not None:
                    return leased
        return None

    def progress(self, identifier: str, progress: JobProgress) -> JobOrders:
        """Take in what an agent says of its job; this also says that it is there.

        Raises:
            Conflict: The agent does not have it any more, or it does not go that way.
            Refused: Its profile or plan is of another job.
        """
        self._refuse_other_job(identifier, progress)
        error = progress.error and printable(" ".join(progress.error.split()))

        def step(job: Standing) -> Standing:
            return job_states.report(
                job,
                key=progress.key,
                expires=self._clock() + self._settings.lease_seconds,
                state=progress.state,
                plan=progress.plan is not None,
                error=error,
            )

        documents: dict[str, Any] = {
            name: document.model_dump_json()
            for name in DOCUMENTS
            if (document := getattr(progress, name)) is not None
        }
        if progress.run is not None:
            documents["run_id"] = progress.run
        row = self._change(identifier, step, **documents)
        job = standing_of(row)
        if row["agent"] is not None:
            its_row = agents.c.name == row["agent"]
            self._write(update(agents).where(its_row).values(seen=self._clock()))
        return JobOrders(state=job.state, stop=job.cancelling)

    # ------------------------------------------------------------------------------------ clock

    def settle(self) -> None:
        """Take the jobs back of agents that have been silent for too long."""
        late = jobs.c.lease_expires <= self._clock()
        if not self._read(select(jobs.c.id).where(late).limit(1)):
            return
        with self._database.writing() as connection:
            for row in held_rows(connection, late, skip=True):
                self._store(connection, row, job_states.lose(standing_of(row)))

    def forgive_absence(self) -> None:
        """Give every agent that has a job a whole lease from now on.

        For a service that starts: while it was away nobody could tell it that they are there.
        """
        held = update(jobs).where(jobs.c.lease_expires.is_not(None))
        self._write(held.values(lease_expires=self._clock() + self._settings.lease_seconds))

    def delete_old(self, before: float) -> None:
        """Delete jobs that ended before a moment."""
        self._write(delete(jobs).where(jobs.c.state.in_(ENDED), jobs.c.changed < before))

    # ---------------------------------------------------------------------------------- storing

    def _change(
        self, identifier: str, step: Callable[[Standing], Standing], **documents: Any
    ) -> RowMapping:
        """A job's row after one step; that a lease has expired is kept, whatever becomes of it."""
        problem: Conflict | None = None
        with self._database.writing() as connection:
            row = job_row(connection, identifier, lock=True)
            job = job_states.settled(standing_of(row), self._clock())
            try:
                after = step(job)
            except Conflict as conflict:
                problem, after = conflict, job
            # Documents are taken from who has the job, not from who says something again.
            self._store(connection, row, after, **(documents if job.held and not problem else {}))
            row = job_row(connection, identifier)
        if problem is not None:
            raise problem
        return row

    def _store(
        self, connection: Connection, row: RowMapping, job: Standing, **documents: Any
    ) -> None:
        """Store where a job stands; a mere heartbeat leaves the time of its last change alone."""
        before = standing_of(row)
        self.leases_lost += job.lost > before.lost
        values = documents | {
            name: value
            for name, value in columns_of(job).items()
            if value != columns_of(before)[name]
        }
        if values.keys() - {"lease_expires"}:
            values["changed"] = self._clock()
        if values:
            connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(**values))

    def _refuse_other_job(self, identifier: str, progress: JobProgress) -> None:
        """A later agent opens what the plan names, so that must be what was submitted."""
        documents = [one for one in (progress.profile, progress.plan) if one is not None]
        if not documents:
            return
        submitted = json.loads(self._value(jobs.c.job, identifier))
        for document, key in product(documents, DEFAULTS):
            if getattr(document.job, key) != submitted[key]:
                raise Refused(
                    f"a {type(document).__name__.lower()} with {key}={getattr(document.job, key)} "
                    f"is not of this job, which has {key}={submitted[key]}"
                )

    def _lease(self, connection: Connection, identifier: str, agent: str, key: str) -> Lease | None:
        """The job, if nobody else has just got it."""
        wanted = select(*SHOWN, jobs.c.profile, jobs.c.plan).where(jobs.c.id == identifier)
        free = connection.execute(wanted.with_for_update(skip_locked=True))
        row = free.mappings().one_or_none()
        if row is None or not (job := standing_of(row)).leasable:
            return None
        try:
            profile, plan = opened(Profile, row["profile"]), opened(Plan, row["plan"])
        except ValidationError as error:  # an optimizer, say, whose package was removed from here
            log.error("job %s is not handed out: %s", identifier, first_problem(error, ""))
            return None
        seconds = self._settings.lease_seconds
        expires = self._clock() + seconds
        self._store(connection, row, job_states.lease(job, agent=agent, key=key, expires=expires))
        info = info_of(job_row(connection, identifier))
        return Lease(key=key, seconds=seconds, job=info, profile=profile, plan=plan)

    def _has_nothing_for(self, agent: str) -> bool:
        """Whether an agent that asks for work changes nothing: as it is nearly always."""
        with self._database.reading() as connection:
            known = connection.execute(
                select(agents.c.allow, agents.c.seen).where(agents.c.name == agent)
            ).one_or_none()
            if known is None:
                raise missing_agent(agent)
            if self._clock() - known.seen >= self._settings.lease_seconds * NOTED_SHARE:
                return False
            held = select(jobs.c.id).where(jobs.c.agent == agent, jobs.c.lease_expires.is_not(None))
            if connection.execute(held.limit(1)).first() is not None:
                return False
            return next(fitting(connection, agent, known.allow, self._since), None) is None
