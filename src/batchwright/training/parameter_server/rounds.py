"""Rounds with a parameter server: which worker trains on which samples next, and which waits.

The samples of all epochs are one stream, epoch after epoch, each in its own seeded order. A round
is the next stretch of it, handed to the worker that asks. So every sample of an epoch is trained on
exactly once, whoever is slow, dies or comes back; and what a round does (resolution, batch, rate)
follows from where in the stream it is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from batchwright.algorithms.partition import apportion
from batchwright.records import Plan, Stage

FOLLOWING = 0.01
"""Shares are made anew where a worker's would change by more than this part of it: a round has many
steps, so its time is known better than a step's."""

LOOK_BACK = 3
"""Rounds from which a worker's speed is estimated: a disturbed one must not move the shares."""

FEWEST = 2
"""Fewest samples of a round, and of its part in each epoch: batch normalization needs two."""


@dataclass(frozen=True)
class RoundAssignment:
    """One round of one worker.

    Attributes:
        number: Place among all rounds in the order in which they were handed out, from 0.
        worker: Rank of the worker.
        start: Position of its first sample in the stream of all epochs.
        samples: Length, in samples.
        epoch: Zero-based epoch of most of its samples. Where shares have changed, a round may
            begin with the last few of the epoch before.
        stage: Index of the plan's row that it follows.
        factor: Update factor of the model that it ends with.
        clock: Samples seen when it begins, as the learning-rate schedule counts.
        span: Samples that the schedule counts until it ends: while one worker trains on its part
            of an epoch, the others train on the rest.
        batch: Samples of a step; 0: as in the plan's row.
    """

    number: int
    worker: int
    start: int
    samples: int
    epoch: int
    stage: int
    factor: float
    clock: int
    span: int
    batch: int = 0

    def samples_seen(self, done: int) -> float:
        """Samples seen, as the learning-rate schedule counts, once ``done`` of the round are done.

        Multiplied first: where span and length agree, these are whole numbers.
        """
        return self.clock + done * self.span / self.samples


class Rounds:
    """Hands out rounds and keeps the order that the plan's consistency asks for.

    With ``bsp`` no worker begins a round before all have ended the one before; with ``ssp`` none
    is more than ``staleness`` rounds ahead of the slowest (Ho et al. 2013: a worker that has ended
    c rounds goes on if c - min c <= s); with ``asp`` none waits. Workers that are lost, or for
    which there are no rounds left, hold nobody up: the others are the `members`.

    As long as there is a member, one of them can go on, whatever happened before:

    * A worker with an open round is always ready. It is in that round already, and repeats it
      where it was lost or the run was resumed.
    * Only the `lead` over the slowest member counts. The slowest has a lead of 0, so it is ready.
    * A worker that becomes a member again begins with the slowest, or where it was if that is
      further. It does so when it comes back, when a run is resumed, and when there is work again
      after there was none. So nobody waits until it has caught up. While there is no member, the
      count of the furthest worker stands for the slowest, so that of workers that were all lost
      none is ahead of the first to come back.

    So the count of the slowest never falls, and no worker has ended more than s + 1 rounds more.
    Where s is 0, a worker is one round ahead exactly while its model waits for those of the others.

    Args:
        plan: A plan with a parameter server; its rows give samples per round and update factors.
        samples: Size of the data set.

    Attributes:
        committed: Samples of rounds that have ended.
        handed_out: Samples of all rounds handed out so far.
        ended: Rounds that each worker has ended, plus those that it need not catch up with when it
            became a member again.
        open: The round that each worker is in.
    """

    def __init__(self, plan: Plan, samples: int) -> None:
        assert plan.server is not None  # noqa: S101 - such plans have none of the others
        self._plan, self._samples, self._rule = plan, samples, plan.server
        self.committed = 0
        self.handed_out = 0
        self.ended = dict.fromkeys(range(plan.workers), 0)
        self.open: dict[int, RoundAssignment] = {}
        self._left_over: list[RoundAssignment] = []  # of workers that are gone for good
        self._number = 0
        self._away: set[int] = set()  # lost, may come back
        self._gone: set[int] = set()  # lost for good
        self._without_work: set[int] = set()  # there was no round left for them
        self._slowest = 0  # rounds that the slowest member has ended
        self._speeds: dict[int, float] = {}  # relative to the planned shares

    @property
    def total(self) -> int:
        """Samples of the whole training."""
        return self._plan.epochs * self._samples

    @property
    def finished(self) -> bool:
        """Whether every sample of every epoch was trained on."""
        return self.committed >= self.total

    @property
    def epochs_done(self) -> int:
        """Number of whole epochs in the committed samples."""
        return self.committed // self._samples

    @property
    def whole(self) -> bool:
        """Whether one round of each worker makes up an epoch; else rounds have so many steps."""
        return self._rule.exchange_steps is None

    @property
    def gone(self) -> frozenset[int]:
        """Workers that are lost for good."""
        return frozenset(self._gone)

    @property
    def members(self) -> list[int]:
        """Workers that others wait for, in rank order, including those that have not come yet."""
        without = self._away | self._gone | self._without_work
        return [worker for worker in self.ended if worker not in without]

    def lead(self, worker: int) -> int:
        """Rounds that a worker is ahead of the slowest member."""
        return max(0, self.ended[worker] - self._slowest)

    def ready(self, worker: int) -> bool:
        """Whether a worker need not wait for others before its next round, or is in a round."""
        if worker in self.open or self._most_ahead is None:
            return True
        return self.lead(worker) <= self._most_ahead

    def take(self, worker: int) -> RoundAssignment | None:
        """The worker's next round, or the one it was in.

        Where all begin together, rounds are handed out in rank order whoever asks first, so that
        a run has the same result each time.

        Returns:
            The round; ``None`` if there is none left. Until all is `finished` there may be one
            again: the unfinished round of a worker that is lost for good.
        """
        if self._most_ahead == 0 and worker not in self.open:
            for one in self.members:
                if self.ready(one):
                    self._hand_out(one)
        self._hand_out(worker)
        return self.open.get(worker)

    def commit(self, worker: int) -> RoundAssignment:
        """End the worker's round, whose model has arrived; returns the round."""
        ticket = self.open.pop(worker)
        self.ended[worker] += 1
        self.committed += ticket.samples
        self._find_slowest()
        return ticket

    def lose(self, worker: int, *, for_good: bool) -> None:
        """Note that a worker is lost: others go on, and its round will be repeated.

        Args:
            worker: Rank of the worker.
            for_good: Whether it will not come back: then another repeats its round, and later
                rounds share the epoch among those that are left.
        """
        if for_good:
            if worker in self.open:
                self._left_over.append(self.open.pop(worker))
                self._level(self._without_work)  # there is something left to do
                self._without_work.clear()
            self._away.discard(worker)
            self._gone.add(worker)
        else:
            self._away.add(worker)
        self._find_slowest()

    def come_back(self, worker: int) -> None:
        """Take a lost worker back; nobody has to wait until it has caught up.

        One that was lost for good may come back when a run is resumed: it then has its share again.
        """
        self._level([worker])
        self._away.discard(worker)
        self._gone.discard(worker)
        self._find_slowest()

    def follow(self, seconds_per_sample: Mapping[int, float]) -> tuple[int, ...] | None:
        """Make shares anew so that all workers end their rounds together.

        Args:
            seconds_per_sample: Measured seconds per sample of every worker that is not gone.

        Returns:
            The samples per round from now on, in rank order; ``None`` if they stay as they were, as
            they do where the plan says how many steps a round has. With ``dual.shares=published``
            no change is too small.
        """
        if not self.whole:
            return None
        stage = self._plan.stages[self._plan.stage_of(self._epoch_at(self.handed_out))]
        current = self.shares(stage)
        wanted = apportion(
            [1 / seconds_per_sample[w] if current[w] else 0.0 for w in range(len(current))],
            self._samples,
            least=self._least(),
        )
        moved = max(
            abs(now - then) / then for now, then in zip(wanted, current, strict=True) if then
        )
        if moved <= (0.0 if self._published else FOLLOWING):
            return None
        planned = stage.samples_per_round
        self._speeds = {w: wanted[w] / planned[w] for w in range(len(planned)) if wanted[w]}
        return tuple(wanted)

    def shares(self, stage: Stage) -> tuple[int, ...]:
        """Samples per round of each worker in a row, in rank order; an epoch's samples in all."""
        planned = stage.samples_per_round
        if not (self._gone or self._speeds):
            return planned
        weights = [
            0.0 if worker in self._gone else share * self._speeds.get(worker, 1.0)
            for worker, share in enumerate(planned)
        ]
        return tuple(apportion(weights, self._samples, least=self._least()))

    def batches(self, stage: Stage) -> tuple[int, ...]:
        """Local batch of each worker in a row; it follows the shares if ``dual.shares=published``.

        Then all workers with one planned batch make equally many steps in a round, and the sum of
        the batches stays.
        """
        planned = stage.local_batch_sizes
        if not self._published:
            return planned
        weights = [size * share for size, share in zip(planned, self._relative(stage), strict=True)]
        least = [
            min(FEWEST, size) if weight else 0
            for size, weight in zip(planned, weights, strict=True)
        ]
        return tuple(apportion(weights, sum(planned), least=least))

    # ----------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "committed": self.committed,
            "handed_out": self.handed_out,
            "ended": dict(self.ended),
            "open": [asdict(ticket) for ticket in self.open.values()],
            "left_over": [asdict(ticket) for ticket in self._left_over],
            "number": self._number,
            "gone": sorted(self._gone),
            "through": sorted(self._without_work),
            "slowest": self._slowest,
            "speeds": dict(self._speeds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: rounds that were under way are repeated by their workers.

        All workers are awaited but those that were gone, whoever was away when it was written.
        """
        self.committed, self.handed_out = state["committed"], state["handed_out"]
        self.ended = dict(state["ended"])
        self.open = {values["worker"]: RoundAssignment(**values) for values in state["open"]}
        self._left_over = [RoundAssignment(**values) for values in state["left_over"]]
        self._number = state["number"]
        self._gone, self._speeds = set(state["gone"]), dict(state["speeds"])
        self._away, self._without_work = set(), set(state.get("through", ()))
        self._slowest = state["slowest"]
        self._level(self.ended)
        self._find_slowest()

    @property
    def _most_ahead(self) -> int | None:
        """Rounds that a worker may be ahead of the slowest; ``None``: any number."""
        if self._rule.consistency == "asp":
            return None
        return (self._rule.staleness or 0) if self._rule.consistency == "ssp" else 0

    def _hand_out(self, worker: int) -> None:
        """Give a worker a round, if it has none and there is one."""
        if worker in self.open:
            return
        if self._left_over:
            ticket: RoundAssignment | None = replace(self._left_over.pop(0), worker=worker)
        else:
            ticket = self._next(worker)
        if ticket is None:
            self._without_work.add(worker)
            self._find_slowest()
        else:
            self.open[worker] = ticket

    def _level(self, workers: Iterable[int]) -> None:
        """Let workers become members again: none begins behind the slowest."""
        for worker in workers:
            self.ended[worker] = max(self.ended[worker], self._slowest)

    def _find_slowest(self) -> None:
        """Update the slowest member's count, after any change of members or of ended rounds."""
        counts = [self.ended[worker] for worker in self.members]
        self._slowest = min(counts, default=max(self.ended.values()))

    def _epoch_at(self, position: int) -> int:
        return min(position // self._samples, self._plan.epochs - 1)

    def _next(self, worker: int) -> RoundAssignment | None:
        left = self.total - self.handed_out
        if left <= 0:
            return None
        start = self.handed_out
        length = self._length(worker, self._epoch_at(start))
        epoch = self._epoch_at(start + min(length, left) // 2)
        usual = self._length(worker, epoch)
        index = self._plan.stage_of(epoch)
        samples = self._to_the_end(start, min(usual, left), epoch)
        ticket = RoundAssignment(
            number=self._number,
            worker=worker,
            start=start,
            samples=samples,
            epoch=epoch,
            stage=index,
            # A round may be cut short; then its model counts for less.
            factor=self._weight(worker, index) * min(1.0, samples / usual),
            clock=epoch * self._samples if self.whole else start,
            span=self._samples if self.whole else samples,
            batch=self.batches(self._plan.stages[index])[worker] if self._published else 0,
        )
        self._number += 1
        self.handed_out += samples
        return ticket

    @property
    def _published(self) -> bool:
        """Whether batches and update factors follow the shares, as in the paper."""
        return self._plan.job.dual.shares == "published"

    def _weight(self, worker: int, index: int) -> float:
        """Update factor of a worker's model in a row; as published, in proportion to its share."""
        stage = self._plan.stages[index]
        factor = stage.update_factors[worker]
        return factor * self._relative(stage)[worker] if self._published else factor

    def _relative(self, stage: Stage) -> list[float]:
        """Each worker's samples per round in a row, over the mean planned with its batch.

        Planned shares may differ themselves, as those of workers of unequal speed do.
        """
        planned: dict[int, list[int]] = defaultdict(list)
        for size, share in zip(stage.local_batch_sizes, stage.samples_per_round, strict=True):
            planned[size].append(share)
        means = {size: fmean(shares) for size, shares in planned.items()}
        return [
            share / means[size]
            for size, share in zip(stage.local_batch_sizes, self.shares(stage), strict=True)
        ]

    def _least(self) -> list[int]:
        """Fewest samples of each worker's rounds, so that nobody's share becomes 0."""
        left = [worker not in self._gone for worker in self.ended]
        return [min(FEWEST, self._samples // sum(left)) if one else 0 for one in left]

    def _to_the_end(self, start: int, samples: int, epoch: int) -> int:
        """Length of a round of ``samples``, adapted to end its epoch where shares have changed, and
        to leave no part of an epoch below `FEWEST`.

        After a change the rounds of an epoch may not add up to it. What is left of the epoch joins
        the round if it is less than any share and than half of the largest; a round that goes
        beyond the epoch by less than half of itself is cut. With shares that add up, neither
        happens: somebody's whole share is left, or nothing.
        """
        if self.whole and (self._gone or self._speeds):
            stage = self._plan.stages[self._plan.stage_of(epoch)]
            shares = [share for share in self.shares(stage) if share]
            left = (epoch + 1) * self._samples - (start + samples)
            if -samples < 2 * left <= 0 or 0 < left < min(min(shares), max(shares) / 2):
                samples += left
        beyond = (start + samples) % self._samples
        if beyond and self._samples - beyond < FEWEST:
            return samples + self._samples - beyond
        if 0 < beyond < FEWEST and samples - beyond >= FEWEST:
            return samples - beyond
        return samples

    def _length(self, worker: int, epoch: int) -> int:
        """Samples of a worker's usual round in an epoch."""
        stage = self._plan.stages[self._plan.stage_of(epoch)]
        if self._rule.exchange_steps is None:
            return self.shares(stage)[worker]
        return self._rule.exchange_steps * stage.local_batch_sizes[worker]


def segments(ticket: RoundAssignment, samples: int) -> Sequence[tuple[int, int, int]]:
    """The stretches of each epoch's order that a round goes through, as (epoch, first, past last).

    Args:
        ticket: The round.
        samples: Size of the data set.
    """
    found, start, left = [], ticket.start, ticket.samples
    while left:
        epoch, first = divmod(start, samples)
        length = min(left, samples - first)
        found.append((epoch, first, first + length))
        start, left = start + length, left - length
    return found


class SpeedEstimate:
    """Estimates the workers' speeds from their rounds, anew in each row of the plan.

    A worker's very first round is left out: loaders start in it, caches are cold.

    Args:
        published: Whether the last round alone counts, as in the paper, even a first one; else the
            median of the last `LOOK_BACK`.
    """

    def __init__(self, *, published: bool = False) -> None:
        self._published = published
        self._known: set[int] = set()  # workers that have ended a round
        self._stage = 0
        rounds = 1 if published else LOOK_BACK
        self._latest: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=rounds))

    def add(self, worker: int, stage: int, samples: int, seconds: float) -> None:
        """Add a worker's round of ``samples`` in a row of the plan, computed in ``seconds``."""
        if stage > self._stage:
            self._stage = stage
            self._latest.clear()
        if (self._published or worker in self._known) and stage == self._stage:
            self._latest[worker].append(seconds / samples)
        self._known.add(worker)

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds per sample, by worker, of those with a round in the current row of the plan."""
        return {worker: median(latest) for worker, latest in self._latest.items() if latest}
