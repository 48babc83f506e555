"""Jobs: submitted, handed to agents, followed to their end.

What may happen when is `job_states`' to say. Here each change is one transaction that locks the
job's row: it reads where the job stands, and stores where it stands next. A lease is decided in one
transaction that locks the agent's row too. How long an agent has been silent, `LeaseAges` says.
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
    delete,
    insert,
    not_,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from batchwright.records import Job, Plan, Profile
from batchwright.records.agent_rules import Needs, needs_of
from batchwright.records.service import JobInfo, JobOrders, JobProgress, JobState, Lease
from batchwright.records.text.problems import first_problem, printable
from batchwright.service import job_states
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import agents, jobs, refusals, runs
from batchwright.service.job_states import ENDED, Standing
from batchwright.service.lease_ages import LeaseAges
from batchwright.service.problems import Refused, TooMany
from batchwright.service.settings import Settings
from batchwright.service.store.agents import (
    heard_lately,
    missing_agent,
    refuse_former_session,
)
from batchwright.service.store.job_rows import (
    DOCUMENTS,
    HELD,
    LIVE,
    SHOWN,
    STANDS,
    Waiting,
    agent_of,
    columns_of,
    fitting,
    held_rows,
    info_of,
    job_row,
    standing_of,
    word_of,
)
from batchwright.service.store.part import Clock, Part, alone_adding, count, opened, share_of

log = logging.getLogger("batchwright.service")

NOTED_SHARE = 1 / 6
"""Share of a lease after which an agent that got no work is noted to be there again."""

UNREAD = 3
"""Restarts of an agent without a word of its job, after which others get the job."""

MAX_UNREAD = 2000
"""Jobs of which that is remembered."""

LONGEST_JOB = 128 * 1024
"""Characters of a job as JSON; most have some 2,000. A list of jobs holds each of them whole."""

_NEWEST = (jobs.c.created.desc(), jobs.c.id.desc())


class Jobs(Part):
    """The table of jobs.

    Args:
        database: Holds it.
        settings: Limits and delays.
        clock: Unix time in seconds.
        steady: Seconds, by a clock that never jumps.

    Attributes:
        leases_lost: Those that this process has taken from silent agents.
    """

    def __init__(self, database: Database, settings: Settings, clock: Clock, steady: Clock) -> None:
        super().__init__(database, settings, clock)
        self.leases_lost = 0
        self._unread = Counter[str]()
        self._ages = LeaseAges(steady, settings.lease_seconds)

    @property
    def _there(self) -> ColumnElement[bool]:
        """Which agents are there."""
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
            name: For people.
            job: What to do; an agent resolves what is `auto` in it.
            auto: Whether to train without approval of the plan.
            owner: Name of the token, or `browser`.
            needs: Of the machine, beside what the job's keys say.
            keep_seconds: How long its training is kept for an agent that is silent or away;
                `None`: as the settings say.

        Raises:
            Refused: It is too long.
            TooMany: `Limits.open_jobs` of them have not ended.
        """
        now, identifier, text = self._clock(), str(uuid.uuid4()), job.model_dump_json()
        if len(text) > LONGEST_JOB:
            raise Refused(
                f"the job has {len(text):,} characters, where {LONGEST_JOB:,} are taken: shorten "
                "its names and lists"
            )
        most = self._settings.limits.open_jobs
        with self._database.writing() as connection:
            alone_adding(connection, jobs)
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
            return self._told(connection, identifier)

    def get(self, identifier: str) -> JobInfo:
        """A job."""
        with self._database.reading() as connection:
            return self._told(connection, identifier)

    def _told(self, connection: Connection, identifier: str) -> JobInfo:
        return self._with_reasons(connection, [job_row(connection, identifier)])[0]

    def _with_reasons(
        self, connection: Connection, rows: Sequence[RowMapping]
    ) -> Sequence[JobInfo]:
        """Jobs, each with the reason why it waits, if it does."""
        waiting = Waiting(connection, rows, self._there, self._settings.lease_seconds)
        return [
            self._info(row, waiting.words(row, silent=self._silent(row), keep=self._keep(row)))
            for row in rows
        ]

    def list(
        self, limit: int = 50, before: str | None = None, state: JobState | None = None
    ) -> Sequence[JobInfo]:
        """Jobs, those submitted last first, each with why it waits, if it does.

        Args:
            limit: At most so many.
            before: Those that come after this job in the list: the last one of the page before.
            state: Only those in this state.

        Raises:
            NotFound: There is no job ``before``.
        """
        wanted = select(*SHOWN).order_by(*_NEWEST).limit(limit)
        if state is not None:
            wanted = wanted.where(jobs.c.state == state)
        with self._database.reading() as connection:
            if before is not None:
                last = tuple_(job_row(connection, before)["created"], before)
                wanted = wanted.where(tuple_(jobs.c.created, jobs.c.id) < last)
            return self._with_reasons(connection, connection.execute(wanted).mappings().all())

    def going_and_waiting(self) -> tuple[int, int]:
        """How many jobs an agent works on, and how many have a plan that waits for approval."""
        going = jobs.c.state.in_(("probing", "training"))
        waits = and_(jobs.c.state == "planned", not_(or_(jobs.c.auto, jobs.c.approved)))
        with self._database.reading() as connection:
            return count(connection, jobs, LIVE, going), count(connection, jobs, LIVE, waits)

    def _info(self, row: RowMapping, waiting: str | None = None) -> JobInfo:
        silent = row["lease_expires"] is not None
        silent = silent and self._silent(row) >= self._settings.lease_seconds
        return info_of(row, keep=self._settings.keep_seconds, silent=silent, waiting=waiting)

    def _silent(self, row: RowMapping) -> float:
        """Seconds since the last word of a job's agent."""
        return self._ages.silent(row["id"], word_of(row))

    def _keep(self, row: RowMapping) -> float:
        """Seconds that a job's training is kept for its agent."""
        given = row["keep_seconds"]
        return self._settings.keep_seconds if given is None else given

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
        return self._info(self._change(identifier, lambda job, _: job_states.approve(job)))

    def cancel(self, identifier: str) -> JobInfo:
        """End a job, or have its agent end it; again changes nothing.

        Raises:
            Conflict: It has ended otherwise.
        """

        def step(job: Standing, silent: bool) -> Standing:
            return job_states.cancel(job, silent=silent)

        return self._info(self._change(identifier, step))

    # ----------------------------------------------------------------------------------- agents

    def agent(self, identifier: str) -> str | None:
        """Who has a job, or had it last."""
        found: str | None = self._value(jobs.c.agent, identifier)
        return found

    def asked(self, identifier: str, key: str) -> tuple[Job, Profile | None] | None:
        """A job as it was submitted, and what was measured for it, if anything.

        `None`: the lease with this key is not the newest, or has ended, so that nothing of it is
        taken any more.
        """
        wanted = select(jobs.c.job, jobs.c.profile).where(jobs.c.id == identifier, HELD)
        found = self._read(wanted.where(jobs.c.lease_key == key))
        if not found:
            return None
        return Job.model_validate_json(found[0].job), opened(Profile, found[0].profile)

    def lease(self, agent: str, session: str | None = None) -> Lease | None:
        """Hand an agent the oldest job that it carries out, its own ones first.

        An agent that asks while it has a job does not know of it any more: it gets it again, under
        a new number. A job that another agent had is left to that one while it is there and free,
        and a training for as long as it is kept, since checkpoints are in its folder.

        Args:
            agent: Its name; this also says that it is there.
            session: Of its process, as it introduced itself.

        Raises:
            NotFound: No agent of this name has introduced itself.
            Conflict: Another process has, since.
        """
        if self._has_nothing_for(agent, session):
            return None
        with self._database.writing() as connection:
            # In SQLite everybody else waits, in PostgreSQL whoever asks for the same agent.
            known = connection.execute(
                update(agents)
                .where(agents.c.name == agent)
                .values(seen=self._clock())
                .returning(agents.c.allow, agents.c.offer, agents.c.session)
            ).one_or_none()
            if known is None:
                raise missing_agent(agent)
            refuse_former_session(agent, known.session, session)
            self._ages.catch_up()
            for row in held_rows(connection, jobs.c.agent == agent):
                self._store(connection, row, job_states.lose(standing_of(row)))
            key, who = str(uuid.uuid4()), agent_of(agent, known.allow, known.offer)
            for job in fitting(connection, who, self._there, self._free):
                leased = self._lease(connection, job, agent, key)
                if leased is not None:
                    return leased
        return None

    def progress(self, identifier: str, progress: JobProgress) -> JobOrders:
        """Take in what an agent says of its job; this also says that it is there.

        Whether its profile and plan are of the job is looked at before, by `job_documents`.

        Raises:
            Conflict: The agent does not have it any more, or it does not go that way.
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
                # Nobody will hear of the former run any more, which has not ended.
                told = f"agent {row['agent']} goes on with its job, in a run of its own"
                # An agent may name any run: only one that was introduced for this job is its own.
                mine = (runs.c.id == former, runs.c.job_id == identifier, runs.c.outcome.is_(None))
                values = {"outcome": "stopped", "error": told, "changed": self._clock()}
                connection.execute(update(runs).where(*mine).values(**values))

        documents: dict[str, Any] = {
            name: document.model_dump_json()
            for name in DOCUMENTS
            if (document := getattr(progress, name)) is not None
        }
        if progress.run is not None:
            documents["run_id"] = progress.run
        job = standing_of(self._change(identifier, step, also, **documents))
        self._unread.pop(identifier, None)
        # Apart from that: a lease locks agent and job the other way round.
        self._write(update(agents).where(agents.c.name == job.agent).values(seen=self._clock()))
        return JobOrders(state=job.state, stop=job.cancelling)

    # ------------------------------------------------------------------------------------ clock

    def tick(self) -> None:
        """Note that words of agents can be taken in, and look who is silent.

        For a service to do every `TICK_SECONDS` or so. From the first time on, a longer while
        without is time in which nobody could be heard, which is no silence.
        """
        with self._database.writing() as connection:  # waits as long as their words would
            self._ages.tick()
            watched = LIVE & (jobs.c.lease_expires.is_not(None) | jobs.c.kept)
            rows = connection.execute(select(*STANDS).where(watched)).mappings().all()
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
        old = select(jobs.c.id).where(jobs.c.ended < before).order_by(jobs.c.ended)
        with self._database.writing() as connection:
            some = old.limit(share_of(connection, jobs)).scalar_subquery()
            connection.execute(delete(jobs).where(jobs.c.id.in_(some)))

    # ---------------------------------------------------------------------------------- storing

    def _change(
        self,
        identifier: str,
        step: Callable[[Standing, bool], Standing],
        also: Callable[[Connection, RowMapping], None] = lambda *_: None,
        **documents: Any,
    ) -> RowMapping:
        """A job's row after one step.

        Args:
            identifier: Of the job.
            step: From where it stands, and whether the agent that has it is silent, to the next.
            also: Done in the same transaction, with the row before.
            **documents: Stored with it; they are taken from who has the job, not from who says
                something again. Profile and plan stay what they are once the job is planned:
                somebody may have approved them.
        """
        with self._database.writing() as connection:
            row = job_row(connection, identifier, lock=True)
            job = standing_of(row)
            after = step(job, job.held and self._silent(row) >= self._settings.lease_seconds)
            taken = {
                name: value
                for name, value in documents.items()
                if job.held and (job.state == "probing" or name not in DOCUMENTS)
            }
            self._store(connection, row, after, **taken)
            also(connection, row)
            return job_row(connection, identifier)

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
        if values.keys() - {"lease_expires", "heard", "trained", "furthest", "lost"}:
            values["changed"] = self._clock()
        if job.state in ENDED and row["ended"] is None:
            values["ended"] = self._clock()
        if values:
            connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(**values))
            self._ages.silent(row["id"], (job.key, job.expires, job.kept))  # as of `word_of`

    def _refuse(self, connection: Connection, job: str, agent: str, reason: str) -> None:
        """Note that an agent does not carry a job out."""
        told = {"job_id": job, "agent": agent, "reason": reason}
        add = sqlite.insert if self._database.is_sqlite else postgresql.insert
        connection.execute(add(refusals).values(**told).on_conflict_do_nothing())

    def note_again(self, connection: Connection, agent: str) -> None:
        """An agent has begun anew. If it has a job and has not said a word of it, again and again,
        most likely it cannot read it, and others may.
        """
        for row in held_rows(connection, and_(jobs.c.agent == agent, not_(jobs.c.heard))):
            if len(self._unread) > MAX_UNREAD:
                self._unread.clear()
            self._unread[row["id"]] += 1
            if self._unread[row["id"]] >= UNREAD:
                reason = "it was given the job again and again, and ended without a word of it"
                self._refuse(connection, row["id"], agent, f"{reason}: is it of another version?")

    def kept_for(self, connection: Connection, agent: str) -> float:
        """Seconds for which a job is still left to an agent that is not there; 0: none is."""
        watched = LIVE & (jobs.c.lease_expires.is_not(None) | jobs.c.kept)
        wanted = select(*STANDS).where(jobs.c.agent == agent, watched)
        left = [0.0]
        for row in connection.execute(wanted).mappings():
            job, keep = standing_of(row), self._keep(row)
            if job.held:
                keep = self._settings.lease_seconds + (keep if job.state == "training" else 0.0)
            left.append(keep - self._silent(row))
        return max(left)

    def _free(self, row: RowMapping, agent: str) -> bool:
        """Whether a job may be given to an agent, by where it stands."""
        times = {"seconds": self._settings.lease_seconds, "keep": self._keep(row)}
        return standing_of(row).free_for(agent, self._silent(row), **times)

    def _lease(self, connection: Connection, identifier: str, agent: str, key: str) -> Lease | None:
        """The job, if nobody else has just got it."""
        wanted = select(*SHOWN, jobs.c.profile, jobs.c.plan).where(jobs.c.id == identifier)
        free = connection.execute(wanted.with_for_update(skip_locked=True))
        row = free.mappings().one_or_none()
        if row is None or not self._free(row, agent):
            return None
        try:
            profile, plan = opened(Profile, row["profile"]), opened(Plan, row["plan"])
        except ValidationError as error:  # an optimizer, say, whose package was removed from here
            log.error("job %s is not handed out: %s", identifier, first_problem(error, ""))
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
        """Whether an agent that asks for work changes nothing: as it is nearly always."""
        with self._database.reading() as connection:
            known = connection.execute(
                select(agents.c.allow, agents.c.offer, agents.c.session, agents.c.seen).where(
                    agents.c.name == agent
                )
            ).one_or_none()
            if known is None:
                raise missing_agent(agent)
            refuse_former_session(agent, known.session, session)
            # Either way: the clock may have been set.
            if abs(self._clock() - known.seen) >= self._settings.lease_seconds * NOTED_SHARE:
                return False
            held = select(jobs.c.id).where(HELD, jobs.c.agent == agent)
            if connection.execute(held.limit(1)).first() is not None:
                return False
            who = agent_of(agent, known.allow, known.offer)
            return next(fitting(connection, who, self._there, self._free), None) is None
