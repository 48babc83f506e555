"""Smaller copies of data sets, in the originals' formats, so that ordinary commands take them.

Images are drawn evenly over the original, in its order; held-out images are kept unless said
otherwise.
"""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np

from batchwright.workload.data import cifar
from batchwright.workload.data.store import Part

PICKLE = 4  # the newest protocol that writes an array as the readers of CIFAR files admit it


def smaller_cifar100(data: Path, images: int, folder: Path, *, held_out: int | None = None) -> Path:
    """CIFAR-100 with so many training images.

    Args:
        data: Holds ``cifar-100-python/``.
        images: At most the original's.
        folder: Takes the copy, ``cifar-100-python/``.
        held_out: Images to keep of the held-out ones; ``None``: all.

    Returns:
        The folder, as ``cifar100:PATH`` takes it.
    """
    edition = cifar.EDITIONS["cifar100"]
    original, copy = cifar.find_folder(edition, data), folder / edition.folder
    copy.mkdir(parents=True)
    for name in edition.names:
        link(original / name, copy / name)
    classes = len(cifar.read_classes(edition, original))
    parts: tuple[tuple[Part, str, int | None], ...] = (
        *(("train", name, images) for name in edition.train),
        *(("val", name, held_out) for name in edition.val),
    )
    for part, name, wanted in parts:
        if wanted is None:
            link(original / name, copy / name)
            continue
        pixels, labels = cifar.read_part(edition, original, part, classes)
        chosen = evenly(len(labels), wanted)
        planes = np.ascontiguousarray(pixels[chosen].transpose(0, 3, 1, 2))  # as the files hold it
        content = {
            "data": planes.reshape(len(chosen), -1),
            edition.label_key: [int(label) for label in labels[chosen]],
        }
        (copy / name).write_bytes(pickle.dumps(content, protocol=PICKLE))
    return folder


def smaller_folder(data: Path, images: int, folder: Path) -> Path:
    """An image folder with ``train/`` and ``val/``, with so many training images.

    Args:
        data: The original; each class gets as many images.
        images: A multiple of the number of classes.
        folder: Takes the copy.

    Returns:
        The folder, as ``imagefolder:PATH`` takes it.
    """
    for part in ("train", "val"):
        classes = sorted(path for path in (data / part).iterdir() if path.is_dir())
        for one in classes:
            files = sorted(path for path in one.iterdir() if path.is_file())
            if part == "train":
                files = [files[index] for index in evenly(len(files), images // len(classes))]
            (folder / part / one.name).mkdir(parents=True)
            for file in files:
                link(file, folder / part / one.name / file.name)
    return folder


def evenly(count: int, wanted: int) -> list[int]:
    """So many indices below ``count``, evenly spaced."""
    if wanted > count:
        raise ValueError(f"{wanted} images wanted of {count}")
    return [index * count // wanted for index in range(wanted)]


def link(file: Path, copy: Path) -> None:
    """The same file once more, or, on another file system, a copy of it."""
    with suppress(OSError):
        os.link(file.resolve(), copy)
        return
    shutil.copyfile(file, copy)
