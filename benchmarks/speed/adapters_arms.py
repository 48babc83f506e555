"""The training loops that `speed.adapters` compares: trainers with our adapter and without.

Two workers under DDP train `resnet8` on the first images of CIFAR-100, 64 samples each in a step,
image by image with random crop and flip. ``shares=None`` is the trainer as its users start it;
other values start it with our adapter and these shares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

import batchwright as bw
from batchwright.client.trackers.companion import tracked
from batchwright.storage.files import make_folder
from batchwright.workload.host import prepare_process
from benchmarks.harness.plans import ENDLESS
from benchmarks.harness.turns import Turns
from benchmarks.speed.main_job_arms import (
    BATCH,
    Items,
    cifar_network,
    cifar_plan,
    lightning_fit,
    opened_cifar,
    sgd,
    train_session,
)

WORKERS = 2
LOCAL = BATCH // WORKERS


def lightning(turns: Turns, folder: Path, steps: int, shares: str | None) -> None:
    """A LightningModule under its Trainer; logger, checkpoints and progress bar off."""
    network, images = _begun(folder, steps)
    adapter = [] if shares is None else [bw.ForLightning(shares=shares)]
    loader = DataLoader(images, LOCAL, shuffle=True)
    options: Any = {"devices": WORKERS, "strategy": "ddp"}
    lightning_fit(turns, network, loader, *adapter, samples=lambda _: BATCH, **options)


class _Named(Dataset[dict[str, Any]]):
    """Items as dicts by the model's argument names, which the Trainer expects."""

    def __init__(self, images: Dataset[tuple[Tensor, int]]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self._images[index]
        return {"pixel_values": image, "labels": label}


class _WithLoss(nn.Module):
    """A network whose output contains the loss, which the Trainer expects."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(pixel_values)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def transformers(turns: Turns, folder: Path, steps: int, shares: str | None) -> None:
    """Transformers' Trainer; logging, checkpoints, progress and clipping off."""
    import transformers as hf

    class Steps(hf.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.ready()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.step_done(BATCH)

    network, images = _begun(folder, steps)
    arguments = hf.TrainingArguments(
        output_dir=str(folder / "unused"),
        use_cpu=True,
        per_device_train_batch_size=LOCAL,
        num_train_epochs=ENDLESS,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = hf.Trainer(
        _WithLoss(network),
        arguments,
        train_dataset=_Named(images),
        optimizers=(sgd(network), None),
        callbacks=[Steps()],
    )
    if shares is not None:
        bw.ForTransformers(trainer, shares=shares)
    trainer.train()


def accelerate(turns: Turns, folder: Path, steps: int, shares: str | None) -> None:
    """A plain loop under an Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network, images = _begun(folder, steps)
    loader = DataLoader(images, LOCAL, shuffle=True)
    model, optimizer = accelerator.prepare(network, sgd(network))
    if shares is None:
        feed, backward = accelerator.prepare(loader), accelerator.backward
    else:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader, shares=shares)
        backward = feed.backward
    turns.ready()
    while True:
        for batch, labels in feed:
            backward(functional.cross_entropy(model(batch), labels))
            optimizer.step()
            optimizer.zero_grad()
            turns.step_done(BATCH)


def _begun(folder: Path, steps: int) -> tuple[nn.Module, Dataset[tuple[Tensor, int]]]:
    """The network, and the images of an epoch of ``steps`` steps."""
    prepare_process(1)
    data = opened_cifar(folder)
    return cifar_network(data), Subset(Items(data), range(steps * BATCH))


def session(turns: Turns, folder: Path, run_folder: Path, trackers: tuple[str, ...]) -> None:
    """Our own loop with one worker and these trackers."""
    plan = cifar_plan(folder, epochs=ENDLESS, precision="float32", seed=0, decay="none")
    make_folder(run_folder)
    with tracked(run_folder, trackers, tell=print):
        train_session(turns, plan, run_folder)
