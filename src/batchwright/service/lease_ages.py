"""How long agents have been silent, by a clock that does not jump.

The wall clock may be set, and machines that share a database have several. So each process notes by
its own steady clock when it first saw an agent's newest report, and counts from there: no agent
loses a job because of a clock. A process that starts has seen no report, so every agent gets a
whole lease from it.

Time in which no report could be stored does not count: while the database was locked, or the
process stood still. `tick` says that reports can be stored; a longer pause between two calls is no
silence of an agent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable

TOLERANCE = 1 / 6
"""Share of the shortest silence: a longer pause between two calls of `tick` does not count."""


class LeaseAges:
    """Seconds since the last report on each job. Safe to use from several threads.

    Args:
        steady: A clock that never goes back, in seconds.
        seconds: Shortest silence after which anything is done, of an agent or of a run.
    """

    def __init__(self, steady: Callable[[], float], seconds: float) -> None:
        self._steady = steady
        self._tolerance = TOLERANCE * seconds
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[Hashable, float]] = {}  # by job: newest report, and when seen
        self._ticked: float | None = None
        self._away = 0.0  # seconds that do not count

    def silent(self, job: str, report: Hashable) -> float:
        """Seconds since the newest report on a job was first seen in this process.

        Args:
            job: Identifier of the job.
            report: A value that changes with each report.
        """
        with self._lock:
            now = self._steady() - self._away
            known = self._seen.get(job)
            if known is None or known[0] != report:
                self._seen[job] = report, now
                return 0.0
            return max(0.0, now - known[1])

    def away(self) -> float:
        """Seconds that do not count so far, those since the last `tick` included."""
        with self._lock:
            return self._away + self._pause(self._steady())

    def tick(self) -> None:
        """Note that reports can be stored now; to be called often, once it was called."""
        with self._lock:
            now = self._steady()
            self._away += self._pause(now)
            self._ticked = now

    def _pause(self, now: float) -> float:
        """Seconds since the last `tick`, if these do not count."""
        pause = 0.0 if self._ticked is None else now - self._ticked
        return pause if pause > self._tolerance else 0.0

    def catch_up(self) -> None:
        """`tick`, if this process calls it at all."""
        if self._ticked is not None:
            self.tick()

    def forget_except(self, jobs: Container[str]) -> None:
        """Forget all jobs but these."""
        with self._lock:
            self._seen = {job: seen for job, seen in self._seen.items() if job in jobs}
