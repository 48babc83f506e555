"""The curves of a probe: first visits to each, and the time that is left.

A curve is a number of workers and a resolution. Points of all curves take turns, so that the visits
to one of them are apart in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchwright.planning.validation import least_local
from batchwright.probing.acquisition import (
    ladder_of,
    largest_size,
    local_batch_sizes,
    middle_size,
    smallest_size,
)
from batchwright.probing.bench import SMALLEST_BATCH, sides_of
from batchwright.probing.commands import Point
from batchwright.probing.visiting import Visitor

_FIRST_VISITS = 0.4  # of the budget
_KEPT = 0.5  # of it, for the highest one, before lower resolutions have their third batch

Curve = tuple[int, int]  # workers, resolution in pixels


class Curves:
    """What a probe has seen of its curves, and what it may spend on them.

    Args:
        visitor: Has visits made; not prepared yet.
        counts: Numbers of workers to measure, rising.
        clock: Seconds since any moment.

    Attributes:
        visitor, counts: As given.
        all: The curves, lower resolutions first.
        ladders: By number of workers: local batches that may be measured, and those that a plan can
            choose, both rising.
        smallest: By curve: the smallest local batch that is measured as often as others.
        sample_seconds: By curve: the least that a sample was seen to take.
        budget: Seconds that the probe may take.
        trials_seconds: Seconds that went into trials.
    """

    def __init__(self, visitor: Visitor, counts: Sequence[int], clock: Callable[[], float]) -> None:
        self.visitor, self._job = visitor, visitor.job
        self.counts, self._clock, self._began = counts, clock, clock()
        self.all: list[Curve] = []
        self.ladders: dict[int, tuple[list[int], list[int]]] = {}
        self.smallest: dict[Curve, int] = {}
        self.sample_seconds: dict[Curve, float] = {}
        self.budget = self._job.probe.first_budget
        self.trials_seconds = 0.0

    def begin(self, *, may_lengthen: bool) -> None:
        """Smallest, largest and middle batch of each curve, one after the other over all curves.

        Time goes by pixels, as steps do, so that curves begin with about the same batches: plans
        are chosen at the highest resolution.

        Args:
            may_lengthen: Whether the probe may take what all epochs let it.

        Raises:
            JobError: No step fits that could be timed.
        """
        self.all = [(count, side) for side in sides_of(self._job) for count in self.counts]
        self.ladders = {count: self._ladder(count) for count in self.counts}
        for curve in self.all:
            seconds = self.visitor.try_first(Point(*curve, SMALLEST_BATCH))
            self.sample_seconds[curve] = seconds / SMALLEST_BATCH
        self.smallest = {curve: self._smallest(curve) for curve in self.all}
        for curve, smallest in self.smallest.items():
            point = Point(*curve, smallest)
            if point not in self.visitor.ledger.steps:
                self.visit(point)
        if not self.visitor.ledger.steps:
            raise self.visitor.too_large(point)
        largest = self._visit_largest({})
        if may_lengthen and self.lengthen(self._job.epochs):
            largest = self._visit_largest(largest)
        for curve in reversed(self.all):
            workers, side = curve
            middle = middle_size(self.ladders[workers][0], self.smallest[curve], largest[curve])
            # Where steps are that slow, two must do; the highest resolution comes first.
            kept = 0 if side == self.all[-1][1] else _KEPT * self.budget
            if middle and self.left() > kept:
                self.visit(Point(workers, side, middle))

    def _smallest(self, curve: Curve) -> int:
        """The local batch that a curve begins with.

        The first, smallest step is mostly fixed time. Taken as proportional to the batch, it makes
        the wanted batches seem several times too slow. So where they seem too slow, the largest
        batch that still seems affordable is looked at as well, and a line through both decides. The
        look is the first visit to that batch, if it is the one.
        """
        ladder, sizes = self.ladders[curve[0]]
        each = self.sample_seconds[curve]

        def affordable(sample_seconds: float, fixed_seconds: float) -> int:
            return smallest_size(
                ladder,
                sizes[0],
                seconds=self._each(curve),
                sample_seconds=sample_seconds,
                fixed_seconds=fixed_seconds,
                most_steps=self._job.probe.steps,
                loaders=self.visitor.prepared.loaders,
                graphs=self.visitor.job.cuda_graphs == "on",
            )

        size = affordable(each, 0.0)
        if not max(SMALLEST_BATCH, ladder[0]) < size < sizes[0]:
            return size
        point = Point(*curve, size)
        visited = self.visitor.look(point)
        if visited is None:
            return size
        self.sample_seconds[curve] = min(each, visited.shortest / size)
        slope = max(0.0, visited.shortest - SMALLEST_BATCH * each) / (size - SMALLEST_BATCH)
        found = max(size, affordable(slope, visited.shortest - slope * size))
        if found == size:
            self.visitor.keep(point, visited)
        return found

    def _each(self, curve: Curve) -> float:
        """Seconds for the first visits to a curve."""
        pixels = sum(side**2 for _, side in self.all)
        return _FIRST_VISITS * self.budget * curve[1] ** 2 / pixels

    def _visit_largest(self, visited: dict[Curve, int]) -> dict[Curve, int]:
        """Visit the largest batch of each curve that the time allows, unless it was visited."""
        found = {}
        for curve in self.all:
            size = largest_size(
                self.ladders[curve[0]][0],
                self.smallest[curve],
                seconds=self._each(curve),
                sample_seconds=self.sample_seconds[curve],
                most_steps=self._job.probe.steps,
                loaders=self.visitor.prepared.loaders,
                graphs=self.visitor.job.cuda_graphs == "on",
            )
            found[curve] = max(size, visited.get(curve, 0))
            if found[curve] != visited.get(curve):
                self.visit(Point(*curve, size))
        return found

    def visit(self, point: Point) -> None:
        """Time a few steps there, if they fit."""
        seconds = self.visitor.visit(point)
        if seconds is not None:
            each = seconds / point.local_batch_size
            self.sample_seconds[point[:2]] = min(each, self.sample_seconds[point[:2]])

    def lengthen(self, epochs: int) -> bool:
        """Let the probe take what it may of so many epochs; whether that is more than before.

        They take as long as the fastest steps so far, at the top side, at least.
        """
        each = self.sample_seconds
        top = max(side for _, side in each)
        fastest = min(each[workers, side] / workers for workers, side in each if side == top)
        samples, before = epochs * self.visitor.prepared.data.train_samples, self.budget
        self.budget = max(before, self._job.probe.budget_for(samples * fastest))
        return self.budget > before

    def left(self) -> float:
        """Seconds of the budget; starting the processes is not measuring, nor are trials."""
        spent = self._clock() - self._began - self.visitor.restart_seconds
        return self.budget - (spent - self.trials_seconds)

    def _ladder(self, workers: int) -> tuple[list[int], list[int]]:
        """Local batches that may be measured, and those a plan can choose, both rising."""
        job, prepared = self._job, self.visitor.prepared
        least = least_local(prepared.network)
        most = prepared.data.train_samples // job.goal.least_steps // workers
        if job.micro_batch != "auto":
            most = min(most, job.micro_batch)
        sizes = local_batch_sizes(most, least)
        if job.global_batch != "auto" and job.micro_batch == "auto":
            sizes = sorted({*sizes, max(least, -(-job.global_batch // workers))})
        return ladder_of(sizes, least), sizes
