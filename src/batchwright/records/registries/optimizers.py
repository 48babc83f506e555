"""Optimizers: the values of job key ``optimizer``, and of a plan's ``update``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batchwright.records.registries.registry import Registry


class Normal(NamedTuple):
    """A normal distribution, by its mean and standard deviation."""

    mean: float
    error: float


class LearningPrior(NamedTuple):
    """Prior of an optimizer's parameters in the curve of `prediction.accuracy.learning`.

    It comes from other tasks (`benchmarks.tools.learning_prior`). Logarithms are natural. Level,
    slope and critical batch are relative to those of SGD on the same task.

    Attributes:
        level: Level at the best rate minus SGD's at its best rate, in logit u.
        slope: Logarithm of the slope over the steps, relative to SGD's.
        critical: Logarithm of the critical batch, relative to SGD's.
        best_rate: Logarithm of the best rate over the usual one, m.
        rate_weight: Logarithm of c, the strength of the rate's influence.
    """

    level: Normal = Normal(0.0, 0.7)
    slope: Normal = Normal(0.0, 0.3)
    critical: Normal = Normal(0.5, 1.0)
    best_rate: Normal = Normal(0.0, 2.0)
    rate_weight: Normal = Normal(-2.0, 0.7)


UNSEEN = LearningPrior()
"""The prior of an optimizer without data of other tasks."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer.

    Attributes:
        name: Name, as in a job.
        build: Import string of a function (network on its final device, job, rate) ->
            `torch.optim.Optimizer` over the trained parameters. It raises a `JobError` if the
            network has no parameters for it.
        rate: Default learning rate at the base batch, per step.
        title: Name in sentences; empty: `name`.
        unnormalized_rate: Default rate for networks without batch normalization; unset: `rate`.
        reach: Least sum of the rates over a training whose rate is `auto`, for networks with batch
            normalization; 0: any.
        kept: Numbers that it keeps for each trained weight, which a checkpoint holds, too.
        follows_gradients: Whether steps are proportional to gradients, so that factors on gradients
            act as factors on the rate.
        on_factors: Warning for jobs that scale gradients all the same, a sentence.
        own_loop: Python code that makes the optimizer in a loop of one's own, where its plans suit
            no other optimizer, and plans for others do not suit it; empty: any optimizer may do.
        learning: Prior of its learning.
    """

    name: str
    build: str
    rate: float
    title: str = ""
    unnormalized_rate: float | None = None
    reach: float = 0.0
    kept: int = 1
    follows_gradients: bool = False
    on_factors: str = ""
    own_loop: str = ""
    learning: LearningPrior = UNSEEN


SGD = OptimizerSpec(
    "sgd",
    "batchwright.workload.optimizers:sgd",
    rate=0.1,
    title="SGD",
    follows_gradients=True,
    learning=LearningPrior(best_rate=Normal(0.0, 2.2), rate_weight=Normal(-2.3, 0.7)),
)
ADAMW = OptimizerSpec(
    "adamw",
    "batchwright.workload.optimizers:adamw",
    rate=0.001,
    title="AdamW",
    kept=2,
    on_factors="AdamW divides each gradient by its own recent size, so a factor that changes "
    "slowly nearly cancels: expect little.",
)
MUON = OptimizerSpec(
    "muon",
    "batchwright.workload.muon:for_job",
    rate=0.1,
    title="Muon",
    # At 0.1 steps are long whatever the gradient. Batch normalization undoes the growth of the
    # weights; without it outputs grow from layer to layer until nothing is learnt: with `vgg8` from
    # about 0.1 per step on (docs/log.md).
    unnormalized_rate=0.02,
    # A step at rate r moves a matrix by about r in spectral norm whatever its gradient, and initial
    # matrices have a norm of 1 to 3: accuracy falls steeply for sums of rates below 3, and hardly
    # for larger ones, until single rates reach 1 (docs/log.md).
    reach=4.0,
    on_factors="Muon makes the updates of its matrices equally large whatever their gradients' "
    "size, so factors act on what is left to SGD only.",
    own_loop="bw.muon(model, lr=...)",
    learning=LearningPrior(
        level=Normal(0.9, 0.5),
        slope=Normal(-0.16, 0.25),
        critical=Normal(1.45, 1.0),
        best_rate=Normal(0.0, 1.1),
        rate_weight=Normal(-1.7, 0.7),
    ),
)

OPTIMIZERS = Registry("optimizer", SGD, ADAMW, MUON, group="batchwright.optimizers", auto=SGD)
AUTO = (SGD.name, MUON.name)
"""The optimizers that `optimizer=auto` chooses from; probes measure with the first."""
