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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from batchwright.records import Augmentation
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.reduced import is_well_below, reduced
from batchwright.workload.data.store import Progress

RESIDENT_BYTES = 4 * 2**30
"""Largest store, in bytes, that is kept whole in the memory of a GPU."""

_PADDING_SHARE = 8  # shift by up to an eighth of the side: the usual 4 px of 32
_LARGEST_MARGIN = 1.25  # images of one size up to so many sides are cropped, larger ones resized
FIELD_BITS = 24
_Triple = tuple[float, float, float]


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
        mean: _Triple,
        std: _Triple,
        augmentation: Augmentation,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._store = store
        self._device = device
        self.side, self.mean, self.std = side, mean, std
        self._augmentation = augmentation
        self._seed = seed
        self._normalization = Normalization(mean, std, device=device, dtype=dtype)
        self.strength = 1.0
        self._drawn, self._drawn_starts = -1, (-1, 0.0, 0)
        self._whole = store.shape is not None and _used_whole(*store.shape, side)
        self._full = _Level(store, side, self._resident(store))
        self._reduced: dict[int, _Level] = {}

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
        level = self._level(resolution)
        if self._augmentation == "none":
            return self._normalize(self._still(level, indices), resolution), self._labels(indices)
        self._draw(epoch)
        if self._whole:
            pixels = _shift(level.gather(indices, self._device), *self._starts(level, indices))
        else:
            pixels = self._crop(level, indices, self._draws)
        if self._augmentation == "crop-flip":
            flip(pixels, self._draws.flip.index_select(0, indices))
        return self._normalize(pixels, resolution), self._labels(indices)

    def evaluation_batch(self, indices: Tensor, *, resolution: int) -> tuple[Tensor, Tensor]:
        """As `training_batch`, without anything random: whole images, or their middle."""
        pixels = self._still(self._full, indices)
        return self._normalize(pixels, resolution), self._labels(indices)

    def prepare(self, resolutions: Iterable[int], progress: Progress | None = None) -> None:
        """Make what training at ``resolutions`` needs; else it is made with the first batch."""
        for resolution in resolutions:
            self._level(resolution, progress)

    def _level(self, resolution: int, progress: Progress | None = None) -> _Level:
        """What training images of ``resolution`` pixels are made from."""
        if not is_well_below(resolution, self.side):
            return self._full
        if resolution not in self._reduced:
            full = self._store
            side = full.shape[0] if self._whole and full.shape else self.side
            store = reduced(full, side=side, resolution=resolution, progress=progress)
            self._reduced[resolution] = _Level(store, resolution, self._resident(store))
        return self._reduced[resolution]

    def _resident(self, store: ImageStore) -> Tensor | None:
        """The images that are used whole; on the GPU if they fit."""
        if not self._whole or store.images is None:
            return None
        fits = self._device.type != "cpu" and store.images.numel() <= RESIDENT_BYTES
        return store.images.to(self._device) if fits else store.images

    def _still(self, level: _Level, indices: Tensor) -> Tensor:
        if self._whole:
            return level.gather(indices, self._device)
        return self._crop(level, indices, None)

    def _draw(self, epoch: int) -> None:
        """Draw for all samples of an epoch at once: between steps each small operation counts."""
        if epoch != self._drawn:
            self._drawn = epoch
            self._draws = draw(self._seed, epoch, torch.arange(len(self._store)))

    def _starts(self, level: _Level, indices: Tensor) -> tuple[Tensor, int]:
        """Where each shifted image starts, and the pixels of the largest shift; see `_shift`."""
        assert self._store.shape is not None  # noqa: S101 - whole images have one size
        assert level.store.shape is not None  # noqa: S101 - and so have their copies
        full, side = self._store.shape[0], level.store.shape[0]
        shift = max(1, round(self.strength * full / _PADDING_SHARE)) if self.strength else 0
        pad = round(shift * side / full)
        if (self._drawn, self.strength, side) != self._drawn_starts:
            self._drawn_starts = self._drawn, self.strength, side
            down, right = (
                _nearest((_scaled(field, 2 * shift + 1) - shift) * side, full)
                for field in (self._draws.vertical, self._draws.horizontal)
            )
            self._all_starts = ((down + pad) * (side + 2 * pad) + right + pad) * 3
        return self._all_starts.index_select(0, indices), pad

    def _labels(self, indices: Tensor) -> Tensor:
        return self._store.labels.index_select(0, indices).to(self._device)

    def _crop(self, level: _Level, indices: Tensor, draws: Draws | None) -> Tensor:
        """A square of each image, the middle one without draws; uint8 (n, side, side, 3)."""
        heights, widths = self._store.sizes[indices].unbind(1)
        edges = torch.minimum(heights, widths).clamp(max=self.side)
        if draws is None:
            tops, lefts = (heights - edges) // 2, (widths - edges) // 2
        else:
            tops = _first_pixels(draws.vertical[indices], heights - edges, self.strength)
            lefts = _first_pixels(draws.horizontal[indices], widths - edges, self.strength)
        store, side = level.store, level.side
        if side != self.side:  # the same part of the image, to half a pixel
            heights, widths = store.sizes[indices].unbind(1)
            edges = torch.minimum(heights, widths).clamp(max=side)
            tops = torch.minimum(_nearest(tops * side, self.side), heights - edges)
            lefts = torch.minimum(_nearest(lefts * side, self.side), widths - edges)
        if bool((edges == side).all()):
            return store.squares(indices, tops, lefts, side).to(self._device)
        pixels = torch.empty(len(indices), side, side, 3, dtype=torch.uint8)
        for position, edge in enumerate(edges.tolist()):
            one = slice(position, position + 1)
            square = store.squares(indices[one], tops[one], lefts[one], edge)
            pixels[one] = square if edge == side else resize(square, side)
        return pixels.to(self._device)

    def _normalize(self, pixels: Tensor, resolution: int) -> Tensor:
        """Resized and normalized images (n, 3, resolution, resolution) of (n, side, side, 3)."""
        if pixels.shape[1] != resolution:
            pixels = resize(pixels, resolution)
        return self._normalization(pixels)


class Normalization:
    """Makes a network's input of pixels.

    Args:
        mean: Of each channel, over pixels in [0, 1]; subtracted.
        std: As ``mean``; divided by.
        device: Where the pixels are.
        dtype: Of the result.
    """

    def __init__(
        self, mean: _Triple, std: _Triple, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._mean, self._std = torch.tensor(mean), torch.tensor(std)
        self._device, self._dtype = device, dtype
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalized (n, 3, side, side), channels last, of uint8 or float (n, side, side, 3)."""
        side = pixels.shape[1]
        if side not in self._factors:
            # One factor and one offset for each value of an image: whole rows go through at once,
            # four times as fast as broadcasting over three channels.
            factor = (1 / (255 * self._std)).repeat(side * side).to(self._device)
            offset = (-self._mean / self._std).repeat(side * side).to(self._device)
            self._factors[side] = factor, offset
        factor, offset = self._factors[side]
        rows = pixels.reshape(len(pixels), -1).float()
        torch.addcmul(offset, rows, factor, out=rows)
        return rows.to(self._dtype).view(-1, side, side, 3).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class _Level:
    """Images at one scale.

    Attributes:
        store: Holds them.
        side: Of the squares that are cropped out of them, in pixels.
        whole: All of them, uint8 (N, height, width, 3), where they are used whole.
    """

    store: ImageStore
    side: int
    whole: Tensor | None

    def gather(self, indices: Tensor, device: torch.device) -> Tensor:
        """Some whole images, on the device; uint8 (n, height, width, 3)."""
        if self.whole is None:
            return torch.stack([self.store.image(i) for i in indices.tolist()]).to(device)
        return self.whole.index_select(0, indices.to(self.whole.device)).to(device)


def _used_whole(height: int, width: int, side: int) -> bool:
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
    mask = np.uint64(2**FIELD_BITS - 1)
    vertical = (state & mask).astype(np.int64)
    horizontal = (state >> np.uint64(FIELD_BITS) & mask).astype(np.int64)
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


def _scaled(field: Tensor, choices: int | Tensor) -> Tensor:
    """Integers below ``choices`` from such below 2^24, equally likely within choices / 2^24."""
    return field * choices >> FIELD_BITS


def _first_pixels(fields: Tensor, rooms: Tensor, strength: float) -> Tensor:
    """Where crops start that have so much room each; weaker ones keep around the middle."""
    spans = rooms if strength >= 1 else (strength * rooms.double()).round().long()
    return (rooms - spans) // 2 + _scaled(fields, spans + 1)


def _nearest(values: Tensor, divisor: int) -> Tensor:
    """Whole numbers nearest to ``values / divisor``, alike on both sides of 0."""
    return (values.double() / divisor).round().long()


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


def flip(images: Tensor, chosen: Tensor) -> None:
    """Mirror the ``chosen`` ones of ``images`` (n, side, side, 3) left to right, in place."""
    where = chosen.nonzero().squeeze(1).to(images.device)
    images.index_copy_(0, where, images.index_select(0, where).flip(2))


def resize(images: Tensor, side: int) -> Tensor:
    """Bilinear, antialiased: (n, side, side, 3) of square (n, any, any, 3).

    On the CPU uint8 stays uint8, which is three times as fast as float and rounds by at most half a
    grey level; GPUs resize float alone.
    """
    planes = images.permute(0, 3, 1, 2)
    if images.device.type != "cpu":
        planes = planes.float()
    resized = functional.interpolate(planes, size=(side, side), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)
