"""Removes what deleted runs held, beside whoever waits for an answer: millions of records take a
minute, and nobody finds the run meanwhile.
"""

from __future__ import annotations

import logging
import threading

from batchwright.service.store import Store

log = logging.getLogger("batchwright.service")

PAUSE_SECONDS = 0.05
"""Between two transactions, for others that write."""


class Remover:
    """A thread that is there while there is something to remove.

    What is left when the service ends, or is killed, is removed after its next start.

    Args:
        store: Where runs are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = False
        self._closed = threading.Event()

    def soon(self) -> None:
        """A run was deleted: remove what it held."""
        with self._lock:
            self._wanted = True
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._work, name="remover", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until there is nothing left to remove; returns whether it came to that."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float = 5.0) -> None:
        """Leave the rest for the next start."""
        self._closed.set()
        self.wait(seconds)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted or self._closed.is_set():
                    self._thread = None
                    return
                self._wanted = False
            try:
                self._remove()
            except Exception as error:  # tried again in an hour
                log.error("removing a run failed", exc_info=error)

    def _remove(self) -> None:
        for run in self._store.runs.to_remove():
            while self._store.runs.remove_some(run):
                if self._closed.wait(PAUSE_SECONDS):
                    return
