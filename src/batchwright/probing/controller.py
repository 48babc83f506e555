"""The course of a probe: what is measured when, within the budget.

    a quiet moment, if one comes soon --> memory and a first step -->
    three batches of each curve --> exchange, noise, evaluation -->
    visits wherever the fitted model is least certain, until it is certain enough or time is up -->
    further visits to points that contradict each other --> trials

Where training ends at a target, trials tell how long it is going to take, and so for how long it
pays to measure: they come after the least of visits, and what is left of these after them.

A curve is a number of workers and a resolution. Points of all curves take turns, so that the visits
to one of them are apart in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import log
from typing import Any

from batchwright.errors import BatchwrightError, PlanError, one_line
from batchwright.planning.candidates.learnt import teaches
from batchwright.planning.planner import plan_to_measure
from batchwright.planning.validation import least_local
from batchwright.prediction.collective import Operation
from batchwright.prediction.contradictions import contradictions, key_of
from batchwright.prediction.step_time import StepTimeModel, fit_step_time
from batchwright.probing import commands
from batchwright.probing.acquisition import (
    MIN_POINTS,
    OpenChoice,
    is_enough,
    ladder_of,
    largest_size,
    local_batch_sizes,
    middle_size,
    next_point,
    smallest_size,
    visit_seconds,
)
from batchwright.probing.bench import SMALLEST_BATCH, sides_of
from batchwright.probing.commands import Point, ignored
from batchwright.probing.learning import TrialProgress, run_trials
from batchwright.probing.measure.collective import SIZES
from batchwright.probing.measure.evaluation import passes
from batchwright.probing.visiting import Visitor
from batchwright.records import (
    CollectiveTime,
    GradientNoise,
    Plan,
    Prediction,
    Profile,
    Trial,
    UpdateTime,
)
from batchwright.workload.load import MIN_SECONDS

Progress = Callable[[int, int, str], None]

# Shares of the budget.
PRECISION = 0.1
RECOMPUTATION = 0.1  # where memory is short
COMPILATION = 0.1  # where it is asked for, besides compiling
_EXCHANGE = 0.05
_NOISE = 0.1
_EVALUATION = 0.05
_UPDATES = 0.01  # on each optimizer
_FIRST_VISITS = 0.4
_LONGEST_VISIT = 0.15  # a batch whose visit takes more is measured only if a plan would use it
_KEPT = 0.5  # for what matters to the choice, before lower resolutions have their third batch

# Beyond the budget, for points that contradict each other: a plan's intervals are wide around them,
# and another probe would take the whole budget again. Of 5 s it lets both points
# be visited some five times where steps take 10 ms; two more visits outvote a stray one.
_RECONCILING = 0.5
_MAX_RECONCILING = 6  # rounds: what outlasts them is no stray visit

# Of the budget, at most, to let others' work end that would be measured with ours.
_WAITING = 0.1
_PAUSE = MIN_SECONDS  # between two looks at the machine

_MAX_OF_LEFT = 0.8  # of the time left, for visits to batches that a plan is chosen between
_PLANNING = 10  # times as long as the planner takes, it is left alone
_FAR = 2  # times the largest batch measured: a plan says so, and it is measured first

_PART = 16  # samples whose gradient is taken for the noise scale
_EVALUATION_BATCH = 256
_EVALUATION_REPEATS = 4

Curve = tuple[int, int]  # workers, resolution in pixels


class Controller:
    """One probe.

    Args:
        visitor: Has visits made; not prepared yet.
        counts: Numbers of workers to measure, rising.
        report: Called with what is measured next.
        report_trial: Called with the trial that is made, and how far it has come.
        keep: Takes the profile before each trial.
        clock: Seconds since any moment.
        sleep: Lets so many of these seconds pass.
        started: When the probe began, by that clock.
    """

    def __init__(
        self,
        visitor: Visitor,
        counts: Sequence[int],
        *,
        report: Callable[[str], None],
        report_trial: TrialProgress = ignored,
        keep: Callable[[Profile], None] = ignored,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        started: float,
    ) -> None:
        self._visitor, self._job = visitor, visitor.job
        self._counts, self._report = counts, report
        self._report_trial, self._keep = report_trial, keep
        self._clock, self._sleep = clock, sleep
        self._started = started
        self._budget = self._job.probe.first_budget
        self._began = clock()
        self._sample_seconds: dict[Curve, float] = {}  # the least that was seen
        self._smallest: dict[Curve, int] = {}
        self._figures: dict[str, Any] = {}
        self._plan: Plan | None = None
        self._ask_again = self._began
        self._trials: tuple[Trial, ...] = ()
        self._trials_seconds = 0.0

    def measure(self) -> Profile:
        """Measure everything.

        Raises:
            JobError: The job cannot be measured as asked.
            WorkerError: The workers were killed too often.
        """
        visitor = self._visitor
        visitor.prepare(seconds=PRECISION * self._job.probe.first_budget)
        visitor.choose_recomputation(
            self._counts[0], seconds=RECOMPUTATION * self._job.probe.first_budget
        )
        visitor.choose_compilation(seconds=COMPILATION * self._job.probe.first_budget)
        self._wait_for_others()
        self._curves = [(count, side) for side in sides_of(self._job) for count in self._counts]
        self._ladders = {count: self._ladder(count) for count in self._counts}
        self._begin()
        self._figures = {
            "collectives": self._exchanges(),
            "noise": self._noise(),
            "evaluation_seconds_per_image": self._evaluation(),
            "updates": self._updates(),
        }
        self._refine()
        self._reconcile()
        left = self._left()
        profile = self.learn(self._profile().model_copy(update={"load": visitor.load()}))
        if not self._trials_first:
            return profile
        self._trials, self._trials_seconds = profile.trials, left - self._left()
        self._ask_again = self._clock()  # what was chosen without trials no longer counts
        if self._lengthen(self._likely_epochs(profile)):
            self._refine()
            self._reconcile()
        told = {"load": visitor.load(), "trials_note": profile.trials_note}
        return self._profile().model_copy(update=told)

    @property
    def _trials_first(self) -> bool:
        """Whether trials are to tell what the training takes, and so what the probe may."""
        probe = self._job.probe
        to_target = self._job.goal.target is not None and teaches(self._job)
        return probe.budget == "auto" and probe.learning > 0 and to_target

    def _likely_epochs(self, profile: Profile) -> int:
        """Epochs that the training is likely to take, by trials; without any all of them."""
        if profile.trials:
            with suppress(BatchwrightError):
                return plan_to_measure(profile).likely_epochs()
        return self._job.epochs

    def _lengthen(self, epochs: int) -> bool:
        """Let the probe take what it may of so many epochs; whether that is more than before.

        They take as long as the fastest steps so far, at the top side, at least.
        """
        each = self._sample_seconds
        top = max(side for _, side in each)
        fastest = min(each[workers, side] / workers for workers, side in each if side == top)
        samples, before = epochs * self._visitor.prepared.data.train_samples, self._budget
        self._budget = max(before, self._job.probe.budget_for(samples * fastest))
        return self._budget > before

    def _profile(self) -> Profile:
        visitor, prepared = self._visitor, self._visitor.prepared
        return Profile(
            job=visitor.job,
            data=prepared.data,
            network=prepared.network,
            cluster=visitor.cluster(),
            precisions=visitor.precisions,
            precision_ratio=visitor.precision_ratio,
            recomputation=visitor.recomputation,
            compilation=visitor.compilation,
            steps=visitor.step_times(),
            kinds=visitor.kinds(),
            memory=visitor.memory_points(),
            memory_parts=prepared.parts,
            out_of_memory=visitor.lost_points(),
            **self._figures,
            trials=self._trials,
            probe_seconds=self._clock() - self._started,
        )

    def _wait_for_others(self) -> None:
        """Wait a little while other programs use the machine: they may be about to end."""
        waited = 0.0
        while (
            self._visitor.is_disturbed(waiting=True) and waited + _PAUSE <= _WAITING * self._budget
        ):
            self._report("nothing: waiting for other programs")
            self._sleep(_PAUSE)
            waited += _PAUSE

    # ------------------------------------------------------------------------------ first visits

    def _begin(self) -> None:
        """Smallest, largest and middle batch of each curve, one after the other over all curves.

        Time goes by pixels, as steps do, so that curves begin with about the same batches: plans
        are chosen at the highest resolution.
        """
        for curve in self._curves:
            seconds = self._visitor.try_first(Point(*curve, SMALLEST_BATCH))
            self._sample_seconds[curve] = seconds / SMALLEST_BATCH
        for curve in self._curves:
            workers, side = curve
            ladder, sizes = self._ladders[workers]
            smallest = smallest_size(
                ladder,
                sizes[0],
                seconds=self._each(curve),
                sample_seconds=self._sample_seconds[curve],
                most_steps=self._job.probe.steps,
                loaders=self._visitor.prepared.loaders,
            )
            self._smallest[curve] = smallest
            self._visit(Point(workers, side, smallest))
        largest = self._visit_largest({})
        if (
            self._job.probe.budget == "auto"
            and not self._trials_first
            and self._lengthen(self._job.epochs)
        ):
            largest = self._visit_largest(largest)
        for curve in reversed(self._curves):
            workers, side = curve
            middle = middle_size(self._ladders[workers][0], self._smallest[curve], largest[curve])
            # Where steps are that slow, two must do; the highest resolution comes first.
            kept = 0 if side == self._curves[-1][1] else _KEPT * self._budget
            if middle and self._left() > kept:
                self._visit(Point(workers, side, middle))

    def _each(self, curve: Curve) -> float:
        """Seconds for the first visits to a curve."""
        pixels = sum(side**2 for _, side in self._curves)
        return _FIRST_VISITS * self._budget * curve[1] ** 2 / pixels

    def _visit_largest(self, visited: dict[Curve, int]) -> dict[Curve, int]:
        """Visit the largest batch of each curve that the time allows, unless it was visited."""
        found = {}
        for curve in self._curves:
            size = largest_size(
                self._ladders[curve[0]][0],
                self._smallest[curve],
                seconds=self._each(curve),
                sample_seconds=self._sample_seconds[curve],
                most_steps=self._job.probe.steps,
                loaders=self._visitor.prepared.loaders,
            )
            found[curve] = max(size, visited.get(curve, 0))
            if found[curve] != visited.get(curve):
                self._visit(Point(*curve, size))
        return found

    def _visit(self, point: Point) -> None:
        seconds = self._visitor.visit(point)
        if seconds is not None:
            each = seconds / point.local_batch_size
            self._sample_seconds[point[:2]] = min(each, self._sample_seconds[point[:2]])

    def _ladder(self, workers: int) -> tuple[list[int], list[int]]:
        """Local batches that may be measured, and those a plan can choose, both rising."""
        job, prepared = self._job, self._visitor.prepared
        least = least_local(prepared.network)
        most = prepared.data.train_samples // job.goal.least_steps // workers
        if job.micro_batch != "auto":
            most = min(most, job.micro_batch)
        sizes = local_batch_sizes(most, least)
        if job.global_batch != "auto" and job.micro_batch == "auto":
            sizes = sorted({*sizes, max(least, -(-job.global_batch // workers))})
        return ladder_of(sizes, least), sizes

    # ------------------------------------------------------------------------------ other figures

    def _exchanges(self) -> tuple[CollectiveTime, ...]:
        sizes = sorted({*SIZES, self._visitor.prepared.network.trained_bytes})
        operations: tuple[Operation, ...] = ("all-reduce", "push-pull")
        asked = [
            (operation, count, size)
            for operation in operations
            for count in self._counts
            if count > 1
            for size in sizes
        ]
        times = []
        for operation, count, size in asked:
            self._report(f"exchange of {size:,} bytes, {count} workers")
            seconds = _EXCHANGE * self._budget / len(asked)
            command = commands.Exchange(
                operation=operation, workers=count, bytes=size, seconds=seconds
            )
            answer = self._visitor.ask(command, commands.Exchanged, "exchanging gradients")
            if answer is not None:
                times.append(answer.time)
        return tuple(times)

    def _noise(self) -> GradientNoise | None:
        self._report("gradient noise")
        curve = self._curves[-1]
        visited = [p.local_batch_size for p in self._visitor.ledger.steps if p[:2] == curve]
        command = commands.MeasureNoise(
            workers=curve[0],
            resolution=curve[1],
            # Larger parts take hardly longer, and tell of as many more samples.
            part_size=max(self._smallest[curve], min(_PART, max(visited))),
            seconds=_NOISE * self._budget,
        )
        answer = self._visitor.ask(command, commands.NoiseMeasured, "measuring gradient noise")
        return answer.noise if answer else None

    def _evaluation(self) -> float:
        self._report("evaluation")
        curve = self._curves[-1]
        each = passes(_EVALUATION_REPEATS, self._visitor.prepared.loaders or 0)
        affordable = _EVALUATION * self._budget / sum(each)
        size = max(1, min(_EVALUATION_BATCH, int(affordable / self._sample_seconds[curve])))
        while True:
            command = commands.Evaluate(
                workers=curve[0], batch_size=size, repeats=_EVALUATION_REPEATS
            )
            answer = self._visitor.ask(command, commands.Evaluated, "evaluating")
            if answer is not None:
                return answer.seconds_per_image
            size = max(1, size // 4)  # too much for the memory; restarts are counted

    def _updates(self) -> tuple[UpdateTime, ...]:
        """Of the optimizers, where the plan is to choose one."""
        if self._job.optimizer != "auto":
            return ()
        self._report("optimizers")
        command = commands.TimeUpdates(workers=self._curves[-1][0], seconds=_UPDATES * self._budget)
        answer = self._visitor.ask(command, commands.UpdatesTimed, "updating weights")
        return answer.times if answer else ()

    # --------------------------------------------------------------------------------- refinement

    def _refine(self) -> None:
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
            top = self._curves[-1][1]
            here = sorted(point for point in choice.used if point.resolution == top)
            below = sorted(point for point in choice.used if point.resolution != top)
            far = next(filter(self._is_far, (*here, *sorted(choice.best), *below)), None)
            if far is not None:
                self._visit(far)
                continue
            worth = (point for curve in self._curves for point in self._on_curve(curve, model))
            candidates = [*dict.fromkeys([*worth, *choice.used, *choice.level])]
            errors = {point: self._error(model, point) for point in candidates}
            if model is not None and is_enough(
                candidates,
                ledger,
                error=errors.__getitem__,
                comparison_error=lambda point: self._error(model, point, compared=True),  # noqa: B023
                drift=model.drift,
                target=settings.error,
                choice=choice,
            ):
                return
            point = next_point(
                candidates,
                ledger,
                error=errors.__getitem__,
                seconds=lambda point: self._seconds(model, point),  # noqa: B023 - used at once
                left=self._left(),
                choice=choice,
            )
            if point is None:
                return
            self._visit(point)

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
        fewer = [count for count in self._counts if count <= workers]
        return Point(max(fewer, default=self._counts[0]), resolution, size)

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
        if curve not in self._curves:
            return None
        ladder = [Point(*curve, one) for one in self._ladders[curve[0]][0]]
        near = min(ladder, key=lambda point: abs(log(point.local_batch_size / size)))
        for point in reversed(ladder[: ladder.index(near) + 1]):
            seen = point in self._visitor.ledger.steps
            if seen or (
                self._visitor.may_fit(point) and self._seconds(model, point) <= share * self._left()
            ):
                return point
        return None

    def _reconcile(self) -> None:
        """Visit points again that a fit would doubt, as slow stretches can make a few visits.

        Either the medians come right, or their scatter widens the errors until they are compatible.
        Batches smaller than any that a plan may choose are not left out: they bear on the curve.
        """
        for _ in range(_MAX_RECONCILING):
            pairs = contradictions(self._visitor.step_times())
            # Each once, also where it is in two pairs.
            for point in sorted({Point(*key_of(step)) for pair in pairs for step in pair}):
                if self._left() < -_RECONCILING * self._budget:
                    return
                self._visit(point)

    def learn(self, profile: Profile) -> Profile:
        """The profile with trials, in time of their own; those that it has are not made again."""
        earlier = profile.probe_seconds - (self._clock() - self._started)

        def timed(known: Profile) -> Profile:
            seconds = earlier + (self._clock() - self._started)
            return known.model_copy(update={"probe_seconds": seconds})

        try:
            plan = plan_to_measure(profile.model_copy(update={"trials": ()}))
        except BatchwrightError as error:  # no plan, nothing to choose
            note = f"there are no trials, as there is no plan: {one_line(error)}"
            wanted = profile.job.probe.learning and teaches(profile.job)
            return profile.model_copy(
                update={"trials_open": False, "trials_note": note if wanted else ""}
            )
        taught = run_trials(
            self._visitor,
            profile,
            plan,
            report=self._report_trial,
            keep=lambda known: self._keep(timed(known)),
            clock=self._clock,
        )
        return timed(taught)

    def _left(self) -> float:
        """Seconds of the budget; starting the processes is not measuring, nor are trials."""
        spent = self._clock() - self._began - self._visitor.restart_seconds
        return self._budget - (spent - self._trials_seconds)

    def _on_curve(self, curve: Curve, model: StepTimeModel | None) -> list[Point]:
        """Points worth a visit: that a plan may choose, that may fit, and that take no age.

        Where memory leaves too few of them, those below the smallest serve as well.
        """
        longest = _LONGEST_VISIT * self._budget
        points = [Point(*curve, size) for size in self._ladders[curve[0]][0]]
        fitting = [
            point
            for point in points
            if self._visitor.may_fit(point)
            and (point in self._visitor.ledger.steps or self._seconds(model, point) <= longest)
        ]
        wanted = [p for p in fitting if p.local_batch_size >= self._smallest[curve]]
        return wanted if len(wanted) >= MIN_POINTS else fitting[-MIN_POINTS:]

    def _seconds(self, model: StepTimeModel | None, point: Point) -> float:
        step = self._sample_seconds[point[:2]] * point.local_batch_size
        if model is not None:
            with suppress(PlanError):  # nothing fitted on this curve
                step = model.seconds(point.workers, point.resolution, [point.local_batch_size])
        first = point not in self._visitor.ledger.steps
        return visit_seconds(
            max(step, 1e-6),
            self._job.probe.steps,
            first=first,
            loaders=self._visitor.prepared.loaders,
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


def _at_knee(plan: Plan, one: Prediction) -> bool:
    """Whether a candidate is at its cluster's knee, or that has none."""
    return any(
        (knee.workers, knee.resolution) == (one.workers, one.resolution)
        and knee.global_batch_size in (None, one.global_batch_size)
        for knee in plan.knees
    )
