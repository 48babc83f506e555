"""Images from a function of your own, with an augmentation of your own: random square crops.

    batchwright run data=own_images:images network=resnet8 epochs=8

The command finds this file in the working folder. Put your images in place of the digits, and what
no job key does in place of the crops.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

SIDE, CLASSES = 8, "0123456789"


class Digits(Dataset):
    """Items are (image, label); with ``augment`` a random part of the image fills it."""

    def __init__(self, part: slice, *, augment: bool) -> None:
        digits = load_digits()
        grey = torch.tensor(digits.images[part], dtype=torch.float32)[:, None] / 16
        self.images = (grey.expand(-1, 3, -1, -1) - 0.3) / 0.4  # normalized here
        self.labels, self.augment = digits.target[part], augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.augment:  # with torchvision: a transform, such as v2.RandAugment()
            side = int(torch.randint(SIDE - 2, SIDE + 1, ()))
            top, left = torch.randint(SIDE - side + 1, (2,)).tolist()
            part = image[None, :, top : top + side, left : left + side]
            image = interpolate(part, size=SIDE, mode="bilinear")[0]
        return image, int(self.labels[index])


def images() -> tuple[Dataset, Dataset, list[str]]:
    """Training images, held-out images, and the names of the classes in the order of labels."""
    return Digits(slice(1400), augment=True), Digits(slice(1400, None), augment=False), [*CLASSES]
