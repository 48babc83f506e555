"""What the parts of the store have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Delete,
    Insert,
    Row,
    Select,
    Table,
    Update,
    delete,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from batchwright.records import Record
from batchwright.service.database.engine import Database
from batchwright.service.listening import Listening
from batchwright.service.problems import NotFound
from batchwright.service.settings import Settings

Clock = Callable[[], float]
"""Unix time in seconds."""

FEW = 100
"""Rows that one call may delete for being old, however few the table has."""

_INSERTS = 0x62617464
"""First half of the names of PostgreSQL's advisory locks that are taken here."""

Document = TypeVar("Document", bound=Record)


class Common(NamedTuple):
    """What all parts of a store share."""

    database: Database
    settings: Settings
    clock: Clock
    listening: Listening


class Part:
    """Reads and writes a table or two. Methods that take an identifier raise `NotFound` where no
    row has it.
    """

    def __init__(self, common: Common) -> None:
        self._database, self._settings, self._clock, self._listening = common

    def _read(self, wanted: Select[Any]) -> Sequence[Row[Any]]:
        """All rows of a query, in a transaction of its own."""
        with self._database.reading() as connection:
            return connection.execute(wanted).all()

    def _write(self, change: Insert | Update | Delete) -> int:
        """Make one change, in a transaction of its own; returns the number of changed rows."""
        with self._database.writing() as connection:
            return connection.execute(change).rowcount

    def _value(self, column: Column[Any], identifier: str, *which: ColumnElement[bool]) -> Any:
        """The value of a column in the row with an identifier, where ``which`` hold."""
        table = column.table
        rows = self._read(select(column).where(table.c.id == identifier, *which))
        if not rows:
            raise missing(str(table).removesuffix("s"), identifier)
        return rows[0][0]

    def _insert_if_new(self, table: Table, **values: Any) -> sqlite.Insert | postgresql.Insert:
        """A statement that inserts a row, and does nothing where a row has its key already."""
        if self._database.is_sqlite:
            return sqlite.insert(table).values(**values).on_conflict_do_nothing()
        return postgresql.insert(table).values(**values).on_conflict_do_nothing()

    def _delete_oldest(self, table: Table, when: Column[Any], before: float) -> None:
        """Delete rows from before a moment, the oldest, `deletion_limit` of them at most.

        Args:
            table: The table.
            when: Column with the time that counts.
            before: The moment, as Unix time in seconds.
        """
        with self._database.writing() as connection:
            old = select(table.c.id).where(when < before).order_by(when)
            some = old.limit(deletion_limit(connection, table)).scalar_subquery()
            connection.execute(delete(table).where(table.c.id.in_(some)))


def missing(kind: str, identifier: str) -> NotFound:
    """The error that says that no row has an identifier."""
    return NotFound(f"there is no {kind} {identifier[:36]}")


def stored_document(model: type[Document], text: str | None) -> Document | None:
    """The record in a column's JSON; `None` where the column has none."""
    return None if text is None else model.model_validate_json(text)


def deletion_limit(connection: Connection, table: Table) -> int:
    """How many rows of a table one call may delete for being old: a tenth of them."""
    return max(FEW, count(connection, table) // 10)


def lock_for_insert(connection: Connection, table: Table) -> None:
    """Keep other transactions that call this from adding rows until this one ends, so that a total
    which is counted next still holds when a row is added. SQLite has one writer at a time anyway.
    """
    if connection.dialect.name == "postgresql":
        lock = func.pg_advisory_xact_lock(_INSERTS, crc32(table.name.encode()) >> 1)
        connection.execute(select(lock))


def count(connection: Connection, table: Table, *which: ColumnElement[bool]) -> int:
    """Number of rows of a table where ``which`` hold."""
    wanted = select(func.count()).select_from(table).where(*which)
    return connection.execute(wanted).scalar() or 0
