"""Which worker evaluates which epochs under a parameter server, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.training.parameter_server.merging import Weights
from batchwright.training.parameter_server.messages import Settled


class Evaluations:
    """Epochs that have no scores yet are scored with the next model that a worker gets.

    An epoch belongs to the worker that ended it, until that worker is lost; then to whoever is
    answered next. So a loss costs no epoch its scores as long as somebody is there.

    Attributes:
        scores: Means of the last evaluation, by name.
        best_score: Highest first score so far.
    """

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.best_score = -float("inf")
        self._unscored: dict[int, int | None] = {}  # whose each epoch is; None: the next one's
        self._asked: dict[int, tuple[tuple[int, ...], Weights]] = {}
        self._best: Weights | None = None

    @property
    def missing(self) -> bool:
        """Whether an epoch has no scores yet."""
        return bool(self._unscored)

    def want(self, epoch: int, rank: int) -> None:
        """An epoch is to be evaluated, by the worker that ended it."""
        self._unscored[epoch] = rank

    def ask(self, rank: int, weights: Weights) -> int | None:
        """A worker gets a model; returns the last epoch that it shall evaluate with it, if any."""
        epochs = tuple(epoch for epoch, who in self._unscored.items() if who in (rank, None))
        if epochs:
            self._unscored.update(dict.fromkeys(epochs, rank))
            self._asked[rank] = epochs, weights
        return max(epochs, default=None)

    def forget(self, rank: int) -> None:
        """A worker is lost: another has to evaluate its epochs."""
        self._asked.pop(rank, None)
        for epoch, worker in self._unscored.items():
            if worker == rank:
                self._unscored[epoch] = None

    def take(self, rank: int, settled: Settled) -> tuple[int, ...]:
        """What a worker tells after it got a model.

        Returns:
            The epochs that it has scored: none if it was asked for none, or its loop has no scores.
        """
        epochs, weights = self._asked.pop(rank, ((), None))
        for epoch in epochs:
            del self._unscored[epoch]
        if not epochs or not settled.scores:
            return ()
        self.scores = {name: value / settled.count for name, value in settled.scores.items()}
        score = next(iter(self.scores.values()))
        if score > self.best_score:
            self.best_score, self._best = score, weights
        return epochs

    def take_best(self) -> Weights | None:
        """The model that is the best so far, if nobody has taken it yet."""
        best, self._best = self._best, None
        return best

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"scores": dict(self.scores), "unscored": list(self._unscored)}

    def restore(self, values: Mapping[str, Any], best_score: float) -> None:
        """Go on from a checkpoint; nobody has come yet."""
        self.scores, self.best_score = dict(values["scores"]), best_score
        self._unscored = dict.fromkeys(values.get("unscored", ()))
