"""Statistics of batch normalization, measured anew before an evaluation.

Running statistics remember the resolutions, the weights and the augmentation of the last steps.
After an epoch at a low resolution they are off for images of the highest, at which the network is
evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchwright.algorithms.partition import apportion
from batchwright.distributed.group import Group
from batchwright.records import Plan
from batchwright.training.batches.feeding import Feed
from batchwright.training.batches.sampler import Step, micro_batches
from batchwright.training.evaluate.evaluation import present, without_gradients

_LEAST = 2  # samples that have a variance


def calibrating_batches(
    feed: Feed,
    plan: Plan,
    order: Tensor,
    *,
    epoch: int,
    shares: Sequence[int],
    ranks: Sequence[int],
    between_epochs: bool,
) -> Iterator[tuple[int, Any]]:
    """This process's part of the training batches that ``cycle.recalibrate`` asks for.

    They are the first batches of the epoch, of the size and resolution of the plan's row with the
    highest resolution, augmented as in training.

    Args:
        feed: Source of the training data.
        plan: The plan, whose job says how many batches.
        order: Order of the epoch's samples, int64 (samples,).
        epoch: Zero-based.
        shares: The workers' shares of the samples, in rank order.
        ranks: The workers of this process.
        between_epochs: Whether the feed has nothing else under way.

    Yields:
        (samples, batch).
    """
    top = max(plan.stages, key=lambda stage: stage.resolution)
    wanted = order[: plan.job.cycle.recalibrate * top.global_batch_size]
    parts: list[Tensor] = []
    for rank in ranks:
        start = 0
        for batch in wanted.split(top.global_batch_size):
            least = _LEAST if len(batch) >= _LEAST * len(shares) else 0
            first, last = Step(start, tuple(apportion(shares, len(batch), least=least))).span(rank)
            start += len(batch)
            sizes = micro_batches(last - first, top.micro_batch_size, _LEAST)
            parts += order[first:last].split(sizes) if last - first >= _LEAST else []
    fetched: Iterator[Any]
    if between_epochs:
        fetched = feed.training(parts, epoch, top.resolution)
    else:
        fetched = (feed.single(part, epoch, top.resolution) for part in parts)
    for part in parts:
        yield len(part), next(fetched)
    next(fetched, None)  # the feed ends its pass, as after any last batch


@contextmanager
def recalibrated(
    model: nn.Module,
    batches: Iterable[tuple[int, Any]],
    group: Group,
    *,
    forward: Callable[[nn.Module, Any], Any],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Iterator[None]:
    r"""Inside, batch normalization has the statistics of ``batches``, over all workers.

    With samples :math:`n_j`, mean :math:`m_j` and variance :math:`v_j` of each batch :math:`j` of
    each worker, and :math:`N = \sum n_j`: mean :math:`m = \sum n_j m_j / N`, variance
    :math:`\sum n_j (v_j + m_j^2) / N - m^2`. While they are taken each layer normalizes by its
    batch, as in training, and all else (dropout) behaves as in evaluation. Afterwards everything
    is as it was before.

    Layers in evaluation mode keep their statistics, as those of frozen weights do in training; in
    a model that is in evaluation mode as a whole, all take new ones. `SyncBatchNorm` keeps its own,
    which are those of all workers: it would wait for the others in each batch, and each worker has
    another number of them.

    Args:
        model: Holds the layers.
        batches: This worker's batches, as (samples, batch); none is made unless there are layers.
        group: The workers.
        forward: f(model, batch) runs the model.
        autocast: Makes the context of a forward pass.

    References:
        Wu and Johnson 2021, arXiv 2105.07576, section 3: "precise" statistics.
    """
    layers = _layers(model)
    if not layers:
        yield
        return
    own = [{name: b.clone() for name, b in layer.named_buffers()} for layer in layers]
    try:
        _set(layers, group.sum(_moments(model, layers, batches, forward, autocast)))
        yield
    finally:
        for layer, buffers in zip(layers, own, strict=True):
            for name, buffer in layer.named_buffers():
                present(buffer).copy_(buffers[name])


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm)
        and not isinstance(layer, nn.SyncBatchNorm)
        and layer.running_mean is not None
        and (layer.training or not model.training)
    ]


def _moments(
    model: nn.Module,
    layers: Sequence[_BatchNorm],
    batches: Iterable[tuple[int, Any]],
    forward: Callable[[nn.Module, Any], Any],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Samples, sum of means and sum of squares of each channel of all layers: float64 (3, c)."""
    device = next(model.parameters()).device
    sums = [torch.zeros(3, layer.num_features, dtype=torch.float64, device=device)
            for layer in layers]  # fmt: skip
    samples = 0

    def note(total: Tensor) -> Callable[[_BatchNorm, Any, Any], None]:
        def add(layer: _BatchNorm, *_: Any) -> None:
            # With momentum 1 the layer's statistics are those of this batch alone.
            mean, variance = (present(b).double() for b in (layer.running_mean, layer.running_var))
            total.add_(samples * torch.stack([torch.ones_like(mean), mean, variance + mean**2]))

        return add

    with ExitStack() as stack:
        stack.enter_context(_only_normalization_trains(model, layers))
        stack.enter_context(without_gradients())
        for layer, total in zip(layers, sums, strict=True):
            stack.callback(layer.register_forward_hook(note(total)).remove)
        for samples, batch in batches:  # noqa: B007 - the hooks read `samples`
            with autocast():
                forward(model, batch)
    return torch.cat(sums, dim=1)


@contextmanager
def _only_normalization_trains(model: nn.Module, layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """Inside, the layers' statistics are the last batch's; other modules are in evaluation mode."""
    training = {module for module in model.modules() if module.training}
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.training, layer.momentum = True, 1.0
        present(layer.running_mean).zero_()  # what is infinite or not a number would stay
        present(layer.running_var).fill_(1)
        present(layer.num_batches_tracked).zero_()
    try:
        yield
    finally:
        for module in model.modules():
            module.training = module in training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _set(layers: Sequence[_BatchNorm], moments: Tensor) -> None:
    sizes = [layer.num_features for layer in layers]
    for layer, (count, mean_sum, square_sum) in zip(
        layers, moments.split(sizes, dim=1), strict=True
    ):
        mean = mean_sum / count
        present(layer.running_mean).copy_(mean)
        present(layer.running_var).copy_((square_sum / count - mean**2).clamp(min=0))
