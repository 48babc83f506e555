"""Step times and memory for laying out a plan: by fitted measurements, or as the job states them.

`Measured` and `Stated` have the same methods, so that a method lays out its plan in one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from batchwright.algorithms.batch_size import candidates
from batchwright.algorithms.dual_batch import Relative
from batchwright.algorithms.partition import apportion, split_evenly
from batchwright.errors import PlanError
from batchwright.planning.candidates.choice import Choice
from batchwright.planning.candidates.local_batches import local_batches, shares_by_kind, split
from batchwright.planning.candidates.optimizer import chosen_optimizer, extra_seconds
from batchwright.planning.candidates.prediction_records import prediction, prediction_reasons
from batchwright.planning.candidates.preemptions import Losses, losses_of
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Table
from batchwright.planning.candidates.worker_types import WorkerType, link_given
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
_MAX_SAMPLES = 2**24  # more than any batch, where the memory alone is the bound


@dataclass(frozen=True)
class Measured:
    """Models fitted to profiles, at the cluster and batch chosen as for `plain`."""

    job: Job  # resolved, its workers settled
    table: Table  # predicts the candidates
    choice: Choice  # the choice among them
    chosen: Prediction  # the record of the chosen candidate
    progress: Progress  # what a batch means for progress
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
        """Number of workers."""
        return self.choice.row.cluster.workers

    @property
    def batch(self) -> int:
        """Global batch at the highest resolution, in samples."""
        return self.choice.row.batch

    def other_seconds(self, epochs: int) -> float:
        """Seconds of ``epochs`` epochs of training besides the steps: evaluation and compiling."""
        return self.table.other_seconds(self.choice.row.cluster, epochs)

    @property
    def hourly(self) -> float | None:
        """Price of all workers for an hour; `None`: not known."""
        return self.choice.row.cluster.hourly

    @property
    def losses(self) -> Losses:
        """The time lost by workers that are taken away, at the interval that the table has."""
        return self.table.losses(self.choice.row.cluster)

    @property
    def limit(self) -> int:
        """Bytes that a worker may use."""
        return self._kind.limit

    @property
    def _kind(self) -> WorkerType:
        return self.choice.row.cluster.members[0][0]

    def only_level(self) -> Level:
        """Fields of the stage of a plan with one row."""
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
        """Fields of a stage at one of several resolutions, with its global batch."""
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
        largest = max(share for _, share in shares_by_kind(cluster, totals))
        return {
            "resolution": side,
            "local_batch_sizes": local_batches(cluster, totals),
            **_predicted(found),
            **usual_times(self.job, kind.chord(cluster.workers, side, largest), largest),
        }

    def large_batch(self) -> Chosen[int]:
        """Local batch at the highest resolution, by time and gradient noise for one worker.

        `plain` takes larger batches with several workers, as gradients are exchanged in each step.
        Workers of a server do not exchange gradients. Where the job gives the batch, or where the
        objective does not go by the knee, it is the local batch of `plain`.
        """
        goal, kind, side = self.table.job.goal, self._kind, max(sides(self.job))
        row = self.choice.row
        batch = max(share for _, share in shares_by_kind(row.cluster, row.totals))
        most = self.data.train_samples // self.workers // goal.least_steps
        found = candidates(
            1, min(most, self.fitting(side) or most), least_local=kind.smallest_measured
        )
        if self.table.job.global_batch == "auto" and found:
            # Steps of one worker, if they were measured, as in the table that knees are found in.
            pace, measured = self.pace(batch), 1 in kind.measured
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
        """Largest batch of a worker, in samples, that fits the memory in one pass."""
        kind = self._kind
        return kind.memory.largest_batch(side, kind.limit, _MAX_SAMPLES, workers=self.workers)

    def micro_batch(self, side: int, local: Sequence[int]) -> int:
        """Most samples in one forward pass of workers that step by themselves."""
        kind = self._kind
        micro = -(-max(local) // kind.passes(self.workers, side, max(local)))
        if kind.step_split is not None:  # steps of the small batch may have to be cut, too
            micro = min(micro, kind.step_split.most_at_once(local, kind.least))
        return micro

    def peak(self, side: int, micro: int, most: int) -> Estimate | None:
        """Peak bytes of such a worker, which keeps no buffers for an exchange of gradients.

        Args:
            side: Image side, in pixels.
            micro: Most samples in one forward pass.
            most: Largest local batch, in samples.
        """
        return self._kind.memory.predict(side, micro, workers=1, accumulates=micro < most)

    def pace(self, batch: int) -> Pace:
        """How long the steps of each worker take: their computing, by the fitted step times.

        Workers of a server exchange no gradients in a step. Kinds of workers differ by one factor,
        that at the local batch ``batch``.
        """
        job, cluster, first, workers = self.job, self.choice.row.cluster, self._kind, self.workers
        top = max(sides(job))
        longer = {kind.name: self._longer(kind, workers) for kind, _ in cluster.members}

        def seconds_on(kind: WorkerType, side: int, size: int) -> float:
            return kind.computing(workers, side, size) + longer[kind.name]

        def ends(side: int, size: int) -> tuple[float, float]:
            counted = min(workers, first.measured[-1])
            found = first.times.predict(counted, side, size, first.passes(workers, side, size))
            return found.low / found.value, found.high / found.value

        usual = seconds_on(first, top, batch)
        speeds = [
            usual / seconds_on(kind, top, batch) for kind, n in cluster.members for _ in range(n)
        ]
        alike = ((1.0, 1.0),) * workers
        stated = job.virtual.relative_times(workers) if job.launcher.simulated else alike
        fixed_stated = job.launcher.simulated and job.virtual.step_seconds is not None
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
            least_fixed=0.0 if fixed_stated else MIN_FIXED,
            pairs=self._pairs() if len(cluster.members) == 1 and not first.stated else (),
        )

    def _longer(self, kind: WorkerType, workers: int) -> float:
        """Seconds that the planned optimizer's update takes more than the measured one."""
        update = chosen_optimizer(self.table.job, self.batch, self.table.compared)
        found = extra_seconds(self.job, kind.profile, update, workers, kind.speed)
        return found.value if found else 0.0

    def _pairs(self) -> tuple[PairTime, ...]:
        """The measured pairs, with the extra time of the planned update in all steps."""
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
        """Reasons at the highest resolution: first for the batch, then for memory and time."""
        found = prediction_reasons(self.table, self.choice.row, self.chosen, stage)
        return found[:1], (*found[1], found[2])


@dataclass(frozen=True)
class Stated:
    """Step times of a job without profiles: only what the job states is predicted."""

    job: Job  # resolved
    data: DataFacts  # the data set
    network: NetworkFacts  # the network
    workers: int  # number of workers
    # Local batches at the highest resolution, in samples; empty under a parameter server.
    local: tuple[int, ...] = ()
    # The reason for these batches, and its source.
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
    def losses(self) -> Losses:
        """The time lost by workers that are taken away."""
        return losses_of(self.job, self.network, self.workers * self.job.goal.preemptions_of(""))

    def other_seconds(self, epochs: int) -> float:  # noqa: ARG002
        """Seconds of a training besides its steps: not known, so 0."""
        return 0.0

    @property
    def least(self) -> int:
        """Fewest samples that a worker can train on."""
        return least_local(self.network)

    def only_level(self) -> Level:
        """Fields of the stage of a plan with one row."""
        return self.level(max(sides(self.job)), self.batch)

    def level(self, side: int, batch: int) -> Level:
        """Fields of a stage at a resolution, with its global batch."""
        check_batch(batch, self.workers, self.least, self.data)
        local = self.local
        if batch != self.batch:
            local = tuple(apportion(list(local), batch))
        if min(local) < self.least:
            raise PlanError(f"local batches {list(local)}: each worker needs at least {self.least}")
        line = stated_line(self.job, side)
        # Stated times are those of a usual worker; `usual_times` takes those of the slowest one.
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
        """Most samples in one forward pass of workers that step by themselves."""
        return self._micro_batch(local, min(local))

    def _micro_batch(self, local: Sequence[int], judged: int) -> int:
        """Most samples in one forward pass: the local batch, unless the job or parts bound it.

        The job's `micro_batch` is refused if it cuts a local batch of ``judged`` samples too small.
        """
        micro, step_split = max(local), step_split_of(self.job)
        if self.job.micro_batch != "auto":
            check_micro_batches(judged, self.job.micro_batch, self.least)
            micro = -(-micro // -(-micro // self.job.micro_batch))
        if step_split is None:
            return micro
        return min(micro, step_split.most_at_once(local, self.least))

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


def stated_times(job: Job, data: DataFacts, network: NetworkFacts) -> Stated:
    """The step times of a job without profiles, with everything settled that the job leaves open.

    Args:
        job: As given.
        data: The data set.
        network: The network.

    Raises:
        PlanError: Batches, workers and data do not fit together.
    """
    workers = 1 if job.workers == "auto" else job.workers
    precision = job.precision if job.precision != "auto" else "float32"
    job = resolved(job, data, precision=precision, workers=workers, least_side=network.least_side)
    top = max(sides(job))
    for side in sides(job) if job.method_spec.cycles else (top,):
        check_side(side, network)
    if job.method_spec.served:
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
    elif batches is not None:
        batch = batches.value[-1]
    else:
        most = data.train_samples // job.goal.least_steps
        batch = max(workers * least_local(network), min(job.base_batch, most))
        why, source = f"The data is too small for base_batch={job.base_batch}", "assumed"
        if batch == job.base_batch:
            why = "The base batch of the learning rate"
        why += "; nothing was measured."
    local = tuple(split_evenly(batch, workers))
    times = Stated(job, data, network, workers, local, (why, source))
    times.level(top, batch)  # refuses a batch that is too large or too small
    check_bounds(job, local)
    return times


def _predicted(found: Prediction) -> Level:
    """Fields of a stage that are taken from a prediction."""
    return {
        "micro_batch_size": found.micro_batch_size,
        "predicted_epoch_seconds": found.epoch_seconds,
        "predicted_bytes": found.peak_bytes,
    }


def _exchanges(job: Job, size: int, workers: int, seconds: float | None) -> tuple[float, ...]:
    """Seconds of each worker's push and pull, in rank order: measured, or by the stated link.

    Virtual workers may have links of different bandwidths.
    """
    if seconds is None:
        seconds = exchange_seconds(size, 2, job.link, "push-pull") if link_given(job.link) else 0.0
    links = job.virtual.links if job.launcher.simulated else ()
    if not links or job.link.bandwidth is None:
        return (seconds,) * workers
    whole = 2 * size / job.link.bandwidth
    return tuple(seconds + whole * (1 / link - 1) for link in links)
