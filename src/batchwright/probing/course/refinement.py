"""Visits after the first ones: wherever a plan made now would be least certain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import log

from batchwright.errors import BatchwrightError, PlanError
from batchwright.planning.planner import plan_to_measure
from batchwright.prediction.contradictions import contradictions, key_of
from batchwright.prediction.step_time import StepTimeModel, fit_step_time
from batchwright.probing.acquisition import (
    MIN_POINTS,
    OpenChoice,
    is_enough,
    next_point,
    visit_seconds,
)
from batchwright.probing.commands import Point
from batchwright.probing.course.curves import Curve, Curves
from batchwright.records import Plan, Prediction, Profile

_LONGEST_VISIT = 0.15  # of the budget: a batch whose visit takes more must be what a plan would use

# Beyond the budget, for points that contradict each other: a plan's intervals are wide around them,
# and another probe would take the whole budget again. Of 5 s it lets both points
# be visited some five times where steps take 10 ms; two more visits outvote a stray one.
_RECONCILING = 0.5
_MAX_RECONCILING = 6  # rounds: what outlasts them is no stray visit

_MAX_OF_LEFT = 0.8  # of the time left, for visits to batches that a plan is chosen between
_PLANNING = 10  # times as long as the planner takes, it is left alone
_FAR = 2  # times the largest batch measured: a plan says so, and it is measured first


class Refinement:
    """Chooses the visits that make a plan certain, and has them made.

    Args:
        curves: The curves, each visited.
        profile: What is known now.
        clock: Seconds since any moment.
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
            if not contradictions(times):  # else one is astray: more visits will tell
                with suppress(PlanError):  # not enough yet
                    model = fit_step_time(times)
            choice = self._choice(model)
            # Far above all that were measured on its curve: first what the plan would use at the
            # highest resolution, where it is chosen; then what it was chosen over there; then what
            # it would use at lower ones.
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
        """What a plan would rest on if it were made now, as far as that can be measured.

        Where planning takes long, as for thousands of workers, the last answer stands for a while.
        """
        if model is None:  # the points that contradict each other come first
            return OpenChoice()
        began = self._clock()
        if began >= self._ask_again:
            try:
                self._plan = plan_to_measure(self._profile())
            except BatchwrightError:  # not enough yet; or for no probe to settle, as a deadline
                self._plan = None
            self._ask_again = began + _PLANNING * (self._clock() - began)
        if self._plan is None:
            return OpenChoice()
        return self._open_choice(model, self._plan)

    def _open_choice(self, model: StepTimeModel, plan: Plan) -> OpenChoice:
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
            for one, place in considered  # rising, so the largest where there is no knee
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
        """A point that a plan names; more workers than measured compute as the most that were."""
        fewer = [count for count in self._curves.counts if count <= workers]
        return Point(max(fewer, default=self._curves.counts[0]), resolution, size)

    def _is_far(self, place: Point) -> bool:
        """Whether a batch is far above all that were measured on its curve."""
        steps = self._visitor.ledger.steps
        largest = max((p.local_batch_size for p in steps if p[:2] == place[:2]), default=1)
        return place.local_batch_size >= _FAR * largest

    def _nearest(self, model: StepTimeModel, wanted: Point, share: float) -> Point | None:
        """The point of the same curve nearest to one that a plan names; smaller to be affordable.

        At most ``share`` of the time left is given to one that is new. `None` at a resolution that
        is not measured.
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
        """Points worth a visit: that a plan may choose, that may fit, and that take no age.

        Where memory leaves too few of them, those below the smallest serve as well.
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
            with suppress(PlanError):  # nothing fitted on this curve
                step = model.seconds(point.workers, point.resolution, [point.local_batch_size])
            # A line through visits that scatter may be too flat: beyond them samples are taken to
            # last as long as there.
            step = max(step, by_sample) if first else step
        return visit_seconds(
            max(step, 1e-6),
            self._job.probe.steps,
            first=first,
            loaders=self._visitor.prepared.loaders,
            graphs=self._visitor.job.cuda_graphs == "on",
        )

    def _error(self, model: StepTimeModel | None, point: Point, *, compared: bool = False) -> float:
        """Standard error of the model there; without one, as if visits were all that counts.

        If ``compared``, without what all measurements have in common.
        """
        workers, side, size = point
        if model is not None:
            with suppress(PlanError):  # as above
                if compared:
                    return model.comparison_error(workers, side, [size])
                return model.standard_error(workers, side, size)
        return 1 / (1 + len(self._visitor.ledger.steps.get(point, ())))

    def reconcile(self) -> None:
        """Visit points again that a fit would doubt, as slow stretches can make a few visits.

        Either the medians come right, or their scatter widens the errors until they are compatible.
        Batches smaller than any that a plan may choose are not left out: they bear on the curve.
        """
        for _ in range(_MAX_RECONCILING):
            pairs = contradictions(self._visitor.step_times())
            # Each once, also where it is in two pairs.
            for point in sorted({Point(*key_of(step)) for pair in pairs for step in pair}):
                if self._curves.left() < -_RECONCILING * self._curves.budget:
                    return
                self._curves.visit(point)


def _at_knee(plan: Plan, one: Prediction) -> bool:
    """Whether a candidate is at its cluster's knee, or that has none."""
    return any(
        (knee.workers, knee.resolution) == (one.workers, one.resolution)
        and knee.global_batch_size in (None, one.global_batch_size)
        for knee in plan.knees
    )
