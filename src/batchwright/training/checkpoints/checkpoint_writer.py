"""Writes checkpoints beside the training, no more of them than the disk can take."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Any

from batchwright.records import Job
from batchwright.records.run_folder import BEST, CHECKPOINTED, KEPT, LAST, PREVIOUS
from batchwright.training.checkpoints.checkpoint import save_checkpoint


class Writer:
    """A thread that writes the newest checkpoint of each name.

    A checkpoint that still waits for the disk when a newer one of its name comes is dropped,
    so at most one of each name waits, beside the one that is being written. Of those that stay,
    each has a name of its own: whoever puts one waits for the one before (`wait`, or `keeping`).

    Where several wait, those that stay are written first: a run that goes on from another writes
    them no more. Then comes ``best``, so that ``last`` never says of a model how good it is that is
    not there. For the same reason nothing more is written after an error, until it was told.

    Args:
        folder: Folder of the files. The former ``last.pt`` becomes ``previous.pt``, and the folder
            above gets a mark that there is a checkpoint.
        job: Says how often ``last`` is due.

    Attributes:
        saved_steps: Steps of the run at its latest ``last``.
        last_is_damaged: Whether ``last.pt`` cannot be read. Then the next one replaces it, and
            ``previous.pt`` stays.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        self._folder, self._job, self._failed = folder, job, False
        self._saved_at, self.saved_steps = time.perf_counter(), 0
        self.last_is_damaged = False
        self._lock = Lock()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._at_work = ""  # name of the checkpoint that is being written
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._jobs: list[Future[None]] = []

    def due(self, steps: int) -> bool:
        """Whether the job's seconds or steps between checkpoints have passed since ``last``.

        Nothing is due while ``last`` is still being written: a disk that cannot follow makes
        checkpoints rarer, not steps slower.

        Args:
            steps: Steps since the start of the run.
        """
        with self._lock:
            if LAST in self._waiting or self._at_work == LAST:
                return False
        every = self._job.checkpoint_steps
        by_steps = every is not None and steps - self.saved_steps >= every
        return (
            by_steps or time.perf_counter() - self._saved_at > self._job.seconds_between_checkpoints
        )

    @property
    def keeping(self) -> bool:
        """Whether a checkpoint that stays is being written, or waits for the disk."""
        with self._lock:
            return any(name.startswith(KEPT) for name in (self._at_work, *self._waiting))

    def forget(self, name: str) -> None:
        """Drop a waiting checkpoint before a newer one is copied: memory may be short.

        A ``best`` stays while ``last`` waits, which knows its score.
        """
        with self._lock:
            if name != BEST or LAST not in self._waiting:
                self._waiting.pop(name, None)

    def put(self, name: str, content: dict[str, Any]) -> None:
        """Have a checkpoint written as soon as the disk is free; returns at once."""
        with self._lock:
            self._waiting[name] = {"written": time.time_ns(), **content}
        self._jobs.append(self._thread.submit(self._write_one))
        if name == LAST:
            self._saved_at, self.saved_steps = time.perf_counter(), content["state"]["steps"]

    def check(self) -> None:
        """Raise the error of a write that has failed.

        Raises:
            FileError: A checkpoint could not be written. The one before is unharmed.
        """
        ended = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in ended]
        try:
            for job in ended:
                job.result()
        except BaseException:
            self._failed = False
            raise

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for ``seconds`` at most (``None``: any time); returns whether all is written.

        Raises:
            FileError: As for `check`.
        """
        wait(self._jobs, timeout=seconds)
        self.check()
        return not self._jobs

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._thread.shutdown()

    def _write_one(self) -> None:
        with self._lock:
            if self._failed:
                self._waiting.clear()
                return
            name = min(self._waiting, key=_turn, default="")
            content = self._waiting.pop(name, None)
            self._at_work = name
        if content is None:  # another call has written the newest of each name already
            return
        former = mark = None
        if name == LAST:
            former = None if self.last_is_damaged else self._folder / f"{PREVIOUS}.pt"
            mark = self._folder.parent / CHECKPOINTED
        try:
            save_checkpoint(self._folder / f"{name}.pt", content, former=former, mark=mark)
            if name == LAST:
                self.last_is_damaged = False
        except BaseException:
            with self._lock:
                self._waiting.clear()
                self._failed = True
            raise
        finally:
            with self._lock:
                self._at_work = ""


def _turn(name: str) -> int:
    """Place of a name among those that wait."""
    return 0 if name.startswith(KEPT) else 1 if name == BEST else 2
