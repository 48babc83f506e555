"""The way from stored images to batches: cheap at low resolutions, and fast without a store.

`low_over_top_images`: training images per second at 88 px over those at 160 px. imagenette2-160 in
the store, `resnet8`, batch 64, one CPU worker, random crop and flip, SGD, precision as `auto`
chooses it; input, forward, backward and update count. Two processes, one for each resolution, take
turns: in every round each trains 2 steps that are not timed and then 8 that are. The number of
pixels gives the limit, (160 / 88)^2 = 3.31.

`loader_over_pil`: images per second from JPEG files to normalized batches of 64 at 96 px, without
training. The files are images of imagenette2-160 enlarged to 500 x 375 px (quality 90). Both arms
have two loader processes and take turns: 4 batches that are not timed and then 24 that are. All
processes have the environment in which our launcher starts workers: OpenMP threads that wait sleep
soon and leave the cores to the loaders.

    ours    `FilePipeline`, which reads folders that are too large for the cache
    pil     the usual code in a DataLoader: open, convert, a random square of the same size relative
            to the image, bilinear resize, random flip, to a float tensor, normalize

Ratios are medians over the rounds of the ratio within a round, their spread is the quartiles; 6
rounds with --quick, 20 with --full.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from batchwright.distributed.processes import spinning_shortly
from batchwright.workload.data.decoding import SUFFIXES
from batchwright.workload.data.image_files import FilePipeline, ImageFiles
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import prepare_process, usable_cores
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, ratios
from benchmarks.harness.plans import CPU
from benchmarks.harness.turns import Arm, Turns, images_per_second
from benchmarks.methods.resolution_arms import Task, job_of, train_at

LOW, TOP, BATCH = 88, 160, 64
ROUNDS = {False: 6, True: 20}  # by --full
FILES, SIZE, QUALITY = 1024, (500, 375), 90
SIDE, LOADERS = 96, 2
MARGIN = 1.15  # shorter side of an image over that of the square cut out of it, as in the store
MEAN, STD = (0.46, 0.45, 0.42), (0.28, 0.28, 0.30)
Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a part, in pixels."""

BENCHMARK = Benchmark(
    "data_path",
    "The way from files to batches",
    "imagenette2-160, `resnet8`, one worker; JPEG files of 500 x 375 px",
    (
        Figure("low_over_top_images", "ratio", "median", "images/s, training at 88 px over "
               "training at 160 px (limit: 3.31)", at_least=3.1),
        Figure("loader_over_pil", "ratio", "median", "images/s, our pipeline over a usual Pillow "
               "loader, from large JPEG files to batches", at_least=2.0),
        *(Figure(f"{arm}_images_per_second", "images/s", "median") for arm in ("low", "top")),
        *(Figure(f"{arm}_loader_images", "images/s", "median") for arm in ("ours", "pil")),
    ),
    needs_data="always",
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Training at two resolutions in turns, then loading alone."""
    os.environ.update(spinning_shortly(os.environ))
    rounds, images = ROUNDS[arguments.full], arguments.data / "imagenette2-160"
    task = Task(f"imagefolder:{images}", (LOW, TOP), batch=BATCH)
    say("imagenette2-160: reading images")
    open_data(job_of(task, 0))
    trained = {
        "low": partial(Arm, train_at, task, LOW, folder / "low"),
        "top": partial(Arm, train_at, task, TOP, folder / "top"),
    }
    rates = images_per_second(trained, rounds, lead_in=2, steps=8, warm_up=4)
    say(f"enlarging {FILES} images")
    names = enlarge(images / "train", folder / "enlarged", FILES)
    loading = {arm.__name__: partial(Arm, arm, folder / "enlarged", names) for arm in (ours, pil)}
    loaded = images_per_second(loading, rounds, lead_in=4, steps=24)
    return found_of(rates, loaded), {"trained": rates, "loaded": loaded}


def found_of(
    rates: dict[str, list[float]], loaded: dict[str, list[float]]
) -> dict[str, list[float]]:
    """All figures, by name, from images per second by arm in each round."""
    return {
        "low_over_top_images": ratios(rates["low"], rates["top"]),
        "loader_over_pil": ratios(loaded["ours"], loaded["pil"]),
        **{f"{name}_images_per_second": some for name, some in rates.items()},
        **{f"{name}_loader_images": some for name, some in loaded.items()},
    }


def enlarge(source: Path, target: Path, count: int) -> list[str]:
    """Write ``count`` images, evenly spaced over ``source``, enlarged; return their names."""
    target.mkdir(parents=True)
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
    names = []
    for number, path in enumerate(files[:: len(files) // count][:count]):
        names.append(f"{number}.jpg")
        with Image.open(path) as image:
            large = image.convert("RGB").resize(SIZE, Image.Resampling.BICUBIC)
        large.save(target / names[-1], quality=QUALITY)
    return names


# ---------------------------------------------------------------------------------- loading alone


def ours(turns: Turns, root: Path, names: list[str]) -> None:
    """Make batches by our pipeline over files, a turn at a time."""
    prepare_process(usable_cores())
    labels = torch.zeros(len(names), dtype=torch.int64)
    files = ImageFiles(root, names, labels, side=SIDE, mean=MEAN, std=STD)
    pipeline = FilePipeline(files, device=CPU, augmentation="crop-flip", seed=0, loaders=LOADERS)
    turns.ready()
    epoch = 0
    while True:
        order = torch.randperm(len(files)).split(BATCH)
        for images, _ in pipeline.batches(order, epoch=epoch, resolution=SIDE):
            turns.step_done(len(images))
        epoch += 1


def pil(turns: Turns, root: Path, names: list[str]) -> None:
    """Make batches by the usual code in a DataLoader, a turn at a time."""
    paths = [root / name for name in names]
    loader = DataLoader(
        UsualImages(paths, [0] * len(paths), square_of, SIDE, (MEAN, STD)),
        batch_size=BATCH,
        shuffle=True,
        num_workers=LOADERS,
        persistent_workers=True,
    )
    turns.ready()
    while True:
        for images, _ in loader:
            turns.step_done(len(images))


def square_of(width: int, height: int) -> Box:
    """A random square."""
    edge = round(min(width, height) / MARGIN)
    left, top = random.randint(0, width - edge), random.randint(0, height - edge)
    return left, top, left + edge, top + edge


class UsualImages(Dataset[tuple[Tensor, int]]):
    """Decode the whole image, crop, resize, mirror, normalize; one by one.

    Args:
        paths: The files.
        labels: Their labels.
        part_of: Draws the part of an image, for its width and height.
        side: Side of the result, in pixels.
        statistics: Mean and standard deviation of each channel.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Sequence[int],
        part_of: Callable[[int, int], Box],
        side: int,
        statistics: tuple[Sequence[float], Sequence[float]],
    ) -> None:
        self._paths, self._labels, self._part_of, self._side = paths, labels, part_of, side
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in statistics)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self._paths[index]) as file:
            image = file.convert("RGB")
        size, bilinear = (self._side, self._side), Image.Resampling.BILINEAR
        image = image.resize(size, bilinear, box=self._part_of(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return pixels.sub_(self._mean).div_(self._std), self._labels[index]


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
