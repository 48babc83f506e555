"""Decoded images on disk: written once, mapped into memory by every process that trains.

A store is a folder of plain files in a private cache:

    header.json      facts of the data, and the size and SHA-256 of the other files
    train.pixels     uint8, image after image, rows of RGB pixels
    train.index      int64, one row per image: label, height, width
    val.pixels, val.index

A store is written in another folder under a lock, synced and renamed, so it is whole or absent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from platformdirs import user_cache_path

from batchwright.errors import FileError
from batchwright.records import DataFacts
from batchwright.storage.files import sync
from batchwright.storage.locks import Busy, lock_file
from batchwright.workload.data.image_store import ImageStore, Origin
from batchwright.workload.data.store_writer import (
    CACHE_VARIABLE,
    PARTS,
    PIXELS,
    Header,
    Part,
    StoredFile,
    StoreWriter,
    clear_errors,
)

Progress = Callable[[int, int, str], None]
"""Called as progress(done, total, what): images done, images in all, what is being done."""

# Python names it from 3.13 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_Mapped = TypeVar("_Mapped")
_Mapping = Callable[[Path, Part, "Header"], _Mapped]
_logger = logging.getLogger(__name__)


def open_store(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts],
    *,
    progress: Progress | None = None,
    verify: bool = True,
) -> tuple[ImageStore, ImageStore, Header]:
    """The training and the held-out images of ``recipe``; built first if the cache has none.

    Args:
        recipe: JSON values that determine the content of the store; stores are found by them.
        build: Adds every image of both parts to the writer, and returns the facts.
        progress: Called while another process is waited for.
        verify: Whether to compare the files with their digests, for which they are read whole.
            Sizes are always compared. A process whose parent has just verified the store need not.

    Raises:
        FileError: The cache folder cannot be written, or is full.
        DataError: ``build`` raises it.
    """
    found = _open(recipe, build, PARTS, _map, progress, verify)
    assert found is not None  # noqa: S101 - it was built
    stores, header = found
    return stores["train"], stores["val"], header


def open_part(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts] | None,
    *,
    progress: Progress | None = None,
) -> ImageStore | None:
    """`open_store` for training images alone; `None` without a store and without ``build``."""
    found = _open(recipe, build, PARTS[:1], _map, progress, verify=True)
    return found and found[0]["train"]


def open_index(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts] | None,
    *,
    progress: Progress | None = None,
) -> tuple[dict[Part, torch.Tensor], Header] | None:
    """`open_store` for images that stay in their files.

    Returns:
        By part int64 (n, 3), label, height and width of each file in order; and the header. `None`
        without a store and without ``build``.
    """
    return _open(recipe, build, PARTS, _rows, progress, verify=True)


def is_stored(recipe: Mapping[str, object]) -> bool:
    """Whether there is a store of ``recipe``, whole or damaged."""
    return (_stores_folder() / _key(recipe)).exists()


def stored_facts(recipe: Mapping[str, object]) -> DataFacts | None:
    """Facts of the images in a store of ``recipe``; `None` if there is none, or a damaged one."""
    try:
        header = (_stores_folder() / _key(recipe) / "header.json").read_bytes()
        return Header.model_validate_json(header).facts
    except (OSError, ValueError):
        return None


def _open(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts] | None,
    parts: Sequence[Part],
    mapped: _Mapping[_Mapped],
    progress: Progress | None,
    verify: bool,
) -> tuple[dict[Part, _Mapped], Header] | None:
    """Some parts of a store, each ``mapped``, and its header; built if there is none."""
    folder = _stores_folder() / _key(recipe)
    found = _read(folder, parts, mapped, verify=verify)
    if found is None and build is not None:
        with _lock(folder, progress):
            # Whoever held the lock before may have built it.
            found = _read(folder, parts, mapped, verify=verify, tell=True)
            found = found or _write(folder, build, parts, mapped)
    return found


def _key(recipe: Mapping[str, object]) -> str:
    text = json.dumps({"format": Header.model_fields["format"].default, **recipe}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --------------------------------------------------------------------------------------- the folder


def cache_folder() -> Path:
    """The folder for decoded images: BATCHWRIGHT_CACHE, or the user's cache folder.

    Raises:
        FileError: The folder is in a home folder that does not exist.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else user_cache_path("batchwright")
    except RuntimeError:  # nobody has that ~NAME, or this user has no home
        if not chosen:
            raise FileError(
                f"this user has no home folder to keep a cache in: set {CACHE_VARIABLE} to the "
                "path of a folder that you can write"
            ) from None
        raise FileError(
            f"{CACHE_VARIABLE}={chosen}: there is no such home folder; give the path of a folder "
            "that you can write"
        ) from None


def free_bytes() -> int:
    """Free bytes on the disk of the cache, once what killed processes have left there is removed.

    Raises:
        FileError: The cache folder cannot be made.
    """
    folder = cache_folder()  # the user may have named one that holds other folders as well
    for left in (*folder.glob("stores/*.part"), *folder.glob("fetched/*.part")):
        # Whoever writes one holds its lock.
        with (
            suppress(Busy, OSError),
            lock_file(left.with_suffix(".lock"), seconds=0, waiting=lambda _: None),
        ):
            shutil.rmtree(left, ignore_errors=True)
    with clear_errors(_stores_folder()):
        return shutil.disk_usage(_stores_folder()).free


def _stores_folder() -> Path:
    folder = cache_folder() / "stores"
    with clear_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def _lock(folder: Path, progress: Progress | None) -> Iterator[None]:
    """Inside, hold the lock for writing ``folder``; waits while another process holds it.

    The lock file stays: removing it would let two processes lock two files of one name. The kernel
    frees the lock of a process that dies.
    """

    def waiting(_: str) -> None:
        if progress:
            progress(0, 1, "waiting for another process that writes these images")

    with clear_errors(folder.parent):  # some network file systems cannot lock
        lock = lock_file(folder.with_suffix(".lock"), seconds=math.inf, waiting=waiting)
    with lock:
        yield


# ------------------------------------------------------------------------------------------ reading


def _read(
    folder: Path,
    parts: Sequence[Part],
    mapped: _Mapping[_Mapped],
    *,
    verify: bool,
    tell: bool = False,
) -> tuple[dict[Part, _Mapped], Header] | None:
    """The store in ``folder``; `None` if it is missing or damaged; ``tell`` logs damage."""
    with clear_errors(folder.parent):
        if not folder.exists():
            return None
    try:
        header = Header.model_validate_json((folder / "header.json").read_bytes())
        for name, file in header.files.items():
            _check(folder / name, file, verify=verify)
        found = {part: mapped(folder, part, header) for part in parts}
    except (OSError, ValueError) as error:
        if tell:
            reason = str(error).partition("\n")[0]
            _logger.warning("decoded images in %s are damaged, made again: %s", folder, reason)
        return None
    return found, header


def _check(path: Path, file: StoredFile, *, verify: bool) -> None:
    size = path.stat().st_size
    if size != file.bytes:
        raise ValueError(f"{path.name} has {size:,} bytes instead of {file.bytes:,}")
    if verify:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            raise ValueError(f"{path.name} is not what was written")


def _map(folder: Path, part: Part, header: Header) -> ImageStore:
    index = _rows(folder, part, header)
    path = folder / f"{part}{PIXELS}"
    pixels = mapped_bytes(path)
    files = (header.files[path.name], header.files[f"{part}.index"])
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    origin = Origin(digest, header.facts)
    return ImageStore(pixels, index[:, 0].contiguous(), index[:, 1:], origin)


def mapped_bytes(path: Path) -> torch.Tensor:
    """The bytes of a file, mapped into memory: uint8, flat. Changes to them do not reach the file.

    The kernel is not asked to reserve memory for such changes. `torch.from_file` asks for it, and
    fails with a file that is larger than memory and swap together.

    Raises:
        FileError: This process may not map so many bytes. The file itself may be whole.
    """
    with path.open("rb") as file:
        try:
            content = mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise FileError(
                f"{path} cannot be mapped into memory: its {path.stat().st_size:,} bytes are more "
                "than this process may have (`ulimit -v`), or this machine gives "
                "(vm.overcommit_memory=2): raise the limit, or give lower resolutions"
            ) from error
    return torch.frombuffer(content, dtype=torch.uint8)


def _rows(folder: Path, part: Part, _: Header) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(folder / f"{part}.index", "<i8").reshape(-1, 3))


# ------------------------------------------------------------------------------------------ writing


def _write(
    folder: Path,
    build: Callable[[StoreWriter], DataFacts],
    parts: Sequence[Part],
    mapped: _Mapping[_Mapped],
) -> tuple[dict[Part, _Mapped], Header]:
    """Build the store in another folder, then rename it; after an error nothing is left of it."""
    unfinished = folder.with_suffix(".part")
    try:
        with clear_errors(folder.parent):
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
            unfinished.mkdir(mode=0o700)
        with StoreWriter(unfinished, parts) as writer:
            writer.finish(build(writer))
        with clear_errors(folder.parent):
            if folder.exists():
                shutil.rmtree(folder)
            unfinished.rename(folder)
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    found = _read(folder, parts, mapped, verify=False)
    if found is None:
        raise FileError(f"the image cache changes what is written to it: {folder}")
    return found
