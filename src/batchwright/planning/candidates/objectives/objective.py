"""What an objective decides and explains, here by time; the objective that goes by cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot, inf, log
from typing import ClassVar

from batchwright.algorithms.batch_size import as_compared
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.level import level_in_value
from batchwright.planning.candidates.objectives.comparisons import MIN_SAVING, by_time
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Row, Table
from batchwright.planning.chosen import Chosen
from batchwright.prediction.fit import Z_975
from batchwright.records import Estimate, Goal, Source

_FEW_LEVEL = 5  # of more level candidates than that, all but four are only counted


@dataclass(frozen=True)
class Objective:
    """An objective, which minimizes a value; this class itself minimizes time."""

    table: Table  # the candidates' predictions, with their errors
    knees: Sequence[KneeFit]  # the knee of each cluster at the highest resolution
    progress: Progress  # what a batch means for progress
    what: ClassVar[str] = "time"  # the value, in words
    best_is: ClassVar[str] = "best candidate"  # the chosen candidate, in words
    # What may tell level candidates apart, in words.
    mends: ClassVar[str] = "a larger probe.budget may"
    mends_batches: ClassVar[str] = mends  # `mends` for candidates that differ in the batch
    by_accuracy: ClassVar[bool] = False  # whether accuracy decides
    # Whether the value is in proportion to the time of a step alone.
    by_seconds: ClassVar[bool] = True
    # Whether a cheaper candidate is taken if it takes about as long.
    saves_cost: ClassVar[bool] = False

    @property
    def goal(self) -> Goal:
        """The job's goal, with its limits and tolerances."""
        return self.table.job.goal

    def value(self, row: Row) -> float:
        """The value that this objective minimizes."""
        return row.train_seconds

    def among(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Candidates from which the one with the least value is taken."""
        return rows

    def epochs(self, row: Row, chosen: Row) -> Estimate | None:  # noqa: ARG002
        """Epochs of a candidate over the chosen one's, where the value depends on them."""
        return None

    def best(self, rows: Sequence[Row]) -> Row:
        """The candidate to take; ``rows`` are those within the limits."""
        return min(self.among(rows), key=lambda row: (as_compared(self.value(row)), *by_time(row)))

    def known(self, best: Row, rows: Sequence[Row]) -> Row:
        """The candidate to take in place of the ``best``, where that is far from all measurements.

        A step with far more images at once than any that was timed may be slower than its line
        says, because of caches and allocation. So the best candidate near the measurements is
        taken, if measurements cannot tell it from the best.

        Args:
            best: The candidate with the least value.
            rows: Candidates within the limits.
        """
        far_off = self.table.far_off
        if not self.by_seconds or not far_off(best) or self.value(best) in (0.0, inf):
            return best
        near = [row for row in self.among(rows) if not far_off(row) and self._as_good(row, best)]
        return self.best(near) if near else best

    def thrifty(self, best: Row, rows: Sequence[Row]) -> Row:
        """The candidate to take in place of the ``best`` where a cheaper one is about as quick.

        Of the best and of candidates of other clusters, the one with the least time x cost is
        taken. Such a candidate takes less than `MIN_SAVING` longer, measurements cannot tell it
        from the best, and it is far from what was measured only if the best is. Without a price the
        cost is in worker-hours. Arguments are those of `known`.
        """
        if not self.saves_cost or best.full_accuracy is None:
            return best
        near = [
            row
            for row in self.among(rows)
            if row.cluster is not best.cluster
            and (1 - MIN_SAVING) * self.value(row) < self.value(best)
            and as_compared(self.value(best)) <= as_compared(self.value(row))
            and (self.table.far_off(best) or not self.table.far_off(row))
            and self._as_good(row, best)
        ]
        return min([best, *near], key=self._time_and_cost)

    def _time_and_cost(self, row: Row) -> tuple[float, float, int, str, int]:
        """Sort key: the least product of the value and the cost first."""
        return as_compared(self.value(row) * row.expense), *by_time(row)

    def _as_good(self, row: Row, best: Row) -> bool:
        """Whether measurements cannot tell that a candidate's value is above the best's."""
        larger = log(self.value(row) / self.value(best))
        return larger <= Z_975 * hypot(self.table.error(row), self.table.error(best))

    def alone(
        self,
        batches: Sequence[int],  # noqa: ARG002
        per_sample: Callable[[int], float],  # noqa: ARG002
    ) -> Chosen[int] | None:
        """The batch of a worker that steps by itself, where only the time of its steps matters.

        Args:
            batches: Batches within the limits, rising, at least one.
            per_sample: batch -> seconds of such a step over its samples.

        Returns:
            The batch and the reason; `None` where the objective does not go by the knee.
        """
        return None

    def sizes(self, rows: Sequence[Row]) -> list[Row]:
        """The best candidate of each cluster, small clusters first."""
        by_cluster: dict[ClusterOption, list[Row]] = {}
        for row in rows:
            by_cluster.setdefault(row.cluster, []).append(row)
        return sorted(map(self.best, by_cluster.values()), key=lambda row: row.order)

    def level(self, chosen: Row, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Candidates that measurements cannot tell from the chosen one."""
        return level_in_value(
            self.table.error,
            chosen,
            self.among(rows),
            self.knees,
            self.value,
            lambda row: self.epochs(row, chosen),
        )

    def level_words(self, others: Sequence[str], *, batches: bool = False) -> str:
        """A sentence that names the candidates which are level with the choice; empty without any.

        Args:
            others: Names of these candidates.
            batches: Whether they differ in the batch, and so in accuracy.
        """
        if not others:
            return ""
        few = list(others)
        if len(few) > _FEW_LEVEL:
            few[_FEW_LEVEL - 1 :] = [f"{len(few) - _FEW_LEVEL + 1} more"]
        *first, last = few
        named = f"{', '.join(first)} and {last}" if first else last
        mends = self.mends_batches if batches else self.mends
        unit = " samples" if batches else ""
        words = "What was measured does not tell which is better"
        return f"May be as good: {named}{unit}. {words}; {mends}."

    @property
    def source(self) -> Source:
        """What the choice rests on: a prediction, or an assumption."""
        return "assumed" if self.by_accuracy and self.progress.assumed else "predicted"

    @property
    def tolerance(self) -> float:
        """By how much candidates may be less accurate than the best, a share."""
        return self.goal.level_within(assumed=self.progress.assumed)

    @property
    def without_accuracy(self) -> str:
        """What decides where accuracy is not known, in a sentence; empty if it does not matter."""
        return ""

    @property
    def _named(self) -> str:
        return f"goal.objective={self.goal.objective}"

    def why_size(self, row: Row, sizes: Sequence[Row]) -> str:  # noqa: ARG002
        """The reason for the number of workers; ``sizes``: the best candidate of each cluster."""
        return f"That of the {self.best_is} ({self._named})."

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:  # noqa: ARG002
        """The reason for the batch; ``knee`` is its cluster's knee."""
        within = f"of the candidates within the limits ({self._named})"
        return f"The least predicted {self.what} {within}."


class LeastCost(Objective):
    """The cheapest candidate."""

    what = "cost"

    def value(self, row: Row) -> float:
        """Cost of the training; 0 without a price."""
        return row.cost or 0.0
