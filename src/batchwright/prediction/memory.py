r"""Peak bytes of a training step against the samples that go through the network at once.

.. math:: M(b) = M_0 + \alpha b

:math:`M_0`: weights, gradients, optimizer state; :math:`\alpha`: activations and input of one
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.prediction.fit import Line, fit_line
from batchwright.records import Estimate, MemoryPoint


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes at one resolution.

    Attributes:
        line: Bytes against samples in one forward pass.
    """

    line: Line

    def predict(self, micro_batch_size: int) -> Estimate:
        """Peak bytes with ``micro_batch_size`` samples at once, with a 95 % interval."""
        return self.line.predict(micro_batch_size)

    def fits(self, micro_batch_size: int, limit: int) -> bool:
        """Whether even the upper end of the interval stays within ``limit`` bytes."""
        return self.predict(micro_batch_size).high <= limit

    def largest_batch(self, limit: int, most: int) -> int:
        """Largest micro-batch up to ``most`` that fits ``limit`` bytes; 0 if none does."""
        fitting, failing = 0, most + 1
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if self.fits(middle, limit):
                fitting = middle
            else:
                failing = middle
        return fitting


def fit_memory(points: Sequence[MemoryPoint]) -> MemoryModel:
    """Model of points at one resolution, at least one."""
    batches = [point.local_batch_size for point in points]
    return MemoryModel(fit_line(batches, [point.peak_bytes for point in points]))
