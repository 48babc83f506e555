"""Work in the background, one piece after the other, for which no request waits."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict

from batchwright.service.store import Store

log = logging.getLogger("batchwright.service")

PAUSE_SECONDS = 0.05
"""Between two transactions that remove something, so that others can write."""


class BackgroundQueue(ABC):
    """A queue of names, and a thread that does something for each while there are any.

    A name is not queued twice. An error is logged, and the work goes on with the next name.

    Args:
        name: Name of the thread, also for the log.
        pause_seconds: Pause after all names that waited, before those that were added meanwhile.

    Attributes:
        closed: Set once no name is taken any more; long work is to end then.
    """

    def __init__(self, name: str, *, pause_seconds: float = 0.0) -> None:
        self._name, self._pause = name, pause_seconds
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self.closed = threading.Event()

    def add(self, name: str) -> None:
        """Queue a name, unless it waits already or the queue is closed."""
        with self._lock:
            if self.closed.is_set():
                return
            self._waiting[name] = None
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads; the next name tries again
                    log.error("%s cannot begin: %s", self._name, error)
                else:
                    self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait until the queue is empty, for so long at most; returns whether it is."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float = 5.0) -> None:
        """Drop all names that wait, and wait for the work in progress."""
        with self._lock:
            self.closed.set()
            self._waiting.clear()
        self.wait(seconds)

    @abstractmethod
    def _do(self, name: str, /) -> None:
        """Do what a name stands for."""

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                names, self._waiting = self._waiting, OrderedDict()
            for name in names:
                if self.closed.is_set():
                    break
                try:
                    self._do(name)
                except Exception as error:
                    log.error("%s failed", self._name, exc_info=error)
            if self._waiting:
                self.closed.wait(self._pause)


class Remover(BackgroundQueue):
    """Removes records of deleted runs, and artifacts that were replaced: millions of records take a
    minute. What is left when the service ends, or is killed, is removed after its next start.
    """

    def __init__(self, store: Store) -> None:
        super().__init__("remover")
        self._store = store

    def soon(self) -> None:
        """Have deleted runs and replaced artifacts removed soon; after an error, in an hour."""
        self.add("what is gone")

    def _do(self, _: str, /) -> None:
        for run in self._store.runs.to_remove():
            while self._store.runs.remove_some(run):
                if self.closed.wait(PAUSE_SECONDS):
                    return
        self._store.artifacts.remove_gone(self.closed.is_set)
