"""Real worker processes for tests: joined by gloo, each with a time limit.

python -m gloo RANK PIPE STACKS
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import forked
from batchwright.distributed.fork_server import Process
from batchwright.distributed.processes import PARENT_PID, leave

_ENVIRONMENT = dict(os.environ)  # as it is before any test
_PARTS = 16  # of the ports, for so many processes of a test run
_given: deque[int] = deque(maxlen=100)  # the last ports
_SHOW = signal.SIGRTMIN  # which nothing else uses, and loader processes do not ignore
SECONDS = 300  # until processes that hang are ended; a busy machine may take long


class Worker:
    """A process that does what it is sent, until it is ended.

    Args:
        rank: Its number among those that work together.
        server: What it is forked from, where it is not the one that all files share.
    """

    def __init__(self, rank: int, server: forked.Server | None = None) -> None:
        self._rank = rank
        self._pipe, theirs = Pipe()
        self._shown = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        with theirs:
            self.process = self._begin(theirs, server)

    def send(self, work: Callable[..., Any], *args: Any, workers: int, port: int) -> None:
        """Have it do ``work(rank, *args)`` as one of so many."""
        self._pipe.send_bytes(pickle.dumps((work, workers, port, args)))

    def answer(self, what: str, seconds: float = SECONDS) -> Any:
        """What the work returned."""
        if not self._pipe.poll(max(0, seconds)):
            where = f"worker {self._rank} and its loader processes are here:\n{self._stacks()}"
            raise AssertionError(f"{what} took more than {SECONDS} s; {where}")
        value, failure = pickle.loads(self._pipe.recv_bytes())
        assert failure is None, f"worker {self._rank}:\n{failure}"
        return value

    def _stacks(self) -> str:
        """Where all threads of it, and of the loader processes that it has started, are."""
        pid = self.process.pid
        for one in [pid, *_children(pid)]:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(one, _SHOW)
            time.sleep(1)
        self._shown.seek(0)
        return self._shown.read().decode()

    def end(self) -> int:
        """Have it end as a worker does that has done all; its exit code."""
        self._pipe.close()
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def _begin(self, pipe: Connection, server: forked.Server | None) -> Process:
        files = [pipe.fileno(), self._shown.fileno()]
        with open(2, "wb", closefd=False) as log:
            return forked.begin(
                "gloo",
                [str(self._rank), *map(str, files)],
                server=server,
                environment={**_ENVIRONMENT, "PYTHONPATH": forked.with_tests(_ENVIRONMENT)},
                log=log,
                files=files,
            )


class Crew:
    """Workers that stay, for many short pieces of work.

    Each piece of work is done by the first few, or by all of them; more start as they are wanted.

    Args:
        begin: Starts the worker of a rank.
    """

    def __init__(self, begin: Callable[[int], Worker] = Worker) -> None:
        self._begin = begin
        self._workers: list[Worker] = []

    def together(self, work: Callable[..., Any], *args: Any, workers: int) -> list[Any]:
        """What ``work(rank, *args)`` returns in each of the first ``workers``, in rank order."""
        for rank in range(len(self._workers), workers):
            self._workers.append(self._begin(rank))
        port, end = free_port(), time.monotonic() + SECONDS
        for one in self._workers[:workers]:
            one.send(work, *args, workers=workers, port=port)
        try:
            what = work.__name__
            return [one.answer(what, end - time.monotonic()) for one in self._workers[:workers]]
        except BaseException:
            self.close()  # some may still be at it
            raise

    def close(self) -> None:
        """End the processes."""
        for one in self._workers:
            one.kill()
        self._workers = []


@contextmanager
def crew_with(*more: str) -> Iterator[Crew]:
    """A crew whose workers have these modules: imported once, by what they are forked from."""
    with forked.imported(*more) as server:
        crew = Crew(partial(Worker, server=server))
        try:
            yield crew
        finally:
            crew.close()


def _children(pid: int) -> list[int]:
    """The processes that the main thread of a process has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def free_port() -> int:
    """A port that nobody has at present, and that was not given just before.

    It is below those that Linux gives to whoever asks for any, so that it stays free until used,
    and of this process of the test run alone: two that begin at once would join one group.
    """
    chance = random.SystemRandom()  # a seed would give several processes the same
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PARTS
    while True:
        port = chance.randrange(10_000 + mine, 32_000, _PARTS)
        if port in _given:  # whoever asked may be about to use it
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            _given.append(port)
            return port


def serve(rank: int, pipe: Connection) -> None:
    """What a worker does: all that comes through the pipe, until that is closed."""
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:  # those who gave orders are gone, or want no more
            return
        work, workers, port, args = pickle.loads(order)
        torch.set_num_threads(1)
        _describe_group(rank, workers, port)
        try:
            answer = work(rank, *args), None
        except Exception:  # noqa: BLE001 - whatever it is, the test is to show it
            answer = None, traceback.format_exc()
        if torch.distributed.is_initialized():  # else the next work would be in this one's group
            torch.distributed.destroy_process_group()
        pipe.send_bytes(pickle.dumps(answer))


def _describe_group(rank: int, workers: int, port: int) -> None:
    """Put into the environment what a launcher would."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})


if __name__ == "__main__":
    os.environ.pop(PARENT_PID, None)  # it has the environment of a launcher's worker, not of ours
    faulthandler.register(_SHOW, int(sys.argv[3]))
    serve(int(sys.argv[1]), Connection(int(sys.argv[2])))
    leave(0)
