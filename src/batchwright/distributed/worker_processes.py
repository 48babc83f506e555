"""Worker processes as whoever starts them sees them: started, signalled, looked at, ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

from batchwright.distributed import fork_server
from batchwright.distributed.exit_reports import ERRORS_FOLDER
from batchwright.distributed.processes import PARENT_PID, spinning_shortly

POLL_SECONDS = 0.1
_ANOTHERS = ("GROUP_", "MASTER_", "ROLE_", "TORCHELASTIC_")  # of a launcher that started this one


class Children:
    """The workers of one run, each with a log of its own, ``FOLDER/RANK/stderr.log``.

    They die with this process.

    Args:
        command: A module whose main calls `processes.worker_main`, and its command line.
        threads: Compute threads of each.
        folder: Takes logs and error reports; it exists.
        environment: Variables that all have besides this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        threads: int,
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._module, *self._arguments = command
        self._folder = folder
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_ANOTHERS)}
        self._environment = {
            **spinning_shortly(kept),
            "OMP_NUM_THREADS": str(threads),
            ERRORS_FOLDER: str(folder),
            PARENT_PID: str(os.getpid()),
            **environment,
        }
        self._processes: dict[int, fork_server.Process] = {}
        self._logs: dict[int, IO[bytes]] = {}

    def start(
        self,
        rank: int,
        environment: Mapping[str, str] = MappingProxyType({}),
        files: Sequence[int] = (),
    ) -> None:
        """Start a worker, also in place of one that has ended.

        Args:
            rank: Its number.
            environment: Variables that it alone has.
            files: Descriptors that it inherits.
        """
        log = self._logs.get(rank)
        if log is None:
            (self._folder / str(rank)).mkdir(exist_ok=True)
            log = self._logs[rank] = (self._folder / str(rank) / "stderr.log").open("wb")
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        self._processes[rank] = fork_server.start(
            self._module,
            self._arguments,
            environment={**self._environment, **environment, **numbers},
            log=log,
            files=files,
        )

    def runs(self, rank: int) -> bool:
        """Whether a worker is there."""
        process = self._processes.get(rank)
        return process is not None and process.poll() is None

    def running(self) -> bool:
        """Whether any is there."""
        return any(process.poll() is None for process in self._processes.values())

    def failures(self) -> dict[int, int]:
        """Exit codes, by rank, of those that ended badly; negative: by that signal."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code}

    def forget(self, rank: int) -> None:
        """Leave one that has ended out of account."""
        del self._processes[rank]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all that are there."""
        for rank in self._processes:
            self.send_to(rank, number)

    def send_to(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one, if it is there."""
        if self.runs(rank):
            self._processes[rank].send_signal(number)

    def wait(
        self,
        seconds: float,
        poll: Callable[[], None] = lambda: None,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until all have ended.

        Args:
            seconds: At most so long.
            poll: Called meanwhile, some twenty times a second.
            unless: Says when there is no time for that.
        """
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end and not unless():
            poll()
            time.sleep(POLL_SECONDS / 2)

    def kill(self) -> None:
        """End all at once."""
        self.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def close(self) -> None:
        """End all at once, and close their logs."""
        self.kill()
        for log in self._logs.values():
            log.close()
