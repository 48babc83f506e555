"""Which candidate to train with: limits first, then the objective."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, floor, inf, isfinite, log, sqrt
from operator import attrgetter, le
from statistics import NormalDist

from batchwright.errors import PlanError
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.learnt import Learnt
from batchwright.planning.candidates.level import (
    RowError,
    level_batches,
    level_in_value,
    level_sizes,
)
from batchwright.planning.candidates.table import Miss, Row
from batchwright.prediction.accuracy.quality import ProgressModel, product
from batchwright.records import Estimate, Goal, Job, LearningRateRule, OptimizerName
from batchwright.records.text.formatting import counted, duration

_ADVICE = {
    "goal.max_workers": "raise goal.max_workers, or measure fewer workers",
    "goal.least_steps": "give goal.least_steps={value} or less, or fewer workers",
    "goal.memory": "raise goal.memory, or train a smaller network or resolution",
    "goal.deadline": "raise goal.deadline, or train fewer epochs",
    "goal.max_cost": "raise goal.max_cost, or train fewer epochs",
    "goal.accuracy": "give a lower goal.accuracy, or more epochs",
}
EQUAL = 0.0005
"""Accuracies, shares, that differ by less are shown as the same."""
LEAST_CHANCE = 0.1
"""Probability of reaching its target below which a training is refused."""
Trained = Callable[[Row, int], Row]
"""A candidate with another number of epochs, and the limits that it misses: `Table.trained`."""
FAR = 10
"""Times the stated epochs beyond which no number of epochs is given: nothing shows that the law
holds so far."""


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the points that no other is better than in all coordinates, rising.

    A point is left out if another is at most as large in all and smaller in one; of equal points
    all stay.

    Example:
        >>> pareto([(1, 9), (2, 3), (3, 3), (4, 1)])
        [0, 1, 3]
    """
    kept: list[int] = []
    edge: set[tuple[float, ...]] = set()
    # In this order none that comes later is better than one before it.
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if point in edge or not any(all(map(le, other, point)) for other in edge):
            kept.append(index)
            edge.add(point)
    return sorted(kept)


def frontier(rows: Sequence[Row]) -> set[Row]:
    """Rows within the limits that none of the same resolution beats in time, cost and accuracy.

    Under `target-accuracy` these are time and cost to the target, and accuracy does not count.
    """
    found: set[Row] = set()
    for side in {row.resolution for row in rows}:
        allowed = [
            row
            for row in rows
            if row.resolution == side and not row.misses and isfinite(row.seconds)
        ]
        indices = pareto([(row.seconds, row.expense, _wrong(row)) for row in allowed])
        found |= {allowed[index] for index in indices}
    return found


def _wrong(row: Row) -> float:
    """Share of held-out images that it gets wrong in the end, where that is known and counts."""
    return 0.0 if row.accuracy is None or row.target_seconds is not None else 1 - row.accuracy


@dataclass(frozen=True)
class Progress:
    """What a batch means for the training's progress, each batch asked once.

    Attributes:
        models: Fitted, by optimizer.
        optimizer: The one that a batch is given.
        base_batch: Global batch whose progress per sample counts as 1.
        planned: Epochs of the training, the most where the plan chooses them.
        target: Held-out accuracy to reach, a share; `None` if none is given.
        confidence: Probability with which the chosen epochs are to reach it.
        least: Fewest epochs that may be chosen; `None` where the plan does not choose them.
        learnt: What trials tell; `None` without any.
        unknown: Why trials tell nothing, and what the choice goes by then, in sentences.
    """

    models: Mapping[OptimizerName, ProgressModel]
    optimizer: Callable[[int], OptimizerName]
    base_batch: int
    planned: int
    target: float | None = None
    confidence: float = 0.8
    least: int | None = None
    learnt: Learnt | None = None
    unknown: str = ""
    _needed: dict[tuple[int, int], int | None] = field(default_factory=dict, repr=False)
    _epochs: dict[int, Estimate | None] = field(default_factory=dict, repr=False)
    _to_target: dict[int, Estimate | None] = field(default_factory=dict, repr=False)
    _reached: dict[int, Estimate | None] = field(default_factory=dict, repr=False)

    def model(self, batch: int) -> ProgressModel:
        """That of the optimizer which a batch is given."""
        return self.models[self.optimizer(batch)]

    def efficiency(self, batch: int) -> Estimate | None:
        """Progress per sample against the base batch, at the rate that each is given.

        In proportion to 1 over the epochs to the target, as far as these are known; `None` if
        nothing tells.
        """
        own, base = self.to_target(batch), self.relative_epochs(self.base_batch)
        if own is None or base is None or base == inf:
            return None
        return Estimate(value=base / own.value, low=base / own.high, high=base / own.low)

    def to_target(self, batch: int) -> Estimate | None:
        """Epochs to the target or, where no run tells them, over those with the base batch.

        `None` if nothing tells, where only runs with another optimizer reached the target, and
        where those with such a batch missed it.
        """
        if batch not in self._to_target:
            epochs = self.epochs(batch)
            if epochs is None and not self._misses(batch):
                by_law = self._by_law(batch, self.base_batch)
                epochs = by_law or self.model(batch).relative_epochs(batch)
            self._to_target[batch] = epochs
        return self._to_target[batch]

    def _by_law(self, batch: int, other: int) -> Estimate | None:
        """Epochs with a batch over those with another, for as much accuracy, as trials tell."""
        if self.learnt is None or self._misses(batch) or self._misses(other):
            return None
        one, another = ((self.optimizer(size), size) for size in (batch, other))
        accuracy = self.target or self.learnt.accuracy(*another, self.planned).value
        return self.learnt.model.samples_compared(one, another, accuracy)

    def _misses(self, batch: int) -> bool:
        return self._runs_tell or self.model(batch).misses_target(batch)

    @property
    def _runs_tell(self) -> bool:
        """Whether runs reached the target."""
        return any(model.tells_epochs for model in self.models.values())

    def epochs(self, batch: int) -> Estimate | None:
        """Epochs to the target accuracy; `None` if nothing tells."""
        if batch not in self._epochs:
            found = self.model(batch).epochs(batch)
            told = None if self._misses(batch) else self.learnt  # runs tell better
            if found is None and told is not None and self.target is not None:
                found = told.epochs_to(self.optimizer(batch), batch, self.target)
            self._epochs[batch] = found
        return self._epochs[batch]

    @property
    def chooses(self) -> bool:
        """Whether the plan chooses the epochs, and something tells them."""
        tells = self.learnt is not None or self._runs_tell
        return self.least is not None and self.target is not None and tells

    def needed(self, batch: int, most: int | None = None) -> int | None:
        """Fewest whole epochs that reach the target with the stated probability.

        `None` if that takes more than ``most``, which are those planned unless said otherwise, and
        where the plan does not choose them.
        """
        if not self.chooses:
            return None
        most = most or self.planned
        if (batch, most) not in self._needed:
            fewest = self._fewest_by_trials if self.by_trials(batch) else self._fewest_by_runs
            found = fewest(batch, most)
            self._needed[batch, most] = found and max(found, self.least or 1)
        return self._needed[batch, most]

    def _fewest_by_trials(self, batch: int, most: int) -> int | None:
        if self.learnt is None or self.target is None:
            return None
        update = self.optimizer(batch)
        return self.learnt.needed(update, batch, self.target, self.confidence, most)

    def _fewest_by_runs(self, batch: int, most: int) -> int | None:
        epochs = self.epochs(batch)
        if epochs is None:
            return None
        # The interval is of 95 %, and normal in the logarithm.
        part = NormalDist().inv_cdf(self.confidence) / NormalDist().inv_cdf(0.975)
        sure = epochs.value * (epochs.high / epochs.value) ** part
        return ceil(sure) if sure <= most else None

    def sure(self, batch: int, epochs: int) -> float | None:
        """Accuracy that so many epochs reach with the stated probability, as trials tell."""
        if self.learnt is None or not self.by_trials(batch):
            return None
        training = self.learnt.candidate(self.optimizer(batch), batch, epochs)
        return self.learnt.model.surely(training, self.confidence)

    def chance(self, batch: int) -> float:
        """Probability that all planned epochs reach the target; 0 where nothing tells."""
        if self.target is None:
            return 0.0
        if self.learnt is not None and self.by_trials(batch):
            training = self.learnt.candidate(self.optimizer(batch), batch, self.planned)
            return self.learnt.model.probability(training, self.target)
        epochs = self.epochs(batch)
        if epochs is None:
            return 0.0
        if epochs.high <= epochs.value:
            return float(epochs.value <= self.planned)
        # The interval is of 95 %, and normal in the logarithm.
        error = log(epochs.high / epochs.value) / NormalDist().inv_cdf(0.975)
        return NormalDist().cdf(log(self.planned / epochs.value) / error)

    def trained(self, batch: int) -> int:
        """Epochs that a candidate with such a batch is trained."""
        return self.needed(batch) or self.planned

    def by_trials(self, batch: int) -> bool:
        """Whether trials tell of such a batch, and no run does."""
        return self.learnt is not None and not self._misses(batch)

    def accuracy(self, batch: int, epochs: float) -> Estimate | None:
        """Held-out accuracy after so many epochs; `None` if nothing tells."""
        if self.law is not None:
            return self.law.accuracy(self.optimizer(batch), batch, epochs)
        return self.model(batch).accuracy(batch, epochs)

    @property
    def law(self) -> Learnt | None:
        """What tells accuracy where there are trials, unless runs tell the epochs to a target.

        It rests on runs as well, and knows how optimizers and batches differ.
        """
        return None if self._runs_tell else self.learnt

    def reached(self, batch: int) -> Estimate | None:
        """Held-out accuracy at the end of the training; `None` if nothing tells."""
        if batch not in self._reached:
            self._reached[batch] = self.accuracy(batch, self.trained(batch))
        return self._reached[batch]

    def by_epoch(
        self, batch: int, rule: LearningRateRule, held_out: int
    ) -> tuple[Estimate | None, ...]:
        """Held-out accuracy after each epoch, where trials tell that at the end; else empty.

        Args:
            batch: Global batch.
            rule: Its learning rate.
            held_out: Images that are evaluated.
        """
        if self.law is None:
            return ()
        return self.law.by_epoch(self.optimizer(batch), batch, self.trained(batch), rule, held_out)

    def accuracy_until(self, batch: int, epochs: float) -> float | None:
        """Epochs that the runs told of, where they are fewer and alone; `None` if they are not."""
        return None if self.law is not None else self.model(batch).accuracy_until(batch, epochs)

    def compared_epochs(self, batch: int, other: int) -> Estimate | None:
        """Epochs to the target with a batch over those with another; `None` if nothing tells."""
        told = self._by_law(batch, other)
        if told is not None:
            return told
        if self.optimizer(batch) == self.optimizer(other):
            return self.model(batch).compared_epochs(batch, other)
        own, others = self.to_target(batch), self.to_target(other)
        if own is None or others is None:
            return None
        low, high = 1 / others.high, 1 / others.low
        return product(own, Estimate(value=1 / others.value, low=low, high=high))

    def relative_epochs(self, batch: int) -> float | None:
        """The value of `to_target`, infinite where runs speak against such a batch."""
        epochs = self.to_target(batch)
        if epochs is None:
            return inf if self._misses(batch) else None
        return epochs.value


@dataclass(frozen=True)
class Choice:
    """What is trained, and what else could have been.

    Attributes:
        row: The candidate.
        free: What would be chosen if neither batch nor workers were asked for.
        sizes: The best candidate of each cluster by the objective, small to large, at the chosen
            resolution.
        others: What the other objectives would choose, by name.
        level: Candidates that measurements cannot tell from it, as far as they were free to choose.
        accurate: The quickest of the most accurate, were batch and workers free and accuracy the
            aim; `None` where nothing tells, or where the epochs are chosen to reach an accuracy.
    """

    row: Row
    free: Row
    sizes: tuple[Row, ...]
    others: dict[str, Row]
    level: tuple[Row, ...]
    accurate: Row | None = None


def check_progress(job: Job, progress: Progress) -> None:
    """Refuse an objective that needs to know of progress where nothing tells.

    Raises:
        PlanError: A noise scale or trials are missing, and there is no run.
    """
    if job.goal.objective == "accuracy" and not _tells_accuracy(progress):
        raise PlanError(
            "goal.objective=accuracy needs to know accuracy, but the profile holds no trials of "
            "such a training and no run was given: probe again with a larger probe.learning, or "
            "give a finished run"
        )
    if job.goal.objective != "target-accuracy":
        return
    if progress.relative_epochs(2 * job.base_batch) is None:
        raise PlanError(
            "goal.objective=target-accuracy needs to know how progress depends on the batch, but "
            "the profile holds no gradient noise scale and no run was given: probe again with a "
            "larger probe.budget, or give a finished run"
        )


def settled_goal(goal: Goal, progress: Progress) -> Goal:
    """The goal with an objective that can be followed.

    In place of `auto` with an accuracy to reach it is `target-accuracy`, as far as anything tells
    how progress depends on the batch; else `knee` where nothing tells accuracy.
    """
    if goal.objective != "auto":
        return goal
    if goal.accuracy is not None and progress.relative_epochs(2 * progress.base_batch) is not None:
        return goal.model_copy(update={"objective": "target-accuracy"})
    if _tells_accuracy(progress):
        return goal
    return goal.model_copy(update={"objective": "knee"})


def _tells_accuracy(progress: Progress) -> bool:
    """Whether accuracy is known of more batches than one."""
    base = progress.base_batch
    return None not in (progress.reached(base), progress.reached(2 * base))


def aimed(goal: Goal, rows: Sequence[Row], progress: Progress) -> list[Row]:
    """The candidates with their accuracy, and their time to the target if that is the objective."""
    to_target = goal.objective == "target-accuracy"
    return [
        replace(
            row,
            accuracy=reached.value if (reached := progress.reached(row.batch)) else None,
            target_seconds=target_seconds(row, progress) if to_target else None,
            misses=(*row.misses, *_target_miss(row, progress)),
        )
        for row in rows
    ]


def _target_miss(row: Row, progress: Progress) -> tuple[Miss, ...]:
    """That a candidate does not reach the target within the epochs, if so."""
    if not progress.chooses or progress.needed(row.batch) is not None:
        return ()
    if progress.chance(row.batch) >= LEAST_CHANCE:
        return ()
    reached, target = progress.reached(row.batch), progress.target or 0.0
    text = (
        f"has no chance of {LEAST_CHANCE:.0%} to reach goal.accuracy={target:g} in "
        f"{counted(progress.planned, 'epoch')}"
    )
    times = max(1.0, target / reached.value) if reached and reached.value else inf
    return (Miss("goal.accuracy", text, times),)


def choose(
    job: Job,
    rows: Sequence[Row],
    bends: Sequence[KneeFit],
    progress: Progress,
    error: RowError,
    trained: Trained,
) -> Choice:
    """The candidate to train with.

    Args:
        job: Resolved; a global batch or number of workers it asks for is kept.
        rows: All candidates, from `aimed`.
        bends: The knee of each cluster and resolution.
        progress: What a batch means for progress.
        error: Standard error of a candidate's time, as a share of it.
        trained: What it would be with another number of epochs.

    Raises:
        PlanError: No candidate is within the limits; the message names the nearest.
    """
    side = max(row.resolution for row in rows)  # `plain` trains at the highest
    here = [row for row in rows if row.resolution == side]
    bends = [bend for bend in bends if bend.resolution == side]
    asked = [row for row in here if _as_asked(row, job)]
    if not asked:
        raise PlanError(
            f"no candidate has workers={job.workers} and global_batch={job.global_batch}: leave "
            "one of them to the plan"
        )
    allowed = [row for row in asked if not row.misses]
    if not allowed:
        best = _best_to_be_had(job.goal, asked, progress, trained)
        raise PlanError(best or _why_none(asked))
    free = [row for row in here if not row.misses and not row.asked] or allowed
    row = _best(job.goal, job.goal.objective, allowed, bends, progress)
    told = not progress.chooses and _tells_accuracy(progress)
    others = {
        name: _best(job.goal, name, allowed, bends, progress)
        for name in _other_objectives(job, allowed, progress)
    }
    return Choice(
        row=row,
        free=_best(job.goal, job.goal.objective, free, bends, progress),
        sizes=tuple(_sizes(job.goal, allowed, bends, progress)),
        others={name: other for name, other in others.items() if other is not row},
        level=_level_with(row, job.goal, allowed, bends, error, progress),
        accurate=_best(job.goal, "auto", free, bends, progress) if told else None,
    )


def _level_with(
    chosen: Row,
    goal: Goal,
    rows: Sequence[Row],
    bends: Sequence[KneeFit],
    error: RowError,
    progress: Progress,
) -> tuple[Row, ...]:
    """Candidates that the objective may as well have chosen."""
    if goal.objective == "cost":
        return level_in_value(chosen, rows, bends, error, lambda row: row.cost or 0.0)
    if goal.objective == "auto":
        rows = accurate(rows, goal.accuracy_tolerance)
    if goal.objective == "accuracy":
        rows = accurate(rows, EQUAL)
    if goal.objective in ("auto", "accuracy", "time"):
        return level_in_value(chosen, rows, bends, error, lambda row: row.seconds)
    if goal.objective == "target-accuracy":

        def epochs(row: Row) -> Estimate | None:
            return progress.compared_epochs(row.batch, chosen.batch)

        return level_in_value(chosen, rows, bends, error, _aim_of(goal), epochs)
    sizes = _size_rows(rows, bends)
    bend = next((bend for bend in bends if bend.mix is chosen.mix), None)
    batches = level_batches(chosen, rows, bend, goal.doubling_gain)
    if all(row.cost is not None for row in sizes):

        def square_root(row: Row) -> float:  # of time and cost, so in proportion to the time
            return sqrt(row.train_seconds * row.expense)

        return (*batches, *level_in_value(chosen, sizes, (), error, square_root))
    return (*batches, *level_sizes(chosen, _quickest(sizes), error, goal.doubling_gain))


def _as_asked(row: Row, job: Job) -> bool:
    workers = 1 if job.launcher.one_worker else job.workers
    return workers in ("auto", row.mix.workers) and job.global_batch in ("auto", row.batch)


def _other_objectives(job: Job, rows: Sequence[Row], progress: Progress) -> list[str]:
    if progress.chooses:  # each candidate has its own epochs, which mean nothing else
        return []
    names = ["knee", "time"]
    if _tells_accuracy(progress):
        names += ["auto", "accuracy"]
    if all(row.cost is not None for row in rows):
        names.append("cost")
    if progress.relative_epochs(2 * job.base_batch) is not None:
        names.append("target-accuracy")
    return [name for name in names if name != job.goal.objective]


def _best(
    goal: Goal, objective: str, rows: Sequence[Row], bends: Sequence[KneeFit], progress: Progress
) -> Row:
    if objective == "auto":
        return min(accurate(rows, goal.accuracy_tolerance), key=_by_time)
    if objective == "accuracy":
        return min(accurate(rows, EQUAL), key=_by_time)
    if objective == "time":
        return min(rows, key=_by_time)
    if objective == "cost":
        return min(rows, key=lambda row: (row.cost, *_by_time(row)))
    if objective == "target-accuracy":
        return min(rows, key=_by_target(goal, progress))
    sizes = _size_rows(rows, bends)
    if all(row.cost is not None for row in sizes):
        return _priced_knee(sizes)
    return _walk_up(sizes, goal.doubling_gain)


def accurate(rows: Sequence[Row], tolerance: float) -> list[Row]:
    """Candidates as accurate at the end as the most accurate, within a tolerance, a share.

    One of which nothing is told is not; all are where nothing is told of any.
    """
    told = {row: row.accuracy for row in rows if row.accuracy is not None}
    least = max(told.values(), default=0.0) - tolerance
    return [row for row, accuracy in told.items() if accuracy >= least] or list(rows)


def _sizes(
    goal: Goal, rows: Sequence[Row], bends: Sequence[KneeFit], progress: Progress
) -> list[Row]:
    """The best candidate of each cluster by the objective, small clusters first."""
    if goal.objective == "knee":
        return _size_rows(rows, bends)
    of_mix: dict[ClusterOption, list[Row]] = {}
    for row in rows:
        of_mix.setdefault(row.mix, []).append(row)
    found = [_best(goal, goal.objective, own, bends, progress) for own in of_mix.values()]
    return sorted(found, key=lambda row: row.order)


def _by_time(row: Row) -> tuple[float, int, str, int]:
    return row.train_seconds, row.mix.workers, str(row.mix), row.batch


def target_seconds(row: Row, progress: Progress) -> float:
    """Seconds of training to the target: of the epochs that were chosen for it.

    Where these are all that may be trained, and are not sure to reach it: over their chance.
    Where the plan does not choose them, evaluation aside: those of an epoch over its progress.
    Where nothing tells how many epochs it takes: for the progress that an epoch with the base batch
    makes. Infinite where the target is not reached, or runs speak against such a batch.
    """
    if progress.chooses and progress.needed(row.batch) is not None:
        return row.train_seconds
    if progress.chooses:
        chance = progress.chance(row.batch)
        return row.train_seconds / chance if chance else inf
    return row.epoch_seconds * (progress.relative_epochs(row.batch) or 1.0)


def _by_target(
    goal: Goal, progress: Progress
) -> Callable[[Row], tuple[float, float, int, str, int]]:
    aim = _aim_of(goal)
    return lambda row: (
        aim(replace(row, target_seconds=target_seconds(row, progress))),
        *_by_time(row),
    )


def _aim_of(goal: Goal) -> Callable[[Row], float]:
    """Of what a training to the target takes the least."""
    return attrgetter("expense" if goal.least == "cost" else "seconds")


def _size_rows(rows: Sequence[Row], bends: Sequence[KneeFit]) -> list[Row]:
    """The best candidate of each cluster: at its knee or nearest to it, small clusters first."""
    allowed = set(rows)
    found = []
    seen = set()
    for bend in bends:
        best = bend.best
        if best is not None and best in allowed:
            found.append(best)
            seen.add(bend.mix)
    # A batch that is asked for stands for its cluster.
    found += [row for row in rows if row.mix not in seen]
    return sorted(found, key=lambda row: row.order)


def _walk_up(sizes: Sequence[Row], gain: float) -> Row:
    """The smallest cluster whose next size up saves at most ``gain`` of the time.

    Of clusters of one size the quickest stands for all.
    """
    steps = _quickest(sizes)
    for row, larger in pairwise(steps):
        if 1 - larger.train_seconds / row.train_seconds <= gain:
            return row
    return steps[-1]


def _quickest(rows: Sequence[Row]) -> list[Row]:
    """The quickest of each size, small sizes first."""
    quickest: dict[int, Row] = {}
    for row in rows:
        workers = row.mix.workers
        if workers not in quickest or _by_time(row) < _by_time(quickest[workers]):
            quickest[workers] = row
    return [quickest[workers] for workers in sorted(quickest)]


def _priced_knee(sizes: Sequence[Row]) -> Row:
    """The point of the frontier with the least product of time and cost.

    Beyond it, one percent more cost buys less than one percent of the time.
    """
    indices = pareto([(row.train_seconds, row.expense) for row in sizes])
    edge = [sizes[index] for index in indices]
    return min(edge, key=lambda row: (row.train_seconds * row.expense, *_by_time(row)))


def _best_to_be_had(goal: Goal, rows: Sequence[Row], progress: Progress, trained: Trained) -> str:
    """The most accurate training within the limits, where none reaches the target.

    Empty where the plan does not choose the epochs, or where nothing is within other limits.
    """
    if not progress.chooses:
        return ""
    found = []
    for row in rows:
        over = {miss.limit for miss in row.misses} - {"goal.accuracy"}
        # Time and cost go with the epochs, so fewer may keep them.
        if not over <= {"goal.deadline", "goal.max_cost"}:
            continue
        epochs = row.epochs
        if over:
            fewer = range(1, row.epochs)
            epochs = bisect_left(fewer, True, key=lambda n: bool(trained(row, n).misses))
        if epochs >= (progress.least or 1):
            reached = progress.accuracy(row.batch, epochs)
            if reached is not None:
                found.append((reached, trained(row, epochs), sorted(over)))
    if not found:
        return ""
    least = max(reached.value for reached, *_ in found) - EQUAL
    reached, row, limited = min(
        (one for one in found if one[0].value >= least),
        key=lambda one: (one[1].train_seconds, one[1].order),
    )
    # In fewer epochs than may be trained, only what is sure counts.
    sure = progress.sure(row.batch, row.epochs) if limited else reached.value
    advice = "a lower goal.accuracy"
    if sure is not None:
        advice = f"goal.accuracy={floor(1000 * sure) / 1000:g} or less"
    enough = progress.needed(row.batch, FAR * progress.planned)
    if limited:
        advice += f", or raise {' and '.join(limited)}"
    elif enough is None:
        advice += ", or more epochs"
    else:
        beyond = [f" and raise {miss.limit}" for miss in trained(row, enough).misses]
        advice += f", or epochs={enough}{''.join(beyond)}"
    within = [f"epochs={progress.planned}", *(f"{one}={_limit(goal, one):g}" for one in limited)]
    return (
        f"no candidate has a chance of {LEAST_CHANCE:.0%} to reach "
        f"goal.accuracy={progress.target:g} within {' and '.join(within)}; the best to be had is "
        f"{reached.value:.1%} ({reached.low:.1%} to {reached.high:.1%}), with "
        f"{progress.optimizer(row.batch)}, global batch {row.batch} and {row.mix.workers} "
        f"worker(s) in {counted(row.epochs, 'epoch')}, {duration(row.train_seconds)}: give {advice}"
    )


def _limit(goal: Goal, name: str) -> float:
    return float(attrgetter(name.removeprefix("goal."))(goal))


def _why_none(rows: Sequence[Row]) -> str:
    """Which limits nothing meets, and what comes nearest."""
    nearest = min(
        rows,
        key=lambda row: (len(row.misses), max(miss.times for miss in row.misses), *_by_time(row)),
    )
    advice = "; ".join(_ADVICE[miss.limit].format(value=miss.value) for miss in nearest.misses)
    what = " and ".join(miss.text for miss in nearest.misses)
    return (
        f"no candidate is within the limits; the nearest, global batch {nearest.batch} on "
        f"{nearest.mix.workers} worker(s) at {nearest.resolution} px, {what}: {advice}"
    )
