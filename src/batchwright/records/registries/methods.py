"""Methods: job key ``method``, how batch and resolution are used over a training."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry

PAPER = "Lu et al. 2025, arXiv 2509.26092"


_OF_ALL = ("cycle.recalibrate",)
"""Job keys in a method's section that all methods use."""


@dataclass(frozen=True)
class MethodSpec:
    """A method, by its differences from `plain`. Functions are named by import strings.

    Attributes:
        name: Name, as in a job.
        words: Description for the job key.
        short: Description of about three words, for a form.
        plan: Import string of a function that lays out the stages of a plan: (job, times, reasons
            of the optimizer) -> `planning.methods.layout.Layout`, where ``times`` is a model of
            `planning.methods.time_models`. Empty: one stage, with the steps of `plain`.
        balancer: Import string of a class like `algorithms.balancer.Balancer`, which changes the
            workers' shares during training. Empty: shares stay as planned.
        cycles: Whether training goes through the job's resolutions and rate stages.
        served: Whether workers take steps of their own and exchange models with a parameter server.
        keys: Job keys that this method uses and most others do not; a section stands for all its
            keys.
        idle: Keys among these that this method does not use.
        why: Why to use it, for a plan's reason.
        reference: Publication, if there is one.
        reason: Import string of a function (job) -> text, which replaces ``why``.
        saves: Import string of a function (plan, runs) -> seconds of training that the method saves
            and the plan's times do not show.
        told: From what its accuracy is known before anything ran, in words.
        apart: Held-out accuracy minus that of `plain` with the same optimizer, in points, with the
            ends of its 95 % interval, from other tasks; `None`: unknown.
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
        """Whether its steps are those of `plain`; workers' shares may differ."""
        return not self.plan

    def takes(self, key: str) -> bool:
        """Whether this method uses a job key that is not for all methods."""
        section = key.partition(".")[0]
        return key not in (*self.idle, *_OF_ALL) and bool({key, section} & {*self.keys})


_METHODS = "batchwright.planning.methods"

PLAIN = MethodSpec(
    "plain",
    "one batch and resolution throughout",
    "one batch",
    keys=("batch_growth",),
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
        keys=(
            *("batch_growth", "rebalance", "rebalance_steps"),
            *("least_local_batch", "most_local_batch"),
        ),
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
        plan=f"{_METHODS}.dual_batch:lay_out",
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
