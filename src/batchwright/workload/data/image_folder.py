"""Image files in one folder per class: which there are, and how they are split."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from batchwright.errors import DataError
from batchwright.records import Job
from batchwright.records.registries.data_sources import DRAWN
from batchwright.records.text.formatting import counted
from batchwright.storage.locks import LOCK_FILE
from batchwright.workload.data.decoding import SUFFIXES
from batchwright.workload.data.image_files import FolderFiles
from batchwright.workload.data.listing import (
    TEST_NAMES,
    TRAIN_NAMES,
    ImageFile,
    Listing,
    held_out_name,
    hold_out,
)
from batchwright.workload.data.store_writer import PARTS, Part
from batchwright.workload.extras import some_names

_NO_CLASS = ("val", "test")  # names that are never those of a class
_LINKS = " (links that lead out of the data folder are not followed)"


def list_images(path: Path, job: Job) -> Listing:
    """The images of the folder at ``path``.

    The folder holds ``train/`` with ``val/`` or ``test/``, or folders with other usual names of
    such parts, each with a folder per class. Or it holds ``train/`` alone, or the class folders
    themselves; then a share ``job.val`` is held out. Hidden files, files without an image's suffix,
    and links that lead out of the folder are left out.

    Raises:
        DataError: The folder is missing, cannot be read, or has another layout, or a class has no
            image.
    """
    try:
        return _listed(path, job)
    except OSError as error:
        raise DataError(
            f"{error.filename or path} cannot be read ({error.strerror}): see that this user may "
            f"read all of {path}, and that nothing changes it meanwhile"
        ) from error


def held_out_files(job: Job, place: str) -> list[str]:
    """Paths of the held-out images of ``data=imagefolder:PLACE``, in the order of its labels.

    Raises:
        DataError: As for `list_images`.
    """
    listing = list_images(Path(place).expanduser(), job)
    return [str(listing.root / file.name) for file in listing.files["val"]]


def takes_in(root: Path, folder: Path, job: Job) -> bool:
    """Whether images in a new folder below ``root`` would be those of ``data=imagefolder:ROOT``.

    Where the class folders are not in parts, any new folder would itself be a class.
    """
    del job
    below = folder.relative_to(root).parts
    if any(name.startswith(".") for name in below):
        return False
    try:
        parts = _Folder(root).parts()
    except (OSError, DataError):  # opening the data will say so
        return False
    return not any(parts) or below[0] in parts


def _listed(path: Path, job: Job) -> Listing:
    if not path.is_dir():
        wrong = "is not a folder" if path.exists() else "does not exist"
        raise DataError(f"{path} {wrong}: give one that holds a folder of images for each class")
    folder = _Folder(path.resolve())
    start, held_out = folder.parts()
    if held_out and not start:
        raise DataError(f"{path} has {held_out}/ but no train/ beside it")
    if held_out and (folder.root / start).samefile(folder.root / held_out):
        raise DataError(
            f"{path}: {start}/ and {held_out}/ are the same folder, so images that are trained on "
            f"would be held out: put others into {held_out}/, or remove it and give val=0.1"
        )
    unlabelled = folder.unlabelled() if start else ""
    if unlabelled == held_out and job.val is not None:
        held_out = ""
    classes = folder.class_names(start)
    images = folder.images(start, classes)
    if unlabelled and unlabelled == held_out:
        raise DataError(
            f"{folder.root / unlabelled} has no class folders, so its images have no labels to "
            "evaluate by: leave it out and hold out a share of the others with val=0.1, or put the "
            "images of each class in a folder named for it"
        )
    if held_out:
        here, there = set(classes), set(folder.class_names(held_out))
        only = [
            f"only in {part}/: {some_names(sorted(names))}"
            for part, names in ((start, here - there), (held_out, there - here))
            if names
        ]
        if only:
            raise DataError(f"{folder.root}: class folders differ: {'; '.join(only)}")
        parts: dict[Part, list[ImageFile]] = {
            "train": images,
            "val": folder.images(held_out, classes),
        }
        split = f"the folder {held_out}/"
    elif job.val is None:
        raise DataError(f"{path} has no val/ or test/: hold out a share of it with val=0.1")
    else:
        parts = hold_out(images, classes, job.val)
        split = f"{job.val:g} {DRAWN}"
    return Listing(
        folder.root,
        classes,
        parts,
        split,
        FolderFiles(folder.root),
        outside=len(folder.outside),
        unlabelled=unlabelled,
        others=folder.others,
    )


def images_below(path: Path) -> tuple[list[str], int]:
    """Names of the image files at any depth below a folder, whatever its layout, in order.

    As in training, hidden files, files without an image's suffix, and links that lead out of the
    folder are left out; the number is that of such links.

    Raises:
        DataError: A folder cannot be read, or there is no image.
    """
    root = path.resolve()
    try:
        folder = _Folder(root)
        found = sorted(os.path.relpath(one.path, root) for one in folder.entries(str(root)))
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    if not found:
        links = _LINKS if folder.outside else ""
        raise DataError(f"{path} holds no image ({', '.join(sorted(SUFFIXES))}){links}")
    return found, len(folder.outside)


class _Folder:
    """Reads a folder; links that lead out of it are counted, and not followed.

    Attributes:
        root: The folder.
        outside: Links so far that lead out of it.
        others: Number of files so far that are no images by their suffix, by that in lower case.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.outside: set[Path] = set()
        self.others = Counter[str]()
        # Of names that differ in capitals alone, the one in lower case comes last and is taken.
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self._by_lower = {name.lower(): name for name in folders}

    def parts(self) -> tuple[str, str]:
        """Names of the folders of training and of held-out images; empty: there is none.

        Capitals do not matter. As a class may have such a name as well, folders other than
        ``train``, ``val`` and ``test`` count as parts only if both parts are there.
        """
        names = self._by_lower
        held_out = names.get(held_out_name(names) or "", "")
        train = next((names[name] for name in TRAIN_NAMES if name in names), "")
        if not held_out and train != "train":
            train = ""
        if not train:
            held_out = next((name for name in _NO_CLASS if name in names.values()), "")
        for name in filter(None, (train, held_out)):
            if not self._is_inside(path := self.root / name):
                raise DataError(
                    f"{path} is a link that leads out of {self.root} and is not followed: "
                    "put the folder itself there"
                )
        return train, held_out

    def class_names(self, part: str) -> tuple[str, ...]:
        """Names of the folders in ``part``, in alphabetical order."""
        folder, names = self.root / part, self._folders(part)
        for entry in os.scandir(folder):
            if _was_folder(entry) and self._is_inside(Path(entry.path)):
                raise DataError(
                    f"class folder {entry.path} is a link that leads to nothing: mend the link, or "
                    "remove it"
                )
        if len(names) < 2:
            hint, inner = "", [folder / name for name in names if self.root == folder]
            with suppress(OSError):  # many archives unpack into a folder of their own
                if inner and sum(entry.is_dir() for entry in os.scandir(inner[0])) > 1:
                    hint = f", or did you mean {inner[0]}, which holds several?"
            if part and not names and len(self._folders("")) > 1:
                hint = f"; if {part}/ is itself a class, call its folder something else"
            raise DataError(
                f"{folder} holds {counted(len(names), 'class folder')} and needs two or more: "
                f"put the images of each class in a folder named for it{hint}"
            )
        for name in names:
            if not name.isprintable():
                raise DataError(f"{folder}: the class folder {name!r} needs a printable UTF-8 name")
        return tuple(names)

    def unlabelled(self) -> str:
        """The folder of test images without class folders, as competitions publish; empty: none."""
        tests = [self._by_lower[name] for name in TEST_NAMES if name in self._by_lower]
        return next((one for one in tests if not self._folders(one)), "")

    def _folders(self, part: str) -> list[str]:
        return sorted(
            entry.name
            for entry in os.scandir(self.root / part)
            if not entry.name.startswith(".")
            and entry.name != "__MACOSX"  # macOS adds it to archives
            and entry.is_dir()
            and (not entry.is_symlink() or self._is_inside(Path(entry.path)))
        )

    def images(self, part: str, classes: tuple[str, ...]) -> list[ImageFile]:
        """Image files of ``part`` at any depth below their class folder, in order of names."""
        prefix = len(str(self.root)) + 1
        found: list[ImageFile] = []
        for label, class_name in enumerate(classes):
            folder = self.root / part / class_name
            before = len(found)
            for entry in self.entries(str(folder)):
                state = entry.stat(follow_symlinks=not _is_broken(entry))
                name = entry.path[prefix:]
                found.append(ImageFile(name, label, state.st_size, state.st_mtime_ns))
            if len(found) == before:
                raise DataError(
                    f"class folder {folder} holds no image{_LINKS if self.outside else ''}: put "
                    f"images of the class into it ({', '.join(sorted(SUFFIXES))}), or remove the "
                    "folder"
                )
        return sorted(found, key=lambda file: file.name)

    def entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Image files below a folder; links to folders are not followed, so there are no cycles.

        Folders of runs are left out, since their reports have figures.
        """
        every = list(os.scandir(folder))
        if any(entry.name == LOCK_FILE for entry in every):
            return
        for entry in every:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self.entries(entry.path)
                continue
            suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - a million times
            # A link that leads to nothing is an image that cannot be read, or several.
            image = suffix in SUFFIXES and (entry.is_file() or _is_broken(entry))
            if image or _was_folder(entry):
                if not entry.is_symlink() or self._is_inside(Path(entry.path)):
                    yield entry
            elif entry.is_symlink() and entry.is_dir():
                self._is_inside(Path(entry.path))  # is counted; inside, its images are found there
            elif suffix not in SUFFIXES:
                self.others[suffix] += 1

    def _is_inside(self, path: Path) -> bool:
        # `Path.resolve` raises `RuntimeError` for a link to itself.
        inside = Path(os.path.realpath(path)).is_relative_to(self.root)
        if not inside:
            self.outside.add(path)
        return inside


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """Whether a link leads to nothing."""
    return entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110 - a million times


def _was_folder(entry: os.DirEntry[str]) -> bool:
    """Whether a link leads to nothing, and to a folder before, as its name has no suffix."""
    return _is_broken(entry) and "." not in entry.name


def recipe(listing: Listing, top_resolution: int, unreadable: str) -> dict[str, object]:
    """The values that determine the store: names, sizes and times of the files, and settings."""
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
