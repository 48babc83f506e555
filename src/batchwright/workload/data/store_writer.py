"""Writes a store of decoded images: its files, their digests, and a header with the facts."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import Field

from batchwright.errors import FileError
from batchwright.records import DataFacts, Record
from batchwright.storage.files import sync

Part = Literal["train", "val"]
"""A part of a data set: training or held-out images."""

PARTS: tuple[Part, Part] = ("train", "val")
PIXELS = ".pixels"
"""Suffix of files with decoded images."""

CACHE_VARIABLE = "BATCHWRIGHT_CACHE"
"""Environment variable that names the folder for decoded images."""

_Triple = tuple[float, float, float]


class StoredFile(Record):
    """Size and digest by which a file of a store is verified."""

    bytes: int = Field(ge=0)
    sha256: str


class Header(Record):
    """The header of a store: facts of the data, statistics of the pixels, and the other files."""

    format: Literal["batchwright-store/1"] = "batchwright-store/1"
    facts: DataFacts
    mean: tuple[float, float, float] = Field(description="Over training pixels in [0, 1].")
    std: tuple[float, float, float] = Field(description="As `mean`; at least one grey level.")
    files: dict[str, StoredFile]


def array_bytes(values: npt.NDArray[np.generic]) -> memoryview:
    """The bytes of an array in row-major order; copied only if its layout is another."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


class _HashedFile:
    """A file that computes the digest of its content as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: IO[bytes] = path.open("wb")
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, values: npt.NDArray[np.generic]) -> None:
        data = array_bytes(values)
        self._stream.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> StoredFile:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return StoredFile(bytes=self._bytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        self._stream.close()


class StoreWriter:
    """Writes the decoded images of a data set, in the order in which they are added to each part.

    Args:
        folder: The store's folder, which exists and is empty.
        parts: Parts of the data set that are written.
    """

    def __init__(self, folder: Path, parts: Sequence[Part] = PARTS) -> None:
        self._folder = folder
        with clear_errors(folder.parent):
            self._pixels = {part: _HashedFile(folder / f"{part}{PIXELS}") for part in parts}
        self._index: dict[Part, list[npt.NDArray[np.int64]]] = {part: [] for part in parts}
        # Times each grey level occurs in the red, green and blue of the training images.
        self._histogram = np.zeros((3, 256), np.int64)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._pixels.values():
            with suppress(OSError):  # open only after an error, which has been raised already
                file.close()

    def add(
        self, part: Part, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.integer]
    ) -> None:
        """Append images of one size.

        Args:
            part: The images' part.
            pixels: uint8 (n, height, width, 3), RGB.
            labels: int (n,), the images' classes.
        """
        count, height, width, _ = pixels.shape
        rows = np.empty((count, 3), "<i8")
        rows[:, 0], rows[:, 1], rows[:, 2] = labels, height, width
        self._index[part].append(rows)
        if part == "train":
            self._histogram += _histogram(pixels)
        with clear_errors(self._folder.parent):
            self._pixels[part].write(pixels)

    def add_file(self, part: Part, label: int, height: int, width: int) -> None:
        """Append the class and size, in pixels, of an image that stays in its file."""
        self._index[part].append(np.array([[label, height, width]], "<i8"))

    def count_pixels(self, pixels: npt.NDArray[np.uint8]) -> None:
        """Count training pixels, uint8 (n, height, width, 3), for their mean and deviation."""
        self._histogram += _histogram(pixels)

    def labels(self, part: Part) -> npt.NDArray[np.int64]:
        """Classes of the images added to ``part`` so far: int64 (n,)."""
        return np.concatenate([rows[:, 0] for rows in self._index[part]] or [np.empty(0, np.int64)])

    def finish(self, facts: DataFacts) -> None:
        """Write the index and, last, the header; sync all files."""
        # Whole numbers are summed, so the order of the images does not matter. The deviation is at
        # least one grey level, so that a constant channel can be divided by it.
        level = np.arange(256)
        count = self._histogram.sum(1)
        mean = self._histogram @ level / count
        variance = np.maximum(self._histogram @ level**2 / count - mean**2, 1.0)
        mean, std = _triple(mean / 255), _triple(np.sqrt(variance) / 255)
        with clear_errors(self._folder.parent):
            files = {file.path.name: file.finish() for file in self._pixels.values()}
            for part in self._index:
                index = _HashedFile(self._folder / f"{part}.index")
                index.write(np.concatenate(self._index[part]))
                files[index.path.name] = index.finish()
            header = Header(facts=facts, mean=mean, std=std, files=files)
            with (self._folder / "header.json").open("w") as stream:
                stream.write(header.model_dump_json(indent=1))
                stream.flush()
                os.fsync(stream.fileno())
            sync(self._folder)


def _histogram(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Number of pixels of each grey level in each channel, int64 (3, 256), counted by Pillow."""
    rows = np.ascontiguousarray(pixels).reshape(-1, pixels.shape[2], 3)
    return np.array(Image.fromarray(rows).histogram(), np.int64).reshape(3, 256)


def _triple(values: npt.NDArray[np.float64]) -> _Triple:
    red, green, blue = values.tolist()
    return red, green, blue


@contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Inside, errors of the file system become a `FileError` that names the cache."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "is full" if full else "cannot be used"
        raise FileError(
            f"the image cache {what}: {folder}: {error.strerror or error}; "
            f"set {CACHE_VARIABLE} to a folder that you can write, with enough room"
        ) from error
