r"""Peak bytes of a training step against the samples that go through the network in one pass.

At every moment k of a step the live bytes are :math:`f_k + g_k b` with both parts not negative, so
the peak over the moments is convex and piecewise linear in the batch b. Then a few measured batches
bound all others, without statistics:

* between two, the chord lies above, and both neighbouring segments, extended, below;
* beyond the largest :math:`b_n`, the last segment extended lies below, and
  :math:`A + (M_n - A) b / b_n` above, where A are the bytes that live at every moment;
* below the smallest :math:`b_1`, the first segment extended lies below, and :math:`M_1` above.

Rounding by the allocator, and points that are not convex, widen a stated margin.

The resident size of the process is its size without the step, and a multiple of the step's tensors,
by what the allocator keeps. In the steps of a probe it is a line in the predicted peak M. On the
CPU what earlier steps have left of the heap comes on top, so the line goes through the lowest
point; on a GPU, whose free blocks are given back before each step, through the mean. The slope has
a prior, so that it does not follow from a few small batches, whose sizes scatter by more than they
differ. Where glibc keeps small freed pieces apart (`workload.allocator`), the heap of a
training holds h more bytes with each byte above the bytes F that every step reaches; else h is 0:

.. math:: R = a + k M + h (M - F), \qquad k = 1.5 \pm 0.5, \quad h = 0.5 \pm 0.35
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import hypot, sqrt
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from batchwright.errors import ArgumentError, PlanError
from batchwright.prediction.fit import between
from batchwright.records import (
    Estimate,
    MemoryParts,
    MemoryPoint,
    NetworkFacts,
    OutOfMemory,
    Profile,
)
from batchwright.records.text.formatting import percent
from batchwright.records.text.problems import described

MARGIN = {"cpu": 0.005, "cuda": 0.03}
"""Share by which the interval is widened: blocks are rounded up, on CUDA more."""

RESIDENT_ERROR = 0.05
"""Assumed relative standard error of a resident size, by what the allocator keeps."""

RESIDENT_SLOPE, RESIDENT_SLOPE_ERROR = 1.5, 0.5
"""Assumed resident bytes for each byte of tensors in a measured step, and the standard error."""

HELD, HELD_ERROR = 0.5, 0.35
"""Resident bytes that the heap of a training holds beyond those of a measured step, for each byte
of tensors above those that every step reaches, and the standard error, where small freed pieces are
kept apart. The heap of a probe shows less of them, as it had small batches only and was just
trimmed. The error is so wide that the interval also holds a measured step, which `check` measures.
"""

_MAX_SAMPLES = 2**24


@dataclass(frozen=True)
class _Bounds:
    """Peak bytes at one resolution and number of workers, and bounds between and beyond them."""

    batches: tuple[int, ...]  # measured batches, rising, in samples
    peaks: tuple[int, ...]  # peak bytes of each
    always: int  # bytes that live at every moment, whatever the batch
    floor: int  # bytes that every step reaches, whatever the batch
    violation: float  # largest share by which the points are not convex or not rising

    def at(self, batch: int) -> tuple[float, float, float]:
        """Best guess, lower and upper bound of the peak, in bytes."""
        low, high = max(self.floor, self._below(batch)), self._above(batch)
        low = min(low, high)
        return min(high, max(low, self._likely(batch))), low, high

    def slope(self) -> float:
        """Bytes per sample where the batch is large."""
        if len(self.batches) == 1:
            return (self.peaks[0] - self.floor) / self.batches[0]
        return (self.peaks[-1] - self.peaks[-2]) / (self.batches[-1] - self.batches[-2])

    def _likely(self, batch: int) -> float:
        """Linear between the points, and linear on beyond them: most peaks are a line."""
        batches, peaks = self.batches, self.peaks
        if batches[0] <= batch <= batches[-1]:
            return between(batches, peaks, batch)
        if batch > batches[-1]:
            return peaks[-1] + max(0.0, self.slope()) * (batch - batches[-1])
        if len(batches) == 1:
            return self.floor + (peaks[0] - self.floor) * batch / batches[0]
        return peaks[0] - (peaks[1] - peaks[0]) * (batches[0] - batch) / (batches[1] - batches[0])

    def _above(self, batch: int) -> float:
        last, peak = self.batches[-1], max(self.peaks)
        if batch > last:
            return self.always + (peak - self.always) * batch / last
        if batch <= self.batches[0]:
            return self.peaks[0]
        rising = [max(self.peaks[: i + 1]) for i in range(len(self.peaks))]
        return between(self.batches, rising, batch)

    def _below(self, batch: int) -> float:
        """The highest of all segments that end before ``batch`` or begin after it, extended."""
        if batch in self.batches:
            return self.peaks[self.batches.index(batch)]
        # No peak is below that of a smaller batch.
        below = [p for b, p in zip(self.batches, self.peaks, strict=True) if b < batch]
        bounds = [float(max(below, default=0))]
        points = list(zip(self.batches, self.peaks, strict=True))
        for (b0, m0), (b1, m1) in pairwise(points):
            if m1 >= m0 and not b0 <= batch <= b1:
                bounds.append(m0 + (m1 - m0) * (batch - b0) / (b1 - b0))
        return max(bounds)


@dataclass(frozen=True)
class _Resident:
    """Resident size against peak bytes, as measured at one resolution and number of workers."""

    peak: float  # mean of the points' peak bytes
    size: float  # resident size at that peak, in bytes
    size_error: float  # standard error of that size
    slope: float  # resident bytes for each byte of tensors
    slope_error: float  # standard error of the slope
    floor: int  # bytes that every step reaches, whatever the batch
    # Further bytes that a training's heap holds for each byte above the floor, and their standard
    # error.
    held: tuple[float, float]

    def at(self, peak: float) -> Estimate:
        """Resident size of a training with ``peak`` peak bytes; never below these."""
        away, scatter = peak - self.peak, RESIDENT_ERROR * self.size
        held, held_error = (max(0.0, peak - self.floor) * one for one in self.held)
        error = hypot(away * self.slope_error, held_error, self.size_error, scatter)
        value = max(peak, self.size + self.slope * away + held)
        return Estimate(value=value, low=max(0.0, value - 2 * error), high=value + 2 * error)


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes of one worker, tensors only, and its resident size."""

    # Bytes that do not depend on the batch, by use; `None` if not counted.
    parts: MemoryParts | None
    margin: float  # share by which intervals are widened
    notes: tuple[str, ...]  # what the points do not identify or do not agree on, in words
    _bounds: Mapping[tuple[int, int], _Bounds]
    _resident: Mapping[tuple[int, int], _Resident] = field(repr=False)
    extra: int = 0  # bytes that a training keeps and a step of a probe does not

    @cached_property
    def resolutions(self) -> tuple[int, ...]:
        """Measured resolutions, rising."""
        return tuple(sorted({side for _, side in self._bounds}))

    def predict(
        self,
        resolution: int,
        micro_batch_size: int,
        *,
        workers: int = 1,
        accumulates: bool = False,
    ) -> Estimate:
        """Peak bytes of a step, between bounds.

        Args:
            resolution: Image side, in pixels.
            micro_batch_size: Samples in one forward pass.
            workers: Number of workers; several keep buffers to exchange gradients.
            accumulates: Whether gradients of earlier micro-batches stay live meanwhile.
        """
        bounds = self._at_resolution(resolution, micro_batch_size, workers)
        value, low, high = (bound + self.extra for bound in bounds)
        if accumulates:
            gradients = float(self.parts.gradients) if self.parts else self._at_most_half()
            value, high = value + gradients, high + gradients
        return Estimate(value=value, low=low * (1 - self.margin), high=high * (1 + self.margin))

    def largest_batch(
        self,
        resolution: int,
        limit: int,
        most: int,
        *,
        workers: int = 1,
        accumulates: bool = False,
    ) -> int:
        """Largest micro-batch up to ``most`` that fits ``limit`` bytes; 0 if none does.

        It fits if the upper end of the interval of its peak stays within the limit.
        """
        fitting, failing = 0, most + 1
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            peak = self.predict(resolution, middle, workers=workers, accumulates=accumulates)
            fitting, failing = (middle, failing) if peak.high <= limit else (fitting, middle)
        return fitting

    def resident(
        self, resolution: int, micro_batch_size: int, *, workers: int = 1
    ) -> Estimate | None:
        """Largest resident size of the process, in bytes, with a statistical 95 % interval.

        `None` if it was not measured at this resolution.
        """
        if resolution not in self.resolutions:
            return None
        key = self._nearest_workers(workers, resolution), resolution
        if key not in self._resident:
            return None
        return self._resident[key].at(self._bounds[key].at(micro_batch_size)[0] + self.extra)

    def bytes_per_sample(self, resolution: int) -> float:
        """Bytes that one more sample takes where the batch is large: activations and input."""
        if resolution in self.resolutions:
            workers = self._nearest_workers(1, resolution)
            return max(0.0, self._bounds[workers, resolution].slope())
        nearest = min(self.resolutions, key=lambda side: abs(side - resolution))
        return self.bytes_per_sample(nearest) * (resolution / nearest) ** 2

    def _at_resolution(
        self, resolution: int, batch: int, workers: int
    ) -> tuple[float, float, float]:
        """Best guess, lower and upper bound at any resolution.

        At resolutions that were not measured, more pixels take no fewer bytes, and no more than in
        proportion. The latter does not bound the guess between two measured resolutions that
        contradict it, as with attention over all pixels.
        """
        sides = self.resolutions
        if resolution in sides:
            return self._at(resolution, batch, workers)
        smaller = [side for side in sides if side < resolution]
        larger = [side for side in sides if side > resolution]
        low = fewest = 0.0
        high, most, values = float("inf"), float("inf"), []
        if smaller:
            value, fewest, most = self._at(smaller[-1], batch, workers)
            low = fewest
            always = self._bounds[self._nearest_workers(workers, smaller[-1]), smaller[-1]].always
            ratio = (resolution / smaller[-1]) ** 2
            high = always + (most - always) * ratio
            values.append((smaller[-1], value))
        if larger:
            value, least, most = self._at(larger[0], batch, workers)
            high = min(high, most)
            low = max(low, least * (resolution / larger[0]) ** 2)
            values.append((larger[0], value))
        if len(values) == 2:  # linear in the pixels
            (r0, m0), (r1, m1) = values
            between = m0 + (m1 - m0) * (resolution**2 - r0**2) / (r1**2 - r0**2)
            if not low <= between <= high:
                low, high = min(fewest, between), max(most, between)
        else:  # in proportion to them, above what always lives
            ((side, value),) = values
            fixed = float(_floor(self.parts))
            between = fixed + max(0.0, value - fixed) * (resolution / side) ** 2
        return between, low, high

    def _at(self, resolution: int, batch: int, workers: int) -> tuple[float, float, float]:
        measured = self._nearest_workers(workers, resolution)
        value, low, high = self._bounds[measured, resolution].at(batch)
        if workers > 1 and measured == 1:
            buffers = self._reduction()
            return value + buffers, low, high + buffers
        if workers == 1 and measured > 1:
            likely = value - self.parts.reduction if self.parts else value
            return likely, max(0.0, low - self._reduction()), high
        return value, low, high

    def _nearest_workers(self, workers: int, resolution: int) -> int:
        """A measured number of workers with as many buffers: one worker has none, several alike."""
        counts = sorted(count for count, side in self._bounds if side == resolution)
        alike = [k for k in counts if (k > 1) == (workers > 1)] or counts
        return max((k for k in alike if k <= workers), default=alike[0])

    def _reduction(self) -> float:
        if self.parts is None:
            return self._at_most_half()
        return float(max(self.parts.reduction, self.parts.gradients))

    def _at_most_half(self) -> float:
        """Bound of the gradients' bytes: they take no more than the weights, so half of a peak."""
        return min(bounds.peaks[0] for bounds in self._bounds.values()) / 2


def fit_memory(
    points: Sequence[MemoryPoint],
    parts: MemoryParts | None = None,
    *,
    device: str = "cpu",
    extra: int = 0,
    apart: bool = False,
) -> MemoryModel:
    """Model of measured peaks, in any order.

    Args:
        points: Measured peaks, at least one; of one measured twice the larger peak counts.
        parts: Bytes that do not depend on the batch; unset: bounds beyond the points are wider.
        device: ``cpu`` or ``cuda``, for the margin.
        extra: Bytes that a training keeps and a step of a probe does not.
        apart: Whether the heap of a training keeps small freed pieces apart.

    Raises:
        PlanError: No points, or one below what the parts alone take.
    """
    if not points:
        raise PlanError("the profile has no memory peaks; run probe first")
    groups: dict[tuple[int, int], dict[int, MemoryPoint]] = {}
    for point in points:
        group = groups.setdefault((point.workers, point.resolution), {})
        known = group.get(point.local_batch_size)
        if known is None or point.peak_bytes > known.peak_bytes:
            group[point.local_batch_size] = point
    bounds = {key: _bounds(group, parts) for key, group in sorted(groups.items())}
    violation = max(one.violation for one in bounds.values())
    held = (HELD, HELD_ERROR) if apart else (0.0, 0.0)
    notes = []
    if violation > MARGIN[device]:
        notes.append(
            f"memory peaks stray from a convex curve by up to {percent(violation)}: the margin is "
            "wider"
        )
    if parts is None:
        notes.append(
            "fixed parts of the memory were not counted: bounds beyond the points are wide"
        )
    return MemoryModel(
        parts,
        max(MARGIN[device], violation),
        tuple(notes),
        bounds,
        {
            key: fitted
            for key, group in groups.items()
            if (fitted := _fit_resident(group, _floor(parts), held, lowest=device == "cpu"))
        },
        extra,
    )


def max_local_batch_size(
    profile: Profile,
    *,
    limit: int | None = None,
    resolution: int | None = None,
    workers: int | None = None,
) -> int:
    """Largest local batch whose step surely fits a worker's memory, in one pass; 0 if none does.

    Args:
        profile: What was measured.
        limit: Bytes that one worker may use; unset: ``goal.memory``, or what the device had free.
        resolution: Image side in pixels; unset: the largest measured.
        workers: Number of workers; unset: the largest number that was measured together.

    Raises:
        ArgumentError: The profile is not a profile, or an argument is not a whole number.
        PlanError: An argument is below 1, or the profile has no memory peaks.
    """
    if not isinstance(profile, Profile):
        hint = (
            f": read it with bw.load({str(profile)!r})" if isinstance(profile, str | Path) else ""
        )
        raise ArgumentError(
            f"max_local_batch_size takes a profile, as bw.probe(...) returns, not "
            f"{described(profile)}{hint}"
        )
    for name, value in (("limit", limit), ("resolution", resolution), ("workers", workers)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ArgumentError(f"{name}= takes a whole number, not {described(value)}")
        if value is not None and value < 1:
            raise PlanError(f"{name}={value}: give 1 or more")
    limit = limit or profile.job.goal.memory or profile.cluster.memory_bytes
    model = fit_memory(
        profile.memory,
        profile.memory_parts,
        device=profile.cluster.device,
        extra=average_bytes(profile.job.averages, profile.network),
        apart=profile.cluster.pieces_apart,
    )
    side = resolution or model.resolutions[-1]
    count = workers or profile.cluster.workers
    lost = smallest_lost(profile, count, side)
    most = _MAX_SAMPLES if lost is None else lost.local_batch_size - 1
    return model.largest_batch(side, limit, most, workers=count)


def smallest_lost(profile: Profile, workers: int, resolution: int) -> OutOfMemory | None:
    """The smallest batch that ran out of memory with at most so many workers and pixels."""
    lost = [
        one
        for one in profile.out_of_memory
        if one.workers <= workers and one.resolution <= resolution
    ]
    return min(lost, key=attrgetter("local_batch_size"), default=None)


def average_bytes(averages: bool, network: NetworkFacts) -> int:
    """Bytes of the average of the weights, on each worker and in a checkpoint."""
    return network.trained_bytes if averages else 0


def _floor(parts: MemoryParts | None) -> int:
    """Bytes at the moment of the update, which every step reaches."""
    if parts is None:
        return 0
    return parts.parameters + parts.buffers + parts.optimizer + parts.gradients


def _bounds(group: Mapping[int, MemoryPoint], parts: MemoryParts | None) -> _Bounds:
    batches = tuple(sorted(group))
    peaks = tuple(group[batch].peak_bytes for batch in batches)
    floor = _floor(parts)
    if peaks[0] < floor:
        point = group[batches[0]]
        raise PlanError(
            f"local batch {batches[0]} at resolution {point.resolution}: a peak of {peaks[0]} "
            f"bytes is less than weights, gradients and optimizer take ({floor}); measure it again"
        )
    always = floor - parts.gradients if parts else 0
    worst = 0.0
    for i in range(1, len(batches) - 1):
        chord = between((batches[i - 1], batches[i + 1]), (peaks[i - 1], peaks[i + 1]), batches[i])
        worst = max(worst, peaks[i] / chord - 1)
    for smaller, larger in pairwise(peaks):
        worst = max(worst, smaller / larger - 1)
    return _Bounds(batches, peaks, always, floor, worst)


def _fit_resident(
    group: Mapping[int, MemoryPoint], floor: int, held: tuple[float, float], *, lowest: bool
) -> _Resident | None:
    """Resident size as a line by least squares; `RESIDENT_SLOPE` is an observation of its slope.

    ``lowest``: Through the lowest point, as what a probe's earlier steps have left only adds.
    """
    known = [(p.peak_bytes, p.resident_bytes) for p in group.values() if p.resident_bytes]
    if not known:
        return None
    peak, size = fmean(x for x, _ in known), fmean(y for _, y in known)
    weight, scatter = RESIDENT_SLOPE_ERROR**-2, (RESIDENT_ERROR * size) ** 2
    seen = sum((x - peak) ** 2 for x, _ in known) / scatter
    across = sum((x - peak) * (y - size) for x, y in known) / scatter
    slope = (across + weight * RESIDENT_SLOPE) / (seen + weight)
    slope_error = (seen + weight) ** -0.5
    error = sqrt(scatter / len(known))
    if lowest:
        size, away = min((y + slope * (peak - x), x - peak) for x, y in known)
        # Of one point, less what the slope has of the same point's error: Var(y + slope * (p - x))
        # at a peak p is Var(y) + Var(slope) * ((p - peak)^2 - (x - peak)^2).
        error = sqrt(max(0.0, (RESIDENT_ERROR * size) ** 2 - (away * slope_error) ** 2))
    return _Resident(peak, size, error, slope, slope_error, floor, held)
