"""A service as its users start it, for `service.service`: killed and started again, timed.

PostgreSQL's server is started too where it is installed, on a port and in a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx

from batchwright.service.settings import Settings
from batchwright.service.store import Store
from benchmarks.harness.loads import free_port

START_SECONDS, STOP_SECONDS = 60.0, 20.0
POLL_SECONDS = 0.02
POSTGRES = Path("/usr/lib/postgresql")
NOBODY = 65534  # PostgreSQL refuses to run as root


class Service:
    """``batchwright serve`` over a database, in a process that can be killed.

    Args:
        database: Its URL.
        folder: Takes the log.
        port: To listen on.
    """

    def __init__(self, database: str, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._database, self._port = database, port
        self._log = (folder / f"service-{port}.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            RuntimeError: It ended, or did not answer in time.
        """
        words = ["serve", "--database", self._database, "--port", str(self._port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "batchwright.cli.commands", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz", timeout=5).is_success:
                    return
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"the service did not start: see {self._log.name}")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def stop(self) -> None:
        """Ask it to end, and see that it does."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


def make_tokens(database: str, count: int, scopes: tuple[str, ...]) -> list[str]:
    """Secrets of so many new tokens, in a database that is set up if it is new."""
    store = Store.open(Settings(database=database))
    try:
        return [store.tokens.create(f"{'-'.join(scopes)}-{n}", scopes) for n in range(count)]
    finally:
        store.close()


def postgres_programs() -> Path | None:
    """The folder of the newest PostgreSQL's programs; `None` if none is installed."""
    found = [one for one in POSTGRES.glob("*/bin") if (one / "initdb").exists()]
    return max(found, key=lambda one: float(one.parent.name), default=None)


@contextmanager
def postgres(programs: Path, folder: Path) -> Iterator[str]:
    """A PostgreSQL server with an empty database, as its URL.

    Args:
        programs: Its folder of programs.
        folder: Takes its files; whoever runs it must be able to enter it.
    """
    data, port = folder / "postgres", free_port()
    data.mkdir()
    prefix: list[str] = []
    if os.geteuid() == 0:
        prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        for one in (folder, *folder.parents[:-1]):
            with suppress(PermissionError):
                one.chmod(one.stat().st_mode | 0o011)
        shutil.chown(data, NOBODY, NOBODY)
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    with (folder / "postgres.log").open("ab") as log:
        subprocess.run(
            [*prefix, programs / "initdb", "-D", data, "-U", "batchwright", "-A", "trust"],
            check=True,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=data,
        )
        server = subprocess.Popen(
            [
                *(*prefix, programs / "postgres", "-D", data, "-p", str(port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}"),
            ],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=data,
        )
        try:
            end = time.monotonic() + START_SECONDS
            ready = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
            while subprocess.run(ready, check=False, env=environment).returncode:
                if time.monotonic() > end or server.poll() is not None:
                    raise RuntimeError(f"PostgreSQL did not start: see {log.name}")
                time.sleep(POLL_SECONDS)
            yield f"postgresql://batchwright@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # ends sessions, then itself
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
