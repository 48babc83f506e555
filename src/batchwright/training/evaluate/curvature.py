r"""How steep and how curved the loss is: gradient norm and largest eigenvalue of the Hessian.

Both are of the mean loss over one batch of training samples, the same at each evaluation, at the
weights of that moment. The eigenvalue is by power iteration on Hessian-vector products,
:math:`H v = \nabla (v \cdot \nabla L)`, so nothing of the Hessian's size is ever kept:

.. math:: v \leftarrow H v / \lvert H v \rvert, \quad \lambda = v \cdot H v

That ends at the eigenvalue of largest magnitude. Where it is negative, :math:`H - \lambda I`, whose
eigenvalues are none below 0, is iterated in turn.

Tyagi and Wang 2026, arXiv 2603.18112, figure 5, draw both over a training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from batchwright.errors import TrainingError
from batchwright.training.batches.feeding import like_mapping, like_sequence
from batchwright.workload.host import gpu_failure, is_out_of_memory, release_memory

MAX_SAMPLES = 128
"""Most samples of the batch; second derivatives keep several times a training step's memory."""

MAX_ITERATIONS = 100
ENOUGH = 1e-3
"""Relative change of the eigenvalue between two iterations at which they end."""


def tracked(
    wanted: Sequence[str],
    model: nn.Module,
    loss_of: Callable[[Any], Tensor],
    batch_of: Callable[[int], Any],
    samples: int,
) -> dict[str, float]:
    """Gradient norm and the Hessian's largest eigenvalue, as far as wanted and finite.

    Where memory runs out, half as many samples are taken.

    Args:
        wanted: ``gradient-norm``, ``hessian`` or both.
        model: The model, in evaluation mode.
        loss_of: f(batch) -> mean loss, a scalar that can be differentiated.
        batch_of: f(samples) -> a batch of so many.
        samples: Samples of the batch; `MAX_SAMPLES` are taken at most.

    Returns:
        The figures, named ``track/gradient_norm`` and ``track/hessian``.

    Raises:
        TrainingError: The network has no second derivative.
    """
    count = min(samples, MAX_SAMPLES)
    while True:
        try:
            found = _at_once(wanted, model, loss_of, batch_of(count))
            return {name: value for name, value in found.items() if math.isfinite(value)}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if count < 2:
            warnings.warn("track: not even one sample fits the memory", stacklevel=4)
            return {}
        count //= 2
        release_memory(next(model.parameters()).device)  # the error is gone, and what it held


def _at_once(
    wanted: Sequence[str], model: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any
) -> dict[str, float]:
    parameters = [one for one in model.parameters() if one.requires_grad]
    second = "hessian" in wanted
    with torch.enable_grad():
        loss = loss_of(_as(parameters[0].dtype, batch))
        gradient = _derivatives(loss, parameters, keep=second)
        found = {}
        if "gradient-norm" in wanted:
            found["track/gradient_norm"] = float(_norm([one.detach() for one in gradient]))
        if second:
            found["track/hessian"] = largest_eigenvalue(gradient, parameters)
    return found


def largest_eigenvalue(gradient: Sequence[Tensor], parameters: Sequence[Tensor]) -> float:
    """The largest eigenvalue of the Hessian, the derivative of a gradient that has a graph.

    Args:
        gradient: Gradient of the loss by each parameter, made with ``create_graph``.
        parameters: The parameters.

    Raises:
        TrainingError: The network has no second derivative.
    """

    def times(vector: Sequence[Tensor]) -> list[Tensor]:
        inner = sum((g * v).sum() for g, v in zip(gradient, vector, strict=True))
        try:
            return _derivatives(cast("Tensor", inner), parameters, keep=True, graph=False)
        except RuntimeError as error:
            if is_out_of_memory(error) or gpu_failure(error):
                raise
            raise TrainingError(
                f"track=hessian: the network has no second derivative ({str(error).splitlines()[0]}"
                "): leave hessian out"
            ) from None

    value = _iterated(times, parameters, 0.0)
    return value if value >= 0 else _iterated(times, parameters, value)


def _iterated(
    times: Callable[[Sequence[Tensor]], list[Tensor]], parameters: Sequence[Tensor], shift: float
) -> float:
    """The eigenvalue of H farthest from ``shift``, by power iteration on H - shift I."""
    generator = torch.Generator().manual_seed(0)
    vector = [
        torch.randn(one.shape, generator=generator, dtype=one.dtype).to(one.device)
        for one in parameters
    ]
    value = math.inf
    for _ in range(MAX_ITERATIONS):
        norm = _norm(vector)
        if not norm > 0 or not math.isfinite(norm):
            return shift if norm == 0 else math.nan
        vector = [one / norm for one in vector]
        image = [h - shift * v for h, v in zip(times(vector), vector, strict=True)]
        before, value = value, float(sum((v * h).sum() for v, h in zip(vector, image, strict=True)))
        vector = image
        if abs(value - before) <= ENOUGH * abs(value + shift):
            break
    return value + shift


def _derivatives(
    value: Tensor, parameters: Sequence[Tensor], *, keep: bool, graph: bool | None = None
) -> list[Tensor]:
    """Derivatives of a value by each parameter; zeros where it does not depend on one."""
    return list(
        torch.autograd.grad(
            value,
            list(parameters),
            retain_graph=keep,
            create_graph=keep if graph is None else graph,
            allow_unused=True,
            materialize_grads=True,
        )
    )


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in parts))


def _as(dtype: torch.dtype, batch: Any) -> Any:
    """A batch whose floating-point tensors are in another number format."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return like_mapping(batch, {key: _as(dtype, value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return like_sequence(batch, [_as(dtype, value) for value in batch])
    return batch
