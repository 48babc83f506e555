"""What a step takes and what fits the workers: by fitted measurements, or as the job states.

Both answer the same questions, so that a method lays out a plan in one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from batchwright.algorithms.batch_size import candidates
from batchwright.algorithms.dual_batch import Relative
from batchwright.algorithms.partition import apportion
from batchwright.errors import PlanError
from batchwright.planning.candidates.choice import Choice
from batchwright.planning.candidates.local_batches import largest_shares, local_batches, split
from batchwright.planning.candidates.optimizer import chosen_optimizer, extra_seconds
from batchwright.planning.candidates.prediction_records import prediction, prediction_reasons
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Table
from batchwright.planning.candidates.worker_types import WorkerType, cut, link_given
from batchwright.planning.chosen import Chosen
from batchwright.planning.gradient_scaling import step_split_of
from batchwright.planning.methods.groups import MIN_FIXED, Pace
from batchwright.planning.methods.simulated import stated_line, usual_times
from batchwright.planning.methods.two_groups import Level
from batchwright.planning.resolution import cycle_batches, sides
from batchwright.planning.validation import (
    check_batch,
    check_bounds,
    check_micro_batches,
    check_side,
    least_local,
    resolved,
)
from batchwright.prediction.collective import exchange_seconds, fit_collectives
from batchwright.records import (
    DataFacts,
    Estimate,
    Job,
    NetworkFacts,
    PairTime,
    Prediction,
    Reason,
    Source,
    Stage,
)
from batchwright.records.text.formatting import counted

_BYTES = 4  # of a weight
_MAX_SAMPLES = 2**24  # where the memory alone is asked


@dataclass(frozen=True)
class Measured:
    """Models fitted to profiles, at the cluster and batch chosen as for `plain`.

    Attributes:
        job: Resolved, its workers settled.
        table: What candidates were compared by.
        choice: What was chosen.
        chosen: Its record.
        progress: What a batch means for progress.
    """

    job: Job
    table: Table
    choice: Choice
    chosen: Prediction
    progress: Progress
    measured: ClassVar[bool] = True

    @property
    def data(self) -> DataFacts:
        """The data set."""
        return self.table.data

    @property
    def network(self) -> NetworkFacts:
        """The network."""
        return self._kind.profile.network

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.choice.row.cluster.workers

    @property
    def batch(self) -> int:
        """Global batch at the highest resolution, in samples."""
        return self.choice.row.batch

    def other_seconds(self, epochs: int) -> float:
        """Seconds of a training of so many epochs besides its rows: evaluation and compiling."""
        return self.table.other_seconds(self.choice.row.cluster, epochs)

    @property
    def hourly(self) -> float | None:
        """Price of all workers for an hour; `None`: not known."""
        return self.choice.row.cluster.hourly

    @property
    def preemptions(self) -> float:
        """How often any worker is taken away in an hour."""
        return self.choice.row.cluster.preemptions

    @property
    def limit(self) -> int:
        """Bytes that a worker may use."""
        return self._kind.limit

    @property
    def _kind(self) -> WorkerType:
        return self.choice.row.cluster.members[0][0]

    def only_level(self) -> Level:
        """What holds throughout a plan of one row."""
        kind, row, chosen = self._kind, self.choice.row, self.chosen
        local, side = local_batches(row.cluster, row.totals), chosen.resolution
        check_bounds(self.job, local)
        alone = {}
        if self.job.launcher.simulated:
            alone = usual_times(self.job, kind.chord(len(local), side, max(local)), max(local))
        return {
            "resolution": side,
            "local_batch_sizes": local,
            "fixed_samples": kind.fixed_samples(len(local), side, chosen.micro_batch_size),
            **_predicted(chosen),
            **alone,
        }

    def level(self, side: int, batch: int) -> Level:
        """What holds at one of several resolutions, with its global batch."""
        row, kind = self.choice.row, self._kind
        cluster = row.cluster
        totals = row.totals if batch == row.batch else split(cluster, side, batch)
        if totals is None or batch > self.data.train_samples:
            raise PlanError(
                f"cycle.batches has {batch} at {side} px: a step of "
                f"{counted(cluster.workers, 'worker')} takes {cluster.least} to "
                f"{self.data.train_samples} samples"
            )
        asked = self.table.row(cluster, side, totals, asked=True)
        found = prediction(self.table, asked, self.progress, named=False, edge=False)
        largest = max(largest_shares(cluster, totals))
        return {
            "resolution": side,
            "local_batch_sizes": local_batches(cluster, totals),
            **_predicted(found),
            **usual_times(self.job, kind.chord(cluster.workers, side, largest), largest),
        }

    def large_batch(self) -> Chosen[int]:
        """Local batch at the highest resolution, by time and gradient noise for one worker.

        With several, `plain` has to make up for an exchange of gradients in each step, which
        workers of a server do without. Where the batch is given, or the objective goes by something
        else than the knee, it is `plain`'s.
        """
        goal, kind, side = self.table.job.goal, self._kind, max(sides(self.job))
        batch = max(largest_shares(self.choice.row.cluster, self.choice.row.totals))
        most = self.data.train_samples // self.workers // goal.least_steps
        found = candidates(
            1, min(most, self.fitting(side) or most), least_local=kind.smallest_measured
        )
        if self.table.job.global_batch == "auto" and found:
            pace, measured = self.pace(batch), 1 in kind.measured  # then as the knee's table
            longer = self._longer(kind, 1)
            own = self.choice.objective.alone(
                found,
                lambda n: (
                    (kind.seconds(1, side, n) + longer if measured else pace.seconds(side, n)) / n
                ),
            )
            if own is not None:
                return own
        return Chosen(batch, "What `plain` would choose as local batch.", "predicted")

    def fitting(self, side: int) -> int | None:
        """Most samples of a worker of its own that fit the memory; `None`: not known."""
        kind = self._kind
        return kind.memory.largest_batch(side, kind.limit, _MAX_SAMPLES, workers=self.workers)

    def micro_batch(self, side: int, local: Sequence[int]) -> int:
        """Most samples in one forward pass of workers that step for themselves."""
        kind = self._kind
        micro = kind.parts(self.workers, side, max(local))[0]
        if kind.parting is not None:  # the small batch may want parts too
            micro = min(micro, kind.parting.most_at_once(local, kind.least))
        return micro

    def peak(self, side: int, micro: int, most: int) -> Estimate | None:
        """Peak bytes of such a worker, whose gradients need no buffers to be exchanged."""
        return self._kind.memory.predict(side, micro, workers=1, accumulates=micro < most)

    def pace(self, batch: int) -> Pace:
        """By the fitted step times, computing alone: workers of a server exchange no gradients.

        Kinds of workers differ by one factor, that at this local batch.
        """
        job, cluster, first, workers = self.job, self.choice.row.cluster, self._kind, self.workers
        top = max(sides(job))
        longer = {kind.name: self._longer(kind, workers) for kind, _ in cluster.members}

        def seconds_on(kind: WorkerType, side: int, size: int) -> float:
            computing = kind.times.computing(workers, side, kind.parts(workers, side, size))
            return computing + longer[kind.name]

        def ends(side: int, size: int) -> tuple[float, float]:
            counted = min(workers, first.measured[-1])
            found = first.times.predict(counted, side, first.parts(workers, side, size))
            return found.low / found.value, found.high / found.value

        usual = seconds_on(first, top, batch)
        speeds = [
            usual / seconds_on(kind, top, batch) for kind, n in cluster.members for _ in range(n)
        ]
        alike = ((1.0, 1.0),) * workers
        stated = job.virtual.relative_times(workers) if job.launcher.simulated else alike
        told = job.launcher.simulated and job.virtual.step_seconds is not None
        profile, parts = first.profile, first.profile.memory_parts
        size = parts.parameters + parts.buffers if parts else _BYTES * self.network.parameters
        model = fit_collectives(profile.collectives)
        known = None if model.assumed(2, "push-pull") else model.seconds(size, 2, "push-pull")
        return Pace(
            seconds=lambda side, size: seconds_on(first, side, size),
            workers=tuple(
                Relative(speed * relative, overhead)
                for speed, (relative, overhead) in zip(speeds, stated, strict=True)
            ),
            least=max(kind.least for kind, _ in cluster.members),
            exchange=_exchanges(job, size, workers, known),
            spread=ends,
            least_fixed=0.0 if told else MIN_FIXED,
            pairs=self._pairs() if len(cluster.members) == 1 and not first.stated else (),
        )

    def _longer(self, kind: WorkerType, workers: int) -> float:
        """Seconds that an update takes more than the one that was measured with."""
        update = chosen_optimizer(self.table.job, self.batch, self.table.compared)
        found = extra_seconds(self.job, kind.profile, update, workers, kind.speed)
        return found.value if found else 0.0

    def _pairs(self) -> tuple[PairTime, ...]:
        """The measured pairs, with that in all of their steps."""
        more = self._longer(self._kind, self.workers)
        return tuple(
            one.model_copy(
                update={
                    "large_seconds": one.large_seconds + more,
                    "small_seconds": one.small_seconds + more,
                    "ratios": tuple(
                        (ratio * one.large_seconds + more) / (one.large_seconds + more)
                        for ratio in one.ratios
                    ),
                }
            )
            for one in self._kind.profile.pairs
        )

    def batch_reasons(self, stage: Stage) -> tuple[tuple[Reason, ...], tuple[Reason, ...]]:
        """Reasons at the highest resolution: for its batch; for memory and time."""
        found = prediction_reasons(self.job, self.choice.row, self.chosen, stage)
        return found[:1], (*found[1], found[2])


@dataclass(frozen=True)
class Stated:
    """A job without profiles: what it leaves open is assumed, and only what it states is predicted.

    Attributes:
        job: Resolved.
        data: The data set.
        network: The network.
        workers: How many there are.
        local: Local batches at the highest resolution; empty under a parameter server.
        why: Why they are so, and the source of that.
    """

    job: Job
    data: DataFacts
    network: NetworkFacts
    workers: int
    local: tuple[int, ...] = ()
    why: tuple[str, Source] = ("Asked for; nothing was measured.", "asked")
    measured: ClassVar[bool] = False
    limit: ClassVar[int] = 0

    @property
    def batch(self) -> int:
        """Global batch at the highest resolution, in samples."""
        return sum(self.local)

    @property
    def hourly(self) -> float | None:
        """Price of all workers for an hour; `None`: not known."""
        price = self.job.goal.price
        return None if price is None else self.workers * price

    @property
    def preemptions(self) -> float:
        """How often any worker is taken away in an hour."""
        return self.workers * self.job.goal.preemptions_of("")

    def other_seconds(self, epochs: int) -> float:  # noqa: ARG002
        """Seconds besides the rows are not known."""
        return 0.0

    @property
    def least(self) -> int:
        """Fewest samples that a worker can train on."""
        return least_local(self.network)

    def only_level(self) -> Level:
        """What holds throughout a plan of one row."""
        return self.level(max(sides(self.job)), self.batch)

    def level(self, side: int, batch: int) -> Level:
        """What holds at a resolution, with its global batch."""
        check_batch(batch, self.workers, self.least, self.data)
        local = self.local
        if batch != self.batch:
            local = tuple(apportion(list(local), batch))
        if min(local) < self.least:
            raise PlanError(f"local batches {list(local)}: each worker needs at least {self.least}")
        line = stated_line(self.job, side)
        # Stated times are a usual worker's, unlike measured ones, which are the slowest one's.
        usual = self.job.model_copy(update={"launch": "local"})
        return {
            "resolution": side,
            "local_batch_sizes": local,
            "micro_batch_size": self._micro_batch(local, max(local)),
            **(usual_times(usual, line, max(local)) if line else {}),
        }

    def large_batch(self) -> Chosen[int]:
        """Local batch of `plain` at the highest resolution."""
        if self.job.global_batch != "auto":
            return Chosen(-(-self.job.global_batch // self.workers), "Asked for.", "asked")
        most = self.data.train_samples // self.workers // self.job.goal.least_steps
        batch = min(self.job.base_batch, max(self.least, most))
        why = "The base batch of the learning rate, or what the data allow."
        return Chosen(batch, why, "assumed")

    def fitting(self, side: int) -> None:
        """Most samples that fit the memory are not known."""

    def micro_batch(self, side: int, local: Sequence[int]) -> int:  # noqa: ARG002
        """Most samples in one forward pass of workers that step for themselves."""
        return self._micro_batch(local, min(local))

    def _micro_batch(self, local: Sequence[int], judged: int) -> int:
        """Each local batch in one pass unless asked otherwise; ``judged`` is to be cut as asked."""
        micro, parting = max(local), step_split_of(self.job)
        if self.job.micro_batch != "auto":
            check_micro_batches(judged, self.job.micro_batch, self.least)
            micro = max(cut(micro, self.job.micro_batch))
        return micro if parting is None else min(micro, parting.most_at_once(local, self.least))

    def peak(self, side: int, micro: int, most: int) -> None:
        """Peak bytes are not known."""

    def pace(self, batch: int) -> Pace:  # noqa: ARG002
        """Step times as ``virtual.sample_seconds`` and ``virtual.step_seconds`` state them."""

        def seconds(side: int, batch: int) -> float:
            a, b = stated_line(self.job, side) or (0.0, 0.0)
            return a * batch + b

        relative = self.job.virtual.relative_times(self.workers)
        size = _BYTES * self.network.parameters
        return Pace(
            seconds=seconds,
            workers=tuple(Relative(*one) for one in relative),
            least=self.least,
            exchange=_exchanges(self.job, size, self.workers, None),
            spread=lambda side, batch: (1.0, 1.0),  # noqa: ARG005 - stated, so known
        )

    def batch_reasons(self, stage: Stage) -> tuple[tuple[Reason, ...], tuple[Reason, ...]]:
        """Reasons at the highest resolution: for its batch; none for memory and time."""
        found = Chosen(stage.global_batch_size, *self.why)
        return (found.reason("global batch", f"{found.value} samples"),), ()


def stated_times(
    job: Job, data: DataFacts, network: NetworkFacts, local_batch_sizes: Sequence[int] | None
) -> Stated:
    """The job with all settled that it leaves open.

    Raises:
        PlanError: Batches, workers and data do not fit together.
    """
    local = tuple(local_batch_sizes or ())
    workers = len(local) if job.workers == "auto" and local else job.workers
    workers = 1 if workers == "auto" else workers
    if local and len(local) != workers:
        raise PlanError(f"{len(local)} local batches {list(local)} for workers={workers}")
    precision = job.precision if job.precision != "auto" else "float32"
    job = resolved(job, data, precision=precision, workers=workers, least_side=network.least_side)
    top = max(sides(job))
    for side in sides(job) if job.method_spec.cycles else (top,):
        check_side(side, network)
    if job.method_spec.served:
        if local:
            raise PlanError(
                f"method={job.method} finds the small batch itself: give dual.large_batches "
                "instead of local batches"
            )
        if stated_line(job, top) is None:
            raise PlanError(
                f"method={job.method} needs to know what a step takes, and nothing was measured: "
                "probe first, or with launch=virtual give virtual.sample_seconds and "
                "virtual.step_seconds"
            )
        return Stated(job, data, network, workers)
    batches = cycle_batches(job, data)
    why, source = Stated.why
    if job.global_batch != "auto":
        batch = job.global_batch
    elif local:
        batch = sum(local)
    elif batches is not None:
        batch = batches.value[-1]
    else:
        most = data.train_samples // job.goal.least_steps
        batch = max(workers * least_local(network), min(job.base_batch, most))
        why, source = f"The data is too small for base_batch={job.base_batch}", "assumed"
        if batch == job.base_batch:
            why = "The base batch of the learning rate"
        why += "; nothing was measured."
    if local and sum(local) != batch:
        raise PlanError(f"local batches {list(local)} do not add up to global_batch={batch}")
    local = local or tuple(apportion([1] * workers, batch))
    times = Stated(job, data, network, workers, local, (why, source))
    times.level(top, batch)  # refuses a batch that is too large or too small
    check_bounds(job, local)
    return times


def _predicted(found: Prediction) -> Level:
    return {
        "micro_batch_size": found.micro_batch_size,
        "predicted_epoch_seconds": found.epoch_seconds,
        "predicted_bytes": found.peak_bytes,
    }


def _exchanges(job: Job, size: int, workers: int, seconds: float | None) -> tuple[float, ...]:
    """Seconds of each worker's push and pull; a virtual worker may have a link of its own.

    ``seconds`` are as measured; `None`: as the link is stated.
    """
    if seconds is None:
        seconds = exchange_seconds(size, 2, job.link, "push-pull") if link_given(job.link) else 0.0
    links = job.virtual.links if job.launcher.simulated else ()
    if not links or job.link.bandwidth is None:
        return (seconds,) * workers
    whole = 2 * size / job.link.bandwidth
    return tuple(seconds + whole * (1 / link - 1) for link in links)
