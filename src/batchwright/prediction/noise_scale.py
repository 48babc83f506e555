r"""The gradient noise scale: the batch at which the gradient's noise equals its signal.

.. math:: B_{simple} = \operatorname{tr}(\Sigma) / |G|^2

Well below it, twice the batch makes nearly twice the progress per step; well above it, twice the
batch makes the same progress with twice the samples.

McCandlish et al. 2018, arXiv 1812.06162. The estimates here hold for parts of unequal size too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Norm = TypeVar("Norm", float, "Tensor")
"""One squared norm, or a tensor of them."""


def estimate(
    weighted_sqr_norm: Norm, sqr_norm: Norm, *, parts: int, batch: int
) -> tuple[Norm, Norm]:
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
        weighted_sqr_norm: :math:`S`, gradient units squared; a number, or a tensor of one for each
            part of the network, as the equations hold for each.
        sqr_norm: :math:`|g|^2`, of the same shape, in the same units.
        parts: :math:`n`, at least 2.
        batch: :math:`B`, in samples.

    Returns:
        tr(Sigma) and |G|^2, gradient units squared. Either can come out negative by chance.

    Raises:
        ValueError: There are fewer than 2 parts.
    """
    if parts < 2:
        raise ValueError(f"parts={parts}: telling noise from signal takes at least 2")
    trace = (weighted_sqr_norm - sqr_norm) * batch / (parts - 1)
    return trace, (parts * sqr_norm - weighted_sqr_norm) / (parts - 1)


def gain(trace: float, sqr_norm: float, *, base_batch: int, batch: int) -> float:
    r"""Squared gradient norm at the base batch over that at a larger one: AdaScale's gain.

    .. math::
        r = \frac{|G|^2 + \operatorname{tr}(\Sigma) / B_0}{|G|^2 + \operatorname{tr}(\Sigma) / B}

    1 where there is no noise, :math:`B / B_0` where there is nothing else.

    Args:
        trace: :math:`\operatorname{tr}(\Sigma)`, gradient units squared; below 0 it counts as 0.
        sqr_norm: :math:`|G|^2`, gradient units squared; below 0 it counts as 0.
        base_batch: :math:`B_0`, in samples.
        batch: :math:`B`, in samples.

    Returns:
        A number from 1 to :math:`B / B_0`; 1 where the batch is not above the base batch, or both
        estimates are 0.

    Example:
        >>> gain(300.0, 1.0, base_batch=100, batch=300)
        2.0

    References:
        Johnson et al., ICML 2020, arXiv 2007.05105.
    """
    noise, signal = max(trace, 0.0), max(sqr_norm, 0.0)
    if batch <= base_batch or noise + signal == 0:
        return 1.0
    if signal == 0:
        return batch / base_batch
    share = noise / signal  # one quotient: neither overflows nor vanishes where the norms are tiny
    if not isfinite(share):
        return batch / base_batch
    found = (1 + share / base_batch) / (1 + share / batch)
    return min(max(found, 1.0), batch / base_batch)


@dataclass(frozen=True)
class NoiseState:
    """Running means of the estimates of tr(Sigma) and of the squared norm.

    The estimates are averaged first and divided last: the ratio of two single estimates is biased,
    and that of two means hardly is.
    """

    trace: float = 0.0  # mean estimate of tr(Sigma), gradient units squared
    # Mean estimate of the squared norm of the true gradient, gradient units squared.
    sqr_norm: float = 0.0
    updates: int = 0  # number of steps in the means

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
            decay: Share of the old mean that is kept once there are 1 / (1 - ``decay``) updates;
                before that, and with 1, all updates have the same weight.

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
        """Noise scale, in samples; `None` while an estimate of signal or noise is not positive."""
        if self.trace <= 0 or self.sqr_norm <= 0:
            return None
        return self.trace / self.sqr_norm

    def gain(self, *, base_batch: int, batch: int) -> float:
        """AdaScale's gain of a step of ``batch`` samples, see `gain`; 1 if not known."""
        return gain(self.trace, self.sqr_norm, base_batch=base_batch, batch=batch)
