"""Times of loading beside steps: pools several measurements, and finds the most similar one."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median

from batchwright.records import StepLoading, StepTime


def pooled_loading(measured: Sequence[StepLoading]) -> StepLoading | None:
    """Medians of measurements at one point; `None` without any."""
    if not measured:
        return None
    names = [name for name in StepLoading.model_fields if name != "loaders"]
    return StepLoading(
        loaders=measured[0].loaders,
        **{name: median(getattr(one, name) for one in measured) for name in names},
    )


def nearest_loaded(
    points: Sequence[StepTime], workers: int, resolution: int, batch: int
) -> StepTime | None:
    """The measured step, with loading times, that is nearest to a given one; `None` without any.

    The number of workers counts first, then the resolution, then the samples in a pass.
    """
    found = [point for point in points if point.loading is not None]

    def distance(point: StepTime) -> tuple[float, float, float]:
        return (
            abs(log(point.workers / workers)),
            abs(log(point.resolution / resolution)),
            abs(log(point.local_batch_size / batch)),
        )

    return min(found, key=distance, default=None)
