"""What it takes to feed a GPU: photographs that a core decodes, augments and hands over.

Images per second that arrive as float batches of 32 at 224 px in the training process, out of JPEG
files, without any training. The files have sides like ImageNet's: images of imagenette2-160,
resized once by Pillow to 500 x 375 px and written with quality 90, since the time of decoding goes
by the pixels. Enlarged images are smoother than photographs, so their files are smaller (the report
has the mean) and decode faster; where the data folder holds the originals, `imagenette2`, these are
taken as they are. All processes share two cores, on most machines hardware threads.

Six arms, each in processes of its own, take turns: 6 batches that are not timed and then 10 that
are, 4 rounds with --quick, 12 with --full. Before a turn all sleep for a second, in which loader
processes end what they were asked for.

    ours_N     what `train` opens for a folder that is too large for the cache, with `loaders=N` and
               `augment=resized-crop`
    usual_N    the usual code in a DataLoader with N worker processes: open and convert the file, a
               random resized crop by Pillow, random flip, to a float tensor, normalize

`loaders=auto` takes a loader process for each core, so `images_per_core` is half the images per
second of `ours_2`. `feeding_over_usual` is `ours_2` over the `usual_N` with the highest median,
round by round; its goal was set before our arm had run. `evaluated_per_core` is that of held-out
images (their middle, resized), in 3 turns afterwards. Values are medians over the rounds, spreads
the quartiles.

On a GPU the bytes of a batch are copied there, and flipped and normalized by it: here the training
process does so, on the same cores.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from batchwright.distributed.processes import spinning_shortly
from batchwright.records import Plan
from batchwright.training.loop import open_task
from batchwright.workload.data import sources
from batchwright.workload.data.image_files import FilePipeline
from batchwright.workload.host import prepare_process, usable_cores
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, ratios
from benchmarks.harness.images import smaller_folder
from benchmarks.harness.plans import CPU, ENDLESS, ONE_WORKER, facts_of, fixed_plan, job_from
from benchmarks.harness.turns import Arm, Turns, images_per_second
from benchmarks.speed.data_path import Box, UsualImages

FILES, HELD_OUT = 960, 160  # whole batches
SIZE, QUALITY = (500, 375), 90  # width and height in px, as most of ImageNet's; of JPEG
SIDE, BATCH = 224, 32
CORES = 2
LOADERS = (0, 1, 2)
ROUNDS = {False: 4, True: 12}  # by --full
EVALUATION_ROUNDS = 3
TURN = {"lead_in": 6, "steps": 10, "warm_up": 12, "rest": 1}  # batches; rest in seconds
LEAST_AREA, WIDEST = 0.08, 4 / 3  # of a crop; of its shape
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WHAT = "JPEG photographs of some 500 x 375 px"

BENCHMARK = Benchmark(
    "feeding",
    "What it takes to feed a GPU",
    f"{WHAT} to float batches at {SIDE} px, without training; all on two cores; arms took turns",
    (
        Figure("images_per_core", "images/s", "median", f"{WHAT} that a core decodes, crops at "
               f"random, resizes to {SIDE} px and hands over in a second"),
        Figure("feeding_over_usual", "ratio", "median", "images/s, ours with `loaders=auto` over a "
               "usual Pillow data set in a DataLoader with its best of 0, 1 and 2 worker processes",
               at_least=1.0),
        Figure("evaluated_per_core", "images/s", "median", "photographs whose middle a core hands "
               "over in a second, for evaluation"),
        Figure("kilobytes_per_file", "KB", "mean", "size of such a file"),
        *(Figure(f"{arm}_{count}_images_per_second", "images/s", "median")
          for arm in ("ours", "usual") for count in LOADERS),
    ),
    needs_data="always",
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Feed without training, all arms in turns; then what evaluation reads."""
    os.environ.update(spinning_shortly(os.environ))
    cores = min(CORES, usable_cores())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    say(f"writing {FILES + HELD_OUT} photographs")
    root = photographs(arguments.data, folder)
    with patch.object(sources, "fits_the_disk", return_value=False):
        plan_of(root, 0)  # from here on the images stay in their files
    starters = {
        f"{arm.__name__}_{count}": partial(Arm, arm, root, count)
        for count in LOADERS
        for arm in (ours, usual)
    }
    rates = images_per_second(starters, ROUNDS[arguments.full], **TURN)
    starters = {"evaluated": partial(Arm, evaluated, root, cores)}
    rates |= images_per_second(starters, EVALUATION_ROUNDS, **TURN)
    sizes = [path.stat().st_size / 1000 for path in files_of(root)]
    return found_of(rates, cores) | {"kilobytes_per_file": sizes}, {"images_per_second": rates}


def found_of(rates: Mapping[str, Sequence[float]], cores: int) -> dict[str, Sequence[float]]:
    """All figures of speed, by name, from images per second by arm in each round."""
    ours_auto = rates[f"ours_{cores}"]
    usual_best = max((rates[f"usual_{count}"] for count in LOADERS), key=median)
    return {
        "images_per_core": [rate / cores for rate in ours_auto],
        "feeding_over_usual": ratios(ours_auto, usual_best),
        "evaluated_per_core": [rate / cores for rate in rates["evaluated"]],
        **{f"{name}_images_per_second": some for name, some in rates.items() if "_" in name},
    }


def photographs(data: Path, folder: Path) -> Path:
    """A folder of photographs with sides like ImageNet's, in ``train/`` and ``val/`` by class."""
    if (data / "imagenette2").is_dir():
        return smaller_folder(data / "imagenette2", FILES, folder / "large", held_out=HELD_OUT)
    small = smaller_folder(data / "imagenette2-160", FILES, folder / "small", held_out=HELD_OUT)
    for path in files_of(small, "*"):
        large = folder / "large" / path.relative_to(small)
        large.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            made = image.convert("RGB").resize(SIZE, Image.Resampling.BICUBIC)
        made.save(large, "JPEG", quality=QUALITY)
    return folder / "large"


def files_of(root: Path, part: str = "train") -> list[Path]:
    """The files of a part, in the order of their names."""
    return sorted(root.glob(f"{part}/*/*"))


# ------------------------------------------------------------------------------------------- ours


def plan_of(root: Path, loaders: int) -> Plan:
    """A plan by which `train` would read the photographs."""
    job = job_from(
        f"{ONE_WORKER} network=resnet8 resolutions={SIDE} augment=resized-crop loaders={loaders} "
        f"precision=float32 learning_rate=0.1 base_batch={BATCH} decay=none",
        data=f"imagefolder:{root}",
    )
    facts = sources.open_data(job).facts
    network = facts_of(job.network, len(facts.classes), SIDE)
    return fixed_plan(job, facts, network, batches=(BATCH,), method="plain")


def ours(turns: Turns, root: Path, loaders: int, epoch: int | None = 0) -> None:
    """Hand over what `train` reads, a turn at a time; without an epoch, what it evaluates."""
    prepare_process(usable_cores())
    task = open_task(plan_of(root, loaders), CPU)
    pipeline = task.held_out if epoch is None else task.training
    assert isinstance(pipeline, FilePipeline)
    turns.ready()
    for images, _ in pipeline.batches(endless(len(pipeline)), epoch=epoch, resolution=SIDE):
        turns.step_done(len(images))


def evaluated(turns: Turns, root: Path, loaders: int) -> None:
    """Hand over what `train` evaluates, a turn at a time."""
    ours(turns, root, loaders, None)


def endless(count: int) -> Iterator[Tensor]:
    """Indices of batches of ``count`` images, in ever new orders: a turn has no end of an epoch."""
    while True:
        yield from torch.randperm(count).split(BATCH)


# --------------------------------------------------------------------------------- the usual code


def usual(turns: Turns, root: Path, loaders: int) -> None:
    """Hand over the batches of a DataLoader, a turn at a time."""
    dataset = usual_images(root)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=RandomSampler(dataset, num_samples=ENDLESS),
        num_workers=loaders,
    )
    turns.ready()
    for images, _ in loader:
        turns.step_done(len(images))


def usual_images(root: Path) -> UsualImages:
    """Training images in folders of their classes, as one writes it with Pillow."""
    paths = files_of(root)
    classes = sorted({path.parent.name for path in paths})
    labels = [classes.index(path.parent.name) for path in paths]
    return UsualImages(paths, labels, random_part, SIDE, (MEAN, STD))


def random_part(width: int, height: int) -> Box:
    """A part, as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = width * height * random.uniform(LEAST_AREA, 1)
        shape = math.exp(random.uniform(-math.log(WIDEST), math.log(WIDEST)))
        wide, tall = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if wide <= width and tall <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - tall)
            return left, top, left + wide, top + tall
    wide, tall = min(width, round(height * WIDEST)), min(height, round(width * WIDEST))
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
