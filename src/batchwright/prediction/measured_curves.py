"""The curves through measured steps: one for each measured number of workers and resolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

from batchwright.errors import PlanError
from batchwright.prediction.contradictions import (
    Key,
    contradictions,
    grouped,
    key_of,
    place_of,
    point_errors,
)
from batchwright.prediction.curve import Curve, borrow_curve, fit_curve
from batchwright.prediction.drift import Drift, drift_by_workers, point_seconds, pooled_drift
from batchwright.records import StepTime
from batchwright.records.text.formatting import counted


@dataclass(frozen=True)
class MeasuredCurves:
    """What is fitted to measured steps alone."""

    drift: Drift  # drift of all points
    drifts: Mapping[int, Drift]  # drift by number of workers
    # Points by number of workers and resolution.
    groups: Mapping[tuple[int, int], Sequence[StepTime]]
    doubtful: Sequence[tuple[StepTime, StepTime]]  # disturbed points, see `contradictions`
    errors: Mapping[Key, float]  # relative standard error of each point
    # Curve of the whole step by number of workers and resolution.
    whole: Mapping[tuple[int, int], Curve]
    compute: Mapping[tuple[int, int], Curve]  # curve of computing alone


@lru_cache(maxsize=8)  # a probe fits its points between two visits, and a plan fits them again
def measured_curves(points: tuple[StepTime, ...]) -> MeasuredCurves:
    """The curves through measured steps, in any order.

    Raises:
        PlanError: Too few points, or the same point twice.
    """
    if not points:
        raise PlanError("the profile has no step times; run probe first")
    seen = set()
    for point in points:
        if key_of(point) in seen:
            raise PlanError(f"{place_of(point)} is there twice; merge the profiles, or drop one")
        seen.add(key_of(point))
    drift = pooled_drift(points)
    drifts = drift_by_workers(points, drift)
    groups = grouped(points)
    doubtful = contradictions(points, drifts)
    errors = point_errors(points, drifts, doubtful)
    # A disturbed step takes undisturbed at most as long as the larger batch that was quicker.
    bounds = {key_of(small): large for small, large in doubtful}

    def bounded(seconds: Callable[[StepTime], float]) -> Callable[[StepTime], float]:
        return lambda point: min(seconds(point), seconds(bounds.get(key_of(point), point)))

    whole = _fit_all(groups, bounded(point_seconds), errors)
    compute = _fit_all(groups, bounded(computing_seconds), errors)
    return MeasuredCurves(drift, drifts, groups, doubtful, errors, whole, compute)


def computing_seconds(point: StepTime) -> float:
    """Seconds of computing in a point's step."""
    return point_seconds(point) * min(1.0, point.compute_seconds / point.step_seconds)


def _fit_all(
    groups: Mapping[tuple[int, int], Sequence[StepTime]],
    seconds: Callable[[StepTime], float],
    errors: Mapping[Key, float],
) -> dict[tuple[int, int], Curve]:
    """A curve for each group of points.

    A group with a single point borrows the shape of the nearest other group. A curve that ends
    early goes on in the shape of one that was measured further, see `_going_on`.
    """
    curves = {
        key: fit_curve(
            [point.local_batch_size for point in group],
            [seconds(point) for point in group],
            [errors[key_of(point)] for point in group],
        )
        for key, group in groups.items()
        if len(group) > 1
    }
    if not curves:
        point = next(iter(groups.values()))[0]
        raise PlanError(
            f"{place_of(point)} is the only batch measured there, which cannot tell a fixed part "
            f"from growth; measure batch {2 * point.local_batch_size} too, with a larger "
            "probe.budget"
        )
    shapes = dict(curves)
    curves = {key: _going_on(key, shapes) for key in shapes}
    for key, group in groups.items():
        if len(group) == 1:
            # Other resolutions with the same number of workers come first, then other numbers.
            apart = {one: (abs(log(one[0] / key[0])), abs(log(one[1] / key[1]))) for one in shapes}
            near = min(shapes, key=apart.__getitem__)
            point = group[0]
            curves[key] = borrow_curve(
                shapes[near],
                point.local_batch_size,
                seconds(point),
                errors[key_of(point)],
                f"resolution {near[1]} with {counted(near[0], 'worker')}",
            )
    return dict(sorted(curves.items()))


def _going_on(key: tuple[int, int], shapes: Mapping[tuple[int, int], Curve]) -> Curve:
    """A curve, with another curve's shape beyond its largest batch if one was measured further.

    Steps of several workers are short and scatter most where the batch is small, so a slope from a
    few such points may be off by a factor. So the curve of the nearest number of workers that was
    measured further at the same resolution counts as well.
    """
    workers, resolution = key
    own = shapes[key]
    last = own.measured[1]
    others = [
        count
        for count, side in shapes
        if side == resolution and shapes[count, side].measured[1] > last
    ]
    if not others:
        return own
    near = min(others, key=lambda count: abs(log(count / workers)))
    whence = counted(near, "worker")
    shape = borrow_curve(
        shapes[near, resolution], last, own.at(last), own.standard_error(last), whence
    )
    caveat = f"beyond batch {last} the shape with {whence} counts, too"
    return replace(own, further=replace(shape, caveat=caveat))
