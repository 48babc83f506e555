"""Simulates a training on clusters of any size: its time, its cost, and where the time goes.

First some steps (or rounds with a server) are simulated one by one, for all workers at once; from
them follows the work of the whole training. Then that work is simulated from checkpoint to
checkpoint while workers are lost. Each repeat has its own random numbers. All values that are
searched have the same ones, so that they differ by their effect and not by chance. All combinations
of searched values are tried; steps are simulated again only for values that change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from pkgutil import resolve_name
from statistics import fmean, stdev

import numpy as np

from batchwright.algorithms.balancer import Balancer
from batchwright.errors import PlanError
from batchwright.planning.methods.two_groups import refuse_too_many
from batchwright.planning.simulation.cluster import Floats, ImaginedCluster, Row
from batchwright.planning.simulation.failures import (
    MAX_SPANS,
    Course,
    EndlessError,
    Hazards,
    run_through,
)
from batchwright.planning.simulation.rounds import round_draws, simulate_rounds
from batchwright.planning.simulation.steps import (
    StepSeries,
    Stragglers,
    lognormal,
    simulate_steps,
    worker_speeds,
)
from batchwright.planning.validation import least_local
from batchwright.prediction.fit import student_t_975
from batchwright.records import Estimate, Plan, Profile
from batchwright.records.clusters.simulation import (
    Scenario,
    Search,
    SimulatedCluster,
    Simulation,
    Timeline,
    TimeShares,
    Tried,
    WorkerSteps,
)

_HOUR = 3600.0
_MAX_STEPS = 2**22  # steps of all workers that are simulated, in all rows of a repeat
_MAX_EVENTS = 200_000  # rounds of all workers that are simulated, in a row and repeat with a server
_FEWEST = 3  # steps or rounds of each worker that are simulated
_SPEEDS, _STEPS, _LOSSES = range(3)  # streams of random numbers of a repeat


def simulate(
    plan: Plan,
    scenario: Scenario,
    profiles: Sequence[Profile] = (),
    keys: Sequence[str] = (),
    grid: Sequence[Scenario] = (),
) -> Simulation:
    """Simulate a plan's training on each number of workers.

    Args:
        plan: The plan.
        scenario: What the clusters are like.
        profiles: The profiles that the plan was made from, with step times, their scatter and
            exchanges.
        keys: Keys of the scenario that are searched.
        grid: The scenario with each combination of values of these keys.

    Raises:
        PlanError: Too few samples, a training that never ends, or profiles of something else.
    """
    asked = scenario.workers or (plan.workers,)
    with np.errstate(over="ignore", invalid="ignore"):  # times that are not finite are refused
        searches: list[Search] = []
        found = []
        for workers in asked:
            if keys:
                one, search = _search(plan, keys, grid, workers, profiles)
                searches.append(search)
            else:
                one = _SimulatedTrainings(plan, scenario, workers, profiles)
                one.go_through()
            found.append(one)
    clusters = tuple(one.record() for one in found)
    return Simulation(
        network=plan.network.name,
        data=plan.data.name,
        method=plan.method,
        scenario=scenario,
        clusters=clusters,
        searches=tuple(searches),
        timeline=found[0].timeline(),
        notes=tuple(dict.fromkeys(note for one in found for note in one.notes)),
    )


@dataclass
class _Repeat:
    """One simulated training: where its time went, in seconds."""

    computing: float = 0.0  # time of computing, mean over the workers
    stragglers: float = 0.0  # time of waiting for slower workers
    exchange: float = 0.0  # time of exchanging gradients or models
    evaluation: float = 0.0  # time of evaluations
    step_seconds: float = 0.0  # seconds of a step in the first row, exchange included
    changes: int = 0  # number of times that the shares changed
    # The course of the training with losses and checkpoints.
    course: Course = field(default_factory=Course)
    # The simulated steps of the first row; `None` with a server and in later repeats.
    series: StepSeries | None = None

    @property
    def work(self) -> float:
        return self.computing + self.stragglers + self.exchange + self.evaluation


class _SimulatedTrainings:
    """All repeats of a training on one number of workers.

    Args:
        plan: The plan.
        scenario: What the cluster is like.
        workers: Number of workers.
        profiles: What was measured.
        alike: Trainings with the same steps, which are taken over; `None`: steps are simulated.
    """

    def __init__(
        self,
        plan: Plan,
        scenario: Scenario,
        workers: int,
        profiles: Sequence[Profile],
        alike: _SimulatedTrainings | None = None,
    ) -> None:
        self._plan, self.scenario = plan, scenario
        self._cluster = cluster = ImaginedCluster(plan, scenario, workers, profiles)
        self._balances = bool(plan.method_spec.balancer) and workers > 1
        if plan.server is not None or self._balances:
            refuse_too_many(plan.method, workers)
        self._rows = cluster.rows()
        if scenario.rebalance_steps is not None and not plan.method_spec.balancer:
            raise PlanError(
                f"rebalance_steps={scenario.rebalance_steps}: with method={plan.method} shares "
                "stay as planned; plan again with method=dynamic-batch"
            )
        every = scenario.rebalance_steps
        self._job = plan.job.model_copy(update={} if every is None else {"rebalance_steps": every})
        self._stragglers = None
        if scenario.straggler_share and scenario.straggler_slowdown > 1:
            self._stragglers = Stragglers(
                scenario.straggler_share, scenario.straggler_slowdown, scenario.straggler_seconds
            )
        self._hazards = Hazards(
            workers=workers,
            failures=1 / scenario.mtbf_hours / _HOUR if scenario.mtbf_hours else 0.0,
            preemptions=cluster.preemptions_per_hour / _HOUR,
            notice=scenario.notice_seconds,
            interval=scenario.checkpoint_seconds or plan.job.seconds_between_checkpoints,
            cost=cluster.checkpoint_cost,
            restart=scenario.restart_seconds,
            replacement=scenario.replacement_seconds,
            spares=scenario.spares,
        )
        if alike is None:
            self.repeats = [self._work(number) for number in range(scenario.repeats)]
        else:
            self.repeats = [replace(one) for one in alike.repeats]
            cluster.notes |= alike._cluster.notes

    def go_through(self) -> None:
        """Simulate the course of each repeat while workers are lost.

        Raises:
            EndlessError: A training would practically never end.
        """
        until = self.scenario.hours * _HOUR if self.scenario.hours else inf
        self._hazards.check(self.repeats[0].work)  # other repeats have about as much work
        for number, one in enumerate(self.repeats):
            losses = self._generator(number, _LOSSES)
            one.course = run_through(
                one.work, self._hazards, losses, until=until, record_spans=number == 0
            )

    @property
    def ended(self) -> bool:
        """Whether all trainings ended within the scenario's hours."""
        return all(one.course.done >= one.work * (1 - 1e-9) for one in self.repeats)

    @property
    def cost(self) -> Estimate | None:
        """Cost of the training, in the price's currency; `None` without a price."""
        return None if self._cluster.hourly is None else estimate_of(self.values)

    @property
    def notes(self) -> Sequence[str]:
        """The assumptions that were made, in words."""
        return list(self._cluster.notes)

    @property
    def seconds(self) -> list[float]:
        """Seconds of each repeat."""
        return [one.course.seconds for one in self.repeats]

    @property
    def values(self) -> list[float]:
        """The value that a search minimizes, by repeat: the cost, or seconds without a price."""
        hourly = self._cluster.hourly
        return [one if hourly is None else hourly * one / _HOUR for one in self.seconds]

    def record(self) -> SimulatedCluster:
        """The mean and spread of the repeats, as a record."""
        first, hazards, repeats = self._rows[0], self._hazards, self.repeats
        return SimulatedCluster(
            workers=self._cluster.workers,
            spares=hazards.spares,
            global_batch_size=int(first.batches.sum()),
            steps_per_epoch=first.steps,
            rebalance_steps=self._job.rebalance_steps if self._balances else None,
            checkpoint_seconds=hazards.interval,
            checkpoint_cost=hazards.cost,
            step_seconds=estimate_of([one.step_seconds for one in repeats]),
            seconds=estimate_of(self.seconds),
            cost=self.cost,
            done=estimate_of([one.course.done / one.work for one in repeats]),
            failures=fmean(one.course.counts["failures"] for one in repeats),
            preemptions=fmean(one.course.counts["preemptions"] for one in repeats),
            rebalancings=fmean(one.changes for one in repeats),
            shares=self._shares(),
        )

    def _shares(self) -> TimeShares:
        found = {
            name: fmean(
                getattr(one, name) / one.work * one.course.done / one.course.seconds
                for one in self.repeats
            )
            for name in ("computing", "stragglers", "exchange", "evaluation")
        }
        parts = {
            "checkpoints": "checkpoints",
            "lost_work": "lost",
            "restarts": "restarts",
            "waiting": "waiting",
        }
        found |= {
            name: fmean(getattr(one.course, part) / one.course.seconds for one in self.repeats)
            for name, part in parts.items()
        }
        return TimeShares(**found)

    def timeline(self) -> Timeline:
        """The course of the first repeat, as a record."""
        first = self.repeats[0]
        spans, series = first.course.spans or [], first.series
        steps: list[WorkerSteps] = []
        if series is not None:
            order = np.argsort(series.recorded.sum(axis=0), kind="stable")
            slowest = series.recorded.max(axis=1)
            starts = np.concatenate([[0.0], np.cumsum(slowest + series.exchange)[:-1]])
            steps = [
                WorkerSteps(
                    worker=rank,
                    starts=tuple(starts.tolist()),
                    computing=tuple(series.recorded[:, rank].tolist()),
                    slowest=tuple(slowest.tolist()),
                    exchange=series.exchange,
                )
                # The fastest, the median and the slowest worker.
                for rank in dict.fromkeys(int(order[at]) for at in (0, len(order) // 2, -1))
            ]
        return Timeline(
            workers=self._cluster.workers,
            spans=tuple(spans[:MAX_SPANS]),
            cut=len(spans) > MAX_SPANS,
            steps=tuple(steps),
        )

    # -------------------------------------------------------------------------------- one repeat

    def _generator(self, repeat: int, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.scenario.seed, repeat, *stream])

    def _work(self, number: int) -> _Repeat:
        """Simulate the steps or rounds of one training, without losses."""
        cluster = self._cluster
        drawn = self._generator(number, _SPEEDS)
        level = drawn.standard_normal()
        speeds = worker_speeds(cluster.relative, cluster.speed_spread, drawn)
        found = _Repeat()
        for at, row in enumerate(self._rows):
            generator = self._generator(number, _STEPS, at)
            known = float(np.exp(row.level * level))
            if self._plan.server is None:
                parts = self._of_steps(row, speeds, generator, found)
            else:
                parts = self._of_rounds(row, speeds, generator)
            if at == 0:
                steps = row.epochs * row.steps
                found.step_seconds = known * sum(parts) / steps
            found.computing += known * parts[0]
            found.stragglers += known * parts[1]
            found.exchange += known * parts[2]
        epochs = sum(row.epochs for row in self._rows)
        evaluations = -(-epochs // self._plan.job.evaluate_epochs)
        found.evaluation = evaluations * cluster.evaluation_seconds
        if not isfinite(found.work):
            raise PlanError(
                "with such speeds, spreads and links a step takes so long that no number holds it: "
                "give values nearer to those of real clusters"
            )
        if number:
            found.series = None  # the series of thousands of repeats would fill the memory
        return found

    def _of_steps(
        self, row: Row, speeds: Floats, generator: np.random.Generator, found: _Repeat
    ) -> tuple[float, float, float]:
        total = row.epochs * row.steps
        series = simulate_steps(
            row,
            speeds,
            self._simulated(total, _MAX_STEPS // len(self._rows), "steps"),
            generator,
            scatter=lognormal(self._cluster.step_spread),
            stragglers=self._stragglers,
            balancer=self._balancer(row) if self._balances else None,
        )
        found.changes += series.changes
        found.series = found.series or series
        return series.totals(total, row.epochs * row.whole)

    def _simulated(self, total: int, most: int, what: str) -> int:
        """The number of a row's steps or rounds to simulate: of all workers ``most``."""
        workers, asked = self._cluster.workers, min(total, self.scenario.steps)
        count = min(asked, max(_FEWEST, most // workers))
        if count < asked:
            self._cluster.notes[
                f"a row goes on as in its first {count} {what}, since those of {workers:,} workers "
                "take long to simulate"
            ] = None
        return count

    def _balancer(self, row: Row) -> Balancer:
        made: Balancer = resolve_name(self._plan.method_spec.balancer)(
            self._job,
            [str(rank) for rank in range(self._cluster.workers)],
            least=least_local(self._plan.network),
            speeds={},
            fixed_samples=row.fixed_samples,
        )
        return made

    def _of_rounds(
        self, row: Row, speeds: Floats, generator: np.random.Generator
    ) -> tuple[float, float, float]:
        server, workers = self._plan.server, self._cluster.workers
        assert server is not None  # noqa: S101 - its caller has looked
        each = 1  # exchanges of an epoch
        if server.exchange_steps is not None:
            steps = row.samples_per_round / (row.batches * server.exchange_steps)
            each = max(1, round(float(steps.mean())))
        total = row.epochs * each
        count = self._simulated(total, _MAX_EVENTS, "rounds")
        rounds = simulate_rounds(
            workers,
            count,
            round_draws(
                row,
                speeds,
                generator,
                samples=np.maximum(row.samples_per_round // each, 1),
                spread=self._cluster.step_spread,
                stragglers=self._stragglers,
            ),
            transfer=self._cluster.transfer_seconds,
            service=self._cluster.model_seconds,
            ahead={"asp": inf, "bsp": 0}.get(server.consistency, float(server.staleness or 0)),
        )
        times = total / count
        computing, exchange = rounds.computing.mean(), rounds.exchange.mean()
        # Waiting, and ending before the last one: none where all are alike, but for rounding.
        others = max(rounds.seconds - computing - exchange, 0.0)
        return float(computing) * times, float(others) * times, float(exchange) * times


def estimate_of(values: Sequence[float]) -> Estimate:
    """Mean over repeats, and the interval that holds 95 of 100 repeats."""
    low, high = np.quantile(np.array(values, dtype=float), [0.025, 0.975]).tolist()
    mean = fmean(values)
    return Estimate(value=mean, low=min(low, mean), high=max(high, mean))


def _search(
    plan: Plan,
    keys: Sequence[str],
    grid: Sequence[Scenario],
    workers: int,
    profiles: Sequence[Profile],
) -> tuple[_SimulatedTrainings, Search]:
    """Try all combinations of searched values, on the same random numbers; return the best one."""
    steps: dict[tuple[int | None, int], _SimulatedTrainings] = {}
    found: list[tuple[tuple[float, ...], Estimate, Estimate | None, Floats]] = []
    endless: list[tuple[float, ...]] = []
    best, least, refused = None, inf, PlanError("nothing was searched")
    for scenario in grid:
        values = tuple(float(getattr(scenario, key)) for key in keys)
        # Steps depend on no other key that may be searched.
        of_steps = scenario.rebalance_steps, scenario.workers_per_host
        one = _SimulatedTrainings(plan, scenario, workers, profiles, steps.get(of_steps))
        steps.setdefault(of_steps, one)
        try:
            one.go_through()
        except EndlessError as error:
            endless.append(values)
            refused = error
            continue
        if not one.ended:
            raise PlanError(
                f"--search {','.join(keys)}: not every training ends within the hours that the "
                "cluster is there, so their times cannot be compared: leave out hours="
            )
        found.append((values, estimate_of(one.seconds), one.cost, np.array(one.values)))
        if best is None or fmean(one.values) < least:
            best, least = one, fmean(one.values)
    if best is None:
        raise refused
    lowest = np.array(best.values)
    best_values = tuple(float(getattr(best.scenario, key)) for key in keys)
    tried = tuple(
        Tried(values=values, seconds=seconds, cost=cost, over_best=_mean_of(own - lowest))
        for values, seconds, cost, own in found
    )
    search = Search(
        keys=tuple(keys),
        workers=workers,
        best=best_values,
        level=tuple(
            one.values for one in tried if one.values != best_values and one.over_best.low <= 0
        ),
        tried=tried,
        endless=tuple(endless),
    )
    return best, search


def _mean_of(values: Floats) -> Estimate:
    """Mean and its 95 % interval, by Student's t."""
    mean, half = float(values.mean()), 0.0
    if len(values) > 1:
        half = student_t_975(len(values) - 1) * stdev(values.tolist()) / sqrt(len(values))
    return Estimate(value=mean, low=mean - half, high=mean + half)
