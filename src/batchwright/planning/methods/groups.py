"""Two groups of workers under one time model: the small batch, the shares and the round time.

`algorithms.dual_batch` solves for step times that are a line. A measured step time is a curve, so
here the line is the chord through both batches, and chord and small batch are found by iteration.
Where such pairs were measured side by side, the chord is theirs: a small error in the fixed time
moves the small batch a lot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchwright.algorithms.batch_size import steps_per_epoch
from batchwright.algorithms.dual_batch import (
    Pair,
    Relative,
    Rounding,
    chord,
    largest_extra_time_unlike,
    solve,
    solve_unlike,
    spread,
    weights_in_time,
)
from batchwright.algorithms.measured_pairs import solved_line
from batchwright.errors import PlanError
from batchwright.records import PairTime

MIN_FIXED = 0.01
"""Least share of a measured step that is taken as fixed. On a busy machine a fit may find no fixed
time, and the run would be refused after its probe; pairs measured side by side correct that."""

_TURNS = 30  # most iterations of chord and pair; two or three suffice
_NOTHING = 1e-9  # share of a step below which a fixed time is rounding
_SAME_LARGE = 0.1  # largest distance of a measured pair's large batch from the wanted one, a share


@dataclass(frozen=True)
class Pace:
    """How long steps take on each worker of a round."""

    # (resolution, local batch) -> seconds of a step without exchange on a worker of speed and
    # overhead 1.
    seconds: Callable[[int, int], float]
    workers: tuple[Relative, ...]  # speed and overhead of each worker, in rank order
    least: int  # fewest samples that a worker can train on
    # Seconds of each worker's push to the parameter server and its pull, in rank order.
    exchange: tuple[float, ...]
    # (resolution, local batch) -> ends of the interval of ``seconds``, as shares of it.
    spread: Callable[[int, int], tuple[float, float]]
    pairs: tuple[PairTime, ...] = ()  # unequal batches that were measured side by side
    # Least share of a step that is taken as fixed: measurements cannot tell less from none, and
    # without a fixed time there is no small batch.
    least_fixed: float = 0.0

    @property
    def overheads(self) -> list[float]:
        """Fixed time of a step on each worker, relative to a usual one's."""
        return [worker.overhead for worker in self.workers]

    @property
    def unlike(self) -> bool:
        """Whether that fixed time differs between workers."""
        return len(set(self.overheads)) > 1

    def chord(self, side: int, batch: int, large: int) -> tuple[float, float]:
        """Seconds per sample and fixed seconds of the line through the steps of two batches."""
        whole = self.seconds(side, large)
        a, b = chord((batch, self.seconds(side, batch)), (large, whole))
        least = self.least_fixed * whole
        if b < least or abs(b) < _NOTHING * whole:
            return (whole - least) / large, least
        return a, b


@dataclass(frozen=True)
class Groups:
    """Both groups of workers in a row of the plan."""

    pair: Pair  # small batch, and samples of a worker of speed 1, on average where overheads differ
    large_batch: int  # local batch of a large-batch worker, in samples
    sample_seconds: float  # seconds per sample of the chord that the pair was solved with
    step_seconds: float  # fixed seconds of that chord
    # Samples of each worker in a round, in rank order; together those of an epoch.
    samples: tuple[int, ...]
    local_batch_sizes: tuple[int, ...]  # local batch of each worker, in samples, in rank order
    round_seconds: float  # seconds of a round until the last worker has ended, exchanges included
    measured: PairTime | None  # the nearest pair that was measured side by side; `None` without any

    def samples_ratio(self, exchange_steps: int | None) -> float:
        """Samples between two exchanges of a small-batch worker over those of a large-batch one.

        Both have speed 1. With one exchange a round (``exchange_steps`` is `None`) it is d_S / d_L,
        else the ratio of the batches.
        """
        if exchange_steps is None or self.pair.small_batch is None:
            return self.pair.factor
        return self.pair.small_batch / self.large_batch

    @property
    def updates(self) -> float:
        """Steps of all workers in a round."""
        return sum(n / size for n, size in zip(self.samples, self.local_batch_sizes, strict=True))

    @property
    def fixed_share(self) -> float:
        """Fixed part of a step with the large batch, as a share of the step."""
        per_batch = self.sample_seconds * self.large_batch
        return self.step_seconds / (self.step_seconds + per_batch)


def grouped(
    pace: Pace,
    side: int,
    large_batch: int,
    *,
    small_workers: int,
    extra_time: float,
    samples: int,
    exchange_steps: int | None = None,
    rounding: Rounding = "round",
) -> Groups:
    """Batches, shares and round time of two groups; the small-batch workers come last.

    Args:
        pace: How long steps take.
        side: Resolution, in pixels.
        large_batch: Local batch of the other workers, in samples.
        small_workers: How many small-batch workers there are.
        extra_time: Time of a round over that with large batches alone.
        samples: Training samples of an epoch.
        exchange_steps: Steps between two exchanges; `None`: one exchange a round.
        rounding: How batches and shares become whole numbers.

    Raises:
        PlanError: No such pair exists, or a share is smaller than its batch.
    """
    large, small = _by_group(pace, small_workers)
    sought = _Sought(side, large_batch, large, small, extra_time, samples, rounding)
    pair, line, measured = _solved(pace, sought)
    small_batch = pair.small_batch or large_batch
    shares = spread(
        pair,
        samples,
        large=weights_in_time(*line, large_batch, large),
        small=weights_in_time(*line, small_batch, small),
    )
    batches = (large_batch,) * len(large) + (small_batch,) * len(small)
    for rank, (share, batch) in enumerate(zip(shares, batches, strict=True)):
        if batch > share:
            raise PlanError(
                f"worker {rank} gets {share} samples in a round, fewer than its local batch {batch}"
                ": give smaller dual.large_batches, or fewer or more even workers"
            )
    a, b = line
    seconds = []
    each = zip(shares, batches, pace.workers, pace.exchange, strict=True)
    for share, batch, worker, exchange in each:
        steps, last = steps_per_epoch(share, batch, pace.least)
        fixed = worker.overhead * b
        computing = (steps - 1) * (a * batch + fixed) + a * last + fixed
        exchanges = 1 if exchange_steps is None else -(-share // (batch * exchange_steps))
        seconds.append(computing / worker.speed + exchange * exchanges)
    return Groups(pair, large_batch, a, max(b, 0.0), shares, batches, max(seconds), measured)


def most_extra_time(
    pace: Pace, side: int, large_batch: int, *, small_workers: int, most: float
) -> float:
    """Largest extra time, up to ``most``, with a small batch that can be trained on.

    Extra time is the time of a round over that with large batches alone.
    """
    if not small_workers:
        return 1.0
    large, small = _by_group(pace, small_workers)
    least = min(pace.least, large_batch)
    if least == large_batch:
        return 1.0
    a, b = pace.chord(side, least, large_batch)
    if b <= 0:
        return 1.0
    bound = largest_extra_time_unlike(a, b, large_batch, small=small, large=large, least=least)
    return min(most, bound)


@dataclass(frozen=True)
class _Sought:
    """The arguments of `grouped` that stay the same while the chord is found."""

    side: int
    large_batch: int
    large: tuple[Relative, ...]
    small: tuple[Relative, ...]
    extra_time: float
    samples: int
    rounding: Rounding

    def pair(self, line: tuple[float, float], least: int) -> Pair:
        if any(worker.overhead != 1 for worker in (*self.large, *self.small)):
            return solve_unlike(
                *line,
                self.large_batch,
                small=self.small,
                large=self.large,
                extra_time=self.extra_time,
                samples=self.samples,
                rounding=self.rounding,
                least=least,
            )
        return solve(
            *line,
            self.large_batch,
            small_workers=sum(worker.speed for worker in self.small),
            large_workers=sum(worker.speed for worker in self.large),
            extra_time=self.extra_time,
            samples=self.samples,
            rounding=self.rounding,
            least=least,
        )


def _by_group(pace: Pace, small_workers: int) -> tuple[tuple[Relative, ...], tuple[Relative, ...]]:
    border = len(pace.workers) - small_workers
    return pace.workers[:border], pace.workers[border:]


def _solved(pace: Pace, sought: _Sought) -> tuple[Pair, tuple[float, float], PairTime | None]:
    """The pair, its chord, and the nearest measured pair if the chord is that of measured pairs."""
    large, small = len(sought.large), len(sought.small)
    fitting = [
        one
        for one in pace.pairs
        if (one.resolution, one.large_workers, one.small_workers) == (sought.side, large, small)
        and abs(one.large_batch / sought.large_batch - 1) <= _SAME_LARGE
        and one.small_batch != one.large_batch
        and one.small_seconds < one.large_seconds
    ]
    if fitting:

        def small_batch_of(*line: float) -> int:
            return sought.pair((line[0], line[1]), pace.least).small_batch or sought.large_batch

        try:
            line, near = solved_line(fitting, small_batch_of)
            return sought.pair(line, pace.least), line, near
        except PlanError:  # measured pairs give no small batch, so the fitted step times are used
            pass
    pair, line = _by_turns(pace, sought)
    return pair, line, None


def _by_turns(pace: Pace, sought: _Sought) -> tuple[Pair, tuple[float, float]]:
    """Chord and pair by iteration: until the chord goes through the pair that it gives."""
    side, large = sought.side, sought.large_batch

    def line_to(batch: int) -> tuple[float, float]:
        other = batch if batch != large else max(large // 2, 1)
        if other == large:  # the large batch is one sample
            other = large + 1
        return pace.chord(side, other, large)

    batch, seen = _crossing(pace, sought), set()
    pair, line = sought.pair(line_to(batch), pace.least), line_to(batch)
    for _ in range(_TURNS):
        if pair.small_batch is None or pair.small_batch == batch or pair.small_batch in seen:
            break
        seen.add(batch)
        batch = pair.small_batch
        line = line_to(batch)
        pair = sought.pair(line, pace.least)
    return pair, line


def _crossing(pace: Pace, sought: _Sought) -> int:
    """The smallest batch whose time per sample the extra time allows: where iteration begins.

    It allows :math:`(t(B_L) / B_L) / r` seconds, with r the samples of a small-batch worker over
    those of a large-batch worker.
    """
    side, large = sought.side, sought.large_batch
    if not sought.small or large <= pace.least:
        return large
    of_large, of_small = (sum(w.speed for w in group) for group in (sought.large, sought.small))
    ratio = (of_large + of_small - sought.extra_time * of_large) / (sought.extra_time * of_small)
    if ratio <= 0:
        return pace.least
    allowed = pace.seconds(side, large) / large / ratio
    smaller = range(pace.least, large)
    return pace.least + bisect_left(
        smaller, True, key=lambda batch: pace.seconds(side, batch) / batch <= allowed
    )


def shown_relative(values: Sequence[float]) -> str:
    """Relative speeds or overheads as text; empty if all are equal.

    >>> shown_relative((1, 1)), shown_relative((1, 0.5))
    ('', '1, 0.5')
    """
    return "" if len(set(values)) == 1 else ", ".join(f"{value:g}" for value in values)
