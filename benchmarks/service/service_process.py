"""A service in a process that can be killed and started again, for `service.service`.

A PostgreSQL server, where it is installed, is started on a port and in a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx

from batchwright.service.settings import Settings
from batchwright.service.store import Store
from benchmarks.harness.loads import free_port, until

START_SECONDS, STOP_SECONDS = 60.0, 20.0
POSTGRES = Path("/usr/lib/postgresql")
NOBODY = 65534  # PostgreSQL refuses to run as root


class Service:
    """``batchwright serve`` over a database, in a process that can be killed; logs to a folder.

    Args:
        database: URL of the database.
        folder: Folder for the log.
        *options: Options of ``serve``.
        module: Module to run in place of the command line.
        **variables: Additional environment variables.
    """

    def __init__(
        self,
        database: str,
        folder: Path,
        *options: str,
        module: str = "batchwright.cli.commands",
        **variables: str,
    ) -> None:
        self.port = free_port()
        self._words = [module, "serve", "--database", database, "--port", str(self.port), *options]
        self._variables = variables
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = (folder / f"service-{self.port}.log").open("ab")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process, signal.SIGTERM)
        self._log.close()

    def start(self) -> None:
        """Start the service and wait until it answers.

        Raises:
            RuntimeError: The service ended, or did not answer in time.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self._words],
            env=os.environ | self._variables,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

        def answers() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/readyz", timeout=5).is_success
            return self._process.poll() is not None

        if not until(answers, START_SECONDS) or self._process.poll() is not None:
            raise RuntimeError(f"the service did not start: see {self._log.name}")

    @property
    def pid(self) -> int:
        """Identifier of the process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the service, as a crash would."""
        end(self._process, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send a process a signal; kill it if it has not ended in time."""
    process.send_signal(how)  # without effect on one that has ended
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_tokens(database: str, count: int, scopes: tuple[str, ...]) -> list[str]:
    """Create ``count`` tokens with these scopes, in a database that is set up if it is new."""
    store = Store.open(Settings(database=database))
    try:
        return [store.tokens.create(f"{'-'.join(scopes)}-{n}", scopes) for n in range(count)]
    finally:
        store.close()


# ------------------------------------------------------------------------------------- databases


@contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    """A new database in a new folder, as its URL."""
    folder.mkdir()
    yield f"sqlite:///{folder}/service.sqlite"


@contextmanager
def postgres(folder: Path) -> Iterator[str | None]:
    """URL of an empty database of a PostgreSQL server in a new folder; ``None``: not installed.

    The server's user must be able to enter the folder.
    """
    found = [one for one in POSTGRES.glob("*/bin") if (one / "initdb").exists()]
    if not found:
        yield None
        return
    programs = max(found, key=lambda one: float(one.parent.name))
    data, port = folder / "postgres", free_port()
    data.mkdir(parents=True)
    prefix: list[str] = []
    if os.geteuid() == 0:
        prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        for one in (folder, *folder.parents[:-1]):
            with suppress(PermissionError):
                one.chmod(one.stat().st_mode | 0o011)
        shutil.chown(data, NOBODY, NOBODY)
    with (folder / "postgres.log").open("ab") as log:
        how = {"stdout": log, "stderr": log, "env": {**os.environ, "LC_ALL": "C.UTF-8"}}
        initdb = [programs / "initdb", "-D", data, "-U", "batchwright", "-A", "trust"]
        subprocess.run([*prefix, *initdb], check=True, cwd=data, **how)
        words = [programs / "postgres", "-D", data, "-p", str(port)]
        words += ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}"]
        server = subprocess.Popen([*prefix, *words], cwd=data, **how)
        ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        try:
            if not until(lambda: not subprocess.run(ready, check=False).returncode, START_SECONDS):
                raise RuntimeError(f"PostgreSQL did not start: see {log.name}")
            yield f"postgresql://batchwright@127.0.0.1:{port}/postgres"
        finally:
            end(server, signal.SIGINT)  # ends sessions, then itself


DATABASES: dict[str, Callable[[Path], AbstractContextManager[str | None]]] = {
    "sqlite": sqlite,
    "postgresql": postgres,
}
"""By kind, a context of a new empty database in a new folder; it gives the URL."""
