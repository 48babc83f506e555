"""Worker processes that join a parameter server; one that is killed is started again alone.

this process --> server (python -m batchwright.training.parameter_server.server_process)
--> workers, which need no rendezvous with each other
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.distributed.exit_reports import (
    ERRORS_FOLDER,
    SERVER_RANK,
    forget_report,
    killed,
    last_line,
    name_of,
    raise_failure,
    reports_in,
)
from batchwright.distributed.processes import STARTED
from batchwright.distributed.server_child import SERVER, SERVER_KEY, ServerChild
from batchwright.distributed.supervisor import GRACE_SECONDS, Supervisor
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import LostWorkerError, WorkerError
from batchwright.storage.locks import Lock

_LAST_SECONDS = 30.0  # for workers to end, once the server has
_ANSWER_SECONDS = 10.0  # for the server to ask who connects for the key
_SECOND_LOOK = 0.5  # a worker may see before this process that the server was killed, or ends


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
    lock: Lock | None = None,
    **options: Any,
) -> None:
    """Run ``python -m module arguments`` in every worker, with a server, until all have ended well.

    A worker that was killed, or fell silent, is started again alone; when ``restarts`` are used up
    it is gone for good and the others go on. If the server was killed, or stands still, all are
    started again, from its last checkpoint. An error of a worker's own ends the run, as it would
    only come again.

    The server serves ``plan``, plain values, and keeps records and checkpoints in ``run_folder``,
    whose lock it holds too; with ``resume`` it goes on from the last one there. All else is as
    `launch.run_workers` takes it; ``restarts`` are of all processes together.

    Raises:
        BatchwrightError: As `Supervisor.run` raises; where a worker is gone for good, the last one.
        Interrupted: The time was up, too; a checkpoint was written.
    """
    with (folder / "server.log").open("wb") as log:
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
        WithServer(children, folder, server, workers=workers, resume=resume, **options).run()


class WithServer(Supervisor):
    """Supervises workers of a parameter server, each of which can go on without the others.

    Neither workers nor server are started yet. Arguments are those of `run_with_server`.
    """

    def __init__(
        self,
        children: Children,
        folder: Path,
        server: ServerChild,
        *,
        workers: int,
        resume: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(children, folder, **options)
        self._server, self._resume = server, resume
        self._left = list(range(workers))  # workers that are not gone for good
        self._gone: list[int] = []
        self._silent: set[int] = set()
        self._ready = self._ends = False  # whether the server has said so
        self._still = False  # whether it stood still, and was killed for that

    def _start(self) -> None:
        self._ready = self._ends = self._still = False
        self._server.start(resume=self._resume)
        for rank in self._gone:  # the server would wait for them
            self._server.give_up(rank)
        for rank in self._left:
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        self._children.start(rank, {STARTED: str(time.time())})

    def _look(self) -> bool:
        self._poll()
        code = self._server.returncode
        if code == 0:
            self._children.wait(_LAST_SECONDS, self._poll)
            if any(not report["secondary"] for report in reports_in(self._folder)):
                raise_failure(self._folder, self._children.failures())
            return False
        if code is not None:
            self._after_server(code)
            return True
        self._hear()
        for rank, ended in self._children.failures().items():
            self._after_worker(rank, ended)
        return True

    def _hear(self) -> None:
        """Take what the server has said since the last call."""
        for event in self._server.events():
            self._ready, self._ends = self._ready or "ready" in event, self._ends or "ends" in event
            rank = event.get("silent")
            if rank is not None and self._children.runs(rank):
                self._silent.add(rank)
                self._children.send_to(rank, signal.SIGKILL)

    def _stop(self) -> None:
        self._server.terminate()
        self._children.send(signal.SIGTERM)
        end = time.monotonic() + GRACE_SECONDS
        while True:
            self._poll()
            ended = self._server.returncode is not None
            if ended:
                self._server.stop_listening()
            if ended and not self._children.running():
                return
            if len(self.noted) > 1 or time.monotonic() > end:
                self._note_killed(GRACE_SECONDS, lost=not ended)
                return
            time.sleep(POLL_SECONDS)

    def _close(self) -> None:
        super()._close()
        self._server.close()

    # --------------------------------------------------------------------------------- what happens

    def _after_server(self, code: int) -> None:
        """Start all again if the server was killed; any other end of it would come again."""
        what = ""
        if code < 0:
            happened = f"was killed by {signal.Signals(-code).name}"
            what = (
                f"the parameter server {'stood still' if self._still else happened}; all were "
                "started again from its last checkpoint"
            )
        if not what or not self._again(what):
            self._server.stop_listening()
            self._children.send(signal.SIGTERM)
            self._children.wait(_LAST_SECONDS)
            if self._still:
                what = f"the parameter server stood still; logs are in {self._folder}"
                raise LostWorkerError(what)
            codes = self._children.failures()
            raise_failure(self._folder, {SERVER_RANK: code, **codes} if code < 0 else codes)
        self._children.kill()
        for rank in [SERVER_RANK, *self._left]:
            forget_report(self._folder, rank)
        self._resume = True
        self._start()

    def _after_worker(self, rank: int, code: int) -> None:
        if code > 0:
            reports = [one for one in reports_in(self._folder) if one["rank"] == rank]
            if not reports:
                last = last_line(self._folder / str(rank))
                raise WorkerError(f"worker {rank} ended: {last}; logs are in {self._folder}")
            if not reports[0]["secondary"]:
                self._end(rank, code)
            self._server.wait(_SECOND_LOOK)
        still = code > 0 and self._stands_still()
        self._hear()
        if self._ends or self._server.returncode is not None:
            return  # the end of the server decides, which may write for long yet
        if still:
            self._still = True
            self._server.kill()
            return
        what = self._what_happened(rank, code)
        if self._again(f"{what}; it was started again"):
            forget_report(self._folder, rank)
            self._start_worker(rank)
            return
        self._left.remove(rank)
        self._gone.append(rank)
        self._children.forget(rank)
        if not self._left:
            self._end(rank, code)
        self._tell(f"{what}, once more than restarts={self._most}: the others go on without it")
        self._server.give_up(rank)

    def _stands_still(self) -> bool:
        """Whether the server was ready once, and answers nobody any more."""
        runs = self._ready and not self._ends and self._server.returncode is None
        return runs and not self._server.answers(_ANSWER_SECONDS)

    def _what_happened(self, rank: int, code: int) -> str:
        if rank in self._silent:
            self._silent.discard(rank)
            return f"{name_of(rank)} fell silent"
        for _, name in killed({rank: code}):
            return f"{name_of(rank)} was killed by {name}"
        reports = [one for one in reports_in(self._folder) if one["rank"] == rank]
        return f"{name_of(rank)}: {reports[0]['message'] if reports else f'exit code {code}'}"

    def _end(self, rank: int, code: int) -> None:
        """End the run, which is lost, and raise why."""
        self._children.send(signal.SIGTERM)
        self._server.terminate()
        self._children.wait(_LAST_SECONDS)
        self._server.wait(GRACE_SECONDS)
        raise_failure(self._folder, {rank: code})
