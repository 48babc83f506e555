"""The objectives of a goal: which candidate each one chooses, what is level with it, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot, inf, log, sqrt
from operator import attrgetter, le
from typing import ClassVar

from batchwright.algorithms.batch_size import knee_point
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.level import level_batches, level_in_value, level_sizes
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Row, Table
from batchwright.planning.chosen import Chosen
from batchwright.prediction.fit import Z_975
from batchwright.records import Estimate, Goal, Source
from batchwright.records.job_sections import NOT_OBSERVED
from batchwright.records.text.formatting import (
    counted,
    counted_points,
    number,
    percent,
    significant,
)

EQUAL = 0.0005
"""Largest difference of two accuracies, shares, that are shown as the same."""

MIN_SAVING = 0.02
"""Share of the time that a dearer candidate must save: less is within the error of predictions."""

_FEW_LEVEL = 4  # most level candidates that are named


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the Pareto-optimal points, where smaller is better; rising.

    A point is left out if another point is at most as large in all coordinates and smaller in one.
    Equal points all stay.

    Example:
        >>> pareto([(1, 9), (2, 3), (3, 3), (4, 1)])
        [0, 1, 3]
    """
    kept: list[int] = []
    edge: set[tuple[float, ...]] = set()
    # In sorted order no later point is better than an earlier one.
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if point in edge or not any(all(map(le, other, point)) for other in edge):
            kept.append(index)
            edge.add(point)
    return sorted(kept)


def accurate(rows: Sequence[Row], tolerance: float) -> list[Row]:
    """Candidates as accurate after all epochs as the most accurate, within a tolerance, a share.

    Candidates without a prediction are left out, unless none has one: then all are returned.
    """
    known = {row: row.full_accuracy for row in rows if row.full_accuracy is not None}
    least = max(known.values(), default=0.0) - tolerance
    return [row for row, accuracy in known.items() if accuracy >= least] or list(rows)


def by_time(row: Row) -> tuple[float, int, str, int]:
    """Sort key: the quickest first; of equally quick candidates the smallest."""
    return row.train_seconds, row.cluster.workers, str(row.cluster), row.batch


def target_seconds(row: Row, progress: Progress) -> float:
    """Seconds of training to the target accuracy.

    Where the plan chooses the epochs: the seconds of the training, divided by its probability of
    success if that is below the confidence asked for. Elsewhere: the seconds of an epoch times the
    epochs to the target or, where these are not known, times the epochs that make as much progress
    as one with the base batch. Infinite where the target is not reached, or where runs with such a
    batch missed it.
    """
    if progress.chooses:
        if progress.needed(row.batch, row.epochs) is not None:
            return row.train_seconds
        chance = progress.chance(row.batch, row.epochs)
        return row.train_seconds / chance if chance else inf
    return row.epoch_seconds * (progress.relative_epochs(row.batch) or 1.0)


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
        return min(self.among(rows), key=lambda row: (self.value(row), *by_time(row)))

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
            and (1 - MIN_SAVING) * self.value(row) < self.value(best) <= self.value(row)
            and (self.table.far_off(best) or not self.table.far_off(row))
            and self._as_good(row, best)
        ]
        return min([best, *near], key=lambda row: (self.value(row) * row.expense, *by_time(row)))

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
            self.table,
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
        more = [f"{len(others) - _FEW_LEVEL} more"] if len(others) > _FEW_LEVEL else []
        *first, last = [*others[:_FEW_LEVEL], *more]
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


class _LeastCost(Objective):
    """The cheapest candidate."""

    what = "cost"

    def value(self, row: Row) -> float:
        return row.cost or 0.0


class _MostAccurate(Objective):
    """The quickest of the most accurate candidates."""

    best_is = "most accurate candidate"
    by_accuracy = True

    def among(self, rows: Sequence[Row]) -> Sequence[Row]:
        return accurate(rows, EQUAL)

    def why_size(self, row: Row, sizes: Sequence[Row]) -> str:
        if row.full_accuracy is None:
            return f"That of the quickest candidate ({self._named})."
        return super().why_size(row, sizes)

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:  # noqa: ARG002
        if row.full_accuracy is None:
            return (
                "The quickest of the candidates within the limits, all of which have too few steps "
                f"to tell anything of ({self._named})."
            )
        return (
            f"The most accurate of the candidates within the limits{self._accuracy_words(row)}, "
            f"and of those that are shown as equal the quickest ({self._named})."
        )

    def _accuracy_words(self, row: Row) -> str:
        if row.full_accuracy is None:
            return " held out"
        expected = "expected from other tasks' trainings, " if self.progress.assumed else ""
        return f": {expected}{percent(row.full_accuracy)} held out{self._after}"

    @property
    def _after(self) -> str:
        """After which training that is, in words: candidates are compared after all epochs."""
        return " after all epochs that may be trained" if self.progress.chooses else ""


class _AccurateSoon(_MostAccurate):
    """The quickest of the candidates that are as accurate as the best, within the tolerance."""

    mends_batches = "a larger probe.budget may for their times, probe.learning for their accuracy"
    saves_cost = True

    @property
    def _least(self) -> str:
        """``time`` or ``cost``, which is minimized: `goal.least` counts for a target alone."""
        return self.goal.least if self.goal.target is not None else "time"

    def value(self, row: Row) -> float:
        whole = row.expense if self._least == "cost" else row.train_seconds
        # Without a prediction, limits may have cut epochs, so the value of one epoch is compared.
        return whole if row.full_accuracy is not None else whole / row.epochs

    def among(self, rows: Sequence[Row]) -> Sequence[Row]:
        near = accurate(rows, max(EQUAL, self.goal.accuracy_tolerance))
        if not self.progress.assumed:
            return near
        known, half = set(near), min(map(self.value, near)) / 2
        wide = accurate(rows, max(EQUAL, self.tolerance))
        return [
            row
            for row in wide
            if row in known
            or (self.value(row) <= half and row.batch <= self.progress.doubtful_from(row.batch))
        ]

    def why_size(self, row: Row, sizes: Sequence[Row]) -> str:  # noqa: ARG002
        if row.full_accuracy is None:
            return f"That of the candidate with the least {self._least} an epoch ({self._named})."
        within = counted_points(self.tolerance)
        best = "cheapest" if self._least == "cost" else "quickest"
        return f"That of the {best} candidate within {within} of the most accurate ({self._named})."

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:
        progress, least = self.progress, self._least
        half, end = "", progress.doubtful_from(row.batch)
        if progress.assumed:
            half = f", or {NOT_OBSERVED} times that for half the {least}"
            half += f" with at most {number(end)} samples (gradient noise)" if end < inf else ""
        texts = [
            f"The least predicted {least} of the candidates within the limits that are as accurate "
            f"as the best within goal.accuracy_tolerance={self.goal.accuracy_tolerance:g}{half}"
            f"{self._accuracy_words(row)} ({self._named})."
        ]
        if row.full_accuracy is None:
            texts = [
                f"The least predicted {least} an epoch of the candidates within the limits, all of "
                f"which have too few steps to tell anything of ({self._named})."
            ]
        elif progress.assumed and knee:
            texts.append(self._trade(row, [one for one in knee.rows if not one.misses]))
        if progress.chooses:
            texts.append(
                f"To goal.accuracy={self.goal.accuracy:g} {counted(row.epochs, 'epoch')} of "
                f"{significant(row.epoch_seconds)} s, {progress.how_sure(row.batch)}."
            )
        return " ".join(filter(None, texts))

    def _trade(self, row: Row, rows: Sequence[Row]) -> str:
        """What the most accurate candidate would gain and take, in a sentence; empty if no gain."""
        # Small batches may be equally accurate; the quickest of these shows what the gain takes.
        best = max(
            rows, key=lambda one: (one.full_accuracy or 0.0, -one.epoch_seconds), default=row
        )
        more = (best.full_accuracy or 0.0) - (row.full_accuracy or 0.0)
        if more <= EQUAL:
            return ""
        return (
            f"With {best.batch}, {100 * more:.1f} points more are expected{self._after}, in "
            f"{best.epoch_seconds / row.epoch_seconds:.3g} times the time an epoch; so small a "
            "difference is uncertain."
        )


class _ToTarget(Objective):
    """The least time or cost of a training to an accuracy."""

    mends = mends_batches = "finished runs of several batches, or a larger probe.budget, may"
    by_seconds = False

    def value(self, row: Row) -> float:
        aim = attrgetter("expense" if self.goal.least == "cost" else "seconds")
        return float(aim(replace(row, target_seconds=target_seconds(row, self.progress))))

    def epochs(self, row: Row, chosen: Row) -> Estimate | None:
        return self.progress.compared_epochs(row.batch, chosen.batch)

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:  # noqa: ARG002
        progress, aim = self.progress, f"goal.accuracy={self.goal.accuracy:g}"
        missed = progress.model(row.batch).missed
        more = f" Of those given, {missed}." if missed else ""
        if progress.chooses:
            return (
                f"The least predicted {self.goal.least} to {aim}: {counted(row.epochs, 'epoch')} "
                f"of {significant(row.epoch_seconds)} s, {progress.how_sure(row.batch)}.{more}"
            )
        if progress.relative_epochs(row.batch) == inf:
            return (
                f"No batch within the limits is known to reach {aim}: the least time for the job's "
                f"epochs.{more}"
            )
        return (
            f"The least predicted {self.goal.least} to any accuracy, so to {aim}, by epoch time "
            "over progress per sample (efficiency). No run with such a batch reached it, so the "
            "number of epochs is not known: seconds to equal progress are for as much as an epoch "
            f"with the base batch makes.{more}"
        )


class _AtTheKnee(Objective):
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
            return min(edge, key=lambda row: (row.train_seconds * row.expense, *by_time(row)))
        steps = _quickest(sizes)
        for row, larger in pairwise(steps):
            if 1 - larger.train_seconds / row.train_seconds <= self.goal.doubling_gain:
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
        sizes, gain = self.sizes(rows), self.goal.doubling_gain
        knee = next((knee for knee in self.knees if knee.cluster is chosen.cluster), None)
        batches: tuple[Row, ...] = ()
        if knee is None or knee.best in (None, chosen):
            batches = level_batches(chosen, rows, knee, gain)
        if not _priced(sizes):
            return (*batches, *level_sizes(self.table, chosen, _quickest(sizes)))

        def value(row: Row) -> float:  # the root of time x cost is in proportion to the time
            return sqrt(row.train_seconds * row.expense)

        return (*batches, *level_in_value(self.table, chosen, sizes, (), value))

    def why_size(self, row: Row, sizes: Sequence[Row]) -> str:
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


class _WorthItsTime(_AtTheKnee):
    """The knee, or a smaller batch if by gradient noise larger ones make less progress in a time.

    A GPU may save time up to thousands of images a step, most of which add no progress.
    """

    @property
    def without_accuracy(self) -> str:
        noise = self.progress.noise(self.progress.base_batch)
        by = "alone, as knee does" if noise is None else "and gradient noise"
        return f" So {self._named} goes by time {by}."

    def taken(self, knee: KneeFit) -> Row | None:
        best = knee.best
        if best is None:
            return None
        rows = {row.batch: row for row in knee.rows if not row.misses and row.batch <= best.batch}
        return rows[self.progress.worthwhile([*rows], lambda batch: rows[batch].epoch_seconds)]

    def alone(
        self, batches: Sequence[int], per_sample: Callable[[int], float]
    ) -> Chosen[int] | None:
        found = super().alone(batches, per_sample)
        up_to = [batch for batch in batches if found is None or batch <= found.value]
        batch = self.progress.worthwhile(up_to, per_sample)
        if batch == up_to[-1]:
            return found
        larger = up_to[up_to.index(batch) + 1]
        why = self.progress.why_no_larger(batch, larger, per_sample(larger) / per_sample(batch))
        return Chosen(batch, f"By time and gradient noise, for one worker. {why}", "predicted")

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:
        if knee is None or knee.best is None or knee.best.batch <= row.batch:
            return super().why_batch(row, knee)
        larger = next(one for one in knee.rows if one.batch > row.batch)
        seconds = larger.epoch_seconds / row.epoch_seconds
        return (
            f"{self.progress.why_no_larger(row.batch, larger.batch, seconds)} By time alone "
            f"doublings pay up to {knee.best.batch} (goal.objective=knee)."
        )


def _auto(table: Table, knees: Sequence[KneeFit], progress: Progress) -> Objective:
    kind = _AccurateSoon if progress.tells_accuracy else _WorthItsTime
    return kind(table, knees, progress)


def _to_target(table: Table, knees: Sequence[KneeFit], progress: Progress) -> Objective:
    """The objective of trainings to an accuracy.

    Where accuracy rests on other tasks alone, a batch is chosen by accuracy, as without a target.
    The least time over the chance of success would suppose tries that are independent, but all have
    the level of the task in common, which is what is not known.
    """
    if progress.chooses and progress.assumed:
        return _auto(table, knees, progress)
    return _ToTarget(table, knees, progress)


OBJECTIVES: dict[str, Callable[[Table, Sequence[KneeFit], Progress], Objective]] = {
    "auto": _auto,
    "accuracy": _MostAccurate,
    "cost": _LeastCost,
    "knee": _AtTheKnee,
    "target-accuracy": _to_target,
    "time": Objective,
}


def _priced(rows: Sequence[Row]) -> bool:
    return all(row.cost is not None and not row.beside_unpriced for row in rows)


def _quickest(rows: Sequence[Row]) -> list[Row]:
    """The quickest of each size, small sizes first."""
    quickest: dict[int, Row] = {}
    for row in sorted(rows, key=by_time):
        quickest.setdefault(row.cluster.workers, row)
    return [quickest[workers] for workers in sorted(quickest)]
