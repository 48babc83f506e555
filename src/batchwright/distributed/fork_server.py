"""A process that has imported PyTorch and the package once, and becomes the workers by forking.

    this process --> python -m batchwright.distributed.fork_server --> workers

A worker's own start takes two seconds of a core for its imports; forked, it takes milliseconds. The
server computes nothing, so no thread and no GPU is lost in the fork. It dies with this process, and
the workers die with it; an engine's request to stop, which every process of a job may get, it
leaves to them. Where there is none (elsewhere than on Linux, or outside of
`imported_once`), workers are started as usual.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from multiprocessing.connection import wait
from typing import IO, Protocol

from batchwright.distributed.processes import (
    PARENT_PID,
    STOP_SIGNALS,
    child_environment,
    die_with_parent,
)

_MODULES = ("batchwright.probing.worker", "batchwright.training.loop")
_MAX_BYTES = 1 << 20  # of a message: what to start, with its environment
_EVENT_BYTES = 4096  # of a message that a worker has started or ended, at most
_MAX_FILES = 64
_POLL_SECONDS = 0.01
_FOR_WORKERS = tuple(one for one in STOP_SIGNALS if one != signal.SIGINT)  # that is Python's own
_PR_SET_NAME = 15  # from <sys/prctl.h>


class Process(Protocol):
    """A started process, as far as `subprocess.Popen` has the same methods."""

    @property
    def pid(self) -> int:
        """Process number."""

    def poll(self) -> int | None:
        """Exit code, negative if a signal ended it; ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""

    def kill(self) -> None:
        """Kill it."""


def start(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: IO[bytes],
    files: Sequence[int] = (),
) -> Process:
    """Run ``python -m module arguments`` in a session of its own; it dies with this process.

    Args:
        module: A module whose main calls `processes.worker_main`.
        arguments: Its command line.
        environment: All variables of the process.
        log: Takes its standard output and error.
        files: Descriptors that it inherits under the same numbers.
    """
    server: _ForkServer | None = getattr(_of_thread, "server", None)
    if server is not None:
        with suppress(OSError):  # the fork server is gone
            return server.start(module, arguments, environment, [log.fileno(), *files])
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(environment),
        pass_fds=files,
        start_new_session=True,  # the terminal's Ctrl-C is for this process alone
    )


@contextmanager
def imported_once(*more: str) -> Iterator[None]:
    """Inside, workers that this thread starts are forked from a server that imports only once.

    The kernel ends a process with the thread that has started it, so each thread has its own.

    Args:
        more: Modules that the server imports besides those of workers.
    """
    if getattr(_of_thread, "server", None) is not None or sys.platform != "linux":
        yield
        return
    server = _of_thread.server = _ForkServer(more)
    try:
        yield
    finally:
        _of_thread.server = None
        server.close()


class _ForkServer:
    def __init__(self, more: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start_server(theirs.fileno(), more)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        ours.settimeout(None)  # whatever `socket.setdefaulttimeout` says: `_listen` never waits
        self._line = ours
        self._orders = count()
        self._started: dict[int, int] = {}  # process numbers by order
        self._ended: dict[int, int] = {}  # exit codes by order
        self._gone = False

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: list[int],
    ) -> Process:
        """Have the server fork a worker; the first of ``files`` is its log.

        Raises:
            OSError: The server is gone.
        """
        number = next(self._orders)
        order = _Order(number, module, list(arguments), dict(environment), files)
        socket.send_fds(self._line, [json.dumps(vars(order)).encode()], files)
        return _Forked(number, self)

    def started(self, order: int) -> int | None:
        """Process number of the worker of an order; ``None`` while the server still imports."""
        self._listen()
        return self._started.get(order)

    def ended(self, order: int) -> int | None:
        """Exit code of the worker of an order; ``None`` while it runs. None outlives the server."""
        self._listen()
        return self._ended.get(order, -signal.SIGKILL if self._gone else None)

    def close(self) -> None:
        """Kill the server, and with it all workers."""
        self._listen()
        self._gone = True
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        """Read the server's messages, without waiting for any."""
        while not self._gone:
            try:
                message = self._line.recv(_EVENT_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:  # there is none
                return
            except ConnectionError:
                message = b""
            if not message:
                self._gone = True
                return
            event = json.loads(message)
            if "pid" in event:
                self._started[event["order"]] = event["pid"]
            else:
                self._ended[event["order"]] = event["code"]


_of_thread = threading.local()


def _start_server(line: int, more: Sequence[str]) -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", "batchwright.distributed.fork_server", str(line), *more],
        stdin=subprocess.DEVNULL,
        env=child_environment(threads=1),  # or NumPy's BLAS starts some before the fork
        pass_fds=[line],
        start_new_session=True,
    )


class _Forked:
    def __init__(self, order: int, server: _ForkServer) -> None:
        self._order, self._server = order, server
        self._code: int | None = None
        self._signals: list[int] = []  # to be sent once it has started

    @property
    def pid(self) -> int:
        """Process number; waits until the process is started."""
        while (pid := self._server.started(self._order)) is None:
            if self.poll() is not None:
                raise ProcessLookupError("it was never started")
            time.sleep(_POLL_SECONDS)
        return pid

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.ended(self._order)
        if self._signals and self._code is None:
            pid = self._server.started(self._order)
            while pid is not None and self._signals:
                with suppress(ProcessLookupError):
                    os.kill(pid, self._signals.pop(0))
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is not None:
            return
        if sig == signal.SIGKILL and self._server.started(self._order) is None:
            self._server.close()  # still importing: it must not start the worker afterwards
            return
        self._signals.append(sig)
        self.poll()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ------------------------------------------------------------------------------- in the server


@dataclass
class _Order:
    """Order for a fork, which runs a module as ``__main__``."""

    number: int  # identifies it in messages
    module: str
    arguments: list[str]
    environment: dict[str, str]
    files: list[int]  # descriptor numbers of the files sent with it; the first is the log


def _serve(line: socket.socket) -> _Order | None:
    """Fork for each order until the other side is gone; returns the order in the fork alone."""
    parent = os.getpid()
    waking, woken = socket.socketpair()
    for end in (waking, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that the descriptor is written to
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}  # order numbers by process number
    while True:
        readable = wait([line, waking])
        if waking in readable:
            with suppress(BlockingIOError):
                waking.recv(4096)
            _reap(line, running)
        if line not in readable:
            continue
        try:
            message, files, _, _ = socket.recv_fds(line, _MAX_BYTES, _MAX_FILES)
        except ConnectionError:
            return None
        if not message:
            return None
        order = _Order(**json.loads(message))
        with warnings.catch_warnings():  # about threads, none of which computes
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *_FOR_WORKERS):
                signal.signal(number, signal.SIG_DFL)
            for end in (line, waking, woken):
                end.close()
            _become(order, files, parent)
            return order
        for descriptor in files:
            os.close(descriptor)
        running[pid] = order.number
        with suppress(OSError):
            line.send(json.dumps({"order": order.number, "pid": pid}).encode())


def _reap(line: socket.socket, running: dict[int, int]) -> None:
    """Report workers that have ended."""
    for pid in sorted(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            event = {"order": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}
            with suppress(OSError):
                line.send(json.dumps(event).encode())


def _become(order: _Order, files: list[int], parent: int) -> None:
    """Give a fork the session, files, environment and random seeds of a process of its own."""
    os.setsid()
    # First move all of them above the numbers that they get, so that none is overwritten.
    above = max([2, *order.files, *files]) + 1
    moved = [_moved(descriptor, above) for descriptor in files]
    for descriptor, number in zip(moved[1:], order.files[1:], strict=True):
        os.dup2(descriptor, number)
    for number in (1, 2):
        os.dup2(moved[0], number)
    for descriptor in moved:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order.environment)  # glibc is set up alike in all of them
    os.environ[PARENT_PID] = str(parent)
    die_with_parent(PARENT_PID)
    name = f"worker {order.environment.get('RANK', '')}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())  # as ps and top show it
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # else all workers would draw the same numbers until they are seeded
        numpy.random.seed()
        threads = int(order.environment.get("OMP_NUM_THREADS", "").partition(",")[0] or 0)
        if threads:  # its BLAS has read the server's number as it was loaded
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads, user_api="blas")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def _moved(descriptor: int, above: int) -> int:
    import fcntl

    number = fcntl.fcntl(descriptor, fcntl.F_DUPFD, above)
    os.close(descriptor)
    return number


def _main() -> None:
    die_with_parent(PARENT_PID)
    for number in _FOR_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    _, number_of_line, *more = sys.argv
    for module in (*_MODULES, *more):
        import_module(module)
    gc.freeze()  # what was imported stays: workers need not go through it again and again
    with socket.socket(fileno=int(number_of_line)) as line:
        order = _serve(line)
    if order is not None:
        sys.argv[1:] = order.arguments
        sys.modules.pop(order.module, None)  # it runs as the main one
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
