"""Records of runs: taken once each, and handed out few at a time however many there are.

A record's sequence number is its line in the run's metrics.jsonl. A batch that overlaps what is
stored has the known part skipped, one that leaves a gap is refused with the number that is wanted,
and both are decided in the transaction that stores the batch: whatever a client repeats, and
whenever the service is killed, each record is there once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Select, select, union_all, update

from batchwright.records.service import RecordBatch, RecordPage, RecordsTaken
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import THERE, records, runs
from batchwright.service.problems import Conflict, Forbidden, Refused, ServiceProblem
from batchwright.service.settings import Settings
from batchwright.service.store.lines import checked
from batchwright.service.store.part import Clock, Part, missing
from batchwright.service.store.tokens import Caller

MOST_KINDS = 64
"""Of the records of a run, beside notes; our own runs write five. How many there are of each is
counted anew with each batch."""

MOST_CHARACTERS = 32 * 2**20
"""Of records handed out at once, however many were asked for."""

MOST_EPOCHS = 10_000
"""Epoch lines handed out at once; of more, evenly spaced ones."""


class Records(Part):
    """The table of records."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        super().__init__(database, settings, clock)
        self._queue = threading.Lock()
        self._waiting: list[_Delivery] = []
        self._led = False

    def append(
        self, identifier: str, batch: RecordBatch, caller: Caller | None = None
    ) -> RecordsTaken:
        """Store a batch; when this returns, all of it is there for good.

        Args:
            identifier: The run.
            batch: Consecutive records.
            caller: Who sends it; `None` does not ask.

        Raises:
            Forbidden: It is not the caller's.
            Conflict: Records before it are missing (`next` says from which on), or it is full.
            Refused: A record is none that a run writes, or there are too many kinds of them.
        """
        lines = [checked(record, batch.first + i) for i, record in enumerate(batch.records)]
        delivery = _Delivery(identifier, batch.first, lines, caller)
        if self._database.is_sqlite:
            self._store_together(delivery)
        else:
            with self._database.writing() as connection:
                self._store(connection, delivery)
        if delivery.problem is not None:
            raise delivery.problem
        assert delivery.taken is not None  # noqa: S101 - set where there is no problem
        return delivery.taken

    def page(self, identifier: str, kind: str, most: int = 1000) -> RecordPage:
        """Records of a kind, evenly spaced, at most ``most`` and the newest; fewer of long ones."""
        with self._database.reading() as connection:
            total, newest = _counts(connection, identifier).get(kind, (0, -1))
            level = 0
            while total >> level > most:
                level += 1
            rows, whole = _read(connection, from_level(identifier, kind, level))
            while not whole:
                level += 1
                rows, whole = _read(connection, from_level(identifier, kind, level))
            rows.sort()
            if total and (not rows or rows[-1][0] < newest):
                last = _lines_of(identifier).where(records.c.sequence == newest)
                rows += [(row.sequence, row.body) for row in connection.execute(last)]
        return _page(kind, total, 2**level, rows)

    def after(
        self, identifier: str, kind: str | None = None, sequence: int = -1, limit: int = 1000
    ) -> RecordPage:
        """All records after ``sequence``, of one kind or of all (``kind`` of the page is empty).

        Args:
            identifier: The run.
            kind: Of these only.
            sequence: Those with a greater one; -1 starts at the beginning.
            limit: At most so many, fewer of very long ones; the page's last sequence leads to the
                next page, until one is empty.
        """
        with self._database.reading() as connection:
            counts = _counts(connection, identifier)
            if kind is None:
                total = sum(count for count, _ in counts.values())
                wanted = _lines_of(identifier).where(records.c.sequence > sequence)
            else:
                total = counts.get(kind, (0, -1))[0]
                wanted = _after_of_kind(identifier, kind, sequence, limit, total.bit_length())
            rows, _ = _read(connection, wanted.order_by(records.c.sequence).limit(limit))
        return _page(kind or "", total, 1, rows)

    def epochs(self, identifier: str) -> list[dict[str, Any]]:
        """The newest line of each finished epoch, in the epochs' order.

        An epoch that was done again after a resume has two lines, and the second one counts.
        """
        found = self.page(identifier, "epoch", MOST_EPOCHS)
        by_epoch = {line["epoch"]: line for line in found.records if "epoch" in line}
        return [by_epoch[epoch] for epoch in sorted(by_epoch)]

    # ------------------------------------------------------------------------------------ storing

    def _store_together(self, delivery: _Delivery) -> None:
        """Store with whatever else waits, in one transaction.

        SQLite syncs the disk once for each. One thread at a time leads: it commits all that came in
        while the one before was busy, wakes those it has served, and hands the lead to one that
        came since. So nobody waits longer than for two commits, however many there are.
        """
        with self._queue:
            self._waiting.append(delivery)
            leads, self._led = not self._led, True
        if not leads:
            delivery.turn.wait()
            if delivery.taken is not None or delivery.problem is not None:
                return
        with self._queue:
            together, self._waiting = self._waiting, []
        try:
            with self._database.writing() as connection:
                for one in together:
                    self._store(connection, one)
        except Exception as error:  # noqa: BLE001 - each of them raises it
            for one in together:  # rolled back, all of them
                one.taken, one.problem = None, error
        finally:
            with self._queue:
                if self._waiting:
                    self._waiting[0].turn.set()
                else:
                    self._led = False
            for one in together:
                one.turn.set()

    def _store(self, connection: Connection, delivery: _Delivery) -> None:
        """Store one delivery; what is wrong with it is noted there, before anything is written."""
        try:
            delivery.taken = self._take_in(connection, delivery)
        except ServiceProblem as problem:
            delivery.problem = problem

    def _take_in(self, connection: Connection, delivery: _Delivery) -> RecordsTaken:
        run = connection.execute(
            select(runs.c.owner, runs.c.next_sequence, runs.c.counts, runs.c.advice)
            .where(runs.c.id == delivery.run, THERE)
            .with_for_update()
        ).one_or_none()
        if run is None:
            raise missing("run", delivery.run)
        if delivery.caller is not None and not delivery.caller.owns(run.owner):
            raise Forbidden("this run belongs to another token")
        known = run.next_sequence - delivery.first
        if known < 0:
            raise Conflict(
                f"records from {run.next_sequence} on are wanted, not from {delivery.first}",
                next=run.next_sequence,
            )
        new = delivery.lines[known:]
        following = run.next_sequence + len(new)
        if following > self._settings.limits.records_per_run:
            raise Refused(
                f"this service keeps {self._settings.limits.records_per_run} records of a run"
            )
        values: dict[str, Any] = {"changed": self._clock()}
        if new:
            counts = json.loads(run.counts)
            rows = rows_of(run.next_sequence, new, counts)
            # Notes are always taken: a reporter sends them in place of what was refused.
            if len(counts.keys() - {"note"}) > MOST_KINDS:
                raise Refused(
                    f"this service keeps {MOST_KINDS} kinds of records of a run: write what "
                    "differs into their keys"
                )
            values |= {"next_sequence": following, "counts": json.dumps(counts)}
            values |= progress_in(new)
            insert_rows(connection, delivery.run, rows)
        connection.execute(update(runs).where(runs.c.id == delivery.run).values(**values))
        return RecordsTaken(next=following, advice=run.advice)


@dataclass(eq=False)
class _Delivery:
    """A batch on its way into the database, and what became of it."""

    run: str
    first: int
    lines: Sequence[tuple[str, str]]
    caller: Caller | None
    taken: RecordsTaken | None = None
    problem: Exception | None = None
    turn: threading.Event = field(default_factory=threading.Event)
    """Set when it is settled, or when its thread is to lead."""


def _counts(connection: Connection, identifier: str) -> dict[str, tuple[int, int]]:
    """For each kind how many records there are, and the newest one's sequence number."""
    wanted = select(runs.c.counts).where(runs.c.id == identifier, THERE)
    stored = connection.execute(wanted).scalar()
    if stored is None:
        raise missing("run", identifier)
    counts: dict[str, tuple[int, int]] = json.loads(stored)
    return counts


def _lines_of(identifier: str) -> Select[Any]:
    return select(records.c.sequence, records.c.body).where(records.c.run_id == identifier)


def from_level(identifier: str, kind: str, level: int) -> Select[Any]:
    """Records of a kind from a level on, in no order: asked for one, SQLite would rather go through
    all of the run's records, which are in order, than take these few from the index.
    """
    return _lines_of(identifier).where(records.c.kind == kind, records.c.level >= level)


def _after_of_kind(
    identifier: str, kind: str, sequence: int, limit: int, levels: int
) -> Select[Any]:
    """Records of a kind after a sequence number, at least the first ``limit``.

    The index has them level by level, so each level gives its first ones; all of them together
    hold the first ones of all. Without that, rare lines of a long run would be looked for among
    all of its lines.
    """
    first = [
        select(records.c.sequence)
        .where(
            records.c.run_id == identifier,
            records.c.kind == kind,
            records.c.level == level,
            records.c.sequence > sequence,
        )
        .order_by(records.c.sequence)
        .limit(limit)
        .subquery()
        for level in range(max(1, levels))
    ]
    found = union_all(*(select(part.c.sequence) for part in first)).subquery()
    return _lines_of(identifier).where(records.c.sequence.in_(select(found.c.sequence)))


def _read(connection: Connection, wanted: Select[Any]) -> tuple[list[tuple[int, str]], bool]:
    """Sequence numbers and bodies, up to `MOST_CHARACTERS` of them but at least one row; and
    whether that is all.
    """
    rows: list[tuple[int, str]] = []
    size = 0
    found = connection.execute(wanted, execution_options={"yield_per": 200})
    for sequence, body in found:
        size += len(body)
        if rows and size > MOST_CHARACTERS:
            found.close()
            return rows, False
        rows.append((sequence, body))
    return rows, True


def _page(kind: str, total: int, stride: int, rows: Sequence[tuple[int, str]]) -> RecordPage:
    return RecordPage(
        kind=kind,
        total=total,
        stride=stride,
        sequences=tuple(sequence for sequence, _ in rows),
        records=tuple(json.loads(body) for _, body in rows),
    )


Row = tuple[int, str, int, str]
"""Sequence number, kind, level, body."""


def rows_of(
    first: int, lines: Sequence[tuple[str, str]], counts: dict[str, list[int]]
) -> list[Row]:
    """Lines as rows of the table; ``counts`` goes on."""
    rows = []
    for sequence, (kind, body) in enumerate(lines, first):
        place = counts.get(kind, (0, -1))[0] + 1
        counts[kind] = [place, sequence]
        rows.append((sequence, kind, (place & -place).bit_length() - 1, body))
    return rows


def insert_rows(connection: Connection, run: str, rows: Sequence[Row]) -> None:
    """Insert rows in each database's quickest way; PostgreSQL's takes a tenth of the usual one."""
    columns = "records (run_id, sequence, kind, level, body)"
    if connection.dialect.name == "sqlite":
        statement = f"INSERT INTO {columns} VALUES (?, ?, ?, ?, ?)"  # noqa: S608 - ours alone
        connection.exec_driver_sql(statement, [(run, *row) for row in rows])
        return
    driver: Any = connection.connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {columns} FROM STDIN") as copy:
        for row in rows:
            copy.write_row((run, *row))


def progress_in(lines: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What the epoch lines among them change in the run's row."""
    values: dict[str, Any] = {}
    for kind, body in lines:
        if kind != "epoch":
            continue
        line = json.loads(body)
        if isinstance(line.get("epoch"), int):
            values["epochs_done"] = line["epoch"] + 1
        top1, batch = line.get("val/top1"), line.get("batch/global")
        if top1 is not None and 0 <= top1 <= 1:
            values["top1"] = float(top1)
        if isinstance(batch, int) and batch > 0:
            values["global_batch_size"] = batch
    return values
