"""The curves of a probe: the first visits to each, and the time that is left.

A curve is a number of workers and a resolution. Points of all curves take turns, so that the visits
to one point are apart in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchwright.planning.validation import least_local
from batchwright.probing.bench import SMALLEST_BATCH, sides_of
from batchwright.probing.commands import Point
from batchwright.probing.course.acquisition import (
    ladder_of,
    largest_size,
    local_batch_sizes,
    middle_size,
    smallest_size,
    visit_seconds,
)
from batchwright.probing.visiting import Visitor

_FIRST_VISITS = 0.4  # of the budget
_KEPT = 0.5  # of the budget, to be left before a lower resolution gets its third batch
_FAR_LARGER = 4  # times the batch: less is worth no visit before the others, refinement finds it

Curve = tuple[int, int]  # workers, resolution in pixels


class Curves:
    """The curves of a probe, and the time to spend on them.

    Args:
        visitor: Has points visited; not prepared yet.
        counts: Numbers of workers to measure, rising.
        clock: Returns seconds since any fixed moment.

    ``visitor`` and ``counts`` are attributes, too.

    Attributes:
        all: The curves, lower resolutions first.
        ladders: By number of workers: the local batches that may be measured, and those that a plan
            can choose, both rising.
        smallest: By curve, the smallest local batch that is measured as often as others.
        sample_seconds: By curve, the least seconds per sample so far.
        budget: Seconds that the probe may take.
        trials_seconds: Seconds spent on trials.
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
        """Visit the smallest batch of all curves, then the largest, then the middle ones.

        Each curve gets time in proportion to its pixels, as steps take it, so that all curves begin
        with about the same batches: plans are chosen at the highest resolution.

        Args:
            may_lengthen: Whether the probe may take as long as the training's epochs allow.

        Raises:
            JobError: Not even the smallest steps fit.
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
            # Where steps are too slow for that, two batches suffice; the highest resolution first.
            kept = 0 if side == self.all[-1][1] else _KEPT * self.budget
            if middle and self.left() > kept:
                self.visit(Point(workers, side, middle))

    def _smallest(self, curve: Curve) -> int:
        """The smallest local batch of a curve.

        The first, smallest step is mostly fixed time. Scaled in proportion to the batch, it makes
        the wanted batches seem several times too slow. So where they seem too slow, the largest
        batch that still seems affordable is timed as well, and a line through both decides. These
        times are kept as the batch's first visit if it becomes the smallest.
        """
        ladder, sizes = self.ladders[curve[0]]
        each = self.sample_seconds[curve]

        def affordable(sample_seconds: float, fixed_seconds: float) -> int:
            return smallest_size(
                ladder,
                sizes[0],
                seconds=self._each(curve),
                visit=self._first_visit(sample_seconds, fixed_seconds),
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
        """Seconds to spend on the first visits to a curve."""
        pixels = sum(side**2 for _, side in self.all)
        return _FIRST_VISITS * self.budget * curve[1] ** 2 / pixels

    def _visit_largest(self, visited: dict[Curve, int]) -> dict[Curve, int]:
        """Visit each curve's largest affordable batch, if it was not; returns these batches.

        It seems affordable by the steps of smaller batches, which are mostly fixed time. Where its
        own steps show that a far larger one is, that is visited as well.
        """
        found = {}
        for curve in self.all:
            size = self._largest(curve)
            found[curve] = max(size, visited.get(curve, 0))
            while found[curve] != visited.get(curve):
                self.visit(Point(*curve, size))
                larger = self._largest(curve)
                if larger < _FAR_LARGER * size or self.left() < self._each(curve):
                    break
                found[curve] = size = larger
        return found

    def _largest(self, curve: Curve) -> int:
        """The largest local batch of a curve that is affordable by its quickest samples so far."""
        return largest_size(
            self.ladders[curve[0]][0],
            self.smallest[curve],
            seconds=self._each(curve),
            visit=self._first_visit(self.sample_seconds[curve], 0.0),
        )

    def _first_visit(self, sample_seconds: float, fixed_seconds: float) -> Callable[[int], float]:
        """A function that returns the expected seconds of the first visit to a local batch."""
        return lambda size: self.visit_seconds(fixed_seconds + size * sample_seconds, first=True)

    def visit_seconds(self, step_seconds: float, *, first: bool) -> float:
        """Expected seconds of a visit, the first or a later one, from those of a step."""
        return visit_seconds(
            step_seconds,
            self._job.probe.steps,
            first=first,
            loaders=self.visitor.prepared.loaders,
            graphs=self.visitor.job.cuda_graphs == "on",
        )

    def visit(self, point: Point) -> None:
        """Time a few steps at ``point``, if they fit."""
        seconds = self.visitor.visit(point)
        if seconds is not None:
            each = seconds / point.local_batch_size
            self.sample_seconds[point[:2]] = min(each, self.sample_seconds[point[:2]])

    def lengthen(self, epochs: int) -> bool:
        """Set the budget by a training of ``epochs`` epochs; whether it has become longer.

        The fastest steps so far at the highest resolution give a lower bound of the training's
        time.
        """
        each = self.sample_seconds
        top = max(side for _, side in each)
        fastest = min(each[workers, side] / workers for workers, side in each if side == top)
        samples, before = epochs * self.visitor.prepared.data.train_samples, self.budget
        self.budget = max(before, self._job.probe.budget_for(samples * fastest))
        return self.budget > before

    def left(self) -> float:
        """Seconds left of the budget; restarts of workers, compiling and trials do not count."""
        spent = self._clock() - self._began - self.visitor.restart_seconds
        return self.budget - (spent - self.trials_seconds)

    def _ladder(self, workers: int) -> tuple[list[int], list[int]]:
        """Local batches that may be measured, and those that a plan can choose, both rising."""
        job, prepared = self._job, self.visitor.prepared
        least = least_local(prepared.network)
        most = prepared.data.train_samples // job.goal.least_steps // workers
        if job.micro_batch != "auto":
            most = min(most, job.micro_batch)
        sizes = local_batch_sizes(most, least)
        if job.global_batch != "auto" and job.micro_batch == "auto":
            sizes = sorted({*sizes, max(least, -(-job.global_batch // workers))})
        return ladder_of(sizes, least), sizes
