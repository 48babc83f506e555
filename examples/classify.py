r"""Handwritten digits with a training loop of your own: first plain, then with a session.

In this folder, the plain loop, in one process:

    python classify.py

The same loop on two workers, with the batch and the rate that a plan decides:

    batchwright probe data=classify:images network=classify:network workers=2 probe.budget=3 \
        loaders=0 optimizer=sgd learning_rate=0.1 base_batch=128 \
        | batchwright plan - epochs=10 --out plan.json
    torchrun --standalone --nproc-per-node 2 classify.py plan.json

Optimizer, rate and batch are those of the plain loop. Where there are GPUs, both compute on them, a
worker on each: two workers take two, and with one GPU it is `workers=1` and `--nproc-per-node 1`.
"""

from __future__ import annotations

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import batchwright as bw

EPOCHS = 10
DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def images() -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]], tuple[str, ...]]:
    """Training set, held-out set (every fifth image), and the names of the classes."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (n, 1, 8, 8)
    everything = TensorDataset(pixels.expand(-1, 3, -1, -1), torch.tensor(digits.target))
    held_out = range(0, len(everything), 5)
    training = [index for index in range(len(everything)) if index % 5]
    return Subset(everything, training), Subset(everything, held_out), tuple("0123456789")


def network(num_classes: int) -> nn.Sequential:
    """Two convolutions and a linear layer, for images (n, 3, 8, 8)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, num_classes)),
    )


def accuracy(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Whether each sample's first guess is right."""
    return {"top1": outputs.argmax(dim=1) == labels}


def train_plainly() -> None:
    """Before: one process, a batch and a rate chosen by hand."""
    train_set, test_set, names = images()
    torch.manual_seed(0)
    model = network(len(names)).to(DEVICE)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    loader = DataLoader(train_set, batch_size=128, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(model(inputs.to(DEVICE)), labels.to(DEVICE)).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.inference_mode():
            right = sum(
                int(accuracy(model(inputs.to(DEVICE)), labels.to(DEVICE))["top1"].sum())
                for inputs, labels in DataLoader(test_set, batch_size=256)
            )
        print(f"epoch {epoch + 1}: {right / len(test_set):.1%}")


def train_as_planned(plan: str) -> None:
    """After: as many workers as the plan says, each in a process of its own."""
    train_set, test_set, names = images()
    torch.manual_seed(0)
    model = network(len(names)).to(DEVICE)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    with bw.Session(model, optimizer, train_set, plan=plan, loaders=0) as session:
        for epoch in session.epochs():
            model.train()
            for inputs, labels in session.batches():
                session.step(criterion(model(inputs), labels))
            scores = session.evaluate(test_set, accuracy)
            if session.rank == 0:
                print(f"epoch {epoch + 1}: {scores['top1']:.1%}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_as_planned(sys.argv[1])
    else:
        train_plainly()
