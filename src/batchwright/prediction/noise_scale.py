r"""The gradient noise scale: how large a batch still averages noise rather than repeats itself.

.. math:: B_{simple} = \operatorname{tr}(\Sigma) / |G|^2

Well below it, twice the batch makes nearly twice the progress per step; well above it, twice the
batch makes the same progress with twice the samples.

McCandlish et al. 2018, arXiv 1812.06162. The estimates here hold for parts of unequal size too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


def estimate(
    weighted_sqr_norm: float, sqr_norm: float, *, parts: int, batch: int
) -> tuple[float, float]:
    r"""Unbiased estimates of tr(Sigma) and |G|^2 from the gradients of the parts of one batch.

    With mean gradients :math:`g_i` over parts of :math:`b_i` samples, :math:`\sum_i b_i = B`, and
    :math:`g = \sum_i (b_i / B) g_i`:

    .. math::
        S = \sum_i (b_i / B) |g_i|^2, \quad
        \operatorname{tr}(\Sigma) = (S - |g|^2) \frac{B}{n - 1}, \quad
        |G|^2 = \frac{n |g|^2 - S}{n - 1}

    because :math:`E|g_i|^2 = |G|^2 + \operatorname{tr}(\Sigma) / b_i` and
    :math:`\sum_i (b_i / B) / b_i = n / B`.

    Args:
        weighted_sqr_norm: :math:`S`, gradient units squared.
        sqr_norm: :math:`|g|^2`, gradient units squared.
        parts: :math:`n`, at least 2.
        batch: :math:`B`, in samples.

    Returns:
        tr(Sigma) and |G|^2, gradient units squared. Either can come out negative by chance.
    """
    if parts < 2:
        raise ValueError(f"{parts} part(s): telling noise from signal takes at least 2")
    trace = (weighted_sqr_norm - sqr_norm) * batch / (parts - 1)
    return trace, (parts * sqr_norm - weighted_sqr_norm) / (parts - 1)


@dataclass(frozen=True)
class NoiseState:
    """Running means of both estimates. They are averaged first and divided last.

    The ratio of two single estimates is biased, the ratio of two means hardly.

    Attributes:
        trace: Mean estimate of tr(Sigma), gradient units squared.
        sqr_norm: Mean estimate of |G|^2, gradient units squared.
        updates: Steps that entered.
    """

    trace: float = 0.0
    sqr_norm: float = 0.0
    updates: int = 0

    def update(
        self,
        weighted_sqr_norm: float,
        sqr_norm: float,
        *,
        parts: int,
        batch: int,
        decay: float = 1.0,
    ) -> NoiseState:
        """The state after one more step, whose norms are as in `estimate`.

        Args:
            weighted_sqr_norm: S, gradient units squared.
            sqr_norm: Squared norm of the whole batch's gradient, gradient units squared.
            parts: Parts of the batch, at least 2.
            batch: Samples in it.
            decay: Share of the old mean that stays once there are 1 / (1 - ``decay``) updates;
                before that, and with 1, all updates count the same.

        Returns:
            The new state; this one if the norms are not finite.
        """
        trace, signal = estimate(weighted_sqr_norm, sqr_norm, parts=parts, batch=batch)
        if not (isfinite(trace) and isfinite(signal)):
            return self
        updates = self.updates + 1
        share = max(1 / updates, 1 - decay)
        return NoiseState(
            self.trace + share * (trace - self.trace),
            self.sqr_norm + share * (signal - self.sqr_norm),
            updates,
        )

    @property
    def noise_scale(self) -> float | None:
        """In samples; `None` while the signal or the noise does not stand out."""
        if self.trace <= 0 or self.sqr_norm <= 0:
            return None
        return self.trace / self.sqr_norm

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NoiseState:
        """The state that `to_dict` gave."""
        return cls(**values)
