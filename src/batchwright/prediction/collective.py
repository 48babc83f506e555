r"""Seconds of an exchange of gradients against message size and number of workers.

For measured numbers of workers, times are interpolated between the measured sizes: latency
dominates for small messages and bandwidth for large ones, and each library changes its algorithm at
sizes of its own. For more workers, times follow from a stated link and the formula of the
algorithm:

.. math::
    t_{ring} = 2 (K - 1) \Big( \alpha + \frac{G}{K \beta} \Big), \quad
    t_{server} = 2 \Big( \alpha + \frac{(K - 1) G}{\beta} \Big)

with K workers, G bytes, latency :math:`\alpha` and bandwidth :math:`\beta`: a ring all-reduce
(Patarasuk and Yuan 2009), and a push to and a pull from one process, whose link all share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from batchwright.errors import PlanError
from batchwright.records import CollectiveTime, Link

Operation = Literal["all-reduce", "push-pull"]


def exchange_seconds(
    size: int, workers: int, link: Link | None, operation: Operation = "all-reduce"
) -> float:
    """Seconds to exchange ``size`` bytes between ``workers`` over a stated link; see above.

    Raises:
        PlanError: The link is not fully stated.
    """
    if workers == 1:
        return 0.0
    if link is None or link.latency is None or link.bandwidth is None:
        missing = [
            f"link.{key}=..."
            for key in ("latency", "bandwidth")
            if link is None or getattr(link, key) is None
        ]
        raise PlanError(
            f"workers={workers}: so many were not measured together; measure them, or state their "
            f"network with {' and '.join(missing)} (seconds, bytes per second)"
        )
    if operation == "push-pull":
        return 2 * (link.latency + (workers - 1) * size / link.bandwidth)
    return 2 * (workers - 1) * (link.latency + size / workers / link.bandwidth)


@dataclass(frozen=True)
class CollectiveModel:
    """Measured exchange times."""

    # (operation, workers) -> pairs of message size in bytes, rising, and seconds.
    measured: Mapping[tuple[str, int], tuple[tuple[int, float], ...]]

    def seconds(self, size: int, workers: int, operation: Operation = "all-reduce") -> float:
        """Seconds to exchange ``size`` bytes between ``workers``.

        One worker exchanges nothing. Between measured numbers of workers the time is linear in the
        number; fewer workers than were measured take the time of the smallest measured number.

        Raises:
            PlanError: More workers than were measured.
        """
        if workers == 1:
            return 0.0
        if self.assumed(workers, operation):
            return exchange_seconds(size, workers, None)  # raises the error
        counts = self._counts(operation)
        above = bisect_left(counts, workers)
        if counts[above] == workers or above == 0:
            return _between_sizes(size, self.measured[operation, counts[above]])
        fewer, more = counts[above - 1], counts[above]
        low, high = (_between_sizes(size, self.measured[operation, k]) for k in (fewer, more))
        return low + (high - low) * (workers - fewer) / (more - fewer)

    def assumed(self, workers: int, operation: Operation = "all-reduce") -> bool:
        """Whether so many workers are more than were measured."""
        return workers > max(self._counts(operation), default=1)

    def _counts(self, operation: Operation) -> list[int]:
        return sorted(workers for kind, workers in self.measured if kind == operation)


def fit_collectives(measured: Sequence[CollectiveTime]) -> CollectiveModel:
    """Model of measured exchanges, which may be empty; of repeated ones the median counts."""
    times: dict[tuple[str, int], dict[int, list[float]]] = {}
    for one in measured:
        times.setdefault((one.operation, one.workers), {}).setdefault(one.bytes, []).append(
            one.seconds
        )
    return CollectiveModel(
        {
            key: tuple((size, median(seconds)) for size, seconds in sorted(sizes.items()))
            for key, sizes in sorted(times.items())
        }
    )


def _between_sizes(size: int, points: Sequence[tuple[int, float]]) -> float:
    """Seconds by message size, interpolated.

    Below the smallest measured message it is that one's time (latency); above the largest the time
    is in proportion to the size (bandwidth).
    """
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    right = bisect_right(points, size, key=lambda point: point[0])
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
