r"""Loss scaling: losses are multiplied, so that float16 can hold small gradients.

float16 has no numbers between 0 and 6e-8, where many gradients are. So the backward pass computes
the gradients of the loss times a large :math:`S`, and they are divided by :math:`S` before they are
used. Where a gradient is infinite or not a number, the step is left out and :math:`S` halved; after
many good steps in a row :math:`S` is doubled. These are the rules and numbers of
`torch.amp.GradScaler`, which looks at the gradients of one process. Here they are looked at after
they were summed, so that all workers leave out the same steps and have the same :math:`S` without
any message. Unlike there :math:`S` is never less than 1: a forward pass that overflows does so
whatever :math:`S` is.

References:
    Micikevicius et al. 2018, Mixed precision training, arXiv 1710.03740.
"""

from __future__ import annotations

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
        scale: The factor, a power of two, so that it changes no digit of a gradient.
        good_steps: Good steps since the scale was changed.
    """

    scale: float = 1.0
    good_steps: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """The scale at the start of a training in a number format; 1 for all but float16."""
        return cls(FIRST if precision in NARROW else 1.0)

    def scaled(self, loss: Tensor, share: float) -> Tensor:
        """The loss for the backward pass: a mean loss times its share of a step and the scale."""
        if self.scale == 1:
            return loss if share == 1 else loss * share  # each operation costs the host some time
        return loss.float() * (self.scale * share)  # the product may exceed float16

    def after(self, *, good: bool) -> LossScale:
        """The scale after a step; ``good`` if its gradients were finite."""
        if not good:
            return LossScale(max(MIN_SCALE, self.scale / 2))
        if self.good_steps + 1 < AFTER_STEPS:
            return LossScale(self.scale, self.good_steps + 1)
        return LossScale(2 * self.scale)
