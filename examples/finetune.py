r"""Train a small network, then only a new last layer of it, on a small image folder.

    python finetune.py

First a network learns the ten digits. Then it learns to tell even from odd, from 400 PNG files in
a folder per class: its convolutions are kept as they are, and its last layer, which had ten
outputs, is replaced by a fresh one with two. On the command line the second part reads:

    batchwright run data=imagefolder:parity val=0.25 augment=crop network=resnet8 \
        weights=digits/checkpoints/best.pt frozen=all-but-head epochs=8 \
        workers=1 launch=in-process probe.budget=3

With weights of a library, which are downloaded, give `network=timm:resnet18
network_args.pretrained=true resolutions=64` in place of `network` and `weights`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import batchwright as bw

QUICK = {"workers": 1, "launch": "in-process", "probe": {"budget": 3}}


def write_images(folder: Path, count: int = 400) -> None:
    """``count`` digits as PNG files, 8 x 8 pixels, in ``even/`` and ``odd/``."""
    digits = load_digits()
    for index in range(count):
        place = folder / ("odd" if digits.target[index] % 2 else "even")
        place.mkdir(parents=True, exist_ok=True)
        grey = (digits.images[index] * 255 / 16).astype(np.uint8)
        Image.fromarray(grey).save(place / f"{index}.png")


def main(folder: Path) -> None:
    """Train, then fine-tune; both runs are kept in ``folder``."""
    bw.run(data="digits", network="resnet8", epochs=8, run_folder=folder / "digits", **QUICK)
    write_images(folder / "images")
    summary = bw.run(
        data=f"imagefolder:{folder / 'images'}",
        val=0.25,
        augment="crop",
        network="resnet8",
        weights=str(folder / "digits" / "checkpoints" / "best.pt"),
        frozen=("all-but-head",),
        epochs=8,
        run_folder=folder / "parity",
        **QUICK,
    )
    print(f"even or odd: {summary.accuracy:.1%} of the held-out images")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
