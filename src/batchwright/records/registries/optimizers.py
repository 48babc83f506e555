"""Optimizers: job key ``optimizer``, and what a plan trains with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batchwright.records.registries.registry import Registry


class Normal(NamedTuple):
    """A number that is known with an error."""

    mean: float
    error: float


class LearningPrior(NamedTuple):
    """What tasks have shown of how an optimizer learns (docs/log.md); logarithms are natural.

    The first three are beside those of SGD, in the law of `prediction.accuracy.learning`; its own
    are those of the task itself.

    Attributes:
        level: Level at the best rate, in logit u, beside SGD's at its own.
        slope: Logarithm of its slope against that of steps.
        critical: Logarithm of the critical batch.
        best_rate: Logarithm of the best rate over the usual one, m.
        rate_weight: Logarithm of c, how much depends on the rate.
    """

    level: Normal = Normal(0.0, 0.7)
    slope: Normal = Normal(0.0, 0.3)
    critical: Normal = Normal(0.5, 1.0)
    best_rate: Normal = Normal(0.0, 2.0)
    rate_weight: Normal = Normal(-2.0, 0.7)


UNSEEN = LearningPrior()
"""The prior of an optimizer that no task has been seen with."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer.

    Attributes:
        name: As in a job.
        build: Import string of a function: (network on its final device, job, rate) ->
            `torch.optim.Optimizer` over the parameters that are trained. A `JobError` says that
            the network has nothing for it to do.
        rate: Default learning rate at the base batch, per step.
        title: In sentences; unset: its name.
        unnormalized_rate: Default rate for networks without batch normalization; unset: `rate`.
        reach: Least sum of the rates of a training, if its rate is left open and the network has
            batch normalization; 0: any.
        follows_gradients: Whether its steps are as long as gradients are, so that factors on them
            act as factors on the rate.
        on_factors: What to say to who scales gradients all the same, a sentence.
        own_loop: How a loop of one's own makes it, where a plan for it fits no other optimizer,
            nor the plan for another fits it.
        learning: What tasks have shown of how it learns.
    """

    name: str
    build: str
    rate: float
    title: str = ""
    unnormalized_rate: float | None = None
    reach: float = 0.0
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
    on_factors="AdamW divides each gradient by its own recent size, so a factor that changes "
    "slowly nearly cancels: expect little.",
)
MUON = OptimizerSpec(
    "muon",
    "batchwright.workload.muon:for_job",
    rate=0.1,
    title="Muon",
    # Steps as long as they are at 0.1, whatever the gradient, are undone by batch normalization
    # where it is; elsewhere outputs grow with the weights, layer on layer, until nothing is learnt:
    # `vgg8` from some 0.1 per step on (docs/log.md).
    unnormalized_rate=0.02,
    # A step at rate r moves a matrix by some r in spectral norm whatever its gradient, and matrices
    # begin 1 to 3 long: below a sum of 3 accuracy falls steeply, above it hardly, until single
    # rates come to 1 (docs/log.md).
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
"""What `optimizer=auto` comes to, for small batches and for large ones; probes measure with SGD."""
