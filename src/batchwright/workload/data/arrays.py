"""Data sets that are read into memory as arrays: scikit-learn's digits, CIFAR-10 and CIFAR-100.

CIFAR: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009;
https://www.cs.toronto.edu/~kriz/cifar.html, "python version".
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchwright.errors import DataError
from batchwright.records import DataFacts, Job
from batchwright.workload.data.listing import largest_share
from batchwright.workload.data.sources import ImageData, open_decoded
from batchwright.workload.data.store import Progress
from batchwright.workload.data.store_writer import PARTS, Part, StoreWriter, array_bytes

Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""Images, uint8 (N, height, width, 3), and their labels, int64 (N,)."""

_DIGITS_HELD_OUT = 36  # of each of the ten digits
_SIDE = 32  # of a CIFAR image, in pixels


@dataclass(frozen=True)
class _ArrayData:
    """A data set small enough to be read into memory as a whole."""

    name: str
    classes: tuple[str, ...]
    split: str
    parts: dict[Part, Arrays]


def _open_arrays(
    recipe: Mapping[str, object],
    read: Callable[[], _ArrayData],
    progress: Progress | None,
    verify: bool,
) -> ImageData:
    def build(writer: StoreWriter) -> DataFacts:
        data = read()
        digest = hashlib.sha256(json.dumps(data.classes).encode())
        for part in PARTS:
            pixels, labels = data.parts[part]
            writer.add(part, pixels, labels)
            digest.update(part.encode())
            digest.update(array_bytes(labels.astype("<i8")))
            digest.update(array_bytes(pixels))
        return DataFacts(
            name=data.name,
            digest=digest.hexdigest(),
            train_samples=len(data.parts["train"][1]),
            val_samples=len(data.parts["val"][1]),
            split=data.split,
            classes=data.classes,
            side=data.parts["train"][0].shape[1],
            largest_class=largest_share(data.parts["val"][1]),
        )

    return open_decoded(recipe, build, progress, verify)


def open_digits(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """Scikit-learn's handwritten digits."""
    del place
    return _open_arrays({"data": job.data}, _read_digits, progress, verify)


def _read_digits() -> _ArrayData:
    """Handwritten digits, 8 x 8 pixels of 17 grey levels (UCI, Optical Recognition of Digits).

    The split is part of the data set, as CIFAR's is, so no job key moves it.
    """
    from sklearn.datasets import load_digits  # slow to import, and needed once per cache

    digits = load_digits()
    images, labels = digits.images, digits.target.astype(np.int64)
    grey = ((images.astype(np.int64) * 255 + 8) // 16).astype(np.uint8)
    pixels = np.repeat(grey[..., None], 3, axis=3)
    # Chosen by a hash, not by a random generator, whose numbers a library version might change.
    draw = [hashlib.sha256(b"%d" % index).digest() for index in range(len(labels))]
    held_out = np.zeros(len(labels), bool)
    for digit in range(10):
        mine = np.flatnonzero(labels == digit).tolist()
        held_out[sorted(mine, key=draw.__getitem__)[:_DIGITS_HELD_OUT]] = True
    return _ArrayData(
        name="digits",
        classes=tuple(map(str, range(10))),
        split=f"{_DIGITS_HELD_OUT} images of each digit, the same in every job",
        parts={
            "train": (pixels[~held_out], labels[~held_out]),
            "val": (pixels[held_out], labels[held_out]),
        },
    )


def open_cifar(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """CIFAR-10 or CIFAR-100, from the folder of its original files or its parent."""
    kind = job.data.partition(":")[0]
    edition = EDITIONS[kind]
    folder = find_folder(edition, Path(place).expanduser())

    def read() -> _ArrayData:
        classes = read_classes(edition, folder)
        parts: dict[Part, Arrays] = {}
        for done, part in enumerate(PARTS):
            if progress:
                progress(done, len(PARTS), f"reading {edition.title}")
            parts[part] = read_part(edition, folder, part, len(classes))
        if progress:
            progress(len(PARTS), len(PARTS), f"reading {edition.title}")
        return _ArrayData(kind, classes, "the original test images", parts)

    states = {name: (folder / name).stat() for name in edition.files}
    recipe = {
        "data": kind,
        "root": str(folder.resolve()),
        "files": {name: [one.st_size, one.st_mtime_ns] for name, one in states.items()},
    }
    return _open_arrays(recipe, read, progress, verify)


# ------------------------------------------------------------------------------- the files of CIFAR


@dataclass(frozen=True)
class Edition:
    """CIFAR-10 or CIFAR-100.

    Attributes:
        title: The published name.
        folder: Name of the usual folder.
        train: Names and published sizes, in bytes, of the files of training images.
        val: Names and sizes of the files of test images.
        names: Name and size of the file of class names.
        label_key: Key of the labels in a file of images.
        name_key: Key of the class names in their file.
    """

    title: str
    folder: str
    train: dict[str, int]
    val: dict[str, int]
    names: dict[str, int]
    label_key: str
    name_key: str

    @property
    def files(self) -> dict[str, int]:
        """Name and published size in bytes of every file."""
        return self.train | self.val | self.names


EDITIONS = {
    "cifar10": Edition(
        title="CIFAR-10",
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": 31_035_704,
            "data_batch_2": 31_035_320,
            "data_batch_3": 31_035_999,
            "data_batch_4": 31_035_696,
            "data_batch_5": 31_035_623,
        },
        val={"test_batch": 31_035_526},
        names={"batches.meta": 158},
        label_key="labels",
        name_key="label_names",
    ),
    "cifar100": Edition(
        title="CIFAR-100",
        folder="cifar-100-python",
        train={"train": 155_249_918},
        val={"test": 31_049_707},
        names={"meta": 1_473},
        label_key="fine_labels",
        name_key="fine_label_names",
    ),
}


def find_folder(edition: Edition, path: Path) -> Path:
    """The folder with the edition's files: ``path`` itself, or the usual folder inside it."""
    if path.is_file():
        raise DataError(f"{path} is a file: unpack it and give the folder {edition.folder}")
    if not path.exists():
        raise DataError(f"{path} does not exist: give the folder {edition.folder} or its parent")
    found = [
        folder
        for folder in (path, path / edition.folder)
        if any((folder / name).is_file() for name in edition.train)
    ]
    if not found:
        raise DataError(
            f"{path} holds no {edition.title}: neither it nor {edition.folder}/ in it has the "
            f"file {next(iter(edition.train))}; unpack the python version from "
            "https://www.cs.toronto.edu/~kriz/cifar.html"
        )
    for name in edition.files:
        if not (found[0] / name).is_file():
            raise DataError(f"{found[0]} has no file {name}: unpack {edition.title} again")
    return found[0]


def read_classes(edition: Edition, folder: Path) -> tuple[str, ...]:
    """Class names in label order."""
    (name,) = edition.names
    names = _unpickle(edition, folder / name).get(edition.name_key)
    if not isinstance(names, list) or not names:
        raise DataError(f"{folder / name} has no list {edition.name_key}")
    return tuple(_text(name) for name in names)


def read_part(edition: Edition, folder: Path, part: Part, classes: int) -> Arrays:
    """All images and labels of one part, in the order of the files."""
    files = edition.train if part == "train" else edition.val
    pieces = [_read_batch(edition, folder / name, classes) for name in files]
    pixels, labels = zip(*pieces, strict=True)
    return np.concatenate(pixels), np.concatenate(labels)


def _read_batch(edition: Edition, path: Path, classes: int) -> Arrays:
    batch = _unpickle(edition, path)
    data, labels = batch.get("data"), batch.get(edition.label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        raise DataError(f"{path} has no uint8 array `data`: is it a {edition.title} file?")
    values = 3 * _SIDE * _SIDE
    if data.ndim != 2 or data.shape[1] != values or not len(data):
        raise DataError(f"{path}: `data` has shape {data.shape} instead of (images, {values})")
    if not isinstance(labels, list) or len(labels) != len(data):
        raise DataError(f"{path} has no list `{edition.label_key}` of {len(data):,} labels")
    if not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise DataError(f"{path}: `{edition.label_key}` must be whole numbers below {classes}")
    planes = data.reshape(-1, 3, _SIDE, _SIDE)  # red, then green, then blue
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, np.int64)


# ----------------------------------------------------------------------------------------- pickles

# The only names that these files use, besides numbers, text, lists and dictionaries. A pickle may
# call anything that it can name, so it can name nothing else. The files say numpy.core, newer
# releases of numpy _core.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ForeignNameError(Exception):
    """A pickle uses a name that is not admitted."""


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise _ForeignNameError(f"{module}.{name}")
        return _ADMITTED[module, name]


def _unpickle(edition: Edition, path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR file, with its keys as text."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    # Python 2 wrote these files; its strings are loaded as bytes.
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except _ForeignNameError as error:
        raise DataError(f"{path} is refused: it calls {error}, which no CIFAR file does") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        expected = edition.files[path.name]
        cause = (
            f"it has {len(data):,} bytes, the original {expected:,}"
            if len(data) != expected
            else " ".join(str(error).split()) or type(error).__name__
        )
        raise DataError(
            f"{path} is truncated or damaged: {cause}; unpack {edition.title} again"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no dictionary: is it a {edition.title} file?")
    return {_text(key): value for key, value in content.items()}


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
