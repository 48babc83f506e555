r"""Adaptive gradient scaling: each tensor's gradient as large as the base batch would make it.

A mean over more samples is shorter, because it holds less noise:
:math:`E|g|^2 = |G|^2 + \operatorname{tr}(\Sigma) / B`. So each tensor's gradient is multiplied by

.. math:: r_p^2 = \frac{|G_p|^2 + tr_p / B_0}{|G_p|^2 + tr_p / B}

(``gain``) or its root (``norm``), within bounds: together with what the rate was raised by for the
batch, no tensor steps further than linear scaling has it, unless asked. Both numbers come from the
norms of the gradients of a step's parts, each micro-batch of each worker being one, and from steps
before only: a factor that knew the gradient it multiplies would bend its direction.

This has nothing to do with `torch.amp.GradScaler`, which scales losses so that fp16 can hold them.

What it does to the rest of a step:

- **Momentum** gathers scaled gradients. Factors change over `lookback` steps, slower than it does.
- **Weight decay** is the optimizer's, after the scaling: it stays as it is.
- **Batch normalization, biases**: their tensors have factors of their own like all others. The
  factor compares a gradient with itself over another batch and never with the weight, so nothing is
  wrong with it where a weight is small or 0, unlike the ratios of LARS.
- **Clipping** comes after: `clip_norm` is a length that suits gradients of the base batch, and
  those are what the scaled ones are as long as.
- **Adam** and its kin divide by the gradient's own recent size, so a constant factor cancels; only
  what changes within their memory, and the balance against clipping, is left. Of Muon's matrices
  it cancels altogether.

The form is ours, after Johnson et al., ICML 2020 (arXiv 2007.05105), whose gain it is for the whole
network; per-tensor factors between gradient norms of two batches are the idea of Tyagi's Tula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from batchwright.algorithms.learning_rate import room_to_linear
from batchwright.distributed.tally import Tally
from batchwright.prediction.noise_scale import NoiseState, estimate
from batchwright.records import AgsRule, Plan

NOISE_DECAY = 0.98  # the noise scale looks back about 50 steps


@dataclass(frozen=True, eq=False)
class TensorNoise:
    """Running means of `estimate` for each tensor, averaged first and divided last.

    Attributes:
        trace: Means of tr(Sigma), gradient units squared: float64 (parameters,), on the CPU.
        sqr_norm: Means of |G|^2, gradient units squared: float64 (parameters,), on the CPU.
        updates: Number of steps that the means are over.
    """

    trace: Tensor
    sqr_norm: Tensor
    updates: int = 0

    @classmethod
    def of(cls, parameters: int) -> TensorNoise:
        """The state of so many tensors before the first step."""
        return cls(*torch.zeros(2, parameters, dtype=torch.float64))

    def update(
        self,
        weighted_sqr_norms: Tensor,
        sqr_norms: Tensor,
        *,
        parts: int,
        batch: int,
        lookback: int,
    ) -> TensorNoise:
        """The state after one more step.

        Args:
            weighted_sqr_norms: S of each tensor, gradient units squared: (parameters,).
            sqr_norms: Squared norms of the whole batch's gradient: (parameters,).
            parts: Parts of the batch, at least 2.
            batch: Samples in it.
            lookback: Steps after which the past counts for 1 / e; as many first ones count alike.

        Returns:
            The new state; this one if any norm is not finite.
        """
        trace, signal = estimate(
            weighted_sqr_norms.double(), sqr_norms.double(), parts=parts, batch=batch
        )
        if not math.isfinite(float((trace + signal).sum())):
            return self
        updates = self.updates + 1
        share = 1 / min(updates, lookback)
        return TensorNoise(
            torch.lerp(self.trace, trace, share),
            torch.lerp(self.sqr_norm, signal, share),
            updates,
        )


def factors(state: TensorNoise, rule: AgsRule, batch: int, room: float = math.inf) -> Tensor:
    r"""Factors on the tensors' gradients.

    .. math:: s_p = \operatorname{clip}(r_p^2 \text{ or } r_p, least, most)

    with :math:`r_p` as at the head of this module. Where an estimate is negative, by chance, it
    counts as 0; where nothing is known, or a tensor has no gradient, the factor is 1.

    Args:
        state: Means over the steps before.
        rule: ``most`` unset: the batch over the base batch, for ``norm`` its root, which is what
            noise without signal gives, or less if there is less ``room``.
        batch: Samples of the step, :math:`B`.
        room: Largest factor within linear scaling; see `algorithms.learning_rate.room_to_linear`.

    Returns:
        Factors: float64 (parameters,), within the bounds, of which ``least`` wins if they cross.
    """
    trace, signal = state.trace.clamp(min=0), state.sqr_norm.clamp(min=0)
    noise = trace / signal  # one quotient: neither overflows nor vanishes where norms are tiny
    ratio = (1 + noise / rule.base_batch) / (1 + noise / batch)
    limit = batch / rule.base_batch
    ratio = torch.where(noise.isinf(), limit, ratio)
    ratio = torch.where(noise.isnan(), 1.0, ratio)  # 0 / 0
    if rule.mode == "norm":
        ratio, limit = ratio.sqrt(), limit**0.5
    most = min(limit, room) if rule.most is None else rule.most
    return ratio.clamp(max=most).clamp(min=rule.least)


def multiply(gradients: Sequence[Tensor | None], by: Sequence[float]) -> None:
    """Multiply each gradient by its number, in place; 1 leaves it untouched.

    Args:
        gradients: Gradient of each tensor; ``None`` where it has none.
        by: Factor of each tensor.
    """
    scaled = [(g, s) for g, s in zip(gradients, by, strict=True) if g is not None and s != 1]
    if scaled:
        torch._foreach_mul_([g for g, _ in scaled], [s for _, s in scaled])


class Adaptation(NamedTuple):
    """Factors on a step's rate and gradients, measured in the steps before."""

    gain: float = 1.0
    """Factor on the learning rate."""
    factors: Tensor | None = None
    """Factors on the gradients of the trained tensors: float64 (parameters,); ``None``: none."""


class NoiseSeen(Protocol):
    """Where gradient noise is kept: of the whole network, and of each tensor."""

    noise: NoiseState
    tensors: TensorNoise | None


class Adaptive:
    """Learns from the norms of each step's parts, and adapts later steps as the plan says.

    Args:
        plan: Its rules for rate and gradients are followed.
        known: Keeps the noise measured so far.
        own_rates: Whether the optimizer's rates are left alone.

    Attributes:
        gaining: Whether the rate is multiplied by the measured gain.
    """

    def __init__(self, plan: Plan, known: NoiseSeen, *, own_rates: bool = False) -> None:
        self._known, self._rule, self._rate = known, plan.ags, plan.learning_rate
        self.gaining = self._rate.scaling == "gain" and not own_rates

    def of_step(self, batch: int) -> Adaptation:
        """Factors for a step of ``batch`` samples."""
        gain, scales = 1.0, None
        if self.gaining:
            gain = self._known.noise.gain(base_batch=self._rate.base_batch, batch=batch)
        if self._rule is not None and self._known.tensors is not None:
            left = room_to_linear(self._rate, self._rule.base_batch, batch, gain)
            scales = factors(self._known.tensors, self._rule, batch, left)
        return Adaptation(gain, scales)

    def learn(self, tally: Tally, sqr_norms: Tensor, *, batch: int) -> None:
        """Measure noise in a step that has several parts whose losses are means over samples.

        Args:
            tally: Figures of the step, with the norms of its parts.
            sqr_norms: Squared norms of the summed gradient of each trained tensor: (parameters,).
            batch: Samples of the step.
        """
        if tally.local_sqr_norms is None or tally.weight != batch or tally.parts < 2:
            return
        known, weighted = self._known, tally.local_sqr_norms.cpu()
        known.noise = known.noise.update(
            float(weighted.sum()),
            float(sqr_norms.sum()),
            parts=tally.parts,
            batch=batch,
            decay=NOISE_DECAY,
        )
        if self._rule is None:
            return
        before = known.tensors or TensorNoise.of(len(sqr_norms))
        known.tensors = before.update(
            weighted,
            sqr_norms.cpu(),
            parts=tally.parts,
            batch=batch,
            lookback=self._rule.lookback,
        )
