"""The workers as this process sees them: rank, world size, and collectives that name what failed.

Reads only what every launcher sets: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Without them the process is the only worker and no collective is ever called.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

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
        meeting: File, not there yet, through which the workers of one machine find each other;
            unset: MASTER_ADDR and MASTER_PORT.

    Attributes:
        rank: This worker, 0 to ``size - 1``.
        size: Number of workers.
        handle: What `torch.distributed` calls take as ``group``; ``None`` is everybody.
    """

    def __init__(
        self, device: torch.device, timeout: float = 120.0, *, meeting: Path | None = None
    ) -> None:
        self.device = device
        self.handle: dist.ProcessGroup | None = None
        self._owned = False
        self._timeout = timeout
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            join_process_group(device, timeout, meeting)
            self._owned = True
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.size = dist.get_world_size() if joined else 1

    def part(self, size: int) -> Self | None:
        """The first ``size`` workers as a group of their own; all workers call this together.

        Returns:
            The part, to be left with the whole; ``None`` on workers that are not in it.
        """
        if size == self.size:
            return self
        with naming_the_lost():
            handle = dist.new_group(list(range(size)), timeout=timedelta(seconds=self._timeout))
        if self.rank >= size:
            return None
        part = copy.copy(self)
        part.handle, part.size, part._owned = handle, size, False
        return part

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give everyone rank 0's values, in place."""
        if self.size > 1:
            with torch.no_grad(), naming_the_lost():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0, group=self.handle)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the workers, in place; the same on all of them."""
        if self.size > 1:
            with naming_the_lost():
                dist.all_reduce(values, group=self.handle)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value (picklable), in rank order, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with naming_the_lost():
            dist.all_gather_object(values, value, group=self.handle)
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


def join_process_group(device: torch.device, timeout: float, meeting: Path | None = None) -> None:
    """Join the process group that the environment describes; ``meeting`` as for `Group`.

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
        if meeting is None:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        else:
            dist.init_process_group(
                backend,
                init_method=f"file://{meeting.absolute()}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=timedelta(seconds=timeout),
            )


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
