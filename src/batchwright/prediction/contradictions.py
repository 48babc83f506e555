"""Measured step times that cannot both be right, and what is believed of them.

A larger batch cannot take far less time than a smaller one. On a busy machine a few visits to a
point can fall into one slow stretch, and then it seems to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import hypot, log, sqrt
from typing import TypeVar

from batchwright.prediction.drift import Drift, drift_by_workers, point_error, point_seconds
from batchwright.records import HeldOut, MemoryPoint, OutOfMemory, StepTime
from batchwright.records.text.formatting import counted

Key = tuple[int, int, int]
"""Key of a measured point: workers, resolution in pixels, local batch in samples."""

Placed = TypeVar("Placed", StepTime, HeldOut)

_MIN_RATIO = 2.0  # a larger batch may not take less than this part of a smaller one's time
_MIN_ERRORS = 4.0  # nor is it said of what scatter explains


def contradictions(
    points: Sequence[StepTime], drifts: Mapping[int, Drift] | None = None
) -> list[tuple[StepTime, StepTime]]:
    """Pairs of a batch and the next larger one measured, which takes far less time.

    ``drifts`` are by number of workers; unset: as the points show them.
    """
    drifts = drift_by_workers(points) if drifts is None else drifts
    found = []
    for (workers, _), group in grouped(points).items():
        drift = drifts[workers].share
        for small, large in pairwise(group):
            drop = log(point_seconds(small) / point_seconds(large))
            error = hypot(point_error(small, drift), point_error(large, drift))
            if drop > max(log(_MIN_RATIO), _MIN_ERRORS * error):
                found.append((small, large))
    return found


def point_errors(
    points: Sequence[StepTime],
    drifts: Mapping[int, Drift],
    doubtful: Sequence[tuple[StepTime, StepTime]],
) -> dict[Key, float]:
    """Relative standard error of each point's time.

    Which of two that contradict each other is wrong cannot be told from them, so both get errors
    that make their difference one standard error: the points around them decide, the intervals
    are wide, and a disturbed probe still gives a plan. ``doubtful`` is what `contradictions` says.
    """
    errors = {key_of(point): point_error(point, drifts[point.workers].share) for point in points}
    for small, large in doubtful:
        apart = log(point_seconds(small) / point_seconds(large)) / sqrt(2)
        for point in (small, large):
            errors[key_of(point)] = max(errors[key_of(point)], apart)
    return errors


def grouped(points: Iterable[Placed]) -> dict[tuple[int, int], list[Placed]]:
    """Points by workers and resolution, each by batch."""
    groups: dict[tuple[int, int], list[Placed]] = {}
    for point in sorted(points, key=key_of):
        groups.setdefault((point.workers, point.resolution), []).append(point)
    return groups


def key_of(point: StepTime | MemoryPoint | OutOfMemory | HeldOut) -> Key:
    """Workers, resolution and local batch of a point."""
    return point.workers, point.resolution, point.local_batch_size


def place_of(point: StepTime) -> str:
    """A point in words."""
    return (
        f"local batch {point.local_batch_size} at resolution {point.resolution} with "
        f"{counted(point.workers, 'worker')}"
    )
