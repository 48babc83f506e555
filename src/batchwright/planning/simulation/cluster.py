r"""Step times of the workers of a cluster that is simulated, by measurements or by the plan.

The workers of the plan are repeated in proportion to fill the cluster. With G bytes of gradients, n
workers in hosts of g, latency :math:`\alpha` and bandwidth :math:`\beta`, a ring all-reduce takes
`prediction.collective.exchange_seconds`, and a tree takes

.. math:: t_{tree} = 2 \left( \alpha \lceil \log_2 n \rceil + \frac G \beta \right)

(double binary trees, Sanders, Speck and Träff 2009). With several workers on each host, gradients
are first summed inside the hosts: :math:`t_{ring}(g) + t(n / g)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log, log2, sqrt
from statistics import median

import numpy as np
import numpy.typing as npt

from batchwright.algorithms.batch_size import steps_per_epoch
from batchwright.algorithms.checkpointing import assumed_cost
from batchwright.algorithms.partition import apportion
from batchwright.algorithms.simulated_clock import StepTime, step_times
from batchwright.errors import PlanError
from batchwright.planning.candidates.optimizer import extra_seconds
from batchwright.planning.candidates.preemptions import losses_of_plan
from batchwright.planning.candidates.worker_types import WorkerType, link_given, worker_types_of
from batchwright.planning.merging import kind_of, kinds_apart
from batchwright.planning.methods.simulated import slowest_link
from batchwright.prediction.collective import exchange_seconds, fit_collectives
from batchwright.prediction.drift import (
    ASSUMED_DRIFT,
    QUARTILES_PER_DEVIATION,
    SHARED_DRIFT,
)
from batchwright.prediction.fit import Z_975
from batchwright.prediction.overlap import NO_OVERLAP, combine
from batchwright.records import (
    VIRTUAL_BANDWIDTH,
    VIRTUAL_LATENCY,
    Estimate,
    Link,
    Plan,
    Profile,
    Stage,
)
from batchwright.records.clusters.simulation import Scenario
from batchwright.records.text.formatting import counted, percent

Floats = npt.NDArray[np.float64]

_BYTES = 4  # of a weight
_DRAWS = 512  # random steps whose slowest worker is averaged


def tree_seconds(size: float, workers: int, link: Link) -> float:
    """Seconds of summing ``size`` bytes by double binary trees over a stated link; see above."""
    if workers == 1:
        return 0.0
    assert link.latency is not None  # noqa: S101 - stated
    assert link.bandwidth is not None  # noqa: S101
    return 2 * (link.latency * ceil(log2(workers)) + size / link.bandwidth)


@dataclass(frozen=True)
class Row:
    """A row of the plan on the workers of the cluster; arrays are in rank order."""

    epochs: int  # length of the row, in epochs
    steps: int  # steps of an epoch
    whole: float  # steps of an epoch, with a smaller last step counted by its share of the time
    batches: npt.NDArray[np.int64]  # local batch of each worker, in samples
    sample_seconds: Floats  # seconds of computing a sample on each worker, at the plan's speed
    step_seconds: Floats  # fixed seconds of a step on each worker, at the plan's speed
    fixed_samples: float  # fixed time of a step over the time per sample, in samples; 0: not known
    # Samples of each worker in a round with a server; empty without one.
    samples_per_round: npt.NDArray[np.int64]
    # Seconds that exchanging gradients adds to the slowest worker's computing in a step; 0 with a
    # server.
    exchange: float
    level: float  # standard deviation of the error that all times have in common, as a share


class ImaginedCluster:
    """The workers of a scenario, which train by a plan.

    Args:
        plan: The plan.
        scenario: What the cluster is like.
        workers: Number of workers.
        profiles: What was measured; empty: times are those that the plan predicts.

    Raises:
        PlanError: There are fewer samples than workers, or the profiles are of something else.
    """

    def __init__(
        self, plan: Plan, scenario: Scenario, workers: int, profiles: Sequence[Profile] = ()
    ) -> None:
        self.plan, self.scenario, self.workers = plan, scenario, workers
        self.notes: dict[str, None] = {}
        if plan.growth:
            words = "the batch stays, so times are upper bounds: only gradients tell how it grows"
            self.notes[f"{words} (batch_growth=noise)"] = None
        self._profiles = profiles
        # The plan's worker that each one is like; numbers are in proportion to the plan's.
        self.like = np.arange(workers, dtype=np.int64) * plan.workers // workers
        self.relative, self.overheads = np.ones(workers), np.ones(workers)
        self._links = np.ones(workers)  # bandwidth of each own link over that of `link`
        if plan.job.launcher.simulated:
            stated = np.array(plan.job.virtual.relative_times(plan.workers))
            self.relative, self.overheads = stated[self.like].T
            if plan.job.virtual.links and scenario.bandwidth is None:
                self._links = np.array(plan.job.virtual.links)[self.like]
        if scenario.speeds:
            self.relative = np.resize(np.array(scenario.speeds, dtype=float), workers)

    # ------------------------------------------------------------------------------------- speeds

    @cached_property
    def _kinds(self) -> Mapping[str, WorkerType]:
        if not self._profiles:
            return {}
        profile = self._profiles[0]
        if (profile.network, profile.data.name) != (self.plan.network, self.plan.data.name):
            raise PlanError(
                f"the profile is of {profile.network.name} on {profile.data.name}, the plan of "
                f"{self.plan.network.name} on {self.plan.data.name}: give the profile that the "
                "plan was made from"
            )
        by_kind: dict[str, Profile] = {}
        for one in (kind for profile in self._profiles for kind in kinds_apart(profile)):
            by_kind.setdefault(kind_of(one), one)
        return {kind.name: kind for kind in worker_types_of(list(by_kind.values()), self.plan.job)}

    @cached_property
    def _timed(self) -> Mapping[str, WorkerType]:
        """Kinds of workers whose measured times count; none where a virtual plan has its own."""
        if self.plan.job.launcher.simulated:
            with suppress(PlanError):  # a plan that tells no times
                step_times(self.plan)
                return {}
        return self._kinds

    def _kind(self, rank: int) -> WorkerType:
        name = self._kind_names[rank]
        if not name:
            return next(iter(self._kinds.values()))
        if name not in self._kinds:
            raise PlanError(
                f"the plan has workers of kind {name!r}, the profiles only of "
                f"{', '.join(map(repr, self._kinds))}: give the profiles that it was made from"
            )
        return self._kinds[name]

    @cached_property
    def step_spread(self) -> float:
        """Standard deviation of the seconds of one worker's steps, as a share."""
        if self.scenario.step_spread is not None:
            return self.scenario.step_spread
        points = [point for kind in self._kinds.values() for point in kind.profile.steps]
        if not points:
            self.notes[
                f"steps of a worker scatter by {percent(ASSUMED_DRIFT, 0)} (no --profile)"
            ] = None
            return ASSUMED_DRIFT
        return median(
            log(max(one.step_high / one.step_low, 1.0)) / QUARTILES_PER_DEVIATION for one in points
        )

    @cached_property
    def speed_spread(self) -> float:
        """Standard deviation of workers' speeds within a kind, as a share."""
        if self.scenario.speed_spread is not None:
            return self.scenario.speed_spread
        if not self._kinds:
            words = f"speeds of workers differ by {percent(ASSUMED_DRIFT, 0)} (no --profile)"
            self.notes[words] = None
            return ASSUMED_DRIFT
        drift = max(kind.times.drift for kind in self._kinds.values())
        return drift * sqrt(1 - SHARED_DRIFT)  # the other part is common to all workers

    # --------------------------------------------------------------------------------------- rows

    def rows(self) -> list[Row]:
        """The plan's rows on these workers."""
        stated = None if self._timed else self._stated_times()
        samples = self.scenario.samples or self.plan.data.train_samples
        rows = []
        for at, stage in enumerate(self.plan.stages):
            batches = self._batches(stage)
            if samples < self.workers:
                raise PlanError(
                    f"workers={self.workers}: an epoch of {samples:,} images leaves some without "
                    "any: give fewer workers, or samples=..., the images of a larger data set"
                )
            rounds = np.zeros(0, dtype=np.int64)
            if stage.samples_per_round:
                rounds = self._apportioned(stage.samples_per_round, samples)
            if stated is not None:
                ends = stage.predicted_epoch_seconds
                level = _deviation(ends) if ends is not None else 0.0
                line = {rank: tuple(stated[at]) for rank in range(self.plan.workers)}
            else:
                line, level = self._measured_lines(stage, batches)
            each = np.array([line[rank] for rank in range(self.plan.workers)])[self.like]
            slopes, fixed = each[:, 0], self.overheads * each[:, 1]
            batch = int(batches.sum())
            steps, last = steps_per_epoch(samples, min(batch, samples), self.workers)
            usual = slopes * batches + fixed
            ending = slopes * batches * last / batch + fixed
            exchange = 0.0 if self.plan.server else self._exchange_seconds(stage, batches, each)
            rows.append(
                Row(
                    epochs=stage.epochs,
                    steps=steps,
                    whole=steps - 1 + float(ending.max() / usual.max()),
                    batches=batches,
                    sample_seconds=slopes,
                    step_seconds=fixed,
                    fixed_samples=stage.fixed_samples,
                    samples_per_round=rounds,
                    exchange=exchange,
                    level=level,
                )
            )
        # In proportion, with the epochs of the scenario; rows without an epoch are left out.
        epochs = self.scenario.epochs or self.plan.likely_epochs()
        shares = apportion([row.epochs for row in rows], epochs)
        return [replace(row, epochs=n) for row, n in zip(rows, shares, strict=True) if n]

    def _stated_times(self) -> tuple[StepTime, ...]:
        try:
            return step_times(self.plan)
        except PlanError:
            raise PlanError(
                "the plan does not say how long its steps take: give what it was made from with "
                "--profile"
            ) from None

    def _batches(self, stage: Stage) -> npt.NDArray[np.int64]:
        """Local batches: the plan's own, or the scenario's global batch in proportion to them."""
        wanted = self.scenario.global_batch
        if wanted is None:
            return np.array(stage.local_batch_sizes, dtype=np.int64)[self.like]
        if wanted < self.workers:
            raise PlanError(
                f"global_batch={wanted} leaves some of {counted(self.workers, 'worker')} without a "
                f"sample: give {self.workers} or more, or leave it out, and each keeps its own"
            )
        return self._apportioned(stage.local_batch_sizes, wanted)

    def _apportioned(self, weights: Sequence[int], total: int) -> npt.NDArray[np.int64]:
        """``total`` samples in proportion to the weights of the plan's workers, at least 1 each."""
        own = np.array(weights, dtype=np.int64)[self.like]
        return np.array(apportion(own.tolist(), total, least=1), dtype=np.int64)

    def _measured_lines(
        self, stage: Stage, batches: npt.NDArray[np.int64]
    ) -> tuple[dict[int, tuple[float, ...]], float]:
        """Seconds per sample and fixed seconds of each of the plan's workers; and their `level`."""
        lines: dict[int, tuple[float, ...]] = {}
        levels = [0.0]
        known: dict[tuple[str, int], tuple[float, ...]] = {}
        first = {int(rank): int(batches[at]) for at, rank in reversed([*enumerate(self.like)])}
        for rank in range(self.plan.workers):
            kind, local = self._kind(rank), first.get(rank, stage.local_batch_sizes[rank])
            if (kind.name, local) not in known:
                together = min(self.workers, kind.measured[-1])
                half = max(local // 2, 1) if local > 1 else 2
                few, many = (
                    kind.computing(together, stage.resolution, size) for size in (half, local)
                )
                slope = (many - few) / (local - half)
                fixed = many - slope * local
                if fixed < 0 or slope < 0:
                    slope, fixed = (many / local, 0.0) if fixed < 0 else (0.0, many)
                # With optimizer=auto steps were measured with SGD.
                longer = extra_seconds(
                    self.plan.job, kind.profile, self.plan.update, together, kind.speed
                )
                known[kind.name, local] = slope, fixed + (longer.value if longer else 0.0)
                step = together, stage.resolution, local
                levels.append(_deviation(kind.times.predict(*step, kind.passes(*step))))
            lines[rank] = known[kind.name, local]
        return lines, max(levels)

    # ----------------------------------------------------------------------------------- exchange

    @property
    def _planned_link(self) -> Link:
        """The link that the plan states; without a server the slowest of its workers' links."""
        return self.plan.job.link if self.plan.server else slowest_link(self.plan.job)

    @cached_property
    def link(self) -> Link:
        """Between hosts."""
        asked, planned = self.scenario, self._planned_link
        latency = asked.latency if asked.latency is not None else planned.latency
        bandwidth = asked.bandwidth if asked.bandwidth is not None else planned.bandwidth
        if latency is None or bandwidth is None:
            self.notes[
                f"links between hosts: {1e3 * VIRTUAL_LATENCY:g} ms and "
                f"{VIRTUAL_BANDWIDTH / 1e6:g} MB/s (give latency= and bandwidth=)"
            ] = None
        return Link(
            latency=VIRTUAL_LATENCY if latency is None else latency,
            bandwidth=VIRTUAL_BANDWIDTH if bandwidth is None else bandwidth,
        )

    @cached_property
    def _host_link(self) -> Link:
        """The link inside a host: as stated, else the slowest measured, else that between hosts."""
        asked = self.scenario
        if asked.host_latency is not None:
            return Link(latency=asked.host_latency, bandwidth=asked.host_bandwidth)
        links = [one for profile in self._profiles for one in profile.links]
        inside = [one for one in links if one.between == "workers of a host"]
        if not inside:
            return self.link
        return Link(
            latency=max(one.latency for one in inside),
            bandwidth=min(one.bandwidth for one in inside),
        )

    def all_reduce_seconds(self, size: int) -> float:
        """Seconds of summing ``size`` bytes over all workers, first inside hosts; see above."""
        inside = min(self.scenario.workers_per_host, self.workers)
        hosts = -(-self.workers // inside)
        seconds = 0.0
        if inside > 1:
            seconds = exchange_seconds(size, inside, self._host_link)
        if hosts > 1 and self.scenario.exchange == "tree":
            return seconds + tree_seconds(size, hosts, self.link)
        return seconds + exchange_seconds(size, hosts, self.link)

    def _exchange_seconds(
        self,
        stage: Stage,
        batches: npt.NDArray[np.int64],
        lines: Floats,
    ) -> float:
        """Seconds that exchanging gradients adds to the slowest worker's computing in a step.

        ``lines`` has seconds per sample and fixed seconds of each worker, (workers, 2).
        """
        if self.workers == 1:
            return 0.0
        stated = self.scenario.latency is not None or self.scenario.workers_per_host > 1
        kind, planned = self._kind(0) if self._timed else None, self._planned_link
        size, known = self.plan.network.trained_bytes, link_given(planned)
        # Lines that are made of predicted epochs include the exchange of the plan's workers.
        included = kind is None and stage.sample_seconds is None and self.plan.workers > 1
        as_planned = kind is None and self.workers == self.plan.workers and not stated
        if as_planned and included:
            return 0.0

        def slowest(sizes: Sequence[int] | npt.NDArray[np.int64]) -> float:
            return float((lines[:, 0] * np.asarray(sizes) + lines[:, 1]).max())

        epoch = stage.predicted_epoch_seconds
        if as_planned and epoch is not None and not self.plan.job.launcher.simulated:
            own = slowest(stage.local_batch_sizes)
            steps = self.plan.data.train_samples / stage.global_batch_size
            return max(epoch.value / steps - own, 0.0)
        computing = slowest(batches)
        if kind is not None and not stated and self.workers <= kind.measured[-1]:
            step = self.workers, stage.resolution, int(batches[0])
            whole, alone = kind.seconds(*step), kind.computing(*step)
            # The measured step includes the wait for the slowest worker, which is simulated.
            return max(whole - alone * self._slowest_of_few(), 0.0)
        if kind is not None and not stated and self.plan.job.link.latency is None:
            model = fit_collectives(kind.profile.collectives)
            if not model.assumed(self.workers):
                return model.seconds(size, self.workers)
        exchange = self.all_reduce_seconds(size)
        if included and known:
            return max(exchange - exchange_seconds(size, self.plan.workers, planned), 0.0)
        if included:
            self.notes[
                "steps of the plan include the exchange of its own workers, which counts beside "
                "the simulated one (no --profile)"
            ] = None
        overlap = (kind.times.overlap if kind is not None else None) or NO_OVERLAP
        return combine(computing, exchange, overlap) - computing

    def _slowest_of_few(self) -> float:
        """Mean time of the slowest worker's step over that of a single worker."""
        draws = np.random.default_rng(0).standard_normal((_DRAWS, self.workers))
        return float(np.exp(self.step_spread * draws).max(axis=1).mean())

    # ---------------------------------------------------------------------------- all other times

    @property
    def model_seconds(self) -> float:
        """Seconds that the model's weights take over a server's link."""
        assert self.link.bandwidth is not None  # noqa: S101 - never without
        return _BYTES * self.plan.network.parameters / self.link.bandwidth

    @property
    def transfer_seconds(self) -> Floats:
        """Seconds that the model's weights take over each worker's own link."""
        return (self.link.latency or 0.0) + self.model_seconds / self._links

    @cached_property
    def evaluation_seconds(self) -> float:
        """Seconds of one evaluation, whose images are split evenly between the workers."""
        images = self.plan.data.val_samples
        if self._kinds:
            seconds = -(-images // self.workers) * self._kind(0).evaluation_seconds
            # Like plans, not by the speeds that a virtual cluster's plan states.
            return seconds / (min(self.scenario.speeds) if self.scenario.speeds else 1.0)
        whole, steps = self.plan.train_seconds, self.plan.seconds_of_steps
        if whole is None or steps is None:
            return 0.0
        evaluations = ceil(self.plan.likely_epochs() / self.plan.job.evaluate_epochs)
        # Workers that are taken away are simulated, so their part of the plan's time is left out.
        spent = losses_of_plan(self.plan).work(whole.value) - steps.value
        return max(spent, 0.0) / evaluations * self.plan.workers / self.workers

    @cached_property
    def checkpoint_cost(self) -> float:
        """Seconds that a checkpoint holds up training."""
        if self.scenario.checkpoint_cost is not None:
            return self.scenario.checkpoint_cost
        plan = self.plan
        seconds = assumed_cost(
            plan.network,
            plan.update,
            averages=plan.average_epochs is not None,
            served=plan.server is not None,
        )
        self.notes[f"a checkpoint holds up training for {seconds:.2g} s (checkpoint_cost=)"] = None
        return seconds

    @cached_property
    def _kind_names(self) -> list[str]:
        """Kind of each of the plan's workers, in rank order; empty where it names none."""
        names = [one.kind for one in self.plan.kinds for _ in range(one.count)]
        return names or [""] * self.plan.workers

    @property
    def preemptions_per_hour(self) -> float:
        """Preemptions of one worker in an hour, mean over the workers."""
        if self.scenario.preemptions_per_hour is not None:
            return self.scenario.preemptions_per_hour
        goal = self.plan.job.goal
        often = {name: goal.preemptions_of(name) for name in set(self._kind_names)}
        found = np.array([often[name] for name in self._kind_names])
        return float(found[self.like].mean())

    @cached_property
    def hourly(self) -> float | None:
        """Price of all workers for an hour, spare ones included; `None`: not known."""
        asked, goal = self.scenario.price, self.plan.job.goal
        if asked is not None:
            return asked * (self.workers + self.scenario.spares)
        prices = {one.kind: one.price for one in goal.kinds}
        found = [prices.get(name) or goal.price for name in self._kind_names]
        if any(price is None for price in found):
            return None
        total = float(np.array(found, dtype=float)[self.like].sum())
        return total * (1 + self.scenario.spares / self.workers)


def _deviation(estimate: Estimate) -> float:
    """Standard deviation of the logarithm of an estimate, by its 95 % interval."""
    return log(estimate.high / estimate.low) / (2 * Z_975)
