"""The table of runs: introduced, reported, ended, listed, deleted. `records` has their records."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    RowMapping,
    and_,
    case,
    delete,
    func,
    not_,
    or_,
    select,
    tuple_,
    update,
)

from batchwright.records import Plan, Profile, RunSummary
from batchwright.records.service import (
    RecordsTaken,
    RunEnd,
    RunInfo,
    RunIntroduction,
    RunState,
)
from batchwright.service.database.tables import (
    DELETED,
    EXPIRED,
    GONE,
    NOT_DELETED,
    advice,
    records,
    runs,
)
from batchwright.service.problems import Conflict, Refused, Unavailable
from batchwright.service.settings import DAY
from batchwright.service.store.part import (
    Part,
    count,
    deletion_limit,
    lock_for_insert,
    missing,
    stored_document,
)

REMOVED_AT_ONCE = 5000
"""Records that one transaction removes, so that others can write in between."""

REMEMBERED_SECONDS = 30 * DAY
"""For how long the row of a deleted run stays."""

LONGEST_NAME = 1000
"""Maximum characters of a network's or data set's name: a list of runs holds them whole."""

LONGEST_KNOWN = 32 * 1024
"""Maximum characters of a plan that stays in memory as a record, ten times as large."""

_known_plan = lru_cache(maxsize=100)(Plan.model_validate_json)  # the adviser asks after each epoch

Identifiers = list[str]

_EMPTIED = and_(runs.c.outcome == DELETED, runs.c.plan == "")
"""Condition: a run was deleted, and nothing but its row is left."""

_EMPTY_COLUMNS = {
    **dict.fromkeys(("name", "plan", "network", "data"), ""),
    **dict.fromkeys(("profile", "summary", "error", "job_id", "top1")),
    "counts": "{}",
    "next_sequence": 0,
    "digest": None,
}

_SHOWN = [
    column for column in runs.c if column.name not in ("plan", "profile", "summary", "counts")
]


class Runs(Part):
    """The table of runs."""

    def introduce(
        self, identifier: str, introduction: RunIntroduction, owner: str, *, demo: bool = False
    ) -> RunInfo:
        """Store a run. One that is known, and has stopped or failed, goes on.

        Args:
            identifier: The run's UUID, chosen by its reporter.
            introduction: Name, plan and profile of the run.
            owner: Name of the token that may report the run from now on.
            demo: Whether the run is the example that comes with the service.

        Raises:
            Refused: A name in the plan is too long.
            Conflict: The run is another owner's or of another training, or was deleted, or
                `Limits.runs` are stored.
            Unavailable: The run is being removed, as it is too old.
        """
        now, plan = self._clock(), introduction.plan
        facts = {
            "epochs": plan.epochs,
            "workers": plan.workers,
            "method": plan.method,
            "network": plan.network.name,
            "data": plan.data.name,
        }
        for name, value in facts.items():
            if isinstance(value, str) and len(value) > LONGEST_NAME:
                raise Refused(f"plan.{name}: its name has more than {LONGEST_NAME:,} characters")
        values: dict[str, Any] = {
            "name": introduction.name,
            "follows_advice": introduction.follows_advice,
            "job_id": introduction.job,
            "plan": plan.model_dump_json(),
            "changed": now,
        }
        if introduction.profile is not None:
            values["profile"] = introduction.profile.model_dump_json()
        with self._database.writing() as connection:
            row = _row(connection, identifier, lock=True)
            if row is None:
                most = self._settings.limits.runs
                lock_for_insert(connection, runs)
                # The second count looks at each row, which takes long.
                full = (
                    count(connection, runs) >= most and count(connection, runs, NOT_DELETED) >= most
                )
                if full and _row(connection, identifier) is None:  # nor was it added meanwhile
                    raise Conflict(f"this service keeps {most} runs at most: delete some first")
                new = self._insert_if_new(
                    runs,
                    id=identifier,
                    owner=owner,
                    demo=demo,
                    created=now,
                    next_sequence=0,
                    counts="{}",
                    advice=0,
                    epochs_done=0,
                    global_batch_size=plan.stages[0].global_batch_size,
                    **facts,
                    **values,
                )
                if connection.execute(new.returning(runs.c.id)).first() is None:
                    # In PostgreSQL the same introduction, sent twice, was stored meanwhile.
                    row = _row(connection, identifier, lock=True)
            if row is not None:
                _refuse(row, owner, facts)
                if row["outcome"] in ("stopped", "failed"):
                    values |= {"outcome": None, "error": None}
                connection.execute(
                    update(runs).where(runs.c.id == identifier).values(**facts, **values)
                )
            return self._info(_existing_row(connection, identifier))

    def alive(self, identifier: str) -> RecordsTaken:
        """Note that a run goes on, without new records; returns what an answer to records says."""
        with self._database.writing() as connection:
            row = connection.execute(
                update(runs)
                .where(runs.c.id == identifier, NOT_DELETED)
                .values(changed=self._clock())
                .returning(runs.c.next_sequence, runs.c.advice, runs.c.digest)
            ).one_or_none()
        if row is None:
            raise missing("run", identifier)
        return RecordsTaken(next=row.next_sequence, advice=row.advice, digest=row.digest)

    def end(self, identifier: str, end: RunEnd) -> RunInfo:
        """Store how a run ended. A finished run stays finished: what says otherwise is late, or
        comes from a copy of the run folder.
        """
        values: dict[str, Any] = {
            "outcome": end.outcome,
            "error": end.error,
            "changed": self._clock(),
        }
        if end.summary is not None:
            values["summary"] = end.summary.model_dump_json()
        this = [runs.c.id == identifier, NOT_DELETED]
        if end.outcome != "finished":
            this.append(or_(runs.c.outcome.is_(None), runs.c.outcome != "finished"))
        with self._database.writing() as connection:
            connection.execute(update(runs).where(*this).values(**values))
            return self._info(_existing_row(connection, identifier))

    def get(self, identifier: str) -> RunInfo:
        """A run."""
        with self._database.reading() as connection:
            return self._info(_existing_row(connection, identifier))

    def list(
        self,
        limit: int = 50,
        before: str | None = None,
        state: RunState | None = None,
        query: str = "",
        *,
        profiled: bool = False,
    ) -> list[RunInfo]:
        """Runs, the newest first.

        Args:
            limit: Maximum number of runs.
            before: Identifier of the last run of the previous page; `None`: the first page.
            state: State of the runs; `None`: any.
            query: Text that name, network, data or method holds, whatever its case.
            profiled: Whether to list only runs whose profile was sent.

        Raises:
            NotFound: There is no run ``before``.
        """
        newest = (runs.c.created.desc(), runs.c.id.desc())
        wanted = select(*_SHOWN).where(NOT_DELETED).order_by(*newest).limit(limit)
        now, seconds = self._clock(), self._patience()
        lately = runs.c.changed.between(now - seconds, now + seconds)  # as in `_info_at`
        if state in ("running", "silent"):
            heard = lately if state == "running" else not_(lately)
            wanted = wanted.where(runs.c.outcome.is_(None), heard)
        elif state is not None:
            wanted = wanted.where(runs.c.outcome == state)
        if profiled:
            wanted = wanted.where(runs.c.profile.is_not(None))
        if query:
            searched = (runs.c.name, runs.c.network, runs.c.data, runs.c.method)
            texts = [query]
            if not query.isascii():  # SQLite knows upper and lower case of ASCII alone
                texts = sorted({query, query.lower(), query.upper(), query.title()})
            holds = (one.icontains(text, autoescape=True) for one in searched for text in texts)
            wanted = wanted.where(or_(*holds))
        with self._database.reading() as connection:
            if before is not None:
                # Also a run that was deleted since: the page after it stays.
                last = _row(connection, before)
                if last is None:
                    raise missing("run", before)
                place = tuple_(last["created"], before)
                wanted = wanted.where(tuple_(runs.c.created, runs.c.id) < place)
            rows = connection.execute(wanted).mappings().all()
        return [_info_at(row, now, seconds) for row in rows]

    def owner(self, identifier: str) -> str:
        """Name of the token that a run belongs to."""
        return str(self._column(runs.c.owner, identifier))

    def plan(self, identifier: str) -> Plan:
        """The plan that a run follows now."""
        text = self._column(runs.c.plan, identifier)
        if len(text) > LONGEST_KNOWN:
            return Plan.model_validate_json(text)
        return _known_plan(text)

    def profile(self, identifier: str) -> Profile | None:
        """The profile that a run's plan was made from, if it was sent."""
        return stored_document(Profile, self._column(runs.c.profile, identifier))

    def summary(self, identifier: str) -> RunSummary | None:
        """The summary of a finished run, if it was sent.

        The run folder in it is replaced by the run's name: a path of another machine is no reader's
        business.
        """
        summary = stored_document(RunSummary, self._column(runs.c.summary, identifier))
        if summary is None:
            return None
        return summary.model_copy(update={"run_folder": self._column(runs.c.name, identifier)})

    def delete(self, identifier: str) -> None:
        """Mark a run as deleted, so that it is not found; `remove_some` removes what it holds."""
        # Not DELETED for the example that comes with the service: it may be loaded again.
        outcome = case((runs.c.demo, EXPIRED), else_=DELETED)
        this = update(runs).where(runs.c.id == identifier, NOT_DELETED)
        if not self._write(this.values(outcome=outcome, changed=self._clock())):
            raise missing("run", identifier)

    def delete_old(self, before: float) -> Identifiers:
        """Mark as expired some of the runs last heard of before a moment; returns which."""
        old = select(runs.c.id).where(runs.c.changed < before, runs.c.demo.is_(False), NOT_DELETED)
        with self._database.writing() as connection:
            some = old.order_by(runs.c.changed).limit(deletion_limit(connection, runs))
            expired = update(runs).where(runs.c.id.in_(some.scalar_subquery()))
            rows = connection.execute(expired.values(outcome=EXPIRED).returning(runs.c.id))
            return list(rows.scalars())

    def forget_deleted(self) -> None:
        """Remove the rows of runs that were deleted `REMEMBERED_SECONDS` ago."""
        forgotten = self._clock() - REMEMBERED_SECONDS
        self._write(delete(runs).where(_EMPTIED, runs.c.changed < forgotten))

    def to_remove(self) -> Identifiers:
        """Deleted and expired runs that still hold something."""
        rows = self._read(select(runs.c.id).where(runs.c.outcome.in_(GONE), not_(_EMPTIED)))
        return [row.id for row in rows]

    def remove_some(self, identifier: str) -> bool:
        """Remove some of what a deleted or expired run holds, in a short transaction.

        Returns:
            Whether there may be more.
        """
        with self._database.writing() as connection:
            # In PostgreSQL another process may be removing it.
            outcome = connection.execute(
                select(runs.c.outcome)
                .where(runs.c.id == identifier, runs.c.outcome.in_(GONE), not_(_EMPTIED))
                .with_for_update(skip_locked=True)
            ).scalar()
            if outcome is None:
                return False
            first = connection.execute(
                select(func.min(records.c.sequence)).where(records.c.run_id == identifier)
            ).scalar()
            if first is not None:
                connection.execute(
                    delete(records).where(
                        records.c.run_id == identifier,
                        records.c.sequence < first + REMOVED_AT_ONCE,
                    )
                )
                return True
            if outcome == EXPIRED:
                connection.execute(delete(runs).where(runs.c.id == identifier))
            else:
                connection.execute(delete(advice).where(advice.c.run_id == identifier))
                this = update(runs).where(runs.c.id == identifier)
                connection.execute(this.values(**_EMPTY_COLUMNS))
            return False

    def _column(self, column: Column[Any], identifier: str) -> Any:
        return self._value(column, identifier, NOT_DELETED)

    def _patience(self) -> float:
        """Seconds without a report after which a run that goes on is silent: after a break in
        listening no run is, for as long as that.
        """
        seconds = self._settings.silent_seconds
        return seconds if self._listening.seconds() > seconds else math.inf

    def _info(self, row: RowMapping) -> RunInfo:
        return _info_at(row, self._clock(), self._patience())


def _info_at(row: RowMapping, now: float, seconds: float) -> RunInfo:
    """What a row says of its run at a moment; silent if there was no report for so long."""
    state: RunState = row["outcome"] or "running"
    # The absolute value: the clock may have been set back since the last report.
    if state == "running" and abs(now - row["changed"]) > seconds:
        state = "silent"
    own = {"state": state, "records": row["next_sequence"], "job": row["job_id"]}
    return RunInfo(**{name: row[name] for name in RunInfo.model_fields.keys() - own}, **own)


def _row(connection: Connection, identifier: str, *, lock: bool = False) -> RowMapping | None:
    """A run's row, deleted or not; `None` where there is none."""
    wanted = select(*_SHOWN).where(runs.c.id == identifier)
    if lock:
        wanted = wanted.with_for_update()
    return connection.execute(wanted).mappings().one_or_none()


def _existing_row(connection: Connection, identifier: str) -> RowMapping:
    """The row of a run that is not deleted.

    Raises:
        NotFound: There is no such run.
    """
    row = _row(connection, identifier)
    if row is None or row["outcome"] in GONE:
        raise missing("run", identifier)
    return row


def _refuse(row: RowMapping, owner: str, facts: dict[str, Any]) -> None:
    """Refuse an introduction that does not fit a stored run. A run keeps its owner, data, network,
    method and length; batches and rates may change. A reporter that goes on does not bring a
    deleted run back.
    """
    if row["outcome"] == EXPIRED:
        raise Unavailable("this run is being removed, being too old: come again in a moment")
    if row["outcome"] == DELETED:
        raise Conflict(
            "this run was deleted here: to report it anew, end it, remove report.json from its run "
            "folder, and use `batchwright send`"
        )
    if row["owner"] != owner:
        raise Conflict("this run was introduced by another token; runs report with the same one")
    for name in ("data", "network", "method", "epochs"):
        if row[name] != facts[name]:
            raise Conflict(
                f"this run was introduced with {name} {row[name]}, not {facts[name]}: "
                "a new training takes a new identifier"
            )
