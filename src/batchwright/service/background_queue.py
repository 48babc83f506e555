"""Work that nobody waits for: done one after the other, in a thread beside those who ask for it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from batchwright.service.store import Store

log = logging.getLogger("batchwright.service")

PAUSE_SECONDS = 0.05
"""Between two transactions that remove something, for others that write."""


class BackgroundQueue:
    """Takes names and does something for each, in a thread that is there while there is any.

    A name that waits already is not taken twice. What fails is logged, and the others are done all
    the same.

    Args:
        do: What is done for a name.
        name: Of the thread, and for the log.
        pause_seconds: After all that waited was done, until what came meanwhile is.

    Attributes:
        closed: Set once nothing more is taken on; what takes long looks at it.
    """

    def __init__(
        self, do: Callable[[str], object], name: str, *, pause_seconds: float = 0.0
    ) -> None:
        self._do, self._name, self._pause = do, name, pause_seconds
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self.closed = threading.Event()

    def add(self, name: str) -> None:
        """Do this soon."""
        with self._lock:
            if self.closed.is_set():
                return
            self._waiting[name] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until there is nothing left to do; returns whether it came to that."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float = 5.0) -> None:
        """Take nothing more on, and let what is being done end."""
        with self._lock:
            self.closed.set()
            self._waiting.clear()
        self.wait(seconds)

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
    """Removes what deleted runs held, and artifacts that were replaced: millions of records take a
    minute, and nobody finds the run meanwhile. What is left when the service ends, or is killed, is
    removed after its next start.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(self._remove, "remover")
        self._store = store

    def soon(self) -> None:
        """A run was deleted, or an artifact replaced: remove what is left of it; what fails is
        tried again in an hour.
        """
        self.add("what is gone")

    def _remove(self, _: str) -> None:
        for run in self._store.runs.to_remove():
            while self._store.runs.remove_some(run):
                if self.closed.wait(PAUSE_SECONDS):
                    return
        self._store.artifacts.remove_gone(self.closed.is_set)
