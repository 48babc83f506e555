"""Finds measured step times that contradict each other, and widens their errors.

A larger batch cannot take far less time than a smaller one. On a busy machine all visits to a point
may fall into a slow stretch, and then it seems so.
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

_MIN_RATIO = 2.0  # least time of a smaller batch over that of a larger one that is a contradiction
_MIN_ERRORS = 4.0  # least difference, in standard errors, that is one


def contradictions(
    points: Sequence[StepTime], drifts: Mapping[int, Drift] | None = None
) -> list[tuple[StepTime, StepTime]]:
    """Pairs of a batch and the next larger measured one that takes far less time.

    ``drifts``: Drift by number of workers; unset: as the points show it.
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

    It is not known which of two contradicting points is wrong, so both get an error that makes
    their difference one standard error. Then the points around them decide, the intervals are wide,
    and a disturbed probe still gives a plan.

    Args:
        points: Measured steps.
        drifts: Drift by number of workers.
        doubtful: Pairs that contradict each other, from `contradictions`.
    """
    errors = {key_of(point): point_error(point, drifts[point.workers].share) for point in points}
    for small, large in doubtful:
        apart = log(point_seconds(small) / point_seconds(large)) / sqrt(2)
        for point in (small, large):
            errors[key_of(point)] = max(errors[key_of(point)], apart)
    return errors


def grouped(points: Iterable[Placed]) -> dict[tuple[int, int], list[Placed]]:
    """Points by number of workers and resolution, sorted by batch."""
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
