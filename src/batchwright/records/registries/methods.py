"""Methods: job key ``method``, how batch and resolution are used over a training."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry

PAPER = "Lu et al. 2025, arXiv 2509.26092"


@dataclass(frozen=True)
class MethodSpec:
    """A method: what it does otherwise than `plain`. What it names is imported where it is called.

    Attributes:
        name: As in a job.
        words: What it does, for the job key's description.
        short: The same in three words, for a form.
        plan: Import string of what lays out the rows of its plan, a function (job, times, reasons
            of the optimizer) -> `planning.methods.layout.Layout`; the times are one of
            `planning.methods.time_models`. Unset: one row, with the steps of `plain`.
        balancer: Import string of what makes the workers' shares of a step again while it trains, a
            class as `algorithms.balancer.Balancer`. Unset: they stay as planned.
        cycles: Whether it goes through the job's resolutions and stages of the rate.
        served: Whether workers step for themselves and meet at a parameter server.
        keys: Job keys that do something with few methods, this one among them; parts of the job
            stand for all their keys.
        idle: Those of these that do nothing with it.
        why: Why to take it, for a plan's reason.
        reference: Who published it, if anybody.
        reason: Import string of what says that for a job instead, a function (job) -> text.
        saves: Import string of what it saves beside its plan's time, a function (plan, runs) ->
            seconds of the training.
        told: What tells how much it learns, before anything ran, in words.
        apart: Held-out accuracy less that of `plain` with the same optimizer, in points, with its
            95 % interval, where other tasks showed it; `None`: they did not.
    """

    name: str
    words: str
    short: str
    plan: str = ""
    balancer: str = ""
    cycles: bool = False
    served: bool = False
    keys: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    why: str = ""
    reference: str = ""
    reason: str = ""
    saves: str = ""
    told: str = "only runs with it tell, and none was given"
    apart: tuple[float, float, float] | None = None

    @property
    def same_steps(self) -> bool:
        """Whether it takes the steps of `plain`, however samples are shared."""
        return not self.plan

    def takes(self, key: str) -> bool:
        """Whether a job key that is not for all methods does something with this one."""
        return key not in self.idle and bool({key, key.partition(".")[0]} & {*self.keys})


_METHODS = "batchwright.planning.methods"

PLAIN = MethodSpec(
    "plain",
    "one batch and resolution throughout",
    "one batch",
    told="the others are compared with it",
)
METHODS = Registry(
    "method",
    PLAIN,
    MethodSpec(
        "dynamic-batch",
        "each worker's share follows its measured speed, the global batch stays",
        "shares follow speed",
        balancer="batchwright.algorithms.balancer:balancer_of",
        keys=("rebalance", "rebalance_steps", "least_local_batch", "most_local_batch"),
        reference="Ye et al. 2020, arXiv 2007.11831",
        reason=f"{_METHODS}.dynamic_batch:reason",
        saves=f"{_METHODS}.dynamic_batch:saved_by_shares",
        told="it takes the same steps, however samples are shared",
    ),
    MethodSpec(
        "dual-batch",
        "two local batch sizes at once, through a parameter server",
        "two batch sizes",
        plan=f"{_METHODS}.dual_batch:lay_out",
        served=True,
        keys=("dual", "server"),
        why="Two local batch sizes at once, merged by a parameter server, so that most workers "
        "train with a small batch for little more time.",
        reference=PAPER,
    ),
    MethodSpec(
        "cyclic",
        "resolutions low to high in each stage of the learning rate",
        "resolutions in turn",
        plan=f"{_METHODS}.cyclic:lay_out",
        cycles=True,
        keys=("cycle",),
        why="Resolutions go low to high in each stage of the learning rate, with one network and "
        "optimizer throughout.",
        reference=PAPER,
        told="as short trainings of three other tasks showed",
        # docs/log.md (cheaper), five pairs; the interval is that of one more, by Student's t.
        apart=(-2.2, -6.9, 2.5),
    ),
    MethodSpec(
        "hybrid",
        "both",
        "both",
        plan=f"{_METHODS}.hybrid:lay_out",
        cycles=True,
        served=True,
        keys=("dual", "server", "cycle"),
        idle=("cycle.batches",),
        why="Two local batch sizes at each resolution, merged by a parameter server, while "
        "resolutions go low to high in each stage of the learning rate.",
        reference=PAPER,
    ),
    group="batchwright.methods",
    auto=MethodSpec(
        "auto",
        "the plan takes the one with the least predicted time of those that are known to learn as "
        "much as `plain`",
        "quickest that learns as much",
    ),
)
