"""Failures, preemptions, checkpoints and restarts: simulates the course of some work on a cluster.

What happens between two failures is known beforehand, so the simulation goes from failure to
failure. Its cost is in proportion to their number, whatever the length of the work or the number of
workers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from batchwright.algorithms.checkpointing import daly_interval, expected_seconds
from batchwright.errors import PlanError
from batchwright.records.clusters.simulation import Part, Span
from batchwright.records.text.formatting import counted, duration

MAX_SPANS = 400
"""Most spans of time that a timeline shows."""
_MAX_TIMES_WORK, _MAX_FAILURES = 100.0, 1_000_000
_MIN_INTERVAL = 1e-9
"""Shortest interval between checkpoints, as a share of the work."""


class EndlessError(PlanError):
    """A training that would practically never end."""


@dataclass(frozen=True)
class Hazards:
    """Failures and preemptions of a training, and how it goes on after them."""

    workers: int  # number of workers that train
    failures: float = 0.0  # failures of one worker in a second, mean
    preemptions: float = 0.0  # preemptions of one worker in a second, mean
    notice: float = 0.0  # seconds between the notice of a preemption and the preemption
    interval: float = inf  # seconds of work between two checkpoints
    cost: float = 0.0  # seconds that a checkpoint holds up work
    restart: float = 0.0  # seconds from a failure until work goes on from the last checkpoint
    replacement: float = 0.0  # seconds until a lost worker is replaced
    spares: int = 0  # number of workers that can take the place of lost ones meanwhile

    @property
    def mean_seconds(self) -> float:
        """Mean seconds between two losses of any worker; infinite where none is lost."""
        rate = self.workers * (self.failures + self.preemptions)
        return 1 / rate if rate else inf

    def draw_preempted(self, generator: np.random.Generator) -> bool:
        """Draw whether a lost worker was preempted rather than failed."""
        return generator.random() * (self.failures + self.preemptions) >= self.failures

    def check(self, work: float) -> None:
        """Refuse a training of ``work`` seconds that would practically never end.

        Raises:
            EndlessError: The work takes more than 100 times as long as without failures and
                checkpoints, or meets a million failures.
        """
        mean = self.mean_seconds
        interval = min(self.interval, max(work, 1e-9))
        if self.interval < min(work, self.cost / _MAX_TIMES_WORK):
            raise EndlessError(
                f"checkpoint_seconds={self.interval:.3g} with {duration(self.cost)} for each "
                "checkpoint (checkpoint_cost) leaves hardly any time for training: "
                "write fewer of them"
            )
        if mean == inf:
            return
        takes = expected_seconds(work, interval, self.cost, self.restart, mean)
        if takes <= _MAX_TIMES_WORK * work and takes / mean <= _MAX_FAILURES:
            return
        if takes <= _MAX_TIMES_WORK * work:
            raise EndlessError(
                f"with {counted(self.workers, 'worker')} one is lost every {duration(mean)}, some "
                f"{takes / mean:,.0f} times in a training as long as this one, and "
                f"{_MAX_FAILURES:,} losses are gone through at most: give fewer epochs or samples"
            )
        # Free checkpoints have a best interval of 0; a hundredth of the mean loses half a percent.
        best = max(daly_interval(self.cost, mean), mean / 100)
        shorter = (
            f"checkpoint_seconds={best:.3g}, "
            if expected_seconds(work, best, self.cost, self.restart, mean) <= _MAX_TIMES_WORK * work
            else ""
        )
        raise EndlessError(
            f"with {counted(self.workers, 'worker')} one is lost every {duration(mean)}, and "
            f"{duration(interval)} of training between checkpoints with {duration(self.restart)} "
            "for a restart leave no time to get on: this training would as good as never end; try "
            f"{shorter}{'fewer workers, ' * (self.workers > 1)}a shorter restart_seconds, or "
            "workers that are lost less often"
        )


@dataclass
class Course:
    """The simulated course of some work; times are in seconds."""

    seconds: float = 0.0  # time from the start
    done: float = 0.0  # work that is done and kept
    checkpoints: float = 0.0  # time of writing checkpoints
    lost: float = 0.0  # time of work that was lost
    restarts: float = 0.0  # time of restarts
    waiting: float = 0.0  # time of waiting for replacements
    # Number of ``failures`` and ``preemptions``.
    counts: Counter[str] = field(default_factory=Counter)
    spans: list[Span] | None = None  # what happened when; `None`: not recorded

    def book(self, part: Part, seconds: float) -> None:
        """Let ``seconds`` pass, and record them as a span of ``part`` if spans are recorded."""
        start, self.seconds = self.seconds, self.seconds + seconds
        if self.spans is not None and seconds > 0 and len(self.spans) <= MAX_SPANS:
            self.spans.append(Span(part=part, start=start, end=self.seconds))


def run_through(
    work: float,
    hazards: Hazards,
    generator: np.random.Generator,
    *,
    until: float = inf,
    record_spans: bool = False,
) -> Course:
    """Simulate some work while workers are lost.

    Args:
        work: Seconds of training and evaluation, without losses and checkpoints.
        hazards: Failures and preemptions; `Hazards.check` refuses those with which it never ends.
        generator: Draws the moments at which workers are lost.
        until: Seconds after which the cluster is gone and the simulation ends.
        record_spans: Whether to record what happened when.
    """
    course = Course(spans=[] if record_spans else None)
    mean = hazards.mean_seconds
    # A tiny interval is bounded from below: it loses no work, but would be divided by.
    interval = min(max(hazards.interval, _MIN_INTERVAL * work), max(work, 1e-9))
    cycle = interval + hazards.cost
    away: list[float] = []
    while True:
        left = work - course.done
        checkpoints = max(ceil(left / interval - 1e-9) - 1, 0)
        needed = left + checkpoints * hazards.cost
        gap = generator.exponential(mean) if mean < inf else inf
        ran = min(gap, needed, until - course.seconds)
        if ran == needed:
            whole, rest = checkpoints, left - checkpoints * interval if checkpoints else left
        else:
            whole = int(ran // cycle)
            rest = ran - whole * cycle
        apart = min(whole, MAX_SPANS) if record_spans else 0  # later ones are booked together
        for times in (*[1] * apart, whole - apart):
            course.book("training", times * interval)
            course.book("checkpoint", times * hazards.cost)
        course.checkpoints += whole * hazards.cost
        course.done += whole * interval if whole else 0.0
        if ran == needed or ran < gap:  # the work has ended, or the time is up
            trained = rest if ran == needed else min(rest, interval)
            course.book("training", trained)
            course.book("checkpoint", rest - trained)  # cut short by the end of the time
            course.checkpoints += rest - trained
            course.done = min(course.done + trained, work)
            return course
        preempted = hazards.draw_preempted(generator)
        course.counts["preemptions" if preempted else "failures"] += 1
        if preempted and hazards.notice >= hazards.cost:
            saved = min(rest, interval)
            course.book("training", saved)
            # A checkpoint begins with the notice, unless one is being written already.
            wrote = max(min(hazards.cost, until - course.seconds), rest - saved)
            course.book("checkpoint", wrote)
            course.done += saved
            course.checkpoints += wrote
        else:
            course.book("lost work", rest)
            course.lost += rest
        _come_back(course, hazards, away, generator, until)
        if course.seconds >= until:
            return course


def _come_back(
    course: Course,
    hazards: Hazards,
    away: list[float],
    generator: np.random.Generator,
    until: float,
) -> None:
    """Wait for a replacement if no spare worker is left, and restart; restarts may fail as well.

    ``away`` has the times at which replacements of lost workers arrive.
    """
    while True:
        heapq.heappush(away, course.seconds + hazards.replacement)
        while away and away[0] <= course.seconds:
            heapq.heappop(away)
        if len(away) > hazards.spares:
            back = sorted(away)[len(away) - hazards.spares - 1]
            # Rounding may take the sum of the seconds so far beyond the end.
            wait = max(min(back, until) - course.seconds, 0.0)
            course.book("waiting for a worker", wait)
            course.waiting += wait
        mean = hazards.mean_seconds
        gap = float(generator.exponential(mean))
        ran = max(min(hazards.restart, gap, until - course.seconds), 0.0)
        course.book("restart", ran)
        course.restarts += ran
        if gap >= hazards.restart or course.seconds >= until:
            return
        preempted = hazards.draw_preempted(generator)
        course.counts["preemptions" if preempted else "failures"] += 1
