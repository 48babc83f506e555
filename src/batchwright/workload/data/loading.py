"""Batches of loader processes, the time that loading takes, and clear errors of these processes.

Python 3.14 starts processes by "forkserver" on Linux, where earlier versions forked; other systems
use "spawn". With both, each loader process imports the script that was started, and gets its data
set pickled.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pickle import PicklingError
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from batchwright.errors import TOO_LITTLE_SHARED, DataError, PlanError, SharedMemoryError, one_line
from batchwright.records import Job
from batchwright.workload.host import worker_threads

OWN_DATA_LOADERS = 2
"""Default number of loader processes of each worker for a data set of the user's own."""

_KILLED = "is killed by signal"

_NO_SHARED_MEMORY = (
    f"{_KILLED}: Bus error",  # PyTorch has used more than there is
    "unable to allocate shared memory(shm)",  # PyTorch asks first, from 2.13 on
)

_ON_A_GPU = (
    "Cannot re-initialize CUDA in forked subprocess",
    "CUDA error: initialization error",  # in a forked process that indexes samples on the GPU
    "only dense CPU tensors can be pinned",  # as the batches of other processes arrive
)

_NOT_SENT = "a loader process cannot send a batch"

_print_why = Queue._on_queue_feeder_error  # type: ignore[attr-defined] # as Python does it

_LOOK_SECONDS = 1.0  # between two looks whether the creator of a loader process still lives

_ENDED = (
    "the loader processes ended as they started, and what they said stands above; each imports the "
    'script, so what it runs must stand under `if __name__ == "__main__":`; or give loaders=0'
)

# The end of a process group waits for its threads, which a forked process has not got: it would
# hang or crash as it collected an earlier group, such as one that an error's traceback holds.
os.register_at_fork(after_in_child=gc.freeze)


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of ``loader``.

    Raises:
        DataError: What the loader processes need, or a batch of theirs, cannot be pickled, or the
            samples are on a GPU.
        PlanError: The loader processes ended while they imported the script.
        SharedMemoryError: There is too little shared memory for a batch.
        RuntimeError: A loader process has failed, or was killed.
    """
    method = "fork"
    if loader.num_workers:  # asking for the default start method fixes it for the whole script
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    try:
        with _terms_wait(method):
            begun = iter(loader)
            workers = getattr(begun, "_workers", ())
            batches = _naming_causes(_ending_with_errors(begun, loader), workers)
    except (PicklingError, AttributeError, TypeError) as error:  # pickling may raise all of these
        raise DataError(
            f"the data set cannot be sent to loader processes ({error}): define its class, and the "
            "functions that it calls, at the top level of a module, or give loaders=0"
        ) from error
    except (EOFError, ConnectionError):  # the fork server itself imports the script
        raise PlanError(_ENDED) from None
    try:
        first = next(batches, None)
    except RuntimeError as error:
        if method == "fork" or not str(error).endswith("exited unexpectedly"):
            raise
        raise PlanError(_ENDED) from None
    if first is not None:
        yield first
        yield from batches


def _ending_with_errors(batches: Iterator[Any], loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader's iterator, whose processes end before an error goes on."""
    try:
        yield from batches
    except Exception:
        if not loader.persistent_workers:  # these, `end_loaders` ends
            _end(batches)
        raise


def end_loaders(loader: DataLoader[Any] | None) -> None:
    """End the processes of a loader that keeps them from epoch to epoch."""
    _end(getattr(loader, "_iterator", None))


def _end(batches: Iterator[Any] | None) -> None:
    """End the processes of a loader's iterator.

    They end with it. An error that is on its way may still hold it, and left to Python's cycle
    collection its queues are collected first: Python then waits 5 s for each process in vain.
    """
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        end()


def _naming_causes(batches: Iterator[Any], workers: Sequence[BaseProcess]) -> Iterator[Any]:
    """``batches``, with errors that say why one of the loader processes ``workers`` has ended.

    PyTorch's own error says that it exited unexpectedly; only its cause names the signal. There is
    none once Lightning has put back the signal handlers of before its first loader process.
    """
    try:
        yield from batches
    except DataError as error:  # from a loader process it comes with its traceback for a text
        name = f"{DataError.__module__}.{DataError.__name__}: "
        raise DataError(str(error).strip().rpartition(name)[2]) from None
    except RuntimeError as error:
        cause = str(error.__cause__)
        if _KILLED not in cause and "exited unexpectedly" in str(error):
            cause = _killed(workers) or cause
        why = f"{error} {cause}"
        if any(words in why for words in _NO_SHARED_MEMORY):
            raise SharedMemoryError(TOO_LITTLE_SHARED) from None
        if any(words in why for words in _ON_A_GPU):
            raise DataError(
                "the samples are on the GPU, which loader processes cannot use: give loaders=0"
            ) from None
        if (at := why.find(_NOT_SENT)) >= 0:
            said = why[at:].splitlines()[0]
            hint = "have the data set or collate return tensors, numbers and texts"
            if "Too many open files" in said:
                hint = "raise the limit (ulimit -n 65536)"
            raise DataError(f"{said}: {hint}, or give loaders=0") from None
        if _KILLED in cause:
            raise RuntimeError(cause) from None
        raise


def _killed(workers: Sequence[BaseProcess]) -> str:
    """What PyTorch would say of the first process that a signal has ended; empty if none has."""
    return next(
        (
            f"DataLoader worker (pid {one.pid}) {_KILLED}: {signal.strsignal(-one.exitcode)}"
            for one in workers
            if one.exitcode is not None and one.exitcode < 0
        ),
        "",
    )


@contextmanager
def _terms_wait(method: str) -> Iterator[None]:
    """Inside, SIGTERM is blocked, also in all threads of the processes that are started inside.

    PyTorch starts threads in a loader process before `ignore_stop_signals` is called, and a signal
    ends a process if any of its threads takes it.
    """
    if method == "forkserver":  # the server would block the signal in all later processes as well
        yield
        return
    if method == "spawn":  # starting the resource tracker unblocks the signal
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals(worker: int) -> None:
    """Have a loader process ignore stop signals that are sent to every process.

    Engines send SIGTERM, and terminals SIGINT, to all processes. But the worker still needs batches
    until the step after which all workers stop. The loader process ends by the worker's own
    SIGTERM, or after the worker's death. It also tells the worker of batches that it cannot send.
    To be used as ``worker_init_fn`` of a `DataLoader`.
    """
    del worker
    Queue._on_queue_feeder_error = _send_why  # type: ignore[attr-defined] # here alone
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if (maker := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(maker,), daemon=True).start()


def _send_why(queue: Queue[Any], error: Exception, batch: Any) -> None:
    """Send an error in place of a batch, or of the data set's own error, that could not be sent.

    Python prints why and drops what it was to send, and the worker would wait for it for ever. That
    is still so in a queue of the user's own, which may hold anything: PyTorch's holds a number and
    what was made for it.
    """
    if not (isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], int)):
        _print_why(error, batch)
        return
    number, made = batch
    if isinstance(made, ExceptionWrapper):  # its class has no name to be found by, as botocore's
        made.exc_type = RuntimeError
    else:
        said = RuntimeError(f"{_NOT_SENT} ({one_line(error)})")
        made = ExceptionWrapper((RuntimeError, said, None))
    queue.put((number, made))


def _end_with(maker: BaseProcess) -> None:
    """End this process once ``maker`` has ended, or has sent SIGTERM."""
    # The parent may be Python's fork server, which lives as long as the loader processes.
    while maker.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
        if received is not None and received.si_pid == maker.pid:
            break
    os._exit(0)


def loader_processes(job: Job, local_workers: int, *, files: bool) -> int:
    """Number of loader processes of each worker.

    Args:
        job: The job; its key ``loaders`` decides if it is a number.
        local_workers: Workers on this machine.
        files: Whether image files are decoded; else items of a user's data set are fetched.
    """
    if job.loaders != "auto":
        return job.loaders
    return worker_threads(local_workers) if files else OWN_DATA_LOADERS


class Totals(NamedTuple):
    """Number of loaded batches, and seconds of wall and processor time of the loading processes."""

    batches: int
    seconds: float
    cpu_seconds: float


class LoadingMeter:
    """Counts loaded batches and the time of loading, over all loader processes.

    Each loader process writes a row of its own in shared memory, so no process waits for another.

    Attributes:
        loaders: Number of loader processes; 0: this process loads.
        asked: Number of batches that were asked for; counted by the caller.
    """

    def __init__(self, loaders: int) -> None:
        self.loaders, self.asked = loaders, 0
        rows = torch.zeros(max(1, loaders), 3, dtype=torch.float64)
        self._rows = rows.share_memory_() if loaders else rows
        self._began = 0.0, 0.0

    def begin(self) -> None:
        """Start the clock of a batch in this process."""
        self._began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Count the batch in this process, loaded or failed."""
        loader = get_worker_info()
        row = self._rows[loader.id if loader else 0]
        row[1] += time.perf_counter() - self._began[0]
        row[2] += time.process_time() - self._began[1]
        row[0] += 1  # last: a reader that waits for the count then reads the times

    @property
    def batches(self) -> int:
        """Number of batches loaded so far."""
        return int(self._rows[:, 0].sum())

    @property
    def totals(self) -> Totals:
        """Totals so far over all loading processes."""
        batches, seconds, cpu_seconds = self._rows.sum(0).tolist()
        return Totals(int(batches), seconds, cpu_seconds)


class MeteredItems(Dataset[Any]):
    """A data set whose batches are counted and timed where they are loaded.

    Pass this and its `collate` to `torch.utils.data.DataLoader`.

    Args:
        items: The data set.
        collate: Makes a batch of items; ``None``: PyTorch's `default_collate`.
        meter: Counts and times the batches.
    """

    def __init__(
        self, items: Dataset[Any], collate: Callable[[list[Any]], Any] | None, meter: LoadingMeter
    ) -> None:
        self._items, self._collate, self._meter = items, collate or default_collate, meter

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        """The items of a batch; PyTorch's loaders call this."""
        self._meter.begin()
        try:
            together = getattr(self._items, "__getitems__", None)
            return together(keys) if together else [self._items[key] for key in keys]
        except BaseException:
            self._meter.end()
            raise

    def collate(self, items: list[Any]) -> Any:
        """Make a batch of its items."""
        try:
            return self._collate(items)
        finally:
            self._meter.end()
