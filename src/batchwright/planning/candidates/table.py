"""The table of candidates: clusters x resolutions x global batches, each with its time and cost.

Plain numbers, since there can be ten thousand of them; records come later, for those that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from batchwright.algorithms.batch_size import steps_per_epoch
from batchwright.errors import PlanError
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.grid import totals_to_compare
from batchwright.planning.candidates.local_batches import shares_by_kind, split
from batchwright.planning.candidates.optimizer import Compared, chosen_optimizer, extra_seconds
from batchwright.planning.candidates.preemptions import TOO_OFTEN, Losses, losses_of
from batchwright.planning.candidates.worker_types import WorkerType
from batchwright.planning.compiling import compile_seconds
from batchwright.planning.resolution import sides
from batchwright.planning.validation import check_batch, local_bounds
from batchwright.records import DataFacts, Estimate, Job, OptimizerName
from batchwright.records.text.formatting import counted, significant

SECONDS_PER_HOUR = 3600

FAR_OFF = 2.0
"""Ratio to the largest or the smallest measured batch from which on a batch is far from both."""


@dataclass(frozen=True)
class Miss:
    """A limit that a candidate misses."""

    limit: str  # the job key of the limit
    text: str  # what the candidate takes, and the limit, in words
    times: float  # what the candidate takes over what is allowed
    # The largest `goal.least_steps` that the candidate would keep, or the smallest batch that can
    # be cut into two parts; else 0.
    value: int = 0
    unsure: bool = False  # whether only the upper end of the interval is above the limit


@dataclass(frozen=True, eq=False)
class Row:
    """One candidate: a cluster, a resolution and a global batch."""

    cluster: ClusterOption  # the workers
    resolution: int  # image side, in pixels
    totals: tuple[int, ...]  # samples per step of each kind of worker
    batch: int  # global batch, in samples
    steps: int  # updates per epoch
    step_seconds: float  # seconds of a whole step
    epoch_seconds: float  # seconds of an epoch of training, without evaluation
    epochs: int  # epochs of the whole training
    train_seconds: float  # seconds of the whole training, evaluations included
    # Cost of the whole training, in the price's currency; `None` without a price.
    cost: float | None
    asked: bool = False  # whether the batch is compared only because the job asks for it
    misses: tuple[Miss, ...] = ()  # limits that the candidate misses
    # Seconds of training to the target accuracy, where that is the objective
    # (`comparisons.target_seconds`); else `None`.
    target_seconds: float | None = None
    # Predicted held-out accuracy at the end of the training, a share; `None` if not known.
    accuracy: float | None = None
    # The accuracy by which batches are compared: after all epochs that the limits allow where
    # accuracy is only expected from other tasks, else ``accuracy``. The two differ where training
    # to a target takes fewer epochs.
    full_accuracy: float | None = None
    assumed: bool = False  # whether the accuracies are only expected from other tasks
    # Whether some candidate has no price, so that all are compared by worker-hours.
    beside_unpriced: bool = False

    @property
    def seconds(self) -> float:
        """Seconds by which candidates are compared: to the target, or else of all epochs."""
        return self.train_seconds if self.target_seconds is None else self.target_seconds

    @property
    def expense(self) -> float:
        """Price of these seconds, or worker-seconds if some candidate has no price."""
        price = None if self.beside_unpriced else self.price
        return self.seconds * self.cluster.workers if price is None else price

    @property
    def price(self) -> float | None:
        """Price of these seconds; `None` if a worker has no price."""
        hourly = self.cluster.hourly
        return None if hourly is None else self.seconds * hourly / SECONDS_PER_HOUR

    @property
    def per_sample(self) -> float:
        """Seconds of a step for each sample in it."""
        return self.step_seconds / self.batch

    @property
    def order(self) -> tuple[int, int, str, int]:
        """Sort key of candidates: resolution, number of workers, cluster, batch."""
        return self.resolution, self.cluster.workers, str(self.cluster), self.batch


@dataclass(frozen=True)
class Table:
    """Predicts the time, cost and memory of candidates, and the limits that they miss."""

    job: Job  # the job, resolved
    data: DataFacts  # the data set
    clusters: tuple[ClusterOption, ...]  # clusters to compare
    # Accuracies with SGD and with Muon, by which a batch gets its optimizer.
    compared: tuple[Compared, ...] = ()
    epochs: Callable[[int], int] | None = None  # batch -> epochs of a training; `None`: the job's
    _names: dict[float, OptimizerName] = field(default_factory=dict, init=False, repr=False)
    _extras: dict[tuple[ClusterOption, OptimizerName], Estimate | None] = field(
        default_factory=dict, repr=False
    )

    def rows(self) -> list[Row]:
        """All candidates, by resolution, workers and batch.

        Raises:
            PlanError: The data or the batch asked for is too small for every cluster.
        """
        rows = [
            row
            for side in sides(self.job)
            for cluster in self.clusters
            for row in self._rows_of(cluster, side)
        ]
        if not rows:
            raise self._too_few(min(self.clusters, key=lambda cluster: cluster.workers))
        return sorted(rows, key=lambda row: row.order)

    def _rows_of(self, cluster: ClusterOption, side: int) -> Iterable[Row]:
        batch = self.job.global_batch
        asked = None
        if batch != "auto" and batch <= self.data.train_samples:
            asked = split(cluster, side, batch)
        for totals in totals_to_compare(cluster, side, self.job, self.data):
            row = self.row(cluster, side, totals)
            if asked is not None and row.batch == batch:
                if row.misses:  # the batch asked for is added below, cut into passes that fit
                    continue
                asked = None
            yield row
        if asked is not None:
            yield self.row(cluster, side, asked, asked=True)

    @cached_property
    def _priced(self) -> bool:
        return all(cluster.hourly is not None for cluster in self.clusters)

    # ------------------------------------------------------------------------------- one row

    def row(
        self, cluster: ClusterOption, side: int, totals: tuple[int, ...], *, asked: bool = False
    ) -> Row:
        """The candidate with these samples per step of each kind, and the limits that it misses."""
        batch = sum(totals)
        steps, last = steps_per_epoch(self.data.train_samples, batch, cluster.least)
        step = self._step(cluster, side, totals, asked=asked)
        epoch = steps * step
        if last != batch:
            shrunk = tuple(-(-total * last // batch) for total in totals)
            epoch += self._step(cluster, side, shrunk, asked=asked) - step
        extra = self._update(cluster, batch)
        if extra is not None:
            step += extra.value
            epoch += steps * extra.value
        epochs = self.job.epochs if self.epochs is None else self.epochs(batch)
        row = Row(cluster, side, totals, batch, steps, step, epoch, epochs, 0.0, None, asked)
        return self.trained(replace(row, beside_unpriced=not self._priced), epochs)

    def trained(self, row: Row, epochs: int) -> Row:
        """The candidate trained for ``epochs`` epochs, with the limits that it then misses."""
        train = self.losses(row.cluster).seconds(self.work(row, epochs))
        hourly = row.cluster.hourly
        cost = None if hourly is None else hourly / SECONDS_PER_HOUR * train
        row = replace(row, epochs=epochs, train_seconds=train, cost=cost, misses=())
        misses = tuple(self._misses(row))
        return replace(row, misses=misses) if misses else row

    def work(self, row: Row, epochs: int) -> float:
        """Seconds of a training of ``epochs`` epochs in which no worker is taken away."""
        return epochs * row.epoch_seconds + self.other_seconds(row.cluster, epochs)

    def losses(self, cluster: ClusterOption) -> Losses:
        """The model of the time that a cluster loses by workers that are taken away."""
        return losses_of(self.job, cluster.members[0][0].profile.network, cluster.preemptions)

    def _step(
        self, cluster: ClusterOption, side: int, totals: Sequence[int], *, asked: bool
    ) -> float:
        workers = cluster.workers
        return max(
            (kind.seconds if asked or kind.cuts(workers) else kind.seconds_at_once)(
                workers, side, share
            )
            for kind, share in shares_by_kind(cluster, totals)
        )

    def surplus(self, cluster: ClusterOption, batch: float) -> float:
        """Seconds that the update of this batch's optimizer takes more than the measured one."""
        found = self._update(cluster, batch)
        return 0.0 if found is None else found.value

    def _update(self, cluster: ClusterOption, batch: float) -> Estimate | None:
        """Extra seconds of the update of this batch's optimizer, on the slowest kind, if any."""
        if (name := self._names.get(batch)) is None:
            name = self._names[batch] = chosen_optimizer(self.job, batch, self.compared)
        if (cluster, name) not in self._extras:
            found = [
                extra_seconds(self.job, kind.profile, name, cluster.workers, kind.speed)
                for kind, _ in cluster.members
            ]
            most = max(filter(None, found), key=lambda one: one.value, default=None)
            self._extras[cluster, name] = most
        return self._extras[cluster, name]

    def other_seconds(self, cluster: ClusterOption, epochs: int) -> float:
        """Seconds of a training besides its steps: all evaluations, and compiling.

        The images of an evaluation are split evenly between the workers; the slowest one counts.
        """
        slowest = max(kind.evaluation_seconds for kind, _ in cluster.members)
        once = -(-self.data.val_samples // cluster.workers) * slowest
        compiling = max(compile_seconds(kind.profile) for kind, _ in cluster.members)
        return ceil(epochs / self.job.evaluate_epochs) * once + compiling

    # -------------------------------------------------------------------------------- limits

    def _misses(self, row: Row) -> Iterable[Miss]:
        goal, workers = self.job.goal, row.cluster.workers
        if goal.max_workers is not None and workers > goal.max_workers:
            text = f"has {workers} workers, goal.max_workers={goal.max_workers}"
            yield Miss("goal.max_workers", text, workers / goal.max_workers)
        whole = self.data.train_samples // row.batch
        if whole < goal.least_steps and not row.asked:
            text = f"leaves {counted(whole, 'whole step')} an epoch, "
            text += f"goal.least_steps={goal.least_steps}"
            yield Miss("goal.least_steps", text, goal.least_steps / whole, whole)
        yield from self._share_misses(row)
        yield from self._noise_misses(row)
        for kind, share in shares_by_kind(row.cluster, row.totals):
            if not self.fits(row, kind, share):
                yield self._memory_miss(row, kind, share)
        if self.losses(row.cluster).endless(self.work(row, row.epochs)):
            text = f"loses workers so often that it takes {TOO_OFTEN:g} times as long, or longer"
            yield Miss("goal.preemptions_per_hour", text, TOO_OFTEN)
        if goal.deadline is not None:
            yield from self._over("goal.deadline", "take", row.train_seconds, goal.deadline, row)
        if goal.max_cost is not None and row.cost is not None:
            yield from self._over("goal.max_cost", "cost", row.cost, goal.max_cost, row)

    def _share_misses(self, row: Row) -> Iterable[Miss]:
        """Misses of a worker's bounds; a batch that is asked for is refused by `check_bounds`."""
        if row.asked:
            return
        least, most = local_bounds(self.job)
        share = row.batch / row.cluster.workers
        if share < least:
            text = f"gives each worker {share:g} images, least_local_batch={least}"
            yield Miss("least_local_batch", text, least / share)
        if most is not None and share > most:
            text = f"gives each worker {share:g} images, most_local_batch={most}"
            yield Miss("most_local_batch", text, share / most)

    def _noise_misses(self, row: Row) -> Iterable[Miss]:
        """The miss of a step of which noise is to be measured, and which one worker cannot cut.

        A batch that is asked for is refused by `check_parts`, as are those of a worker that steps
        by itself.
        """
        kind, _ = row.cluster.members[0]
        split, fewest = kind.step_split, 2 * kind.least
        if split is None or split.alone or row.asked or row.cluster.workers > 1:
            return
        if split.base_batch < row.batch < fewest:
            text = f"cannot be cut into the 2 parts that {split.key} takes"
            yield Miss(split.key.partition("=")[0], text, fewest / row.batch, fewest)

    def _memory_miss(self, row: Row, kind: WorkerType, share: int) -> Miss:
        """The miss of a share that does not fit: by prediction, or as the probe failed with it."""
        micro, high = self.micro_batch(row, kind, share), self.peak(row, kind, share).high
        what = f"for {counted(micro, 'image')} at once on a worker"
        lost = kind.lost(row.cluster.workers, row.resolution)
        if lost is None or micro < lost.local_batch_size or high > kind.limit:
            text = f"may take {in_memory(high)} {what}, the limit is {in_memory(kind.limit)}"
            return Miss("goal.memory", text, high / kind.limit)
        tried = f"a step of {lost.local_batch_size} found too little {lost.short_of}"
        limit = "loaders" if lost.short_of == "shared memory" else "goal.memory"
        return Miss(limit, f"may take too much {what}: {tried}", micro / lost.local_batch_size)

    def _over(self, limit: str, verb: str, value: float, most: float, row: Row) -> Iterable[Miss]:
        """A miss if the upper end of the interval of ``value`` is above ``most``."""
        step = self.step_estimate(row)
        high = value * (step.high / step.value)
        if high > most:
            unit = " s" if limit == "goal.deadline" else ""
            text = f"may {verb} {significant(high, 4)}{unit}, {limit}={most:g}"
            if value <= most:
                text = f"is expected to {verb} {significant(value, 3)}{unit} and {text}"
            yield Miss(limit, text, high / most, unsure=value <= most)

    # ----------------------------------------------------------------------------- intervals

    def step_estimate(self, row: Row) -> Estimate:
        """Seconds per step with a 95 % interval; the slowest of several kinds counts."""
        found = [
            kind.times.predict(
                row.cluster.workers, row.resolution, share, self.passes(row, kind, share)
            )
            for kind, share in shares_by_kind(row.cluster, row.totals)
        ]
        extra = self._update(row.cluster, row.batch)
        more = (extra.low, extra.high) if extra else (0.0, 0.0)
        return Estimate(
            value=row.step_seconds,
            low=min(row.step_seconds, max(one.low for one in found) + more[0]),
            high=max(row.step_seconds, max(one.high for one in found) + more[1]),
        )

    def error(self, row: Row) -> float:
        """Standard error of a candidate's time in a comparison with others, as a share of it."""
        return max(
            kind.times.comparison_error(
                row.cluster.workers, row.resolution, share, self.passes(row, kind, share)
            )
            for kind, share in shares_by_kind(row.cluster, row.totals)
        )

    def far_off(self, row: Row) -> bool:
        """Whether a pass has far more samples than any that was measured at this resolution.

        Where this number of workers was not measured, measurements with other numbers count.
        """
        for kind, share in shares_by_kind(row.cluster, row.totals):
            side = row.resolution
            measured = kind.measured_batches(row.cluster.workers, side) or [
                one for count in kind.measured for one in kind.measured_batches(count, side)
            ]
            at_once = self.micro_batch(row, kind, share)
            if at_once >= FAR_OFF * max(measured, default=at_once):
                return True
        return False

    # -------------------------------------------------------------------------------- memory

    def passes(self, row: Row, kind: WorkerType, share: int) -> int:
        """Number of micro-batches of a worker with ``share`` samples per step.

        A candidate is trained in one pass, unless the job asks for parts. Only a batch that the job
        asks for is cut so that it fits the memory.
        """
        if row.asked or kind.cuts(row.cluster.workers):
            return kind.passes(row.cluster.workers, row.resolution, share)
        return 1

    def micro_batch(self, row: Row, kind: WorkerType, share: int) -> int:
        """Most samples in one pass of a worker with ``share`` samples per step."""
        return -(-share // self.passes(row, kind, share))

    def fits(self, row: Row, kind: WorkerType, share: int) -> bool:
        """Whether a worker with ``share`` samples per step stays within its memory."""
        micro = self.micro_batch(row, kind, share)
        most = kind.largest(row.cluster.workers, row.resolution, accumulates=micro < share)
        return micro <= most

    def peak(self, row: Row, kind: WorkerType, share: int) -> Estimate:
        """Peak bytes of a worker with ``share`` samples per step."""
        micro = self.micro_batch(row, kind, share)
        return kind.memory.predict(
            row.resolution, micro, workers=row.cluster.workers, accumulates=micro < share
        )

    def check_asked(self) -> None:
        """Refuse workers and a `global_batch` for which the data or the batch are too small."""
        asked, wanted = self.job.global_batch, self.job.workers
        clusters = [
            cluster for cluster in self.clusters if wanted in ("auto", cluster.workers)
        ] or self.clusters
        smallest = min(clusters, key=lambda cluster: cluster.least)
        kind, _ = smallest.members[0]
        if asked == "auto":
            if smallest.least > self.data.train_samples:
                raise self._too_few(smallest)
            kind.check_parts(kind.least)
            return
        check_batch(asked, smallest.workers, kind.least, self.data)
        kind.check_parts(-(-asked // smallest.workers))

    def _too_few(self, cluster: ClusterOption) -> PlanError:
        return PlanError(
            f"{self.data.name} has {counted(self.data.train_samples, 'training image')}, too few "
            f"for {counted(cluster.workers, 'worker')} with at least "
            f"{cluster.members[0][0].least} each: give "
            + ("fewer workers" if cluster.workers > 1 else "more images")
        )


def in_memory(size: float) -> str:
    """Bytes as text, with enough digits to tell them from a limit.

    >>> in_memory(1_000_000), in_memory(20 * 2**20)
    ('0.95 MiB', '20.0 MiB')
    """
    if size >= 10 * 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size < 2**17:
        return counted(round(size), "byte")
    return f"{size / 2**20:.{1 + (size < 2 * 2**20)}f} MiB"
