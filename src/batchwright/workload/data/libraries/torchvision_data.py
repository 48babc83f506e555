"""Data sets of torchvision, by the names of their Python classes."""

from __future__ import annotations

import inspect
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from batchwright.errors import DataError
from batchwright.records import Job
from batchwright.storage.locks import lock_file
from batchwright.workload.data.decoding import UnreadableImageError, encoded, turned
from batchwright.workload.data.listing import (
    TEST_NAMES,
    VAL_NAMES,
    ImageFile,
    Listing,
    classes_of,
    file_states,
    named_classes,
    split_parts,
)
from batchwright.workload.data.sources import ImageData, open_listed
from batchwright.workload.data.store import Progress, cache_folder
from batchwright.workload.data.store_writer import clear_errors
from batchwright.workload.extras import import_library, in_words, nearest

# Base classes, and LSUN, which unpickles a file of the current folder.
_NONE = ("VisionDataset", "DatasetFolder", "LSUN", "LSUNClass")
_LOOKED_AT = 100  # at most so many items have their labels compared with the list of labels
_ONE_AT_A_TIME = Lock()  # some data sets use the global random state, or share an open file


def open_torchvision(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """A class of ``torchvision.datasets``, made with the arguments in ``data_args``.

    If the class has an argument ``train`` or ``split`` that ``data_args`` do not give, its test or
    validation part is held out.

    Raises:
        DataError: There is no such class, it cannot be made, or it is no image classification.
        JobError: The library is missing.
    """
    asked = job.data_args.get("download", False)
    if not isinstance(asked, bool):  # a text such as "no" would be taken for yes
        raise DataError(f"data={job.data}: data_args.download is true or false, not {asked!r}")
    datasets = import_library("torchvision.datasets")
    names = [one for one in datasets.__all__ if one not in _NONE]
    if place not in names:
        raise DataError(f"torchvision has no data set {place}{nearest(place, names)}")
    with clear_errors(cache_folder()):
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two processes that download to one place would damage each other's files.
        lock = (
            lock_file(cache_folder() / "torchvision.lock", seconds=inf, waiting=lambda _: None)
            if job.data_args.get("download")
            else nullcontext()
        )
    with lock:
        made = _made(job, place, getattr(datasets, place))
    lengths = {name: len(part) for name, part in made.items()}
    root = job.data_args.get("root")
    files = file_states(Path(str(root)).expanduser()) if root else []
    identity = {"data": job.data, "lengths": lengths, "files": files}
    if any(key.startswith("target_type") for key in job.data_args):
        identity["labels"] = "of items"  # a store without this may hold those of the list instead
    return open_listed(lambda: _list(made, job, place), identity, job, progress, verify)


def _made(job: Job, name: str, kind: Any) -> dict[str, Any]:
    """The data sets of the parts: ``train``, and the held-out part if there is one."""
    known = inspect.signature(kind).parameters
    args = dict(job.data_args)
    if "root" in args:
        args["root"] = str(Path(str(args["root"])).expanduser())
    strange = args.keys() - known.keys()
    if strange and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        raise DataError(f"data={job.data}: {name} takes no {', '.join(sorted(strange))}")
    if (
        known.get("root")
        and known["root"].default is inspect.Parameter.empty
        and "root" not in args
    ):
        raise DataError(
            f"data={job.data} needs its folder: data_args.root=PATH (and data_args.download=true "
            "to fetch it there)"
        )
    if "train" in known and "train" not in args:
        return {
            part: _make(job, kind, args | {"train": part == "train"}) for part in ("train", "test")
        }
    if "split" in known and "split" not in args:
        found = {"train": _make(job, kind, args | {"split": "train"})}
        for part in (*VAL_NAMES, *TEST_NAMES):
            try:
                return found | {part: _make(job, kind, args | {"split": part})}
            except DataError as error:
                why = error.__cause__
                if not (isinstance(why, ValueError) and f"'{part}'" in str(why)):
                    raise DataError(
                        f"{error}; data_args.split=train takes the training part alone"
                    ) from why
                # The error says that the class has no part of this name.
        return found
    return {"train": _make(job, kind, args)}


def _make(job: Job, kind: Any, args: dict[str, Any]) -> Any:
    try:
        made = kind(**args)
        len(made)
    except Exception as error:  # the library may fail in any way
        raise DataError(
            f"data={job.data} cannot be made with {args} ({in_words(error)})"
        ) from error
    return made


@dataclass(frozen=True)
class Items:
    """Reads images of parts, by names such as ``train/12``.

    Attributes:
        parts: Data set of each part.
    """

    parts: dict[str, Any]

    def __call__(self, name: str) -> bytes:
        """The image, losslessly encoded."""
        part, _, index = name.partition("/")
        with _ONE_AT_A_TIME:
            try:
                image = self.parts[part][int(index)][0]
                if isinstance(image, Image.Image):
                    image = turned(image)  # torchvision leaves photographs lying
            except Exception as error:  # the library, and Pillow below it, may fail in any way
                raise UnreadableImageError(in_words(error)) from error
        if isinstance(image, Image.Image):
            return encoded(image)
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise UnreadableImageError(f"a {type(image).__name__} is no image with 8 bits a colour")
        try:
            return encoded(Image.fromarray(pixels))
        except TypeError as error:
            raise UnreadableImageError(f"no image has the shape {pixels.shape}") from error


def _list(made: dict[str, Any], job: Job, name: str) -> Listing:
    where = f"data={job.data}"
    labels: dict[str, Any] = {}
    known = getattr(made["train"], "classes", None)
    for part, held in made.items():
        mine, named = _labels(where, held)
        labels |= {f"{part}/{row}": label for row, label in enumerate(mine)}
        known = known if named else None
    classes, numbers = classes_of(where, labels)
    if isinstance(known, list | tuple) and {*numbers} <= {*range(len(known))}:
        names = [one if isinstance(one, str) else str(one[0]) for one in known]
        classes = named_classes(where, names)
        numbers = {label: label for label in numbers}
    files: dict[str, list[ImageFile]] = {part: [] for part in made}
    for row, label in labels.items():
        files[row.partition("/")[0]].append(ImageFile(row, numbers[label]))
    other = next((part for part in made if part != "train"), None)
    held_out = (f"torchvision's part {other}", files[other]) if other else None
    parts, split = split_parts(where, files["train"], held_out, classes, job)
    return Listing(Path(where), classes, parts, split, Items(made), kind=name)


def _labels(where: str, held: Any) -> tuple[list[Any], bool]:
    """The label of each item, from the data set's list of labels or else from the items.

    And whether the data set's names of classes go with them: with an argument such as
    ``target_types`` items may have other labels than the list.
    """
    for name in ("targets", "labels", "_labels"):
        found = getattr(held, name, None)
        if found is not None and hasattr(found, "__len__") and len(found) == len(held):
            break
    else:
        return _labels_of_items(where, held), True
    listed, differ = [_plain(one) for one in found], False
    for index in range(0, len(held), len(held) // _LOOKED_AT + 1):
        with suppress(Exception):  # an item that cannot be read is named when it is decoded
            differ |= _plain(held[index][1]) != listed[index]
    return (_labels_of_items(where, held), False) if differ else (listed, True)


def _labels_of_items(where: str, held: Any) -> list[Any]:
    found: list[Any] = []
    try:
        for index in range(len(held)):
            found.append(_plain(held[index][1]))
            if not isinstance(found[-1], int | str):
                break  # `classes_of` refuses it; to read all images first would take long
    except Exception as error:  # the library may fail in any way
        raise DataError(f"{where}: its items have no class ({in_words(error)})") from error
    return found


def _plain(label: Any) -> Any:
    """A label as a Python object; several numbers become a list, which is refused later."""
    found = label.tolist() if hasattr(label, "tolist") else label
    return found[0] if isinstance(found, list) and len(found) == 1 else found
