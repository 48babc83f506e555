"""Seconds of an all-reduce against the size of its message: between measured sizes, straight lines.

No formula: below some size latency rules, above it bandwidth, and each library changes its
algorithm where it likes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from batchwright.records import CollectiveTime


def all_reduce_seconds(size: int, measured: Sequence[CollectiveTime]) -> float:
    """Seconds to all-reduce ``size`` bytes.

    Below the smallest measured message the time of the smallest (latency); above the largest, in
    proportion to the size (bandwidth).

    Args:
        size: Message, in bytes.
        measured: At least one point, all with the same number of workers.
    """
    points = sorted((one.bytes, one.seconds) for one in measured)
    sizes = [point[0] for point in points]
    if size <= sizes[0]:
        return points[0][1]
    if size >= sizes[-1]:
        return points[-1][1] * size / sizes[-1]
    (x0, y0), (x1, y1) = list(pairwise(points))[bisect_left(sizes, size) - 1]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
