"""Held-out evaluation: sharded over the workers, reduced as (sum, count), nothing padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchwright.errors import DataError
from batchwright.group import Group
from batchwright.planning.partition import apportion
from batchwright.training.feeding import Feed
from batchwright.training.sampler import Step
from batchwright.training.signals import StopRequest

Metric = Callable[[Any, Any], Tensor | dict[str, Tensor]]
Forward = Callable[[nn.Module, Any], tuple[Any, Any]]


def outputs_and_labels(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """The usual forward pass of an (images, labels) batch."""
    images, labels = batch
    return model(images), labels


def evaluate(
    model: nn.Module,
    feed: Feed,
    metric: Metric,
    *,
    group: Group,
    stop: StopRequest,
    batch_size: int,
    resolution: int | None,
    forward: Forward,
    autocast: Callable[[], AbstractContextManager[Any]],
    shares: Sequence[int],
) -> tuple[dict[str, float], int, int]:
    """Sums of a metric over a data set, each sample counted once.

    Every worker takes a stretch of samples, as long as its share in training. Modules are put into
    evaluation mode and back; batch normalization uses the workers' merged statistics meanwhile.

    Returns:
        Sum of each value over the samples, number of samples, and number of workers that were asked
        to stop (then the sums are partial and to be thrown away).

    Raises:
        DataError: There are no samples.
        ValueError: The metric gave something else than one value for each sample.
    """
    if not len(feed):
        raise DataError("session.evaluate() got an empty data set: there is nothing to evaluate")
    first, last = Step(0, tuple(apportion(shares, len(feed)))).span(group.rank)
    indices = torch.arange(first, last)
    share = shares[group.rank] / sum(shares)
    totals: dict[str, float] = {}
    count = 0
    with evaluation_mode(model), merged_batch_norm(model, group, share), torch.inference_mode():
        batches = [part for part in indices.split(batch_size) if len(part)]
        for batch_indices, batch in zip(batches, feed.evaluation(batches, resolution), strict=True):
            if stop.number:
                break
            with autocast():
                values = metric(*forward(model, batch))
            named = values if isinstance(values, dict) else {_name_of(values): values}
            for name, each in named.items():
                if each.shape != (len(batch_indices),):
                    raise ValueError(
                        f"metric {name!r} has shape {tuple(each.shape)} for {len(batch_indices)} "
                        "samples: return one value for each, not their mean"
                    )
                totals[name] = totals.get(name, 0.0) + float(each.sum(dtype=torch.float64))
            count += len(batch_indices)
    return _summed(totals, count, group, stop)


def _name_of(values: Tensor) -> str:
    """Of the values of a metric that gives no names: whether right, or whatever they are."""
    return "top1" if values.dtype == torch.bool else "value"


def _summed(
    totals: dict[str, float], count: int, group: Group, stop: StopRequest
) -> tuple[dict[str, float], int, int]:
    """Over all workers; one with no samples of its own learns the names from the others."""
    everyone = group.gather((totals, count, bool(stop.number)))
    sums: dict[str, float] = {}
    for theirs, _, _ in everyone:
        for name, value in theirs.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums, sum(n for _, n, _ in everyone), sum(stopped for _, _, stopped in everyone)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode again after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def merged_batch_norm(model: nn.Module, group: Group, share: float) -> Iterator[None]:
    r"""Inside, batch normalization has the statistics of all workers' samples together.

    With worker weights :math:`w_i` that sum to 1: mean :math:`m = \sum w_i m_i`, variance
    :math:`\sum w_i (v_i + m_i^2) - m^2`. Each worker's own copies return after.

    Args:
        model: Holds the layers.
        group: The workers.
        share: This worker's weight, b_i / B.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    ]
    if group.size == 1 or not layers:
        yield
        return
    means = [_present(layer.running_mean) for layer in layers]
    variances = [_present(layer.running_var) for layer in layers]
    own = [t.clone() for t in (*means, *variances)]
    mean = torch.cat([m.double() for m in means])
    moment = torch.cat([v.double() for v in variances]) + mean.square()
    merged_mean, merged_moment = group.sum(share * torch.stack([mean, moment]))
    sizes = [m.numel() for m in means]
    merged = [*merged_mean.split(sizes), *(merged_moment - merged_mean.square()).split(sizes)]
    try:
        for target, value in zip((*means, *variances), merged, strict=True):
            target.copy_(value)
        yield
    finally:
        for target, value in zip((*means, *variances), own, strict=True):
            target.copy_(value)


def _present(buffer: Tensor | None) -> Tensor:
    assert buffer is not None  # noqa: S101 - the layers were chosen by it
    return buffer
