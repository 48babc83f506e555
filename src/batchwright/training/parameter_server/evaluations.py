"""Which worker evaluates which epochs under a parameter server, and the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.training.parameter_server.merging import Weights
from batchwright.training.parameter_server.messages import Settled
from batchwright.training.step.epoch_totals import BestScore


class Evaluations:
    """Assigns evaluations of epochs to workers, and keeps the scores.

    An epoch is evaluated by the worker that ended it, with the next model that it gets; if that
    worker is lost, by the next one that gets a model. So no epoch lacks scores while one is there.

    Attributes:
        scores: Means of the last evaluation over the held-out samples, by name.
        best: Score of the best evaluation so far.
    """

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.best = BestScore()
        self._unscored: dict[int, int | None] = {}  # by epoch, its worker; None: the next one
        self._asked: dict[int, tuple[tuple[int, ...], Weights]] = {}
        self._best_weights: Weights | None = None

    @property
    def missing(self) -> bool:
        """Whether an epoch has no scores yet."""
        return bool(self._unscored)

    def want(self, epoch: int, rank: int | None) -> None:
        """Have an epoch evaluated by ``rank``, the worker that ended it; ``None``: by the next."""
        self._unscored[epoch] = rank

    def wanted_of(self, rank: int) -> bool:
        """Whether an epoch is to be evaluated by ``rank``, or by the next worker that comes."""
        return any(worker in (rank, None) for worker in self._unscored.values())

    def ask(self, rank: int, weights: Weights) -> int | None:
        """Assign epochs to a worker that gets a model; returns the last of them, if any."""
        epochs = tuple(epoch for epoch, who in self._unscored.items() if who in (rank, None))
        if epochs:
            self._unscored.update(dict.fromkeys(epochs, rank))
            self._asked[rank] = epochs, weights
        return max(epochs, default=None)

    def forget(self, rank: int) -> None:
        """Have a lost worker's epochs evaluated by another."""
        self._asked.pop(rank, None)
        for epoch, worker in self._unscored.items():
            if worker == rank:
                self._unscored[epoch] = None

    def take(self, rank: int, settled: Settled) -> tuple[int, ...]:
        """Take the scores of a worker that got a model.

        Returns:
            The epochs that they are of; none if it was assigned none, or its loop has no scores.
        """
        epochs, weights = self._asked.pop(rank, ((), None))
        for epoch in epochs:
            del self._unscored[epoch]
        if not epochs or not settled.scores:
            return ()
        self.scores = {name: value / settled.count for name, value in settled.scores.items()}
        if self.best.note_score(settled.scores, settled.count):
            self._best_weights = weights
        return epochs

    def take_best(self) -> Weights | None:
        """The model that is the best so far; ``None`` if it was taken already."""
        best, self._best_weights = self._best_weights, None
        return best

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"scores": dict(self.scores), "unscored": list(self._unscored)}

    def restore(self, values: Mapping[str, Any], best: BestScore) -> None:
        """Go on from a checkpoint's `values`, before any worker has joined."""
        self.scores, self.best = dict(values["scores"]), best
        self._unscored = dict.fromkeys(values.get("unscored", ()))
