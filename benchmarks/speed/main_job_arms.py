"""The training loops that `speed.main_job` and `cluster.uneven` compare.

Each trains `resnet8` on CIFAR-100 in batches of 128 at 32 px with random crops out of a border of
4 px and horizontal flips, by SGD with Nesterov momentum at a constant rate, until it is stopped.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import batchwright as bw
from batchwright.records import Job, Plan
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.sources import ImageData, open_data
from batchwright.workload.host import prepare_process, usable_cores
from batchwright.workload.loss import build_loss
from batchwright.workload.task import build_network, build_optimizer, set_training
from benchmarks.harness.plans import (
    ENDLESS,
    ONE_WORKER,
    facts_of,
    fixed_plan,
    image_pipeline,
    job_from,
    quick_precision,
)
from benchmarks.harness.turns import Turns

BATCH, SIDE, BORDER = 128, 32, 4
RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
LOADERS = (0, 1, 2)  # loader processes that a peer may take


def cifar_plan(folder: Path, *, epochs: int, precision: str, seed: int, decay: str) -> Plan:
    """A plan with fixed choices, made without measurements: one worker, batch 128.

    ``precision`` is ``float32``, or ``auto``: bfloat16 where the processor computes in it, which is
    what the probe chooses for this network.
    """
    job = job_from(
        f"{ONE_WORKER} network=resnet8 augment=crop-flip momentum={MOMENTUM} "
        f"weight_decay={WEIGHT_DECAY} learning_rate={RATE} base_batch={BATCH} scaling=none "
        f"warmup_epochs=0 decay={decay} seed={seed} epochs={epochs} global_batch={BATCH} "
        f"micro_batch={BATCH} resolutions={SIDE} checkpoint_seconds={ENDLESS}",
        data=f"cifar100:{folder}",
        precision=quick_precision() if precision == "auto" else "float32",
    )
    facts = open_data(job, verify=False).facts
    network = facts_of(job.network, len(facts.classes), SIDE)
    return fixed_plan(job, facts, network, batches=(BATCH,), method="plain")


# --------------------------------------------------------------------------------------- our loop


def session(turns: Turns, data: Path, runs: Path) -> None:
    """Our loop in float32, with its records, as ``batchwright train`` runs it in one process."""
    plan = cifar_plan(data, epochs=ENDLESS, precision="float32", seed=0, decay="none")
    train_session(turns, plan, runs / f"float32-{os.getpid()}")


def session_auto(turns: Turns, data: Path, runs: Path) -> None:
    """Our loop with ``precision=auto``."""
    plan = cifar_plan(data, epochs=ENDLESS, precision="auto", seed=0, decay="none")
    train_session(turns, plan, runs / f"auto-{os.getpid()}")


def train_session(
    turns: Turns, plan: Plan, run_folder: Path, prepare: Callable[[nn.Module], object] | None = None
) -> None:
    """Our loop by ``plan``, as one of its workers.

    The plan comes from `cifar_plan`; a plan for fewer images uses the first ones.
    ``prepare`` is called with the network before training begins.
    """
    prepare_process(usable_cores())
    data = open_data(plan.job, verify=False)
    images, labels = _stored(data)
    samples = plan.data.train_samples
    store = ImageStore.from_images(images[:samples], labels[:samples])
    pipeline = image_pipeline(plan, data, store)
    network = cifar_network(data)
    if prepare is not None:
        prepare(network)
    loss = build_loss(plan.job)
    optimizer = build_optimizer(network, plan.job, RATE)
    with bw.Session(network, optimizer, pipeline, plan=plan, run_folder=run_folder) as training:
        turns.ready()
        for _ in training.epochs():
            for batch, targets in training.batches():
                training.step(loss(network(batch), targets))
                turns.step_done(plan.stages[0].global_batch_size)


# ------------------------------------------------------------------- plain loops, same settings


def bare(turns: Turns, folder: Path, *_: Path) -> None:
    """A loop as one writes it by hand: data in memory, augmented a batch at a time, fused SGD."""
    prepare_process(usable_cores())
    data = opened_cifar(folder)
    _train_bare(turns, data, cifar_network(data))


def bare_ddp(turns: Turns, folder: Path) -> None:
    """The loop of `bare` by several workers under DistributedDataParallel, with equal parts.

    Statistics of batch normalization stay each worker's own, as in our loop: sending them around at
    every step, as DistributedDataParallel does by default, would slow it down.
    """
    prepare_process(usable_cores())
    dist.init_process_group("gloo")
    data = opened_cifar(folder)
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its heir syncs first
    network = nn.parallel.DistributedDataParallel(
        cifar_network(data), broadcast_buffers=False, gradient_as_bucket_view=True
    )
    try:
        _train_bare(turns, data, network, worker=dist.get_rank(), workers=dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _train_bare(
    turns: Turns, data: ImageData, network: nn.Module, *, worker: int = 0, workers: int = 1
) -> None:
    images, labels = (one.clone() for one in _stored(data))
    padded = functional.pad(images, (0, 0, *[BORDER] * 4))
    factor = 1 / (255 * torch.tensor(data.std))
    offset = -torch.tensor(data.mean) / torch.tensor(data.std)
    optimizer = sgd(network)
    order = torch.Generator().manual_seed(0)  # the same for all workers
    turns.ready()
    while True:
        total = torch.zeros(())
        for step in torch.randperm(len(images), generator=order).split(BATCH):
            chosen = step.tensor_split(workers)[worker]
            batch = _augmented(padded, chosen).float().mul_(factor).add_(offset)
            outputs = network(batch.permute(0, 3, 1, 2))  # channels last, as it lies in memory
            loss = functional.cross_entropy(outputs, labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach() * len(chosen)
            turns.step_done(len(step))


def resident_batch(turns: Turns, folder: Path, *_: Path) -> None:
    """The steps of `bare` on one prepared batch, which shows what the processor can do."""
    prepare_process(usable_cores())
    data = opened_cifar(folder)
    images, labels = _stored(data)
    batch = images[:BATCH].float().div_(255).sub_(torch.tensor(data.mean))
    batch = batch.div_(torch.tensor(data.std)).permute(0, 3, 1, 2)
    targets = labels[:BATCH].clone()
    network = cifar_network(data)
    optimizer = sgd(network)
    turns.ready()
    while True:
        loss = functional.cross_entropy(network(batch), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        turns.step_done(BATCH)


def _augmented(padded: Tensor, chosen: Tensor) -> Tensor:
    """Randomly cropped and flipped images (n, side, side, 3), uint8.

    Takes one window out of each image with its border. Between training steps this was the fastest
    of four ways; slicing image by image and indexing rows and columns were a little slower.
    """
    count = len(chosen)
    windows = padded[chosen].unfold(1, SIDE, 1).unfold(2, SIDE, 1)
    tops, lefts = torch.randint(0, 2 * BORDER + 1, (2, count))
    crops = windows[torch.arange(count), tops, lefts].permute(0, 2, 3, 1)
    flipped = (torch.rand(count) < 0.5)[:, None, None, None]
    return torch.where(flipped, crops.flip(2), crops)


# ---------------------------------------------------------------- peers, as their users start them


class Items(Dataset[tuple[Tensor, int]]):
    """CIFAR-100 item by item, with the usual random crop and flip and normalization."""

    def __init__(self, data: ImageData) -> None:
        images, labels = _stored(data)
        self._images = images.permute(0, 3, 1, 2).contiguous()
        self._labels = labels.tolist()
        self._mean, self._std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """A float image (3, side, side) and its label."""
        padded = functional.pad(self._images[index], (BORDER,) * 4)
        top, left = torch.randint(0, 2 * BORDER + 1, (2,)).tolist()
        image = padded[:, top : top + SIDE, left : left + SIDE]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image.float().div_(255).sub_(self._mean).div_(self._std), self._labels[index]


def lightning_fit(
    turns: Turns,
    network: nn.Module,
    loader: Any,
    *callbacks: Any,
    samples: Callable[[Tensor], int],
    **options: Any,
) -> None:
    """Train by Lightning's Trainer, with logger, checkpoints and progress bar off.

    Args:
        turns: Counts each step.
        network: The network in the LightningModule.
        loader: Loader of batches.
        callbacks: Further callbacks of the Trainer.
        samples: f(labels of this worker in a step) -> samples of all workers in it.
        **options: Further arguments of the Trainer.
    """
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
            images, labels = batch
            return functional.cross_entropy(self.network(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    class Steps(pl.Callback):
        def on_train_start(self, *arguments: Any) -> None:  # noqa: ARG002
            turns.ready()

        def on_train_batch_end(self, *arguments: Any) -> None:
            _, _, _, batch, _ = arguments
            turns.step_done(samples(batch[1]))

    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[*callbacks, Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Module(), loader)


def lightning(turns: Turns, folder: Path, _: Path, loaders: int) -> None:
    """A LightningModule under its Trainer; logger, checkpoints and progress bar off."""
    data = opened_cifar(folder)
    lightning_fit(turns, cifar_network(data), _loader(data, loaders), samples=len, devices=1)


def accelerate(turns: Turns, folder: Path, _: Path, loaders: int) -> None:
    """A plain loop whose model, optimizer and loader an Accelerator prepares."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    data = opened_cifar(folder)
    plain = cifar_network(data)
    network, optimizer, loader = accelerator.prepare(plain, sgd(plain), _loader(data, loaders))
    turns.ready()
    while True:
        for images, labels in loader:
            loss = functional.cross_entropy(network(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            turns.step_done(len(labels))


def _loader(data: ImageData, processes: int) -> DataLoader[tuple[Tensor, int]]:
    return DataLoader(
        Items(data),
        batch_size=BATCH,
        shuffle=True,
        num_workers=processes,
        persistent_workers=processes > 0,
    )


# ---------------------------------------------------------------------------- what all arms share


def opened_cifar(folder: Path) -> ImageData:
    """CIFAR-100 from the cache of decoded images."""
    return open_data(Job(data=f"cifar100:{folder}"), verify=False)


def _stored(data: ImageData) -> tuple[Tensor, Tensor]:
    """Images uint8 (N, side, side, 3) and labels (N,), as they are stored."""
    assert isinstance(data.train, ImageStore)
    assert data.train.images is not None
    return data.train.images, data.train.labels


def cifar_network(data: ImageData) -> nn.Module:
    """The network of all arms: same weights, in channels-last memory format."""
    network = build_network("resnet8", classes=len(data.facts.classes), side=SIDE, seed=0)
    set_training(network)
    return network


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all arms, fused as ours."""
    return torch.optim.SGD(
        network.parameters(),
        lr=RATE,
        momentum=MOMENTUM,
        nesterov=True,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
