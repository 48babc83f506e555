"""WebDataset: images and labels in tar files, indexed once, so that each sample counts once.

The members of a sample share their name up to its first dot: ``0001.jpg`` and ``0001.cls``. With an
index of the members' positions every image can be read by itself, in any order.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from batchwright.errors import DataError
from batchwright.records import Job
from batchwright.workload.data.decoding import SUFFIXES
from batchwright.workload.data.listing import (
    ImageFile,
    Listing,
    classes_of,
    held_out_name,
    refuse_unless_text,
    split_parts,
)
from batchwright.workload.data.sources import ImageData, open_listed
from batchwright.workload.data.store import Progress

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_LABELS = ("cls", "json", "txt")  # in order of preference
_JSON_KEYS = ("label", "cls", "class", "class_id", "target")
_BLOCK = 2**20
_OURS = ("label", "val")  # keys of data_args
_MANY = 10**5  # most files that a pattern may name
_LONG = 2**20  # most bytes of a label, or of a header before a member
_HEADERS = (  # types of headers that `tarfile` reads into memory
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)

_Place = tuple[str, int, int]  # tar file, first byte, bytes


def open_web_dataset(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """Tar files by a pattern such as ``/sets/birds/{train,val}-{000..007}.tar``, or their folder.

    Files named ``val``, ``validation`` or ``test`` are held out, or those of the pattern
    ``data_args.val``. Labels are whole numbers or words in ``.cls`` or ``.txt``, or a value in
    ``.json``; ``data_args.label`` names the ending, or the key in the JSON.

    Raises:
        DataError: No file fits, one is damaged, or a sample has no image or no label.
    """
    strange = job.data_args.keys() - {*_OURS}
    if strange:
        raise DataError(f"data={job.data} takes data_args.label and .val, and no {min(strange)}")
    refuse_unless_text(job, _OURS)
    shards = _shards(place)
    held_out = job.data_args.get("val")
    more = _shards(str(held_out)) if held_out else []
    used = _used(shards, more)
    kept = {path for paths in used.values() for path in paths}
    states = [(str(one), one.stat()) for one in dict.fromkeys([*shards, *more]) if one in kept]
    identity: dict[str, object] = {
        "data": "wds",
        "files": [[name, one.st_size, one.st_mtime_ns] for name, one in states],
    }
    if "label" in job.data_args:
        identity["label"] = "named"  # a store without this may hold the labels of ``.cls`` instead
    return open_listed(lambda: _list(used, job), identity, job, progress, verify)


def expanded(pattern: str) -> list[str]:
    """The names that a pattern with braces expands to, as in a shell.

    >>> expanded("{train,val}-{09..10}.tar")
    ['train-09.tar', 'train-10.tar', 'val-09.tar', 'val-10.tar']

    Raises:
        DataError: Braces hold neither a range nor a list, or expand to more than 100,000 files.
    """
    names = list(islice(_expanded(pattern), _MANY + 1))
    if len(names) > _MANY:
        raise DataError(f"{pattern} names more than {_MANY:,} files")
    return names


def _expanded(pattern: str) -> Iterator[str]:
    found = _BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    before, inside, after = pattern[: found.start()], found[1], pattern[found.end() :]
    limits = _RANGE.fullmatch(inside)
    if limits is None and "," not in inside:
        raise DataError(
            f"{pattern}: {{{inside}}} is neither a range such as {{000..007}} nor a list"
        )
    if limits:
        first, last = int(limits[1]), int(limits[2])
        if last < first:
            raise DataError(f"{pattern}: {{{inside}}} goes backwards: write {{{last}..{first}}}")
        numbers = range(first, min(last, first + _MANY) + 1)
        words = [f"{number:0{len(limits[1])}}" for number in numbers]
    else:
        words = inside.split(",")
    for word in words:
        yield from _expanded(before + word + after)


def _shards(pattern: str) -> list[Path]:
    """Absolute paths of the tar files that a pattern or a folder names, in order."""
    folder = Path(pattern).expanduser()
    if folder.is_dir():
        found = sorted(folder.absolute().rglob("*.tar"))
        if not found:
            raise DataError(f"{folder} holds no .tar file")
        return found
    found = []
    names = [str(folder)] if folder.is_file() else expanded(str(folder))
    for name in dict.fromkeys(names):
        wild = set("*?[") & set(name) and not Path(name).is_file()
        here = [Path(one) for one in sorted(glob(name))] if wild else [Path(name)]  # noqa: PTH207
        missing = [one for one in here if not one.is_file()]
        if missing or not here:
            raise DataError(f"there is no file {missing[0] if missing else name}")
        found += [one.absolute() for one in here]
    return found


class CheckedTarInfo(tarfile.TarInfo):
    """A `tarfile.TarInfo` that refuses headers which would fill the memory."""

    @classmethod
    def frombuf(cls, *buffer: Any) -> CheckedTarInfo:
        """Parse a header from 512 bytes."""
        made = super().frombuf(*buffer)
        if made.size > _LONG and made.type in _HEADERS:
            raise tarfile.ReadError(f"a header of {made.size:,} bytes")
        return made


def refuse_trailing_data(stream: Any) -> None:
    """Raise `tarfile.ReadError` if anything but zeros follows the end of a tar file.

    `tarfile` reads a damaged header, except the first, as the end, and ignores the rest; it also
    ignores files that were appended, as by ``cat``.
    """
    while block := stream.read(_BLOCK):
        if any(block):
            raise tarfile.ReadError("more follows behind its end")


@dataclass(frozen=True)
class TarMembers:
    """Reads members of tar files by name.

    Attributes:
        places: By name: the tar file, the member's first byte and its bytes.
    """

    places: dict[str, _Place] = field(repr=False)

    def __call__(self, name: str) -> bytes:
        """The member's content."""
        path, start, size = self.places[name]
        with Path(path).open("rb") as stream:
            stream.seek(start)
            return stream.read(size)


def _used(shards: list[Path], more: list[Path]) -> dict[str, list[Path]]:
    """The tar files of the training part and of the held-out part, if there is one, by part.

    Files of further parts are left out: a test part beside a validation part need not have labels.
    """
    every = list(dict.fromkeys([*shards, *more]))
    root = _root(every)
    by_part: dict[str, list[Path]] = {}
    for path in every:
        words = re.findall(r"[a-z]+", str(path.relative_to(root)).lower())
        part = "data_args.val" if path in more else (held_out_name(words) if not more else None)
        by_part.setdefault(part or "train", []).append(path)
    if "train" not in by_part:
        raise DataError(f"{root}: all of these files are held out: {', '.join(by_part)}")
    held_out = "data_args.val" if more else held_out_name(by_part)
    return {part: paths for part, paths in by_part.items() if part in ("train", held_out)}


def _root(paths: Iterable[Path]) -> Path:
    """The innermost folder that contains all ``paths``."""
    return Path(os.path.commonpath([path.parent for path in paths]))


def _list(used: Mapping[str, list[Path]], job: Job) -> Listing:
    # Names below the root do not depend on the place of the files, nor does a split by names.
    root = _root(path for paths in used.values() for path in paths)
    places: dict[str, _Place] = {}
    labels: dict[str, Any] = {}
    by_part: dict[str, list[str]] = {part: [] for part in used}
    for part, paths in used.items():
        for path in paths:
            for name, place, label in _samples(path, root, job):
                if name in places:
                    raise DataError(
                        f"{root / name} is there twice: give each sample a name of its own"
                    )
                places[name], labels[name] = place, label
                by_part[part].append(name)
    classes, numbers = classes_of(root, labels)
    files = {
        part: [ImageFile(name, numbers[labels[name]], places[name][2]) for name in names]
        for part, names in by_part.items()
    }
    held_out = next((part for part in used if part != "train"), None)
    hint = ", or name their files: data_args.val=PATTERN"
    val = None if held_out is None else (f"the files of {held_out}", files[held_out])
    parts, split = split_parts(root, files["train"], val, classes, job, hint)
    return Listing(root, classes, parts, split, TarMembers(places), kind="wds")


def sample_of(name: str) -> tuple[str, str]:
    """Of a member's name that of its sample, and the ending in lower case.

    >>> sample_of("a/0001.seg.PNG")
    ('a/0001', 'seg.png')
    """
    folder, _, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}/{stem}".lstrip("/"), ending.lower()


def _samples(path: Path, root: Path, job: Job) -> Iterator[tuple[str, _Place, Any]]:
    """Name, place and label of each sample of a tar file."""
    wanted = job.data_args.get("label")
    images: dict[str, tuple[str, _Place]] = {}
    labels: dict[str, dict[str, _Place]] = {}
    for name, start, size in _members(path):
        if name.rpartition("/")[2].startswith((".", "__")):
            continue
        key, ending = sample_of(name)
        if f".{ending.rpartition('.')[2]}" in SUFFIXES:
            if key in images:
                raise DataError(f"{path}: sample {key} has two images: {images[key][0]} and {name}")
            images[key] = (name, (str(path), start, size))
        else:
            labels.setdefault(key, {})[ending] = (str(path), start, size)
    for key in labels.keys() - images.keys():
        if labels[key].keys() & {*_LABELS, wanted}:
            raise DataError(f"{path}: sample {key} has a label and no image")
    read = TarMembers({})
    for key, (name, place) in images.items():
        endings = labels.get(key, {})
        # A name that is no ending is a key of the JSON, whatever other labels there are.
        order = _LABELS if wanted is None else (wanted, "json")
        found = next((one for one in order if one in endings), None)
        if found is None:
            has = ", ".join(sorted(endings)) or "nothing"
            remedy = f"write a member {key}.cls, or name the ending: data_args.label=ENDING"
            if wanted is not None:
                remedy = f"data_args.label={wanted} is neither an ending of its members nor a key"
                remedy += f" in {key}.json"
            raise DataError(
                f"{path}: sample {key} has no label: it has {has} besides its image; {remedy}"
            )
        read.places[name] = endings[str(found)]
        if read.places[name][2] > _LONG:
            raise DataError(f"{path}: the label of sample {key} has more than {_LONG:,} bytes")
        label = _label(read(name), str(found), wanted, f"{path}: sample {key}.{found}")
        yield str(path.relative_to(root) / name.lstrip("/")), place, label


def _label(content: bytes, ending: str, wanted: object, where: str) -> Any:
    try:
        text = content.decode().strip()
        if ending != "json":
            return int(text) if re.fullmatch(r"-?\d+", text) else text
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no label: {error}") from error
    if not isinstance(held, dict):
        return held
    keys = _JSON_KEYS if wanted in (None, "json") else (wanted,)
    key = next((one for one in keys if one in held), None)
    if key is None:
        raise DataError(f"{where} has no {' or '.join(map(str, keys))}: it has {', '.join(held)}")
    return held[key]


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and number of bytes of each file in a tar file.

    Raises:
        DataError: The tar file is compressed, damaged or cut off.
    """
    last = "its beginning"
    try:
        with tarfile.open(path, "r:", tarinfo=CheckedTarInfo) as tar:
            for member in tar:
                if member.issparse():
                    raise tarfile.ReadError(f"{member.name} is stored with holes")
                if member.isreg():
                    yield member.name, member.offset_data, member.size
                last = member.name
            end = tar.offset
        with path.open("rb") as stream:
            stream.seek(end)
            refuse_trailing_data(stream)
    except (tarfile.TarError, EOFError) as error:
        with path.open("rb") as stream:
            packed = stream.read(4)
        if packed[:2] == b"\x1f\x8b" or packed == b"\x28\xb5\x2f\xfd":
            raise DataError(
                f"{path} is compressed, and its images could only be read one after the other: "
                "unpack it to a plain .tar (images are compressed in themselves)"
            ) from error
        raise DataError(
            f"{path} is damaged or cut off behind {last} ({error}): make or fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
