"""Handwritten digits in Lightning's Trainer, whose workers may be uneven.

    python in_lightning.py 2

Lines with `bw` are all that Batchwright changes. `"auto"` in place of the shares chooses batch,
accumulation and rate from a probe of the module's own `training_step`.
"""

from __future__ import annotations

import sys

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw


class Digits(lightning.LightningModule):
    """Two layers, for images of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        pixels, labels = batch
        return functional.cross_entropy(self.layers(pixels), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, with the rate that is good for the loader's batch."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=64, shuffle=True)
    torch.manual_seed(0)
    module = Digits()
    trainer = lightning.Trainer(
        max_epochs=5,
        accelerator="cpu",
        devices=int(sys.argv[1]),
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[bw.ForLightning(shares="follow")],
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        with torch.inference_mode():
            right = (module.layers(pixels).argmax(1) == labels).float().mean()
        print(f"right: {float(right):.1%}")
