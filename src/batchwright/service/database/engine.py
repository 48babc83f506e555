"""The engine of a database, and its transactions.

SQLite is used in write-ahead mode: readers never wait for the writer. Its commits are synced
(``synchronous=FULL``), so what was acknowledged survives the end of the process and a loss of
power, as far as the disk keeps what it says it has written.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Row,
    Select,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import (
    ArgumentError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as NoAnswer

from batchwright.errors import BatchwrightError, FileError
from batchwright.storage.files import make_folder

BUSY_SECONDS = 30.0
"""How long SQLite waits for another process that writes, such as ``batchwright token``."""

BUSY_PAUSE = 0.01
"""Seconds between two attempts where SQLite itself does not wait."""

LOOK_SECONDS = 5.0
"""Minimum time between two writes that only test whether the database takes them."""

_CHANGES_NOTHING = text("UPDATE alembic_version SET version_num = version_num")

LOG_PAGES = 4000
"""Length of SQLite's log, in pages, at which a commit moves the log into the file and syncs the
file, while all other writers wait: 16 MiB, four times the default."""

CONNECTIONS = 48
"""Maximum number of connections; more than the threads that answer requests."""


WriteMeter = Callable[[float, float | None], None]
"""Called with the seconds that a transaction waited for its turn, and those that it took then;
`None` if the database refused it, for example because it was locked for too long."""


class Database:
    """An engine, with one writer at a time for SQLite.

    Threads that wait for a lock of this process go on as soon as it is free; waiting for SQLite's
    own lock, they would sleep and try again.

    Args:
        engine: The engine, from `open_engine`.

    Attributes:
        meter: Called at the end of each transaction that writes.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        self._turn = threading.Lock()
        self._writer: int | None = None
        self._writing = engine.execution_options(writes=True)
        alone = {} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._autocommit = engine.execution_options(**alone)
        self.meter: WriteMeter = lambda _waited, _took: None
        self._looked = time.monotonic() - LOOK_SECONDS  # when `_look` ended last
        self._trouble: Exception | None = None  # its error
        self._looking = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads; in SQLite all that it reads is of one moment."""
        with self.engine.begin() as connection:
            yield connection

    def ask(self, wanted: Select[Any], values: Mapping[str, Any]) -> Sequence[Row[Any]]:
        """The rows of one query, without BEGIN and COMMIT around it in PostgreSQL."""
        with self._autocommit.connect() as connection:
            return connection.execute(wanted, values).all()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes; stored for good when the block ends without an error.

        Raises:
            RuntimeError: The thread is in such a block already, and would wait for itself.
        """
        if self._writer == threading.get_ident():
            raise RuntimeError("a transaction that writes was begun inside another")
        asked, turn = time.perf_counter(), self._turn if self.is_sqlite else nullcontext()
        try:
            with turn, self._writing.begin() as connection:
                begun = time.perf_counter()
                self._writer = threading.get_ident() if self.is_sqlite else None
                try:
                    yield connection
                finally:
                    self._writer = None
        except OperationalError:
            self.meter(time.perf_counter() - asked, None)
            raise
        self.meter(begun - asked, time.perf_counter() - begun)

    def check_writes(self) -> None:
        """Return if the database takes writes, by a test every `LOOK_SECONDS` at most. A call
        during the test of another thread does not wait, and uses the last result.

        Raises:
            SQLAlchemyError: The database does not, for instance because the disk is full.
        """
        if self._looking.acquire(blocking=False):
            try:
                if time.monotonic() - self._looked >= LOOK_SECONDS:
                    self._look()
            finally:
                self._looking.release()
        elif time.monotonic() - self._looked > 2 * LOOK_SECONDS:
            raise NoAnswer("the database has not answered for some seconds")
        if self._trouble is not None:
            raise self._trouble

    def _look(self) -> None:
        trouble = None
        try:
            with self.writing() as connection:
                connection.execute(_CHANGES_NOTHING)
        except SQLAlchemyError as error:
            trouble = error
        self._trouble, self._looked = trouble, time.monotonic()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def open_engine(url: str) -> Engine:
    """An engine for a database. The folder of a SQLite file is created.

    Args:
        url: URL such as ``sqlite:////var/lib/batchwright/service.sqlite``; ``postgresql://`` means
            the driver psycopg 3.

    Raises:
        BatchwrightError: The URL is invalid, or of another kind of database.
        FileError: The folder or the file cannot be created.
    """
    place = read_url(url)
    if place.get_backend_name() == "postgresql":
        return create_engine(
            place.set(drivername="postgresql+psycopg"),
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_pre_ping=True,
            hide_parameters=True,
        )
    file = Path(place.database or "")
    make_folder(file.parent, "name another file with --database")
    try:  # only the owner may read the file; SQLite gives its files beside it the same mode
        # A file that exists is not opened: closing it would release the locks that SQLite holds on
        # it for this process, and another process could remove the log that is in use.
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise FileError(f"cannot open the database {file}: {error.strerror}") from None
    engine = create_engine(
        place,
        pool_size=CONNECTIONS,
        max_overflow=0,
        connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
        hide_parameters=True,
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def shown(url: str) -> str:
    """A database's URL without its password, for messages."""
    place = read_url(url)
    hidden = {name: "..." for name in place.query if "password" in name}  # libpq takes it there too
    return place.update_query_dict(hidden).render_as_string(hide_password=True)


def read_url(url: str) -> URL:
    """A database's URL, parsed.

    Raises:
        BatchwrightError: The URL is invalid, of another kind of database, or names no file.
    """
    try:
        place = make_url(url)
        known = place.get_backend_name() in ("sqlite", "postgresql")
    except (ArgumentError, NoSuchModuleError, ValueError):
        known = False
    if not known:
        kind = url.partition(":")[0][:40]  # the rest may hold a password
        raise BatchwrightError(
            f"{kind}:... is no database that the service knows: give --database, or "
            "BATCHWRIGHT_DATABASE, as sqlite:////folder/service.sqlite or "
            "postgresql://user:password@host/name"
        )
    if place.get_backend_name() == "sqlite" and place.database in (None, "", ":memory:"):
        raise BatchwrightError(
            f"the service needs a database that lasts: {url} names no file; "
            "give --database, or BATCHWRIGHT_DATABASE, as sqlite:////folder/service.sqlite"
        )
    return place


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say, in _begin_sqlite
    cursor = connection.cursor()
    _enter_write_ahead_mode(cursor)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", f"wal_autocheckpoint={LOG_PAGES}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _enter_write_ahead_mode(cursor: sqlite3.Cursor) -> None:
    """Set the mode of a new file; if another process is doing so, wait until it has.

    SQLite's own timeout does not apply to this change, which is refused at once while another
    connection has a lock. It does nothing to a file that is in write-ahead mode already.
    """
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # extended codes too
            if not busy or time.monotonic() > end:
                raise
            time.sleep(BUSY_PAUSE)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that will write takes the write lock at once: after a read it could not wait for
    # another writer, since what it has read might change meanwhile.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
