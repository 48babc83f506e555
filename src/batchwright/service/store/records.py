"""Records of runs: taken once each, and handed out few at a time however many there are.

A record's sequence number is its line in the run's metrics.jsonl. A batch that overlaps what is
stored has the known part skipped, one that leaves a gap is refused with the number that is wanted,
and both are decided in the transaction that stores the batch: whatever a client repeats, and
whenever the service is killed, each record is there once.
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

from batchwright.records import DataFacts, EpochRecord
from batchwright.records.lines.line_files import line_text, read_line
from batchwright.records.lines.run_lines import EpochLine, RunLine, note
from batchwright.records.service import RecordBatch, RecordPage, RecordsTaken
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import THERE, records, runs
from batchwright.service.problems import Conflict, Forbidden, NotFound, Refused, ServiceProblem
from batchwright.service.settings import Settings
from batchwright.service.store.lines import LONGEST_LINE
from batchwright.service.store.part import Clock, Part, missing
from batchwright.service.store.tokens import Caller

MAX_DROPPED = 200_000
"""Records of a run that are dropped to be sent anew: one transaction removes them."""

MAX_CHARACTERS = 16 * 2**20
"""Most text of records handed out at once, however many were asked for."""

PIECE_CHARACTERS = 64 * 1024
"""Text of an answer that is sent at once."""

_PROGRESS = ("epochs_done", "global_batch_size", "top1")
_RUNS = (
    select(
        *(runs.c.id, runs.c.owner, runs.c.outcome, runs.c.next_sequence, runs.c.counts),
        *(runs.c.advice, runs.c.digest, *(runs.c[name] for name in _PROGRESS)),
    )
    .where(runs.c.id.in_(bindparam("runs", expanding=True)), THERE)
    .order_by(runs.c.id)  # in which services that share a database lock them
    .with_for_update()
)
_CHANGE_RUNS = update(runs).where(runs.c.id == bindparam("run"))

ROWS_AT_ONCE = 200
"""Inserted by one statement."""

MAX_EPOCHS = 10_000
"""Epoch lines handed out at once; of more, evenly spaced ones."""


@dataclass(frozen=True)
class Stored:
    """Records as they are stored, each read when it is wanted: as text they take a tenth of the
    memory.

    Attributes:
        kind: Of all of them; empty where they are of several.
        total: As of `RecordPage`, and so is `stride`.
        stride: Every so many of them is here.
        rows: Sequence numbers and texts.
        data: What the run trains on.
    """

    kind: str
    total: int
    stride: int
    rows: Sequence[tuple[int, str]]
    data: Callable[[], DataFacts]

    @property
    def sequences(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(sequence for sequence, _ in self.rows)

    def page(self) -> RecordPage:
        """All of them, read."""
        return RecordPage(
            kind=self.kind,
            total=self.total,
            stride=self.stride,
            sequences=self.sequences,
            records=tuple(self._line(*row) for row in self.rows),
        )

    def pieces(self) -> Iterator[bytes]:
        """The page as JSON, piece by piece."""
        told = {"kind": self.kind, "total": self.total, "stride": self.stride}
        text, between = json.dumps(told | {"sequences": self.sequences})[:-1] + ', "records":[', ""
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
        except (ValueError, NotFound):  # earlier versions took lines of any kind
            return note(f"record {sequence} is none that this version knows")


class Records(Part):
    """The table of records."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        super().__init__(database, settings, clock)
        self._queue = threading.Lock()
        self._waiting: list[_Delivery] = []
        self._storing = False
        self._thread = ThreadPoolExecutor(1, "records")

    def close(self) -> None:
        """Take no more."""
        self._thread.shutdown()

    def append(
        self, identifier: str, batch: RecordBatch, caller: Caller | None = None
    ) -> RecordsTaken:
        """`deliver`, and wait: when this returns, all of it is there for good."""
        return self.deliver(identifier, batch, caller).result()

    def deliver(
        self, identifier: str, batch: RecordBatch, caller: Caller | None = None
    ) -> Future[RecordsTaken]:
        """Have a batch stored, with whatever else waits; it is there for good when that is done.

        One thread stores for all. If each request had one that waits, as many would take turns with
        Python's lock, which costs more than the storing.

        Args:
            identifier: The run.
            batch: Consecutive records.
            caller: Who sends it; `None` does not ask.

        Raises:
            Refused: A record is too long. The rest comes of the future, like these:
            Forbidden: It is not the caller's.
            Conflict: Records before it are missing or differ (`next` says which are wanted).
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
            begins, self._storing = not self._storing, True
        if begins:
            self._thread.submit(self._store_waiting)
        return delivery.told

    def page(self, identifier: str, kind: str, most: int = 1000) -> RecordPage:
        """All that `spaced` finds."""
        return self.spaced(identifier, kind, most).page()

    def spaced(self, identifier: str, kind: str, most: int = 1000) -> Stored:
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
        return Stored(kind, total, 2**level, rows, cache(lambda: self.data(identifier)))

    def after(
        self, identifier: str, kind: str | None = None, sequence: int = -1, limit: int = 1000
    ) -> RecordPage:
        """All that `following` finds."""
        return self.following(identifier, kind, sequence, limit).page()

    def following(
        self, identifier: str, kind: str | None = None, sequence: int = -1, limit: int = 1000
    ) -> Stored:
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
                total, newest = counts.get(kind, (0, -1))
                wanted = _next_of_kind(identifier, kind, sequence, limit, total.bit_length())
                # PostgreSQL sees what was stored since the count, of which some may be of a level
                # that was not there then: whoever got the others would never ask for it again.
                wanted = wanted.where(records.c.sequence <= newest)
            rows, _ = _read(connection, wanted.order_by(records.c.sequence).limit(limit))
        return Stored(kind or "", total, 1, rows, cache(lambda: self.data(identifier)))

    def epochs(self, identifier: str) -> list[EpochRecord]:
        """The finished epochs in their order; one that was done again as it was the last time."""
        return _epochs_in(self.spaced(identifier, "epoch", MAX_EPOCHS))

    def newest_epochs(self, identifier: str, most: int) -> list[EpochRecord]:
        """`epochs` of the newest ``most`` epoch lines alone; fewer where some repeat others."""
        with self._database.reading() as connection:
            total, newest = _counts(connection, identifier).get("epoch", (0, -1))
            wanted = _next_of_kind(identifier, "epoch", newest + 1, most, total.bit_length(), -1)
            rows, _ = _read(connection, wanted.order_by(records.c.sequence.desc()).limit(most))
        return _epochs_in(
            Stored("epoch", total, 1, rows[::-1], cache(lambda: self.data(identifier)))
        )

    def data(self, identifier: str) -> DataFacts:
        """What a run trains on."""
        plan = json.loads(self._value(runs.c.plan, identifier, THERE))
        return DataFacts.model_validate_json(json.dumps(plan["data"]))

    # ------------------------------------------------------------------------------------ storing

    def _store_waiting(self) -> None:
        """Store all that waits, and what comes meanwhile, each time in one transaction: the disk is
        synced once for all of them, so nobody waits longer than for two.
        """
        while True:
            with self._queue:
                waiting, self._waiting = self._waiting, []
                self._storing = bool(waiting)
            if not waiting:
                return
            together = [one for one in waiting if one.told.set_running_or_notify_cancel()]
            settled: Sequence[RecordsTaken | Exception]
            try:
                with self._database.writing() as connection:
                    settled = self._store(connection, together)
            except Exception as error:  # noqa: BLE001 - each of them raises it
                settled = [error] * len(together)  # rolled back, all of them
            for one, became in zip(together, settled, strict=True):
                if isinstance(became, Exception):
                    one.told.set_exception(became)
                else:
                    one.told.set_result(became)

    def _store(
        self, connection: Connection, together: Sequence[_Delivery]
    ) -> Sequence[RecordsTaken | Exception]:
        """Store deliveries in few statements; for each what was taken, or what is wrong with it."""
        wanted = {"runs": [*{one.run for one in together}]}
        rows = connection.execute(_RUNS, wanted).mappings()
        found = {row["id"]: _Run(row["owner"], row["outcome"], row["advice"], row) for row in rows}
        settled: list[RecordsTaken | Exception] = []
        for one in together:
            try:
                settled.append(self._take_in(found.get(one.run), one))
            except ServiceProblem as problem:
                settled.append(problem)
        changed = {run: one for run, one in found.items() if one.changed}
        for run in (run for run, one in changed.items() if one.drops):
            connection.execute(delete(records).where(records.c.run_id == run))
        insert_rows(connection, [(run, *row) for run, one in changed.items() for row in one.rows])
        if changed:
            told = [{"run": run, **one.columns(self._clock())} for run, one in changed.items()]
            connection.execute(_CHANGE_RUNS, told)
        return settled

    def _take_in(self, run: _Run | None, delivery: _Delivery) -> RecordsTaken:
        """A delivery, into the run as it is to be stored; one that is refused changes nothing."""
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
    """A run as it is to be stored.

    Attributes:
        owner: As stored, and so are `outcome` and `advice`.
        stored: How many records there are.
        digest: Of these.
        drops: Whether those that are in the database go.
        rows: That are to be inserted.
        changed: Whether anything of it changes, be it the time alone.
    """

    def __init__(self, owner: str, outcome: str | None, advice: int, row: Mapping[Any, Any]):
        self.owner, self.outcome, self.advice = owner, outcome, advice
        self.stored, self.digest = row["next_sequence"], row["digest"]
        self._counts: dict[str, list[int]] = json.loads(row["counts"])
        self._progress = {name: row[name] for name in _PROGRESS}
        self.rows: list[Row] = []
        self.drops = self.changed = False

    def drop(self) -> None:
        """Begin anew, without records."""
        self.stored, self.digest, self.drops = 0, None, True
        self._counts, self.rows = {}, []
        self._progress |= {"epochs_done": 0, "top1": None}

    def add(self, lines: Sequence[RunLine], texts: Sequence[str]) -> None:
        """Add what follows."""
        self.rows += rows_of(self.stored, lines, texts, self._counts)
        self.stored += len(lines)
        self._progress |= progress_in(lines)

    def columns(self, now: float) -> dict[str, Any]:
        """What changes in its row."""
        counts = json.dumps(self._counts)
        told = {"next_sequence": self.stored, "digest": self.digest, "counts": counts}
        return told | self._progress | {"changed": now}


def _refuse(batch: RecordBatch, stored: int, digest: str | None) -> None:
    """Refuse what does not follow on what is stored, or on other lines than those.

    Raises:
        Conflict: Where the batch's own first record is the one wanted, what is before it differs.
    """
    end = batch.first + len(batch.records)
    if batch.first > stored:
        raise Conflict(f"records from {stored} on are wanted, not from {batch.first}", next=stored)
    if digest is None or batch.before is None:
        return
    if batch.first < stored < end:  # the known part cannot be compared by itself
        raise Conflict(f"records before {stored} are stored already", next=stored)
    ours = batch.before if batch.first == stored else batch.after if end == stored else digest
    if ours != digest:
        raise Conflict(
            f"the lines before {stored} are not those that are stored: all are wanted anew",
            next=batch.first,
        )


@dataclass(eq=False)
class _Delivery:
    """A batch on its way into the database, and what became of it."""

    run: str
    batch: RecordBatch
    texts: Sequence[str]
    caller: Caller | None
    told: Future[RecordsTaken] = field(default_factory=Future)


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


def _epochs_in(found: Stored) -> list[EpochRecord]:
    lines = found.page().records
    by_epoch = {line.record.epoch: line.record for line in lines if isinstance(line, EpochLine)}
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _next_of_kind(
    identifier: str, kind: str, sequence: int, limit: int, levels: int, way: int = 1
) -> Select[Any]:
    """Records of a kind after a sequence number, or before it (``way`` -1), at least the first
    ``limit`` from there.

    The index has them level by level, so each level gives its first ones; all of them together
    hold the first ones of all. Without that, rare lines of a long run would be looked for among
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
    """Sequence numbers and bodies, up to `MAX_CHARACTERS` of them but at least one row; and
    whether that is all.
    """
    rows: list[tuple[int, str]] = []
    size = 0
    found = connection.execute(wanted, execution_options={"yield_per": 200})
    for sequence, body in found:
        size += len(body)
        if rows and size > MAX_CHARACTERS:
            found.close()
            return rows, False
        rows.append((sequence, body))
    return rows, True


Row = tuple[int, str, int, str]
"""Sequence number, kind, level, body."""


def rows_of(
    first: int, lines: Sequence[RunLine], texts: Sequence[str], counts: dict[str, list[int]]
) -> list[Row]:
    """Lines as rows of the table; ``counts`` goes on."""
    rows: list[Row] = []
    for sequence, (line, text) in enumerate(zip(lines, texts, strict=True), first):
        place = counts.get(line.kind, (0, -1))[0] + 1
        counts[line.kind] = [place, sequence]
        rows.append((sequence, line.kind, (place & -place).bit_length() - 1, text))
    return rows


def insert_rows(connection: Connection, rows: Sequence[tuple[str, *Row]]) -> None:
    """Insert rows in each database's quickest way; PostgreSQL's takes a tenth of the usual one.

    SQLite's driver lets go of Python's lock in each step of a statement, and after each this thread
    would wait until the others let go of it again. So many rows are one step.
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
        with driver.cursor() as cursor, cursor.copy(f"COPY {columns} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)


def progress_in(lines: Sequence[RunLine]) -> dict[str, Any]:
    """What the epoch lines among them change in the run's row."""
    values: dict[str, Any] = {}
    for line in lines:
        if isinstance(line, EpochLine):
            record = line.record
            values["epochs_done"] = record.epoch + 1
            values["global_batch_size"] = record.global_batch_size
            if record.top1 is not None and record.top1 <= 1:
                values["top1"] = record.top1
    return values
