"""A simulated cluster: how it is described, and the results of a training on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from batchwright.records.base import (
    Count,
    Document,
    Estimate,
    Hours,
    Index,
    Keys,
    NonNegative,
    Positive,
    PositiveTime,
    Price,
    Rate,
    Record,
    RelativeSpeed,
    StatedTime,
    Workers,
)
from batchwright.records.text.formatting import counted, duration, number

Large = Annotated[int, Field(ge=1, le=10**15)]

Part = Literal["training", "checkpoint", "lost work", "restart", "waiting for a worker"]


class Scenario(Keys):
    """The description of a cluster, and how it is simulated (keys of `simulate`)."""

    workers: tuple[Workers, ...] = Field(
        (),
        description="Numbers of workers, such as `8,16,32`, or `8-1024` for all doublings between "
        "the two. Unset: the plan's.",
    )
    hours: Hours | None = Field(
        None, description="Hours that the cluster is there; unset: until the training has ended."
    )
    epochs: Large | None = Field(None, description="Epochs; unset: those that the plan is to take.")
    samples: Large | None = Field(
        None, description="Training images of an epoch; unset: those of the plan's data."
    )
    global_batch: Large | None = Field(
        None,
        description="Samples per step over all workers, or with a server of all local batches "
        "together; unset: each worker keeps the local batch that it has in the plan.",
    )
    speeds: tuple[RelativeSpeed, ...] = Field(
        (),
        description="Speeds of workers relative to those measured, repeated over all of them: "
        "`1,0.5` has every other one half as fast.",
    )
    speed_spread: float | None = Field(
        None,
        ge=0,
        le=1,
        description="How much speeds of workers of one kind differ: standard deviation, as a "
        "share. Unset: as measured times drift, which needs --profile; else 0.05.",
    )
    step_spread: float | None = Field(
        None,
        ge=0,
        le=2,
        description="How much steps of one worker scatter: standard deviation, as a share. Unset: "
        "as measured, which needs --profile; else 0.05.",
    )
    straggler_share: float = Field(
        0.0, ge=0, lt=1, description="Share of its time for which a worker is a straggler."
    )
    straggler_slowdown: float = Field(
        2.0, ge=1, le=1e9, description="How many times as long a straggler computes."
    )
    straggler_seconds: PositiveTime = Field(
        60.0,
        description="How long a worker stays one, mean of an exponential distribution. Where it "
        "becomes one 30 times a step or more often, the mean counts.",
    )
    rebalance_steps: Index | None = Field(
        None,
        description="Steps between two looks at the workers' speeds with `method=dynamic-batch`; "
        "0: once an epoch. Unset: the plan's. With another method shares stay.",
    )
    latency: StatedTime | None = Field(
        None,
        description="Seconds of an empty message between hosts. Unset: `link.latency` of the "
        "plan, or as measured where so many workers were, else 0.0005 (assumed).",
    )
    bandwidth: Rate | None = Field(
        None,
        description="Bytes per second between hosts, in one direction. Unset: `link.bandwidth` of "
        "the plan, or as measured where so many workers were, else 125e6 (assumed).",
    )
    exchange: Literal["ring", "tree"] = Field(
        "ring",
        description="How gradients are summed between hosts: in a `ring`, or by double binary "
        "trees (`tree`).",
    )
    workers_per_host: Count = Field(
        1,
        description="Workers of a host. With more than one, gradients are summed inside each host "
        "first, then between hosts.",
    )
    host_latency: StatedTime | None = Field(
        None,
        description="Seconds of an empty message inside a host; unset: as measured there, else as "
        "between hosts.",
    )
    host_bandwidth: Rate | None = Field(
        None,
        description="Bytes per second inside a host; unset: as measured there, else as between "
        "hosts.",
    )
    mtbf_hours: Hours | None = Field(
        None, description="Mean hours between two failures of one worker; unset: none fails."
    )
    preemptions_per_hour: NonNegative | None = Field(
        None,
        description="How often one worker is taken away in an hour. Unset: as the plan's "
        "`goal.kinds` or `goal.preemptions_per_hour` say, else never.",
    )
    notice_seconds: StatedTime = Field(
        0.0,
        description="Notice before a worker is taken away. As long as a checkpoint takes or "
        "longer: one is written, and no work is lost.",
    )
    replacement_seconds: StatedTime = Field(
        0.0,
        description="Until there is another in place of a worker that failed or was taken away, "
        "where no spare one is left. 0: it can be started again at once.",
    )
    spares: Index = Field(
        0, description="Workers beyond those that train, paid for, each ready to take a place."
    )
    checkpoint_seconds: PositiveTime | None = Field(
        None, description="Seconds of training between two checkpoints; unset: the plan's."
    )
    checkpoint_cost: StatedTime | None = Field(
        None,
        description="Seconds that a checkpoint holds up training. Unset: weights, the "
        "optimizer's state, statistics and an average, if any, at 200 MB/s (assumed).",
    )
    restart_seconds: StatedTime = Field(
        30.0,
        description="From a failure until all workers train again from the last checkpoint: "
        "noticing, starting, loading.",
    )
    price: Price | None = Field(
        None, description="Price of a worker for an hour; unset: that of the plan's goal."
    )
    steps: Annotated[int, Field(ge=10, le=1_000_000)] = Field(
        1000,
        description="Steps of each row of the plan that are simulated one by one, fewer with many "
        "thousands of workers; a longer training goes on like the second half of them.",
    )
    repeats: Annotated[int, Field(ge=1, le=10_000)] = Field(
        16, description="How often the training is simulated, each time with other random numbers."
    )
    seed: Index = Field(0, description="Of the random numbers.")

    def conflicts(self) -> Iterator[str]:
        """Error messages for keys that contradict each other."""
        if (self.latency is None) != (self.bandwidth is None):
            yield "latency and bandwidth are stated together: give both, or neither"
        if (self.host_latency is None) != (self.host_bandwidth is None):
            yield "host_latency and host_bandwidth are stated together: give both, or neither"
        if self.host_latency is not None and self.workers_per_host == 1:
            yield "host_latency and host_bandwidth need workers_per_host=2 or more"
        if twice := next((n for n in self.workers if self.workers.count(n) > 1), None):
            yield f"workers names {twice} twice"


class TimeShares(Record):
    """How a training spends its time: shares of the whole, which sum to 1."""

    computing: NonNegative = Field(description="Computing, as the mean worker does.")
    stragglers: NonNegative = Field(description="Waiting for slower workers.")
    exchange: NonNegative = Field(description="Exchanging gradients or weights.")
    evaluation: NonNegative = Field(description="Evaluating on held-out images.")
    checkpoints: NonNegative = Field(description="Waiting for checkpoints.")
    lost_work: NonNegative = Field(
        description="Training since the last checkpoint that had to be repeated."
    )
    restarts: NonNegative = Field(description="From a failure until all workers train again.")
    waiting: NonNegative = Field(
        description="Waiting for a new worker in place of one that was lost."
    )


class SimulatedCluster(Record):
    """A training on one cluster; intervals hold 95 of 100 repeats, counts are means."""

    workers: Count = Field(description="Workers that train.")
    spares: Index = Field(description="Further workers that wait to replace a lost one.")
    global_batch_size: Count = Field(
        description="Samples per step over all workers, in the first stage."
    )
    steps_per_epoch: Count = Field(description="Steps per epoch of the first stage.")
    rebalance_steps: Index | None = Field(
        description="Steps between two updates of the workers' shares; 0: an epoch; null: never."
    )
    checkpoint_seconds: Positive = Field(description="Seconds of training between two checkpoints.")
    checkpoint_cost: NonNegative = Field(
        description="Seconds that training waits for a checkpoint."
    )
    step_seconds: Estimate = Field(
        description="Seconds of a step of the first stage, mean of a repeat."
    )
    seconds: Estimate = Field(
        description="Seconds of the whole training, or as much of it as the hours allow."
    )
    cost: Estimate | None = Field(
        description="Cost of these seconds, in the price's currency; null: no price."
    )
    done: Estimate = Field(description="Share of the training that was done in these seconds.")
    failures: NonNegative = Field(description="Mean number of failures of a worker.")
    preemptions: NonNegative = Field(description="Mean number of workers taken away.")
    rebalancings: NonNegative = Field(
        description="Mean number of changes of shares in the simulated steps."
    )
    shares: TimeShares = Field(description="Mean shares of the time.")


class Span(Record):
    """A stretch of time in the first repeat."""

    part: Part = Field(description="What all workers did.")
    start: NonNegative = Field(description="Start, in seconds since training began.")
    end: NonNegative = Field(description="End, in seconds since training began.")


class WorkerSteps(Record):
    """The first steps of one worker in the first repeat."""

    worker: Index = Field(description="Rank of the worker.")
    starts: tuple[NonNegative, ...] = Field(description="Start of each step, in seconds.")
    computing: tuple[NonNegative, ...] = Field(description="Seconds of computing of each step.")
    slowest: tuple[NonNegative, ...] = Field(
        description="Seconds of computing of each step on the slowest worker."
    )
    exchange: NonNegative = Field(description="Seconds of exchange of each step.")


class Timeline(Record):
    """The course of the first repeat on one cluster."""

    workers: Count = Field(description="Workers of the cluster.")
    spans: tuple[Span, ...] = Field(
        description="Stretches of time in order; of very many only the first."
    )
    cut: bool = Field(description="Whether later stretches were left out.")
    steps: tuple[WorkerSteps, ...] = Field(
        description="First steps of the fastest, the median and the slowest worker; empty with a "
        "parameter server."
    )


class Tried(Record):
    """One combination of the values that were searched."""

    values: tuple[float, ...] = Field(description="Value of each key, in the keys' order.")
    seconds: Estimate = Field(description="Seconds of the whole training.")
    cost: Estimate | None = Field(description="Cost of the training; null without a price.")
    over_best: Estimate = Field(
        description="Seconds, or cost where there is a price, over those of the best, repeat "
        "by repeat: mean and its 95 % interval."
    )


class Search(Record):
    """Every combination of the values of some keys, compared on the same random numbers."""

    keys: tuple[str, ...] = Field(description="Searched keys of `simulate`.")
    workers: Count = Field(description="Workers of the cluster.")
    best: tuple[float, ...] = Field(
        description="Value of each key with the least cost, or without a price the least time."
    )
    level: tuple[tuple[float, ...], ...] = Field(
        description="Combinations that these repeats cannot tell from the best."
    )
    tried: tuple[Tried, ...] = Field(
        description="Combinations with which the training ends, in the given order."
    )
    endless: tuple[tuple[float, ...], ...] = Field(
        (), description="Combinations with which the training would practically never end."
    )

    @property
    def unit(self) -> str:
        """The quantity that is compared: ``cost``, or ``seconds`` without a price."""
        return "cost" if any(one.cost for one in self.tried) else "seconds"

    def along(self, key: str) -> list[tuple[float, Tried]]:
        """Results for each value of one key, with the other keys at their best values."""
        at = self.keys.index(key)
        others = self.best[:at] + self.best[at + 1 :]
        return [
            (one.values[at], one)
            for one in self.tried
            if one.values[:at] + one.values[at + 1 :] == others
        ]

    def with_the_best(self, key: str) -> str:
        """The best values of the other keys, as ``key=value`` texts."""
        return " ".join(
            f"{name}={value:g}"
            for name, value in zip(self.keys, self.best, strict=True)
            if name != key
        )


class Simulation(Document):
    """Predicted time and cost of a training on clusters that were not measured."""

    format: Literal["batchwright-simulation/2"] = "batchwright-simulation/2"
    network: str = Field(description="Name of the network, as in the plan's job.")
    data: str = Field(description="Name of the data.")
    method: str = Field(description="Name of the method, as in the plan.")
    scenario: Scenario = Field(description="Description of the clusters, as given.")
    clusters: tuple[SimulatedCluster, ...] = Field(
        description="Results for each number of workers, with the best of the searched values."
    )
    searches: tuple[Search, ...] = Field((), description="The searches, one for each cluster.")
    timeline: Timeline = Field(description="Course of the training on the first cluster.")
    notes: tuple[str, ...] = Field((), description="Assumptions, in words.")

    def _facts(self) -> list[tuple[str, str]]:
        rows = [("network", self.network), ("data", self.data), ("method", self.method)]
        for one in self.clusters:
            words = duration(one.seconds.value)
            if one.cost is not None:
                words += f", cost {number(one.cost.value)}"
            rows.append((counted(one.workers, "worker"), words))
        return rows
