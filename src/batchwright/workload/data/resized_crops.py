"""Random resized crops: a random part of an image, of random area and shape, fills the square.

`resized_parts` resizes all images of a batch at once, by two matrix products of whole numbers,
which float32 adds without rounding: an image is the same to the bit in any batch and on any device
(but for TF32, which rounds the weights of pixels to 11 bits).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.workload.data.random_numbers import (
    FIELD_BITS,
    draw,
    fields,
    scaled,
    split_mix,
    start_of,
)

CROP_SCALE = 0.08
"""Least share of an image's area, as usual."""
_WIDEST = 4 / 3  # width over height; the narrowest is its inverse
_TRIES = 10  # before the middle is taken
_ONE = 2**16  # the weights of a pixel add up to this: 255 times it is below float32's 2^24
_AT_ONCE = 64  # images that are resized at once, so that their copies take little memory

Part = Callable[[int, int], tuple[int, int, int, int]]
"""First row, first column, height and width of a part, for the height and width of its image."""


@dataclass(frozen=True)
class ResizedCrops:
    """Random parts of images, as of torchvision's RandomResizedCrop.

    Area and shape are drawn ten times; the first part that fits into the image is taken, at a
    random place, else the largest middle one whose shape is allowed.

    Attributes:
        seed: Seed of the job.
        least: Least share of the image's area.

    References:
        Szegedy et al. 2015, Going deeper with convolutions, section 6.
    """

    seed: int
    least: float = CROP_SCALE

    def draw(self, epoch: int, indices: Tensor, sizes: Tensor, strength: float) -> Tensor:
        """The part of each image of a batch.

        Places are the random numbers of `random_numbers.draw`; area and shape come from another
        start of the generator, so that they are independent of them.

        Args:
            epoch: Zero-based.
            indices: Indices of samples, int64 (n,), on the CPU.
            sizes: Height and width of each image, in pixels, int64 (n, 2).
            strength: Factor on how far area and logarithm of the shape may be from 1, 1 at most; at
                0 the largest middle square is taken.

        Returns:
            First row, first column, height and width of each part, int64 (n, 4).
        """
        shares, ratios, widest = self._tries(epoch, indices, strength)
        heights, widths = np.hsplit(sizes.numpy().astype(np.float64), 2)
        areas = heights * widths * shares
        # After the tries comes the middle, which always fits.
        talls = np.rint(np.append(np.sqrt(areas / ratios), np.minimum(heights, widths * widest), 1))
        wides = np.rint(np.append(np.sqrt(areas * ratios), np.minimum(widths, heights * widest), 1))
        fits = (talls > 0) & (talls <= heights) & (wides > 0) & (wides <= widths)
        first = fits.argmax(1)[:, None]
        tall, wide = (
            torch.from_numpy(np.take_along_axis(sides, first, 1)[:, 0]).long()
            for sides in (talls, wides)
        )
        places, middle = draw(self.seed, epoch, indices), torch.from_numpy(first[:, 0] == _TRIES)
        tops, lefts = (
            torch.where(middle, room // 2, scaled(field, room + 1))
            for field, room in (
                (places.vertical, sizes[:, 0] - tall),
                (places.horizontal, sizes[:, 1] - wide),
            )
        )
        return torch.stack((tops, lefts, tall, wide), dim=1)

    def parts(self, epoch: int, indices: Tensor, strength: float) -> list[Part]:
        """For each image a function that gives the part of `draw`, once its size is known."""
        shares, ratios, widest = self._tries(epoch, indices, strength)
        places = draw(self.seed, epoch, indices)
        drawn = (shares, ratios, places.vertical, places.horizontal)
        rows = zip(*(one.tolist() for one in drawn), strict=True)
        return [partial(_first_that_fits, widest, *row) for row in rows]

    def _tries(
        self, epoch: int, indices: Tensor, strength: float
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
        """Share of the area and width over height of each try (n, 10), and the widest shape."""
        strength = min(1.0, strength)
        start = split_mix(start_of(self.seed, epoch), np.array([2**64 - 2], np.uint64))
        positions = indices.numpy()[:, None] * _TRIES + np.arange(_TRIES)
        area, shape = (
            field / 2**FIELD_BITS for field in fields(split_mix(start, positions.astype(np.uint64)))
        )
        widest = _WIDEST**strength
        return 1 - strength * (1 - self.least) * (1 - area), widest ** (2 * shape - 1), widest


def _first_that_fits(
    widest: float,
    shares: Sequence[float],
    ratios: Sequence[float],
    vertical: int,
    horizontal: int,
    height: int,
    width: int,
) -> tuple[int, int, int, int]:
    """`ResizedCrops.draw` for one image, by the same arithmetic.

    In arrays of a single image it would take most of the time of decoding it.
    """
    for share, ratio in zip(shares, ratios, strict=True):
        area = height * width * share
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < tall <= height and 0 < wide <= width:
            top, left = vertical * (height - tall + 1), horizontal * (width - wide + 1)
            return top >> FIELD_BITS, left >> FIELD_BITS, tall, wide
    tall, wide = round(min(height, width * widest)), round(min(width, height * widest))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def resized_parts(images: Tensor, parts: Tensor, side: int) -> Tensor:
    """A part of each image, resized to a square, bilinear and antialiased.

    Rows, then columns: each output is a mean of pixels, rounded to a whole grey level, with weights
    of a triangle as wide as two output pixels, or two input pixels where these are larger.

    Args:
        images: uint8 (n, height, width, 3).
        parts: First row, first column, height and width of each part, int32 (n, 4), on the device
            of the images.
        side: Of the result, in pixels.

    Returns:
        uint8 (n, side, side, 3).
    """
    made = []
    with torch.autocast(images.device.type, enabled=False):
        for some, at in zip(images.split(_AT_ONCE), parts.split(_AT_ONCE), strict=True):
            count, height, width = some.shape[:3]
            down = _weights(at[:, 0], at[:, 2], height, side)
            rows = _mean(down, some.reshape(count, height, -1).float())
            columns = rows.view(count, side, width, 3).transpose(1, 2).reshape(count, width, -1)
            across = _mean(_weights(at[:, 1], at[:, 3], width, side), columns)
            square = across.view(count, side, side, 3).transpose(1, 2)
            made.append(square.to(torch.uint8, memory_format=torch.contiguous_format))
    return made[0] if len(made) == 1 else torch.cat(made)


def _weights(firsts: Tensor, sizes: Tensor, pixels: int, side: int) -> Tensor:
    """Weight of each pixel in each mean, whole numbers: float32 (n, ``side``, ``pixels``).

    Output i looks at c = (i + 1/2) s / side of a part of s pixels, and pixel j + 1/2 counts by
    1 - |j + 1/2 - c| / max(s / side, 1), times 2 max(s, side) to be whole, if that is positive.
    """
    sizes = sizes.view(-1, 1, 1)
    at = torch.arange(pixels, dtype=torch.int32, device=sizes.device) - firsts.view(-1, 1, 1)
    middles = torch.arange(1, 2 * side, 2, dtype=torch.int32, device=sizes.device).view(1, -1, 1)
    apart = ((2 * at + 1) * side - middles * sizes).abs()
    heights = (2 * sizes.clamp(min=side) - apart).clamp(min=0) * ((at >= 0) & (at < sizes))
    total = heights.sum(2, keepdim=True, dtype=torch.int32)
    return ((heights * _ONE + total // 2) // total).float()


def _mean(weights: Tensor, values: Tensor) -> Tensor:
    """Means (n, side, m) of ``values`` (n, pixels, m), rounded to whole numbers."""
    return torch.bmm(weights, values).add_(_ONE // 2).div_(_ONE).floor_()
