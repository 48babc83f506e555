"""Images and networks of the plain scripts that `benchmarks.planning.time_to_accuracy` times.

Nothing here uses Batchwright: it is what people write with PyTorch, Pillow and NumPy, with the
augmentation of torchvision's `RandomCrop`, `RandomHorizontalFlip`, `ToTensor` and `Normalize`. The
networks equal those of the same names in Batchwright, initialization included.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, Subset

BATCH = 128
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
STATISTICS = {  # mean and standard deviation of the channels
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
LOOK = slice(0, None, 4), slice(2, None, 20)  # tuning: training images to train and to evaluate on


def arguments() -> argparse.Namespace:
    """The parsed command line of a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="cifar100:PATH or imagefolder:PATH")
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--side", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--loaders", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--look", action="store_true", help="train on a quarter of the training "
                        "images, evaluate on others of them")  # fmt: skip
    return parser.parse_args()


class Images(Dataset[tuple[Tensor, int]]):
    """Images of CIFAR-100, held in memory, or files in a folder for each class.

    ``part`` is ``train`` or ``test`` (the folder ``val``). ``augment`` crops at random out of a
    border of an eighth of the side, and flips at random.
    """

    def __init__(self, data: str, part: str, side: int, *, augment: bool) -> None:
        kind, _, path = data.partition(":")
        self.side, self.augment = side, augment
        self.images: list[Path] | np.ndarray
        if kind == "cifar100":
            content = pickle.loads(  # noqa: S301 - the user's own file
                (Path(path) / "cifar-100-python" / part).read_bytes(), encoding="latin1"
            )
            self.images = content["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            self.labels = content["fine_labels"]
        else:
            folder = Path(path) / ("train" if part == "train" else "val")
            self.images = sorted(folder.glob("*/*"))
            names = sorted({file.parent.name for file in self.images})
            self.labels = [names.index(file.parent.name) for file in self.images]
        self.classes = max(self.labels) + 1
        mean, deviation = STATISTICS[kind]
        self.mean = torch.tensor(mean).view(3, 1, 1)
        self.deviation = torch.tensor(deviation).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """A float image (3, side, side) and its label."""
        image, side = self._open(index), self.side
        if self.augment:
            border = side // 8
            image = ImageOps.expand(image, border)
            left = int(torch.randint(0, image.width - side + 1, ()))
            top = int(torch.randint(0, image.height - side + 1, ()))
            if torch.rand(()) < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255).sub_(self.mean).div_(self.deviation), self.labels[index]

    def _open(self, index: int) -> Image.Image:
        """The image, its shorter side resized."""
        one = self.images[index]
        if not isinstance(one, Path):
            return Image.fromarray(one)
        image = Image.open(one).convert("RGB")
        scale = self.side / min(image.size)
        size = round(image.width * scale), round(image.height * scale)
        return image.resize(size, Image.Resampling.BILINEAR)


def loaders(asked: argparse.Namespace) -> tuple[DataLoader, DataLoader, int]:
    """The loaders of training and evaluation images, and the number of classes."""
    train = Images(asked.data, "train", asked.side, augment=True)
    classes = train.classes
    trained: Dataset[tuple[Tensor, int]] = train
    judged: Dataset[tuple[Tensor, int]]
    if asked.look:
        trained, judged = (
            Subset(images, range(len(train))[some])
            for images, some in zip(
                (train, Images(asked.data, "train", asked.side, augment=False)), LOOK, strict=True
            )
        )
    else:
        judged = Images(asked.data, "test", asked.side, augment=False)
    more = {"num_workers": asked.loaders, "persistent_workers": asked.loaders > 0}
    more["pin_memory"] = asked.device != "cpu"
    return (
        DataLoader(trained, BATCH, shuffle=True, **more),
        DataLoader(judged, BATCH, **more),
        classes,
    )


def optimizer_of(network: nn.Module, rate: float, epochs: int) -> tuple[SGD, CosineAnnealingLR]:
    """SGD with Nesterov momentum, and a cosine schedule over the epochs."""
    optimizer = SGD(
        network.parameters(), rate, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    return optimizer, CosineAnnealingLR(optimizer, epochs)


# ---------------------------------------------------------------------------------------- networks


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Features (n, width, height / stride, width / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet8(classes: int) -> nn.Module:
    """CIFAR ResNet of three blocks (He et al. 2016, arXiv 1512.03385)."""
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip
    initialize(network)
    for module in network:
        if isinstance(module, Block):
            nn.init.zeros_(module.bn2.weight)
    return network


def vgg8(classes: int) -> nn.Module:
    """VGG of six convolutions and two linear layers (Simonyan and Zisserman 2015)."""
    layers: list[nn.Module] = []
    for width_in, width in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128), nn.ReLU(inplace=True)]
    network = nn.Sequential(*layers, nn.Linear(128, classes))
    initialize(network)
    return network


def initialize(network: nn.Sequential) -> None:
    """He initialization."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.kaiming_normal_(network[-1].weight, nonlinearity="linear")


NETWORKS = {"resnet8": resnet8, "vgg8": vgg8}
