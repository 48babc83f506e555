"""Methods: job key ``method``, how batch and resolution are used over a training."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry


@dataclass(frozen=True)
class MethodSpec:
    """A method; what it does otherwise than `plain` is in its traits, which combine.

    Attributes:
        name: As in a job.
        words: What it does, for the job key's description.
        short: The same in three words, for a form.
        cycles: Whether it goes through resolutions and stages of the rate.
        served: Whether two batch sizes train at once, through a parameter server.
        follows_speed: Whether each worker's share of the batch follows its measured speed.
        keys: Job keys that do something with few methods, this one among them; parts of the job
            stand for all their keys.
        idle: Those of these that do nothing with it.
        why: Why to take it, for a plan's reason.
        told: What tells how much it learns, before anything ran, in words.
        apart: Held-out accuracy less that of `plain` with the same optimizer, in points, with its
            95 % interval, where other tasks showed it; `None`: they did not.
    """

    name: str
    words: str
    short: str
    cycles: bool = False
    served: bool = False
    follows_speed: bool = False
    keys: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    why: str = ""
    told: str = "only runs with it tell, and none was given"
    apart: tuple[float, float, float] | None = None

    @property
    def same_steps(self) -> bool:
        """Whether it takes the steps of `plain`, however samples are shared."""
        return not (self.cycles or self.served)

    def takes(self, key: str) -> bool:
        """Whether a job key that is not for all methods does something with this one."""
        return key not in self.idle and bool({key, key.partition(".")[0]} & {*self.keys})


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
        follows_speed=True,
        keys=("rebalance", "rebalance_steps", "least_local_batch", "most_local_batch"),
        told="it takes the same steps, however samples are shared",
    ),
    MethodSpec(
        "dual-batch",
        "two local batch sizes at once, through a parameter server",
        "two batch sizes",
        served=True,
        keys=("dual", "server"),
        why="Two local batch sizes at once, merged by a parameter server, so that most workers "
        "train with a small batch for little more time.",
    ),
    MethodSpec(
        "cyclic",
        "resolutions low to high in each stage of the learning rate",
        "resolutions in turn",
        cycles=True,
        keys=("cycle",),
        why="Resolutions go low to high in each stage of the learning rate, with one network and "
        "optimizer throughout.",
        told="as short trainings of three other tasks showed",
        # benchmarks/cheaper.py, five pairs; the interval is that of one more, by Student's t.
        apart=(-2.2, -6.9, 2.5),
    ),
    MethodSpec(
        "hybrid",
        "both",
        "both",
        cycles=True,
        served=True,
        keys=("dual", "server", "cycle"),
        idle=("cycle.batches",),
        why="Two local batch sizes at each resolution, merged by a parameter server, while "
        "resolutions go low to high in each stage of the learning rate.",
    ),
    auto=MethodSpec(
        "auto",
        "the plan takes the one with the least predicted time of those that are known to learn as "
        "much as `plain`",
        "quickest that learns as much",
    ),
)
