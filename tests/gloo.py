"""Real worker processes for tests: joined by gloo, each with a time limit."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

SECONDS = 90  # until processes that hang are ended


def together(work: Callable[..., Any], folder: Path, *args: Any, workers: int = 2) -> list[Any]:
    """What ``work(rank, *args)`` returns in each of ``workers`` processes, in rank order.

    Args:
        work: A function at the top of its module; what it returns is saved with `torch.save`.
        folder: Takes the returned values.
        args: Handed to every process.
        workers: Processes that the environment describes as one group.
    """
    context = multiprocessing.spawn(
        _worker, (work, workers, free_port(), str(folder), args), nprocs=workers, join=False
    )
    end = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"{work.__name__} took more than {SECONDS} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(workers)]


def free_port() -> int:
    """A port that nobody listens on at present."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _worker(
    rank: int, work: Callable[..., Any], workers: int, port: int, folder: str, args: tuple[Any, ...]
) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    torch.save(work(rank, *args), Path(folder) / f"rank{rank}.pt")
