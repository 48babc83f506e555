r"""Which pixels belong to which shape: a batch that is a dict with a mask, in a loop of your own.

In this folder, the plain loop, in one process:

    python segment.py

The same loop on two workers, with the batch and the rate that a plan decides:

    batchwright probe data=segment:labelled network=segment:labelling workers=2 loaders=0 \
        probe.budget=3 optimizer=sgd learning_rate=0.2 base_batch=32 \
        | batchwright plan - epochs=5 --out plan.json
    torchrun --standalone --nproc-per-node 2 segment.py plan.json

Each image shows a disc or a square. Its mask holds a class for each pixel (0: neither, 1: disc, 2:
square), and -1 where nobody has labelled it: most pixels, and more in some images than in others.
The loss is a mean over labelled pixels, so each step says how many there were.

A probe takes images with one label each. So it gets the shape's class, and the network with its
outputs averaged over the pixels: the same work, as far as time and memory go. On GPUs: as in
classify.py.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import batchwright as bw

EPOCHS, SIDE, UNLABELLED = 5, 32, -1
DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
CLASSES = ("neither", "disc", "square")
SPANS = (8, 24), (8, 24), (4, 9)  # of a shape's middle and its radius, in pixels


class Shapes(Dataset[dict[str, Tensor]]):
    """Drawn when asked for: image (3, 32, 32) float32, mask (32, 32) int64."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(self.first + index)
        x, y, radius = (int(torch.randint(*span, (), generator=random)) for span in SPANS)
        across, down = (torch.arange(SIDE) - x).abs(), (torch.arange(SIDE) - y).abs()[:, None]
        if index % 2:
            inside = torch.maximum(across, down) < radius
        else:
            inside = across**2 + down**2 < radius**2
        labelled = torch.rand(SIDE, SIDE, generator=random) < (0.5 if index % 5 else 0.05)
        image = inside + 0.3 * torch.randn(3, SIDE, SIDE, generator=random)
        return {"image": image, "mask": (inside * (1 + index % 2)).where(labelled, UNLABELLED)}


class Labelled(Dataset[tuple[Tensor, int]]):
    """The same with one label for each image, for the probe."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.shapes[index]["image"], 1 + index % 2


def sets() -> tuple[Shapes, Shapes]:
    """Training set and held-out set."""
    return Shapes(400), Shapes(100, first=400)


def labelled() -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Both sets, and the names of the classes, for the probe."""
    training, held_out = sets()
    return Labelled(training), Labelled(held_out), CLASSES


def network(num_classes: int) -> nn.Sequential:
    """Logits (n, classes, height, width) of images (n, 3, height, width)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 5, padding=4, dilation=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 5, padding=8, dilation=4), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Conv2d(8, num_classes, 1),
    )


def labelling(num_classes: int) -> nn.Sequential:
    """Logits (n, classes), for the probe: their mean over all pixels."""
    return network(num_classes).extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])


def mean_loss(outputs: Tensor, masks: Tensor) -> Tensor:
    """Mean over the labelled pixels; 0 where there are none."""
    total = functional.cross_entropy(outputs, masks, ignore_index=UNLABELLED, reduction="sum")
    return total / (masks != UNLABELLED).sum().clamp(min=1)


def pixel_accuracy(outputs: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """For each image, the share of its labelled pixels whose first guess is right."""
    labelled = masks != UNLABELLED
    right = (outputs.argmax(dim=1) == masks).sum(dim=(1, 2))
    return {"pixels": right / labelled.sum(dim=(1, 2)).clamp(min=1)}


def smaller(batch: dict[str, Tensor], side: int) -> dict[str, Tensor]:
    """Image and mask at another side; classes are taken from the nearest pixel, not mixed."""
    mask = functional.interpolate(batch["mask"][:, None].float(), size=(side, side))
    image = functional.interpolate(batch["image"], size=(side, side), mode="area")
    return {"image": image, "mask": mask[:, 0].long()}


def train_plainly() -> None:
    """Before: one process, a batch and a rate chosen by hand."""
    train_set, test_set = sets()
    torch.manual_seed(0)
    model = network(len(CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, fused=True)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            mean_loss(model(batch["image"].to(DEVICE)), batch["mask"].to(DEVICE)).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.inference_mode():
            right = 0.0
            for batch in DataLoader(test_set, batch_size=256):
                outputs = model(batch["image"].to(DEVICE))
                right += float(pixel_accuracy(outputs, batch["mask"].to(DEVICE))["pixels"].sum())
        print(f"epoch {epoch + 1}: {right / len(test_set):.1%}")


def train_as_planned(plan: str) -> None:
    """After: as many workers as the plan says, each in a process of its own."""
    train_set, test_set = sets()
    torch.manual_seed(0)
    model = network(len(CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, fused=True)
    with bw.Session(model, optimizer, train_set, plan=plan, resize=smaller, loaders=0) as session:
        for epoch in session.epochs():
            model.train()
            for batch in session.batches():
                loss = mean_loss(model(batch["image"]), batch["mask"])
                session.step(loss, weight=int((batch["mask"] != UNLABELLED).sum()))
            scores = session.evaluate(
                test_set,
                pixel_accuracy,
                forward=lambda model, batch: (model(batch["image"]), batch["mask"]),
            )
            if session.rank == 0:
                print(f"epoch {epoch + 1}: {scores['pixels']:.1%}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_as_planned(sys.argv[1])
    else:
        train_plainly()
