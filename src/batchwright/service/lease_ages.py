"""How long agents have been silent, by a clock that does not jump.

The wall clock may be set, and machines that share a database have several. So each process notes
by its own steady clock when it first saw an agent's newest word, and counts from there: nobody
loses a job because of a clock. A process that starts has seen nothing yet, so everybody gets a
whole lease from it.

Time in which nobody could be heard does not count: while the database was locked, or the process
stood still. `tick` notes that words could be taken in; a gap between two of these is no silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable

TOLERANCE = 1 / 6
"""Share of a lease: in a longer gap between two ticks nobody could be heard."""


class LeaseAges:
    """Seconds since the last word on each job. Safe to use from several threads.

    Args:
        steady: A clock that never goes back, in seconds.
        seconds: Of a lease.
    """

    def __init__(self, steady: Callable[[], float], seconds: float) -> None:
        self._steady = steady
        self._tolerance = TOLERANCE * seconds
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[Hashable, float]] = {}
        self._ticked: float | None = None
        self._away = 0.0

    def silent(self, job: str, word: Hashable) -> float:
        """Seconds since the word on a job that is its newest was first seen here.

        Args:
            job: Identifier.
            word: Anything that changes with each word.
        """
        with self._lock:
            now = self._steady() - self._away
            known = self._heard.get(job)
            if known is None or known[0] != word:
                self._heard[job] = word, now
                return 0.0
            return max(0.0, now - known[1])

    def tick(self) -> None:
        """Words can be taken in now; to be called often, from the first time on."""
        with self._lock:
            now = self._steady()
            if self._ticked is not None and now - self._ticked > self._tolerance:
                self._away += now - self._ticked
            self._ticked = now

    def catch_up(self) -> None:
        """`tick`, unless it was never called: then nobody calls it regularly."""
        if self._ticked is not None:
            self.tick()

    def forget_except(self, jobs: Container[str]) -> None:
        """Forget all other jobs."""
        with self._lock:
            self._heard = {job: one for job, one in self._heard.items() if job in jobs}
