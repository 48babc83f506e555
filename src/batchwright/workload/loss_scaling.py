r"""Loss scaling: losses are multiplied, so that float16 can hold small gradients.

float16 has no numbers between 0 and 6e-8, where many gradients are. So the backward pass computes
the gradients of the loss times a large :math:`S`, and they are divided by :math:`S` before they are
used. Where a gradient is infinite or not a number, the step is left out and :math:`S` halved; after
many good steps in a row :math:`S` is doubled. These are the rules and numbers of
`torch.amp.GradScaler`, which looks at the gradients of one process. Here they are looked at after
they were summed, so that all workers leave out the same steps and have the same :math:`S` without
any message. Unlike there :math:`S` is never less than 1: a forward pass that overflows does so
whatever :math:`S` is.

Where losses are means over more than samples (labelled pixels), gradients also have their number
for each sample as a factor. :math:`S` is divided by that of the step before, which all workers
know, rounded up to a power of two.

References:
    Micikevicius et al. 2018, Mixed precision training, arXiv 1710.03740.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from batchwright.records import Precision
from batchwright.workload.host import NARROW

FIRST = 2.0**16
MIN_SCALE = 1.0
AFTER_STEPS = 2000
"""Good steps in a row after which the scale is doubled."""


@dataclass(frozen=True)
class LossScale:
    """The factor on losses.

    Attributes:
        scale: Factor on a mean over samples, a power of two: so it changes no digit of a gradient.
        good_steps: Good steps since the scale was changed.
        weight: What losses were means over in the step before, for each sample: 1, or a power of
            two from there on.
    """

    scale: float = 1.0
    good_steps: int = 0
    weight: float = 1.0

    @property
    def factor(self) -> float:
        """The factor on losses, each weighted by what it is a mean over."""
        return self.scale / self.weight

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """The scale at the start of a training in a number format; 1 for all but float16."""
        return cls(FIRST if precision in NARROW else 1.0)

    def scaled(self, loss: Tensor, share: float) -> Tensor:
        """The loss for the backward pass: a mean loss times its share of a step and the scale."""
        if self.scale == self.weight == 1:
            return loss if share == 1 else loss * share  # each operation costs the host some time
        return loss.float() * (self.factor * share)  # the product may exceed float16

    def after(self, *, good: bool, weight: float = 1.0) -> LossScale:
        """The scale after a step.

        Args:
            good: Whether its gradients were finite.
            weight: What its losses were means over, for each of its samples.
        """
        power = 2.0 ** math.ceil(math.log2(max(1.0, weight)))
        if not good:
            return LossScale(max(MIN_SCALE, self.scale / 2), 0, power)
        if self.good_steps + 1 < AFTER_STEPS:
            return LossScale(self.scale, self.good_steps + 1, power)
        return LossScale(2 * self.scale, 0, power)
