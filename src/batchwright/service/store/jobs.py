"""The table of jobs: submitted, leased to agents, followed to their end.

`job_states` says which changes of a job's state are possible. Each change is one transaction here
that locks the job's row, reads its `Standing` and stores the next one; a lease is one transaction
that locks the agent's row too. `LeaseAges` says how long an agent has been silent.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    insert,
    not_,
    or_,
    select,
    tuple_,
    update,
)

from batchwright.records import Job, Plan, Profile
from batchwright.records.agent_rules import Needs, needs_of, refused_by_all
from batchwright.records.service import JobInfo, JobOrders, JobProgress, JobState, Lease
from batchwright.records.text.problems import first_problem, printable
from batchwright.service import job_states
from batchwright.service.database.tables import agents, jobs, refusals, runs
from batchwright.service.job_states import ENDED, Standing
from batchwright.service.lease_ages import LeaseAges
from batchwright.service.problems import Refused, TooMany
from batchwright.service.store.agents import (
    heard_lately,
    missing_agent,
    refuse_former_session,
)
from batchwright.service.store.job_rows import (
    DOCUMENTS,
    HELD,
    INFO_COLUMNS,
    LIVE,
    STANDING_COLUMNS,
    Waiting,
    agent_of,
    columns_of,
    fitting,
    held_rows,
    info_of,
    job_row,
    report_mark,
    standing_of,
)
from batchwright.service.store.part import Common, Part, count, lock_for_insert, stored_document

log = logging.getLogger("batchwright.service")

NOTED_SHARE = 1 / 6
"""Share of a lease for which the time that an agent without work was seen is not written again."""

UNREAD = 3
"""Restarts of an agent without a report on its job, after which other agents get the job."""

MAX_UNREAD = 2000
"""Jobs of which the restarts are counted."""

LONGEST_JOB = 128 * 1024
"""Maximum characters of a job as JSON; most have some 2,000. A list of jobs holds them whole."""

_NEWEST = (jobs.c.created.desc(), jobs.c.id.desc())


class Jobs(Part):
    """The table of jobs.

    Args:
        common: What all parts share.
        ages: How long agents have been silent.

    Attributes:
        leases_lost: Number of leases that this process has taken from silent agents.
    """

    def __init__(self, common: Common, ages: LeaseAges) -> None:
        super().__init__(common)
        self.leases_lost = 0
        self._unread = Counter[str]()  # by job: restarts of its agent without a report
        self._ages = ages
        self._unreadable = set[str]()  # jobs with a document that this process cannot read

    @property
    def _there(self) -> ColumnElement[bool]:
        """Condition: an agent was heard of within the length of a lease."""
        return heard_lately(self._clock(), self._settings.lease_seconds)

    # ------------------------------------------------------------------------------------ users

    def submit(
        self,
        name: str,
        job: Job,
        *,
        auto: bool,
        owner: str,
        needs: Needs | None = None,
        keep_seconds: float | None = None,
    ) -> JobInfo:
        """Queue a job.

        Args:
            name: Name of the job, for people.
            job: The job; an agent resolves what is `auto` in it.
            auto: Whether to train without approval of the plan.
            owner: Name of the token, or `browser`.
            needs: What the agent's machine must offer, beside what the job's keys ask for.
            keep_seconds: Seconds for which the training is kept for an agent that is silent or
                away; `None`: as the settings say.

        Raises:
            Refused: No agent would carry the job out, or its JSON is too long.
            TooMany: `Limits.open_jobs` jobs have not ended.
        """
        if problem := refused_by_all(job):
            raise Refused(problem)
        now, identifier, text = self._clock(), str(uuid.uuid4()), job.model_dump_json()
        if len(text) > LONGEST_JOB:
            raise Refused(
                f"the job has {len(text):,} characters, where {LONGEST_JOB:,} are taken: shorten "
                "its names and lists"
            )
        most = self._settings.limits.open_jobs
        with self._database.writing() as connection:
            lock_for_insert(connection, jobs)
            if count(connection, jobs, LIVE) >= most:
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
                    job=text,
                    needs=needs_of(job, needs or Needs()).model_dump_json(),
                    keep_seconds=keep_seconds,
                    **columns_of(Standing(auto=auto)),
                )
            )
            return self._infos(connection, [job_row(connection, identifier)])[0]

    def get(self, identifier: str) -> JobInfo:
        """A job, with the reason why it waits, if it does."""
        with self._database.reading() as connection:
            return self._infos(connection, [job_row(connection, identifier)])[0]

    def _infos(self, connection: Connection, rows: Sequence[RowMapping]) -> Sequence[JobInfo]:
        """Jobs from their rows, each with the reason why it waits, if it does."""
        waiting = Waiting(connection, rows, self._there, self._settings.lease_seconds)
        return [
            self._info(row, waiting.words(row, silent=self._silent(row), keep=self._keep(row)))
            for row in rows
        ]

    def list(
        self, limit: int = 50, before: str | None = None, state: JobState | None = None
    ) -> Sequence[JobInfo]:
        """Jobs, the newest first, each with the reason why it waits, if it does.

        Args:
            limit: Maximum number of jobs.
            before: Identifier of the last job of the previous page; `None`: the first page.
            state: State of the jobs; `None`: any.

        Raises:
            NotFound: There is no job ``before``.
        """
        wanted = select(*INFO_COLUMNS).order_by(*_NEWEST).limit(limit)
        if state is not None:
            wanted = wanted.where(jobs.c.state == state)
        with self._database.reading() as connection:
            if before is not None:
                last = tuple_(job_row(connection, before)["created"], before)
                wanted = wanted.where(tuple_(jobs.c.created, jobs.c.id) < last)
            return self._infos(connection, connection.execute(wanted).mappings().all())

    def going_and_waiting(self) -> tuple[int, int]:
        """Number of jobs that agents work on, and of jobs with a plan that waits for approval."""
        going = jobs.c.state.in_(("probing", "training"))
        waits = and_(jobs.c.state == "planned", not_(or_(jobs.c.auto, jobs.c.approved)))
        with self._database.reading() as connection:
            return count(connection, jobs, LIVE, going), count(connection, jobs, LIVE, waits)

    def _info(self, row: RowMapping, waiting: str | None = None) -> JobInfo:
        silent = row["lease_expires"] is not None
        silent = silent and self._silent(row) >= self._settings.lease_seconds
        return info_of(row, keep=self._settings.keep_seconds, silent=silent, waiting=waiting)

    def _silent(self, row: RowMapping) -> float:
        """Seconds since the last report of a job's agent."""
        return self._ages.silent(row["id"], report_mark(row))

    def _keep(self, row: RowMapping) -> float:
        """Seconds for which a job's training is kept for its agent."""
        own: float | None = row["keep_seconds"]
        return self._settings.keep_seconds if own is None else own

    def owner(self, identifier: str) -> str:
        """Name of the token that submitted a job."""
        return str(self._value(jobs.c.owner, identifier))

    def profile(self, identifier: str) -> Profile | None:
        """The profile of a job, if an agent has sent one."""
        return stored_document(Profile, self._value(jobs.c.profile, identifier))

    def plan(self, identifier: str) -> Plan | None:
        """The plan of a job, if there is one."""
        return stored_document(Plan, self._value(jobs.c.plan, identifier))

    def approve(self, identifier: str) -> JobInfo:
        """Approve a job's plan; once more changes nothing.

        Raises:
            Conflict: The job has no plan that waits.
        """
        return self._info(self._change(identifier, lambda job, _: job_states.approve(job)))

    def cancel(self, identifier: str) -> JobInfo:
        """End a job, or order its agent to end it; once more changes nothing.

        Raises:
            Conflict: The job has ended otherwise.
        """

        def step(job: Standing, silent: bool) -> Standing:
            return job_states.cancel(job, silent=silent)

        return self._info(self._change(identifier, step))

    # ----------------------------------------------------------------------------------- agents

    def agent(self, identifier: str) -> str | None:
        """Name of the agent that has a job, or had it last."""
        name: str | None = self._value(jobs.c.agent, identifier)
        return name

    def asked(self, identifier: str, key: str) -> tuple[Job, Profile | None] | None:
        """A job as it was submitted, and its profile, if an agent has sent one.

        Args:
            identifier: Identifier of the job.
            key: Key of a lease.

        Returns:
            `None` where the lease is not the job's newest or has ended, or the job is planned
            already: then no profile or plan that comes under it is stored.
        """
        wanted = select(jobs.c.job, jobs.c.profile).where(jobs.c.id == identifier, HELD)
        rows = self._read(wanted.where(jobs.c.lease_key == key, jobs.c.state == "probing"))
        if not rows:
            return None
        return Job.model_validate_json(rows[0].job), stored_document(Profile, rows[0].profile)

    def lease(self, agent: str, session: str | None = None) -> Lease | None:
        """Lease an agent the oldest job that it carries out, jobs that it had before first.

        An agent that asks while it has a job has forgotten that job, so it gets the job again, by a
        new lease. A job that another agent had is left to that agent while it is there and free,
        and a training for as long as it is kept, since the checkpoints are in that agent's folder.

        Args:
            agent: Name of the agent, which is noted to be there.
            session: Identifier of its process, as in its introduction.

        Raises:
            NotFound: No agent of this name has introduced itself.
            Conflict: Another process has introduced itself under this name since.
        """
        if self._has_nothing_for(agent, session):
            return None
        with self._database.writing() as connection:
            # Locks the agent's row in PostgreSQL, the database in SQLite.
            row = connection.execute(
                update(agents)
                .where(agents.c.name == agent)
                .values(seen=self._clock())
                .returning(agents.c.allow, agents.c.offer, agents.c.session)
            ).one_or_none()
            if row is None:
                raise missing_agent(agent)
            refuse_former_session(agent, row.session, session)
            self._ages.catch_up()
            for held in held_rows(connection, jobs.c.agent == agent):
                self._store(connection, held, job_states.lose(standing_of(held)))
            key, asking = str(uuid.uuid4()), agent_of(agent, row.allow, row.offer)
            for job in fitting(connection, asking, self._there, self._free):
                leased = self._lease(connection, job, agent, key)
                if leased is not None:
                    return leased
        return None

    def progress(self, identifier: str, progress: JobProgress) -> JobOrders:
        """Store an agent's report on its job; the agent is noted to be there.

        `plan_answers.checked_documents` has checked before that profile and plan are of the job.

        Raises:
            Conflict: The agent does not have the job any more, or the job cannot get to that state.
        """
        error = progress.error and printable(" ".join(progress.error.split()))

        def step(job: Standing, _silent: bool) -> Standing:
            return job_states.report(
                job,
                key=progress.key,
                expires=self._clock() + self._settings.lease_seconds,
                state=progress.state,
                plan=progress.plan is not None,
                trained=progress.trained,
                able=progress.reason is None,
                sent=progress.sent,
                error=error,
            )

        def also(connection: Connection, row: RowMapping) -> None:
            if progress.reason is not None and progress.state == "queued":
                reason = printable(" ".join(progress.reason.split()))
                self._refuse(connection, identifier, row["agent"], reason)
            former = row["run_id"]
            if progress.run is not None and former not in (None, progress.run):
                # The former run has not ended, and no agent will report it any more.
                error = f"agent {row['agent']} goes on with its job, in a run of its own"
                # An agent may name any run: only one that was introduced for this job is the job's.
                own = (runs.c.id == former, runs.c.job_id == identifier, runs.c.outcome.is_(None))
                values = {"outcome": "stopped", "error": error, "changed": self._clock()}
                connection.execute(update(runs).where(*own).values(**values))

        documents: dict[str, Any] = {
            name: document.model_dump_json()
            for name in DOCUMENTS
            if (document := getattr(progress, name)) is not None
        }
        if progress.run is not None:
            documents["run_id"] = progress.run
        job = standing_of(self._change(identifier, step, also, **documents))
        self._unread.pop(identifier, None)
        # In a transaction of its own, as a lease locks the agent before the job.
        self._write(update(agents).where(agents.c.name == job.agent).values(seen=self._clock()))
        return JobOrders(state=job.state, stop=job.cancelling)

    # ------------------------------------------------------------------------------------ clock

    def tick(self) -> None:
        """Note that agents' reports can be stored, and end cancelled jobs whose agent is silent.

        Called every `TICK_SECONDS`. Once it was called, longer pauses count as time in which no
        report could be stored, which is no silence of an agent.
        """
        with self._database.writing() as connection:  # waits as long as a report would
            self._ages.tick()
            watched = LIVE & (jobs.c.lease_expires.is_not(None) | jobs.c.kept)
            rows = connection.execute(select(*STANDING_COLUMNS).where(watched)).mappings().all()
            self._ages.forget_except({row["id"] for row in rows})
            late = {
                row["id"]
                for row in rows
                if self._silent(row) >= self._settings.lease_seconds and row["cancelling"]
            }
            for row in held_rows(connection, jobs.c.id.in_(late), skip=True) if late else ():
                job = job_states.settled(standing_of(row), silent=True)
                self._store(connection, row, job)

    def delete_old(self, before: float) -> None:
        """Delete some of the jobs that ended before a moment."""
        self._delete_oldest(jobs, jobs.c.ended, before)

    # ---------------------------------------------------------------------------------- storing

    def _change(
        self,
        identifier: str,
        step: Callable[[Standing, bool], Standing],
        also: Callable[[Connection, RowMapping], None] = lambda *_: None,
        **documents: Any,
    ) -> RowMapping:
        """Change a job's standing, in one transaction.

        Args:
            identifier: Identifier of the job.
            step: Makes the next standing of the present one and whether the job's agent is silent.
            also: Called in the same transaction, with the row as it was before.
            **documents: Columns to store with it, if an agent has the job: a report that is
                repeated after the end of its lease stores none. Profile and plan are not replaced
                once the job is planned, as somebody may have approved them.

        Returns:
            The row after the change.
        """
        with self._database.writing() as connection:
            row = job_row(connection, identifier, lock=True)
            job = standing_of(row)
            after = step(job, job.held and self._silent(row) >= self._settings.lease_seconds)
            stored = {
                name: value
                for name, value in documents.items()
                if job.held and (job.state == "probing" or name not in DOCUMENTS)
            }
            self._store(connection, row, after, **stored)
            also(connection, row)
            return job_row(connection, identifier)

    def _store(
        self, connection: Connection, row: RowMapping, job: Standing, **documents: Any
    ) -> None:
        """Store a job's standing; a mere heartbeat leaves the time of its last change alone."""
        before = standing_of(row)
        self.leases_lost += job.lost > before.lost
        values = documents | {
            name: value
            for name, value in columns_of(job).items()
            if value != columns_of(before)[name]
        }
        if values.keys() - {"lease_expires", "heard", "trained", "furthest", "lost"}:
            values["changed"] = self._clock()
        if job.state in ENDED and row["ended"] is None:
            values["ended"] = self._clock()
        if values:
            connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(**values))
            self._ages.silent(row["id"], (job.key, job.expires, job.kept))  # as `report_mark`

    def _refuse(self, connection: Connection, job: str, agent: str, reason: str) -> None:
        """Store that an agent does not carry a job out."""
        row = self._insert_if_new(refusals, job_id=job, agent=agent, reason=reason)
        connection.execute(row)

    def note_restart(self, connection: Connection, agent: str) -> None:
        """Count the restart of an agent. One that has a job and is restarted `UNREAD` times without
        a report on it can most likely not read the job, so other agents get it.
        """
        for row in held_rows(connection, and_(jobs.c.agent == agent, not_(jobs.c.heard))):
            if len(self._unread) > MAX_UNREAD:
                self._unread.clear()
            self._unread[row["id"]] += 1
            if self._unread[row["id"]] >= UNREAD:
                reason = "it was given the job again and again, and ended without a word of it"
                self._refuse(connection, row["id"], agent, f"{reason}: is it of another version?")

    def kept_for(self, connection: Connection, agent: str) -> float:
        """Seconds for which a job is still kept for an agent that is not there; 0: none is."""
        watched = LIVE & (jobs.c.lease_expires.is_not(None) | jobs.c.kept)
        wanted = select(*STANDING_COLUMNS).where(jobs.c.agent == agent, watched)
        left = [0.0]
        for row in connection.execute(wanted).mappings():
            job, keep = standing_of(row), self._keep(row)
            if job.held:
                keep = self._settings.lease_seconds + (keep if job.state == "training" else 0.0)
            left.append(keep - self._silent(row))
        return max(left)

    def _free(self, row: RowMapping, agent: str) -> bool:
        """Whether the standing of a job lets an agent have it."""
        if row["id"] in self._unreadable:
            return False
        times = {"seconds": self._settings.lease_seconds, "keep": self._keep(row)}
        return standing_of(row).free_for(agent, self._silent(row), **times)

    def _lease(self, connection: Connection, identifier: str, agent: str, key: str) -> Lease | None:
        """A lease of a job; `None` where another agent got the job meanwhile, or it has failed."""
        wanted = select(*INFO_COLUMNS, jobs.c.profile, jobs.c.plan).where(jobs.c.id == identifier)
        unlocked = connection.execute(wanted.with_for_update(skip_locked=True))
        row = unlocked.mappings().one_or_none()
        if row is None or not self._free(row, agent):
            return None
        try:
            profile = stored_document(Profile, row["profile"])
            plan = stored_document(Plan, row["plan"])
        except ValidationError as error:  # an optimizer, say, whose package was removed from here
            log.error("job %s is not handed out: %s", identifier, first_problem(error, ""))
            self._unreadable.add(identifier)  # else each request would read it, and log this, again
            return None
        job = standing_of(row)
        if job.held:
            job = job_states.lose(job)
        if job.leasable:
            expires = self._clock() + self._settings.lease_seconds
            job = job_states.lease(job, agent=agent, key=key, expires=expires)
        self._store(connection, row, job)
        if not job.held:
            return None  # it has lost too many agents
        info = self._info(job_row(connection, identifier))
        return Lease(
            key=key,
            number=job.attempts,
            seconds=self._settings.lease_seconds,
            job=info,
            profile=profile,
            plan=plan,
        )

    def _has_nothing_for(self, agent: str, session: str | None) -> bool:
        """Whether a request for work changes nothing, as is the case nearly always: the agent was
        seen lately, has no job, and there is none for it.
        """
        with self._database.reading() as connection:
            row = connection.execute(
                select(agents.c.allow, agents.c.offer, agents.c.session, agents.c.seen).where(
                    agents.c.name == agent
                )
            ).one_or_none()
            if row is None:
                raise missing_agent(agent)
            refuse_former_session(agent, row.session, session)
            # The absolute value, as the clock may have been set back.
            if abs(self._clock() - row.seen) >= self._settings.lease_seconds * NOTED_SHARE:
                return False
            held = select(jobs.c.id).where(HELD, jobs.c.agent == agent)
            if connection.execute(held.limit(1)).first() is not None:
                return False
            asking = agent_of(agent, row.allow, row.offer)
            return next(fitting(connection, asking, self._there, self._free), None) is None
