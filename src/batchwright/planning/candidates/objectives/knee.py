"""Objectives that stop where more saves too little: the knee, and the batch worth its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt

from batchwright.algorithms.batch_size import as_compared, knee_point
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.level import level_batches, level_in_value, level_sizes
from batchwright.planning.candidates.objectives.comparisons import by_time, pareto
from batchwright.planning.candidates.objectives.objective import Objective
from batchwright.planning.candidates.table import Row
from batchwright.planning.chosen import Chosen
from batchwright.records.text.formatting import counted, percent, significant


class AtTheKnee(Objective):
    """The batch where doubling stops paying, and the cluster where the next size does."""

    by_seconds = False

    def best(self, rows: Sequence[Row]) -> Row:
        """The candidate to take of the knees of all clusters.

        It has the least product of time and cost. Without prices it is on the smallest cluster
        whose next size up saves too little time.
        """
        sizes = self.sizes(rows)
        if _priced(sizes):
            edge = [sizes[at] for at in pareto([(row.train_seconds, row.expense) for row in sizes])]
            product = {row: as_compared(row.train_seconds * row.expense) for row in edge}
            return min(edge, key=lambda row: (product[row], *by_time(row)))
        steps = _quickest(sizes)
        for row, larger in pairwise(steps):
            saves = as_compared(1 - larger.train_seconds / row.train_seconds)
            if saves <= self.goal.doubling_gain:
                return row
        return steps[-1]

    def sizes(self, rows: Sequence[Row]) -> list[Row]:
        """The candidate of each cluster at its knee or nearest to it, small clusters first."""
        allowed = set(rows)
        by_cluster = ((knee.cluster, self.taken(knee)) for knee in self.knees)
        found = {cluster: row for cluster, row in by_cluster if row and row in allowed}
        asked = [row for row in rows if row.cluster not in found]  # batches that the job gives
        return sorted([*found.values(), *asked], key=lambda row: row.order)

    def taken(self, knee: KneeFit) -> Row | None:
        """The candidate of a cluster that the objective takes; `None` if none is in the limits."""
        return knee.best

    def alone(
        self, batches: Sequence[int], per_sample: Callable[[int], float]
    ) -> Chosen[int] | None:
        """The knee of a worker that steps by itself; without one its largest batch."""
        gain = self.goal.doubling_gain
        knee = knee_point(batches, per_sample, gain)
        why = (
            f"the smallest batch whose doubling saves at most {percent(gain)} of the time per image"
        )
        if knee is None:
            knee = batches[-1]
            why = f"each doubling up to here saves more than {percent(gain)} of the time per image"
        return Chosen(knee, f"By time, for one worker: {why}.", "predicted")

    def level(self, chosen: Row, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Batches of its cluster that may be the knee, and other clusters that may be as good."""
        sizes, gain = self.sizes(rows), self.goal.doubling_gain
        knee = next((knee for knee in self.knees if knee.cluster is chosen.cluster), None)
        batches: tuple[Row, ...] = ()
        if knee is None or knee.best in (None, chosen):
            batches = level_batches(chosen, rows, knee, gain)
        if not _priced(sizes):
            return (*batches, *level_sizes(self.table.error, chosen, _quickest(sizes), gain))

        def value(row: Row) -> float:  # the root of time x cost is in proportion to the time
            return sqrt(row.train_seconds * row.expense)

        return (*batches, *level_in_value(self.table.error, chosen, sizes, (), value))

    def why_size(self, row: Row, sizes: Sequence[Row]) -> str:
        """The reason for the number of workers: what the next size up would save."""
        if _priced(sizes):
            return (
                "The least product of time and cost, each cluster at its knee: beyond it, one "
                "percent more cost buys less than one percent of the time."
            )
        gain = self.goal.doubling_gain
        larger = [one for one in sizes if one.cluster.workers > row.cluster.workers]
        if not larger:
            return (
                f"Each size up to here, at its own knee, saves more than {percent(gain)} of the "
                "training time; there are no more workers within the limits."
            )
        step = _quickest(larger)[0]
        saved = 1 - step.train_seconds / row.train_seconds
        says = f"save {percent(saved)}" if saved > 0 else f"take {percent(-saved)} more"
        return (
            f"The smallest number whose next size up saves at most {percent(gain)} of the training "
            f"time: {step.cluster.workers} would {says} of {significant(row.train_seconds)} s."
        )

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:
        """The reason for the batch: what doubling it would save, and what other rules say."""
        if knee is None:
            return "The only candidate."
        texts = [self._knee_or_not(row, knee)]
        if len(knee.rows) == 1:
            texts.insert(0, f"There is one candidate only, {knee.rows[0].batch}.")
        if knee.closed_form:
            texts.append(
                "The step time is a straight line in the batch, which puts the knee at "
                f"{knee.closed_form:.0f} samples."
            )
        if len(knee.rows) >= 3:
            says = f"says {knee.kneedle}; its answer moves with the range of candidates"
            if knee.kneedle is None:
                says = "finds no knee"
            elif knee.kneedle == row.batch:
                says = "says the same"
            texts.append(f"Kneedle over log2 of the same batches {says}.")
        return " ".join(texts)

    def _knee_or_not(self, row: Row, knee: KneeFit) -> str:
        share, at = percent(self.goal.doubling_gain), knee.row
        if at is None:
            return (
                f"There is no knee: each doubling up to here saves more than {share} of the time "
                "per image; this is the largest batch that fits the memory and leaves at least "
                f"{counted(self.goal.least_steps, 'step')} an epoch."
            )
        if knee.line is not None and knee.line[0] == 0:
            return (
                "There is no knee: a step takes time in proportion to its batch, so a larger one "
                "saves nothing; this is the smallest candidate."
            )
        twice = 2 * at.batch
        saves = 1 - knee.per_sample(twice) / at.per_sample
        would = f"save {percent(saves)}" if saves >= 0 else f"take {percent(-saves)} more"
        says = f"saves at most {share} of the time per image: {twice} would {would}"
        if row.batch == at.batch:
            return f"The smallest batch whose doubling {says}."
        missed = " and ".join(miss.text for miss in at.misses)
        return (
            f"The nearest within the limits to the knee {at.batch}, whose doubling {says}, but "
            f"which {missed}."
        )


class WorthItsTime(AtTheKnee):
    """The knee, or a smaller batch if by gradient noise larger ones make less progress in a time.

    A GPU may save time up to thousands of images a step, most of which add no progress.
    """

    @property
    def without_accuracy(self) -> str:
        """What decides instead of accuracy, in a sentence."""
        noise = self.progress.noise(self.progress.base_batch)
        by = "alone, as knee does" if noise is None else "and gradient noise"
        return f" So {self._named} goes by time {by}."

    def taken(self, knee: KneeFit) -> Row | None:
        """The knee, or the smaller batch up to which larger ones are worth their time."""
        best = knee.best
        if best is None:
            return None
        rows = {row.batch: row for row in knee.rows if not row.misses and row.batch <= best.batch}
        return rows[self.progress.worthwhile([*rows], lambda batch: rows[batch].epoch_seconds)]

    def alone(
        self, batches: Sequence[int], per_sample: Callable[[int], float]
    ) -> Chosen[int] | None:
        """The knee of a worker that steps by itself, or a smaller batch that is worth its time."""
        found = super().alone(batches, per_sample)
        up_to = [batch for batch in batches if found is None or batch <= found.value]
        batch = self.progress.worthwhile(up_to, per_sample)
        if batch == up_to[-1]:
            return found
        larger = up_to[up_to.index(batch) + 1]
        why = self.progress.why_no_larger(batch, larger, per_sample(larger) / per_sample(batch))
        return Chosen(batch, f"By time and gradient noise, for one worker. {why}", "predicted")

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:
        """The reason for the batch: why no larger one, and how far time alone would go."""
        if knee is None or knee.best is None or knee.best.batch <= row.batch:
            return super().why_batch(row, knee)
        larger = next(one for one in knee.rows if one.batch > row.batch)
        seconds = larger.epoch_seconds / row.epoch_seconds
        return (
            f"{self.progress.why_no_larger(row.batch, larger.batch, seconds)} By time alone "
            f"doublings pay up to {knee.best.batch} (goal.objective=knee)."
        )


def _priced(rows: Sequence[Row]) -> bool:
    return all(row.cost is not None and not row.beside_unpriced for row in rows)


def _quickest(rows: Sequence[Row]) -> list[Row]:
    """The quickest of each size, small sizes first."""
    quickest: dict[int, Row] = {}
    for row in sorted(rows, key=by_time):
        quickest.setdefault(row.cluster.workers, row)
    return [quickest[workers] for workers in sorted(quickest)]
