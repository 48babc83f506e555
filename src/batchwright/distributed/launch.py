"""Starts worker processes on this machine and stays with them until they end.

    this process --> workers (python -m MODULE, one per rank)

They die with this process. Signals reach this process only; it passes them on, so that the workers
can write a checkpoint before they end. Workers of several hosts are torchrun's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import NoReturn

from batchwright.distributed.exit_reports import (
    forget_reports,
    killed,
    killed_words,
    name_of,
    reports_in,
)
from batchwright.distributed.processes import LAUNCH, STARTED, STORE_SOCKET
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import (
    BatchwrightError,
    DeadlineReached,
    Interrupted,
    JobError,
    WorkerError,
)
from batchwright.storage.locks import Lock

GRACE_SECONDS = 60.0
"""From a stop signal until workers are killed: for the step in progress and a checkpoint."""

_LAST_SECONDS = 20.0  # for the others to end, once a worker has failed
_ADDRESS = "127.0.0.1"  # where they meet
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_workers(
    module: str,
    arguments: Sequence[str],
    *,
    workers: int,
    threads: int,
    folder: Path,
    port: int = 0,
    restarts: int = 0,
    lock: Lock | None = None,
    poll: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
) -> None:
    """Run ``python -m module arguments`` in every worker until all have ended well.

    After one was killed, or fell silent, all are started again; an error of a worker's own ends
    them at once, as it would only come again.

    Args:
        module: A module whose main calls `processes.worker_main`.
        arguments: Its command line.
        workers: Number of processes on this machine.
        threads: Compute threads of each.
        folder: Where logs and error reports go; it exists.
        port: On this machine, where workers meet; 0: any free one.
        restarts: How often all of them may be started again.
        lock: Of the folder that worker 0 writes, which holds it too.
        poll: Called about ten times a second while they run.
        tell: Takes the line that says why they were started again.

    Raises:
        WorkerError: A worker died once more than ``restarts``, or ended by its own error, which is
            the message.
        BatchwrightError: A worker refused its input.
        Interrupted: A stop signal came; the workers have ended.
        JobError: The port is in use.
    """
    forget_reports(folder)
    environment = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        LAUNCH: str(uuid.uuid4()),
        STARTED: str(time.time()),
    }
    children = Children(
        [module, *arguments], threads=threads, folder=folder, environment=environment
    )
    with noting_signals() as noted:
        try:
            for number in count(1):
                _start(children, workers, port, lock)
                codes = _watch(children, poll, noted)
                lost = _stop(children, poll, noted)
                if noted or not codes:
                    break
                own_error = any(not report["secondary"] for report in reports_in(folder))
                if number > restarts or own_error:  # which would only come again
                    raise_failure(folder, codes)
                what = _what_happened(codes, folder)
                tell(f"{what}; all were started again ({number} of {restarts})")
                forget_reports(folder)
        finally:
            children.close()
    if noted:
        raise Interrupted(noted[0], f"stopped by signal {noted[0]}{lost}")


def _start(children: Children, workers: int, port: int, lock: Lock | None) -> None:
    """Start all; worker 0 inherits the socket at which they meet, so that nobody else takes it."""
    held, files = ({}, []) if lock is None else (lock.environment, [lock.descriptor])
    with _listener(port) as listener:
        environment = {"MASTER_ADDR": _ADDRESS, "MASTER_PORT": str(listener.getsockname()[1])}
        first = environment | {STORE_SOCKET: str(listener.fileno())} | held
        children.start(0, first, files=[listener.fileno(), *files])
        for rank in range(1, workers):
            children.start(rank, environment)


def _listener(port: int) -> socket.socket:
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


def _watch(children: Children, poll: Callable[[], None], noted: list[int]) -> dict[int, int]:
    """Stay until all have ended, or one has failed or a signal come.

    Returns:
        Exit codes, by rank, of those that failed first.
    """
    while children.running() and not noted:
        poll()
        if children.failures():
            break
        time.sleep(POLL_SECONDS)
    return children.failures()


def _stop(children: Children, poll: Callable[[], None], noted: list[int]) -> str:
    """End those that are left, which may first write a checkpoint if a signal is why.

    Returns:
        What to add to the message of a stop.
    """
    children.send(signal.SIGTERM)
    seconds = GRACE_SECONDS if noted else _LAST_SECONDS
    children.wait(seconds, poll, unless=lambda: len(noted) > 1)
    killed_them = children.running()
    children.kill()
    poll()
    return told_killed(noted, seconds) if killed_them else ""


def told_killed(noted: list[int], seconds: float, *, lost: bool = True) -> str:
    """What to add to the message of a stop if processes had to be killed.

    They were waited for so many seconds, unless a second signal was noted; ``lost`` says whether
    the model that they had is lost with them.
    """
    why = "a second one came" if len(noted) > 1 else f"{seconds:.0f} s had passed"
    what = ": what was done since the last checkpoint is lost" if lost else ""
    return f", and killed when {why}{what}"


def _what_happened(codes: Mapping[int, int], folder: Path) -> str:
    for rank, name in killed(codes):
        return f"worker {rank} was killed by {name}"
    for report in reports_in(folder):
        return f"worker {report['rank']}: {report['message']}"
    rank, code = next(iter(codes.items()))
    return f"worker {rank} ended with exit code {code}"


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Inside, stop signals are noted in the list instead of ending this process.

    Outside the main thread nothing is noted: there the caller handles signals.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        noted.append(number)

    try:
        former = {number: signal.signal(number, note) for number in _SIGNALS}
    except ValueError:  # not the main thread
        yield noted
        return
    try:
        yield noted
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def raise_failure(folder: Path, codes: Mapping[int, int]) -> NoReturn:
    """Raise what really went wrong: a killed worker first, then the first own error of a worker.

    The folder has reports and logs; ``codes`` are exit codes by rank, negative: by that signal.
    """
    for rank, name in killed(codes):
        raise WorkerError(f"{killed_words(name_of(rank), name)}; logs are in {folder}")
    reports = reports_in(folder)
    if reports:
        first = reports[0]
        if first["exit_code"] == DeadlineReached.exit_code:
            raise DeadlineReached(first["message"])
        kind = BatchwrightError if first["exit_code"] == 2 else WorkerError
        prefix = "" if first["exit_code"] == 2 else f"{name_of(first['rank'])}: "
        raise kind(prefix + first["message"])
    last = last_line(folder)
    raise WorkerError(f"the workers ended: {last}; logs are in {folder}")


def last_line(folder: Path) -> str:
    """What the processes whose logs are in a folder printed last."""
    for path in [*sorted(folder.glob("**/stderr.log")), *folder.glob("*.log")]:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        if written:
            return written[-1]
    return "no output"
