"""Removes what deleted runs held, beside whoever waits for an answer: millions of records take a
minute, and nobody finds the run meanwhile.
"""

from __future__ import annotations

from batchwright.service.background_queue import Errands
from batchwright.service.store import Store

PAUSE_SECONDS = 0.05
"""Between two transactions, for others that write."""


class Remover:
    """What is left when the service ends, or is killed, is removed after its next start.

    Args:
        store: Where runs are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._errands = Errands(self._remove, "remover")

    def soon(self) -> None:
        """A run was deleted: remove what it held; what fails is tried again in an hour."""
        self._errands.add("deleted runs")

    def wait(self, seconds: float) -> bool:
        """Wait until there is nothing left to remove; returns whether it came to that."""
        return self._errands.wait(seconds)

    def close(self) -> None:
        """Leave the rest for the next start."""
        self._errands.close()

    def _remove(self, _: str) -> None:
        for run in self._store.runs.to_remove():
            while self._store.runs.remove_some(run):
                if self._errands.closed.wait(PAUSE_SECONDS):
                    return
