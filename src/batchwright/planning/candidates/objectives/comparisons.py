"""How candidates are compared: by accuracy, time, and time to a target; the Pareto-optimal ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import le

from batchwright.algorithms.batch_size import as_compared
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Row

EQUAL = 0.0005
"""Largest difference of two accuracies, shares, that are shown as the same."""

MIN_SAVING = 0.02
"""Share of the time that a dearer candidate must save: less is within the error of predictions."""


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the Pareto-optimal points, where smaller is better; rising.

    A point is left out if another point is at most as large in all coordinates and smaller in one,
    by `as_compared`. Equal points all stay.

    Example:
        >>> pareto([(1, 9), (2, 3), (3, 3), (4, 1)])
        [0, 1, 3]
    """
    points = [tuple(map(as_compared, point)) for point in points]
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
    least = as_compared(max(known.values(), default=0.0) - tolerance)
    return [row for row, one in known.items() if as_compared(one) >= least] or list(rows)


def by_time(row: Row) -> tuple[float, int, str, int]:
    """Sort key: the quickest first; of equally quick candidates the smallest."""
    return as_compared(row.train_seconds), row.cluster.workers, str(row.cluster), row.batch


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
