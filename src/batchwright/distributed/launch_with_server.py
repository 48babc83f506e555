"""Starts a parameter server and its workers, and stays with them until they end.

    this process --> server (python -m batchwright.training.parameter_server.server_process)
                 --> workers (one per rank), each started again alone where it was killed

Workers that meet at a server need no rendezvous with each other.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.distributed.exit_reports import (
    ERRORS_FOLDER,
    SERVER_RANK,
    forget_report,
    forget_reports,
    killed,
    name_of,
    reports_in,
)
from batchwright.distributed.launch import (
    GRACE_SECONDS,
    last_line,
    noting_signals,
    raise_failure,
    told_killed,
)
from batchwright.distributed.processes import STARTED
from batchwright.distributed.server_child import SERVER, SERVER_KEY, ServerChild
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import Interrupted, WorkerError
from batchwright.storage.locks import Lock

_LAST_SECONDS = 30.0  # for workers to end, once the server has
_SECOND_LOOK = 0.5  # a worker may see the server's end before this process does


def run_with_server(
    module: str,
    arguments: Sequence[str],
    *,
    plan: Mapping[str, Any],
    workers: int,
    threads: int,
    run_folder: Path,
    folder: Path,
    resume: bool = False,
    restarts: int = 0,
    lock: Lock | None = None,
    poll: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
) -> None:
    """Run ``python -m module arguments`` in every worker, with a server, until all have ended well.

    A worker that was killed, or fell silent, is started again alone; when ``restarts`` are used up
    it is gone for good and the others go on. If the server was killed, all are started again, from
    its last checkpoint. An error of a worker's own ends the run, as it would only come again.

    The server serves ``plan``, plain values, and keeps records and checkpoints in ``run_folder``,
    whose lock it holds too; with ``resume`` it goes on from the last one there. All else is as
    `launch.run_workers` takes it; ``restarts`` are of all processes together.

    Raises:
        WorkerError: No worker is left, the server was killed once more than ``restarts``, or one
            of them ended by its own error, which is the message.
        BatchwrightError: One of them refused its input.
        Interrupted: A stop signal came, or the time was up; a checkpoint was written.
    """
    forget_reports(folder)
    with (folder / "server.log").open("wb") as log, noting_signals() as noted:
        errors = {ERRORS_FOLDER: str(folder)}
        server = ServerChild(plan, run_folder, log=log, environment=errors, lock=lock)
        environment = {
            "WORLD_SIZE": "1",  # at the server they meet, not in a process group
            "LOCAL_WORLD_SIZE": str(workers),
            SERVER: server.address,
            SERVER_KEY: server.key,
        }
        children = Children(
            [module, *arguments], threads=threads, folder=folder, environment=environment
        )
        run = _Run(children, server, workers, folder, restarts, tell)
        try:
            server.start(resume=resume)
            run.start()
            killed_them = run.watch(poll, noted)
            poll()
        finally:
            run.close()
    if noted:
        raise Interrupted(noted[0], f"stopped by signal {noted[0]}{killed_them}")


class _Run:
    """The processes of one run."""

    def __init__(
        self,
        children: Children,
        server: ServerChild,
        workers: int,
        folder: Path,
        restarts: int,
        tell: Callable[[str], None],
    ) -> None:
        self._workers, self._server, self._tell = children, server, tell
        self._folder, self._most = folder, restarts
        self._restarts = 0
        self._left = list(range(workers))  # those that are not gone for good
        self._gone: list[int] = []
        self._silent: set[int] = set()

    def start(self) -> None:
        """Start all workers that are left."""
        for rank in self._left:
            self._start(rank)

    def watch(self, poll: Callable[[], None], noted: list[int]) -> str:
        """Until the server has ended well, or the run is stopped or lost.

        Returns:
            What to add to the message of a stop.
        """
        told: float | None = None
        while True:
            poll()
            code = self._server.returncode
            if noted and told is None:
                told = time.monotonic()
                self._server.terminate()
                self._workers.send(signal.SIGTERM)
            if told is not None:
                if code is not None:
                    self._server.stop_listening()
                if code is not None and not self._workers.running():
                    return ""
                if len(noted) > 1 or time.monotonic() - told > GRACE_SECONDS:
                    return told_killed(noted, GRACE_SECONDS, lost=code is None)
            elif code == 0:
                self._workers.wait(_LAST_SECONDS, poll)
                if any(not report["secondary"] for report in reports_in(self._folder)):
                    raise_failure(self._folder, self._workers.failures())
                return ""
            elif code is not None:
                self._after_server(code)
            else:
                for event in self._server.events():
                    rank = event.get("silent")
                    if rank is not None and self._workers.runs(rank):
                        self._silent.add(rank)
                        self._workers.send_to(rank, signal.SIGKILL)
                for rank, ended in self._workers.failures().items():
                    self._after_worker(rank, ended)
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End whatever still runs."""
        self._workers.close()
        self._server.close()

    def _start(self, rank: int) -> None:
        self._workers.start(rank, {STARTED: str(time.time())})

    # --------------------------------------------------------------------------------- what happens

    def _after_server(self, code: int) -> None:
        """Start all again if the server was killed; whatever else ended it comes again."""
        if code > 0 or self._restarts == self._most:
            self._server.stop_listening()
            self._workers.send(signal.SIGTERM)
            self._workers.wait(_LAST_SECONDS)
            codes = self._workers.failures()
            raise_failure(self._folder, {SERVER_RANK: code, **codes} if code < 0 else codes)
        self._restarts += 1
        name = signal.Signals(-code).name
        self._tell(
            f"the parameter server was killed by {name}; all were started again from its last "
            f"checkpoint ({self._restarts} of {self._most})"
        )
        self._workers.kill()
        for rank in [SERVER_RANK, *self._left]:
            forget_report(self._folder, rank)
        self._server.start(resume=True)
        for rank in self._gone:  # it would wait for them
            self._server.give_up(rank)
        self.start()

    def _after_worker(self, rank: int, code: int) -> None:
        if code > 0:
            reports = [one for one in reports_in(self._folder) if one["rank"] == rank]
            if not reports:
                last = last_line(self._folder / str(rank))
                raise WorkerError(f"worker {rank} ended: {last}; logs are in {self._folder}")
            if not reports[0]["secondary"]:
                self._end(rank, code)
            if self._server.wait(_SECOND_LOOK) is not None:
                return  # that is why
        what = self._what_happened(rank, code)
        if self._restarts < self._most:
            self._restarts += 1
            self._tell(f"{what}; it was started again ({self._restarts} of {self._most})")
            forget_report(self._folder, rank)
            self._start(rank)
            return
        self._left.remove(rank)
        self._gone.append(rank)
        self._workers.forget(rank)
        if not self._left:
            self._end(rank, code)
        self._tell(f"{what}, once more than restarts={self._most}: the others go on without it")
        self._server.give_up(rank)

    def _what_happened(self, rank: int, code: int) -> str:
        if rank in self._silent:
            self._silent.discard(rank)
            return f"{name_of(rank)} fell silent"
        for _, name in killed({rank: code}):
            return f"{name_of(rank)} was killed by {name}"
        reports = [one for one in reports_in(self._folder) if one["rank"] == rank]
        return f"{name_of(rank)}: {reports[0]['message'] if reports else f'exit code {code}'}"

    def _end(self, rank: int, code: int) -> None:
        """The run is lost: end it, and raise why."""
        self._workers.send(signal.SIGTERM)
        self._server.terminate()
        self._workers.wait(_LAST_SECONDS)
        self._server.wait(GRACE_SECONDS)
        raise_failure(self._folder, {rank: code})
