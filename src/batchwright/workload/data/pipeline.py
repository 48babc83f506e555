"""From stored images to training batches: gather, crop, flip, resize, turn, normalize.

A whole batch goes through each step at once. Crops, flips and turns are decided by a hash of seed,
epoch and sample index, so that a sample looks the same whatever the batch, the shares or the number
of workers, and after a resume.

On two cores a batch of 128 images of 32 px takes 0.2 ms over and over, and 0.6 ms between training
steps of `resnet8` (29 ms or more), which empty the caches. Tried besides, for gather and crop:
indexing pixels of a padded copy of the data, 8 ms; slicing image by image, 0.5 ms; taking pixels
packed into 32 bits, 0.2 ms. Stretches of bytes out of the padded batch, as here: 0.05 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from batchwright.records import Augmentation
from batchwright.workload.data.copying import made_ahead, sent
from batchwright.workload.data.image_store import ImageStore, stretches_of
from batchwright.workload.data.reduced import is_well_below, reduced
from batchwright.workload.data.store import Progress

RESIDENT_BYTES = 4 * 2**30
"""Largest store, in bytes, that is kept whole in the memory of a GPU."""

RESIDENT_SHARE = 0.25
"""Largest share that it may take of a GPU's free memory, and of what a process may use of it."""

_PADDING_SHARE = 8  # shift by up to an eighth of the side: the usual 4 px of 32
_LARGEST_MARGIN = 1.25  # images of one size up to so many sides are cropped, larger ones resized
FIELD_BITS = 24
UNCROPPED: tuple[Augmentation, ...] = ("none", "flip")
FLIPPED: tuple[Augmentation, ...] = ("flip", "crop-flip")
MAX_ZOOM = 0.9  # whatever strength says
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
        dtype: Of the images: float32, or what a network autocasts to.
        rotation: Largest turn either way, as a share of a full one.
        zoom: Largest share of a side that is shown more or less.
        limit: Bytes that the process may use of a GPU; `None`: all that are free.

    Attributes:
        strength: Of the augmentation: its largest shift, turn and zoom, relative to the usual; 0
            changes nothing. Crops cannot leave the image, so there more than 1 is as 1.
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
        rotation: float = 0.0,
        zoom: float = 0.0,
        limit: int | None = None,
    ) -> None:
        self._store = store
        self._device = device
        self.side, self.mean, self.std = side, mean, std
        self._augmentation = augmentation
        self._seed = seed
        self._limit = limit
        self._warps = Warps(seed, rotation, zoom)
        self._normalization = Normalization(mean, std, device=device, dtype=dtype)
        self.strength = 1.0
        self._drawn, self._drawn_starts = -1, (-1, 0.0, 0)
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        self._brought: tuple[Tensor, torch.device, Tensor] | None = None
        self._lock = Lock()  # one batch may be made ahead, in a thread
        height, width = store.shape or (0, 1)
        self._whole = height == width and not side < height <= _LARGEST_MARGIN * side
        self._full = self._level_of(store, side)
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
        return self._finished(self._gathered(indices, epoch, resolution), resolution)

    def training_batches(
        self, batches: Iterable[Tensor], *, epoch: int, resolution: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`training_batch` for each tensor of indices.

        Images that have to be brought to a GPU are gathered and copied one batch ahead.
        """
        if self._device.type == "cpu" or self.makes_there(resolution):
            for indices in batches:
                yield self.training_batch(indices, epoch=epoch, resolution=resolution)
            return
        make = partial(self._gathered, epoch=epoch, resolution=resolution)
        for gathered in made_ahead(make, batches, self._device):
            yield self._finished(gathered, resolution)

    def makes_there(self, resolution: int) -> bool:
        """Whether the images are on a GPU, which makes training batches of them by itself."""
        return self._level(resolution).here

    def _gathered(self, indices: Tensor, epoch: int, resolution: int) -> tuple[Tensor, ...]:
        """Pixels of training images, cropped or shifted, labels, whether to mirror each, if any is,
        and what turns it, if anything does.

        All on the device, or on its way there.
        """
        with self._lock:
            level = self._level(resolution)
            if self._augmentation != "none":
                self._draw(epoch)
            if self._augmentation in UNCROPPED:
                pixels = self._still(level, indices)
            elif self._whole:
                pixels = _shift(self._whole_ones(level, indices), *self._starts(level, indices))
            else:
                pixels = self._crop(level, indices, self._draws)
            made = [pixels, self._chosen("labels", level, indices)]
            if self._augmentation in FLIPPED:
                made.append(self._chosen("flip", level, indices))
            if self._warps:
                made.append(sent(self._warps.draw(epoch, indices, self.strength), self._device))
            return tuple(made)

    def _finished(self, gathered: tuple[Tensor, ...], resolution: int) -> tuple[Tensor, Tensor]:
        pixels, labels, *drawn = gathered
        if self._augmentation in FLIPPED:
            pixels = flip(pixels, drawn.pop(0))
        return self._normalize(pixels, resolution, *drawn), labels

    def evaluation_batch(self, indices: Tensor, *, resolution: int) -> tuple[Tensor, Tensor]:
        """As `training_batch`, without anything random: whole images, or their middle."""
        pixels = self._still(self._full, indices)
        labels = self._chosen("labels", self._full, indices)
        return self._normalize(pixels, resolution), labels

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
            self._reduced[resolution] = self._level_of(store, resolution)
        return self._reduced[resolution]

    def _level_of(self, store: ImageStore, side: int) -> _Level:
        """The images of a store, on the GPU if they fit, and can be cropped there."""
        pixels = store.pixels
        room: float = RESIDENT_BYTES
        if self._device.type == "cuda":
            room = min(room, RESIDENT_SHARE * torch.cuda.mem_get_info(self._device)[0])
        if self._limit is not None:
            room = min(room, RESIDENT_SHARE * self._limit)
        fits = self._device.type != "cpu" and 0 < len(pixels) <= room
        if fits and (self._whole or int(store.sizes.min()) >= side):  # smaller ones are enlarged
            pixels = pixels.to(self._device)
        return _Level(store, side, pixels, whole=self._whole)

    def _still(self, level: _Level, indices: Tensor) -> Tensor:
        if self._whole:
            return self._whole_ones(level, indices)
        return self._crop(level, indices, None)

    def _whole_ones(self, level: _Level, indices: Tensor) -> Tensor:
        """Some whole images, on the device; uint8 (n, height, width, 3)."""
        if level.images is None:
            every = [level.store.image(index) for index in indices.tolist()]
            return sent(torch.stack(every), self._device)
        found = level.images.index_select(0, self._at(level.pixels.device, indices))
        return found if level.here else sent(found, self._device)

    def _draw(self, epoch: int) -> None:
        """Draw for all samples of an epoch at once: between steps each small operation counts."""
        if epoch != self._drawn:
            self._drawn = epoch
            self._draws = draw(self._seed, epoch, torch.arange(len(self._store)))
            self._tables = {key: one for key, one in self._tables.items() if key[0] == "labels"}

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
            self._tables = {key: one for key, one in self._tables.items() if key[0] != "starts"}
        return self._chosen("starts", level, indices), pad

    def _chosen(self, name: str, level: _Level, indices: Tensor) -> Tensor:
        """What is known of each sample for some of them, on the device; looked up where images are.

        It is brought there once, so that a batch takes its indices alone across.
        """
        place = level.pixels.device
        if (name, place) not in self._tables:
            if name == "labels":
                every = self._store.labels
            else:
                every = self._draws.flip if name == "flip" else self._all_starts
            self._tables[name, place] = sent(every, place)
        found = self._tables[name, place].index_select(0, self._at(place, indices))
        return found if level.here else sent(found, self._device)

    def _at(self, place: torch.device, indices: Tensor) -> Tensor:
        """Indices where they are looked up; those of one batch are brought there once."""
        brought = self._brought
        if brought is None or brought[0] is not indices or brought[1] != place:
            brought = self._brought = indices, place, sent(indices, place)
        return brought[2]

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
        if level.here:
            rows = sent(store.rows(indices, tops, lefts, side), self._device)
            return stretches_of(level.pixels, rows, side)
        if bool((edges == side).all()):
            return sent(store.squares(indices, tops, lefts, side), self._device)
        pixels = torch.empty(len(indices), side, side, 3, dtype=torch.uint8)
        for position, edge in enumerate(edges.tolist()):
            one = slice(position, position + 1)
            square = store.squares(indices[one], tops[one], lefts[one], edge)
            pixels[one] = square if edge == side else resize(square, side)
        return sent(pixels, self._device)

    def _normalize(self, pixels: Tensor, resolution: int, turns: Tensor | None = None) -> Tensor:
        """Resized and normalized images (n, 3, resolution, resolution) of (n, side, side, 3),
        turned in between if ``turns`` say how.
        """
        if pixels.shape[1] != resolution:
            pixels = resize(pixels, resolution)
        if turns is not None:
            pixels = warp(pixels, turns)
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
            factor = (1 / (255 * self._std)).repeat(side * side)
            offset = (-self._mean / self._std).repeat(side * side)
            self._factors[side] = sent(factor, self._device), sent(offset, self._device)
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
        pixels: Of the store, here or on the GPU.
        whole: Whether they are used whole.
    """

    store: ImageStore
    side: int
    pixels: Tensor
    whole: bool

    @property
    def here(self) -> bool:
        """Whether they are on the GPU that computes."""
        return self.pixels.device.type != "cpu"

    @cached_property
    def images(self) -> Tensor | None:
        """All of them, uint8 (N, height, width, 3), where they are used whole."""
        if not self.whole or self.store.images is None:
            return None
        return self.pixels.view(self.store.images.shape)


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
    state = split_mix(_start(seed, epoch), indices.numpy().astype(np.uint64))
    mask = np.uint64(2**FIELD_BITS - 1)
    vertical = (state & mask).astype(np.int64)
    horizontal = (state >> np.uint64(FIELD_BITS) & mask).astype(np.int64)
    flip = (state >> np.uint64(63)).astype(np.bool_)
    return Draws(*map(torch.from_numpy, (vertical, horizontal, flip)))


@dataclass(frozen=True)
class Warps:
    """Turns and zooms of images, drawn apart from all else: false where there are none.

    Attributes:
        seed: Of the job.
        rotation: Largest turn either way, as a share of a full one.
        zoom: Largest share of a side that is shown more or less.
    """

    seed: int
    rotation: float
    zoom: float

    def __bool__(self) -> bool:
        return bool(self.rotation or self.zoom)

    def draw(self, epoch: int, indices: Tensor, strength: float) -> Tensor:
        """Where each place of a changed image is in the image itself, for `warp`.

        Like `draw`, of nothing but seed, epoch and sample index, from another start, so that no
        draw of theirs is one of these.

        Args:
            epoch: Zero-based.
            indices: Of samples, int64 (n,), on the CPU.
            strength: Of the largest turn and zoom.

        Returns:
            Scale times cosine and sine of the angle, float32 (n, 2).
        """
        start = split_mix(_start(self.seed, epoch), np.array([2**64 - 1], np.uint64))
        state = split_mix(start, indices.numpy().astype(np.uint64))
        mask = np.uint64(2**FIELD_BITS - 1)
        turn, size = (
            torch.from_numpy((field & mask).astype(np.float64)) / (2 ** (FIELD_BITS - 1)) - 1
            for field in (state, state >> np.uint64(FIELD_BITS))
        )
        angles = 2 * math.pi * strength * self.rotation * turn
        scales = 1 + min(MAX_ZOOM, strength * self.zoom) * size
        return torch.stack((scales * angles.cos(), scales * angles.sin()), dim=1).float()


def _start(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """From where an epoch's draws start."""
    return split_mix(np.array([seed % 2**64], np.uint64), np.array([epoch], np.uint64))


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
    rows = starts[:, None] + _row_starts(
        count, padded.stride(0), side, padded.stride(1), images.device, _stream(images.device)
    )
    return stretches_of(padded.view(-1), rows.view(-1), side)


def _stream(device: torch.device) -> int:
    """In which the device is given work now."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@lru_cache(16)  # a GPU starts each small operation by itself
def _row_starts(
    images: int, image_bytes: int, rows: int, row_bytes: int, place: torch.device, stream: int
) -> Tensor:
    """Where each row of each image of a batch starts in it, in bytes: int64 (images, rows).

    One for each ``stream``, as another would not wait until it is there.
    """
    del stream
    firsts = torch.arange(0, images * image_bytes, image_bytes)
    return sent(firsts[:, None] + torch.arange(0, rows * row_bytes, row_bytes), place)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """``images`` (n, side, side, 3) of which the ``chosen`` ones are mirrored left to right.

    On a GPU all are mirrored and some of them taken: how many are chosen only the GPU knows. On
    the CPU it is done in place.
    """
    if images.device.type != "cpu":
        return torch.where(chosen.view(-1, 1, 1, 1), images.flip(2), images)
    where = chosen.nonzero().squeeze(1)
    return images.index_copy_(0, where, images.index_select(0, where).flip(2))


def warp(images: Tensor, turns: Tensor) -> Tensor:
    """Images (n, side, side, 3) turned and zoomed as `Warps.draw` says, in float32.

    Bilinear; what comes in from outside is mirrored at the border. With places from -1 to 1, place
    (x, y) shows what was at (c x - s y, s x + c y). All of it is done value by value, so that
    an image comes out the same in any batch.
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
    """Bilinear, antialiased: (n, side, side, 3) of square (n, any, any, 3).

    On the CPU uint8 stays uint8, which is three times as fast as float and rounds by at most half a
    grey level; GPUs resize float alone.
    """
    planes = images.permute(0, 3, 1, 2)
    if images.device.type != "cpu":
        planes = planes.float()
    resized = functional.interpolate(planes, size=(side, side), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)
