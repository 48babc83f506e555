"""What loader processes deliver and take, and one clear line where they cannot start.

Python 3.14 starts processes by "forkserver" on Linux, others by "spawn", where earlier ones on
Linux forked. Then each loader process imports the script that was started, and gets its data set
pickled.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from batchwright.errors import TOO_LITTLE_SHARED, DataError, PlanError, SharedMemoryError
from batchwright.records import Job
from batchwright.workload.host import worker_threads

OWN_DATA_LOADERS = 2
"""Loader processes of each worker for a data set of the user's own, where nothing is said."""

_NO_SHARED_MEMORY = (
    "is killed by signal: Bus error",  # where PyTorch takes more than there is
    "unable to allocate shared memory(shm)",  # where it asks before, as 2.13 does
)

_ON_A_GPU = (
    "Cannot re-initialize CUDA in forked subprocess",  # where the loader process was forked
    "CUDA error: initialization error",  # as before, of samples that are indexed there
    "only dense CPU tensors can be pinned",  # else, as its batches come
)

_LOOK_SECONDS = 1.0  # between two looks whether who made a loader process still lives

_ENDED = (
    "the loader processes ended as they started, and what they said stands above; each imports the "
    'script, so what it runs must stand under `if __name__ == "__main__":`; or give loaders=0'
)


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """What ``loader`` delivers.

    Raises:
        DataError: What the loader processes need cannot be pickled, or the samples are on a GPU.
        PlanError: They ended while they imported the script.
        SharedMemoryError: There is too little of it for a batch.
        RuntimeError: One of them has failed, or was killed.
    """
    method = "fork"
    if loader.num_workers:  # who asks how processes are started settles it for the script
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    try:
        with _terms_wait(method):
            batches = _naming_causes(iter(loader))
    except (PicklingError, AttributeError, TypeError) as error:  # what pickling may raise
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


def _naming_causes(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; where a loader process has ended, the error says why.

    PyTorch says that it exited unexpectedly, and by which signal only in the error before that.
    """
    try:
        yield from batches
    except RuntimeError as error:
        why = f"{error} {error.__cause__}"
        if any(words in why for words in _NO_SHARED_MEMORY):
            raise SharedMemoryError(TOO_LITTLE_SHARED) from None
        if any(words in why for words in _ON_A_GPU):
            raise DataError(
                "the samples are on the GPU, which loader processes cannot use: give loaders=0"
            ) from None
        if "is killed by signal" in str(error.__cause__):
            raise RuntimeError(str(error.__cause__)) from None
        raise


@contextmanager
def _terms_wait(method: str) -> Iterator[None]:
    """Inside, a TERM waits; so it does in all threads of the processes that are started inside.

    PyTorch starts some in a loader process before `stay_at_a_stop` is called, and a signal ends a
    process by whichever thread takes it.
    """
    if method == "forkserver":  # the server would pass it on to all that it ever starts
        yield
        return
    if method == "spawn":  # whose tracker, as it starts, lets a TERM through again
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_at_a_stop(worker: int) -> None:
    """Have a loader process outlive a request to stop that goes to every process.

    An engine sends it so, and a terminal its Ctrl-C. Its worker still needs batches until the step
    after which all workers stop. That worker's own TERM ends it, or its death. For
    `DataLoader`'s ``worker_init_fn``.
    """
    del worker
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if (maker := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(maker,), daemon=True).start()


def _end_with(maker: BaseProcess) -> None:
    # Not its parent: where Python starts processes from a server, that is the server, which lives
    # as long as they do.
    while maker.is_alive():
        told = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
        if told is not None and told.si_pid == maker.pid:
            break
    os._exit(0)


def loader_processes(job: Job, local_workers: int, *, files: bool) -> int:
    """Loader processes of each worker.

    Args:
        job: Its key ``loaders`` decides, where it is a number.
        local_workers: Workers on this machine.
        files: Whether images of a folder are decoded, rather than a user's own data set fetched.
    """
    if job.loaders != "auto":
        return job.loaders
    return worker_threads(local_workers) if files else OWN_DATA_LOADERS


class Totals(NamedTuple):
    """What was loaded, and what it took: wall and processor time of the processes that loaded."""

    batches: int
    seconds: float
    cpu_seconds: float


class LoadingMeter:
    """How many batches were loaded, and what that took, whichever process did it.

    Each loader process writes a row of its own in shared memory, so nobody waits for anybody.

    Args:
        loaders: Loader processes; 0: this process loads.

    Attributes:
        loaders: As given.
        asked: Batches whose loading was asked for; the one who asks counts them.
    """

    def __init__(self, loaders: int) -> None:
        self.loaders, self.asked = loaders, 0
        rows = torch.zeros(max(1, loaders), 3, dtype=torch.float64)
        self._rows = rows.share_memory_() if loaders else rows
        self._began = 0.0, 0.0

    def begin(self) -> None:
        """A batch is begun, in the process that calls this."""
        self._began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """It is there, or has failed."""
        told = get_worker_info()
        row = self._rows[told.id if told else 0]
        row[1] += time.perf_counter() - self._began[0]
        row[2] += time.process_time() - self._began[1]
        row[0] += 1  # last: who waits for it reads the others then

    @property
    def batches(self) -> int:
        """Loaded so far."""
        return int(self._rows[:, 0].sum())

    @property
    def totals(self) -> Totals:
        """All so far, over the loading processes."""
        batches, seconds, cpu_seconds = self._rows.sum(0).tolist()
        return Totals(int(batches), seconds, cpu_seconds)


class MeteredItems(Dataset[Any]):
    """A data set whose batches are counted and timed where they are loaded.

    Give `torch.utils.data.DataLoader` this and its `collate`.

    Args:
        items: The data set.
        collate: Makes a batch of items; ``None``: PyTorch's way.
        meter: Is told.
    """

    def __init__(
        self, items: Dataset[Any], collate: Callable[[list[Any]], Any] | None, meter: LoadingMeter
    ) -> None:
        self._items, self._collate, self._meter = items, collate or default_collate, meter

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        """The items of a batch, as PyTorch's loaders ask for them."""
        self._meter.begin()
        try:
            together = getattr(self._items, "__getitems__", None)
            return together(keys) if together else [self._items[key] for key in keys]
        except BaseException:
            self._meter.end()
            raise

    def collate(self, items: list[Any]) -> Any:
        """The batch."""
        try:
            return self._collate(items)
        finally:
            self._meter.end()
