r"""Loss scaling: losses are multiplied, so that float16 can hold small gradients.

float16 knows nothing between 0 and 6e-8, where many gradients are. So they are those of the loss
times a large :math:`S`, and are divided by :math:`S` before anything is made of them. Where one is
infinite or not a number, the step is left out and :math:`S` halved; after many good steps in a row
it is doubled. These are the rules and numbers of `torch.amp.GradScaler`, which looks at the
gradients of one process: ours are looked at after they were summed, so that all workers see the
same ones, leave out the same step and have the same :math:`S`, and nobody has to be told. Unlike
there :math:`S` is never less than 1: a forward pass that overflows does so whatever :math:`S` is.

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
"""Good steps in a row, after which the scale is doubled."""


@dataclass(frozen=True)
class LossScale:
    """What losses are multiplied by.

    Attributes:
        scale: A power of two, so that it changes no digit of a gradient.
        good_steps: Since it was changed.
    """

    scale: float = 1.0
    good_steps: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """Where a training in this number format begins; 1 for all but float16."""
        return cls(FIRST if precision in NARROW else 1.0)

    def scaled(self, loss: Tensor, share: float) -> Tensor:
        """A mean loss times its share of a step, for the backward pass."""
        if self.scale == 1:
            return loss if share == 1 else loss * share  # each operation takes a host some time
        return loss.float() * (self.scale * share)  # more than float16 itself may hold

    def after(self, *, good: bool) -> LossScale:
        """After a step whose gradients were finite, or not."""
        if not good:
            return LossScale(max(MIN_SCALE, self.scale / 2))
        if self.good_steps + 1 < AFTER_STEPS:
            return LossScale(self.scale, self.good_steps + 1)
        return LossScale(2 * self.scale)
