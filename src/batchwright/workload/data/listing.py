"""Lists of encoded images, from any source: how they are split, read and decoded."""

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
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from batchwright.errors import DataError
from batchwright.records import DataFacts, Job
from batchwright.records.registries.data_sources import DRAWN
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import printable
from batchwright.storage.locks import LOCK_FILE
from batchwright.workload.data.decoding import (
    UnreadableImageError,
    decode,
    decode_square,
    size_of,
    stored_size,
)
from batchwright.workload.data.store import Progress
from batchwright.workload.data.store_writer import PARTS, Part, StoreWriter
from batchwright.workload.extras import some_names
from batchwright.workload.host import usable_cores

TRAIN_NAMES = ("train", "training")
"""Usual names of training images, in order of preference."""

VAL_NAMES, TEST_NAMES = ("validation", "valid", "val", "dev"), ("test", "testing")
"""Usual names of held-out images, in order of preference."""

_USUAL_SIDE = 160  # pixels: enough to learn from photographs at a bearable cost
_SAMPLE = 100  # images whose sizes give the natural side and the bytes of all images
_LOOKED_AT = 1000  # training images decoded for their mean, where images stay in their files
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageFile:
    """One image of a data set.

    Attributes:
        name: Name by which it is read, below the data set's root; with forward slashes.
        label: Number of its class.
        bytes: Size of its file, where it has one.
        modified: Modification time of the file, in nanoseconds.
    """

    name: str
    label: int
    bytes: int = 0
    modified: int = 0


@dataclass(frozen=True)
class Listing:
    """All images of a data set, split.

    Attributes:
        root: The data set's place, such as a folder; names in messages begin with it.
        classes: Names of the classes, in label order.
        files: Images of each part, in order.
        split: Which images are held out, in words.
        read: Returns the encoded image of a name. It is called by several threads at once, and by
            loader processes, so it can be pickled. It may raise `OSError` or
            `UnreadableImageError`.
        kind: Name of the data where their place has no name.
        outside: Number of links that lead out of the folder, which are left out.
        unlabelled: Name of a part whose images have no labels, which is left out; empty: none.
        others: Number of files that are no images by their suffix, by suffix; they are left out.
    """

    root: Path
    classes: tuple[str, ...]
    files: dict[Part, list[ImageFile]]
    split: str
    read: Callable[[str], bytes]
    kind: str = "imagefolder"
    outside: int = 0
    unlabelled: str = ""
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def all_files(self) -> list[ImageFile]:
        """Images of both parts, in order of their names."""
        return sorted(self.files["train"] + self.files["val"], key=lambda file: file.name)


def hold_out(
    files: list[ImageFile], classes: tuple[str, ...], share: float
) -> dict[Part, list[ImageFile]]:
    """Split ``files``: of each class, ``share`` of its images, at least one, goes to ``val``.

    Images are drawn by a hash of their names. So the split is equal on every machine and with every
    seed, accuracies can be compared, and an image added later moves few of the others.
    """
    parts: dict[Part, list[ImageFile]] = {"train": [], "val": []}
    by_label: list[list[ImageFile]] = [[] for _ in classes]
    for file in files:
        by_label[file.label].append(file)
    for class_name, mine in zip(classes, by_label, strict=True):
        if len(mine) == 1:
            raise DataError(
                f"class {class_name} has a single image, so none can be held out: add images of "
                "it, or leave the class out"
            )
        count = min(max(1, round(share * len(mine))), max(0, len(mine) - 1))
        drawn = sorted(mine, key=lambda file: _draw(file.name))
        parts["val"] += drawn[:count]
        parts["train"] += drawn[count:]
    return {part: sorted(parts[part], key=lambda file: file.name) for part in PARTS}


def _draw(name: str) -> bytes:
    return hashlib.sha256(b"0/" + os.fsencode(name)).digest()


def split_parts(
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
        held_out: Name and images of the held-out part; `None`: a share ``job.val`` is drawn.
        classes: Names of the classes, in label order.
        job: The job; its key ``val`` counts.
        hint: Another remedy for a missing held-out part, for the message.

    Raises:
        DataError: A part is empty or missing, or the held-out part has other classes.
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


def held_out_name(words: Collection[str]) -> str | None:
    """The first usual name of held-out images among ``words``, in lower case; `None`: none is.

    Names of a validation part come before those of a test part.
    """
    return next((name for name in (*VAL_NAMES, *TEST_NAMES) if name in words), None)


def classes_of(where: object, labels: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Class names and numbers for labels that are whole numbers or words.

    Args:
        where: The data set, for messages.
        labels: The label of each image of all parts, by the image's name.

    Returns:
        Class names, numbers by size and words in alphabetical order; and the class number of each
        label.

    Raises:
        DataError: Labels are missing, of another kind, of both kinds, or all equal.
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
    """Class names as texts.

    Raises:
        DataError: A name is not printable, or there are fewer than two.
    """
    classes = tuple(str(name) for name in names)
    for name in classes:
        if not name.isprintable():
            raise DataError(f"{where}: the class {name[:99]!r} needs a printable UTF-8 name")
    if len(classes) < 2:
        raise DataError(f"{where} has {len(classes)} class(es): there must be two or more")
    return classes


def refuse_unless_text(job: Job, keys: Iterable[str]) -> None:
    """Raise `DataError` if the value of one of these ``keys`` of ``job.data_args`` is no text."""
    for key in keys:
        if not isinstance(job.data_args.get(key, ""), str):
            given = json.dumps(job.data_args[key])
            raise DataError(f"data={job.data}: data_args.{key}={given} is no text")


def file_states(folder: Path) -> list[tuple[str, int, int]]:
    """Path, bytes and modification time of each file below a folder, which show any change.

    Folders of runs do not count: they change while the workers of such a run open the data.
    """
    paths: list[Path] = []
    for place, below, names in os.walk(folder):
        if LOCK_FILE in names and Path(place) != folder:
            below.clear()  # is not walked
        else:
            paths += [Path(place, name) for name in names]
    try:
        states = ((path, path.stat()) for path in sorted(paths) if path.is_file())
        return [(str(path.absolute()), one.st_size, one.st_mtime_ns) for path, one in states]
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be read ({error.strerror})") from error


def natural_side(listing: Listing) -> int:
    """The training resolution that suits the images, in pixels.

    160 if the median shorter side of 100 images, evenly spaced over the data, is at least 160; else
    the median rounded down to a multiple of 8, and at least 8.
    """
    sides = [min(size) for size in _sample_sizes(listing)]
    middle = int(median(sides)) if sides else _USUAL_SIDE
    return min(_USUAL_SIDE, max(8, middle // 8 * 8))


def _sample_sizes(listing: Listing) -> list[tuple[int, int]]:
    """Widths and heights, in pixels, of up to 100 readable images, evenly spaced over the data."""
    files, sizes = listing.all_files, []
    with without_pillows_warnings():
        for file in files[:: -(-len(files) // _SAMPLE)]:
            with suppress(OSError, UnreadableImageError):  # decoding will report what is unreadable
                sizes.append(size_of(listing.read(file.name)))
    return sizes


@contextmanager
def without_pillows_warnings() -> Iterator[None]:
    """Inside, Pillow does not warn of odd metadata, nor of large images, which are refused."""
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
    """Decode every image into ``writer``, on all cores; facts of the stored images.

    The digest is taken over class names, and name, label and encoded bytes of each image: it is
    equal for equal data, whatever decodes them.

    Args:
        listing: The images.
        writer: Takes the decoded images.
        top_resolution: Highest training resolution, in pixels.
        skip_unreadable: Whether unreadable images are left out, with a warning.
        progress: Called as progress(images done, images in all, what).

    Raises:
        DataError: An image is unreadable, or no image of a class is readable.
    """

    def read(data: bytes) -> _Read:
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
    """Add class and size of every image, which stays in its file, to ``writer``.

    Arguments, facts and errors are those of `decode_all`. Files are read, hashed and decoded at the
    smallest scale, to find damage before the training does. For the mean and deviation of the
    pixels some of the readable training images, evenly spaced, are then decoded as a whole.
    """

    def read(data: bytes) -> _Read:
        width, height = size_of(data)
        decode_square(data, top_resolution=top_resolution, resolution=1, place=None)
        return (height, width), hashlib.sha256(data).digest()

    def take(part: Part, file: ImageFile, found: Any) -> None:
        height, width = found or (0, 0)
        writer.add_file(part, file.label if found else -1, height, width)

    def look_at(file: ImageFile) -> Any:
        try:
            return decode(listing.read(file.name), top_resolution=top_resolution)
        except (OSError, UnreadableImageError) as error:
            place = listing.root / file.name
            raise DataError(f"{place} was changed as it was read: {error}") from error

    facts = _go_through(listing, writer, read, take, skip_unreadable, progress, "reading images")
    labels = zip(listing.files["train"], writer.labels("train"), strict=True)
    files = [file for file, label in labels if label >= 0]
    with without_pillows_warnings(), ThreadPoolExecutor(usable_cores()) as pool:
        for _, pixels in in_order(pool, look_at, files[:: -(-len(files) // _LOOKED_AT)]):
            writer.count_pixels(pixels[None])
    return facts


def stored_bytes(listing: Listing, top_resolution: int) -> int:
    """Estimate of the bytes of all decoded images, from 100 evenly spaced ones."""
    sizes = _sample_sizes(listing)
    areas = [prod(stored_size(width, height, top_resolution)) for width, height in sizes]
    return round(3 * sum(areas) / max(1, len(areas)) * len(listing.all_files))


_Read = tuple[Any, bytes]  # the content that was read, and the SHA-256 of the file


def _go_through(
    listing: Listing,
    writer: StoreWriter,
    read: Callable[[bytes], _Read],
    take: Callable[[Part, ImageFile, Any], None],
    skip_unreadable: bool,
    progress: Progress | None,
    what: str,
) -> DataFacts:
    """Read every file on all cores, and pass the results to ``take`` in order; facts of the data.

    Args:
        listing: The images.
        writer: Takes the images, by ``take``.
        read: Returns content and digest, from the file's bytes.
        take: Called with part, file and content, which is `None` for a skipped file.
        skip_unreadable: As for `decode_all`.
        progress: As for `decode_all`.
        what: The work in words, for ``progress``.
    """
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    tasks = [(part, file) for part in PARTS for file in listing.files[part]]
    # Eight bytes of each image's digest. Images with equal ones would count as copies: with
    # 1.3 million and 50,000 images, this happens by chance in one of 300 million data sets.
    beginnings: dict[Part, bytearray] = {part: bytearray() for part in PARTS}
    skipped = 0
    if listing.outside:
        links = counted(listing.outside, "link")
        _logger.warning("%s out of %s not followed", links, listing.root)
    if listing.unlabelled:
        _logger.warning(
            "%s is left out: its images have no labels", listing.root / listing.unlabelled
        )
    if listing.others:
        most = sorted(listing.others.items(), key=lambda one: (-one[1], one[0]))
        kinds = [f"{count} {suffix or 'without ending'}" for suffix, count in most]
        _logger.warning(
            "%s of %s left out, as images do not end so: %s",
            counted(sum(listing.others.values()), "file"), listing.root,
            printable(some_names(kinds)),
        )  # fmt: skip

    def attempt(task: tuple[Part, ImageFile]) -> _Read | UnreadableImageError:
        try:
            return read(listing.read(task[1].name))
        except OSError as error:
            return UnreadableImageError(error.strerror or str(error))
        except UnreadableImageError as error:
            return error

    # Threads suffice, as Pillow decodes without Python's lock. Its warnings would break up the
    # progress display.
    with without_pillows_warnings(), ThreadPoolExecutor(usable_cores()) as pool:
        for done, ((part, file), result) in enumerate(in_order(pool, attempt, tasks), start=1):
            if isinstance(result, UnreadableImageError):
                place = listing.root / file.name
                if not skip_unreadable:
                    raise DataError(
                        f"unreadable image {place}: {result}; to leave such images out: "
                        "unreadable=skip"
                    ) from result
                _logger.warning("unreadable image left out: %s", printable(f"{place}: {result}"))
                skipped += 1
                take(part, file, None)
            else:
                found, content = result
                beginnings[part] += content[:8]
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
    trained, held_out = (np.frombuffer(beginnings[part], "<u8") for part in PARTS)
    if repeated := int(np.isin(held_out, trained).sum()):
        _logger.warning(
            "%s of %s with the bytes of a training image: the accuracy will be higher than on "
            "new images", counted(repeated, "held-out image"), listing.root,
        )  # fmt: skip
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
    """Share of the most frequent label, labels below 0 left out; `None` without labels."""
    counts = np.bincount(labels[labels >= 0])
    return float(counts.max() / counts.sum()) if counts.size else None


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[_Task], _Result], tasks: Iterable[_Task]
) -> Iterator[tuple[_Task, _Result]]:
    """Each task with its result, in order, computed ahead by the pool.

    Only some results are held at a time, as decoded images are large.
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
