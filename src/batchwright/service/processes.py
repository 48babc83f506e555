"""Worker processes of the service, which parse large bodies and make plans.

A call into pydantic holds Python's lock until it returns, so while it parses a large body no
request is answered, whatever thread it is in. Large bodies, and what may take long, are left to
these processes, with limits on memory and time.

    python -m batchwright.service.processes DESCRIPTOR
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import math
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from batchwright.errors import BatchwrightError, one_line
from batchwright.service.problems import (
    Refused,
    ServiceProblem,
    TooLarge,
    TooMany,
    Unavailable,
)

P = ParamSpec("P")
T = TypeVar("T")

TaskResult = tuple[str, Any, bool]
"""Outcome of a task, ``done``, ``failed`` or one of `_PROBLEMS`; the value, the traceback or the
line; and whether the process stays."""

_PROBLEMS: dict[str, Callable[[str], ServiceProblem]] = {
    "refused": Refused,
    "too large": TooLarge,
    "unavailable": Unavailable,
}

MAX_BYTES = 384 * 2**20
"""Maximum memory that a process may write to; a task that needs more is refused."""

KEPT_BYTES = 144 * 2**20
"""A process that is larger than this after a task is ended, and replaced by another."""

PATIENCE_SECONDS = 10.0
"""Maximum wait of a caller for its turn."""

_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 256 * 1024
"""A parameter of glibc's mallopt, from <malloc.h>, and its value."""

_BUSY = "the service is busy with other requests like this: come again"
_ENDED = {  # by the signal that ended a process, as its exit code
    # From outside, as where the machine has no memory left.
    -signal.SIGKILL: "the machine ended what was to answer this, being short of memory maybe: "
    "come again",
    # From `_work`, as the service did not end it in time.
    -signal.SIGALRM: "the service stood still meanwhile: come again",
}
_TOO_COSTLY = "this takes more memory than a request may: send less at once"


class Workers:
    """Worker processes, started when they are first needed. Safe to use from several threads.

    Args:
        most: Maximum number of processes.
        waiting: Maximum number of callers that wait for one; each takes a thread of the requests'.
    """

    def __init__(self, most: int, waiting: int = 16) -> None:
        self._places = threading.BoundedSemaphore(most + waiting)
        self._turns = threading.BoundedSemaphore(most)
        self._idle: list[_Worker] = []
        atexit.register(self.close)

    def call(
        self, seconds: float, function: Callable[P, T], *given: P.args, **named: P.kwargs
    ) -> T:
        """Call a function in a worker process.

        Args:
            seconds: Maximum duration of the call.
            function: A function of a module; it, its arguments and its result are pickled.
            *given: Positional arguments.
            **named: Keyword arguments.

        Returns:
            What the function returns.

        Raises:
            Refused: The function raised a `BatchwrightError`.
            TooLarge: The call needs too much memory.
            Unavailable: The call took too long, the system ended its process, or this one stood
                still.
            TooMany: Too many callers wait already, or the turn of this one did not come.
            RuntimeError: The function raised anything else; the traceback is in the text.
        """
        if not self._places.acquire(blocking=False):
            raise TooMany(_BUSY, 1.0)
        try:
            if not self._turns.acquire(timeout=PATIENCE_SECONDS):
                raise TooMany(_BUSY, PATIENCE_SECONDS)
            try:
                kind, value = self._ask((function, given, named), seconds)
            finally:
                self._turns.release()
        finally:
            self._places.release()
        if kind in _PROBLEMS:
            raise _PROBLEMS[kind](value)
        if kind == "failed":
            raise RuntimeError(f"a process of the service failed:\n{value}")
        returned: T = value
        return returned

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().end()

    def _ask(self, task: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        worker, stays = self._idle_or_new(), False
        try:
            kind, value, stays = worker.ask(task, seconds)
        finally:
            if stays:
                self._idle.append(worker)
            else:
                worker.end()
        return kind, value

    def _idle_or_new(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()  # another thread may have taken the last one
            except IndexError:
                return _Worker()
            if worker.is_running():
                return worker
            worker.end()


class _Worker:
    """The service's end of one worker process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())

    def is_running(self) -> bool:
        """Whether the process can take a task."""
        return self._process.poll() is None

    def ask(self, task: tuple[Any, ...], seconds: float) -> TaskResult:
        """Have the process do a task, within ``seconds``; returns the outcome."""
        try:
            self._connection.send((seconds, task))
            if not self._connection.poll(seconds):
                line = f"this takes longer than {seconds:.0f} s: send less at once, or come again"
                return "unavailable", line, False
            result: TaskResult = self._connection.recv()
        except (EOFError, OSError):
            # A library that gets no more memory ends its process by a signal of its own.
            why = _ENDED.get(self._process.wait())
            return ("unavailable", why, False) if why else ("too large", _TOO_COSTLY, False)
        return result

    def end(self) -> None:
        """Kill the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _work(connection: Connection) -> None:
    """Do tasks until the service has closed the connection, or this process is too large."""
    stays = True
    while stays:
        try:
            seconds, (function, given, named) = connection.recv()
        except EOFError:
            return
        signal.alarm(math.ceil(seconds) + 1)  # ends this process if the service was killed
        value: Any
        try:
            kind, value = "done", function(*given, **named)
        except BatchwrightError as error:
            kind, value = "refused", one_line(error)
        except MemoryError:
            kind, value = "too large", _TOO_COSTLY
        except Exception:  # noqa: BLE001 - raised again by `Workers.call`
            kind, value = "failed", traceback.format_exc()
        signal.alarm(0)
        del given, named
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        stays = int(pages) * resource.getpagesize() < KEPT_BYTES
        with suppress(OSError):
            connection.send((kind, value, stays))


def free_at_once() -> None:
    """Have glibc, where it is used, return large blocks of memory to the system once they are free.

    By default it would keep as much as the first large body took, for each thread.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def main() -> None:
    """Run a worker process, by the command line above."""
    # The service decides when this process ends. A supervisor, or a closed terminal, sends these
    # signals to all processes of the service, and a request that waits for this one would fail.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    free_at_once()
    gc.disable()  # collecting would go through hundreds of thousands of values again and again
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _work(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
