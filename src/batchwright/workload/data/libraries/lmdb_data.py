"""LMDB: encoded images under keys ``CLASS/NAME``, or Caffe's records of image and label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from batchwright.errors import DataError
from batchwright.records import Job
from batchwright.workload.data.decoding import UnreadableImageError, encoded, is_image
from batchwright.workload.data.listing import (
    TEST_NAMES,
    VAL_NAMES,
    ImageFile,
    Listing,
    classes_of,
    split_parts,
)
from batchwright.workload.data.sources import ImageData, open_listed
from batchwright.workload.data.store import Progress
from batchwright.workload.extras import import_library, in_words

_FILE = "data.mdb"


def open_lmdb(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """A database, or a folder with ``train`` and ``val`` or ``test`` in it (or ``train_lmdb`` ...).

    A value is an encoded image, whose key begins with its class and ``/``; or a ``Datum`` of Caffe,
    which holds label and image, encoded or as bytes of blue, green and red.

    Raises:
        DataError: There is no database, it is damaged, or a value is neither.
        JobError: The library is missing.
    """
    folder = Path(place).expanduser().absolute()
    found: dict[str, Path] = {}  # by part
    if (folder / _FILE).is_file():
        found["train"] = folder
    else:
        for part in ("train", *VAL_NAMES, *TEST_NAMES):
            for name in (part, f"{part}_lmdb"):
                if (folder / name / _FILE).is_file():
                    found.setdefault(part, folder / name)
    if "train" not in found:
        raise DataError(f"{folder} holds no LMDB: neither it nor train/ in it has a {_FILE}")
    # A test part beside a validation part is left out: it need not have labels.
    found = dict(list(found.items())[:2])
    states = [(str(path), (path / _FILE).stat()) for path in found.values()]
    files = [[name, one.st_size, one.st_mtime_ns] for name, one in states]
    identity = {"data": "lmdb", "files": files}
    return open_listed(lambda: _list(folder, found, job), identity, job, progress, verify)


_open: dict[str, tuple[tuple[int, ...], Any]] = {}  # by path: state of the file, and the database
_opening = Lock()


def _opened(path: str) -> Any:
    """A database, opened once in each process, and again after its file has changed."""
    about = (Path(path) / _FILE).stat()
    state = (about.st_ino, about.st_size, about.st_mtime_ns)
    with _opening:
        held = _open.get(path)
        if held is None or held[0] != state:
            if held is not None:
                held[1].close()
            _open[path] = held = (state, _whole(path, about.st_size))
    return held[1]


def _whole(path: str, size: int) -> Any:
    """Open a database; raises an error of the library if its file is cut off."""
    lmdb = import_library("lmdb")
    found = lmdb.open(path, readonly=True, lock=False, readahead=False)
    wanted = (found.info()["last_pgno"] + 1) * found.stat()["psize"]
    if size < wanted:  # reading beyond the end of a mapped file would end this process
        found.close()
        raise lmdb.CorruptedError(f"{size:,} of its {wanted:,} bytes are there")
    return found


@dataclass(frozen=True)
class Values:
    """Reads encoded images, by names of part and key.

    Attributes:
        databases: Path of each part's database.
    """

    databases: dict[str, str]

    def __call__(self, name: str) -> bytes:
        """The encoded image."""
        part, _, key = name.partition("/")
        try:
            with _opened(self.databases[part]).begin() as transaction:
                value = transaction.get(key.encode("utf-8", "surrogateescape"))
        except import_library("lmdb").Error as error:
            raise UnreadableImageError(in_words(error)) from error
        if value is None:
            raise UnreadableImageError("there is no such key")
        return value if is_image(value) else _image_in(value)


def _list(folder: Path, found: dict[str, Path], job: Job) -> Listing:
    labels: dict[str, Any] = {}
    for part, path in found.items():
        try:
            with _opened(str(path)).begin() as transaction:
                for raw, value in transaction.cursor():
                    key = raw.decode("utf-8", "surrogateescape")
                    labels[f"{part}/{key}"] = _label(path, key, value)
        except import_library("lmdb").Error as error:
            raise DataError(f"{path} cannot be read as LMDB ({in_words(error)})") from error
    classes, numbers = classes_of(folder, labels)
    files: dict[str, list[ImageFile]] = {part: [] for part in found}
    for name, label in labels.items():
        files[name.partition("/")[0]].append(ImageFile(name, numbers[label]))
    other = next((part for part in found if part != "train"), None)
    held_out = (f"the database {found[other].name}", files[other]) if other else None
    parts, split = split_parts(folder, files["train"], held_out, classes, job)
    read = Values({part: str(path) for part, path in found.items()})
    return Listing(folder, classes, parts, split, read, kind="lmdb")


def _label(path: Path, key: str, value: bytes) -> Any:
    if is_image(value):
        name, slash, _ = key.rpartition("/")[0].partition("/")
        if not (name or slash):
            raise DataError(f"{path}: key {key!r} has no class: keys are CLASS/NAME")
        return name
    try:
        return _fields(value)[5]
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"{path}: the value of {key!r} is neither an encoded image nor a Datum of Caffe with a "
            "label"
        ) from error


def _image_in(value: bytes) -> bytes:
    """The encoded image of a ``Datum``."""
    try:
        fields = _fields(value)
        data = fields[4]
        if not isinstance(data, bytes):
            raise TypeError("the data are a number")
        if fields.get(7):
            return data
        shape = (fields[1], fields[2], fields[3])
        planes = np.frombuffer(data, np.uint8).reshape(shape)
        colours = planes[0] if len(planes) == 1 else planes[::-1].transpose(1, 2, 0)
        return encoded(Image.fromarray(np.ascontiguousarray(colours)))
    except Exception as error:  # damaged bytes may raise any error
        raise UnreadableImageError("no Datum of Caffe with an image of 8 bits a colour") from error


def _fields(value: bytes) -> dict[int, Any]:
    """Fields of a protocol buffer by number, as whole numbers or bytes; the last of repeated ones.

    https://protobuf.dev/programming-guides/encoding; those of ``Datum``: 1 channels, 2 height, 3
    width, 4 data, 5 label, 6 float_data, 7 encoded.
    """
    found: dict[int, Any] = {}
    place = 0

    def varint() -> int:
        nonlocal place
        total = shift = 0
        while True:
            byte = value[place]
            if shift > 63:
                raise ValueError("no protocol buffer")
            place, total, shift = place + 1, total | (byte & 127) << shift, shift + 7
            if byte < 128:
                return total

    while place < len(value):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            found[number] = varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or (varint() if kind == 2 else -1)
        if size < 0 or place + size > len(value):
            raise ValueError("no protocol buffer")
        found[number] = value[place : place + size]
        place += size
    return found
