"""What loading has to do with step times: several measurements as one, and which one tells most."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median

from batchwright.records import StepLoading, StepTime


def pooled_loading(measured: Sequence[StepLoading]) -> StepLoading | None:
    """Medians over visits to one point; `None` without any."""
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
    """The step measured beside loading that is nearest to another; `None` without any.

    Its number of workers counts most, then the resolution, then the samples in a pass.
    """
    found = [point for point in points if point.loading is not None]

    def distance(point: StepTime) -> tuple[float, float, float]:
        return (
            abs(log(point.workers / workers)),
            abs(log(point.resolution / resolution)),
            abs(log(point.local_batch_size / batch)),
        )

    return min(found, key=distance, default=None)
