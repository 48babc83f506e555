"""Runs: introduced, heard of, ended, listed, deleted. Their records are `records`' part."""

from __future__ import annotations

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
from sqlalchemy.dialects import postgresql, sqlite

from batchwright.records import Plan, Profile, RunSummary
from batchwright.records.service import (
    RecordsTaken,
    RunEnd,
    RunInfo,
    RunIntroduction,
    RunState,
)
from batchwright.service.database.tables import DELETED, EXPIRED, GONE, THERE, advice, records, runs
from batchwright.service.problems import Conflict, Refused, Unavailable
from batchwright.service.settings import DAY
from batchwright.service.store.part import Part, alone_adding, count, missing, opened, share_of

REMOVED_AT_ONCE = 5000
"""Records in one transaction when a run is removed, so that others can write in between."""

REMEMBERED_SECONDS = 30 * DAY
"""How long it is remembered that a run was deleted."""

LONGEST_NAME = 1000
"""Characters of a network's name, or of the data's: a list of runs holds each of them whole."""

LONGEST_KNOWN = 32 * 1024
"""Characters of a plan that is kept in memory, read; it takes some ten times as much."""

Identifiers = list[str]

_EMPTIED = and_(runs.c.outcome == DELETED, runs.c.plan == "")
"""Deleted runs of which nothing else is there any more."""

_NOTHING = {
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
        """Store a run, or hear of it again: one that had stopped or failed goes on.

        Args:
            identifier: A UUID, chosen by whoever runs it.
            introduction: What it is.
            owner: Name of the token that may write to it from now on.
            demo: Whether it is the example that comes with the service.

        Raises:
            Refused: A name in its plan is too long.
            Conflict: The run is another owner's or of another training, or was deleted, or there
                are too many runs.
            Unavailable: It is just being removed, being too old.
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
        told: dict[str, Any] = {
            "name": introduction.name,
            "follows_advice": introduction.follows_advice,
            "job_id": introduction.job,
            "plan": plan.model_dump_json(),
            "changed": now,
        }
        if introduction.profile is not None:
            told["profile"] = introduction.profile.model_dump_json()
        with self._database.writing() as connection:
            found = _row(connection, identifier, lock=True)
            if found is None:
                most = self._settings.limits.runs
                alone_adding(connection, runs)
                # The second count looks at each row, which takes long.
                full = count(connection, runs) >= most and count(connection, runs, THERE) >= most
                if full and _row(connection, identifier) is None:  # nor has it come meanwhile
                    raise Conflict(f"this service keeps {most} runs at most: delete some first")
                add = sqlite.insert if self._database.is_sqlite else postgresql.insert
                new = add(runs).values(
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
                    **told,
                )
                new = new.on_conflict_do_nothing()
                if connection.execute(new.returning(runs.c.id)).first() is None:
                    # Sent again while it was on its way; in PostgreSQL the other one has it stored.
                    found = _row(connection, identifier, lock=True)
            if found is not None:
                _refuse(found, owner, facts)
                if found["outcome"] in ("stopped", "failed"):
                    told |= {"outcome": None, "error": None}
                connection.execute(
                    update(runs).where(runs.c.id == identifier).values(**facts, **told)
                )
            return self._info(_wanted(connection, identifier))

    def alive(self, identifier: str) -> RecordsTaken:
        """Hear of a run that has nothing to say; what it would be told with its records."""
        with self._database.writing() as connection:
            row = connection.execute(
                update(runs)
                .where(runs.c.id == identifier, THERE)
                .values(changed=self._clock())
                .returning(runs.c.next_sequence, runs.c.advice, runs.c.digest)
            ).one_or_none()
        if row is None:
            raise missing("run", identifier)
        return RecordsTaken(next=row.next_sequence, advice=row.advice, digest=row.digest)

    def end(self, identifier: str, end: RunEnd) -> RunInfo:
        """Note how a run ended."""
        values: dict[str, Any] = {
            "outcome": end.outcome,
            "error": end.error,
            "changed": self._clock(),
        }
        if end.summary is not None:
            values["summary"] = end.summary.model_dump_json()
        with self._database.writing() as connection:
            mine = (runs.c.id == identifier, THERE)
            if not connection.execute(update(runs).where(*mine).values(**values)).rowcount:
                raise missing("run", identifier)
            return self._info(_wanted(connection, identifier))

    def get(self, identifier: str) -> RunInfo:
        """A run."""
        with self._database.reading() as connection:
            return self._info(_wanted(connection, identifier))

    def list(
        self,
        limit: int = 50,
        before: str | None = None,
        state: RunState | None = None,
        query: str = "",
    ) -> list[RunInfo]:
        """Runs, those introduced last first.

        Args:
            limit: At most so many.
            before: Those that come after this run in the list: the last one of the page before.
            state: Only those in this state.
            query: Only those with this in name, network, data or method, in any case.

        Raises:
            NotFound: There is no run ``before``.
        """
        newest = (runs.c.created.desc(), runs.c.id.desc())
        wanted = select(*_SHOWN).where(THERE).order_by(*newest).limit(limit)
        heard_of = self._clock() - self._settings.silent_seconds
        if state == "running":
            wanted = wanted.where(runs.c.outcome.is_(None), runs.c.changed >= heard_of)
        elif state == "silent":
            wanted = wanted.where(runs.c.outcome.is_(None), runs.c.changed < heard_of)
        elif state is not None:
            wanted = wanted.where(runs.c.outcome == state)
        if query:
            searched = (runs.c.name, runs.c.network, runs.c.data, runs.c.method)
            wanted = wanted.where(
                or_(*(column.icontains(query, autoescape=True) for column in searched))
            )
        with self._database.reading() as connection:
            if before is not None:
                last = _wanted(connection, before)
                place = tuple_(last["created"], before)
                wanted = wanted.where(tuple_(runs.c.created, runs.c.id) < place)
            rows = connection.execute(wanted).mappings().all()
        return [self._info(row) for row in rows]

    def owner(self, identifier: str) -> str:
        """Name of the token that a run belongs to."""
        return str(self._of(runs.c.owner, identifier))

    def plan(self, identifier: str) -> Plan:
        """The plan that a run follows now."""
        text = self._of(runs.c.plan, identifier)
        return _known(text) if len(text) <= LONGEST_KNOWN else Plan.model_validate_json(text)

    def profile(self, identifier: str) -> Profile | None:
        """What a run's plan was made from, if that was sent."""
        return opened(Profile, self._of(runs.c.profile, identifier))

    def summary(self, identifier: str) -> RunSummary | None:
        """The summary of a run that has finished and sent it.

        Where the run's files are on its machine is nobody's business here: its folder is told as
        the run's name.
        """
        found = opened(RunSummary, self._of(runs.c.summary, identifier))
        return found and found.model_copy(update={"run_folder": self._of(runs.c.name, identifier)})

    def delete(self, identifier: str) -> None:
        """Have nobody find a run any more; `remove_some` removes its records and advice."""
        # The example that comes with the service may be loaded again.
        outcome = case((runs.c.demo, EXPIRED), else_=DELETED)
        there = update(runs).where(runs.c.id == identifier, THERE)
        if not self._write(there.values(outcome=outcome, changed=self._clock())):
            raise missing("run", identifier)

    def delete_old(self, before: float) -> Identifiers:
        """Delete some of the runs last heard of before a moment, and tell which."""
        old = select(runs.c.id).where(runs.c.changed < before, runs.c.demo.is_(False), THERE)
        with self._database.writing() as connection:
            some = old.order_by(runs.c.changed).limit(share_of(connection, runs))
            gone = update(runs).where(runs.c.id.in_(some.scalar_subquery()))
            told = connection.execute(gone.values(outcome=EXPIRED).returning(runs.c.id))
            return list(told.scalars())

    def forget_deleted(self) -> None:
        """Forget that there were the runs that somebody deleted long ago."""
        forgotten = self._clock() - REMEMBERED_SECONDS
        self._write(delete(runs).where(_EMPTIED, runs.c.changed < forgotten))

    def to_remove(self) -> Identifiers:
        """Runs that nobody finds any more and of which there is still something."""
        found = self._read(select(runs.c.id).where(runs.c.outcome.in_(GONE), not_(_EMPTIED)))
        return [row.id for row in found]

    def remove_some(self, identifier: str) -> bool:
        """Remove some of what such a run held, in a short transaction; returns whether there may be
        more.
        """
        with self._database.writing() as connection:
            # In PostgreSQL another process may be at it.
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
                connection.execute(update(runs).where(runs.c.id == identifier).values(**_NOTHING))
            return False

    def _of(self, column: Column[Any], identifier: str) -> Any:
        return self._value(column, identifier, THERE)

    def _info(self, row: RowMapping) -> RunInfo:
        state: RunState = row["outcome"] or "running"
        if state == "running" and self._clock() - row["changed"] > self._settings.silent_seconds:
            state = "silent"
        told = {"state": state, "records": row["next_sequence"], "job": row["job_id"]}
        return RunInfo(**{name: row[name] for name in RunInfo.model_fields.keys() - told}, **told)


@lru_cache(maxsize=100)
def _known(text: str) -> Plan:
    """A plan; a run that reports is held against its own after each epoch."""
    return Plan.model_validate_json(text)


def _row(connection: Connection, identifier: str, *, lock: bool = False) -> RowMapping | None:
    """A run's row, also of one that is `GONE`."""
    wanted = select(*_SHOWN).where(runs.c.id == identifier)
    if lock:
        wanted = wanted.with_for_update()
    return connection.execute(wanted).mappings().one_or_none()


def _wanted(connection: Connection, identifier: str) -> RowMapping:
    row = _row(connection, identifier)
    if row is None or row["outcome"] in GONE:
        raise missing("run", identifier)
    return row


def _refuse(found: RowMapping, owner: str, facts: dict[str, Any]) -> None:
    """A run keeps its owner, data, network, method and length; batches and rates may change. And a
    reporter that goes on does not bring back what somebody has deleted.
    """
    if found["outcome"] == EXPIRED:
        raise Unavailable("this run is being removed, being too old: come again in a moment")
    if found["outcome"] == DELETED:
        raise Conflict(
            "this run was deleted here: to report it anew, end it, remove report.json from its run "
            "folder, and use `batchwright send`"
        )
    if found["owner"] != owner:
        raise Conflict("this run was introduced by another token; runs report with the same one")
    for name in ("data", "network", "method", "epochs"):
        if found[name] != facts[name]:
            raise Conflict(
                f"this run was introduced with {name} {found[name]}, not {facts[name]}: "
                "a new training takes a new identifier"
            )
