"""Small reference networks for image classification.

All take float images (n, channels, height, width) and return logits (n, num_classes). They end in
global average pooling, dropout and one linear layer called ``classifier``, so that the same weights
serve any resolution from their least side (`registries.networks`) up. Weights start as in He et al.
2015 (arXiv 1502.01852), the last normalization of each residual block at zero (Goyal et al. 2017,
arXiv 1706.02677). Numbers of weights are for 10 classes.

Their functions take the number of logits, the share of features dropped before the classifier, the
largest training image side in pixels (which only `resnet18` uses), and the channels of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

LARGE_RESOLUTION = 64
"""Image side, in pixels, above which `resnet18` starts with a stem of stride 4."""


def resnet8(
    num_classes: int, *, dropout: float = 0.0, top_resolution: int = 32, channels: int = 3
) -> nn.Module:
    """CIFAR ResNet of three stages with one block each, 78,042 weights.

    At 32 px: stem (n, 16, 32, 32), stages (n, 16, 32, 32), (n, 32, 16, 16), (n, 64, 8, 8).

    References:
        He et al. 2016, arXiv 1512.03385, section 4.2, with projections as shortcuts.
    """
    del top_resolution
    stages = _residual_stages((16, 32, 64), blocks=1)
    return Network(_convolution(channels, 16), stages, 64, num_classes=num_classes, dropout=dropout)


def resnet18(
    num_classes: int, *, dropout: float = 0.0, top_resolution: int = 32, channels: int = 3
) -> nn.Module:
    """ResNet of four stages with two blocks each, 11,173,962 weights (11,181,642 with large stem).

    At 32 px: stem (n, 64, 32, 32), stages (n, 64, 32, 32), (n, 128, 16, 16), (n, 256, 8, 8),
    (n, 512, 4, 4). Where ``top_resolution`` exceeds 64 px, the stem is a 7 x 7 convolution of
    stride 2 and a max pooling of stride 2, and all of these are a quarter of the image in height
    and width.

    References:
        He et al. 2016, arXiv 1512.03385, table 1.
    """
    if top_resolution > LARGE_RESOLUTION:
        stem = _convolution(channels, 64, kernel=7, stride=2)
        stem.append(nn.MaxPool2d(3, stride=2, padding=1))
    else:
        stem = _convolution(channels, 64)
    stages = _residual_stages((64, 128, 256, 512), blocks=2)
    return Network(stem, stages, 512, num_classes=num_classes, dropout=dropout)


def vgg8(
    num_classes: int, *, dropout: float = 0.0, top_resolution: int = 32, channels: int = 3
) -> nn.Module:
    """VGG of six convolutions and two linear layers without normalization, 304,810 weights.

    At 32 px: stages (n, 32, 16, 16), (n, 64, 8, 8), (n, 128, 4, 4), each after its max pooling.
    As nothing in it looks across samples, gradients of parts of a batch add up exactly.

    References:
        Simonyan and Zisserman 2015, arXiv 1409.1556, with global average pooling.
    """
    del top_resolution
    stages = nn.Sequential()
    for width_in, width in pairwise((channels, 32, 64, 128)):
        pair = nn.Conv2d(width_in, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        stages.append(nn.Sequential(pair[0], _relu(), pair[1], _relu(), nn.MaxPool2d(2)))
    hidden = nn.Sequential(nn.Linear(128, 128), _relu())
    stem = nn.Identity()
    return Network(stem, stages, 128, num_classes=num_classes, dropout=dropout, hidden=hidden)


def mobilenet_small(
    num_classes: int, *, dropout: float = 0.0, top_resolution: int = 32, channels: int = 3
) -> nn.Module:
    """Depthwise separable network in the manner of MobileNet, 136,778 weights.

    At 32 px: stem (n, 32, 32, 32), stages (n, 64, 32, 32), (n, 128, 16, 16) twice,
    (n, 256, 8, 8) twice.

    References:
        Howard et al. 2017, arXiv 1704.04861, without its first and its last halvings.
    """
    del top_resolution
    widths, strides = (32, 64, 128, 128, 256, 256), (1, 2, 1, 2, 1)
    stages = nn.Sequential()
    for (width_in, width), stride in zip(pairwise(widths), strides, strict=True):
        depthwise = _convolution(width_in, width_in, stride=stride, groups=width_in)
        stages.append(depthwise.extend(_convolution(width_in, width, kernel=1)))
    return Network(
        _convolution(channels, 32), stages, 256, num_classes=num_classes, dropout=dropout
    )


class Network(nn.Module):
    """Stem, stages, global average pooling, hidden layers if any, dropout, a linear layer."""

    def __init__(
        self,
        stem: nn.Module,
        stages: nn.Sequential,
        width: int,
        *,
        num_classes: int,
        dropout: float,
        hidden: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.stages = stages
        self.hidden = hidden or nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, num_classes)
        # He initialization; each residual block starts as its shortcut alone.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, ResidualBlock):
                nn.init.zeros_(module.second[1].get_parameter("weight"))
        nn.init.kaiming_normal_(self.classifier.weight, nonlinearity="linear")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, num_classes) of images (n, channels, height, width)."""
        features = self.stages(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.classifier(self.dropout(self.hidden(features)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a projection where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(width_in, width, stride=stride)
        self.second = _convolution(width, width, active=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = _convolution(width_in, width, kernel=1, stride=stride, active=False)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, width, height / stride, width / stride)."""
        return functional.relu(self.second(self.first(features)) + self.shortcut(features))


def _residual_stages(widths: Sequence[int], blocks: int) -> nn.Sequential:
    """One stage for each of ``widths``; each stage but the first halves height and width."""
    stages = nn.Sequential()
    width_in = widths[0]
    for width in widths:
        stage = nn.Sequential()
        for block in range(blocks):
            halve = block == 0 and width != widths[0]
            stage.append(ResidualBlock(width_in, width, stride=2 if halve else 1))
            width_in = width
        stages.append(stage)
    return stages


def _convolution(
    width_in: int,
    width: int,
    *,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    active: bool = True,
) -> nn.Sequential:
    """Convolution and batch normalization, then a ReLU where ``active``."""
    convolution = nn.Conv2d(
        width_in, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    )
    layers = nn.Sequential(convolution, nn.BatchNorm2d(width))
    return layers.append(_relu()) if active else layers


def _relu() -> nn.Module:
    """ReLU in place: nothing before it needs its input again in the backward pass."""
    return nn.ReLU(inplace=True)
