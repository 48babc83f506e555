"""Smaller copies of data sets, in the originals' formats, for use with ordinary commands.

Images are drawn evenly over the original, in its order. By default all held-out images are kept.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.workload.data.arrays import EDITIONS, find_folder, read_classes, read_part

CIFAR100 = EDITIONS["cifar100"]
PICKLE = 4  # the newest protocol whose pickles of arrays the reader of CIFAR files admits


def smaller_cifar100(data: Path, images: int, folder: Path, *, held_out: int | None = None) -> Path:
    """CIFAR-100 with ``images`` training images and ``held_out`` held-out ones (by default all).

    ``data`` holds ``cifar-100-python/``; so does ``folder`` afterwards, which is returned.
    """
    original, copy = find_folder(CIFAR100, data), folder / CIFAR100.folder
    copy.mkdir(parents=True)
    for name in CIFAR100.names:
        link(original / name, copy / name)
    classes = len(read_classes(CIFAR100, original))
    wanted = {"train": images, "test": held_out}
    for part, name in (("train", "train"), ("val", "test")):
        if wanted[name] is None:
            link(original / name, copy / name)
            continue
        pixels, labels = read_part(CIFAR100, original, part, classes)
        chosen = evenly(len(labels), wanted[name])
        planes = np.ascontiguousarray(pixels[chosen].transpose(0, 3, 1, 2))  # as the files hold it
        write_cifar(copy / name, planes.reshape(len(chosen), -1), labels[chosen])
    return folder


def write_cifar(path: Path, pixels: np.ndarray, labels: Iterable[Any]) -> None:
    """Write a file of CIFAR-100.

    Args:
        path: The file.
        pixels: uint8 (n, 3072), red, green and blue planes of each image.
        labels: The images' classes.
    """
    content = {"data": pixels, CIFAR100.label_key: [int(label) for label in labels]}
    path.write_bytes(pickle.dumps(content, protocol=PICKLE))


def smaller_folder(data: Path, images: int, folder: Path, *, held_out: int | None = None) -> Path:
    """An image folder with ``train/`` and ``val/``, and equally many images of each class.

    ``images`` are the training images in all, ``held_out`` the held-out ones (by default all).
    """
    parts: dict[str, list[Path]] = {"train": [], "val": []}
    for part, wanted in (("train", images), ("val", held_out)):
        classes = [path for path in sorted((data / part).iterdir()) if path.is_dir()]
        for one in classes:
            files = sorted(path for path in one.iterdir() if path.is_file())
            count = len(files) if wanted is None else wanted // len(classes)
            parts[part] += [files[index] for index in evenly(len(files), count)]
    return link_folder(folder, parts)


def link_folder(folder: Path, parts: Mapping[str, Iterable[Path]]) -> Path:
    """An image folder of links to files elsewhere, which are in folders of their classes there."""
    for part, files in parts.items():
        for file in files:
            (folder / part / file.parent.name).mkdir(parents=True, exist_ok=True)
            link(file, folder / part / file.parent.name / file.name)
    return folder


def evenly(count: int, wanted: int) -> list[int]:
    """``wanted`` indices below ``count``, evenly spaced."""
    if wanted > count:
        raise ValueError(f"{wanted} images wanted of {count}")
    return [index * count // wanted for index in range(wanted)]


def link(file: Path, copy: Path) -> None:
    """A hard link to a file, or, on another file system, a copy of it."""
    with suppress(OSError):
        os.link(file.resolve(), copy)
        return
    shutil.copyfile(file, copy)
