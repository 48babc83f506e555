"""Times of two batch sizes side by side, as workers of a parameter server compute them.

Visits to all pairs take turns until the ratio of each is known well enough or time is up. The
worker processes stay between two measurements, as each result decides which pairs come next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean, median

from batchwright.errors import JobError
from batchwright.prediction.drift import WELL_KNOWN_RATIO, ratio_error
from batchwright.probing.commands import Pair, PairVisited, Point, VisitPair, ignored
from batchwright.probing.course.acquisition import VISIT_SECONDS
from batchwright.probing.course.controller import COMPILATION, PRECISION, Progress
from batchwright.probing.probe import measuring
from batchwright.probing.visiting import Visitor
from batchwright.records import Job, PairTime

BUDGET = 0.5
"""Share of `probe.budget`, or of its least value where it is `auto`, for one measurement of all
pairs. As a rule two or three measurements are needed, which take about as long as the probe."""

MIN_VISITS, ENOUGH_VISITS = 2, 5
"""Least number of visits to each pair, and the number whose scatter can be trusted."""

MeasurePairs = Callable[[Sequence[Pair]], tuple[PairTime, ...]]


@contextmanager
def pair_measurer(
    job: Job,
    counts: Collection[int],
    folder: Path,
    *,
    progress: Progress | None = None,
) -> Iterator[MeasurePairs]:
    """Inside, a function that times two groups of workers side by side, without any exchange.

    The function takes pairs, at least one, and returns their times in the same order. The workers
    stay alive inside.

    Args:
        job: As for `probe.probe`; it names its resolutions.
        counts: Numbers of workers, of both groups together, that pairs may have.
        folder: As for `probe.probe`.
        progress: As for `probe.probe`.

    Raises:
        JobError: There are no counts; or, by the function, a pair does not fit the memory.
        BatchwrightError: As `probe.probe` raises.
    """
    if not counts:
        raise JobError("no pairs to measure: give resolution, workers and batches of both groups")
    rising = sorted(counts)
    with measuring(job, folder, rising) as workers:
        visitor = Visitor(job, workers, rising[-1], ignored)  # it would report single points
        visitor.prepare(seconds=PRECISION * job.probe.first_budget)
        visitor.choose_compilation(seconds=COMPILATION * job.probe.first_budget)
        yield PairVisits(visitor, progress=progress).measure


class PairVisits:
    """Has pairs visited in turn, by a prepared visitor."""

    def __init__(
        self,
        visitor: Visitor,
        *,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._visitor, self._progress, self._clock = visitor, progress, clock
        self._budget = BUDGET * visitor.job.probe.first_budget

    def measure(self, pairs: Sequence[Pair]) -> tuple[PairTime, ...]:
        """Visit the pairs until all ratios are known well enough, or the time is up.

        Raises:
            JobError: A pair does not fit the memory; the message names it.
        """
        for pair in dict.fromkeys(pairs):
            at_once = min(pair.large_batch, self._micro_batch(pair))
            if not self._visitor.weigh(Point(pair.workers, pair.resolution, at_once)):
                raise self._too_large(pair)
        visits: dict[Pair, list[tuple[float, float]]] = {pair: [] for pair in pairs}
        began = self._clock()
        while wanted := [pair for pair in visits if not _known(visits[pair])]:
            seen = min(len(visits[pair]) for pair in wanted)
            spent = self._clock() - began
            if seen >= MIN_VISITS and spent * (seen + 1) / seen > self._budget:
                break
            for pair in wanted:
                self._tell(self._clock() - began, f"measuring {pair}, seconds")
                visits[pair].append(self._visit(pair))
        self._tell(ceil(self._budget), "measured, seconds")
        return tuple(_pair_time(pair, visits[pair]) for pair in pairs)

    def _visit(self, pair: Pair) -> tuple[float, float]:
        """Seconds of a step with the large and with the small batch, means over both stretches."""
        command = VisitPair(
            workers=pair.workers,
            resolution=pair.resolution,
            large_workers=pair.large_workers,
            large_batch=pair.large_batch,
            small_batch=pair.small_batch,
            micro_batch=self._micro_batch(pair),
            seconds=VISIT_SECONDS,
        )
        visited = self._visitor.ask(command, PairVisited, str(pair))
        if visited is None:
            raise self._too_large(pair)
        large = fmean(seconds for seconds, _ in visited.stretches)
        return large, large * exp(fmean(log(small / own) for own, small in visited.stretches))

    def _micro_batch(self, pair: Pair) -> int:
        asked = self._visitor.job.micro_batch
        most = pair.micro_batch or max(pair.large_batch, pair.small_batch)
        return most if asked == "auto" else min(asked, most)

    def _too_large(self, pair: Pair) -> JobError:
        return JobError(
            f"{pair}: a step of {pair.large_batch} samples does not fit the "
            f"{self._visitor.limit / 2**20:.0f} MiB that a worker may use: set "
            "dual.large_batches to less, or goal.memory to what there is"
        )

    def _tell(self, seconds: float, what: str) -> None:
        if self._progress is not None:
            total = ceil(self._budget)
            self._progress(min(total, round(seconds)), total, what)


def _known(visits: Sequence[tuple[float, float]]) -> bool:
    ratios = [small / large for large, small in visits]
    return len(ratios) >= ENOUGH_VISITS and ratio_error(ratios) <= WELL_KNOWN_RATIO


def _pair_time(pair: Pair, visits: Sequence[tuple[float, float]]) -> PairTime:
    large = median(large for large, _ in visits)
    ratios = tuple(small / large for large, small in visits)
    return PairTime(
        resolution=pair.resolution,
        large_workers=pair.large_workers,
        small_workers=pair.small_workers,
        large_batch=pair.large_batch,
        small_batch=pair.small_batch,
        large_seconds=large,
        small_seconds=large * median(ratios),
        repeats=len(visits),
        ratios=ratios,
    )
