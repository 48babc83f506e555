"""Processes beside the service that read and plan what clients send.

A call into pydantic holds Python's lock until it returns, so while it goes through a large body
nobody is answered, whatever thread it is in. What is large, or may take long, is done over there:
in little memory, and not for longer than it may take.

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
"""What came of a task, ``done``, ``failed`` or one of `_PROBLEMS`; its value, the traceback or the
line; and whether the process stays."""

_PROBLEMS: dict[str, Callable[[str], ServiceProblem]] = {
    "refused": Refused,
    "too large": TooLarge,
    "unavailable": Unavailable,
}

MAX_BYTES = 384 * 2**20
"""Memory that a process may write to; what needs more is refused."""

KEPT_BYTES = 144 * 2**20
"""A process that is larger than this after a task ends, and another one is started."""

PATIENCE_SECONDS = 10.0
"""How long a caller waits for its turn."""

_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 256 * 1024
"""A parameter of glibc's mallopt, from <malloc.h>, and its value."""

_BUSY = "the service is busy with other requests of this size: come again"
_KILLED = "the machine ended what was to answer this, being short of memory maybe: come again"
_TOO_COSTLY = "this takes more memory than a request may: send less at once"


class Workers:
    """Some processes, started when they are needed first. Safe to use from several threads.

    Args:
        most: Processes at once.
        waiting: Callers that may wait for one; further ones are sent away. Each of them keeps a
            thread from all other requests.
    """

    def __init__(self, most: int, waiting: int = 16) -> None:
        self._places = threading.BoundedSemaphore(most + waiting)
        self._turns = threading.BoundedSemaphore(most)
        self._idle: list[_Worker] = []
        atexit.register(self.close)

    def call(
        self, seconds: float, function: Callable[P, T], *given: P.args, **named: P.kwargs
    ) -> T:
        """What ``function`` returns over there.

        Args:
            seconds: How long it may take.
            function: Of a module; it, its arguments and its result are pickled.
            *given: Its arguments.
            **named: And those by name.

        Raises:
            Refused: It raised a `BatchwrightError`.
            TooLarge: It needs too much memory.
            Unavailable: It took too long, or the system ended its process.
            TooMany: Others wait already, or its turn did not come.
            RuntimeError: It raised anything else; the traceback is in the text.
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
        """End the processes that have nothing to do."""
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
                worker = self._idle.pop()  # another thread may have taken it
            except IndexError:
                return _Worker()
            if worker.is_there():
                return worker
            worker.end()


class _Worker:
    """One process, seen from the service."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())

    def is_there(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, task: tuple[Any, ...], seconds: float) -> TaskResult:
        """What came of it."""
        try:
            self._connection.send((seconds, task))
            if not self._connection.poll(seconds):
                told = f"this takes longer than {seconds:.0f} s: send less at once, or come again"
                return "unavailable", told, False
            answer: TaskResult = self._connection.recv()
        except (EOFError, OSError):
            # A library that gets no more memory ends its process by a signal of its own; SIGKILL
            # comes from outside, as where the machine has none left.
            killed = self._process.wait() == -signal.SIGKILL
            return ("unavailable", _KILLED, False) if killed else ("too large", _TOO_COSTLY, False)
        return answer

    def end(self) -> None:
        """End it, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _work(connection: Connection) -> None:
    """Do what comes, until nobody is there who could send more or the process is too large."""
    stays = True
    while stays:
        try:
            seconds, (function, given, named) = connection.recv()
        except EOFError:
            return
        signal.alarm(math.ceil(seconds) + 1)  # should the service have been killed meanwhile
        value: Any
        try:
            kind, value = "done", function(*given, **named)
        except BatchwrightError as error:
            kind, value = "refused", one_line(error)
        except MemoryError:
            kind, value = "too large", _TOO_COSTLY
        except Exception:  # noqa: BLE001 - whoever asked raises it
            kind, value = "failed", traceback.format_exc()
        signal.alarm(0)
        del given, named
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        stays = int(pages) * resource.getpagesize() < KEPT_BYTES
        with suppress(OSError):
            connection.send((kind, value, stays))


def free_at_once() -> None:
    """Have large blocks of memory go back to the system when they are freed, where glibc is there.

    It would learn from the first large body to keep as much, and that for each thread.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def main() -> None:
    """The command line above."""
    # The service decides when to end. A supervisor sends these to all its processes, and who waits
    # for an answer would be told that the request cannot be met.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    free_at_once()
    gc.disable()  # it would go through hundreds of thousands of values again and again
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _work(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
