"""Worker processes on this machine that join one group; if one dies, all are started again.

On several hosts, torchrun starts the workers.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.distributed.exit_reports import forget_reports, killed, raise_failure, reports_in
from batchwright.distributed.processes import LAUNCH, STARTED, STARTED_AGAIN, STORE_SOCKET
from batchwright.distributed.supervisor import GRACE_SECONDS, Supervisor
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import JobError
from batchwright.storage.locks import Lock

_LAST_SECONDS = 20.0  # for the others to end, once a worker has failed
_ADDRESS = "127.0.0.1"  # where they meet


def run_workers(
    module: str,
    arguments: Sequence[str],
    *,
    workers: int,
    threads: int,
    folder: Path,
    port: int = 0,
    lock: Lock | None = None,
    **options: Any,
) -> None:
    """Run ``python -m module arguments`` in every worker until all have ended well.

    After a worker was killed, or fell silent, all are started again; an error of its own ends
    all at once, as it would only come again.

    Args:
        module: A module whose main calls `processes.worker_main`.
        arguments: Its command line.
        workers: Number of processes on this machine.
        threads: Compute threads of each.
        folder: Where logs and error reports go; it exists.
        port: Port of this machine at which workers meet; 0: any free one.
        lock: Lock of the folder that worker 0 writes; worker 0 holds it as well.
        options: ``restarts``, ``poll`` and ``tell`` of `supervisor.Supervisor`.

    Raises:
        BatchwrightError: As `Supervisor.run` raises.
        JobError: The port is in use.
    """
    environment = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        LAUNCH: str(uuid.uuid4()),
        STARTED: str(time.time()),
    }
    children = Children(
        [module, *arguments], threads=threads, folder=folder, environment=environment
    )
    AllTogether(children, folder, workers=workers, port=port, lock=lock, **options).run()


class AllTogether(Supervisor):
    """Supervises workers of which none can go on without the others; they are not started yet.

    Arguments are those of `run_workers`.
    """

    def __init__(
        self,
        children: Children,
        folder: Path,
        *,
        workers: int,
        port: int = 0,
        lock: Lock | None = None,
        **options: Any,
    ) -> None:
        super().__init__(children, folder, **options)
        self._workers, self._port, self._lock = workers, port, lock

    def _start(self) -> None:
        """Start all; worker 0 inherits the socket at which they meet, so no one else takes it."""
        lock = self._lock
        held, files = ({}, []) if lock is None else (lock.environment, [lock.descriptor])
        with _listener(self._port) as listener:
            environment = {
                "MASTER_ADDR": _ADDRESS,
                "MASTER_PORT": str(listener.getsockname()[1]),
                STARTED_AGAIN: str(time.time()),
            }
            first = environment | {STORE_SOCKET: str(listener.fileno())} | held
            self._children.start(0, first, files=[listener.fileno(), *files])
            for rank in range(1, self._workers):
                self._children.start(rank, environment)

    def _look(self) -> bool:
        self._poll()
        running = self._children.running()
        codes = self._children.failures()
        if not codes:
            return running
        self._end(_LAST_SECONDS)
        if self.noted:
            return False
        own_error = any(not report["secondary"] for report in reports_in(self._folder))
        if not (own_error or self.killed):  # a loss may be seen before the kill behind it
            codes |= self._children.failures()
        what = _what_happened(codes, self._folder)
        if own_error or not self._again(f"{what}; all were started again"):
            raise_failure(self._folder, codes)
        forget_reports(self._folder)
        self._wait_for_port()
        if self.noted:
            return False
        self._start()
        return True

    def _wait_for_port(self) -> None:
        """Wait until the port is free, if not for long, nor after a stop signal.

        A loader process holds what its worker held until it sees, a moment later, that this was
        killed.
        """
        end = time.monotonic() + _LAST_SECONDS
        while not self.noted and time.monotonic() < end:
            try:
                refuse_busy_port(self._port)
            except JobError:
                time.sleep(POLL_SECONDS)
            else:
                return

    def _stop(self) -> None:
        if self._children.running():
            self._end(GRACE_SECONDS)

    def _end(self, seconds: float) -> None:
        """End the workers that are left; after a stop signal they may write a checkpoint first."""
        self.killed = ""
        self._children.send(signal.SIGTERM)
        self._children.wait(seconds, self._poll, unless=lambda: len(self.noted) > 1)
        if self._children.running():
            self._note_killed(seconds)
        self._children.kill()
        self._poll()


def _listener(port: int) -> socket.socket:
    """A socket that listens at a port of this machine."""
    try:
        return socket.create_server((_ADDRESS, port), backlog=64)
    except OSError as error:
        raise JobError(
            f"port={port} cannot be used ({os.strerror(error.errno or 0)}): choose another, or "
            "port=0 for any free one"
        ) from None


def refuse_busy_port(port: int) -> None:
    """Raise `JobError` if ``port`` on this machine is taken; 0 stands for any free one."""
    if port:
        _listener(port).close()


def _what_happened(codes: Mapping[int, int], folder: Path) -> str:
    for rank, name in killed(codes):
        return f"worker {rank} was killed by {name}"
    for report in reports_in(folder):
        return f"worker {report['rank']}: {report['message']}"
    rank, code = next(iter(codes.items()))
    return f"worker {rank} ended with exit code {code}"
