"""Real worker processes for tests: joined by gloo, each with a time limit."""

from __future__ import annotations

import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import multiprocessing

_PARTS = 16  # of the ports, for so many processes of a test run
SECONDS = 300  # until processes that hang are ended; a busy machine may take long


class Crew:
    """Worker processes that stay, for many short pieces of work: starting them takes the time.

    Each piece of work is done by the first few, or by all of them; more start as they are wanted.

    Args:
        start: How `multiprocessing` starts them.
    """

    def __init__(self, start: str = "forkserver") -> None:
        self._context = multiprocessing.get_context(start)
        if start == "forkserver":
            # With torch and what most work needs, once for all.
            self._context.set_forkserver_preload([__name__, "batchwright.training.session"])
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def together(self, work: Callable[..., Any], *args: Any, workers: int) -> list[Any]:
        """What ``work(rank, *args)`` returns in each of the first ``workers``, in rank order."""
        self._start(workers - len(self._pipes))
        order = pickle.dumps((work, workers, free_port(), args))
        for pipe in self._pipes[:workers]:
            pipe.send_bytes(order)
        try:
            return self._answers(work.__name__, workers)
        except BaseException:
            self.close()  # some may still be at it
            raise

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self, more: int) -> None:
        for _ in range(more):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(len(self._pipes), theirs))
            process.start()
            theirs.close()  # or the end of a process would not be the end of its pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def _answers(self, what: str, workers: int) -> list[Any]:
        end = time.monotonic() + SECONDS
        found = []
        for rank, pipe in enumerate(self._pipes[:workers]):
            assert pipe.poll(max(0, end - time.monotonic())), f"{what} took more than {SECONDS} s"
            value, failure = pickle.loads(pipe.recv_bytes())
            assert failure is None, f"worker {rank}:\n{failure}"
            found.append(value)
        return found


def free_port() -> int:
    """A port that nobody has at present.

    It is below those that Linux gives to whoever asks for any, so that it stays free until used,
    and of this process of the test run alone: two that begin at once would join one group.
    """
    chance = random.SystemRandom()  # a seed would give several processes the same
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PARTS
    while True:
        port = chance.randrange(10_000 + mine, 32_000, _PARTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port


def _serve(rank: int, pipe: Connection) -> None:
    """A process of a `Crew`: does what comes through the pipe until it is ended."""
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:  # those who gave orders are gone
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
