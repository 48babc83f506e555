"""Kinds of workers: step time, memory, price and number of each.

A kind was measured, or the goal states that it is some times as fast as a measured kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from batchwright.errors import PlanError
from batchwright.planning.gradient_scaling import StepSplit, small_parts, step_split_of
from batchwright.planning.merging import kind_of
from batchwright.planning.methods.simulated import slowest_link
from batchwright.planning.resolution import sides
from batchwright.planning.validation import check_micro_batches, least_local
from batchwright.prediction.drift import least_share
from batchwright.prediction.fit import Line
from batchwright.prediction.memory import MemoryModel, average_bytes, fit_memory, smallest_lost
from batchwright.prediction.step_time import StepTimeModel, fit_step_time
from batchwright.records import Job, Link, OutOfMemory, Profile, StepTime, WorkerKind


@dataclass(frozen=True, eq=False)
class WorkerType:
    """A kind of worker: workers that behave alike."""

    name: str  # name, as in ``goal.kinds`` or as measured
    count: int  # largest number of them that a plan may use
    price: float | None  # price of one worker for an hour; `None` if not given
    limit: int  # bytes of memory that one worker may use
    least: int  # fewest samples that a worker can train on
    micro_batch: int | None  # most samples in one pass, as the job asks; `None`: as many as fit
    most: int  # upper bound of any batch: the training samples of the data
    profile: Profile  # what was measured
    times: StepTimeModel  # model of the step times, with the stated speed in it
    memory: MemoryModel  # model of the peak bytes
    # Seconds of evaluating an image on one worker, at the job's highest resolution.
    evaluation_seconds: float
    speed: float = 1.0  # speed over that of the measured kind
    preemptions: float = 0.0  # preemptions of one worker in an hour, mean
    stated: str = ""  # what is stated rather than measured, in words; empty if nothing
    # Into how many parts a step is cut at least, to measure gradient noise; `None`: no such
    # minimum.
    step_split: StepSplit | None = None
    _seconds: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False)
    _largest: dict[tuple[int, int, bool], int] = field(default_factory=dict, repr=False)

    @property
    def measured(self) -> tuple[int, ...]:
        """Worker counts that were measured, rising."""
        return self.times.workers

    @property
    def together(self) -> bool:
        """Whether it was measured while other kinds took part: times then hold for all together."""
        return bool(self.profile.kinds)

    def measured_batches(self, workers: int, resolution: int) -> list[int]:
        """Local batches that were timed with so many workers at this resolution, in samples."""
        return [
            point.local_batch_size
            for point in self.profile.steps
            if (point.workers, point.resolution) == (workers, resolution)
        ]

    @property
    def smallest_measured(self) -> int:
        """Smallest measured local batch, in samples."""
        return min(point.local_batch_size for point in self.profile.steps)

    def cuts(self, workers: int) -> bool:
        """Whether large batches are cut into several passes although they fit in one."""
        if self.micro_batch is not None:
            return True
        return self.step_split is not None and self.step_split.passes(workers) > 1

    def seconds_at_once(self, workers: int, resolution: int, local: int) -> float:
        """Seconds of a step whose local batch goes through the network in one pass."""
        key = (workers, resolution, local)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self.times.seconds(workers, resolution, local)
        return found

    def seconds(self, workers: int, resolution: int, local: int) -> float:
        """Seconds of a step, in as many passes as it takes."""
        if not self.cuts(workers) and local <= self.largest(workers, resolution):
            return self.seconds_at_once(workers, resolution, local)
        passes = self.passes(workers, resolution, local)
        return self.times.seconds(workers, resolution, local, passes)

    def passes(self, workers: int, resolution: int, local: int) -> int:
        """Number of even micro-batches of a local batch: as few as fit, or as the job asks."""
        if self.micro_batch is not None:
            found = -(-local // self.micro_batch)
        elif local <= self.largest(workers, resolution):
            found = 1
        else:
            found = self._fitting(workers, resolution, local)
        if self.step_split is None:
            return found
        small = small_parts(local, self.step_split.passes(workers, local), self.least)
        if small <= found:
            return found
        if self.micro_batch is None and -(-local // small) > self.largest(
            workers, resolution, accumulates=True
        ):
            return self._fitting(workers, resolution, local)
        return small

    def _fitting(self, workers: int, resolution: int, local: int) -> int:
        """Number of micro-batches that fit beside the gradients of earlier ones."""
        most = max(self.largest(workers, resolution, accumulates=True), self.least)
        return -(-local // most)

    def largest(self, workers: int, resolution: int, *, accumulates: bool = False) -> int:
        """Most samples in one pass that fit the memory; 0 if none fit.

        ``accumulates``: Whether gradients of earlier micro-batches are kept in memory meanwhile.
        """
        workers = min(workers, self.measured[-1] + 1)  # buffers do not grow with more workers
        key = (workers, resolution, accumulates)
        found = self._largest.get(key)
        if found is None:
            lost = self.lost(workers, resolution)
            most = self.most if lost is None else min(self.most, lost.local_batch_size - 1)
            found = self._largest[key] = self.memory.largest_batch(
                resolution, self.limit, most, workers=workers, accumulates=accumulates
            )
        return found

    def lost(self, workers: int, resolution: int) -> OutOfMemory | None:
        """The smallest batch that ran out of memory in the probe; no planned batch is as large."""
        return smallest_lost(self.profile, workers, resolution)

    def check_parts(self, local: int) -> None:
        """Refuse a `micro_batch` of the job that leaves a part of ``local`` samples too small."""
        if self.micro_batch is not None:
            check_micro_batches(local, self.micro_batch, self.least)

    def line(self, workers: int, resolution: int) -> tuple[float, float] | None:
        """Fixed seconds of a step and seconds per sample; `None` where step times are no line."""
        fitted = self.fitted_line(workers, resolution)
        if fitted is None:
            return None
        if workers in self.measured:
            return fitted.intercept, fitted.slope
        curve = self.times.curve(self.times.nearest(workers), resolution)
        # Computing is a line. With the exchange the step is one too, unless the two overlap.
        low, high = curve.batches[0], max(curve.batches[-1], 4 * curve.batches[0])
        middle = (low + high) // 2
        first, between, last = (
            self.seconds_at_once(workers, resolution, batch) for batch in (low, middle, high)
        )
        slope = (last - first) / (high - low)
        fixed = first - slope * low
        bent = abs(fixed + slope * middle - between) > 1e-9 * between
        return None if bent or fixed < 0 else (fixed, slope)

    def fixed_samples(self, workers: int, resolution: int, local: int) -> float:
        """Fixed time of a step over the time per sample, in samples, with which rebalancing begins.

        The time per sample is the slope between half of ``local`` and all of it. The result is at
        most ``local``; it is 0 where the slope is not positive.
        """
        if local < 2 * self.least:
            return 0.0
        seconds, half = (
            self.seconds_at_once(workers, resolution, size) for size in (local, local // 2)
        )
        slope = (seconds - half) / (local - local // 2)
        worth = seconds / slope - local if slope > 0 else 0.0
        return round(min(max(worth, 0.0), float(local)), 1)

    def computing(self, workers: int, resolution: int, local: int) -> float:
        """Seconds of computing in a step, in as many passes as it takes."""
        passes = self.passes(workers, resolution, local)
        return self.times.computing(workers, resolution, local, passes)

    def chord(self, workers: int, resolution: int, local: int) -> tuple[float, float]:
        """Seconds per sample and fixed seconds of computing: the chord from ``local`` / 2 to it."""
        half = max(local // 2, 1)
        if half == local:
            half = local + 1
        first, last = (self.computing(workers, resolution, size) for size in (half, local))
        slope = (last - first) / (local - half)
        return slope, max(0.0, last - slope * local)

    def fitted_line(self, workers: int, resolution: int) -> Line | None:
        """The line through the step times of the nearest measured number of workers.

        `None` where no line describes them, and at a resolution that was not measured.
        """
        count = self.times.nearest(workers)
        if resolution not in self.times.resolutions(count):
            return None
        curve = self.times.curve(count, resolution)
        return curve.line if curve.linear else None

    def straight_to(self, workers: int, resolution: int) -> float:
        """Largest local batch up to which step times are on the `line`, where there is one.

        Beyond it the curve also follows that of another number of workers. Infinite where it does
        not.
        """
        measured = self.measured
        counts = [workers] if workers in measured else measured
        curves = (
            self.times.curve(count, resolution)
            for count in counts
            if resolution in self.times.resolutions(count)
        )
        return min((one.batches[-1] for one in curves if one.further), default=inf)


def worker_types_of(profiles: Sequence[Profile], job: Job) -> tuple[WorkerType, ...]:
    """The kinds of workers that a plan may use: those of ``goal.kinds``, or the measured ones.

    Args:
        profiles: One profile for each measured kind.
        job: Resolved.

    Raises:
        PlanError: ``goal.kinds`` names a kind that was not measured.
    """
    measured = {kind_of(profile): profile for profile in profiles}
    wanted = job.goal.kinds or tuple(
        WorkerKind(kind=name, count=_measured_count(profile, job, alone=len(measured) == 1))
        for name, profile in measured.items()
    )
    return tuple(_kind(one, measured, job) for one in wanted)


def _measured_count(profile: Profile, job: Job, *, alone: bool) -> int:
    """Largest number of workers of a measured kind that a plan may use.

    ``alone``: Whether it is the only kind; then the goal or the job may ask for more than measured.
    """
    measured = max(point.workers for point in profile.steps)
    if profile.kinds:
        return profile.kinds[0].workers
    if not alone:
        return measured
    if job.workers == "auto":
        return max(measured, job.goal.max_workers or 1)
    # Beside the number asked for, others are candidates for comparison, which takes a link.
    more = job.goal.max_workers if link_given(job.link) else None
    return max(measured, job.workers, more or 1)


def _kind(wanted: WorkerKind, measured: dict[str, Profile], job: Job) -> WorkerType:
    like = wanted.like or wanted.kind
    if like not in measured:
        raise PlanError(
            f"goal.kinds: no profile of {like!r}, only of {', '.join(map(repr, measured))}: probe "
            f"it with probe.kind={like}, or say which of these it is like"
        )
    profile = measured[like]
    steps = profile.steps
    if wanted.speed != 1:
        steps = tuple(_sped_up(point, wanted.speed) for point in steps)
    measured_side = max((*sides(profile.job), *(point.resolution for point in profile.steps)))
    stated = ""
    if like != wanted.kind or wanted.speed != 1:
        stated = f"{wanted.kind} is taken as {wanted.speed:g} times as fast as {like}"
    return WorkerType(
        name=wanted.kind,
        count=wanted.count,
        price=wanted.price if wanted.price is not None else job.goal.price,
        limit=wanted.memory or job.goal.memory or profile.cluster.memory_bytes,
        least=least_local(profile.network),
        micro_batch=None if job.micro_batch == "auto" else job.micro_batch,
        most=profile.data.train_samples,
        profile=profile,
        times=fit_step_time(
            steps,
            collectives=profile.collectives,
            gradient_bytes=profile.network.trained_bytes,
            link=slowest_link(job) if link_given(job.link) else None,
            several_cores=profile.cluster.several_cores,
            least_share=least_share(profile),
        ),
        memory=fit_memory(
            profile.memory,
            profile.memory_parts,
            device=profile.cluster.device,
            extra=average_bytes(job.averages, profile.network),
            apart=profile.cluster.pieces_apart,
        ),
        # Scaled by the area of the images from the highest resolution measured.
        evaluation_seconds=profile.evaluation_seconds_per_image
        * (max(sides(job)) / measured_side) ** 2
        / wanted.speed,
        speed=wanted.speed,
        preemptions=job.goal.preemptions_of(wanted.kind),
        stated=stated,
        step_split=step_split_of(job),
    )


def link_given(link: Link) -> bool:
    """Whether the job states the network between workers that were not measured together."""
    return link.latency is not None and link.bandwidth is not None


def _sped_up(point: StepTime, speed: float) -> StepTime:
    """A step on a worker that computes ``speed`` times as fast; its exchange takes as long."""
    computing = point.step_seconds - min(point.sync_seconds, point.step_seconds)
    ratio = 1 - computing / point.step_seconds * (1 - 1 / speed)
    return point.scaled(ratio).model_copy(update={"compute_seconds": point.compute_seconds / speed})
