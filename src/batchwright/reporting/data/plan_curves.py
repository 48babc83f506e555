"""A plan as curves: time and cost of the whole training against the global batch.

There is one curve for each cluster, with intervals, knee and measured steps. Figure, its JSON file
and page show the same curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from batchwright.records import Estimate, KindCount, Knee, Plan, Prediction, Profile, StepTime
from batchwright.records.registries.optimizers import SGD
from batchwright.records.text.plan_text import (
    Size,
    cluster_words,
    expects_accuracy,
    is_chosen,
    planned_sizes,
)
from batchwright.reporting.data.worker_curves import spread

MAX_CURVES = 5  # as many as can be distinguished by colour

BETWEEN = 12  # points of a smooth curve from one candidate to the next

_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
HEADROOM = 3.5  # top of a chart over the highest curve's minimum; smaller batches are cut off

Range = tuple[float, float, float]  # value, lower end, upper end of the 95 % interval
Row = tuple[float, float, float, float]  # global batch, and a range there


@dataclass(frozen=True)
class CurvePoint:
    """One candidate: seconds, cost and, if known, accuracy (a share) of the whole training."""

    global_batch_size: int
    local_batch_size: int
    seconds: Range
    cost: Range
    chosen: bool
    extrapolated: bool
    assumed: bool
    frontier: bool
    refused: str
    accuracy: Range | None = None


@dataclass(frozen=True)
class MeasuredPoint:
    """Time and cost of the training at a measured step time; ends are the visits' extremes."""

    global_batch_size: int
    seconds: Range
    cost: Range


@dataclass(frozen=True)
class KneePoint:
    """The knee of a cluster's curve; ``low`` and ``high`` are the ends of its interval."""

    global_batch_size: int
    seconds: float
    cost: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ClusterCurve:
    """All candidates of one cluster, batches rising."""

    label: str
    workers: int
    kinds: tuple[tuple[str, int], ...]
    points: tuple[CurvePoint, ...]
    knee: KneePoint | None
    measured: tuple[MeasuredPoint, ...]

    @property
    def chosen(self) -> bool:
        """Whether the plan's own batch is on this curve."""
        return any(point.chosen for point in self.points)


@dataclass(frozen=True)
class PlanCurves:
    """The content of a plan's figure.

    ``priced`` says whether costs are in the price's currency, or without a price in worker-hours.
    ``deadline`` (seconds), ``max_cost`` and ``accuracy_tolerance`` (a share) are those of the goal.
    ``left_out`` is the number of the plan's clusters that are not shown.
    """

    network: str
    data: str
    resolution: int
    epochs: int
    priced: bool
    deadline: float | None
    max_cost: float | None
    clusters: tuple[ClusterCurve, ...]
    left_out: int
    accuracy_tolerance: float = 0.0


def plan_curves(plan: Plan, profiles: Sequence[Profile] = ()) -> PlanCurves:
    """The plan's curves at its highest resolution.

    Args:
        plan: The plan; without candidates it has no curves.
        profiles: Profiles with the measured points.
    """
    side = plan.top_resolution
    groups: dict[tuple[int, tuple[KindCount, ...]], list[Prediction]] = {}
    for one in plan.considered:
        if one.resolution == side:
            groups.setdefault((one.workers, one.kinds), []).append(one)
    priced = bool(groups) and all(one.cost for ones in groups.values() for one in ones)
    shown = _worth_showing(plan, groups)
    knees = {
        (knee.workers, knee.kinds): knee
        for knee in reversed(plan.knees)
        if knee.resolution == plan.top_resolution
    }
    curves = tuple(
        _curve(plan, groups[key], knees.get(key), profiles, priced=priced) for key in shown
    )
    return PlanCurves(
        network=plan.network.name,
        data=plan.data.name,
        resolution=side,
        epochs=plan.likely_epochs(),
        priced=priced,
        deadline=plan.job.goal.deadline,
        max_cost=plan.job.goal.max_cost,
        clusters=curves,
        left_out=len(groups) - len(shown),
        accuracy_tolerance=plan.job.goal.level_within(assumed=expects_accuracy(plan)),
    )


def smooth(rows: Sequence[Row]) -> list[Row]:
    r"""A curve through candidates, with points between them.

    .. math:: T(B) = (D / B) (c_0 + c_1 B) = D c_1 + D c_0 / B

    is linear in :math:`1/B` if a step's time is linear in the batch, so the points between two
    candidates are interpolated linearly in 1/B.

    Args:
        rows: Batch and range of each candidate, batches rising.

    Returns:
        ``BETWEEN`` rows from each candidate on to the next, evenly spaced in log B, and the last.
    """
    drawn: list[Row] = []
    for left, right in pairwise(rows):
        for place in range(BETWEEN):
            batch = left[0] * (right[0] / left[0]) ** (place / BETWEEN)
            share = (1 / left[0] - 1 / batch) / (1 / left[0] - 1 / right[0])
            value, low, high = (
                start + share * (end - start)
                for start, end in zip(left[1:], right[1:], strict=True)
            )
            drawn.append((batch, value, low, high))
    return [*drawn, *rows[-1:]]


def units_of(curves: PlanCurves) -> tuple[tuple[float, str], tuple[float, str]]:
    """Divisor and name of the units for time and for cost; ``curves`` has at least one cluster."""
    time = time_unit(top_of(curves, "seconds"))
    if curves.priced:
        return time, (1.0, "in the price's currency")
    seconds, name = time_unit(3600 * top_of(curves, "cost"))
    return time, (seconds / 3600, f"worker-{name}")


def time_unit(highest: float) -> tuple[float, str]:
    """Seconds and name of the unit in which ``highest``, in seconds, is of readable size."""
    return next((unit for unit in _UNITS if highest >= 2 * unit[0]), _UNITS[-1])


def top_of(curves: PlanCurves, quantity: str) -> float:
    """Top of a chart of ``seconds`` or ``cost``, near the curves' minima, which matter most.

    ``curves`` has at least one cluster.
    """
    lines = [[getattr(one, quantity) for one in cluster.points] for cluster in curves.clusters]
    least = max(min(value for value, _, _ in line) for line in lines)
    highest = max(high for line in lines for _, _, high in line)
    points = [one for cluster in curves.clusters for one in cluster.points]
    chosen = max((getattr(one, quantity)[2] for one in points if one.chosen), default=0.0)
    return 1.06 * float(max(min(highest, HEADROOM * least), 1.2 * chosen))


# ------------------------------------------------------------------------------- which clusters


def _worth_showing(
    plan: Plan, groups: dict[tuple[int, tuple[KindCount, ...]], list[Prediction]]
) -> list[tuple[int, tuple[KindCount, ...]]]:
    """The clusters to show, at most `MAX_CURVES`: the chosen one, both extremes, some between."""
    rising = sorted(groups, key=lambda key: (key[0], cluster_words(*key)))
    curves = [key for key in rising if len(groups[key]) > 1] or rising
    planned = planned_sizes(plan)
    chosen = [key for key in rising if any(is_chosen(plan, one, planned) for one in groups[key])]
    room = MAX_CURVES - len([key for key in chosen if key not in curves])
    kept = {*chosen, *spread(curves, room)}
    while len(kept) > MAX_CURVES:
        kept.remove(next(key for key in reversed(rising) if key in kept and key not in chosen))
    return [key for key in rising if key in kept]


# ------------------------------------------------------------------------------------ one curve


def _curve(
    plan: Plan,
    considered: Sequence[Prediction],
    knee: Knee | None,
    profiles: Sequence[Profile],
    *,
    priced: bool,
) -> ClusterCurve:
    considered = sorted(considered, key=lambda one: one.global_batch_size)
    first = considered[0]
    planned = planned_sizes(plan)
    points = tuple(_point(plan, one, planned, priced=priced) for one in considered)
    bend = None
    if knee is not None:
        at = next((one for one in points if one.global_batch_size == knee.global_batch_size), None)
        if at is not None:
            bend = KneePoint(at.global_batch_size, at.seconds[0], at.cost[0], knee.low, knee.high)
    return ClusterCurve(
        label=cluster_words(first.workers, first.kinds),
        workers=first.workers,
        kinds=tuple((one.kind, one.count) for one in first.kinds),
        points=points,
        knee=bend,
        measured=_measured(plan, considered, points, profiles),
    )


def _training(plan: Plan, one: Prediction) -> Estimate:
    """Seconds of the whole training; without evaluation if its time is unknown."""
    return one.train_seconds or _times(one.epoch_seconds, plan.epochs)


def _times(estimate: Estimate, factor: float) -> Estimate:
    return estimate.mapped(lambda one: factor * one)


def _range(estimate: Estimate) -> Range:
    return estimate.value, estimate.low, estimate.high


def _point(plan: Plan, one: Prediction, planned: frozenset[Size], *, priced: bool) -> CurvePoint:
    seconds = _training(plan, one)
    cost = one.cost if priced and one.cost else _times(seconds, one.workers / 3600)
    return CurvePoint(
        global_batch_size=one.global_batch_size,
        local_batch_size=one.local_batch_size,
        seconds=_range(seconds),
        cost=_range(cost),
        chosen=is_chosen(plan, one, planned),
        extrapolated=one.extrapolated,
        assumed=one.assumed,
        frontier=one.frontier,
        refused=one.refused,
        accuracy=_range(one.accuracy) if one.accuracy else None,
    )


def _measured(
    plan: Plan,
    considered: Sequence[Prediction],
    points: Sequence[CurvePoint],
    profiles: Sequence[Profile],
) -> tuple[MeasuredPoint, ...]:
    """The measured steps of this cluster as time and cost of a training with such steps.

    A measured batch between two candidates takes D / B steps per epoch. Batches beyond the
    candidates are left out, since they would stretch the figure.
    """
    first = considered[0]
    lengths = {one.global_batch_size: one.trained_epochs or plan.epochs for one in considered}
    beside = median(  # seconds of evaluation, which step times do not include
        _training(plan, one).value - lengths[one.global_batch_size] * one.epoch_seconds.value
        for one in considered
    )
    rate = points[0].cost[0] / points[0].seconds[0]
    steps = {
        one.global_batch_size: one.epoch_seconds.value / one.step_seconds.value
        for one in considered
    }
    found = []
    for one, longer in _steps_of(plan, first, profiles):
        batch = one.workers * one.local_batch_size
        if not considered[0].global_batch_size <= batch <= considered[-1].global_batch_size:
            continue
        length = lengths.get(batch, plan.epochs)
        epochs = length * steps.get(batch, plan.data.train_samples / batch)
        least, most = (one.step_low, one.step_high)
        if one.visits:
            least, most = min(one.visits), max(one.visits)
        value, low, high = (epochs * (t + longer) + beside for t in (one.step_seconds, least, most))
        cost = (rate * value, rate * low, rate * high)
        found.append(MeasuredPoint(batch, (value, low, high), cost))
    return tuple(sorted(found, key=lambda one: one.global_batch_size))


def _steps_of(
    plan: Plan, cluster: Prediction, profiles: Sequence[Profile]
) -> list[tuple[StepTime, float]]:
    """Steps measured on the cluster's kind of worker, each with the seconds of a longer update.

    Mixed clusters have none.
    """
    kinds = {one.kind for one in cluster.kinds}
    if len(kinds) > 1:
        return []
    return [
        (one, _longer_update(plan, profile, one.workers))
        for profile in profiles
        if not kinds or kinds == {profile.cluster.kind or profile.cluster.device_name}
        for one in profile.steps
        if (one.workers, one.resolution) == (cluster.workers, plan.top_resolution)
    ]


def _longer_update(plan: Plan, profile: Profile, workers: int) -> float:
    """Seconds that the plan's update takes more than that of measured steps, as in predictions.

    With `optimizer=auto` steps are measured with SGD.
    """
    if profile.job.optimizer != "auto" or plan.job.launcher.simulated:
        return 0.0
    usual, own = (profile.update_time(one, workers) for one in (SGD.name, plan.update))
    return max(0.0, own.seconds - usual.seconds) if own and usual else 0.0
