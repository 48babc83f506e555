"""Visits after the first ones: at the points where a plan made now would be least certain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import log

from batchwright.errors import BatchwrightError, PlanError
from batchwright.planning.planner import plan_to_measure
from batchwright.prediction.contradictions import contradictions, key_of
from batchwright.prediction.measured_curves import measured_curves
from batchwright.prediction.step_time import StepTimeModel, fit_step_time
from batchwright.probing.commands import Point
from batchwright.probing.course.acquisition import (
    MIN_POINTS,
    OpenChoice,
    is_enough,
    next_point,
)
from batchwright.probing.course.curves import Curve, Curves
from batchwright.records import Plan, Prediction, Profile

_LONGEST_VISIT = 0.15  # of the budget: slower batches are visited only if a plan would use them

# Share of the budget, beyond it, for points that contradict each other: a plan's intervals are wide
# around them, and another probe would take the whole budget again. With a budget of 5 s and steps
# of 10 ms both points can be visited some five times; two more visits outvote a stray one.
_RECONCILING = 0.5
_MAX_RECONCILING = 6  # rounds: a contradiction that remains after them is not due to a stray visit

_MAX_OF_LEFT = 0.8  # of the time left, for visits to batches that a plan is chosen between
_PLANNING = 10  # a plan is made again after so many times the seconds that it took
_FAR = 2  # a batch so many times as large as any measured one is measured first


class Refinement:
    """Chooses and makes the visits that make a plan more certain.

    Args:
        curves: The curves; each has been visited.
        profile: Returns the profile so far.
        clock: Returns seconds since any fixed moment.
    """

    def __init__(
        self, curves: Curves, profile: Callable[[], Profile], clock: Callable[[], float]
    ) -> None:
        self._curves, self._visitor = curves, curves.visitor
        self._job, self._profile, self._clock = curves.visitor.job, profile, clock
        self._plan: Plan | None = None
        self._ask_again = clock()

    def refine(self) -> None:
        """Visit points until a plan is certain enough, or time is up."""
        ledger, settings = self._visitor.ledger, self._job.probe
        while True:
            model, times = None, self._visitor.step_times()
            with suppress(PlanError):  # there are too few visits yet
                if not measured_curves(times).doubtful:  # else more visits will show what is astray
                    model = fit_step_time(times)
            choice = self._choice(model)
            # Batches far above all that were measured on their curve are visited first: the ones
            # that the plan would use at the highest resolution, at which it is chosen; then the
            # ones that they were chosen over there; then the ones used at lower resolutions.
            top = self._curves.all[-1][1]
            here = sorted(point for point in choice.used if point.resolution == top)
            below = sorted(point for point in choice.used if point.resolution != top)
            far = next(filter(self._is_far, (*here, *sorted(choice.best), *below)), None)
            if far is not None:
                self._curves.visit(far)
                continue
            worth = (point for curve in self._curves.all for point in self._on_curve(curve, model))
            candidates = [*dict.fromkeys([*worth, *choice.used, *choice.level])]
            errors = {point: self._error(model, point) for point in candidates}
            if model is not None and is_enough(
                candidates,
                ledger,
                error=errors.__getitem__,
                comparison_error=lambda point: self._error(model, point, compared=True),  # noqa: B023
                drift=lambda point: model.visit_deviation(*point),  # noqa: B023
                target=settings.error,
                choice=choice,
            ):
                return
            point = next_point(
                candidates,
                ledger,
                error=errors.__getitem__,
                seconds=lambda point: self._seconds(model, point),  # noqa: B023 - used at once
                left=self._curves.left(),
                choice=choice,
            )
            if point is None:
                return
            self._curves.visit(point)

    def _choice(self, model: StepTimeModel | None) -> OpenChoice:
        """The points that a plan made now would depend on, as far as they can be measured.

        Where planning takes long, as for thousands of workers, the last plan is used for a while.
        """
        if model is None:  # points that contradict each other come first
            return OpenChoice()
        began = self._clock()
        if began >= self._ask_again:
            try:
                self._plan = plan_to_measure(self._profile())
            except BatchwrightError:  # too little is known yet, or no plan keeps, say, a deadline
                self._plan = None
            self._ask_again = began + _PLANNING * (self._clock() - began)
        plan = self._plan
        if plan is None:
            return OpenChoice()
        used = {
            self._place(stage.workers, stage.resolution, min(size, stage.micro_batch_size))
            for stage in plan.stages
            for size in (max(stage.local_batch_sizes), min(stage.local_batch_sizes))
        }
        considered = [
            (one, self._place(one.workers, one.resolution, one.micro_batch_size))
            for one in plan.considered
        ]
        level = {place for one, place in considered if one.level}
        best = {
            place[:2]: place
            for one, place in considered  # rising: the largest batch counts where there is no knee
            if one.resolution == plan.top_resolution and not one.refused and _at_knee(plan, one)
        }
        at_best = set(best.values())
        share = _MAX_OF_LEFT / max(1, sum(map(self._is_far, at_best)))
        return OpenChoice(
            *(
                frozenset(filter(None, (self._nearest(model, one, share) for one in points)))
                for points in (used, level, at_best)
            )
        )

    def _place(self, workers: int, resolution: int, size: int) -> Point:
        """A point that a plan names; with more workers than measured, the most measured ones."""
        fewer = [count for count in self._curves.counts if count <= workers]
        return Point(max(fewer, default=self._curves.counts[0]), resolution, size)

    def _is_far(self, place: Point) -> bool:
        """Whether a batch is far above all that were measured on its curve."""
        steps = self._visitor.ledger.steps
        largest = max((p.local_batch_size for p in steps if p[:2] == place[:2]), default=1)
        return place.local_batch_size >= _FAR * largest

    def _nearest(self, model: StepTimeModel, wanted: Point, share: float) -> Point | None:
        """The affordable point of the same curve that is nearest to, or below, one of a plan.

        A visit to a new point may take at most ``share`` of the time left. `None` at a resolution
        that is not measured.
        """
        curve, size = wanted[:2], wanted.local_batch_size
        if curve not in self._curves.all:
            return None
        ladder = [Point(*curve, one) for one in self._curves.ladders[curve[0]][0]]
        near = min(ladder, key=lambda point: abs(log(point.local_batch_size / size)))
        for point in reversed(ladder[: ladder.index(near) + 1]):
            seen = point in self._visitor.ledger.steps
            if self._visitor.may_fit(point) and (
                seen or self._seconds(model, point) <= share * self._curves.left()
            ):
                return point
        return None

    def _on_curve(self, curve: Curve, model: StepTimeModel | None) -> list[Point]:
        """Points of a curve to visit: a plan may choose them, they may fit, and are not too slow.

        Where too few such points fit the memory, batches below the curve's smallest are included.
        """
        longest = _LONGEST_VISIT * self._curves.budget
        points = [Point(*curve, size) for size in self._curves.ladders[curve[0]][0]]
        fitting = [
            point
            for point in points
            if self._visitor.may_fit(point)
            and (point in self._visitor.ledger.steps or self._seconds(model, point) <= longest)
        ]
        wanted = [p for p in fitting if p.local_batch_size >= self._curves.smallest[curve]]
        return wanted if len(wanted) >= MIN_POINTS else fitting[-MIN_POINTS:]

    def _seconds(self, model: StepTimeModel | None, point: Point) -> float:
        first = point not in self._visitor.ledger.steps
        step = by_sample = self._curves.sample_seconds[point[:2]] * point.local_batch_size
        if model is not None:
            with suppress(PlanError):  # nothing is fitted on this curve
                step = model.seconds(*point)
            # A line through scattering visits may be too flat: beyond the visits, a sample is
            # assumed to take at least as long as in them.
            step = max(step, by_sample) if first else step
        return self._curves.visit_seconds(max(step, 1e-6), first=first)

    def _error(self, model: StepTimeModel | None, point: Point, *, compared: bool = False) -> float:
        """Standard error of the model at a point; without a model, a number that falls with visits.

        If ``compared``, without the error that all measurements have in common.
        """
        workers, side, size = point
        if model is not None:
            with suppress(PlanError):  # nothing is fitted on this curve
                if compared:
                    return model.comparison_error(workers, side, size)
                return model.standard_error(workers, side, size)
        return 1 / (1 + len(self._visitor.ledger.steps.get(point, ())))

    def reconcile(self) -> None:
        """Visit points again that contradict each other, as after visits in a slow stretch.

        Either the medians become compatible, or the scatter widens their errors until they are.
        Batches smaller than any that a plan may choose are included: the curve depends on them.
        """
        for _ in range(_MAX_RECONCILING):
            pairs = contradictions(self._visitor.step_times())
            # Each point once, even if it is in two pairs.
            for point in sorted({Point(*key_of(step)) for pair in pairs for step in pair}):
                if self._curves.left() < -_RECONCILING * self._curves.budget:
                    return
                self._curves.visit(point)


def _at_knee(plan: Plan, one: Prediction) -> bool:
    """Whether a candidate has the batch of its workers' knee, or they have no knee."""
    return any(
        (knee.workers, knee.resolution) == (one.workers, one.resolution)
        and knee.global_batch_size in (None, one.global_batch_size)
        for knee in plan.knees
    )
