"""Jobs: submitted, handed to agents, followed to their end.

What may happen when is `job_states`' to say. Here each change is one transaction that locks the
job's row: it reads where the job stands, settles what the clock has decided meanwhile, and stores
where it stands next. A lease is decided in one transaction that locks the agent's row too.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from typing import Any

from sqlalchemy import Connection, RowMapping, and_, delete, func, insert, or_, select, update

from batchwright.records import Job, Plan, Profile, Record
from batchwright.records.allowing import DEFAULTS, Rules, refusal, rules_of
from batchwright.records.service import JobInfo, JobOrders, JobProgress, JobState, Lease
from batchwright.records.words import printable
from batchwright.service import job_states
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import agents, jobs
from batchwright.service.job_states import ENDED, Standing
from batchwright.service.problems import Conflict, NotFound, Refused, TooMany
from batchwright.service.settings import DAY, Settings
from batchwright.service.store.clock import Clock

NOTED_SHARE = 1 / 6
"""Of a lease: who asks for work and gets none is noted to be there again after so long only."""

_LONGEST_KNOWN = 8000
"""Characters of a job that is kept in memory for agents that ask; most have some 2,000."""

_DOCUMENTS: dict[str, type[Record]] = {"profile": Profile, "plan": Plan}
_SHOWN = [
    *(column for column in jobs.c if column.name not in _DOCUMENTS),
    jobs.c.profile.is_not(None).label("has_profile"),
    jobs.c.plan.is_not(None).label("has_plan"),
]
_FREE = and_(
    jobs.c.lease_expires.is_(None),
    or_(
        jobs.c.state == "queued",
        and_(jobs.c.state == "planned", or_(jobs.c.auto, jobs.c.approved)),
    ),
)
"""As `Standing.leasable`, for a query."""


class Jobs:
    """The table of jobs."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

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
            wanted = select(func.count()).select_from(jobs).where(jobs.c.state.not_in(ENDED))
            if (connection.execute(wanted).scalar() or 0) >= most:
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
                    **_columns(Standing(auto=auto)),
                )
            )
            row = _row(connection, identifier)
            return _info(row, self._waits_for(connection, row))

    def get(self, identifier: str) -> JobInfo:
        """A job.

        Raises:
            NotFound: There is no such job.
        """
        self.settle()
        with self._database.reading() as connection:
            row = _row(connection, identifier)
            return _info(row, self._waits_for(connection, row))

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
        wanted = select(*_SHOWN).order_by(jobs.c.created.desc(), jobs.c.id.desc()).limit(limit)
        if state is not None:
            wanted = wanted.where(jobs.c.state == state)
        with self._database.reading() as connection:
            if before is not None:
                created = _row(connection, before)["created"]
                later = and_(jobs.c.created == created, jobs.c.id < before)
                wanted = wanted.where(or_(jobs.c.created < created, later))
            rows = connection.execute(wanted).mappings().all()
        return [_info(row) for row in rows]

    def owner(self, identifier: str) -> str:
        """Name of the token that submitted a job.

        Raises:
            NotFound: There is no such job.
        """
        return str(self._column(identifier, "owner"))

    def profile(self, identifier: str) -> Profile | None:
        """What was measured for a job, if anything.

        Raises:
            NotFound: There is no such job.
        """
        text = self._column(identifier, "profile")
        return None if text is None else Profile.model_validate_json(text)

    def plan(self, identifier: str) -> Plan | None:
        """The plan of a job, if there is one.

        Raises:
            NotFound: There is no such job.
        """
        text = self._column(identifier, "plan")
        return None if text is None else Plan.model_validate_json(text)

    def approve(self, identifier: str) -> JobInfo:
        """Let a job's plan be followed; again changes nothing.

        Raises:
            NotFound: There is no such job.
            Conflict: No plan of it waits.
        """
        return _info(self._change(identifier, job_states.approve))

    def cancel(self, identifier: str) -> JobInfo:
        """End a job, or have its agent end it; again changes nothing.

        Raises:
            NotFound: There is no such job.
            Conflict: It has ended otherwise.
        """
        return _info(self._change(identifier, job_states.cancel))

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
                raise NotFound(f"no agent {printable(agent)} has introduced itself")
            for row in _held(connection, jobs.c.agent == agent):
                self._store(connection, row, job_states.lose(_standing(row)))
            key = str(uuid.uuid4())
            for job in self._fitting(connection, agent, allow):
                leased = self._lease(connection, job, agent, key)
                if leased is not None:
                    return leased
        return None

    def progress(self, identifier: str, progress: JobProgress) -> JobOrders:
        """Take in what an agent says of its job; this also says that it is there.

        Raises:
            NotFound: There is no such job.
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
            for name in _DOCUMENTS
            if (document := getattr(progress, name)) is not None
        }
        if progress.run is not None:
            documents["run_id"] = progress.run
        row = self._change(identifier, step, **documents)
        job = _standing(row)
        if row["agent"] is not None:
            with self._database.writing() as connection:
                connection.execute(
                    update(agents).where(agents.c.name == row["agent"]).values(seen=self._clock())
                )
        return JobOrders(state=job.state, stop=job.cancelling)

    # ------------------------------------------------------------------------------------ clock

    def settle(self) -> None:
        """Take the jobs back of agents that have been silent for too long."""
        late = jobs.c.lease_expires <= self._clock()
        with self._database.reading() as connection:
            if connection.execute(select(jobs.c.id).where(late).limit(1)).first() is None:
                return
        with self._database.writing() as connection:
            for row in _held(connection, late, skip=True):
                self._store(connection, row, job_states.lose(_standing(row)))

    def forgive_absence(self) -> None:
        """Give every agent that has a job a whole lease from now on.

        For a service that starts: while it was away nobody could tell it that they are there.
        """
        now = self._clock()
        with self._database.writing() as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.lease_expires.is_not(None))
                .values(lease_expires=now + self._settings.lease_seconds)
            )

    def delete_old(self) -> None:
        """Delete jobs that ended longer ago than `Settings.retention_days`."""
        days = self._settings.retention_days
        if days is None:
            return
        old = and_(jobs.c.state.in_(ENDED), jobs.c.changed < self._clock() - days * DAY)
        with self._database.writing() as connection:
            connection.execute(delete(jobs).where(old))

    # ---------------------------------------------------------------------------------- storing

    def _change(
        self, identifier: str, step: Callable[[Standing], Standing], **documents: Any
    ) -> RowMapping:
        """Make one step; that a lease has expired is kept, whatever becomes of the step.

        Returns:
            The job's row as it is then.
        """
        problem: Conflict | None = None
        with self._database.writing() as connection:
            row = _row(connection, identifier, lock=True)
            job = job_states.settled(_standing(row), self._clock())
            try:
                after = step(job)
            except Conflict as conflict:
                problem, after = conflict, job
            # Documents are taken from who has the job, not from who says something again.
            self._store(connection, row, after, **(documents if job.held and not problem else {}))
            row = _row(connection, identifier)
        if problem is not None:
            raise problem
        return row

    def _store(
        self, connection: Connection, row: RowMapping, job: Standing, **documents: Any
    ) -> None:
        """Store where a job stands; a mere heartbeat leaves the time of its last change alone."""
        before = _standing(row)
        values = documents | {
            name: value for name, value in _columns(job).items() if value != _columns(before)[name]
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
        submitted = json.loads(self._column(identifier, "job"))
        for document, key in product(documents, DEFAULTS):
            if getattr(document.job, key) != submitted[key]:
                raise Refused(
                    f"a {type(document).__name__.lower()} with {key}={getattr(document.job, key)} "
                    f"is not of this job, which has {key}={submitted[key]}"
                )

    def _lease(self, connection: Connection, identifier: str, agent: str, key: str) -> Lease | None:
        """The job, if nobody else has just got it."""
        row = _locked(connection, identifier)
        if row is None or not (job := _standing(row)).leasable:
            return None
        seconds = self._settings.lease_seconds
        expires = self._clock() + seconds
        self._store(connection, row, job_states.lease(job, agent=agent, key=key, expires=expires))
        texts = (
            connection.execute(select(jobs.c.profile, jobs.c.plan).where(jobs.c.id == identifier))
            .mappings()
            .one()
        )
        documents: dict[str, Any] = {
            name: None if texts[name] is None else model.model_validate_json(texts[name])
            for name, model in _DOCUMENTS.items()
        }
        return Lease(key=key, seconds=seconds, job=_info(_row(connection, identifier)), **documents)

    def _has_nothing_for(self, agent: str) -> bool:
        """Whether an agent that asks for work changes nothing: as it is nearly always.

        Raises:
            NotFound: No agent of this name has introduced itself.
        """
        with self._database.reading() as connection:
            known = connection.execute(
                select(agents.c.allow, agents.c.seen).where(agents.c.name == agent)
            ).one_or_none()
            if known is None:
                raise NotFound(f"no agent {printable(agent)} has introduced itself")
            if self._clock() - known.seen >= self._settings.lease_seconds * NOTED_SHARE:
                return False
            held = select(jobs.c.id).where(jobs.c.agent == agent, jobs.c.lease_expires.is_not(None))
            if connection.execute(held.limit(1)).first() is not None:
                return False
            return next(self._fitting(connection, agent, known.allow), None) is None

    def _fitting(self, connection: Connection, agent: str, allow: str) -> Iterator[str]:
        """Jobs that an agent may have now, those first that it gets first."""
        rules = _rules(allow)
        elsewhere = {
            name: _rules(texts)
            for name, (texts, busy) in self._present(connection).items()
            if not busy and name != agent
        }
        for identifier, before, text in connection.execute(_waiting(agent)):
            job = _asked(text)
            theirs = elsewhere.get(before)  # it is left to who had it, where that one may have it
            if not refusal(rules, job) and (theirs is None or refusal(theirs, job)):
                yield identifier

    def _waits_for(self, connection: Connection, row: RowMapping) -> str | None:
        """Why no agent that is there has a job that waits for one."""
        if not _standing(row).leasable:
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

    def _column(self, identifier: str, name: str) -> Any:
        with self._database.reading() as connection:
            row = connection.execute(select(jobs.c[name]).where(jobs.c.id == identifier)).first()
        if row is None:
            raise _missing(identifier)
        return row[0]


# ------------------------------------------------------------------------------- rows and records


@lru_cache(maxsize=500)
def _rules(texts: str) -> Rules:
    """What an agent carries out, from what is stored; many agents ask every other second."""
    return rules_of(json.loads(texts))


def _asked(text: str) -> Job:
    """What rules look at of a job, from what is stored, which never changes."""
    return _known_job(text) if len(text) <= _LONGEST_KNOWN else _job_of(text)


@lru_cache(maxsize=1000)
def _known_job(text: str) -> Job:
    return _job_of(text)


def _job_of(text: str) -> Job:
    values = json.loads(text)  # checked when it was submitted
    return Job.model_construct(**{key: values[key] for key in DEFAULTS})


def _row(connection: Connection, identifier: str, *, lock: bool = False) -> RowMapping:
    wanted = select(*_SHOWN).where(jobs.c.id == identifier)
    if lock:
        wanted = wanted.with_for_update()
    row = connection.execute(wanted).mappings().one_or_none()
    if row is None:
        raise _missing(identifier)
    return row


def _locked(connection: Connection, identifier: str) -> RowMapping | None:
    """A job's row, locked; `None` if somebody else changes it just now."""
    wanted = select(*_SHOWN).where(jobs.c.id == identifier).with_for_update(skip_locked=True)
    return connection.execute(wanted).mappings().one_or_none()


def _held(connection: Connection, which: Any, *, skip: bool = False) -> list[RowMapping]:
    """Rows, locked, of the jobs among ``which`` that an agent has.

    Args:
        connection: In a transaction that writes.
        which: A condition.
        skip: Leave out what somebody else changes just now, so that nobody waits in a circle.
    """
    wanted = select(*_SHOWN).where(which, jobs.c.lease_expires.is_not(None))
    return list(connection.execute(wanted.with_for_update(skip_locked=skip)).mappings())


def _waiting(agent: str) -> Any:
    """Jobs that may be leased, those that the agent had before first, then by age."""
    own = func.coalesce(jobs.c.agent, "") == agent
    return (
        select(jobs.c.id, jobs.c.agent, jobs.c.job)
        .where(_FREE)
        .order_by(own.desc(), jobs.c.created, jobs.c.id)
    )


def _standing(row: RowMapping) -> Standing:
    return Standing(
        state=row["state"],
        auto=row["auto"],
        approved=row["approved"],
        cancelling=row["cancelling"],
        has_plan=row["has_plan"],
        agent=row["agent"],
        key=row["lease_key"],
        expires=row["lease_expires"],
        attempts=row["attempts"],
        lost=row["lost"],
        error=row["error"],
    )


def _columns(job: Standing) -> dict[str, Any]:
    """A standing as columns; whether there is a plan, the plan itself says."""
    names = {"key": "lease_key", "expires": "lease_expires"}
    return {
        names.get(name, name): value for name, value in asdict(job).items() if name != "has_plan"
    }


def _info(row: RowMapping, waiting: str | None = None) -> JobInfo:
    return JobInfo(
        id=row["id"],
        name=row["name"],
        state=row["state"],
        auto=row["auto"],
        approved=row["approved"],
        created=row["created"],
        changed=row["changed"],
        job=json.loads(row["job"]),
        run=row["run_id"],
        agent=row["agent"],
        attempts=row["attempts"],
        cancelling=row["cancelling"],
        error=row["error"],
        has_profile=row["has_profile"],
        has_plan=row["has_plan"],
        waiting=waiting,
    )


def _missing(identifier: str) -> NotFound:
    return NotFound(f"there is no job {identifier[:36]}")
