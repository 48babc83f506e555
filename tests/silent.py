"""NCCL's way of failing, played between CPUs.

What `torch.distributed.all_reduce` and `broadcast` of this backend do is gloo's; but where gloo's
``wait`` raises, because a worker is gone, this one returns as if nothing had happened, what was
queued is never done, and to leave the group blocks until somebody aborts it, as NCCL's may. The
first one connects: its call waits for a key that worker 0 leaves in the store, then for all workers
to come, and no timeout ends that. Objects go by gloo, as they do beside NCCL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo

from batchwright.distributed import transports

_aborted = threading.Event()
_hanging = threading.Event()


class Silent(transports.Queued):
    """As `transports.Nccl`."""

    backend = "silent"

    def mark(self) -> Callable[[], bool]:
        return lambda: not _hanging.is_set()

    def abort(self) -> None:
        _aborted.set()


class _Work(dist._Work):
    """Of an exchange that is queued."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._work.wait()
        except RuntimeError:
            _hanging.set()
        return True


class _Group(ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._store, self._connected = store, False

    def _connect(self) -> None:
        if self._connected:
            return
        if self.rank() == 0:
            self._store.set("id", "of worker 0")
        self._store.wait(["id"], timedelta(hours=1))
        self._store.add("came", 1)
        while self._store.add("came", 0) < self.size():
            time.sleep(0.01)
        self._connected = True

    def getBackendName(self) -> str:  # noqa: N802 - as PyTorch calls it
        return "silent"

    def allreduce(self, tensors, *options):
        self._connect()
        try:
            return _Work(self._gloo.allreduce(tensors, *options))
        except RuntimeError:
            return _Work(_Never())

    def broadcast(self, tensors, *options):
        self._connect()
        return self._gloo.broadcast(tensors, *options)

    def allgather(self, outputs, inputs, *options):
        return self._gloo.allgather(outputs, inputs, *options)

    def barrier(self, *options):
        return self._gloo.barrier(*options)

    def shutdown(self) -> None:
        if _hanging.is_set():
            _aborted.wait()

    def abort(self) -> None:
        _aborted.set()


class _Never:
    def wait(self) -> None:
        raise RuntimeError("it has never begun")


def use() -> None:
    """In this process, workers on CPUs exchange tensors like this."""
    dist.Backend.register_backend(
        "silent",
        lambda store, rank, size, timeout: _Group(store, rank, size, timeout),
        devices=["cpu"],
    )
    transports.TRANSPORTS["cpu"] = Silent
