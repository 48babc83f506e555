"""The processes that measure: started, asked, and watched for their death.

    controller == socket pair per worker ==> workers, which exchange among themselves

A socket pair has no name, so nobody else can talk to a worker, and its other end closes with the
process. An idle worker waits in a read, which takes no processor time.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from batchwright.distributed.exit_reports import forget_reports, raise_failure
from batchwright.distributed.group import Group
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import Interrupted, WorkerError
from batchwright.probing.commands import Command, TrialRun, ignored
from batchwright.probing.executor import Executor
from batchwright.probing.worker import NO_SHARED_MEMORY, Ready
from batchwright.records import Job, Record
from batchwright.records.documents import write_record
from batchwright.records.text.formatting import counted
from batchwright.workload.host import enter, prepare_process, resolve_device, worker_threads

ANSWER_SECONDS = 900.0
"""Silence after which a command is given up: a step that takes so long is no use to anybody."""

START_SECONDS = 300.0
_END_SECONDS = 5.0  # for the others to leave their own reports once one has failed
_LOST = {-signal.SIGKILL, NO_SHARED_MEMORY}

Answer = TypeVar("Answer", bound=Record)


def share_done(answer: Record) -> float:
    """Of the command: trials tell how far they have come before their answer."""
    return answer.done if isinstance(answer, TrialRun) else 1.0


class Killed(Exception):  # noqa: N818 - not an error: the controller goes on with smaller steps
    """The kernel killed a worker while it carried out a command: out of memory.

    Or it ended because its loader processes found too little shared memory: ``shared``.
    """

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared


class Measuring(Protocol):
    """Whatever carries out commands."""

    def ask(
        self, command: Command, answer: type[Answer], heard: Callable[[float], None] = ignored
    ) -> Answer:
        """Have a command carried out, which comes back with a record of kind ``answer``.

        ``heard`` takes the share of it that is done, where a trial tells.

        Raises:
            Killed: A worker was killed; `restart` starts others.
            BatchwrightError: What a worker found wrong.
            Interrupted: A stop signal came.
        """

    def restart(self) -> None:
        """Start new workers in place of those that were killed."""

    def pause(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            Interrupted: A stop signal came.
        """


def pause(seconds: float, stops: Callable[[], Sequence[int]]) -> None:
    """As `Measuring.pause` says; ``stops`` are the stop signals that came so far."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if asked := stops():
            raise Interrupted(asked[0], f"stopped by signal {asked[0]}")
        time.sleep(min(left, POLL_SECONDS))


class Here:
    """Carries the commands out in this process, as the only worker."""

    def __init__(self, job: Job) -> None:
        allocator = prepare_process(worker_threads(1))
        group = Group(enter(resolve_device(job.device)), job.timeout)
        self._executor = Executor(job, group, [1], allocator)

    def ask(
        self, command: Command, answer: type[Answer], heard: Callable[[float], None] = ignored
    ) -> Answer:
        """As `Measuring` says."""
        done = self._executor.carry_out(command, lambda told: heard(share_done(told)))
        assert isinstance(done, answer)  # noqa: S101 - tells the type checker
        return done

    def restart(self) -> None:
        """Nothing to do: what kills this process ends the probe."""

    def pause(self, seconds: float) -> None:
        """As `Measuring` says; signals raise here by themselves."""
        time.sleep(seconds)

    def close(self) -> None:
        """Let loader processes end."""
        self._executor.close()


class Workers:
    """Worker processes; a context manager that ends them.

    Args:
        job: What is measured.
        folder: Takes the job, logs and reports; private to this probe.
        counts: Numbers of workers that commands may ask for.
        stops: The stop signals that came so far.
    """

    def __init__(
        self, job: Job, folder: Path, counts: Sequence[int], stops: Callable[[], Sequence[int]]
    ) -> None:
        self._job, self._folder, self._stops = job, folder, stops
        self._count = max(counts)
        self._children = Children(
            ["batchwright.probing.worker", str(folder), ",".join(map(str, counts))],
            folder=folder,
            environment=dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._count)),
        )
        self._lines: list[socket.socket] = []
        self._unread = b""
        self._starts = 0

    def __enter__(self) -> Self:
        write_record(self._job, self._folder / "job.json")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._children.close()

    def ask(
        self, command: Command, answer: type[Answer], heard: Callable[[float], None] = ignored
    ) -> Answer:
        """As `Measuring` says."""
        text = command.model_dump_json().encode() + b"\n"
        for line in self._lines[: command.workers]:
            try:
                line.sendall(text)
            except OSError:  # the process is gone, which `_read` will find
                break
        while (share := share_done(told := self._read(answer, ANSWER_SECONDS))) < 1:
            heard(share)
        return told

    def restart(self) -> None:
        """As `Measuring` says."""
        self._end()
        self._start()

    def pause(self, seconds: float) -> None:
        """As `Measuring` says."""
        pause(seconds, self._stops)

    def _start(self) -> None:
        self._starts += 1
        forget_reports(self._folder)
        for left in self._folder.glob("meeting*"):  # of a probe that was killed here
            left.unlink()
        meeting = str(self._folder / f"meeting{self._starts}")
        for rank in range(self._count):
            ours, theirs = socket.socketpair()
            self._lines.append(ours)
            with theirs:
                number = theirs.fileno()
                self._children.start(rank, files=[number], arguments=[meeting, str(number)])
        try:
            self._read(Ready, START_SECONDS)
        except Killed:  # no step yet that could be smaller
            fewer = " or start fewer workers" if self._count > 1 else ""
            raise WorkerError(
                f"one of {counted(self._count, 'worker')} was killed by SIGKILL as it started "
                f"(out of memory?): free memory{fewer}; logs are in {self._folder}"
            ) from None

    def _read(self, answer: type[Answer], seconds: float) -> Answer:
        """Rank 0's next line, while all workers live and no stop signal has come."""
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if stops := self._stops():
                raise Interrupted(stops[0], f"stopped by signal {stops[0]}")
            if codes := self._children.exit_codes():
                if _LOST.isdisjoint(codes.values()):
                    self._children.wait(_END_SECONDS)
                    codes = self._children.exit_codes()
                if lost := _LOST.intersection(codes.values()):  # perhaps not what was noticed first
                    raise Killed(shared=NO_SHARED_MEMORY in lost)
                raise_failure(self._folder, codes)
            if time.monotonic() > end:
                raise WorkerError(
                    f"the workers said nothing for {seconds:.0f} s; logs are in {self._folder}"
                )
            readable, _, _ = select.select(self._lines[:1], [], [], POLL_SECONDS)
            if readable:
                received = self._lines[0].recv(1 << 16)
                self._unread += received
                if not received:
                    time.sleep(POLL_SECONDS)  # closed: the process ends, `poll` will say so
        line, _, self._unread = self._unread.partition(b"\n")
        return answer.model_validate_json(line)

    def _end(self) -> None:
        for line in self._lines:
            line.close()
        self._children.kill()
        for meeting in self._folder.glob("meeting*"):
            meeting.unlink()
        self._lines, self._unread = [], b""
