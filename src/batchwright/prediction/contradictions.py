"""Finds measured steps that were disturbed: a larger batch takes far less time.

Other programs make a step slower and never quicker. On a busy machine all visits to a point may
fall into a slow stretch; then a larger batch seems quicker, and its time is more than the smaller
one takes undisturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot, log
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
    """Disturbed points, each with the quickest of the larger batches that take far less time.

    ``drifts``: Drift by number of workers; unset: as the points show it.
    """
    drifts = drift_by_workers(points) if drifts is None else drifts
    found = []
    for (workers, _), group in grouped(points).items():
        drift = drifts[workers].share
        for i, small in enumerate(group):
            quicker = [large for large in group[i + 1 :] if _contradict(small, large, drift)]
            if quicker:
                found.append((small, min(quicker, key=point_seconds)))
    return found


def _contradict(small: StepTime, large: StepTime, drift: float) -> bool:
    drop = log(point_seconds(small) / point_seconds(large))
    error = hypot(point_error(small, drift), point_error(large, drift))
    return drop > max(log(_MIN_RATIO), _MIN_ERRORS * error)


def point_errors(
    points: Sequence[StepTime],
    drifts: Mapping[int, Drift],
    doubtful: Sequence[tuple[StepTime, StepTime]],
) -> dict[Key, float]:
    """Relative standard error of each point's time.

    A point that contradicts a larger batch has an error that makes their distance one standard
    error. Then the points around it decide, its interval is wide, and a disturbed probe still gives
    a plan.

    Args:
        points: Measured steps.
        drifts: Drift by number of workers.
        doubtful: Disturbed points and quicker ones, from `contradictions`.
    """
    errors = {key_of(point): point_error(point, drifts[point.workers].share) for point in points}
    for small, large in doubtful:
        apart = log(point_seconds(small) / point_seconds(large))
        errors[key_of(small)] = max(errors[key_of(small)], apart)
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
