"""Image files in one folder per class: what there is, how it is split, how it is decoded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from batchwright.errors import DataError
from batchwright.records import DataFacts, Job
from batchwright.workload.decoding import SUFFIXES, UnreadableImageError, decode, shorter_side
from batchwright.workload.host import usable_cores
from batchwright.workload.store import PARTS, Part, Progress, StoreWriter

_HELD_OUT = ("val", "test")  # in order of preference
_USUAL_SIDE = 160  # pixels: enough to learn from photographs at a bearable cost
_SAMPLE = 100  # images looked at to find the natural side
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageFile:
    """One image of the folder."""

    name: str  # relative to the folder, with forward slashes
    label: int
    bytes: int
    modified: int  # nanoseconds


@dataclass(frozen=True)
class Listing:
    """All images of the folder, split, in order of their names."""

    root: Path
    classes: tuple[str, ...]
    files: dict[Part, list[ImageFile]]
    split: str

    @property
    def all_files(self) -> list[ImageFile]:
        """Images of both parts, in order of their names."""
        return sorted(self.files["train"] + self.files["val"], key=lambda file: file.name)


# ----------------------------------------------------------------------------------------- listing


def list_images(path: Path, job: Job) -> Listing:
    """What the folder at ``path`` holds.

    Either ``train/`` with ``val/`` or ``test/``, each with a folder per class; or ``train/`` alone
    or the class folders themselves, of which ``job.val`` is held out. Hidden files, files without
    an image's suffix, and links that lead out of the folder are left out.

    Raises:
        DataError: The folder is missing, or not laid out like this, or a class has no image.
    """
    if not path.is_dir():
        raise DataError(f"{path} {'is not a folder' if path.exists() else 'does not exist'}")
    root = path.resolve()
    held_out = next((name for name in _HELD_OUT if _is_folder(root / name, root)), None)
    has_train = _is_folder(root / "train", root)
    if held_out and not has_train:
        raise DataError(f"{path} has {held_out}/ but no train/ beside it")
    classes = _class_names(root / "train" if has_train else root, root)
    everything = _list_part(root / "train" if has_train else root, root, classes)
    if held_out:
        _refuse_other_classes(root, held_out, classes)
        files: dict[Part, list[ImageFile]] = {
            "train": everything,
            "val": _list_part(root / held_out, root, classes),
        }
        return Listing(root, classes, files, f"the folder {held_out}/")
    if job.val is None:
        raise DataError(f"{path} has no val/ or test/: hold out a share of it with val=0.1")
    split = f"{job.val:g} of each class, drawn with seed {job.seed}"
    return Listing(root, classes, hold_out(everything, classes, job.val, job.seed), split)


def hold_out(
    files: list[ImageFile], classes: tuple[str, ...], share: float, seed: int
) -> dict[Part, list[ImageFile]]:
    """Split ``files``: of each class, ``share`` of its images, at least one, goes to ``val``.

    Images are drawn by a hash of seed and name: the same on every machine, and an image added
    later moves few of the others.
    """
    parts: dict[Part, list[ImageFile]] = {"train": [], "val": []}
    for label, class_name in enumerate(classes):
        mine = [file for file in files if file.label == label]
        if len(mine) < 2:
            raise DataError(f"class {class_name} has a single image: none can be held out")
        count = min(max(1, round(share * len(mine))), len(mine) - 1)
        drawn = sorted(mine, key=lambda file: _draw(seed, file.name))
        parts["val"] += drawn[:count]
        parts["train"] += drawn[count:]
    return {part: sorted(parts[part], key=lambda file: file.name) for part in PARTS}


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(b"%d/%s" % (seed, os.fsencode(name))).digest()


def _class_names(folder: Path, root: Path) -> tuple[str, ...]:
    names = sorted(
        entry.name
        for entry in os.scandir(folder)
        if not entry.name.startswith(".") and _is_folder(Path(entry.path), root)
    )
    if len(names) < 2:
        raise DataError(
            f"{folder} holds {len(names)} class folder(s) and needs two or more: "
            "put the images of each class in a folder named for it"
        )
    for name in names:
        if not name.isprintable():
            raise DataError(f"{folder}: the class folder {name!r} needs a printable UTF-8 name")
    return tuple(names)


def _refuse_other_classes(root: Path, held_out: str, classes: tuple[str, ...]) -> None:
    here, there = set(classes), set(_class_names(root / held_out, root))
    if here != there:
        only = [
            f"only in {folder}/: {', '.join(sorted(names)[:5])}{', ...' * (len(names) > 5)}"
            for folder, names in (("train", here - there), (held_out, there - here))
            if names
        ]
        raise DataError(f"{root}: class folders differ: {'; '.join(only)}")


def _list_part(folder: Path, root: Path, classes: tuple[str, ...]) -> list[ImageFile]:
    files: list[ImageFile] = []
    for label, class_name in enumerate(classes):
        mine = [
            ImageFile(
                name=Path(entry.path).relative_to(root).as_posix(),
                label=label,
                bytes=entry.stat().st_size,
                modified=entry.stat().st_mtime_ns,
            )
            for entry in _image_entries(folder / class_name, root)
        ]
        if not mine:
            raise DataError(f"class folder {folder / class_name} holds no image")
        files += mine
    return sorted(files, key=lambda file: file.name)


def _image_entries(folder: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    """Image files at any depth; links to folders are not entered, so there are no circles."""
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _image_entries(Path(entry.path), root)
        elif (
            Path(entry.name).suffix.lower() in SUFFIXES
            and entry.is_file()
            and (not entry.is_symlink() or _is_inside(Path(entry.path), root))
        ):
            yield entry


def _is_folder(path: Path, root: Path) -> bool:
    return path.is_dir() and _is_inside(path, root)


def _is_inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root)


# ---------------------------------------------------------------------------------------- decoding


def natural_side(listing: Listing) -> int:
    """The training resolution that suits the images, in pixels.

    160 if the median shorter side of 100 images, evenly spaced over the folder, is at least that;
    else the median rounded down to a multiple of 8, and at least 8.
    """
    files = listing.all_files
    sample = files[:: -(-len(files) // _SAMPLE)]
    sides = [side for file in sample if (side := _side(listing.root / file.name)) is not None]
    middle = int(median(sides)) if sides else _USUAL_SIDE
    return min(_USUAL_SIDE, max(8, middle // 8 * 8))


def _side(path: Path) -> int | None:
    try:
        return shorter_side(path)
    except (OSError, ValueError, SyntaxError):  # decoding says what is wrong with it
        return None


def recipe(listing: Listing, top_resolution: int, unreadable: str) -> dict[str, object]:
    """All that decides what is stored: the files by name, size and time, and how they are read."""
    digest = hashlib.sha256()
    for part in PARTS:
        for file in listing.files[part]:
            digest.update(os.fsencode(f"{part}\0{file.name}\0{file.bytes}\0{file.modified}\0"))
    return {
        "data": "imagefolder",
        "root": str(listing.root),
        "files": digest.hexdigest(),
        "top_resolution": top_resolution,
        "unreadable": unreadable,
    }


def decode_all(
    listing: Listing,
    writer: StoreWriter,
    *,
    top_resolution: int,
    skip_unreadable: bool,
    progress: Progress | None,
) -> DataFacts:
    """Decode every image into ``writer``, on all cores; the facts of what was stored.

    The digest is taken over class names, and name, label and encoded bytes of each image: equal
    wherever the data are equal, whatever decodes them.
    """
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    tasks = [(part, file) for part in PARTS for file in listing.files[part]]
    skipped = 0

    def read(task: tuple[Part, ImageFile]) -> _Decoded | UnreadableImageError:
        return _read(listing.root / task[1].name, top_resolution)

    # Threads suffice: Pillow decodes outside Python's lock. Its warnings (odd metadata; an image so
    # large that `decode` refuses it) would only tear the progress display.
    with warnings.catch_warnings(), ThreadPoolExecutor(usable_cores()) as pool:
        warnings.simplefilter("ignore")
        for done, ((part, file), result) in enumerate(_in_order(pool, read, tasks), start=1):
            if isinstance(result, UnreadableImageError):
                _refuse_or_log(listing.root / file.name, result, skip_unreadable)
                skipped += 1
            else:
                pixels, content = result
                digest.update(os.fsencode(f"{part}\0{file.name}\0{file.label}\0") + content)
                writer.add(part, pixels[None], np.array([file.label]))
            if progress:
                progress(done, len(tasks), "decoding images")
    _refuse_lost_classes(listing, writer)
    return DataFacts(
        name="imagefolder",
        digest=digest.hexdigest(),
        train_samples=len(writer.labels("train")),
        val_samples=len(writer.labels("val")),
        split=listing.split,
        classes=listing.classes,
        side=natural_side(listing),
        skipped=skipped,
    )


_Decoded = tuple[npt.NDArray[np.uint8], bytes]  # pixels, and the SHA-256 of the file


def _read(path: Path, top_resolution: int) -> _Decoded | UnreadableImageError:
    try:
        data = path.read_bytes()
        return decode(data, top_resolution=top_resolution), hashlib.sha256(data).digest()
    except OSError as error:
        return UnreadableImageError(error.strerror or str(error))
    except UnreadableImageError as error:
        return error


def _refuse_or_log(path: Path, error: UnreadableImageError, skip: bool) -> None:
    if not skip:
        raise DataError(
            f"unreadable image {path}: {error}; to leave such images out: unreadable=skip"
        ) from error
    _logger.warning("unreadable image left out: %s: %s", path, error)


def _refuse_lost_classes(listing: Listing, writer: StoreWriter) -> None:
    for part in PARTS:
        present = Counter(writer.labels(part).tolist())
        for label, name in enumerate(listing.classes):
            if not present[label]:
                raise DataError(f"{listing.root}: no {part} image of class {name} can be read")


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[_Task], _Result], tasks: Iterable[_Task]
) -> Iterator[tuple[_Task, _Result]]:
    """Each task with its result, in order, computed ahead by the pool.

    Few results wait at a time: decoded images are large.
    """
    ahead = 4 * usable_cores()
    waiting: deque[tuple[_Task, Future[_Result]]] = deque()
    for task in tasks:
        waiting.append((task, pool.submit(function, task)))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()
