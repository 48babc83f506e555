r"""Preempted workers: the time that is lost, how often to write a checkpoint, whether spot pays.

Where a worker is lost every M seconds in the mean, a training takes T seconds by
`algorithms.checkpointing`. The number of losses is a Poisson number with mean T / M. Each loss
costs the training since the last checkpoint, half an interval in the mean, and the restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt

from batchwright.algorithms.checkpointing import (
    assumed_cost,
    daly_interval,
    expected_seconds,
    young_interval,
)
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.worker_types import WorkerType
from batchwright.planning.chosen import Chosen
from batchwright.prediction.fit import Z_975
from batchwright.records import Alternative, Estimate, Job, NetworkFacts, Plan, Reason, Source
from batchwright.records.text.formatting import duration, number, percent

TOO_OFTEN = 100.0
"""Seconds with losses over those without, from which on a candidate is refused."""

_HOUR = 3600.0
_DALY = "Daly 2006, Future Generation Computer Systems 22(3); Young 1974, CACM 17(9)"
_HALVINGS = 60  # bisections
_FEW = 200.0  # mean number of losses above which a normal distribution stands for the Poisson one


@dataclass(frozen=True)
class Losses:
    """The time that a training loses by workers that are taken away."""

    mean: float  # mean seconds between two losses; infinite where there are none
    cost: float  # seconds that a checkpoint holds up training
    restart: float  # seconds from a loss until all workers train again
    asked: float | None = None  # seconds between checkpoints, as the job says; `None`: the best
    assumed: bool = False  # whether ``cost`` is assumed

    @property
    def interval(self) -> float:
        """Seconds of training between checkpoints."""
        if self.asked is not None or self.mean == inf:
            return self.asked or inf
        return float(f"{max(daly_interval(self.cost, self.mean), 1.0):.3g}")

    def seconds(self, work: float) -> float:
        """Mean seconds that ``work`` seconds of training take with losses; at most 100 times."""
        if self.mean == inf or work <= 0:
            return work
        return min(self._at(work, min(self.interval, work)), TOO_OFTEN * work)

    def _at(self, work: float, interval: float) -> float:
        return expected_seconds(work, interval, self.cost, self.restart, self.mean)

    def endless(self, work: float) -> bool:
        """Whether a training of ``work`` seconds takes `TOO_OFTEN` times as long, or longer."""
        return self.mean < inf and self.seconds(work) >= TOO_OFTEN * work

    def work(self, seconds: float) -> float:
        """Seconds of work that take ``seconds`` with losses: the inverse of `seconds`."""
        low, high = 0.0, seconds
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle) < seconds else (low, middle)
        return high

    def spread(self, work: float) -> tuple[float, float]:
        """95 % interval of the seconds that ``work`` takes, by the random number of losses."""
        if self.mean == inf:
            return work, work
        interval = min(self.interval, work)
        mean = self.seconds(work)
        each = interval / 2 + self.cost + self.restart
        times = mean / self.mean
        low, high = _poisson_ends(times)
        # Of a few losses in a hundred trainings, 97.5 % of these have none, and end below the mean.
        return max(work, mean + (low - times) * each), mean + max(0.0, high - times) * each

    def reasons(self, train: Estimate) -> tuple[Reason, ...]:
        """Reasons on lost work and checkpoints; ``train``: seconds of training, losses included."""
        if self.mean == inf:
            return ()
        work = self.work(train.value)
        low, high = self.spread(work)
        share = 1 - work / train.value
        lost = Chosen(
            f"{percent(share)} ({percent(max(1 - work / low, 0.0))} to {percent(1 - work / high)})",
            f"Of the training's time: checkpoints, restarts of {duration(self.restart)} "
            f"(goal.restart_seconds) and work that is done again, where a worker is taken away "
            f"every {duration(self.mean)} in the mean. The interval comes from the number of such "
            "losses, which is random.",
            "predicted",
            _DALY,
        )
        for_one = "assumed for one (goal.checkpoint_cost)" if self.assumed else "for one"
        cost = f"{duration(self.cost)} {for_one}"
        best = max(daly_interval(self.cost, self.mean), 1.0)
        young = max(young_interval(self.cost, self.mean), 1.0)
        why = (
            f"Daly's for {cost}: short enough for little work to be lost, long enough for "
            "checkpoints to take little time."
        )
        if self.asked is not None:
            why = f"Asked for. Daly's would be {duration(best)}, for {cost}."
        others = [
            Alternative(value=f"{words}{duration(one)}", loss=self._loss(work, one))
            for words, one in (("Young's ", young), ("Daly's ", best), ("", 60.0))
            if abs(log(one / self.interval)) > 0.005
        ]
        source: Source = "published" if self.asked is None else "asked"
        checkpoints = Chosen(duration(self.interval), why, source, _DALY, tuple(others))
        return lost.reason("lost work"), checkpoints.reason("checkpoint interval")

    def _loss(self, work: float, interval: float) -> str:
        now, then = (self._at(work, min(one, work)) for one in (self.interval, interval))
        if then == inf:
            return "would never end"
        return f"{percent(abs(then / now - 1))} {'more' if then >= now else 'less'} time"


def losses_of(job: Job, network: NetworkFacts, preemptions: float) -> Losses:
    """The losses of a cluster; ``preemptions``: workers that are taken away in an hour, mean."""
    goal, served = job.goal, job.method_spec.served
    asked = None if job.checkpoint_seconds == "auto" else job.checkpoint_seconds
    return Losses(
        mean=_HOUR / preemptions if preemptions else inf,
        cost=(
            assumed_cost(network, job.optimizer, averages=job.averages, served=served)
            if goal.checkpoint_cost is None
            else goal.checkpoint_cost
        ),
        restart=goal.restart_seconds,
        asked=asked,
        assumed=goal.checkpoint_cost is None,
    )


def losses_of_plan(plan: Plan) -> Losses:
    """The losses of a plan's workers."""
    counts = {one.kind: one.count for one in plan.kinds} or {"": plan.workers}
    often = (count * plan.job.goal.preemptions_of(kind) for kind, count in counts.items())
    return losses_of(plan.job, plan.network, sum(often))


def settled_checkpoints(job: Job, losses: Losses) -> dict[str, float]:
    """The interval between checkpoints, where workers are taken away and the job leaves it open."""
    if losses.mean == inf or job.checkpoint_seconds != "auto":
        return {}
    return {"checkpoint_seconds": losses.interval}


@dataclass(frozen=True)
class Offer:
    """One way to pay for some workers."""

    name: str  # name of the cluster, such as ``4 a100-spot``
    hourly: float  # price of all its workers for an hour
    losses: Losses  # the time that is lost on it

    def cost(self, work: float) -> Estimate:
        """Cost of ``work`` seconds of training; its interval is that of the number of losses."""
        seconds = self.losses.seconds(work), *self.losses.spread(work)
        value, low, high = (one * self.hourly / _HOUR for one in seconds)
        return Estimate(value=value, low=min(low, value), high=high)


def spot_reasons(
    job: Job, cluster: ClusterOption, kinds: Sequence[WorkerType], work: float
) -> tuple[Reason, ...]:
    """Whether spot workers are cheaper, where the same machines are offered both ways.

    Args:
        job: Resolved.
        cluster: The plan's workers.
        kinds: All kinds of workers.
        work: Seconds of training without losses.

    Returns:
        A reason for each other offer of the same workers: which is cheaper, and up to which rate of
        preemptions spot is.
    """
    if len(cluster.members) > 1:
        return ()
    ((mine, count),) = cluster.members

    def offer(kind: WorkerType) -> Offer:
        one = ClusterOption(((kind, count),))
        losses = losses_of(job, kind.profile.network, one.preemptions)
        return Offer(str(one), one.hourly or 0.0, losses)

    return tuple(
        spot_reason(offer(mine), offer(other), work, count)
        for other in kinds
        if mine.price
        and other.price
        and other.profile is mine.profile
        and other.speed == mine.speed
        and bool(other.preemptions) != bool(mine.preemptions)
    )


def spot_reason(chosen: Offer, other: Offer, work: float, workers: int) -> Reason:
    """The reason that compares two offers of the same workers, one of them spot.

    ``work`` is the seconds of training without losses.
    """
    spot, steady = (chosen, other) if chosen.losses.mean < inf else (other, chosen)
    ours, theirs = spot.cost(work), steady.cost(work)
    ends = sorted(1 - one / theirs.value for one in (ours.low, ours.value, ours.high))
    saved = 1 - ours.value / theirs.value
    cheaper = "spot" if saved > 0 else "on demand"
    words = f"{cheaper}, by {percent(abs(saved))}"
    interval = f"spot saves {percent(ends[0])} to {percent(ends[2])} of the cost"
    limit = _break_even(spot, theirs.value, work, workers)
    if ends[0] <= 0 <= ends[2]:
        interval += ", so either may turn out cheaper"
    until = (
        f" Spot is cheaper up to {number(limit)} preemptions of a worker an hour."
        if limit > 0
        else " Spot is not cheaper even if no worker is taken away."
    )
    why = (
        f"{spot.name} cost {number(ours.value)} ({number(ours.low)} to {number(ours.high)}), lost "
        f"work and restarts included, {steady.name} {number(theirs.value)}: {interval}.{until}"
    )
    found = Chosen(
        words,
        why,
        "predicted",
        _DALY,
        (
            Alternative(
                value=other.name,
                loss=f"cost {number(other.cost(work).value)}, "
                f"{duration(other.losses.seconds(work))} of training",
            ),
        ),
    )
    return found.reason("spot or on demand")


def _break_even(spot: Offer, cost: float, work: float, workers: int) -> float:
    """Preemptions of a worker in an hour at which spot costs ``cost``."""
    low, high = 0.0, 1000.0
    if work * spot.hourly / _HOUR >= cost:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        losses = replace(spot.losses, mean=_HOUR / middle / workers)
        cheap = losses.seconds(work) * spot.hourly / _HOUR < cost
        low, high = (middle, high) if cheap else (low, middle)
    return low


def _poisson_ends(mean: float) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles of a Poisson distribution."""
    if mean > _FEW:
        return mean - Z_975 * sqrt(mean), mean + Z_975 * sqrt(mean)
    term = total = exp(-mean)
    count, ends = 0, []
    for share in (0.025, 0.975):
        while total < share:
            count += 1
            term *= mean / count
            total += term
        ends.append(float(count))
    return ends[0], ends[1]
