"""The training step that is measured: the job's own data path, network, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from batchwright.errors import JobError
from batchwright.group import Group
from batchwright.records import Job, Precision
from batchwright.workload.host import autocast
from batchwright.workload.pipeline import ImagePipeline
from batchwright.workload.sources import ImageData
from batchwright.workload.store import ImageStore
from batchwright.workload.task import (
    build_loss,
    build_network,
    build_optimizer,
    freeze,
    load_weights,
    set_training,
)

PROBE_RATES = {"sgd": 0.1, "adamw": 0.001}
"""Learning rates while measuring, where the job leaves its own open."""

_MOST_RESIDENT = 64  # samples of a user's data set that are loaded

Batch = tuple[Tensor, Tensor]


class Bench:
    """Makes batches and takes training steps, its parts apart so that each can be timed.

    Batches of an `ImageStore` come from the real pipeline, random indices each time. Of a user's
    own data set a few samples are collated once and repeated to the size wanted, so its loading is
    not in the measured time: loader processes do that beside the training.

    Args:
        job: Resolved: its precision and resolutions are concrete.
        data: The job's data.
        group: The workers that measure together.

    Attributes:
        network: In training mode, on the device.
        optimizer: Of the network's trained parameters.
        trained: These parameters.
    """

    def __init__(self, job: Job, data: ImageData, group: Group) -> None:
        self.job, self.group, self.device = job, group, group.device
        self.side = max(sides_of(job))
        self.network = self._network(len(data.facts.classes)).to(self.device)
        set_training(self.network)
        self.trained = [p for p in self.network.parameters() if p.requires_grad]
        rate = PROBE_RATES[job.optimizer] if job.learning_rate == "auto" else job.learning_rate
        self.optimizer = build_optimizer(self.network, job, rate)
        self._loss = build_loss(job)
        self._precision: Precision = "bfloat16" if job.precision == "bfloat16" else "float32"
        self._random = torch.Generator().manual_seed(1 + group.rank)
        self._train, self._val = self._source(data, data.train), self._source(data, data.val)
        # Gradients travel in one flat message; kept, as training keeps its buckets.
        elements = sum(p.numel() for p in self.trained) if group.size > 1 else 0
        self._message = torch.zeros(elements, device=self.device)

    def _network(self, classes: int) -> nn.Module:
        job = self.job
        network = build_network(
            job.network, classes=classes, side=self.side, dropout=job.dropout, seed=job.seed
        )
        if job.weights:
            load_weights(network, job.weights)
        freeze(network, job.frozen)
        return network

    def _source(self, data: ImageData, part: Any) -> ImagePipeline | Batch:
        if not isinstance(part, ImageStore):
            return self._resident(part)
        return ImagePipeline(
            part,
            device=self.device,
            side=self.side,
            mean=data.mean,
            std=data.std,
            augmentation=self.job.augmentation,
            seed=self.job.seed,
            dtype=torch.bfloat16 if self._precision == "bfloat16" else torch.float32,
        )

    def _resident(self, dataset: Any) -> Batch:
        items = [dataset[index] for index in range(min(len(dataset), _MOST_RESIDENT))]
        images, labels = default_collate(items)
        images = images.to(self.device, memory_format=torch.channels_last)
        return images, labels.to(self.device)

    def supply(self, size: int, resolution: int) -> Callable[[], Batch]:
        """A function that makes a training batch of ``size`` samples each time it is called."""
        source = self._train
        if isinstance(source, ImagePipeline):
            return lambda: source.training_batch(
                self._random_indices(size, len(source)), epoch=0, resolution=resolution
            )
        batch = _repeated(source, size, resolution)
        return lambda: batch

    def evaluation_supply(self, size: int) -> Callable[[], Batch]:
        """As `supply`, of held-out images at the highest resolution, without augmentation."""
        source = self._val
        if isinstance(source, ImagePipeline):
            return lambda: source.evaluation_batch(
                self._random_indices(size, len(source)), resolution=self.side
            )
        batch = _repeated(source, size, self.side)
        return lambda: batch

    def _random_indices(self, size: int, samples: int) -> Tensor:
        return torch.randint(samples, (size,), generator=self._random)

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch, in the job's precision."""
        images, labels = batch
        with autocast(self._precision, self.device):
            return self._loss(self.network(images), labels)

    def exchange(self) -> None:
        """Average the gradients over the workers; alone, nothing to do."""
        if self.group.size == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.trained]
        torch.cat([gradient.flatten() for gradient in gradients], out=self._message)
        self.group.sum(self._message)
        start = 0
        for gradient in gradients:
            end = start + gradient.numel()
            gradient.copy_(self._message[start:end].view_as(gradient) / self.group.size)
            start = end

    def update(self) -> None:
        """Change the weights and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, supply: Callable[[], Batch]) -> None:
        """One whole training step."""
        self.loss(supply()).backward()
        self.exchange()
        self.update()

    def live_bytes(self) -> int:
        """Bytes of weights, buffers, gradients, optimizer state and message between two steps."""
        tensors = [*self.network.parameters(), *self.network.buffers(), self._message]
        tensors += [p.grad for p in self.trained if p.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sides_of(job: Job) -> tuple[int, ...]:
    """The resolutions of a resolved job, in pixels."""
    if job.resolutions == "auto":
        raise JobError("resolutions=auto must be resolved before measuring")
    return job.resolutions


def _repeated(resident: Batch, size: int, resolution: int) -> Batch:
    images, labels = resident
    rows = torch.arange(size, device=images.device) % len(labels)
    chosen = images[rows]
    if min(chosen.shape[-2:]) != resolution:
        chosen = functional.interpolate(chosen, size=(resolution, resolution), mode="bilinear")
    return chosen.contiguous(memory_format=torch.channels_last), labels[rows]
