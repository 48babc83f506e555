"""From stored images to training batches: gather, crop, flip, resize, turn, normalize.

A whole batch goes through each step at once. Crops, flips and turns are decided by a hash of seed,
epoch and sample index, so that a sample is equal in any batch, with any shares and number of
workers, and after a resume.

Copying byte ranges of the padded batch, as here, is the quickest of four ways that were tried
(docs/log.md, the data path).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from batchwright.records import Augmentation
from batchwright.workload.data.copying import copy_to_device, prefetched
from batchwright.workload.data.image_store import ImageStore, rectangles_at, squares_at
from batchwright.workload.data.loading import LoadingMeter
from batchwright.workload.data.random_numbers import (
    FIELD_BITS,
    Draws,
    draw,
    fields,
    scaled,
    split_mix,
    start_of,
)
from batchwright.workload.data.reduced import is_well_below, reduced
from batchwright.workload.data.resized_crops import CROP_SCALE, ResizedCrops, resized_parts
from batchwright.workload.data.store import Progress

RESIDENT_BYTES = 4 * 2**30
"""Largest store, in bytes, that is kept whole in the memory of a GPU."""

RESIDENT_SHARE = 0.25
"""Largest share that a store may take of a GPU's free memory, and of a process's limit there."""

_PADDING_SHARE = 8  # images are shifted by up to an eighth of the side: the usual 4 px of 32
_LARGEST_MARGIN = 1.25  # square images up to so many times the side are cropped, larger resized
UNCROPPED: tuple[Augmentation, ...] = ("none", "flip")
SHIFTED: tuple[Augmentation, ...] = ("crop", "crop-flip")  # images without margin
FLIPPED: tuple[Augmentation, ...] = ("flip", "crop-flip", "resized-crop")
MAX_ZOOM = 0.9  # at any strength
_RESIZED_TOGETHER = 32  # px; a CPU is quicker with larger parts one by one, six times at 112 px
_Triple = tuple[float, float, float]


def is_shown_whole(own: int, side: int) -> bool:
    """Whether square images of ``own`` pixels are shown whole at ``side``, and not cropped."""
    return not side < own <= _LARGEST_MARGIN * side


class ImagePipeline:
    """Batches of an `ImageStore`, made on the device, a batch at a time.

    Square images of one size without margin around ``side`` are used whole; in training they are
    shifted by up to an eighth of their side, with black beyond the border. From all other images a
    square of ``side`` pixels is cropped, or a smaller one from smaller images: at random in
    training, else from the middle. For another ``resolution`` the square is resized, bilinear and
    antialiased. Crops that are resized are those of `ResizedCrops`, of the whole stored image, and
    go to the resolution at once.

    Args:
        store: The images.
        device: Device of the batches.
        side: Largest training resolution, in pixels.
        mean: Mean of each channel, over pixels in [0, 1]; subtracted.
        std: Standard deviation of each channel; divided by.
        augmentation: Kind of random changes of training images.
        seed: Seed of the random changes.
        dtype: Format of the images: float32, or the format that the network autocasts to.
        rotation: Largest turn either way, as a share of a full turn.
        zoom: Largest share of a side by which an image is enlarged or reduced.
        crop_scale: Least share of an image's area that is shown, if crops are resized.
        limit: Bytes that the process may use of a GPU; `None`: all free bytes.

    ``side``, ``mean`` and ``std`` are attributes, too.

    Attributes:
        shifts: Whether it shifts training images as far as ``strength`` says: it does.
        loading: Counts nothing: no process loads beside this one.
        strength: Strength of the augmentation: largest shift, turn and zoom, relative to the usual
            ones; 0 changes nothing. Crops cannot leave the image, so for them 1 is the most. For
            resized crops see `ResizedCrops.draw`.
    """

    shifts = True

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
        rotation: float = 0.0,
        zoom: float = 0.0,
        crop_scale: float = CROP_SCALE,
        limit: int | None = None,
    ) -> None:
        self._store = store
        self._device = device
        self.side, self.mean, self.std = side, mean, std
        self._augmentation = augmentation
        self._seed = seed
        self._limit = limit
        self._warps = Warps(seed, rotation, zoom)
        self._resized_crops = ResizedCrops(seed, crop_scale)
        self._normalization = Normalization(mean, std, device=device, dtype=dtype)
        self.strength, self.loading = 1.0, LoadingMeter(0)
        self._drawn, self._drawn_starts, self._pad = -1, (-1, 0.0, 0), 0
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        self._brought: tuple[Tensor, torch.device, Tensor] | None = None
        self._lock = Lock()  # one batch may be made ahead, in a thread
        height, width = store.shape or (0, 1)
        self._whole = height == width and is_shown_whole(height, side)
        self._full = self._level_of(store, side)
        self._reduced: dict[int, _Level] = {}

    def __len__(self) -> int:
        return len(self._store)

    def training_batch(
        self, indices: Tensor, *, epoch: int, resolution: int
    ) -> tuple[Tensor, Tensor]:
        """Randomly changed images and their labels: a function of seed, epoch and indices alone.

        Args:
            indices: Indices of samples in the store, int64 (n,), on the CPU.
            epoch: Zero-based.
            resolution: Image side, in pixels.

        Returns:
            Images (n, 3, resolution, resolution), channels last, normalized; labels int64 (n,).
        """
        return self._finished(self._gathered(indices, epoch, resolution), resolution)

    def description(self) -> dict[str, Any]:
        """Image side in pixels, and the normalization of RGB values in [0, 1]."""
        return {"side": self.side, "mean": list(self.mean), "std": list(self.std)}

    def single(self, indices: Tensor, epoch: int, resolution: int) -> tuple[Tensor, Tensor]:
        """`training_batch`, beside those that `training` makes ahead."""
        return self.training_batch(indices, epoch=epoch, resolution=resolution)

    def training(
        self, batches: Iterable[Tensor], epoch: int, resolution: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`training_batch` for each tensor of indices.

        Images that are not on the GPU yet are gathered and copied one batch ahead.
        """
        if self._device.type == "cpu" or self.makes_on_gpu(resolution):
            for indices in batches:
                yield self.training_batch(indices, epoch=epoch, resolution=resolution)
            return
        make = partial(self._gathered, epoch=epoch, resolution=resolution)
        for gathered in prefetched(make, batches, self._device):
            yield self._finished(gathered, resolution)

    def makes_on_gpu(self, resolution: int) -> bool:
        """Whether the images are on a GPU, which then makes training batches by itself."""
        return self._level(resolution).on_gpu

    def _gathered(self, indices: Tensor, epoch: int, resolution: int) -> tuple[Tensor, ...]:
        """Pixels of training images, cropped or shifted, and labels, on the device.

        Then, if images are mirrored, whether to mirror each; and if they are turned, `Warps.draw`.
        Copies to the device may still be running.
        """
        with self._lock:
            level = self._level(resolution)
            if self._augmentation != "none":
                self._draw(epoch)
            if self._augmentation in UNCROPPED:
                pixels = self._still(level, indices)
            elif self._augmentation == "resized-crop":
                pixels = self._resized_parts(level, indices, epoch, resolution)
            elif self._whole:
                pixels = shifted(self._whole_ones(level, indices), *self._starts(level, indices))
            else:
                pixels = self._crop(level, indices, self._draws)
            made = [pixels, self._chosen("labels", level, indices)]
            if self._augmentation in FLIPPED:
                made.append(self._chosen("flip", level, indices))
            if self._warps:
                turns = self._warps.draw(epoch, indices, self.strength)
                made.append(copy_to_device(turns, self._device))
            return tuple(made)

    def _finished(self, gathered: tuple[Tensor, ...], resolution: int) -> tuple[Tensor, Tensor]:
        pixels, labels, *drawn = gathered
        if self._augmentation in FLIPPED:
            pixels = flip(pixels, drawn.pop(0))
        return self._normalize(pixels, resolution, *drawn), labels

    def evaluation_batch(self, indices: Tensor, *, resolution: int) -> tuple[Tensor, Tensor]:
        """`training_batch` without random changes: whole images, or their middle."""
        pixels = self._still(self._full, indices)
        labels = self._chosen("labels", self._full, indices)
        return self._normalize(pixels, resolution), labels

    def evaluation(
        self, batches: Iterable[Tensor], resolution: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`evaluation_batch` for each tensor of indices; by default at ``side``."""
        for indices in batches:
            yield self.evaluation_batch(indices, resolution=resolution or self.side)

    def close(self) -> None:
        """Nothing: it has no loader processes."""

    def prepare(self, resolutions: Iterable[int], progress: Progress | None = None) -> None:
        """Make the images for training at ``resolutions``; else the first batch makes them."""
        for resolution in resolutions:
            self._level(resolution, progress)

    def _level(self, resolution: int, progress: Progress | None = None) -> _Level:
        """The images from which batches of ``resolution`` pixels are made."""
        # Resized crops go from any size to the resolution; of a smaller copy they would be blurred.
        if self._augmentation == "resized-crop" or not is_well_below(resolution, self.side):
            return self._full
        if resolution not in self._reduced:
            full = self._store
            side = full.shape[0] if self._whole and full.shape else self.side
            store = reduced(full, side=side, resolution=resolution, progress=progress)
            self._reduced[resolution] = self._level_of(store, resolution)
        return self._reduced[resolution]

    def _level_of(self, store: ImageStore, side: int) -> _Level:
        """The images of a store, on the GPU if they fit there and can be cropped there."""
        pixels = store.pixels
        room: float = RESIDENT_BYTES
        if self._device.type == "cuda":
            room = min(room, RESIDENT_SHARE * torch.cuda.mem_get_info(self._device)[0])
        if self._limit is not None:
            room = min(room, RESIDENT_SHARE * self._limit)
        fits = self._device.type != "cpu" and 0 < len(pixels) <= room
        if fits and (self._whole or int(store.sizes.min()) >= side):  # the CPU enlarges small ones
            pixels = pixels.to(self._device)
        return _Level(store, side, pixels, whole=self._whole)

    def _still(self, level: _Level, indices: Tensor) -> Tensor:
        """Images without random shift or crop, on the device; uint8 (n, side, side, 3)."""
        if self._whole:
            return self._whole_ones(level, indices)
        return self._crop(level, indices, None)

    def _whole_ones(self, level: _Level, indices: Tensor) -> Tensor:
        """Whole images, on the device; uint8 (n, height, width, 3)."""
        if level.images is None:
            every = [level.store.image(index) for index in indices.tolist()]
            return copy_to_device(torch.stack(every), self._device)
        found = level.images.index_select(0, self._at(level.pixels.device, indices))
        return found if level.on_gpu else copy_to_device(found, self._device)

    def _draw(self, epoch: int) -> None:
        """Draw for all samples of an epoch at once: small operations in each step cost time."""
        if epoch != self._drawn:
            self._drawn = epoch
            self._draws = draw(self._seed, epoch, torch.arange(len(self._store)))
            self._tables = {key: one for key, one in self._tables.items() if key[0] == "labels"}

    def _starts(self, level: _Level, indices: Tensor) -> tuple[Tensor, int]:
        """First byte of each shifted image, and the pixels of the largest shift; see `shifts`."""
        assert self._store.shape is not None  # noqa: S101 - whole images have one size
        assert level.store.shape is not None  # noqa: S101 - and so have their reduced copies
        full, side = self._store.shape[0], level.store.shape[0]
        if (self._drawn, self.strength, side) != self._drawn_starts:
            self._drawn_starts = self._drawn, self.strength, side
            self._all_starts, self._pad = shifts(
                self._draws, strength=self.strength, full=full, side=side
            )
            self._tables = {key: one for key, one in self._tables.items() if key[0] != "starts"}
        return self._chosen("starts", level, indices), self._pad

    def _chosen(self, name: str, level: _Level, indices: Tensor) -> Tensor:
        """Labels, flips or starts of some samples, on the device.

        They are looked up on the device of the images, where those of all samples are brought once,
        so that each batch copies its indices alone.
        """
        place = level.pixels.device
        if (name, place) not in self._tables:
            if name == "labels":
                every = self._store.labels
            else:
                every = self._draws.flip if name == "flip" else self._all_starts
            self._tables[name, place] = copy_to_device(every, place)
        found = self._tables[name, place].index_select(0, self._at(place, indices))
        return found if level.on_gpu else copy_to_device(found, self._device)

    def _at(self, place: torch.device, indices: Tensor) -> Tensor:
        """Indices on the device where they are looked up; copied once for each batch."""
        brought = self._brought
        if brought is None or brought[0] is not indices or brought[1] != place:
            brought = self._brought = indices, place, copy_to_device(indices, place)
        return brought[2]

    def _crop(self, level: _Level, indices: Tensor, draws: Draws | None) -> Tensor:
        """A square of each image, without ``draws`` the middle one; uint8 (n, side, side, 3)."""
        heights, widths = self._store.sizes[indices].unbind(1)
        edges = torch.minimum(heights, widths).clamp(max=self.side)
        if draws is None:
            tops, lefts = (heights - edges) // 2, (widths - edges) // 2
        else:
            tops = _first_pixels(draws.vertical[indices], heights - edges, self.strength)
            lefts = _first_pixels(draws.horizontal[indices], widths - edges, self.strength)
        store, side = level.store, level.side
        if side != self.side:  # the corresponding part of the reduced image, to half a pixel
            heights, widths = store.sizes[indices].unbind(1)
            edges = torch.minimum(heights, widths).clamp(max=side)
            tops = torch.minimum(_nearest(tops * side, self.side), heights - edges)
            lefts = torch.minimum(_nearest(lefts * side, self.side), widths - edges)
        if level.on_gpu:
            rows = copy_to_device(store.rows(indices, tops, lefts, side), self._device)
            return squares_at(level.pixels, rows, side)
        if bool((edges == side).all()):
            return copy_to_device(store.squares(indices, tops, lefts, side), self._device)
        pixels = torch.empty(len(indices), side, side, 3, dtype=torch.uint8)
        for position, edge in enumerate(edges.tolist()):
            one = slice(position, position + 1)
            square = store.squares(indices[one], tops[one], lefts[one], edge)
            pixels[one] = square if edge == side else resize(square, side)
        return copy_to_device(pixels, self._device)

    def _resized_parts(self, level: _Level, indices: Tensor, epoch: int, resolution: int) -> Tensor:
        """A random part of each image, on the device; uint8 (n, resolution, resolution, 3)."""
        sizes = level.store.sizes[indices]
        parts = self._resized_crops.draw(epoch, indices, sizes, self.strength)
        if self._device.type == "cpu" and resolution > _RESIZED_TOGETHER:
            pixels = torch.empty(len(indices), resolution, resolution, 3, dtype=torch.uint8)
            for position, (top, left, height, width) in enumerate(parts.tolist()):
                image = level.store.image(int(indices[position]))
                part = image[top : top + height, left : left + width]
                pixels[position] = resize(part[None], resolution)[0]
            return pixels
        rows, width, columns = level.store.rectangles(indices, parts)
        if level.on_gpu:
            rows = copy_to_device(rows, self._device)
        found = rectangles_at(level.pixels, rows, len(rows) // len(indices), width)
        inside = torch.stack((torch.zeros_like(columns), columns, parts[:, 2], parts[:, 3]), dim=1)
        return resized_parts(
            found if level.on_gpu else copy_to_device(found, self._device),
            copy_to_device(inside.int(), self._device),
            resolution,
        )

    def _normalize(self, pixels: Tensor, resolution: int, turns: Tensor | None = None) -> Tensor:
        """Images (n, 3, resolution, resolution) of pixels (n, side, side, 3).

        They are resized, turned if there are ``turns``, and normalized.
        """
        if pixels.shape[1] != resolution:
            pixels = resize(pixels, resolution)
        if turns is not None:
            pixels = warp(pixels, turns)
        return self._normalization(pixels)


class Normalization:
    """Makes a network's input from pixels.

    Args:
        mean: Mean of each channel, over pixels in [0, 1]; subtracted.
        std: Standard deviation of each channel; divided by.
        device: Device of the pixels.
        dtype: Format of the result.
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
            # A factor and an offset for each value of an image: whole rows are computed at once,
            # four times as fast as broadcasting over three channels.
            factor = (1 / (255 * self._std)).repeat(side * side)
            offset = (-self._mean / self._std).repeat(side * side)
            self._factors[side] = (
                copy_to_device(factor, self._device),
                copy_to_device(offset, self._device),
            )
        factor, offset = self._factors[side]
        rows = pixels.reshape(len(pixels), -1).float()
        torch.addcmul(offset, rows, factor, out=rows)
        return rows.to(self._dtype).view(-1, side, side, 3).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class _Level:
    """Images at one scale.

    Attributes:
        store: The images.
        side: Side of the squares that are cropped out of them, in pixels.
        pixels: The store's pixels, on the CPU or on the GPU.
        whole: Whether images are used whole.
    """

    store: ImageStore
    side: int
    pixels: Tensor
    whole: bool

    @property
    def on_gpu(self) -> bool:
        """Whether the pixels are on the GPU."""
        return self.pixels.device.type != "cpu"

    @cached_property
    def images(self) -> Tensor | None:
        """All images, uint8 (N, height, width, 3), if they are used whole; else `None`."""
        if not self.whole or self.store.images is None:
            return None
        return self.pixels.view(self.store.images.shape)


# ---------------------------------------------------------------------------------- random numbers


@dataclass(frozen=True)
class Warps:
    """Random turns and zooms of images; false where both are 0.

    Attributes:
        seed: Seed of the job.
        rotation: Largest turn either way, as a share of a full turn.
        zoom: Largest share of a side by which an image is enlarged or reduced.
    """

    seed: int
    rotation: float
    zoom: float

    def __bool__(self) -> bool:
        return bool(self.rotation or self.zoom)

    def draw(self, epoch: int, indices: Tensor, strength: float) -> Tensor:
        """Random turns and zooms for `warp`.

        Like those of `draw` they depend on seed, epoch and sample index alone, but on another start
        of the generator, so that they are independent of them.

        Args:
            epoch: Zero-based.
            indices: Indices of samples, int64 (n,), on the CPU.
            strength: Factor on the largest turn and zoom.

        Returns:
            Scale times cosine and sine of the angle, float32 (n, 2).
        """
        start = split_mix(start_of(self.seed, epoch), np.array([2**64 - 1], np.uint64))
        turn, size = (
            torch.from_numpy(field / 2 ** (FIELD_BITS - 1)) - 1
            for field in fields(split_mix(start, indices.numpy().astype(np.uint64)))
        )
        angles = 2 * math.pi * strength * self.rotation * turn
        scales = 1 + min(MAX_ZOOM, strength * self.zoom) * size
        return torch.stack((scales * angles.cos(), scales * angles.sin()), dim=1).float()


# ------------------------------------------------------------------------------------------- pixels


def _first_pixels(fields: Tensor, rooms: Tensor, strength: float) -> Tensor:
    """First pixels of crops with so much room each; with less strength nearer to the middle."""
    spans = rooms if strength >= 1 else (strength * rooms.double()).round().long()
    return (rooms - spans) // 2 + scaled(fields, spans + 1)


def _nearest(values: Tensor, divisor: int) -> Tensor:
    """Whole numbers nearest to ``values / divisor``, symmetric about 0."""
    return (values.double() / divisor).round().long()


def shifts(draws: Draws, *, strength: float, full: int, side: int) -> tuple[Tensor, int]:
    """Where shifted images begin in their padded images, for `shifted`.

    Args:
        draws: Random numbers of each image.
        strength: Largest shift, relative to an eighth of the side.
        full: Side at the highest resolution, in pixels, at which shifts are whole pixels.
        side: Side of the images, in pixels.

    Returns:
        First value of each shifted image, int64 (n,); and the pixels of the largest shift.
    """
    most = max(1, round(strength * full / _PADDING_SHARE)) if strength else 0
    pad = round(most * side / full)
    down, right = (
        _nearest((scaled(field, 2 * most + 1) - most) * side, full)
        for field in (draws.vertical, draws.horizontal)
    )
    return ((down + pad) * (side + 2 * pad) + right + pad) * 3, pad


def shifted(images: Tensor, starts: Tensor, pad: int) -> Tensor:
    """Images shifted by up to ``pad`` pixels each way, with black beyond the border.

    Rows are copied as ranges out of the padded batch.

    Args:
        images: Of any type (n, side, side, 3), contiguous.
        starts: First value of each shifted image in its padded image, int64 (n,).
        pad: Pixels of padding on each side.
    """
    if not pad:
        return images
    count, side = images.shape[:2]
    padded = functional.pad(images, (0, 0, pad, pad, pad, pad))
    rows = starts[:, None] + _row_starts(
        count, padded.stride(0), side, padded.stride(1), images.device, _stream(images.device)
    )
    return squares_at(padded.view(-1), rows.view(-1), side)


def _stream(device: torch.device) -> int:
    """Handle of the device's current stream; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@lru_cache(16)  # each small operation costs a launch on a GPU
def _row_starts(
    images: int, image_bytes: int, rows: int, row_bytes: int, place: torch.device, stream: int
) -> Tensor:
    """First byte of each row of each image in a batch: int64 (images, rows).

    There is one result for each ``stream``, as another stream would not wait for the copy.
    """
    del stream
    firsts = torch.arange(0, images * image_bytes, image_bytes)
    return copy_to_device(firsts[:, None] + torch.arange(0, rows * row_bytes, row_bytes), place)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """``images`` (n, side, side, 3), of which the ``chosen`` ones are mirrored left to right.

    On a GPU all are mirrored, as only the GPU knows which are chosen. On a CPU whole images are
    copied, which is two to four times as fast as writing the mirrored ones into the batch.
    """
    if images.device.type != "cpu":
        return torch.where(chosen.view(-1, 1, 1, 1), images.flip(2), images)
    where = chosen.nonzero().squeeze(1)
    mirrored = images.index_select(0, where).flip(2)
    here, count = torch.arange(len(images) + len(where), device=images.device), len(images)
    places = here[:count].masked_scatter(chosen, here[count:])
    return torch.cat((images, mirrored)).index_select(0, places)


def warp(images: Tensor, turns: Tensor) -> Tensor:
    """Images (n, side, side, 3) turned and zoomed by `Warps.draw`, in float32.

    Interpolation is bilinear; beyond the border the image is mirrored. With coordinates from -1 to
    1, (x, y) shows the pixel that was at (c x - s y, s x + c y). All operations are elementwise, so
    that the result for an image is equal in any batch.
    """
    side = images.shape[1]
    places = (2 * torch.arange(side, device=images.device) + 1) / side - 1
    x, y = places.view(1, 1, side), places.view(1, side, 1)
    cosine, sine = (one.view(-1, 1, 1) for one in turns.unbind(1))
    grid = torch.stack((cosine * x - sine * y, sine * x + cosine * y), dim=3)
    planes = images.permute(0, 3, 1, 2).float()
    made = functional.grid_sample(planes, grid, padding_mode="reflection", align_corners=False)
    return made.permute(0, 2, 3, 1)


def resize(images: Tensor, side: int) -> Tensor:
    """Images (n, any, any, 3) resized to (n, side, side, 3), bilinear and antialiased.

    On the CPU uint8 stays uint8, which is three times as fast as float and rounds by at most half a
    grey level; GPUs resize only float.
    """
    planes = images.permute(0, 3, 1, 2)
    if images.device.type != "cpu":
        planes = planes.float()
    resized = functional.interpolate(planes, size=(side, side), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)
