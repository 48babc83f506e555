"""From stored images to training batches: gather, crop, flip, resize, normalize.

A whole batch goes through each step at once. Crops and flips are decided by a hash of seed, epoch
and sample index, so that a sample looks the same whatever the batch, the shares or the number of
workers, and after a resume.

On two cores a batch of 128 images of 32 px takes 0.2 ms over and over, and 0.6 ms between training
steps of `resnet8` (29 ms or more), which empty the caches. Tried besides, for gather and crop:
indexing pixels of a padded copy of the data, 8 ms; slicing image by image, 0.5 ms; taking pixels
packed into 32 bits, 0.2 ms. Stretches of bytes out of the padded batch, as here: 0.05 ms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from batchwright.records import Augmentation
from batchwright.workload.store import ImageStore

RESIDENT_BYTES = 4 * 2**30
"""Largest store, in bytes, that is kept whole in the memory of a GPU."""

_PADDING_SHARE = 8  # shift by up to an eighth of the side: the usual 4 px of 32
_LARGEST_MARGIN = 1.25  # images of one size up to so many sides are cropped, larger ones resized
_FIELD_BITS = 24


class ImagePipeline:
    """Batches of an `ImageStore`, made on the device, a batch at a time.

    Square images of one size without margin around ``side`` are used whole; in training they are
    shifted by up to an eighth of their side, with black beyond the border. Of all other images a
    square of ``side`` pixels is used, or as much as there is: a random one in training, else the
    middle. Where ``resolution`` is another, the square is resized, bilinear and antialiased.

    Args:
        store: The images.
        device: Where batches are wanted.
        side: Largest training resolution, in pixels.
        mean: Of each channel, over pixels in [0, 1]; subtracted.
        std: As ``mean``; divided by.
        augmentation: Which random changes training images get.
        seed: Of the random changes.
        dtype: Of the images: float32, or bfloat16 for a network that autocasts to it.

    Attributes:
        strength: Of the augmentation: its largest shift, relative to the usual; 0 shifts nothing.
            Crops cannot leave the image, so there more than 1 is as 1.
    """

    def __init__(
        self,
        store: ImageStore,
        *,
        device: torch.device,
        side: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        augmentation: Augmentation,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._store = store
        self._device = device
        self.side, self.mean, self.std = side, mean, std
        self._augmentation = augmentation
        self._seed = seed
        self._dtype = dtype
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}
        self.strength = 1.0
        self._drawn: tuple[int, float] | None = None
        self._whole: Tensor | None = None
        if store.images is not None and _used_whole(store.images, side):
            fits = device.type != "cpu" and store.images.numel() <= RESIDENT_BYTES
            self._whole = store.images.to(device) if fits else store.images

    def __len__(self) -> int:
        return len(self._store)

    def training_batch(
        self, indices: Tensor, *, epoch: int, resolution: int
    ) -> tuple[Tensor, Tensor]:
        """Randomly changed images and their labels: a function of seed, epoch and indices alone.

        Args:
            indices: Of samples in the store, int64 (n,), on the CPU.
            epoch: Zero-based.
            resolution: Image side, in pixels.

        Returns:
            Images (n, 3, resolution, resolution), channels last, normalized; labels int64 (n,).
        """
        if self._augmentation == "none":
            return self.evaluation_batch(indices, resolution=resolution)
        self._draw(epoch)
        if self._whole is not None:
            starts = self._starts.index_select(0, indices)
            pad = _padding(self._whole.shape[1], self.strength)
            pixels = _shift(self._gather(self._whole, indices), starts, pad)
        else:
            pixels = self._crop(indices, self._draws)
        if self._augmentation == "crop-flip":
            _flip(pixels, self._draws.flip.index_select(0, indices))
        return self._normalize(pixels, resolution), self._labels(indices)

    def evaluation_batch(self, indices: Tensor, *, resolution: int) -> tuple[Tensor, Tensor]:
        """As `training_batch`, without anything random: whole images, or their middle."""
        if self._whole is not None:
            pixels = self._gather(self._whole, indices)
        else:
            pixels = self._crop(indices, None)
        return self._normalize(pixels, resolution), self._labels(indices)

    def _draw(self, epoch: int) -> None:
        """Draw for all samples of an epoch at once: between steps each small operation counts."""
        if (epoch, self.strength) != self._drawn:
            self._drawn = epoch, self.strength
            self._draws = draw(self._seed, epoch, torch.arange(len(self._store)))
            if self._whole is not None:
                side = self._whole.shape[1]
                self._starts = _shift_starts(self._draws, side, _padding(side, self.strength))

    def _labels(self, indices: Tensor) -> Tensor:
        return self._store.labels.index_select(0, indices).to(self._device)

    def _gather(self, images: Tensor, indices: Tensor) -> Tensor:
        """Rows of ``images``, on the device; uint8 (n, side, side, 3)."""
        return images.index_select(0, indices.to(images.device)).to(self._device)

    def _crop(self, indices: Tensor, draws: Draws | None) -> Tensor:
        """A square of each image, the middle one without draws; uint8 (n, side, side, 3)."""
        side = self.side
        pixels = torch.empty(len(indices), side, side, 3, dtype=torch.uint8)
        for position, index in enumerate(indices.tolist()):
            image = self._store.image(index)
            height, width = image.shape[:2]
            edge = min(side, height, width)
            top, left = (height - edge) // 2, (width - edge) // 2
            if draws is not None:
                top = _first_pixel(draws.vertical[index], height - edge, self.strength)
                left = _first_pixel(draws.horizontal[index], width - edge, self.strength)
            square = image[top : top + edge, left : left + edge]
            pixels[position] = square if edge == side else _resize(square[None], side)[0]
        return pixels.to(self._device)

    def _normalize(self, pixels: Tensor, resolution: int) -> Tensor:
        """Resized and normalized images (n, 3, resolution, resolution) of (n, side, side, 3)."""
        if pixels.shape[1] != resolution:
            pixels = _resize(pixels, resolution)
        if resolution not in self._factors:
            # One factor and one offset for each value of an image: whole rows go through at once,
            # four times as fast as broadcasting over three channels.
            count = resolution * resolution
            factor = (1 / (255 * torch.tensor(self.std))).repeat(count).to(self._device)
            offset = (
                (-torch.tensor(self.mean) / torch.tensor(self.std)).repeat(count).to(self._device)
            )
            self._factors[resolution] = factor, offset
        factor, offset = self._factors[resolution]
        rows = pixels.reshape(len(pixels), -1).float()
        torch.addcmul(offset, rows, factor, out=rows)
        return rows.to(self._dtype).view(-1, resolution, resolution, 3).permute(0, 3, 1, 2)


def _used_whole(images: Tensor, side: int) -> bool:
    height, width = images.shape[1:3]
    return height == width and not side < height <= _LARGEST_MARGIN * side


# ---------------------------------------------------------------------------------- random numbers


class Draws(NamedTuple):
    """What chance says of each sample of a batch; tensors (n,) on the CPU."""

    vertical: Tensor
    """Uniform integers below 2^24."""
    horizontal: Tensor
    """As ``vertical``, and independent of it."""
    flip: Tensor
    """True for half of the samples."""


def draw(seed: int, epoch: int, indices: Tensor) -> Draws:
    """Random numbers that depend on nothing but seed, epoch and sample index.

    Each is a cut through one 64-bit output of SplitMix64, started from the mixed seed and epoch, at
    the position that the index gives.

    References:
        Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators, OOPSLA.
    """
    start = split_mix(np.array([seed % 2**64], np.uint64), np.array([epoch], np.uint64))
    state = split_mix(start, indices.numpy().astype(np.uint64))
    mask = np.uint64(2**_FIELD_BITS - 1)
    vertical = (state & mask).astype(np.int64)
    horizontal = (state >> np.uint64(_FIELD_BITS) & mask).astype(np.int64)
    flip = (state >> np.uint64(63)).astype(np.bool_)
    return Draws(*map(torch.from_numpy, (vertical, horizontal, flip)))


def split_mix(
    state: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Output of SplitMix64 started from ``state``, at zero-based ``position``."""
    mixed: npt.NDArray[np.uint64] = state + (position + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


# ------------------------------------------------------------------------------------------- pixels


def _scaled(field: Tensor, choices: int) -> Tensor:
    """Integers below ``choices`` from such below 2^24, equally likely within choices / 2^24."""
    return field * choices >> _FIELD_BITS


def _first_pixel(field: Tensor, room: int, strength: float) -> int:
    """Where a crop starts that has so much ``room``; weaker ones keep around the middle."""
    span = room if strength >= 1 else round(strength * room)
    return (room - span) // 2 + int(_scaled(field, span + 1))


def _shift_starts(draws: Draws, side: int, pad: int) -> Tensor:
    """Where each shifted image starts in its padded one, in bytes; int64 (n,)."""
    top = _scaled(draws.vertical, 2 * pad + 1)
    left = _scaled(draws.horizontal, 2 * pad + 1)
    return (top * (side + 2 * pad) + left) * 3


def _shift(images: Tensor, starts: Tensor, pad: int) -> Tensor:
    """Images moved by up to ``pad`` pixels each way, black coming in; (n, side, side, 3).

    Rows are copied as stretches of bytes out of the padded batch.
    """
    if not pad:
        return images
    count, side = images.shape[:2]
    padded = functional.pad(images, (0, 0, pad, pad, pad, pad))
    image_bytes, row_bytes = padded.stride(0), padded.stride(1)
    firsts = starts + torch.arange(0, count * image_bytes, image_bytes)
    rows = firsts[:, None] + torch.arange(0, side * row_bytes, row_bytes)
    stretches = padded.view(-1).unfold(0, side * 3, 1)
    return stretches.index_select(0, rows.view(-1).to(images.device)).view(images.shape)


def _padding(side: int, strength: float) -> int:
    """Pixels of the largest shift."""
    return max(1, round(strength * side / _PADDING_SHARE)) if strength else 0


def _flip(images: Tensor, chosen: Tensor) -> None:
    """Mirror the ``chosen`` ones of ``images`` (n, side, side, 3) left to right, in place."""
    where = chosen.nonzero().squeeze(1).to(images.device)
    images.index_copy_(0, where, images.index_select(0, where).flip(2))


def _resize(images: Tensor, side: int) -> Tensor:
    """Bilinear, antialiased: (n, side, side, 3) of square (n, any, any, 3).

    On the CPU uint8 stays uint8, which is three times as fast as float and rounds by at most half a
    grey level; GPUs resize float alone.
    """
    planes = images.permute(0, 3, 1, 2)
    if images.device.type != "cpu":
        planes = planes.float()
    resized = functional.interpolate(planes, size=(side, side), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)
