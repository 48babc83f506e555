"""How long each worker computes for a sample, from its rounds."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

LOOK_BACK = 3  # rounds: one that something disturbed must not move the shares


class SpeedEstimate:
    """Learns the workers' speeds round by round, anew in each row of the plan.

    A worker's very first round is left out: loaders start in it, caches are cold. As published, the
    last round alone tells, be it the first.
    """

    def __init__(self, *, published: bool = False) -> None:
        self._published = published
        self._known: set[int] = set()
        self._stage = 0
        rounds = 1 if published else LOOK_BACK
        self._latest: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=rounds))

    def add(self, worker: int, stage: int, samples: int, seconds: float) -> None:
        """A worker's round of ``samples`` in a row of the plan was computed in so many seconds."""
        if stage > self._stage:
            self._stage = stage
            self._latest.clear()
        if (self._published or worker in self._known) and stage == self._stage:
            self._latest[worker].append(seconds / samples)
        self._known.add(worker)

    @property
    def seconds(self) -> dict[int, float]:
        """Per sample, of each worker with a round in the row of the plan that is in progress."""
        return {worker: median(latest) for worker, latest in self._latest.items() if latest}
