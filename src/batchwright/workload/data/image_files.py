"""Images of data sets too large for the cache: they stay in their files.

In each epoch loader processes decode them, at the smallest scale that the resolution allows, and
crop the square that is trained on. The squares of a batch are resized, mirrored and normalized on
the device; resized crops, of which each has another size, are resized by the loader processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from batchwright.errors import DataError
from batchwright.records import Augmentation
from batchwright.workload.data.copying import copy_to_device
from batchwright.workload.data.decoding import UnreadableImageError, decode_part, decode_square
from batchwright.workload.data.loading import (
    LoadingMeter,
    MeteredItems,
    batches_of,
    end_loaders,
    ignore_stop_signals,
)
from batchwright.workload.data.pipeline import (
    FLIPPED,
    SHIFTED,
    UNCROPPED,
    Normalization,
    Warps,
    flip,
    resize,
    shifted,
    shifts,
    warp,
)
from batchwright.workload.data.random_numbers import FIELD_BITS, draw
from batchwright.workload.data.resized_crops import CROP_SCALE, Part, ResizedCrops
from batchwright.workload.data.store import free_bytes

STORE_SHARE = 0.5
"""Share of the free disk that decoded images may take; larger data sets stay in their files."""

_Triple = tuple[float, float, float]
_Place = tuple[float, float] | Part | None
_Key = tuple[int, int, _Place]  # index, resolution, place of the square
Squares = tuple[Tensor, Tensor, Tensor]  # bytes of all squares, their sides, their labels


def fits_the_disk(stored_bytes: int) -> bool:
    """Whether ``stored_bytes`` of decoded images may be kept in the cache."""
    return stored_bytes <= STORE_SHARE * free_bytes()


@dataclass(frozen=True)
class FolderFiles:
    """Reads whole files of a folder, by their names in it."""

    root: Path

    def __call__(self, name: str) -> bytes:
        """The file's content."""
        return (self.root / name).read_bytes()


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """The images of one part of a data set that stay encoded, where they are.

    An item is (image, label): the middle of the image at ``side`` pixels, float in [0, 1],
    normalized.

    Args:
        root: The data set's place, such as its folder.
        names: Names of the images in it, in order.
        labels: int64 (N,), class of each image.
        side: Highest training resolution, in pixels.
        mean: Mean of each channel, over pixels in [0, 1].
        std: Standard deviation of each channel.
        whole: Whether all are squares without margin around ``side``, which are shifted in training
            instead of cropped.
        read: Returns the encoded image of a name; unset: names are files of the folder.

    ``labels``, ``side``, ``mean``, ``std`` and ``whole`` are attributes, too.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Tensor,
        *,
        side: int,
        mean: _Triple,
        std: _Triple,
        whole: bool = False,
        read: Callable[[str], bytes] | None = None,
    ) -> None:
        self._root, self._names, self._read = root, names, read or FolderFiles(root)
        self.labels, self.side, self.mean, self.std = labels, side, mean, std
        self.whole = whole

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        square = resize(self.square(index, self.side, None)[None], self.side)
        cpu = torch.device("cpu")
        normalize = Normalization(self.mean, self.std, device=cpu, dtype=torch.float32)
        return normalize(square)[0], int(self.labels[index])

    @property
    def places(self) -> list[str]:
        """Where each image is: its name below the data set's place."""
        return [str(self._root / name) for name in self._names]

    def square(self, index: int, resolution: int, place: _Place) -> Tensor:
        """A square of an image, uint8 (m, m, 3).

        Args:
            index: Of the image.
            resolution: Wanted side, in pixels.
            place: Where it is, as for `decode_square`, or a part that is resized, as for
                `decode_part`.

        Raises:
            DataError: The file cannot be read.
        """
        name, sides = self._names[index], {"top_resolution": self.side, "resolution": resolution}
        try:
            data = self._read(name)
            if callable(place):
                part = torch.from_numpy(decode_part(data, **sides, part=place))
                # Three times as fast as Pillow, which has no vector code.
                return resize(part[None], resolution)[0]
            return torch.from_numpy(decode_square(data, **sides, place=place))
        except (OSError, UnreadableImageError) as error:
            raise DataError(
                f"unreadable image {self._root / name}: {error}; put it back as it was and go on "
                "with --resume, or begin anew with unreadable=skip, which leaves such images out"
            ) from error


class FilePipeline:
    """Batches of `ImageFiles`, as `ImagePipeline` makes them of a store.

    Crops, shifts and mirroring use the random numbers of `ImagePipeline`, so a sample is a function
    of seed, epoch, index and resolution.

    Args:
        files: The images.
        device: Device of the batches.
        augmentation: Kind of random changes of training images.
        seed: Seed of the random changes.
        dtype: Format of the images.
        loaders: Number of loader processes; 0: this process decodes.
        ahead: Batches that each loader process loads ahead.
        rotation: As for `ImagePipeline`.
        zoom: As for `ImagePipeline`.
        crop_scale: As for `ImagePipeline`.

    Attributes:
        shifts: Whether it shifts training images as far as ``strength`` says: it does.
        files: The images.
        loading: Counts and times the decoded batches.
        strength: As for `ImagePipeline`.
    """

    shifts = True

    def __init__(
        self,
        files: ImageFiles,
        *,
        device: torch.device,
        augmentation: Augmentation,
        seed: int,
        dtype: torch.dtype = torch.float32,
        loaders: int = 2,
        ahead: int = 2,
        rotation: float = 0.0,
        zoom: float = 0.0,
        crop_scale: float = CROP_SCALE,
    ) -> None:
        self._warps = Warps(seed, rotation, zoom)
        self._resized_crops = ResizedCrops(seed, crop_scale)
        self.files, self.strength = files, 1.0
        self.loading = loading = LoadingMeter(loaders)
        self._device, self._augmentation, self._seed = device, augmentation, seed
        self._normalization = Normalization(files.mean, files.std, device=device, dtype=dtype)
        self._keys = _Keys()
        self._cut = _Squares(files)
        metered = MeteredItems(self._cut, _together, loading)
        self._make_loader = partial(
            DataLoader,
            metered,
            batch_sampler=self._keys,
            num_workers=loaders,
            prefetch_factor=ahead if loaders else None,
            collate_fn=metered.collate,
            worker_init_fn=_begin_loading,
            pin_memory=device.type == "cuda",
            persistent_workers=loaders > 0,
            generator=torch.Generator(),  # else each epoch would draw from the global generator
        )
        self._loader = self._make_loader()

    def __len__(self) -> int:
        return len(self.files)

    def close(self) -> None:
        """End the loader processes; asking for batches again starts new ones."""
        end_loaders(self._loader)
        self._loader = self._make_loader()

    def description(self) -> dict[str, Any]:
        """Image side in pixels, and the normalization of RGB values in [0, 1]."""
        files = self.files
        return {"side": files.side, "mean": list(files.mean), "std": list(files.std)}

    def makes_on_gpu(self, resolution: int) -> bool:
        """No: images are decoded on the CPU."""
        del resolution
        return False

    def training(
        self, batches: Iterable[Tensor], epoch: int, resolution: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`batches` with random changes."""
        return self.batches(batches, epoch=epoch, resolution=resolution)

    def evaluation(
        self, batches: Iterable[Tensor], resolution: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`batches` without random changes; by default at the highest resolution."""
        return self.batches(batches, epoch=None, resolution=resolution or self.files.side)

    def batches(
        self, batches: Iterable[Tensor], *, epoch: int | None, resolution: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels for each tensor of indices, in order, decoded ahead by the loaders.

        Args:
            batches: Indices of each batch, int64 (n,).
            epoch: Zero-based; ``None`` for evaluation, without random changes.
            resolution: Image side, in pixels.

        Yields:
            Images (n, 3, resolution, resolution), channels last, normalized; labels int64 (n,).
        """
        asked: list[Tensor] = []  # indices of the batches that are being loaded
        keys_of, loading = self._keys_maker(epoch, resolution), self.loading

        # Does not refer to the pipeline: in a reference cycle with its loaders, these would be
        # collected before they could be ended, and each be waited for in vain.
        def keys() -> Iterator[list[_Key]]:
            for indices in batches:
                asked.append(indices)
                loading.asked += 1
                yield keys_of(indices)

        self._keys.batches = keys()
        for squares in batches_of(self._loader):
            if isinstance(squares, DataError):
                raise squares
            yield self._finished(squares, asked.pop(0), epoch, resolution)

    def single(self, indices: Tensor, epoch: int, resolution: int) -> tuple[Tensor, Tensor]:
        """One training batch, decoded in this process."""
        keys = self._keys_maker(epoch, resolution)(indices)
        squares = _together([self._cut[key] for key in keys])
        if isinstance(squares, DataError):
            raise squares
        return self._finished(squares, indices, epoch, resolution)

    def _keys_maker(self, epoch: int | None, resolution: int) -> Callable[[Tensor], list[_Key]]:
        """A function that makes the keys of a batch from its indices."""
        if epoch is None or self._augmentation in UNCROPPED:
            return lambda indices: [(index, resolution, None) for index in indices.tolist()]
        seed, strength = self._seed, min(1.0, self.strength)
        if self._augmentation == "resized-crop":
            parts_of = self._resized_crops.parts
            return lambda indices: [
                (index, resolution, part)
                for index, part in zip(
                    indices.tolist(), parts_of(epoch, indices, strength), strict=True
                )
            ]

        def drawn(indices: Tensor) -> list[_Key]:
            """Random positions of crops; with less strength they keep nearer to the middle."""
            draws = draw(seed, epoch, indices)
            down, right = (
                0.5 + strength * (field.double() / (2**FIELD_BITS - 1) - 0.5)
                for field in (draws.vertical, draws.horizontal)
            )
            places = zip(down.tolist(), right.tolist(), strict=True)
            indexed = zip(indices.tolist(), places, strict=True)
            return [(index, resolution, place) for index, place in indexed]

        return drawn

    def _finished(
        self, squares: Squares, indices: Tensor, epoch: int | None, resolution: int
    ) -> tuple[Tensor, Tensor]:
        """Images (n, 3, resolution, resolution), resized, changed and normalized; and labels."""
        flat, sides, labels = squares
        images = _resized(flat.to(self._device, non_blocking=True), sides, resolution)
        if epoch is not None:
            images = self._changed(images, indices, epoch)
        return self._normalization(images), labels.to(self._device, non_blocking=True)

    def _changed(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Images (n, resolution, resolution, 3), at random shifted, mirrored and turned."""
        draws, place = draw(self._seed, epoch, indices), self._device
        if self.files.whole and self._augmentation in SHIFTED:
            full, side = self.files.side, images.shape[1]
            starts, pad = shifts(draws, strength=self.strength, full=full, side=side)
            images = shifted(images.contiguous(), copy_to_device(starts, place), pad)
        if self._augmentation in FLIPPED:
            images = flip(images, copy_to_device(draws.flip, place))
        if self._warps:
            turns = self._warps.draw(epoch, indices, self.strength)
            images = warp(images, copy_to_device(turns, place))
        return images


def _resized(flat: Tensor, sides: Tensor, resolution: int) -> Tensor:
    """The squares stored one after another in ``flat``, resized: (n, resolution, resolution, 3)."""
    first = int(sides[0])
    if bool((sides == first).all()):  # as of photographs by one camera
        same = flat.view(-1, first, first, 3)
        return same if first == resolution else resize(same, resolution)
    parts = flat.split((sides**2 * 3).tolist())
    done: list[Tensor] = []
    places: list[Tensor] = []
    for side in sides.unique().tolist():
        where = (sides == side).nonzero().squeeze(1)
        same = torch.stack([parts[i].view(side, side, 3) for i in where.tolist()])
        done.append(same if side == resolution else resize(same, resolution))
        places.append(where)
    back = copy_to_device(torch.cat(places).argsort(), flat.device)
    return torch.cat([one.float() if flat.is_cuda else one for one in done])[back]


def _begin_loading(worker: int) -> None:
    """Have a loader process ignore stop signals, and keep warnings out of the progress display."""
    ignore_stop_signals(worker)
    warnings.simplefilter("ignore")  # Pillow warns of odd metadata


_Item = tuple[Tensor, int] | DataError


class _Squares(Dataset[_Item]):
    """The data set of the loader processes: a decoded square for each key, or its error.

    An error that is raised in a loader process would arrive with a whole traceback for a message.
    """

    def __init__(self, files: ImageFiles) -> None:
        self._files = files

    def __getitem__(self, key: _Key) -> _Item:
        index, resolution, place = key
        try:
            return self._files.square(index, resolution, place), int(self._files.labels[index])
        except DataError as error:
            return error


def _together(items: list[_Item]) -> Squares | DataError:
    """Squares of several sizes as one tensor: each tensor of a batch opens a file on its way."""
    for item in items:
        if isinstance(item, DataError):
            return item
    squares, labels = zip(*cast("list[tuple[Tensor, int]]", items), strict=True)
    sides = torch.tensor([len(square) for square in squares])
    return torch.cat([square.reshape(-1) for square in squares]), sides, torch.tensor(labels)


class _Keys(Sampler[list[_Key]]):
    """A batch sampler that gives the loaders the keys of the current epoch."""

    def __init__(self) -> None:
        self.batches: Iterable[list[_Key]] = ()

    def __iter__(self) -> Iterator[list[_Key]]:
        return iter(self.batches)
