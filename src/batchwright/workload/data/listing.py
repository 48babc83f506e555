"""Encoded images by name, wherever they lie: how they are split, and how they are decoded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from batchwright.errors import DataError
from batchwright.records import DataFacts, Job
from batchwright.records.registries.data_sources import DRAWN
from batchwright.workload.data.decoding import (
    UnreadableImageError,
    decode,
    decode_square,
    size_of,
    stored_size,
)
from batchwright.workload.data.store import Progress
from batchwright.workload.data.store_writer import PARTS, Part, StoreWriter
from batchwright.workload.host import usable_cores

VAL_NAMES, TEST_NAMES = ("validation", "valid", "val", "dev"), ("test", "testing")
"""What people call held-out images, in order of preference."""

_USUAL_SIDE = 160  # pixels: enough to learn from photographs at a bearable cost
_SHOWN = 5  # class names in a message
_SAMPLE = 100  # images looked at to find the natural side, or the bytes of all
_LOOKED_AT = 1000  # training images decoded for their mean, where the others stay in their files
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageFile:
    """One image of a data set.

    Attributes:
        name: By which it is read, and called behind the data set's own; with forward slashes.
        label: Its class.
        bytes: Of its file, where it has one.
        modified: The file's time, in nanoseconds.
    """

    name: str
    label: int
    bytes: int = 0
    modified: int = 0


@dataclass(frozen=True)
class Listing:
    """All images of a data set, split.

    Attributes:
        root: What their names are read and told behind, such as a folder.
        classes: Their names, in label order.
        files: Images of each part, in order.
        split: Which are held out, in words.
        read: From a name to the image as it is encoded; called by several threads at once, and by
            loader processes, so it can be pickled. It may raise `OSError` or
            `UnreadableImageError`.
        kind: What the data are called where their place has no name.
        outside: Links that lead out of the folder, left out.
        unlabelled: Folder of test images without labels, left out; empty: there is none.
    """

    root: Path
    classes: tuple[str, ...]
    files: dict[Part, list[ImageFile]]
    split: str
    read: Callable[[str], bytes]
    kind: str = "imagefolder"
    outside: int = 0
    unlabelled: str = ""

    @property
    def all_files(self) -> list[ImageFile]:
        """Images of both parts, in order of their names."""
        return sorted(self.files["train"] + self.files["val"], key=lambda file: file.name)


def hold_out(
    files: list[ImageFile], classes: tuple[str, ...], share: float
) -> dict[Part, list[ImageFile]]:
    """Split ``files``: of each class, ``share`` of its images, at least one, goes to ``val``.

    Images are drawn by a hash of their names: the same on every machine and with every seed, whose
    accuracies are then of the same images; and an image added later moves few of the others.
    """
    parts: dict[Part, list[ImageFile]] = {"train": [], "val": []}
    by_label: list[list[ImageFile]] = [[] for _ in classes]
    for file in files:
        by_label[file.label].append(file)
    for class_name, mine in zip(classes, by_label, strict=True):
        if len(mine) == 1:
            raise DataError(f"class {class_name} has a single image: none can be held out")
        count = min(max(1, round(share * len(mine))), max(0, len(mine) - 1))
        drawn = sorted(mine, key=lambda file: _draw(file.name))
        parts["val"] += drawn[:count]
        parts["train"] += drawn[count:]
    return {part: sorted(parts[part], key=lambda file: file.name) for part in PARTS}


def _draw(name: str) -> bytes:
    return hashlib.sha256(b"0/" + os.fsencode(name)).digest()


def in_parts(
    where: object,
    train: list[ImageFile],
    held_out: tuple[str, list[ImageFile]] | None,
    classes: tuple[str, ...],
    job: Job,
    hint: str = "",
) -> tuple[dict[Part, list[ImageFile]], str]:
    """Training and held-out images, and how they were split, in words.

    Args:
        where: The data set, for messages.
        train: Images of the training part.
        held_out: What the held-out part is called, and its images; `None`: ``job.val`` is drawn.
        classes: Names in label order.
        job: Its key ``val`` counts.
        hint: What else helps where there is no held-out part.

    Raises:
        DataError: A part is empty or missing, or its classes are others.
    """
    if not train:
        raise DataError(f"{where}: the training part has no images")
    if held_out is None:
        if job.val is None:
            raise DataError(
                f"{where} has no held-out images: hold out a share of it with val=0.1{hint}"
            )
        return hold_out(train, classes, job.val), f"{job.val:g} {DRAWN}"
    name, files = held_out
    if not files:
        raise DataError(f"{where}: {name} has no images")
    strange = {file.label for file in files} - {file.label for file in train}
    if strange:
        names = [classes[label] for label in sorted(strange)]
        raise DataError(
            f"{where}: {name} has classes that no training image has: {some_names(names)}"
        )
    return {"train": train, "val": files}, name


def some_names(names: Iterable[object]) -> str:
    """The first few of many names."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")


def part_of(words: Collection[str]) -> str | None:
    """Which of the words, in lower case, names held-out images; `None`: none does.

    The names for validation go before those for a test.
    """
    return next((name for name in (*VAL_NAMES, *TEST_NAMES) if name in words), None)


def classes_of(where: object, labels: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Class names and numbers of labels as people write them: whole numbers, or words.

    Args:
        where: The data set, for messages.
        labels: Of each image of all parts, by its name.

    Returns:
        Class names in order, numbers by their size and words by the alphabet; and the place of
        each label among them.

    Raises:
        DataError: Labels are missing, of another kind or of several, or are all alike.
    """
    for name, label in labels.items():
        if label is None or label == "":
            raise DataError(f"{where}/{name} has no label: give it one, or take the image out")
        if not isinstance(label, int | str):
            raise DataError(
                f"{where}/{name}: its label is a {type(label).__name__}; labels are whole numbers "
                "or words, one for each image"
            )
    distinct = set(labels.values())
    if len({isinstance(label, str) for label in distinct}) > 1:
        raise DataError(f"{where}: some labels are numbers and some are words: write all alike")
    if len(distinct) < 2:
        raise DataError(
            f"{where}: all {len(labels)} images are of one class: there must be two or more"
        )
    order = sorted(distinct)
    return named_classes(where, order), {label: place for place, label in enumerate(order)}


def named_classes(where: object, names: Iterable[object]) -> tuple[str, ...]:
    """Class names as they are.

    Raises:
        DataError: One cannot be shown or written, or there are fewer than two.
    """
    classes = tuple(str(name) for name in names)
    for name in classes:
        if not name.isprintable():
            raise DataError(f"{where}: the class {name[:99]!r} needs a printable UTF-8 name")
    if len(classes) < 2:
        raise DataError(f"{where} has {len(classes)} class(es): there must be two or more")
    return classes


def refuse_unless_text(job: Job, keys: Iterable[str]) -> None:
    """Raise `DataError` where one of these parts of ``job.data_args`` is no text."""
    for key in keys:
        if not isinstance(job.data_args.get(key, ""), str):
            given = json.dumps(job.data_args[key])
            raise DataError(f"data={job.data}: data_args.{key}={given} is no text")


def states_below(folder: Path) -> list[tuple[str, int, int]]:
    """Path, bytes and time of each file at any depth, by which a change is seen."""
    try:
        states = ((path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
        return [(str(path.absolute()), one.st_size, one.st_mtime_ns) for path, one in states]
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be read ({error.strerror})") from error


def natural_side(listing: Listing) -> int:
    """The training resolution that suits the images, in pixels.

    160 if the median shorter side of 100 images, evenly spaced over the folder, is at least that;
    else the median rounded down to a multiple of 8, and at least 8.
    """
    sides = []  # decoding says what is wrong with those that have none
    for file in _sample(listing):
        with suppress(OSError, UnreadableImageError), _without_pillows_warnings():
            sides.append(min(size_of(listing.read(file.name))))
    middle = int(median(sides)) if sides else _USUAL_SIDE
    return min(_USUAL_SIDE, max(8, middle // 8 * 8))


def _sample(listing: Listing) -> list[ImageFile]:
    """100 images, evenly spaced over the folder, or all of fewer."""
    files = listing.all_files
    return files[:: -(-len(files) // _SAMPLE)]


@contextmanager
def _without_pillows_warnings() -> Iterator[None]:
    """Pillow warns of odd metadata, and of an image so large that it is refused here anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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

    def read(data: bytes, _: int) -> _Read:
        return decode(data, top_resolution=top_resolution), hashlib.sha256(data).digest()

    def take(part: Part, file: ImageFile, pixels: Any) -> None:
        if pixels is not None:
            writer.add(part, pixels[None], np.array([file.label]))

    return _go_through(listing, writer, read, take, skip_unreadable, progress, "decoding images")


def index_all(
    listing: Listing,
    writer: StoreWriter,
    *,
    top_resolution: int,
    skip_unreadable: bool,
    progress: Progress | None,
) -> DataFacts:
    """Tell ``writer`` of every image, which stays in its file; the facts, as of `decode_all`.

    Files are read, hashed and decoded once: evenly spaced training images for the mean and
    deviation of the pixels, all others at the smallest scale, to find damage before it is trained
    on. Measured of 500 x 375 pixels: JPEG 0.9 ms in place of 5.7 ms, PNG 7 ms in place of 15 ms.
    """
    spacing = -(-len(listing.files["train"]) // _LOOKED_AT)

    def read(data: bytes, number: int) -> _Read:
        width, height = size_of(data)
        looked = decode(data, top_resolution=top_resolution) if number % spacing == 0 else None
        if looked is None:
            decode_square(data, top_resolution=top_resolution, resolution=1, place=None)
        return (height, width, looked), hashlib.sha256(data).digest()

    def take(part: Part, file: ImageFile, found: Any) -> None:
        height, width, pixels = found or (0, 0, None)
        writer.add_file(part, file.label if found else -1, height, width)
        if part == "train" and pixels is not None:
            writer.look(pixels[None])

    return _go_through(listing, writer, read, take, skip_unreadable, progress, "reading images")


def stored_bytes(listing: Listing, top_resolution: int) -> int:
    """About as many bytes as the decoded images would take, from 100 evenly spaced ones."""
    areas = []  # as above
    for file in _sample(listing):
        with suppress(OSError, UnreadableImageError), _without_pillows_warnings():
            width, height = size_of(listing.read(file.name))
            areas.append(prod(stored_size(width, height, top_resolution)))
    return round(3 * sum(areas) / max(1, len(areas)) * len(listing.all_files))


_Read = tuple[Any, bytes]  # what was found, and the SHA-256 of the file


def _go_through(
    listing: Listing,
    writer: StoreWriter,
    read: Callable[[bytes, int], _Read],
    take: Callable[[Part, ImageFile, Any], None],
    skip_unreadable: bool,
    progress: Progress | None,
    what: str,
) -> DataFacts:
    """Read every file on all cores and take the results in order, `None` for a skipped one."""
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    tasks = [
        (part, number, file) for part in PARTS for number, file in enumerate(listing.files[part])
    ]
    skipped = 0
    if listing.outside:
        _logger.warning("%d link(s) out of %s were not followed", listing.outside, listing.root)
    if listing.unlabelled:
        _logger.warning(
            "%s is left out: it has no class folders, so its images have no labels",
            listing.root / listing.unlabelled,
        )

    def attempt(task: tuple[Part, int, ImageFile]) -> _Read | UnreadableImageError:
        try:
            return read(listing.read(task[2].name), task[1])
        except OSError as error:
            return UnreadableImageError(error.strerror or str(error))
        except UnreadableImageError as error:
            return error

    # Threads suffice: Pillow decodes outside Python's lock. Its warnings would only tear the
    # progress display.
    with _without_pillows_warnings(), ThreadPoolExecutor(usable_cores()) as pool:
        for done, ((part, _, file), result) in enumerate(_in_order(pool, attempt, tasks), start=1):
            if isinstance(result, UnreadableImageError):
                place = listing.root / file.name
                if not skip_unreadable:
                    raise DataError(
                        f"unreadable image {place}: {result}; to leave such images out: "
                        "unreadable=skip"
                    ) from result
                _logger.warning("unreadable image left out: %s: %s", place, result)
                skipped += 1
                take(part, file, None)
            else:
                found, content = result
                digest.update(os.fsencode(f"{part}\0{file.name}\0{file.label}\0") + content)
                take(part, file, found)
            if progress:
                progress(done, len(tasks), what)
    for part in PARTS:
        present = Counter(writer.labels(part).tolist())
        for label in sorted({file.label for file in listing.files[part]}):
            if not present[label]:
                name = listing.classes[label]
                raise DataError(f"{listing.root}: no {part} image of class {name} can be read")
    return DataFacts(
        name=listing.kind,
        digest=digest.hexdigest(),
        train_samples=int((writer.labels("train") >= 0).sum()),
        val_samples=int((writer.labels("val") >= 0).sum()),
        split=listing.split,
        classes=listing.classes,
        side=natural_side(listing),
        skipped=skipped,
        largest_class=largest_share(writer.labels("val")),
    )


def largest_share(labels: Any) -> float | None:
    """Share of the commonest of these labels, those below 0 left out; `None`: there are none."""
    counts = np.bincount(labels[labels >= 0])
    return float(counts.max() / counts.sum()) if counts.size else None


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
