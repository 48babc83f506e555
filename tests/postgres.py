"""A PostgreSQL server of the tests' own, where Debian's package is installed; else tests skip."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

INSTALL = "apt-get install postgresql"
LAST_SECONDS = 500


def programs() -> Path | None:
    """Where initdb and postgres are; Debian keeps them out of the path."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return versions[-1].parent if versions else None


def _as_somebody() -> list[str]:
    """What goes before a command, for PostgreSQL refuses to be root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={_user().pw_uid}", f"--regid={_user().pw_gid}", "--clear-groups"]


def _user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def databases() -> Iterator[Callable[[], str]]:
    """A server for all tests; each call makes an empty database and gives its URL."""
    import psycopg

    numbers = itertools.count()
    with _server() as folder:

        def empty() -> str:
            name = f"test{next(numbers)}"
            with psycopg.connect(f"host={folder} user=bw dbname=postgres", autocommit=True) as link:
                link.execute(f"CREATE DATABASE {name}")
            return f"postgresql://bw@/{name}?host={folder}"

        yield empty


@contextmanager
def _server() -> Iterator[Path]:
    """The folder of a server's socket; all that is the server's goes with it.

    Its disk is not synced: nobody pulls the plug of a test.
    """
    found = programs()
    if found is None:
        pytest.skip(f"needs PostgreSQL: {INSTALL}")
    folder = Path(tempfile.mkdtemp(prefix="bw-pg-"))
    if os.geteuid() == 0:
        os.chown(folder, _user().pw_uid, _user().pw_gid)
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"}

    def call(program: str, *words: str) -> None:
        done = subprocess.run(
            [*_as_somebody(), str(found / program), *words],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LAST_SECONDS,
        )
        assert done.returncode == 0, f"{program}: {done.stderr[-1000:]}"

    data = str(folder / "data")
    try:
        call("initdb", "-D", data, "-U", "bw", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        log = str(folder / "log")
        call("pg_ctl", "start", "-D", data, "-w", "-l", log, "-o", options)
        try:
            yield folder
        finally:
            call("pg_ctl", "stop", "-D", data, "-m", "immediate", "-w")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
