"""Chooses the next point to measure, and decides when to stop: arithmetic, without processes.

A probe is a series of short visits to points. The first visits span what the budget can afford; the
later ones go where the fitted model is least certain for the time they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt

from batchwright.prediction.drift import LATER_VISITS, median_share
from batchwright.prediction.fit import Z_975
from batchwright.probing.commands import Point
from batchwright.probing.measure.step_time import LONG_STEP, MIN_STEPS, in_turns
from batchwright.probing.measure.timing import MeanStep, mean_step
from batchwright.records import StepLoading

FIRST_BATCH = 16
"""Smallest local batch measured where the data are large enough, and steps quick."""

VISIT_SECONDS = 0.4
"""Seconds timed at a visit. Several short visits see more of the machine's slow and fast stretches
than a long one."""

MIN_POINTS = 3
"""Least number of batches on a curve: a line through fewer shows no error."""

# Weights of points that the choice is not between: on the curve of one that it is between, which
# they help to fit, and on other curves. They count, as plans are made for other goals, too.
_SAME_CURVE, _OTHER_CURVE = 0.5, 0.25
_DISTURBED = 2.0  # factor on the error of points that were only measured beside other programs
_FIRST_VISIT_STEPS = 2  # untimed steps that weigh the memory
_RECORDING = 10  # recording CUDA graphs takes as long as so many steps
_SMALLEST_SHARE, _LARGEST_SHARE = 0.15, 0.5  # of a curve's time, for its smallest and largest batch


def local_batch_sizes(most: int, least: int) -> list[int]:
    """Local batches worth measuring: powers of two from 16 or less up to ``most``, and ``most``.

    There are at least `MIN_POINTS`, even beyond ``most`` where the data are that few: measured
    batches may repeat samples.

    Args:
        most: Largest local batch that a plan can choose, in samples.
        least: Smallest one, in samples.

    Example:
        >>> local_batch_sizes(71, 2), local_batch_sizes(30, 2), local_batch_sizes(1, 2)
        ([16, 32, 64, 71], [4, 8, 16, 30], [2, 4, 8])
    """
    first = FIRST_BATCH
    while first > most // 4 and first // 2 >= least:
        first //= 2
    sizes = [first << k for k in range(MIN_POINTS)]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] >= most else [*sizes, most]


def worker_counts(most: int) -> tuple[int, ...]:
    """Powers of two up to ``most``, and ``most``.

    Example:
        >>> worker_counts(1), worker_counts(2), worker_counts(6)
        ((1,), (1, 2), (1, 2, 4, 6))
    """
    powers = {1 << k for k in range(most.bit_length())}
    return tuple(sorted({*powers, most}))


def visit_seconds(
    step_seconds: float,
    most_steps: int,
    *,
    first: bool = False,
    loaders: int | None = None,
    graphs: bool = False,
) -> float:
    """Expected seconds of a visit: steps to warm up, timed steps, and weighing at the first visit.

    Args:
        step_seconds: Seconds of a step.
        most_steps: Most timed steps at a visit.
        first: Whether it is the first visit to the point.
        loaders: Loader processes that feed the steps, see `step_time.visit_beside_loading`;
            `None`: a step makes its batch itself.
        graphs: Whether steps are replayed from CUDA graphs, which weighing and timing each record.
    """
    timed = min(most_steps, max(MIN_STEPS, int(VISIT_SECONDS / step_seconds)))
    warm_up = 1 if step_seconds >= LONG_STEP else 2
    if loaders is not None:
        timed = in_turns(timed, loaders)
        warm_up += loaders + 1 + max(warm_up, loaders)
    if graphs:
        warm_up += _RECORDING * (2 if first else 1)
    return step_seconds * (timed + warm_up + (_FIRST_VISIT_STEPS if first else 0))


def ladder_of(sizes: Sequence[int], least: int) -> list[int]:
    """``sizes``, and below them halves of the smallest down to ``least``, for slow steps.

    Example:
        >>> ladder_of([16, 32, 71], 2)
        [2, 4, 8, 16, 32, 71]
    """
    lower = []
    size = sizes[0]
    while size % 2 == 0 and size // 2 >= least:
        size //= 2
        lower.append(size)
    return [*reversed(lower), *sizes]


def smallest_size(
    ladder: Sequence[int], wanted: int, *, seconds: float, visit: Callable[[int], float]
) -> int:
    """Smallest local batch of a curve: ``wanted``, or a smaller one where that takes too long.

    Args:
        ladder: Local batches of `ladder_of`, rising.
        wanted: One of them.
        seconds: Time for the first visits to this curve.
        visit: Expected seconds of the first visit to a local batch.
    """
    sizes = reversed([size for size in ladder if size <= wanted])
    return next((size for size in sizes if visit(size) <= _SMALLEST_SHARE * seconds), ladder[0])


def largest_size(
    ladder: Sequence[int], smallest: int, *, seconds: float, visit: Callable[[int], float]
) -> int:
    """Largest local batch of a curve's first visits: as time allows, but at least two sizes up.

    Arguments are those of `smallest_size`; ``smallest`` is its result.
    """
    above = [size for size in ladder if size > smallest]
    least = above[: MIN_POINTS - 1][-1] if above else smallest
    sizes = reversed(above[MIN_POINTS - 1 :])
    return next((size for size in sizes if visit(size) <= _LARGEST_SHARE * seconds), least)


def middle_size(ladder: Sequence[int], smallest: int, largest: int) -> int | None:
    """The local batch nearest to the geometric mean of two; `None` where none lies between them."""
    target = sqrt(smallest * largest)
    between = [size for size in ladder if smallest < size < largest]
    return min(between, key=lambda size: abs(size - target), default=None)


def expected_peak(measured: Mapping[int, int], fixed: int, size: int) -> float:
    """A lower bound, and a near one, of the peak bytes of a step of ``size`` samples.

    At every moment of a step the bytes are linear in the batch, so the peak is a convex function of
    it: beyond the largest measured batch it lies on or above the extension of the last segment.
    With one measured batch, the bytes that are not fixed are taken as proportional to the batch.

    Args:
        measured: Peak bytes by local batch, at the same resolution.
        fixed: Bytes of a step that do not depend on the batch.
        size: Samples in the step.

    Returns:
        Bytes; 0 where nothing was measured.
    """
    if not measured:
        return 0.0
    largest = max(measured)
    if size <= largest:
        return measured[min(b for b in measured if b >= size)]
    before = max((b for b in measured if b < largest), default=0)
    low = measured[before] if before else min(fixed, measured[largest])
    slope = (measured[largest] - low) / (largest - before)
    return measured[largest] + slope * (size - largest)


Steps = tuple[tuple[float, float], ...]
"""Seconds of computing and of waiting of each timed step of a visit."""


@dataclass
class Ledger:
    """The visits so far.

    Attributes:
        steps: By point, the visits that count: its undisturbed visits or, where it has none, the
            disturbed ones.
        turn: Number of visits to all points.
    """

    steps: dict[Point, list[Steps]] = field(default_factory=dict)
    turn: int = 0
    _visits: dict[Point, dict[int, Steps]] = field(default_factory=dict)
    _loading: dict[int, StepLoading] = field(default_factory=dict)
    _disturbed: set[int] = field(default_factory=set)

    def add(
        self, point: Point, steps: Iterable[tuple[float, float]], loading: StepLoading | None = None
    ) -> None:
        """Add a visit, with the times of loading where loader processes fed its steps."""
        self.turn += 1
        self._visits.setdefault(point, {})[self.turn] = tuple(steps)
        if loading is not None:
            self._loading[self.turn] = loading
        self.steps[point] = [self._visits[point][turn] for turn in self.counted(point)]

    def disturb(self, since: int) -> None:
        """Mark the visits after turn ``since`` as disturbed: other programs used the machine."""
        self._disturbed.update(range(since + 1, self.turn + 1))
        for point, visits in self._visits.items():
            if max(visits) > since:
                self.steps[point] = [visits[turn] for turn in self.counted(point)]

    def is_disturbed(self, point: Point) -> bool:
        """Whether all visits to a point were disturbed."""
        return point in self._visits and self._visits[point].keys() <= self._disturbed

    def loading(self, point: Point) -> list[StepLoading]:
        """Times of loading in the visits that count, where loader processes fed them."""
        return [self._loading[turn] for turn in self.counted(point) if turn in self._loading]

    def counted(self, point: Point) -> list[int]:
        """Numbers of the visits to a point that count, among all visits, from 1 on."""
        visits = self._visits[point]
        return [turn for turn in visits if turn not in self._disturbed] or list(visits)

    def slowest_left_out(self, point: Point) -> float | None:
        """Seconds of the mean step of the slowest visit that does not count; `None`: all count."""
        counted, visits = self.counted(point), self._visits[point]
        left_out = (mean_step(visits[turn]).seconds for turn in visits if turn not in counted)
        return max(left_out, default=None)

    def means(self, point: Point) -> list[MeanStep]:
        """The mean step of each visit that counts."""
        return [mean_step(visit) for visit in self.steps.get(point, [])]

    def freshness(self, point: Point, points: int) -> float:
        """How recently a point was visited: 1 is just now, 0 is ``points`` visits ago or never.

        Visits that are apart in time see different states of the machine, so another visit to a
        recently visited point adds less information.
        """
        if point not in self._visits:
            return 0.0
        return max(0.0, 1 - (self.turn - max(self._visits[point])) / points)


@dataclass(frozen=True)
class OpenChoice:
    """The points that a plan of the measurements so far depends on.

    Attributes:
        used: Points that the plan would train at.
        level: Points of candidates that the measurements cannot distinguish from the chosen one.
        best: Points of the best batch of each number of workers, which were compared.
    """

    used: frozenset[Point] = frozenset()
    level: frozenset[Point] = frozenset()
    best: frozenset[Point] = frozenset()

    def worth(self, point: Point) -> float:
        """Weight of a point in the choice: 1 for the points that it is between."""
        points = self.used | self.level
        if not points or point in points:
            return 1.0
        curves = {one[:2] for one in points | self.best}
        return _SAME_CURVE if point[:2] in curves else _OTHER_CURVE


def next_point(
    candidates: Sequence[Point],
    ledger: Ledger,
    *,
    error: Callable[[Point], float],
    seconds: Callable[[Point], float],
    left: float,
    choice: OpenChoice | None = None,
) -> Point | None:
    """The point whose visit promises most: by error / sqrt(time), less if visited recently.

    n visits reduce an error by sqrt(n) and cost n times as much, hence the root. The error of a
    point is weighted by its influence on the choice.

    Args:
        candidates: New points and visited ones.
        ledger: Visits so far.
        error: Standard error of a point, as a share of its value.
        seconds: Seconds of a visit to a point.
        left: Seconds left; a visit to a new point may take half of them at most.
        choice: The points that a plan depends on; `None`: all points count alike.

    Returns:
        Never the point visited last; `None` if no point is affordable.
    """
    best, most = None, 0.0
    for point in candidates:
        cost = seconds(point)
        if cost > (left if point in ledger.steps else left / 2):
            continue
        worth = error(point) * (1 - ledger.freshness(point, len(candidates))) / sqrt(cost)
        if ledger.is_disturbed(point):
            worth *= _DISTURBED
        if choice is not None:
            worth *= choice.worth(point)
        if worth > most:
            best, most = point, worth
    return best


def half_width(error: float, drift: float) -> float:
    """Half width of the 95 % interval of a later measurement, as a share of the value.

    Args:
        error: Standard error of the model at the point, as a share.
        drift: Standard deviation of one visit about the long-run value, as a share.
    """
    return Z_975 * hypot(error, drift * median_share(LATER_VISITS))


def is_enough(
    candidates: Sequence[Point],
    ledger: Ledger,
    *,
    error: Callable[[Point], float],
    comparison_error: Callable[[Point], float],
    drift: Callable[[Point], float],
    target: float,
    choice: OpenChoice | None = None,
) -> bool:
    """Whether every candidate is known to ``target``, and every curve was visited enough.

    A curve needs three batches that were visited more than once: one visit does not show how
    repeatable the machine is. Where candidates are level with the chosen one, their comparison has
    to be known twice as well: candidates that are still level then may count as equal.

    Args:
        candidates: As for `next_point`.
        ledger: As for `next_point`.
        error: As for `next_point`.
        comparison_error: Standard error of a point beside others, as a share, without the error
            that all measurements have in common.
        drift: As for `half_width`, by point.
        target: Sufficient half width of a 95 % interval, as a share.
        choice: As for `next_point`.
    """
    revisited: dict[tuple[int, int], int] = {point[:2]: 0 for point in candidates}
    for point, visits in ledger.steps.items():
        revisited[point[:2]] = revisited.get(point[:2], 0) + (len(visits) > 1)
    if min(revisited.values(), default=0) < MIN_POINTS:
        return False
    if any(ledger.is_disturbed(point) for point in candidates):
        return False  # while there is time, a quiet moment may come
    if choice is not None and choice.level:
        between = [point for point in choice.used | choice.level if point in ledger.steps]
        if any(half_width(comparison_error(point), 0.0) > target / 2 for point in between):
            return False
    return all(half_width(error(point), drift(point)) <= target for point in candidates)
