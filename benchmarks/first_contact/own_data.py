"""Data sets and a network as users bring them, and a user's training loop on a session.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.first_contact.own_data PLAN RUN_FOLDER

`pictures` reads JPEG files in the folder that the environment variable ``OWN_DATA`` names, with a
folder for each class; `tensors` holds small images in memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import batchwright as bw
from batchwright.records import Plan
from batchwright.records.documents import read_record

FOLDER = "OWN_DATA"
"""Environment variable: folder of the JPEG files."""

SIDE, TENSOR_SIDE = 64, 32
HELD_OUT = 10  # every tenth image is held out
TENSORS, CLASSES = 4000, 10

Parts = tuple[Dataset[tuple[Tensor, int]], Dataset[tuple[Tensor, int]], tuple[str, ...]]


class JpegFiles(Dataset[tuple[Tensor, int]]):
    """Images from JPEG files: decoded, cut to the middle square, resized, normalized."""

    def __init__(self, files: list[Path], labels: list[int]) -> None:
        self.files, self.labels = files, labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as file:
            image = file.convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.resize((SIDE, SIDE), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float().div_(127.5).sub_(1), self.labels[index]


class Tensors(Dataset[tuple[Tensor, int]]):
    """Random images with the label as signal, in memory."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=random)
        self.images = torch.randn(count, 3, TENSOR_SIDE, TENSOR_SIDE, generator=random)
        self.images[:, 0] += self.labels[:, None, None] / CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


class Norm(nn.Module):
    """LayerNorm over the channels of images (n, channels, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, images: Tensor) -> Tensor:
        """Normalized images (n, channels, height, width)."""
        return self.norm(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def network(num_classes: int) -> nn.Sequential:
    """Patches of 4 px, two blocks of convolutions with LayerNorm, a linear layer."""
    width = 48

    def block() -> list[nn.Module]:
        return [
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            Norm(width),
            nn.Conv2d(width, 2 * width, 1),
            nn.GELU(),
            nn.Conv2d(2 * width, width, 1),
        ]

    return nn.Sequential(
        *(nn.Conv2d(3, width, 4, stride=4), Norm(width), *block(), *block()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)),
    )


def pictures() -> Parts:
    """Training and held-out JPEG files, and the names of the classes."""
    folder = Path(os.environ[FOLDER])
    names = sorted(one.name for one in folder.iterdir() if one.is_dir())
    listed = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).iterdir())
    ]

    def part(*, held_out: bool) -> JpegFiles:
        own = [one for at, one in enumerate(listed) if (at % HELD_OUT == 0) == held_out]
        return JpegFiles([path for path, _ in own], [label for _, label in own])

    return part(held_out=False), part(held_out=True), tuple(names)


def tensors() -> Parts:
    """Training and held-out images in memory, and the names of the classes."""
    classes = tuple(map(str, range(CLASSES)))
    return Tensors(TENSORS, 0), Tensors(TENSORS // HELD_OUT, 1), classes


SETS: dict[str, Callable[[], Parts]] = {"pictures": pictures, "tensors": tensors}
"""The functions of this module that a job's `data` may name."""


def train(plan: Path, run_folder: Path) -> None:
    """Train by the plan, in a loop as a user writes it."""
    name = read_record(plan, Plan).job.data.partition(":")[2]
    images, held_out, classes = SETS[name]()
    torch.manual_seed(0)
    model = network(len(classes))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    with bw.Session(model, optimizer, images, plan=plan, run_folder=run_folder) as session:
        for _ in session.epochs():
            for inputs, labels in session.batches():
                session.step(criterion(model(inputs), labels))
            if session.evaluation_due:
                session.evaluate(held_out, lambda outputs, labels: outputs.argmax(1) == labels)


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
