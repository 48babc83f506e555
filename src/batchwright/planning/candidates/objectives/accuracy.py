"""Objectives that know accuracy: the most accurate, the quickest as accurate, and to a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter

from batchwright.algorithms.batch_size import as_compared
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.objectives.comparisons import EQUAL, accurate, target_seconds
from batchwright.planning.candidates.objectives.objective import Objective
from batchwright.planning.candidates.table import Row
from batchwright.records import Estimate
from batchwright.records.job_sections import NOT_OBSERVED
from batchwright.records.text.formatting import (
    counted,
    counted_points,
    number,
    percent,
    significant,
)


class MostAccurate(Objective):
    """The quickest of the most accurate candidates."""

    best_is = "most accurate candidate"
    by_accuracy = True

    def among(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Those whose accuracy is shown as that of the most accurate."""
        return accurate(rows, EQUAL)

    def why_size(self, row: Row, sizes: Sequence[Row]) -> str:
        """The reason for the number of workers."""
        if row.full_accuracy is None:
            return f"That of the quickest candidate ({self._named})."
        return super().why_size(row, sizes)

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:  # noqa: ARG002
        """The reason for the batch."""
        if row.full_accuracy is None:
            return (
                f"The quickest of the candidates within the limits ({self._named}). Their accuracy "
                "is not predicted, as all of them have too few steps."
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


class AccurateSoon(MostAccurate):
    """The quickest of the candidates that are as accurate as the best, within the tolerance."""

    mends_batches = "a larger probe.budget may for their times, probe.learning for their accuracy"
    saves_cost = True

    @property
    def _least(self) -> str:
        """``time`` or ``cost``, which is minimized: `goal.least` counts for a target alone."""
        return self.goal.least if self.goal.target is not None else "time"

    def value(self, row: Row) -> float:
        """Seconds or cost of the training; of one epoch where accuracy is not known."""
        whole = row.expense if self._least == "cost" else row.train_seconds
        # Without a prediction, limits may have cut epochs, so the value of one epoch is compared.
        return whole if row.full_accuracy is not None else whole / row.epochs

    def among(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Those within the tolerance; by other tasks' trainings also some of half the value."""
        near = accurate(rows, max(EQUAL, self.goal.accuracy_tolerance))
        if not self.progress.assumed:
            return near
        known, half = set(near), as_compared(min(map(self.value, near)) / 2)

        def worth_it(row: Row) -> bool:
            quick = as_compared(self.value(row)) <= half
            return quick and row.batch <= self.progress.doubtful_from(row.batch)

        wide = accurate(rows, max(EQUAL, self.tolerance))
        return [row for row in wide if row in known or worth_it(row)]

    def why_size(self, row: Row, sizes: Sequence[Row]) -> str:  # noqa: ARG002
        """The reason for the number of workers."""
        if row.full_accuracy is None:
            return f"That of the candidate with the least {self._least} an epoch ({self._named})."
        within = counted_points(self.tolerance)
        best = "cheapest" if self._least == "cost" else "quickest"
        return f"That of the {best} candidate within {within} of the most accurate ({self._named})."

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:
        """The reason for the batch, and what a more accurate one would take."""
        progress, least = self.progress, self._least
        half, end = "", progress.doubtful_from(row.batch)
        if progress.assumed:
            half = f", or within {NOT_OBSERVED} times that if they take half the {least}"
            half += f" and at most {number(end)} samples (gradient noise)" if end < inf else ""
        texts = [
            f"The least predicted {least} of the candidates within the limits that are as accurate "
            f"as the best within goal.accuracy_tolerance={self.goal.accuracy_tolerance:g}{half}"
            f"{self._accuracy_words(row)} ({self._named})."
        ]
        if row.full_accuracy is None:
            texts = [
                f"The least predicted {least} an epoch of the candidates within the limits "
                f"({self._named}). Their accuracy is not predicted, as all of them have too few "
                "steps."
            ]
        elif progress.assumed and knee:
            texts.append(self._trade(row, [one for one in knee.rows if not one.misses]))
        if progress.chooses:
            texts.append(
                f"For goal.accuracy={self.goal.accuracy:g} training takes "
                f"{counted(row.epochs, 'epoch')} of "
                f"{significant(row.epoch_seconds)} s, {progress.how_sure(row.batch)}."
            )
        return " ".join(filter(None, texts))

    def _trade(self, row: Row, rows: Sequence[Row]) -> str:
        """What the most accurate candidate would gain and take, in a sentence; empty if no gain."""
        # Small batches may be equally accurate; the quickest of these shows what the gain takes.
        best = max(rows, key=_accurate_and_quick, default=row)
        more = (best.full_accuracy or 0.0) - (row.full_accuracy or 0.0)
        if more <= EQUAL:
            return ""
        return (
            f"A batch of {best.batch} is expected to be {100 * more:.1f} points more "
            f"accurate{self._after}, in {best.epoch_seconds / row.epoch_seconds:.3g} times the "
            "time an epoch, but so small a difference is uncertain."
        )


def _accurate_and_quick(row: Row) -> tuple[float, float]:
    return as_compared(row.full_accuracy or 0.0), -as_compared(row.epoch_seconds)


class ToTarget(Objective):
    """The least time or cost of a training to an accuracy."""

    mends = mends_batches = "finished runs of several batches, or a larger probe.budget, may"
    by_seconds = False

    def value(self, row: Row) -> float:
        """Seconds or cost of a training to the target; infinite where it is not reached."""
        aim = attrgetter("expense" if self.goal.least == "cost" else "seconds")
        return float(aim(replace(row, target_seconds=target_seconds(row, self.progress))))

    def epochs(self, row: Row, chosen: Row) -> Estimate | None:
        """Epochs to the target over the chosen candidate's; `None` if not known."""
        return self.progress.compared_epochs(row.batch, chosen.batch)

    def why_batch(self, row: Row, knee: KneeFit | None) -> str:  # noqa: ARG002
        """The reason for the batch, with the epochs to the target if they are known."""
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
                f"No batch within the limits is known to reach {aim}, so the one with the least "
                f"time for the job's epochs is taken.{more}"
            )
        return (
            f"The least predicted {self.goal.least} to any accuracy, so to {aim}, by epoch time "
            "over progress per sample (efficiency). No run with such a batch reached it, so the "
            "number of epochs is not known. Seconds to equal progress are those until training "
            f"has come as far as one epoch with the base batch does.{more}"
        )
