"""What to measure next, and whether it is enough: arithmetic on what is known, no processes.

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
"""Timed at one visit: a long one would see one slow stretch of the machine, not several."""

MIN_POINTS = 3
"""Batches a curve is measured at: a line through fewer shows no error."""

# Worth of a point on the curves of those that the choice is between, which bears on them, and of
# one on others. Not nothing: a plan is made for other goals, too, and predicts all of them.
_SAME_CURVE, _OTHER_CURVE = 0.5, 0.25
_DISTURBED = 2.0  # times as uncertain as it seems is what was only measured beside others' work
_FIRST_VISIT_STEPS = 2  # untimed steps that weigh the memory
_RECORDING = 10  # steps that recording CUDA graphs takes as long as
_SMALLEST_SHARE, _LARGEST_SHARE = 0.15, 0.5  # of a curve's time, for its end points


def local_batch_sizes(most: int, least: int) -> list[int]:
    """Local batches worth measuring: powers of two from 16 or less up to ``most``, and ``most``.

    At least `MIN_POINTS` of them, going beyond ``most`` where the data is that small: samples may
    repeat while measuring.

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
    """What a visit will take, in seconds: steps to warm up, timed ones, and weighing at first.

    Where loader processes feed the steps, so many, see `step_time.visit_beside_loading`. Weighing
    and timing record CUDA graphs first, where ``graphs`` replay the steps.
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
    """``sizes``, and below them their smallest halved down to ``least``, for slow steps.

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
    ladder: Sequence[int],
    wanted: int,
    *,
    seconds: float,
    sample_seconds: float,
    fixed_seconds: float = 0.0,
    most_steps: int,
    loaders: int | None = None,
    graphs: bool = False,
) -> int:
    """Local batch to begin a curve with: ``wanted``, or a smaller one where that takes too long.

    Args:
        ladder: From `ladder_of`.
        wanted: One of them.
        seconds: Time for the first visits to this curve.
        sample_seconds: Seconds per sample, of a small batch.
        fixed_seconds: Seconds of a step whatever the batch, as far as known.
        most_steps: Most timed steps at a visit.
        loaders: As for `visit_seconds`.
        graphs: As for `visit_seconds`.
    """
    allowed = _SMALLEST_SHARE * seconds
    for size in reversed([size for size in ladder if size <= wanted]):
        step = fixed_seconds + size * sample_seconds
        visit = visit_seconds(step, most_steps, first=True, loaders=loaders, graphs=graphs)
        if visit <= allowed:
            return size
    return ladder[0]


def largest_size(
    ladder: Sequence[int],
    smallest: int,
    *,
    seconds: float,
    sample_seconds: float,
    most_steps: int,
    loaders: int | None = None,
    graphs: bool = False,
) -> int:
    """Largest local batch to begin a curve with: what the time allows, but two up at least.

    Arguments as for `smallest_size`; ``smallest`` is what that gave.
    """
    above = [size for size in ladder if size > smallest]
    allowed = _LARGEST_SHARE * seconds
    for size in reversed(above[MIN_POINTS - 1 :]):
        step = size * sample_seconds
        visit = visit_seconds(step, most_steps, first=True, loaders=loaders, graphs=graphs)
        if visit <= allowed:
            return size
    return above[: MIN_POINTS - 1][-1] if above else smallest


def middle_size(ladder: Sequence[int], smallest: int, largest: int) -> int | None:
    """The local batch nearest to the geometric mean of two; `None` with none between."""
    target = sqrt(smallest * largest)
    between = [size for size in ladder if smallest < size < largest]
    return min(between, key=lambda size: abs(size - target), default=None)


def expected_peak(measured: Mapping[int, int], fixed: int, size: int) -> float:
    """Bytes that a step of ``size`` samples should take at least, and nearly.

    Every moment of a step holds bytes linear in the batch, so the peak is a convex function of it:
    beyond the largest measured batch it is at least the last segment gone on. With one measured
    batch, what is not fixed is taken as proportional.

    Args:
        measured: Peak bytes by local batch, at the same resolution.
        fixed: Bytes that a step takes whatever the batch.
        size: Samples in the step.
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
    """Visits so far."""

    # What counts of each point, visit by visit: its undisturbed visits or, where it has none, the
    # disturbed ones.
    steps: dict[Point, list[Steps]] = field(default_factory=dict)
    turn: int = 0  # visits made altogether
    _visits: dict[Point, dict[int, Steps]] = field(default_factory=dict)
    _loading: dict[int, StepLoading] = field(default_factory=dict)
    _disturbed: set[int] = field(default_factory=set)

    def add(
        self, point: Point, steps: Iterable[tuple[float, float]], loading: StepLoading | None = None
    ) -> None:
        """Book a visit, and what loading had to do with its steps."""
        self.turn += 1
        self._visits.setdefault(point, {})[self.turn] = tuple(steps)
        if loading is not None:
            self._loading[self.turn] = loading
        self.steps[point] = [self._visits[point][turn] for turn in self._counted(point)]

    def disturb(self, since: int) -> None:
        """Mark the visits after turn ``since``: others were using the machine."""
        self._disturbed.update(range(since + 1, self.turn + 1))
        for point, visits in self._visits.items():
            if max(visits) > since:
                self.steps[point] = [visits[turn] for turn in self._counted(point)]

    def is_disturbed(self, point: Point) -> bool:
        """Whether all that is known of a point was measured beside others' work."""
        return point in self._visits and self._disturbed.issuperset(self._visits[point])

    def loading(self, point: Point) -> list[StepLoading]:
        """That of the visits that count, where loading was beside them."""
        return [self._loading[turn] for turn in self._counted(point) if turn in self._loading]

    def _counted(self, point: Point) -> list[int]:
        visits = self._visits[point]
        return [turn for turn in visits if turn not in self._disturbed] or list(visits)

    def means(self, point: Point) -> list[MeanStep]:
        """The mean step of each visit."""
        return [mean_step(visit) for visit in self.steps.get(point, [])]

    def freshness(self, point: Point, points: int) -> float:
        """How lately a point was visited: 1 is just now, 0 is ``points`` visits ago or never.

        Visits that are apart in time see different states of the machine, so a point that was
        visited lately has less to tell.
        """
        if point not in self._visits:
            return 0.0
        return max(0.0, 1 - (self.turn - max(self._visits[point])) / points)


@dataclass(frozen=True)
class OpenChoice:
    """What a plan of the measurements so far would rest on."""

    used: frozenset[Point] = frozenset()  # points that the plan would train at
    # Points of candidates that measurements cannot tell from the chosen one.
    level: frozenset[Point] = frozenset()
    # Points of each number of workers at its best batch, which were compared.
    best: frozenset[Point] = frozenset()

    def worth(self, point: Point) -> float:
        """How much a point may change the choice: 1 for what it is between."""
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
    """The point whose visit promises most: error / sqrt(time), less where it was visited lately.

    n visits reduce an error by sqrt(n), and cost n times as much, hence the root. An error counts
    by what it may change in the choice.

    Args:
        candidates: New points and visited ones.
        ledger: Visits so far.
        error: Standard error of a point, as a share of its value.
        seconds: What a visit takes.
        left: Seconds left; a visit to a new point may take half of it at most.
        choice: What a plan would rest on; `None`: all points count alike.

    Returns:
        Never the point visited last; `None` if there is time for none.
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
    """Of the 95 % interval of a later measurement, as a share of the value.

    ``error`` is the model's standard error there, ``drift`` the standard deviation of one visit
    about the long run.
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
    """Whether every candidate is known to ``target``, and every curve was looked at enough.

    Where candidates are level with the chosen one, all of these must be known twice as well beside
    each other: what is still level then is so for all purposes.

    Enough is three batches that were visited again: one visit does not tell how repeatable the
    machine is.

    Arguments that `next_point` and `half_width` have are theirs; ``comparison_error`` is beside
    others, without what all measurements have in common; ``target`` is the half width of a 95 %
    interval that is good enough, as a share.
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
