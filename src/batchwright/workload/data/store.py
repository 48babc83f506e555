"""Decoded images on disk: written once, mapped into memory by every process that trains.

A store is a folder of plain files in a private cache:

    header.json      what is in it, and the size and SHA-256 of the other files
    train.pixels     uint8, image after image, rows of RGB pixels
    train.index      int64, one row per image: label, height, width
    val.pixels, val.index

It is written aside under a lock, synced and renamed, so that a store is either whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from platformdirs import user_cache_path

from batchwright.errors import FileError
from batchwright.records import DataFacts
from batchwright.storage.locks import lock_file
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
    sync,
)

Progress = Callable[[int, int, str], None]
"""Called as progress(done, total, what): images done, images in all, what is being done."""

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
    """The training and the held-out images made by ``recipe``; built first if the cache has none.

    Args:
        recipe: All that decides what ends up in the store; JSON values. Stores are found by it.
        build: Adds every image of both parts to the writer, and returns the facts.
        progress: Told when another process is waited for.
        verify: Compare the files with their digests (about 0.5 s a gigabyte). Sizes are always
            compared. A process whose parent has just verified the store can leave it out.

    Raises:
        FileError: The cache folder cannot be written, or is full.
        DataError: From ``build``.
    """
    found, header = _open(recipe, build, PARTS, _map, progress, verify)
    return found["train"], found["val"], header


def open_part(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts] | None,
    *,
    progress: Progress | None = None,
) -> ImageStore | None:
    """As `open_store`, for training images alone; `None` where there are none and no ``build``."""
    if build is None:
        found = _read(_stores_folder() / _key(recipe), PARTS[:1], _map, verify=True)
        return found and found[0]["train"]
    return _open(recipe, build, PARTS[:1], _map, progress, verify=True)[0]["train"]


def open_index(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts] | None,
    *,
    progress: Progress | None = None,
) -> tuple[dict[Part, torch.Tensor], Header] | None:
    """As `open_store`, for images that stay in their files: what the writer was told of them.

    Returns:
        By part int64 (n, 3): label, height and width of each file, in order; and the header.
        `None` where there is nothing and no ``build``.
    """
    if build is None:
        return _read(_stores_folder() / _key(recipe), PARTS, _rows, verify=True)
    return _open(recipe, build, PARTS, _rows, progress, verify=True)


def is_stored(recipe: Mapping[str, object]) -> bool:
    """Whether there is a store made by ``recipe``, whole or damaged."""
    return (_stores_folder() / _key(recipe)).exists()


def _open(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts],
    parts: Sequence[Part],
    mapped: _Mapping[_Mapped],
    progress: Progress | None,
    verify: bool,
) -> tuple[dict[Part, _Mapped], Header]:
    folder = _stores_folder() / _key(recipe)
    found = _read(folder, parts, mapped, verify=verify)
    if found is None:
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
    """Where decoded images are kept: BATCHWRIGHT_CACHE, or the user's cache folder.

    Raises:
        FileError: The variable names the home folder of nobody, or there is no home folder.
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
    """What is free on the disk that holds the cache.

    Raises:
        FileError: There can be no cache.
    """
    with clear_errors(_stores_folder()):
        return shutil.disk_usage(_stores_folder()).free


def _stores_folder() -> Path:
    folder = cache_folder() / "stores"
    with clear_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def _lock(folder: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the right to write ``folder``; waits while another process has it.

    The lock file stays: removing it would let two processes lock two files of the same name. The
    kernel frees the lock of a process that dies.
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
    """The store in ``folder``, or `None` if there is none or it is damaged."""
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
    # A private mapping: whatever a program does to the tensor, the file stays as it is.
    pixels = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    files = (header.files[path.name], header.files[f"{part}.index"])
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    origin = Origin(digest, header.facts)
    return ImageStore(pixels, index[:, 0].contiguous(), index[:, 1:], origin)


def _rows(folder: Path, part: Part, _: Header) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(folder / f"{part}.index", "<i8").reshape(-1, 3))


# ------------------------------------------------------------------------------------------ writing


def _write(
    folder: Path,
    build: Callable[[StoreWriter], DataFacts],
    parts: Sequence[Part],
    mapped: _Mapping[_Mapped],
) -> tuple[dict[Part, _Mapped], Header]:
    """Build the store aside, then put it in place; on any failure nothing is left of it."""
    aside = folder.with_suffix(".part")
    try:
        with clear_errors(folder.parent):
            shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
            aside.mkdir(mode=0o700)
        with StoreWriter(aside, parts) as writer:
            writer.finish(build(writer))
        with clear_errors(folder.parent):
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    found = _read(folder, parts, mapped, verify=False)
    if found is None:
        raise FileError(f"the image cache changes what is written to it: {folder}")
    return found
