"""The workers as this process sees them: rank, world size, and collectives that name what failed.

Reads only what every launcher sets: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Without them the process is the only worker and no collective is ever called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from batchwright.errors import LostWorkerError
from batchwright.workload.host import collective_interface

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "")


class Group:
    """The process group of one run; a single process has none and every call is local.

    Joins the group of the environment if nobody has, and then leaves it on `close`.

    Args:
        device: Where this worker computes; CUDA uses NCCL, the CPU gloo.
        timeout: Seconds after which a collective gives up.

    Attributes:
        rank: This worker, 0 to ``size - 1``.
        size: Number of workers.
    """

    def __init__(self, device: torch.device, timeout: float = 120.0) -> None:
        self.device = device
        self._owned = False
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            join_process_group(device, timeout)
            self._owned = True
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.size = dist.get_world_size() if joined else 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the workers, in place; the same on all of them."""
        if self.size > 1:
            with naming_the_lost():
                dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value (picklable), in rank order, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with naming_the_lost():
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.size > 1:
            self.sum(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Leave the process group, if this object joined it."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
            self._owned = False


def join_process_group(device: torch.device, timeout: float) -> None:
    """Join the process group that the environment describes.

    On one host gloo is told to use the loopback interface: a host name that resolves to
    127.0.1.1, or a second network card, otherwise sends workers to addresses that nobody serves.
    """
    if os.environ.get("MASTER_ADDR", "") in _LOOPBACK or _one_host():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", collective_interface())
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL's object collectives go by the current device
        backend = "nccl"
    with naming_the_lost():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def _one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Turn a collective's low-level error into one line that says another worker is gone."""
    try:
        yield
    except RuntimeError as error:
        cause = str(error).strip().splitlines()
        raise LostWorkerError(
            "lost contact with another worker during an exchange: "
            f"{cause[-1] if cause else type(error).__name__}"
        ) from error
