"""Held-out evaluation: sharded over the workers, reduced as (sum, count), nothing padded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchwright.algorithms.partition import apportion
from batchwright.distributed.group import Group
from batchwright.errors import DataError, TrainingError
from batchwright.records import Plan
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import described
from batchwright.training.batches.feeding import Feed
from batchwright.training.batches.sampler import Step
from batchwright.training.signals import StopRequest
from batchwright.workload.extras import in_words
from batchwright.workload.host import is_out_of_memory, release_memory

_PIXELS = 64 * 32**2  # of a forward pass that keeps a processor busy
Metric = Callable[[Any, Any], Tensor | dict[str, Tensor]]
Forward = Callable[[nn.Module, Any], tuple[Any, Any]]


def outputs_and_labels(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """The usual forward pass of an (images, labels) batch.

    Raises:
        ValueError: The batch is another; a dict of two would give its keys.
    """
    try:
        if isinstance(batch, Mapping | Tensor):
            raise ValueError
        images, labels = batch
    except (TypeError, ValueError):
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f"session.evaluate() got a batch that is a {type(batch).__name__}{size}, not (images, "
            "labels): give it forward=f, where f(model, batch) returns (outputs, labels)"
        ) from None
    return model(images), labels


def evaluation_batch(plan: Plan) -> int:
    """Samples in one forward pass of an evaluation at the plan's highest resolution.

    The micro-batch, which without a backward pass needs less memory than in a training step; more
    where that is small: as many as have the pixels of 64 images of 32 px.
    """
    top = max(plan.stages, key=lambda stage: stage.resolution)
    return max(top.micro_batch_size, _PIXELS // top.resolution**2)


@dataclass
class Fitting:
    """How many samples fit into a forward pass, as far as the run's evaluations have learnt.

    Attributes:
        most: Samples in a forward pass since it ran out; ``None``: as many as are asked for.
    """

    most: int | None = None

    def of(self, wanted: int) -> int:
        """As many samples as are ``wanted``, or as many as fit."""
        return wanted if self.most is None else min(wanted, self.most)


@dataclass(frozen=True)
class Evaluation:
    """Arguments of an evaluation, as given to `Session.evaluate`.

    Attributes:
        model: The model to evaluate.
        feed: Makes the held-out batches.
        metric: f(outputs, labels) -> a value for each sample.
        forward: f(model, batch) -> (outputs, labels).
        batch_size: Samples in one forward pass.
    """

    model: nn.Module
    feed: Feed
    metric: Metric
    forward: Forward
    batch_size: int


def evaluate(
    what: Evaluation,
    *,
    group: Group,
    stop: StopRequest,
    autocast: Callable[[], AbstractContextManager[Any]],
    shares: Sequence[int],
    fitting: Fitting,
) -> tuple[dict[str, float], int, int]:
    """Sums of a metric over a data set, each sample counted once.

    Every worker takes a stretch of samples, as long as its share in training. Modules are put into
    evaluation mode and back; batch normalization uses the workers' merged statistics meanwhile.
    Where memory runs out, this worker goes on with half as many samples in a forward pass, from
    the first that it has not counted; ``fitting`` remembers it.

    Args:
        what: Model, data, metric, forward pass and batch.
        group: The workers.
        stop: Notes whether this worker is asked to stop.
        autocast: Makes the context of a forward pass.
        shares: The workers' shares of the samples, in rank order.
        fitting: How many samples fit into a forward pass.

    Returns:
        Sum of each value over the samples, number of samples, and number of workers that were asked
        to stop (then the sums are partial and to be thrown away).

    Raises:
        DataError: There are no samples, or the workers have data sets of several sizes.
        TrainingError: Not even one sample fits into memory.
        ValueError: The metric gave something else than one value for each sample.
    """
    model, feed = what.model, what.feed
    if not len(feed):
        raise DataError("session.evaluate() got an empty data set: there is nothing to evaluate")
    first, last = Step(0, tuple(apportion(shares, len(feed)))).span(group.rank)
    indices, share = torch.arange(first, last), shares[group.rank] / sum(shares)
    totals: dict[str, Tensor] = {}
    count = 0

    def add(part: Tensor, batch: Any) -> None:
        with autocast():
            values = what.metric(*what.forward(model, batch))
        for name, value in _sums(values, len(part)).items():
            totals[name] = value + totals.get(name, 0.0)

    with evaluation_mode(model), merged_batch_norm(model, group, share), without_gradients():
        while count < len(indices) and not stop.number:
            left = indices[count:]
            batches = left.split(fitting.of(what.batch_size))
            done, cause = _added(batches, feed.evaluation(batches, None), add, stop)
            count += done
            if done < len(left) and not stop.number:
                _halve(fitting, min(len(batches[0]), len(left) - done), group, cause)
    return _summed(totals, count, group, stop, len(feed))


def _added(
    parts: Sequence[Tensor],
    batches: Iterator[Any],
    add: Callable[[Tensor, Any], None],
    stop: StopRequest,
) -> tuple[int, str]:
    """Add batches until memory runs out; returns how many samples were added, and its error.

    A function of its own: on its return, whatever a failed pass held is freed.
    """
    done, cause = 0, ""
    try:
        for part, batch in zip(parts, batches, strict=True):
            if stop.number:
                break
            add(part, batch)
            done += len(part)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        cause = in_words(error)
    return done, cause


def _halve(fitting: Fitting, failed: int, group: Group, cause: str) -> None:
    """Halve the samples in a forward pass, in which memory ran out with ``failed`` of them.

    Raises:
        TrainingError: It was one sample.
    """
    if failed < 2:
        raise TrainingError(
            f"{group.places[group.rank]} has not enough memory to evaluate "
            f"{counted(failed, 'sample')} at once: take a smaller network or resolution, or free "
            f"memory ({cause})"
        )
    fitting.most = failed // 2
    release_memory(group.device)
    warnings.warn(
        f"memory ran out in an evaluation with {failed} samples in a forward pass: it goes on with "
        f"{fitting.most} from here on",
        stacklevel=7,
    )


def _sums(values: Tensor | dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Sums of each value over the samples of a batch, by name: float64 (), on the device."""
    if not isinstance(values, dict):  # a metric that gives no name
        right = isinstance(values, Tensor) and values.dtype == torch.bool
        values = {"top1" if right else "value": values}
    for name, each in values.items():
        if not isinstance(each, Tensor):
            raise ValueError(
                f"metric {name!r} is {described(each)}: return a tensor with one value for each "
                "sample, or a dict of such"
            )
        if each.shape != (samples,):
            hint = ", not their mean" if not each.ndim else "; collate= may leave none out here"
            raise ValueError(
                f"metric {name!r} has shape {tuple(each.shape)} for {samples} samples: return one "
                f"value for each{hint}"
            )
    return {name: each.sum(dtype=torch.float64) for name, each in values.items()}


def _summed(
    totals: dict[str, Tensor], count: int, group: Group, stop: StopRequest, size: int
) -> tuple[dict[str, float], int, int]:
    """Sums over all workers; a worker without samples learns the names from the others.

    Raises:
        DataError: The workers' data sets have other sizes than ``size``.
    """
    own = {name: float(total) for name, total in totals.items()}
    everyone = group.gather((own, count, bool(stop.number), size))
    for rank, (*_, theirs) in enumerate(everyone):
        if theirs != everyone[0][-1]:
            raise DataError(
                f"session.evaluate() got {theirs} samples on worker {rank} and {everyone[0][-1]} "
                "on worker 0: give all workers the whole data set; they share it out by themselves"
            )
    sums: dict[str, float] = {}
    for theirs, *_ in everyone:
        for name, value in theirs.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums, sum(n for _, n, *_ in everyone), sum(ended for _, _, ended, _ in everyone)


@contextmanager
def without_gradients() -> Iterator[None]:
    """Inside, record no graph; a backward pass after it finds nothing that disturbs it.

    Not `torch.inference_mode`: what a module keeps of a forward pass in it, such as a table of
    positions, could never be trained with. Nor may weights that autocast has cast in here stay in
    its cache: with older versions of PyTorch an open batch would be trained with these, which
    have no gradient.
    """
    try:
        with torch.no_grad():
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each module in its own again."""
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
    means = [present(layer.running_mean) for layer in layers]
    variances = [present(layer.running_var) for layer in layers]
    own = [t.clone() for t in (*means, *variances)]
    mean = torch.cat([m.double() for m in means])
    moment = torch.cat([v.double() for v in variances]) + mean.square()
    merged_mean, merged_moment = group.sum(share * torch.stack([mean, moment]))
    sizes = [m.numel() for m in means]
    variance = (merged_moment - merged_mean.square()).clamp(min=0)  # below 0 by rounding
    merged = [*merged_mean.split(sizes), *variance.split(sizes)]
    try:
        for target, value in zip((*means, *variances), merged, strict=True):
            target.copy_(value)
        yield
    finally:
        for target, value in zip((*means, *variances), own, strict=True):
            target.copy_(value)


def present(buffer: Tensor | None) -> Tensor:
    """The numbers of a layer's buffer, which it must have."""
    assert buffer is not None  # noqa: S101 - the layers were chosen by it
    # Its data: autograd must not see the change, or the backward pass of an open batch, which does
    # not read the buffer, would refuse it. The buffer has its own numbers again by then.
    return buffer.data
