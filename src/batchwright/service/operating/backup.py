"""Backup of the database, also while the service runs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL

from batchwright.errors import BatchwrightError, FileError
from batchwright.service.database.engine import BUSY_SECONDS, read_url, shown
from batchwright.storage.files import refusal

DUMP_SECONDS = 24 * 3600


def backup(database: str, target: Path) -> int:
    """Copy a database into a new file that only its owner may read.

    Of SQLite the copy is a database of one moment, checked; of PostgreSQL it is a dump of
    ``pg_dump``, for ``pg_restore``.

    Args:
        database: URL of the database.
        target: The file.

    Returns:
        The file's size, in bytes.

    Raises:
        BatchwrightError: There is no such database, it is damaged, or ``pg_dump`` fails.
        FileError: The file exists, or cannot be written.
    """
    if target.exists():
        raise FileError(f"{target} exists: a backup goes into a new file, name another")
    aside = target.with_name(f".{target.name}.part")
    try:
        os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise FileError(
            f"{aside} exists: another backup writes it, or did and ended early"
        ) from None
    except OSError as error:
        raise refusal(target, error) from None
    try:
        place = read_url(database)
        if place.get_backend_name() == "sqlite":
            _copy(Path(place.database or ""), aside)
        else:
            _dump(place, aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)
    return target.stat().st_size


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise BatchwrightError(f"there is no database {source}: name it with --database")
    try:
        with (
            closing(sqlite3.connect(source, timeout=BUSY_SECONDS)) as original,
            closing(sqlite3.connect(target)) as copy,
        ):
            original.backup(copy)  # in one step: of one moment, and writers need not wait
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
            result = copy.execute("PRAGMA quick_check").fetchone()[0]
    except sqlite3.Error as error:
        raise BatchwrightError(f"cannot back up {source}: {error}") from None
    if result != "ok":
        raise BatchwrightError(f"{source} is damaged: {result.splitlines()[0]}")


def _dump(place: URL, target: Path) -> None:
    program = shutil.which("pg_dump")
    if program is None:
        raise BatchwrightError(
            "a backup of PostgreSQL needs pg_dump: apt-get install postgresql-client"
        )
    # The password is passed by the environment: every user may read the command line.
    password = place.query.get("password") or place.password
    secret = {"PGPASSWORD": str(password)} if password else {}
    without = place.set(drivername="postgresql", password=None)
    without = without.difference_update_query(["password"])
    done = subprocess.run(
        [program, "--format=custom", f"--file={target}", f"--dbname={without.render_as_string()}"],
        env={**os.environ, **secret},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DUMP_SECONDS,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BatchwrightError(f"cannot back up {shown(str(place))}: {lines[-1]}")
