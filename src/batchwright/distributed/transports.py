"""How the workers' tensors travel: by gloo between CPUs, by NCCL between GPUs.

The two fail in different ways. Gloo's ``wait`` blocks until a message is there, and raises where
another worker is gone. NCCL's only has the device's stream wait: the host goes on at once, nothing
is raised, and the kernels of a message that never comes turn for ever. So whoever reads a result
waits for the device here, and looks after the other workers meanwhile.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from batchwright.distributed.heartbeat import BEAT_SECONDS, RollCall
from batchwright.workload.host import enter, gpu_failure

_POLL_SECONDS = 50e-6  # between two looks at the device: what a message may be noticed late
_SHORT_SECONDS = 1e-3  # at first, in which the host only yields between two looks
_FIRST_SIZES = 1, 2**12, 2**16, 2**21  # of numbers, from a figure to a bucket (`BUCKET_BYTES`)
_GIVE_UP_SECONDS = 10.0  # for what should take none, and may wait for a worker that is gone
_WILL_NOT_END = "the exchange will not end"
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # of newer versions of NCCL; also for slices (MIG)


def gpus_may_be_shared() -> bool:
    """Whether the user has told NCCL that workers may be on one GPU."""
    return os.environ.get(_SHARED_GPU) == "1"


def nothing() -> None:
    """Do nothing meanwhile."""


def fetched(values: Tensor, meanwhile: Callable[[], None] = nothing) -> Tensor:
    """Copy values to the CPU; while the host waits, the device works on what ``meanwhile`` queues.

    The host waits for all that was queued before, and for nothing of ``meanwhile``.
    """
    if values.device.type != "cuda":
        meanwhile()
        return values.cpu()
    here, there = on_its_way(values)
    meanwhile()
    there.synchronize()
    return here


def on_its_way(values: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy from a GPU to pinned memory, to be read once the device has passed the event."""
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    here.copy_(values, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(values.device))
    return here, there


class Gloo:
    """Exchanges between CPUs, by gloo.

    Args:
        device: Where this worker computes.
        timeout: Seconds after which an exchange gives up.

    Attributes:
        backend: What `torch.distributed.init_process_group` takes.
        shares: Whether several workers may be on one device.
        waits_at_store: Whether a group waits at the store while it is connected.
        given_up: Why exchanges were given up; empty: they were not.
    """

    backend = "gloo"
    shares = True
    waits_at_store = False

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device, self._timeout = device, timeout
        self.given_up = ""

    def prepare(self) -> None:
        """Prepare to join a group."""

    def connect(self, handle: dist.ProcessGroup | None) -> None:
        """Connect the workers of a group, all together, before its first exchange.

        Gloo connects as the group is joined.

        Raises:
            RuntimeError: Another worker is gone or silent.
        """

    def begin(self, exchange: Callable[[], None]) -> None:
        """Make an exchange between workers that may not be connected yet.

        Gloo's are connected.

        Raises:
            RuntimeError: Another worker is gone or silent.
        """
        exchange()

    def read(self, values: Tensor, meanwhile: Callable[[], None] = nothing) -> Tensor:
        """``values`` on the CPU, once all exchanges before are over.

        Args:
            values: On the device.
            meanwhile: Queues more work on the device, for which the host does not wait.

        Raises:
            RuntimeError: Another worker is gone or silent.
        """
        return fetched(values, meanwhile)

    def settle(self) -> None:
        """Wait until all exchanges are over.

        Raises:
            RuntimeError: Another worker is gone or silent.
        """

    def watch(self) -> None:
        """From now on give up exchanges that do not end, for which the host itself may wait.

        Where a worker is gone or silent, gloo's raise.
        """

    def unwatch(self) -> None:
        """Watch no longer."""

    def give_up(self, why: str = "the exchange was given up") -> None:
        """Abort exchanges that may wait for a worker that is gone; see `given_up` for ``why``."""

    def leave(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class Queued(Gloo):
    """Exchanges that are queued on a device, whose failures the host does not see by itself."""

    waits_at_store = True

    def __init__(self, device: torch.device, timeout: float) -> None:
        super().__init__(device, timeout)
        self._giving_up = threading.Lock()
        self._watch: threading.Thread | None = None
        self._unwatched = threading.Event()

    @abstractmethod
    def mark(self) -> Callable[[], bool]:
        """A function that returns whether the device has done all that is queued by now."""

    @abstractmethod
    def abort(self) -> None:
        """Abort exchanges on the device that do not end."""

    def connect(self, handle: dist.ProcessGroup | None) -> None:
        """See `Gloo.connect`; other workers' heartbeats are watched meanwhile.

        NCCL chooses an algorithm for each exchange, by its kind and size, and from 2.22 on connects
        each inside its first exchange: so there is one of every kind and scale here.
        """

        def first() -> None:
            for size in _FIRST_SIZES:
                dist.all_reduce(torch.zeros(size, device=self.device), group=handle)
            dist.broadcast(torch.zeros(1, device=self.device), src=0, group=handle)

        self.begin(first)
        self.settle()

    def begin(self, exchange: Callable[[], None]) -> None:
        """See `Gloo.begin`; other workers' heartbeats are watched meanwhile.

        NCCL connects inside the first exchange of a group, and inside the first message between
        two: its host waits there for all of them, and for one that was killed it waits for ever.
        So a thread makes these.
        """
        failed: list[Exception] = []

        def first() -> None:
            try:
                enter(self.device)  # see `_within`
                exchange()
            except Exception as error:  # noqa: BLE001 - raised below, where the caller is
                failed.append(error)

        thread = threading.Thread(target=first, name="connecting", daemon=True)
        thread.start()
        self._wait(lambda: not thread.is_alive())
        if failed:
            raise failed[0]

    def settle(self) -> None:
        """Wait until the device has done all that is queued; see `Gloo.settle`."""
        self._wait(self.mark())

    def _wait(self, done: Callable[[], bool]) -> None:
        try:
            _await(lambda: bool(self.given_up) or done(), self._timeout)
        except TimeoutError as error:
            self.give_up(str(error))
        if self.given_up:  # kernels that were aborted count as done
            raise RuntimeError(self.given_up)

    def watch(self) -> None:
        """See `Gloo.watch`; a thread looks at the device and after the other workers."""
        if self._watch is None:
            self._watch = threading.Thread(target=self._watch_on, name="watching", daemon=True)
            self._watch.start()
            atexit.register(self.unwatch)  # a thread that wakes up in a dying interpreter aborts it

    def unwatch(self) -> None:
        """See `Gloo.unwatch`."""
        if self._watch is not None:
            atexit.unregister(self.unwatch)
            self._unwatched.set()
            self._watch.join(_GIVE_UP_SECONDS)

    def _watch_on(self) -> None:
        """Give up what the device does not end in time, or while a worker is missed."""
        with suppress(RuntimeError):
            enter(self.device)  # see `_within`
        done, since = _marked_nothing, time.monotonic()
        while not self._unwatched.wait(BEAT_SECONDS):
            try:
                if done():
                    done, since = self.mark(), time.monotonic()
                    continue
            except RuntimeError as error:
                if gpu_failure(error):  # as the worker sees for itself
                    return
                done = _marked_nothing  # CUDA tells nothing while another thread captures a graph
                continue
            late = time.monotonic() - since > self._timeout
            if late or _misses_one():
                self.give_up(_timed_out(self._timeout) if late else _WILL_NOT_END)
                return

    def give_up(self, why: str = "the exchange was given up") -> None:
        """Abort, for some seconds: it may itself wait for a worker that was killed."""
        with self._giving_up:
            if not self.given_up:
                self.given_up = why
                _within(_GIVE_UP_SECONDS, self.abort, self.device)

    def leave(self) -> None:
        """Leave the group; where a worker is gone without a word, not wait for it for ever."""
        _within(_GIVE_UP_SECONDS, dist.destroy_process_group, self.device)


class Nccl(Queued):
    """Exchanges between GPUs, by NCCL; pickled objects and other tensors on the CPU go by gloo."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, device: torch.device, timeout: float) -> None:
        super().__init__(device, timeout)
        self.shares = gpus_may_be_shared()

    def prepare(self) -> None:
        """Keep PyTorch's watchdog from ending the process: the run has more to say, and to save.

        What the user has set stays, but for 2: the watchdog then aborts exchanges by itself, and a
        step would take what had arrived for the sum. torchrun gives its workers 1 unless the user
        has set something, so there 1 is nobody's word.
        """
        setting = os.environ.get(_WATCHDOG)
        if setting in (None, "2") or (setting == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
            os.environ[_WATCHDOG] = "0"
        if os.environ[_WATCHDOG] == "0":
            # Else the watchdog still ends the process when the GPU fails, before the worker has
            # reported it.
            os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        # After an error the watchdog sleeps four times as long, a minute by default, before it lets
        # go of the group: the process could not end before.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")

    def mark(self) -> Callable[[], bool]:
        """Whether an event is passed that is behind all that is queued."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.query

    def read(self, values: Tensor, meanwhile: Callable[[], None] = nothing) -> Tensor:
        """See `Gloo.read`; other workers' heartbeats are watched meanwhile."""
        here, there = on_its_way(values)
        meanwhile()
        self._wait(there.query)
        return here

    def abort(self) -> None:
        """Abort all groups together: one might wait for another's kernels."""
        backends: list[Any] = []
        for group in list(distributed_c10d._world.pg_map):
            with suppress(RuntimeError):  # one without NCCL
                backends.append(group._get_backend(self.device))
        if backends:
            backends[0]._group_start()
            for backend in backends:
                backend.abort()
            backends[0]._group_end()


TRANSPORTS: dict[str, type[Gloo]] = {"cpu": Gloo, "cuda": Nccl}
"""Transports by the kind of device."""


def transport_for(device: torch.device, timeout: float) -> Gloo:
    """The transport of tensors on a device."""
    return TRANSPORTS.get(device.type, Gloo)(device, timeout)


def _await(done: Callable[[], bool], timeout: float) -> None:
    """Wait until ``done()``.

    Raises:
        TimeoutError: ``timeout`` seconds have passed, or another worker is gone or silent.
    """
    began = time.monotonic()
    look = began + BEAT_SECONDS
    now = began
    while not done():
        time.sleep(0 if now - began < _SHORT_SECONDS else _POLL_SECONDS)
        now = time.monotonic()
        if now < look:
            continue
        if now - began > timeout:
            raise TimeoutError(_timed_out(timeout))
        look = now + BEAT_SECONDS
        if _misses_one():
            raise TimeoutError(_WILL_NOT_END)


def _timed_out(seconds: float) -> str:
    return f"Timed out waiting {seconds:g} s for an exchange"


def _marked_nothing() -> bool:
    """As a mark behind nothing, which every device has passed."""
    return True


def _misses_one() -> bool:
    """Whether another worker is gone or silent, or has failed."""
    roll_call = RollCall.current
    return roll_call is not None and roll_call.misses_one()


def _within(seconds: float, work: Callable[[], None], device: torch.device) -> None:
    """Do some work for so many seconds at most; what takes longer goes on in a thread."""

    def quietly() -> None:
        try:
            # The group is in pieces, and is being left; versions of PyTorch differ in how.
            with suppress(RuntimeError, ValueError):
                enter(device)  # a thread has a current device of its own, the first GPU at first
                work()
        except AttributeError as error:
            what = f"PyTorch {torch.__version__} cannot give up exchanges: {error}"
            print(what, file=sys.stderr)  # noqa: T201 - the worker's log

    thread = threading.Thread(target=quietly, name="giving-up", daemon=True)
    thread.start()
    thread.join(seconds)
