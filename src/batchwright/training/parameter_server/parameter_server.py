"""A parameter server: rounds out, models in, merged as the plan says. No transport, no clock.

    weights, ticket = server.weights, server.take(worker)   # as soon as server.ready(worker)
    server.push(worker, trained)                            # merged now, or once all are there

Processes reach it through `server_process`; the virtual cluster calls it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.records import Plan
from batchwright.training.parameter_server.merging import Weights, merge, weighted_mean
from batchwright.training.parameter_server.rounds import RoundAssignment, Rounds


class ParameterServer:
    """Keeps the model that workers train in rounds, and merges their models into it.

    With ``bsp`` (and ``ssp`` of staleness 0, which is the same) models wait until those of all
    members are there, and are merged into their weighted mean in rank order. Otherwise each is
    merged as it comes. Nothing here is safe to call from two threads at once.

    Args:
        weights: The model to start from.
        plan: A plan with a parameter server.
        samples: Size of the data set.

    Attributes:
        weights: The merged model; replaced, never changed in place, so a pull needs no copy.
        rounds: Which worker trains on which samples.
        merges: Number of merges so far.
    """

    def __init__(self, weights: Weights, plan: Plan, samples: int) -> None:
        assert plan.server is not None  # noqa: S101 - such plans have none of the others
        self._rule = plan.server
        self.weights = weights
        self.rounds = Rounds(plan, samples)
        self.merges = 0
        self._waiting: dict[int, tuple[Weights, float]] = {}

    @property
    def together(self) -> bool:
        """Whether all workers' models are merged at once."""
        rule = self._rule
        return rule.consistency == "bsp" or (rule.consistency == "ssp" and rule.staleness == 0)

    @property
    def merged(self) -> bool:
        """Whether all models that were pushed are merged; else some wait for those of others."""
        return not self._waiting

    def ready(self, worker: int) -> bool:
        """Whether a worker may pull the weights and begin its next round."""
        return worker not in self._waiting and self.rounds.ready(worker)

    def take(self, worker: int) -> RoundAssignment | None:
        """The worker's next round; ``None`` if there is none left."""
        ticket = self.rounds.take(worker)
        if ticket is None:
            self._merge_if_complete()  # nobody has to wait for this worker any more
        return ticket

    def push(self, worker: int, weights: Weights) -> RoundAssignment:
        """End a worker's round with the model that it has trained; the server may keep that.

        Returns:
            The round that has ended.
        """
        ticket = self.rounds.commit(worker)
        if self.together:
            self._waiting[worker] = weights, ticket.factor
            self._merge_if_complete()
        else:
            merged = self.weights.clone()
            merge(merged, weights, ticket.factor, self._rule.merge)
            self.weights = merged
            self.merges += 1
        return ticket

    def lose(self, worker: int, *, for_good: bool) -> None:
        """Note that a worker is lost, as `Rounds.lose`; a model that it has pushed still counts."""
        self.rounds.lose(worker, for_good=for_good)
        self._merge_if_complete()

    def come_back(self, worker: int) -> None:
        """Take a lost worker back; its unfinished round is its next."""
        self.rounds.come_back(worker)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "floats": self.weights.floats,
            "integers": self.weights.integers,
            "rounds": self.rounds.state_dict(),
            "merges": self.merges,
            "waiting": {
                worker: (weights.floats, weights.integers, factor)
                for worker, (weights, factor) in self._waiting.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.weights = Weights(state["floats"], state["integers"])
        rounds = state["rounds"]
        if "slowest" not in rounds:
            # An earlier version's checkpoint does not say who was away: all begin level with the
            # furthest, except workers whose models wait, which are one round ahead.
            furthest = max(rounds["ended"].values())
            rounds = {**rounds, "slowest": furthest - bool(state["waiting"])}
        self.rounds.load_state_dict(rounds)
        self.merges = state["merges"]
        self._waiting = {
            worker: (Weights(floats, integers), factor)
            for worker, (floats, integers, factor) in state["waiting"].items()
        }

    def _merge_if_complete(self) -> None:
        """Merge the waiting models once no member's is missing, or none comes any more."""
        complete = self.rounds.finished or set(self.rounds.members) <= set(self._waiting)
        if not (self._waiting and complete):
            return
        self.weights = weighted_mean([self._waiting[worker] for worker in sorted(self._waiting)])
        self._waiting.clear()
        self.merges += 1
