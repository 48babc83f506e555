"""NCCL's way of failing, played between CPUs.

What `torch.distributed.all_reduce`, `broadcast`, `send` and `recv` of this backend do is gloo's;
but where gloo's ``wait`` raises, because a worker is gone, this one returns as if nothing had
happened, what was queued is never done, and to leave the group blocks until somebody aborts it, as
NCCL's may. The first one connects, the first of another algorithm does so again, and so does the
first message between two workers: the call waits for a key that the first of them leaves in the
store, then for all of them to come, and no timeout ends that. Objects go by gloo, as they do beside
NCCL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo

from batchwright.distributed import transports

_LARGE = 2**18  # numbers that are summed by another algorithm

_aborted = threading.Event()
_hanging = threading.Event()
_waiting: set[threading.Thread] = set()  # for messages between two that are on their way


def _mark() -> Callable[[], bool]:
    before = list(_waiting)
    return lambda: not (_hanging.is_set() or any(one.is_alive() for one in before))


class Silent(transports.Queued):
    """As `transports.Nccl`."""

    backend = "silent"

    def mark(self) -> Callable[[], bool]:
        return _mark()

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


class _Message(_Work):
    """Of a message between two, for which the host does not wait: the other may wait for a third.

    So what is received is there once the device is done.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        thread = threading.Thread(target=super().wait, daemon=True)
        thread.start()
        _waiting.add(thread)
        return True


class _Group(ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._store = store
        self._connected: set[str] = set()

    def _connect(self, name: str, *, peer: int | None = None) -> None:
        """With another; without one, with all."""
        ranks = range(self.size())
        if peer is not None:
            ranks = sorted((self.rank(), peer))
            name += str(ranks)
        if name in self._connected:
            return
        if self.rank() == ranks[0]:
            self._store.set(f"id/{name}", "of the first")
        self._store.wait([f"id/{name}"], timedelta(hours=1))
        self._store.add(f"came/{name}", 1)
        while self._store.add(f"came/{name}", 0) < len(ranks):
            time.sleep(0.01)
        self._connected.add(name)

    def _queue(self, work: type[_Work], begin: Callable[..., dist.Work], *given: object) -> _Work:
        try:
            return work(begin(*given))
        except RuntimeError:
            return work(_Never())

    def getBackendName(self) -> str:  # noqa: N802 - as PyTorch calls it
        return "silent"

    def allreduce(self, tensors, *options):
        self._connect("tree" if tensors[0].numel() < _LARGE else "ring")
        return self._queue(_Work, self._gloo.allreduce, tensors, *options)

    def broadcast(self, tensors, *options):
        self._connect("ring")
        return self._queue(_Work, self._gloo.broadcast, tensors, *options)

    def send(self, tensors, peer, tag):
        self._connect("two", peer=peer)
        return self._queue(_Message, self._gloo.send, tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self._connect("two", peer=peer)
        return self._queue(_Message, self._gloo.recv, tensors, peer, tag)

    def allgather(self, outputs, inputs, *options):
        return self._gloo.allgather(outputs, inputs, *options)

    def barrier(self, *options):
        return self._gloo.barrier(*options)

    def shutdown(self) -> None:
        if _hanging.is_set():
            _aborted.wait()

    def abort(self) -> None:
        _aborted.set()


def wait() -> None:
    """As where the host reads a tensor of a GPU: only an abort ends what never comes."""
    done = _mark()
    while not (done() or _aborted.is_set()):
        time.sleep(0.01)


def now(device: torch.device) -> float:
    """As `timing.now` with a GPU: where a message never comes, it waits for ever."""
    done = _mark()
    while not done():
        time.sleep(0.01)
    return time.perf_counter()


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
