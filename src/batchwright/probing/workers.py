"""The worker processes of a probe: started, given commands, and watched for their death.

    controller == socket pair per worker ==> workers, which exchange among themselves

A socket pair has no name, so no other program can talk to a worker, and its other end closes with
the process. An idle worker waits in a read, which takes no processor time.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol, Self, TypeVar

from batchwright.distributed.exit_reports import forget_reports, raise_failure, reports_in
from batchwright.distributed.group import Group
from batchwright.distributed.worker_processes import POLL_SECONDS, Children
from batchwright.errors import Interrupted, WorkerError, stopped_by
from batchwright.probing.commands import Command, TrialRun, ignored
from batchwright.probing.executor import Executor
from batchwright.probing.worker import NO_SHARED_MEMORY, Ready
from batchwright.records import Job, Record
from batchwright.records.documents import write_record
from batchwright.records.text.formatting import counted
from batchwright.workload.host import enter, prepare_process, resolve_device, worker_threads

ANSWER_SECONDS = 900.0
"""Seconds of silence after which a command is given up: steps so long could not be trained with."""

START_SECONDS = 300.0
_END_SECONDS = 5.0  # for a worker that was killed to be seen, once another has ended for its loss
_LOST = {-signal.SIGKILL, NO_SHARED_MEMORY}  # exit codes of workers that ran out of memory

Answer = TypeVar("Answer", bound=Record)


class Killed(Exception):  # noqa: N818 - not an error: the controller goes on with smaller steps
    """A worker ran out of memory during a command, and was killed by the kernel.

    Attributes:
        shared: Whether it ended, instead, because its loader processes lacked shared memory.
    """

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared


class CommandRunner(Protocol):
    """Has commands carried out by one or more workers."""

    def ask(
        self, command: Command, answer: type[Answer], on_progress: Callable[[float], None] = ignored
    ) -> Answer:
        """Have a command carried out, and return its answer.

        Args:
            command: For the first ``command.workers`` workers.
            answer: Class of the answer.
            on_progress: Called now and then with the share of a trial that is done.

        Raises:
            Killed: A worker was killed; `restart` starts new ones.
            BatchwrightError: A worker found something wrong.
            Interrupted: A stop signal came.
        """

    def restart(self) -> None:
        """Start new workers after some were killed."""

    def pause(self, seconds: float) -> None:
        """Wait for ``seconds``.

        Raises:
            Interrupted: A stop signal came.
        """


def end_if_stopped(stops: Callable[[], Sequence[int]]) -> None:
    """Raise `Interrupted` if a stop signal came; ``stops`` returns those that came so far."""
    if signals := stops():
        raise Interrupted(signals[0], stopped_by(signals[0]))


def pause(seconds: float, stops: Callable[[], Sequence[int]]) -> None:
    """`CommandRunner.pause`; ``stops`` returns the stop signals that came so far."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        end_if_stopped(stops)
        time.sleep(min(left, POLL_SECONDS))


class InProcess:
    """A `CommandRunner` that carries the commands out in this process, as the only worker."""

    def __init__(self, job: Job) -> None:
        allocator = prepare_process(worker_threads(1))
        group = Group(enter(resolve_device(job.device)), job.timeout)
        self._executor = Executor(job, group, [1], allocator)

    def ask(
        self, command: Command, answer: type[Answer], on_progress: Callable[[float], None] = ignored
    ) -> Answer:
        """See `CommandRunner.ask`."""
        done = self._executor.carry_out(command, on_progress)
        assert isinstance(done, answer)  # noqa: S101 - narrows the type
        return done

    def restart(self) -> None:
        """Do nothing: what kills this process ends the probe."""

    def pause(self, seconds: float) -> None:
        """See `CommandRunner.pause`; in this process a signal raises by itself."""
        time.sleep(seconds)

    def close(self) -> None:
        """End the loader processes, and give the GPU's memory back."""
        self._executor.close()


class Workers:
    """A `CommandRunner` with worker processes of its own; as a context manager it ends them.

    Args:
        job: What is measured.
        folder: Takes the job, logs and reports; private to this probe.
        counts: Numbers of workers that commands may name.
        stops: Returns the stop signals that came so far.
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
        self, command: Command, answer: type[Answer], on_progress: Callable[[float], None] = ignored
    ) -> Answer:
        """See `CommandRunner.ask`."""
        text = command.model_dump_json().encode() + b"\n"
        for line in self._lines[: command.workers]:
            try:
                line.sendall(text)
            except OSError:  # the process is gone, which `_read` will notice
                break
        while True:
            received = self._read(answer, ANSWER_SECONDS)
            if not isinstance(received, TrialRun) or received.done == 1:
                return received
            on_progress(received.done)

    def restart(self) -> None:
        """See `CommandRunner.restart`."""
        self._end()
        self._start()

    def pause(self, seconds: float) -> None:
        """See `CommandRunner.pause`."""
        pause(seconds, self._stops)

    def _start(self) -> None:
        self._starts += 1
        forget_reports(self._folder)
        for left in self._folder.glob("meeting*"):  # of an earlier probe that was killed
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
            end_if_stopped(self._stops)
            if codes := self._children.exit_codes():
                self._children.wait(_END_SECONDS, unless=self._cause_is_known)
                codes = self._children.exit_codes()
                if lost := _LOST.intersection(codes.values()):  # maybe not the first that was seen
                    raise Killed(shared=NO_SHARED_MEMORY in lost)
                raise_failure(self._folder, codes)
            if time.monotonic() > end:
                raise WorkerError(
                    f"the workers said nothing for {seconds:.0f} s; logs are in {self._folder}"
                )
            if wait(self._lines[:1], POLL_SECONDS):
                try:
                    received = self._lines[0].recv(1 << 16)
                except ConnectionError:  # closed with a command in it that was not read
                    received = b""
                self._unread += received
                if not received:
                    time.sleep(POLL_SECONDS)  # closed: the process is about to end
        line, _, self._unread = self._unread.partition(b"\n")
        return answer.model_validate_json(line)

    def _cause_is_known(self) -> bool:
        """Whether it is known why the workers end: an error of their own, or that one was lost."""
        own = any(not one["secondary"] for one in reports_in(self._folder))
        return own or not _LOST.isdisjoint(self._children.exit_codes().values())

    def _end(self) -> None:
        for line in self._lines:
            line.close()
        self._children.kill()
        for meeting in self._folder.glob("meeting*"):
            meeting.unlink()
        self._lines, self._unread = [], b""
