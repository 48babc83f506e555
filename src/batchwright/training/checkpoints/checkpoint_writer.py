"""Writes checkpoints behind training's back, and never more of them than the disk can take."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Any

from batchwright.training.checkpoints.checkpoint import save_checkpoint
from batchwright.training.checkpoints.checkpoint_lookup import LAST, PREVIOUS


class Writer:
    """A thread that writes the newest checkpoint of each name.

    One that still waits for the disk when a newer one of its name comes is not written any more,
    so at most one of each name waits, beside the one that is being written. ``last``, which is
    resumed from, goes before others.

    Args:
        folder: Where they go. What was ``last.pt`` becomes ``previous.pt``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._at_work = ""  # name of what is being written
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._jobs: list[Future[None]] = []

    def has(self, name: str) -> bool:
        """Whether one of that name waits or is being written."""
        with self._lock:
            return name in self._waiting or name == self._at_work

    def forget(self, name: str) -> None:
        """Let go of one that waits, before a newer one is put together: memory may be short."""
        with self._lock:
            self._waiting.pop(name, None)

    def put(self, name: str, content: dict[str, Any]) -> None:
        """Have a checkpoint written as soon as the disk is free; returns at once."""
        with self._lock:
            self._waiting[name] = content
        self._jobs.append(self._thread.submit(self._write_one))

    def check(self) -> None:
        """Raise what went wrong with a write that has ended.

        Raises:
            FileError: It could not be written. The checkpoint before is unharmed.
        """
        ended = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in ended]
        for job in ended:
            job.result()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether everything is written.

        Raises:
            FileError: As for `check`.
        """
        wait(self._jobs, timeout=seconds)
        self.check()
        return not self._jobs

    def close(self) -> None:
        """Write what waits, and end."""
        self._thread.shutdown()

    def _write_one(self) -> None:
        with self._lock:
            name = LAST if LAST in self._waiting else next(iter(self._waiting), "")
            content = self._waiting.pop(name, None)
            self._at_work = name
        if content is None:  # a newer one took its place, and is written already
            return
        former = self._folder / f"{PREVIOUS}.pt" if name == LAST else None
        try:
            save_checkpoint(self._folder / f"{name}.pt", content, former=former)
        finally:
            with self._lock:
                self._at_work = ""
