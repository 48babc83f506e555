"""What the parts of the store have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
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
    func,
    select,
)

from batchwright.records import Record
from batchwright.service.database.engine import Database
from batchwright.service.problems import NotFound
from batchwright.service.settings import Settings

Clock = Callable[[], float]
"""Unix time in seconds."""

FEW = 100
"""Rows that are few, of however small a table."""

_TOTALS = 0x62617464
"""First half of the names of PostgreSQL's advisory locks that are taken here."""

Document = TypeVar("Document", bound=Record)


class Part:
    """Speaks for a table or two. What takes an identifier raises `NotFound` if nothing has it."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

    def _read(self, wanted: Select[Any]) -> Sequence[Row[Any]]:
        """All rows, in a transaction of their own."""
        with self._database.reading() as connection:
            return connection.execute(wanted).all()

    def _write(self, change: Insert | Update | Delete) -> int:
        """Make one change, in a transaction of its own; returns how many rows it touched."""
        with self._database.writing() as connection:
            return connection.execute(change).rowcount

    def _value(self, column: Column[Any], identifier: str, *which: ColumnElement[bool]) -> Any:
        """What a column holds of the row with this identifier."""
        table = column.table
        found = self._read(select(column).where(table.c.id == identifier, *which))
        if not found:
            raise missing(str(table).removesuffix("s"), identifier)
        return found[0][0]


def missing(kind: str, identifier: str) -> NotFound:
    """There is no such thing."""
    return NotFound(f"there is no {kind} {identifier[:36]}")


def opened(model: type[Document], text: str | None) -> Document | None:
    """A stored document, if there is one."""
    return None if text is None else model.model_validate_json(text)


def share_of(connection: Connection, table: Table) -> int:
    """How many rows of a table one look may delete for being old."""
    return max(FEW, count(connection, table) // 10)


def alone_adding(connection: Connection, table: Table) -> None:
    """Nobody else gets further than here until this transaction ends: a total that is counted next
    still holds when a row is added. SQLite has one writer at a time already.
    """
    if connection.dialect.name == "postgresql":
        lock = func.pg_advisory_xact_lock(_TOTALS, crc32(table.name.encode()) >> 1)
        connection.execute(select(lock))


def count(connection: Connection, table: Table, *which: ColumnElement[bool]) -> int:
    """How many rows there are."""
    wanted = select(func.count()).select_from(table).where(*which)
    return connection.execute(wanted).scalar() or 0
