"""The table of records: the lines of runs, stored once each, and read few at a time however many
there are.

A record's sequence number is its line in the run's metrics.jsonl. Of a batch that overlaps what is
stored the known part is skipped; one that leaves a gap is refused with the number that is wanted.
Both are decided in the transaction that stores the batch: whatever a client repeats, and whenever
the service is killed, each record is there once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, select, union_all, update
from sqlalchemy.exc import DBAPIError

from batchwright.records import DataFacts, EpochRecord
from batchwright.records.lines.line_files import line_text, read_line
from batchwright.records.lines.lost_lines import lines_that_count
from batchwright.records.lines.run_lines import EpochLine, EvaluationLine, RunLine, note
from batchwright.records.service import RecordBatch, RecordPage, RecordsTaken
from batchwright.service.database.tables import NOT_DELETED, records, runs
from batchwright.service.problems import Conflict, Forbidden, NotFound, Refused, ServiceProblem
from batchwright.service.store.lines import LONGEST_LINE
from batchwright.service.store.part import Common, Part, missing
from batchwright.service.store.tokens import Caller

MAX_DROPPED = 200_000
"""Maximum records of a run that are replaced by those sent anew: one transaction removes them."""

MAX_CHARACTERS = 16 * 2**20
"""Maximum characters of records that are read at once, however many were asked for."""

PIECE_CHARACTERS = 64 * 1024
"""Characters of an answer that are sent at once."""

_PROGRESS = ("epochs_done", "global_batch_size", "top1")
_RUNS = (
    select(
        *(runs.c.id, runs.c.owner, runs.c.outcome, runs.c.next_sequence, runs.c.counts),
        *(runs.c.advice, runs.c.digest, *(runs.c[name] for name in _PROGRESS)),
    )
    .where(runs.c.id.in_(bindparam("runs", expanding=True)), NOT_DELETED)
    .order_by(runs.c.id)  # the order in which all services that share a database lock rows
    .with_for_update()
)
_CHANGE_RUNS = update(runs).where(runs.c.id == bindparam("run"))

ROWS_AT_ONCE = 200
"""Inserted by one statement."""

MAX_EPOCHS = 10_000
"""Maximum epoch lines that are read at once; of more, evenly spaced ones are."""


@dataclass(frozen=True)
class StoredRecords:
    """Records as text, of which each is parsed when it is needed: parsed, all would take ten times
    the memory.

    Attributes:
        kind: Kind of all records; empty where they are of several kinds.
        total: Number of records of this kind that are stored.
        stride: Distance of the records among those of their kind; 1: none is left out.
        rows: Sequence numbers and texts.
        data: Returns the data set of the run.
    """

    kind: str
    total: int
    stride: int
    rows: Sequence[tuple[int, str]]
    data: Callable[[], DataFacts]

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequence numbers of the records."""
        return tuple(sequence for sequence, _ in self.rows)

    def page(self) -> RecordPage:
        """The records, parsed."""
        return RecordPage(
            kind=self.kind,
            total=self.total,
            stride=self.stride,
            sequences=self.sequences,
            records=tuple(self._line(*row) for row in self.rows),
        )

    def pieces(self) -> Iterator[bytes]:
        """`page` as JSON, piece by piece."""
        head = {"kind": self.kind, "total": self.total, "stride": self.stride}
        text, between = json.dumps(head | {"sequences": self.sequences})[:-1] + ', "records":[', ""
        for row in self.rows:
            text += between + line_text(self._line(*row))
            between = ","
            if len(text) >= PIECE_CHARACTERS:
                yield text.encode()
                text = ""
        yield f"{text}]}}".encode()

    def _line(self, sequence: int, body: str) -> RunLine:
        try:
            return read_line(body, self.data)
        except (ValueError, NotFound):  # earlier versions stored lines of any kind
            return note(f"record {sequence} is none that this version knows")


class Records(Part):
    """The table of records."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self._queue = threading.Lock()  # guards the two below
        self._waiting: list[_Delivery] = []
        self._storing = False  # whether the thread is at work
        self._thread = ThreadPoolExecutor(1, "records")

    def close(self) -> None:
        """End the thread, once all that waits is stored."""
        self._thread.shutdown()

    def append(
        self, identifier: str, batch: RecordBatch, caller: Caller | None = None
    ) -> RecordsTaken:
        """Store a batch, as `deliver` does, and wait until it is stored for good."""
        return self.deliver(identifier, batch, caller).result()

    def deliver(
        self, identifier: str, batch: RecordBatch, caller: Caller | None = None
    ) -> Future[RecordsTaken]:
        """Queue a batch to be stored, together with whatever else waits.

        One thread stores for all requests. If each stored in a thread of its own, these would take
        turns with Python's lock, which costs more than the storing.

        Args:
            identifier: Identifier of the run.
            batch: Consecutive records.
            caller: Sender of the batch, who must own the run; `None`: not checked.

        Returns:
            What becomes of the batch; when it is done, the batch is stored for good. It may raise
            `NotFound`, `Forbidden` (the run is another caller's), `Conflict` (records before the
            batch are missing or differ; ``next`` says which are wanted) or `Refused` (the run would
            have too many records).

        Raises:
            Refused: A record is too long.
        """
        texts = [line_text(line) for line in batch.records]
        for number, text in enumerate(texts, batch.first):
            if len(text) > LONGEST_LINE:
                raise Refused(
                    f"record {number}: {len(text):,} characters, where {LONGEST_LINE:,} are taken"
                )
        delivery = _Delivery(identifier, batch, texts, caller)
        with self._queue:
            self._waiting.append(delivery)
            idle, self._storing = not self._storing, True
        if idle:
            self._thread.submit(self._store_waiting)
        return delivery.result

    def page(self, identifier: str, kind: str, most: int = 1000) -> RecordPage:
        """`spaced`, parsed."""
        return self.spaced(identifier, kind, most).page()

    def spaced(self, identifier: str, kind: str, most: int = 1000) -> StoredRecords:
        """Evenly spaced records of a kind, and the newest.

        Args:
            identifier: Identifier of the run.
            kind: Kind of the records.
            most: Maximum number of records, the newest aside; long ones are fewer.
        """
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
        return StoredRecords(kind, total, 2**level, rows, cache(lambda: self.data(identifier)))

    def after(
        self, identifier: str, kind: str | None = None, sequence: int = -1, limit: int = 1000
    ) -> RecordPage:
        """`following`, parsed."""
        return self.following(identifier, kind, sequence, limit).page()

    def following(
        self, identifier: str, kind: str | None = None, sequence: int = -1, limit: int = 1000
    ) -> StoredRecords:
        """All records after a sequence number. The last record's number leads to the next page,
        until a page is empty.

        Args:
            identifier: Identifier of the run.
            kind: Kind of the records; `None`: all kinds.
            sequence: Sequence number before the first record; -1 starts at the beginning.
            limit: Maximum number of records; very long ones are fewer.
        """
        with self._database.reading() as connection:
            counts = _counts(connection, identifier)
            if kind is None:
                total = sum(count for count, _ in counts.values())
                wanted = _lines_of(identifier).where(records.c.sequence > sequence)
            else:
                total, newest = counts.get(kind, (0, -1))
                wanted = _next_of_kind(identifier, kind, sequence, limit, total.bit_length())
                # PostgreSQL sees records that were stored since the count. Some may have a level
                # that was not there then, and a client that got those after them would miss them.
                wanted = wanted.where(records.c.sequence <= newest)
            rows, _ = _read(connection, wanted.order_by(records.c.sequence).limit(limit))
        return StoredRecords(kind or "", total, 1, rows, cache(lambda: self.data(identifier)))

    def epochs(self, identifier: str) -> list[EpochRecord]:
        """The finished epochs in their order; of a repeated epoch the last record."""
        return _epochs_in(self.spaced(identifier, "epoch", MAX_EPOCHS))

    def newest(self, identifier: str, kind: str, most: int) -> StoredRecords:
        """The newest ``most`` records of a kind, in order; of long ones fewer."""
        with self._database.reading() as connection:
            total, newest = _counts(connection, identifier).get(kind, (0, -1))
            wanted = _next_of_kind(identifier, kind, newest + 1, most, total.bit_length(), -1)
            rows, _ = _read(connection, wanted.order_by(records.c.sequence.desc()).limit(most))
        return StoredRecords(kind, total, 1, rows[::-1], cache(lambda: self.data(identifier)))

    def newest_epochs(self, identifier: str, most: int) -> list[EpochRecord]:
        """`epochs` of the newest ``most`` epoch lines; fewer epochs where some were repeated."""
        return _epochs_in(self.newest(identifier, "epoch", most))

    def data(self, identifier: str) -> DataFacts:
        """The data set of a run, from its plan."""
        plan = json.loads(self._value(runs.c.plan, identifier, NOT_DELETED))
        return DataFacts.model_validate_json(json.dumps(plan["data"]))

    # ------------------------------------------------------------------------------------ storing

    def _store_waiting(self) -> None:
        """Store all that waits in one transaction, and what arrives meanwhile in the next: the disk
        is synced once for all of them, so no batch waits for more than two transactions.
        """
        while True:
            with self._queue:
                waiting, self._waiting = self._waiting, []
                self._storing = bool(waiting)
            if not waiting:
                return
            deliveries = [one for one in waiting if one.result.set_running_or_notify_cancel()]
            results: Sequence[RecordsTaken | Exception]
            try:
                with self._database.writing() as connection:
                    results = self._store(connection, deliveries)
            except Exception as error:  # noqa: BLE001 - raised by the future of each delivery
                results = [error] * len(deliveries)  # all were rolled back
            for delivery, result in zip(deliveries, results, strict=True):
                if isinstance(result, Exception):
                    delivery.result.set_exception(result)
                else:
                    delivery.result.set_result(result)

    def _store(
        self, connection: Connection, deliveries: Sequence[_Delivery]
    ) -> Sequence[RecordsTaken | Exception]:
        """Store deliveries in few statements.

        Returns:
            For each delivery what the client is told, or why it is refused.
        """
        rows = connection.execute(_RUNS, {"runs": [*{one.run for one in deliveries}]}).mappings()
        stored = {row["id"]: _Run(row) for row in rows}
        results: list[RecordsTaken | Exception] = []
        for delivery in deliveries:
            try:
                results.append(self._apply(delivery, stored.get(delivery.run)))
            except ServiceProblem as problem:
                results.append(problem)
        changed = {identifier: run for identifier, run in stored.items() if run.changed}
        for identifier, run in changed.items():
            if run.drops:
                connection.execute(delete(records).where(records.c.run_id == identifier))
        insert_rows(connection, [(name, *row) for name, run in changed.items() for row in run.rows])
        if changed:
            now = self._clock()
            columns = [{"run": name, **run.columns(now)} for name, run in changed.items()]
            connection.execute(_CHANGE_RUNS, columns)
        return results

    def _apply(self, delivery: _Delivery, run: _Run | None) -> RecordsTaken:
        """Add a delivery to its run in memory; a refused one changes nothing.

        Raises:
            ServiceProblem: The delivery is refused.
        """
        if run is None:
            raise missing("run", delivery.run)
        if delivery.caller is not None and not delivery.caller.owns(run.owner):
            raise Forbidden("this run belongs to another token")
        batch = delivery.batch
        drops = batch.anew and run.stored > 0
        if drops and (run.outcome == "finished" or run.stored > MAX_DROPPED or batch.first):
            raise Conflict("what is stored of this run stays: report it as another")
        stored, digest = (0, None) if drops else (run.stored, run.digest)
        _refuse(batch, stored, digest)
        following = max(stored, batch.first + len(batch.records))
        if following > self._settings.limits.records_per_run:
            raise Refused(
                f"this service keeps {self._settings.limits.records_per_run} records of a run"
            )
        if drops:
            run.drop()
        if following > stored:
            run.add(batch.records[stored - batch.first :], delivery.texts[stored - batch.first :])
            run.digest = batch.after
        run.changed = True
        return RecordsTaken(next=following, advice=run.advice, digest=run.digest)


class _Run:
    """A run as it will be once deliveries are stored.

    Args:
        row: The run's row, of `_RUNS`.

    Attributes:
        owner: Name of the token that may report the run.
        outcome: How the run ended; `None` while it goes on.
        advice: Number of the newest advice.
        stored: Number of records.
        digest: Digest of the records' lines; `None` where it is not known.
        drops: Whether the records that are in the database are to be deleted.
        rows: Rows to insert.
        changed: Whether the row of the run changes, be it only the time.
    """

    def __init__(self, row: Mapping[Any, Any]) -> None:
        self.owner: str = row["owner"]
        self.outcome: str | None = row["outcome"]
        self.advice: int = row["advice"]
        self.stored, self.digest = row["next_sequence"], row["digest"]
        self._counts: dict[str, list[int]] = json.loads(row["counts"])
        self._progress = {name: row[name] for name in _PROGRESS}
        self.rows: list[Row] = []
        self.drops = self.changed = False

    def drop(self) -> None:
        """Drop all records."""
        self.stored, self.digest, self.drops = 0, None, True
        self._counts, self.rows = {}, []
        self._progress |= {"epochs_done": 0, "top1": None}

    def add(self, lines: Sequence[RunLine], texts: Sequence[str]) -> None:
        """Add records behind those that are stored."""
        self.rows += rows_of(self.stored, lines, texts, self._counts)
        self.stored += len(lines)
        self._progress |= progress_in(lines)

    def columns(self, now: float) -> dict[str, Any]:
        """The columns of the run's row that change."""
        return self._progress | {
            "next_sequence": self.stored,
            "digest": self.digest,
            "counts": json.dumps(self._counts),
            "changed": now,
        }


def _refuse(batch: RecordBatch, stored: int, digest: str | None) -> None:
    """Refuse a batch that leaves a gap behind the ``stored`` records, or follows on lines of
    another ``digest``.

    Raises:
        Conflict: ``next`` is the number of the record that is wanted; if it is the batch's own
            first one, the lines before it differ.
    """
    end = batch.first + len(batch.records)
    if batch.first > stored:
        raise Conflict(f"records from {stored} on are wanted, not from {batch.first}", next=stored)
    if digest is None or batch.before is None:
        return
    if batch.first < stored < end:  # the known part cannot be compared by itself
        raise Conflict(f"records before {stored} are stored already", next=stored)
    sent = batch.before if batch.first == stored else batch.after if end == stored else digest
    if sent != digest:
        raise Conflict(
            f"the lines before {stored} are not those that are stored: all are wanted anew",
            next=batch.first,
        )


@dataclass(eq=False)
class _Delivery:
    """A batch that waits to be stored, and what becomes of it."""

    run: str
    batch: RecordBatch
    texts: Sequence[str]
    caller: Caller | None
    result: Future[RecordsTaken] = field(default_factory=Future)


def _counts(connection: Connection, identifier: str) -> dict[str, tuple[int, int]]:
    """By kind: the number of records, and the sequence number of the newest."""
    wanted = select(runs.c.counts).where(runs.c.id == identifier, NOT_DELETED)
    stored = connection.execute(wanted).scalar()
    if stored is None:
        raise missing("run", identifier)
    counts: dict[str, tuple[int, int]] = json.loads(stored)
    return counts


def _lines_of(identifier: str) -> Select[Any]:
    return select(records.c.sequence, records.c.body).where(records.c.run_id == identifier)


def from_level(identifier: str, kind: str, level: int) -> Select[Any]:
    """Records of a kind from a level on, in no order: to order them, SQLite would go through all of
    the run's records, which are in order, instead of taking these few from the index.
    """
    return _lines_of(identifier).where(records.c.kind == kind, records.c.level >= level)


def _epochs_in(stored: StoredRecords) -> list[EpochRecord]:
    lines = lines_that_count(stored.page().records)
    return [line.record for line in lines if isinstance(line, EpochLine)]


def _next_of_kind(
    identifier: str, kind: str, sequence: int, limit: int, levels: int, way: int = 1
) -> Select[Any]:
    """Records of a kind after a sequence number, or before it (``way`` -1): at least the ``limit``
    next to it.

    The index has records level by level, so the query takes the first ones of each level, among
    which are the first ones of all. Otherwise rare lines of a long run would be looked for among
    all of its lines.
    """
    column = records.c.sequence
    first = [
        select(records.c.sequence)
        .where(
            records.c.run_id == identifier,
            records.c.kind == kind,
            records.c.level == level,
            column > sequence if way > 0 else column < sequence,
        )
        .order_by(column if way > 0 else column.desc())
        .limit(limit)
        .subquery()
        for level in range(max(1, levels))
    ]
    found = union_all(*(select(part.c.sequence) for part in first)).subquery()
    return _lines_of(identifier).where(records.c.sequence.in_(select(found.c.sequence)))


def _read(connection: Connection, wanted: Select[Any]) -> tuple[list[tuple[int, str]], bool]:
    """Sequence numbers and texts of `MAX_CHARACTERS` at most, but of one row at least; and whether
    these are all rows.
    """
    rows: list[tuple[int, str]] = []
    size = 0
    result = connection.execute(wanted, execution_options={"yield_per": 200})
    for sequence, body in result:
        size += len(body)
        if rows and size > MAX_CHARACTERS:
            result.close()
            return rows, False
        rows.append((sequence, body))
    return rows, True


Row = tuple[int, str, int, str]
"""Sequence number, kind, level and text of a record."""


def rows_of(
    first: int, lines: Sequence[RunLine], texts: Sequence[str], counts: dict[str, list[int]]
) -> list[Row]:
    """Lines as rows of the table.

    Args:
        first: Sequence number of the first line.
        lines: The lines.
        texts: The same lines as text.
        counts: By kind, number of records and sequence number of the newest; updated.
    """
    rows: list[Row] = []
    for sequence, (line, text) in enumerate(zip(lines, texts, strict=True), first):
        place = counts.get(line.kind, (0, -1))[0] + 1
        counts[line.kind] = [place, sequence]
        rows.append((sequence, line.kind, (place & -place).bit_length() - 1, text))
    return rows


def insert_rows(connection: Connection, rows: Sequence[tuple[str, *Row]]) -> None:
    """Insert rows, each behind the identifier of its run, in each database's quickest way;
    PostgreSQL's takes a tenth of the usual time.

    SQLite's driver releases Python's lock in each step of a statement, and this thread would wait
    after each until other threads release it. So one step inserts many rows.
    """
    columns = "records (run_id, sequence, kind, level, body)"
    if connection.dialect.name == "sqlite":
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            marks = ", ".join(["(?, ?, ?, ?, ?)"] * len(some))
            statement = f"INSERT INTO {columns} VALUES {marks}"  # noqa: S608 - ours alone
            connection.exec_driver_sql(statement, tuple(chain.from_iterable(some)))
    elif rows:
        driver: Any = connection.connection
        kind = connection.dialect.loaded_dbapi.Error
        try:
            with driver.cursor() as cursor, cursor.copy(f"COPY {columns} FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        except kind as error:  # as SQLAlchemy raises it where it calls the driver itself
            raise DBAPIError.instance(
                columns, None, error, kind, dialect=connection.dialect
            ) from error


def progress_in(lines: Sequence[RunLine]) -> dict[str, Any]:
    """Columns of the run's row that ``lines`` change."""
    values: dict[str, Any] = {}
    for line in lines:
        if isinstance(line, EpochLine):
            record = line.record
            values["epochs_done"] = min(record.epoch + 1, 2**53)  # which `RunInfo` holds at most
            values["global_batch_size"] = record.global_batch_size
            if record.top1 is not None and record.top1 <= 1:
                values["top1"] = record.top1
        elif isinstance(line, EvaluationLine) and line.top1 is not None:
            values["top1"] = line.top1
    return values
