"""Child processes of a run: started, signalled, watched and ended."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from batchwright.distributed import fork_server
from batchwright.distributed.exit_reports import ERRORS_FOLDER
from batchwright.distributed.processes import child_environment

POLL_SECONDS = 0.1
_LAST_LINES = 1.0  # seconds for a companion's last lines: a child of its own may hold the pipe
_ANOTHERS = ("GROUP_", "MASTER_", "ROLE_", "TORCHELASTIC_")  # of the launcher of this process


class Children:
    """The workers of one run, each with a log of its own, ``FOLDER/RANK/stderr.log``.

    They die with this process.

    Args:
        command: A module whose main calls `processes.worker_main`, and its command line.
        threads: Compute threads of each; unset: as the environment says.
        folder: Takes logs and error reports; it exists.
        environment: Variables of all workers besides this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        threads: int | None = None,
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._module, *self._arguments = command
        self._folder = folder
        own = {ERRORS_FOLDER: str(folder), **environment}
        self._environment = child_environment(threads, without=_ANOTHERS) | own
        self._processes: dict[int, fork_server.Process] = {}
        self._logs: dict[int, IO[bytes]] = {}

    def start(
        self,
        rank: int,
        environment: Mapping[str, str] = MappingProxyType({}),
        files: Sequence[int] = (),
        arguments: Sequence[str] = (),
    ) -> None:
        """Start a worker, maybe in place of one that has ended.

        The variables, descriptors and further arguments are for this worker alone.
        """
        log = self._logs.get(rank)
        if log is None:
            (self._folder / str(rank)).mkdir(exist_ok=True)
            log = self._logs[rank] = (self._folder / str(rank) / "stderr.log").open("wb")
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        self._processes[rank] = fork_server.start(
            self._module,
            [*self._arguments, *arguments],
            environment={**self._environment, **environment, **numbers},
            log=log,
            files=files,
        )

    def runs(self, rank: int) -> bool:
        """Whether a worker runs."""
        process = self._processes.get(rank)
        return process is not None and process.poll() is None

    def running(self) -> bool:
        """Whether any worker runs."""
        return any(process.poll() is None for process in self._processes.values())

    def exit_codes(self) -> dict[int, int]:
        """Exit codes, by rank, of workers that have ended; negative if by a signal."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def failures(self) -> dict[int, int]:
        """The exit codes that are not 0."""
        return {rank: code for rank, code in self.exit_codes().items() if code}

    def forget(self, rank: int) -> None:
        """Forget a worker that has ended."""
        del self._processes[rank]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all workers that run."""
        for rank in self._processes:
            self.send_to(rank, number)

    def send_to(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a worker, if it runs."""
        if self.runs(rank):
            self._processes[rank].send_signal(number)

    def wait(
        self,
        seconds: float,
        poll: Callable[[], None] = lambda: None,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until all have ended, for so many seconds at most, or until ``unless()``.

        ``poll`` is called meanwhile, some twenty times a second.
        """
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end and not unless():
            poll()
            time.sleep(POLL_SECONDS / 2)

    def kill(self) -> None:
        """Kill all workers."""
        self.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def close(self) -> None:
        """Kill all workers, and close their logs."""
        self.kill()
        for log in self._logs.values():
            log.close()


class Companion:
    """A process beside this one that takes orders, a line of JSON each, and prints lines.

    Arguments as for `fork_server.start`, except that ``log`` takes its standard error alone;
    unset: this process's own.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: IO[bytes] | int | None,
        files: Sequence[int] = (),
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(environment),
            pass_fds=files,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
        self._said: deque[str] = deque()
        self._reader = threading.Thread(target=self._read, name=module, daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:  # the limit on processes counts threads, too
            self._process.kill()
            self._process.wait()
            raise BlockingIOError(errno.EAGAIN, str(error)) from None

    def say(self, order: Mapping[str, Any]) -> None:
        """Send an order; a process that has ended does not get it."""
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101 - it is a pipe
        with suppress(OSError):
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()

    def lines(self) -> Iterator[str]:
        """Lines that it has printed since the last call."""
        while self._said:
            yield self._said.popleft()

    @property
    def silent(self) -> bool:
        """Whether it has ended, and `lines` has returned all that it printed."""
        return self.poll() is not None and not (self._reader.is_alive() or self._said)

    def poll(self) -> int | None:
        """Exit code, negative if a signal ended it; ``None`` while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end, for so many seconds at most; returns the exit code."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill it, if it still runs, and take its last lines."""
        self.kill()
        self._reader.join(_LAST_LINES)
        with suppress(OSError):
            assert self._process.stdin is not None  # noqa: S101 - it is a pipe
            self._process.stdin.close()

    def _read(self) -> None:
        """Read its lines as they come, so that it never waits for this process."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        with self._process.stdout as lines:
            for line in lines:
                self._said.append(line.decode(errors="replace").rstrip("\n"))
