"""What somebody meets who brings data and a network of their own.

Own data (`own_data_`): predicted against measured seconds of an epoch. A network with LayerNorm is
trained by a loop of the user's own on a session, under torchrun, as `docs/loop.md` tells it: the
data set is probed, the plan follows, with a global batch of 64, and the loop trains 4 epochs with
--quick, 11 with --full, of which the first does not count. Each case is measured with one worker
and with two: 2,000 JPEG files of about 160 px, decoded and resized to 64 px by a
`torch.utils.data.Dataset`, with the default of two loader processes, and with --full with one and
with none; and small images in memory, with the default, and with --full with none. The error is
|predicted - measured| / measured; without loading, that of what a plan would say whose steps had
their images at hand, over the cases that load files: what is won. The noise ratio is over the cases
with two workers, whose training measures it: the one that is furthest from 1 is to be within a
factor of 3 of it, up or down; its spread is the range.

The number format (`precision_`): five networks on both forms of data, each chosen in the time that
a probe has for it and then timed in turns at the planned batch.

The first command, `batchwright run` on digits, from the shell: median.

Probes beside one and beside two programs that never wait, and alone, in turns; three each with
--quick, ten with --full.

The measured value is the median of the epochs; their quartiles, relative to it, are in the report,
and say how steady the machine was. The files are those of the ImageNet subset if there is a data
folder, every so many-th of them, else smooth random images, written anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import batchwright as bw
from batchwright.distributed.processes import spinning_shortly
from batchwright.prediction.step_time import fit_step_time
from batchwright.records import Plan, Profile, RunSummary
from batchwright.records.documents import read_record, write_record
from benchmarks.first_contact import first_look
from benchmarks.first_contact.own_data import FOLDER
from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value, quartiles

BATCH = 64
EPOCHS = {False: 4, True: 11}  # by --full
WORKERS = (1, 2)
CASES = {
    False: (("pictures", "auto"), ("tensors", "auto")),
    True: (
        *(("pictures", "auto"), ("pictures", 1), ("pictures", 0)),
        *(("tensors", "auto"), ("tensors", 0)),
    ),
}
"""Function of `own_data`, and the job's `loaders`."""

NOISE_GOAL = 3.0
CLASSES, FILES = 4, 2000  # of the JPEG files
IMAGE_SIDE, QUALITY = 160, 78

BENCHMARK = Benchmark(
    "first_contact",
    "Data and a network of one's own",
    "Spread: quartiles over the cases; of the largest, and of shares, that one value",
    (
        Figure("own_data_epoch_error", "share", "median", "predicted against measured seconds of "
               "an epoch, JPEG files and tensors through a data set of one's own, one and two "
               "workers, median error", at_most=0.10),
        Figure("own_data_worst_error", "share", "mean", "the largest of these errors"),
        Figure("own_data_coverage", "share", "share",
               "share of these epochs inside the 95 % interval", at_least=0.9),
        Figure("own_data_without_loading", "share", "median",
               "the error for JPEG files if steps had their images at hand"),
        Figure("own_data_noise_ratio", "ratio", "mean",
               "gradient noise scale of the probe over that of the first epoch"),
        Figure("precision_regret", "ratio", "mean", "step time of the number format that was "
               "chosen over the other's, five networks on two forms of data, the largest",
               at_most=1.03),
        Figure("precision_regret_median", "ratio", "median", "the same, median"),
        Figure("first_command_seconds", "s", "median",
               "`batchwright run` on digits, from the shell", at_most=20.0),
        Figure("explained_share", "share", "median",
               "share of these seconds that the run's report tells of", at_least=0.97),
        Figure("busy_told", "share", "share", "probes beside busy programs that say so",
               at_least=1.0),
        Figure("quiet_called_busy", "share", "share", "probes alone that say so", at_most=0.0),
    ),
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Part by part."""
    found: dict[str, Sequence[float] | Value] = {}
    measured: dict[str, Any] = {}
    for part in (
        first_look.first_commands(folder, full=arguments.full),
        own_data(arguments, folder),
        first_look.formats(),
        first_look.busy_probes(folder, full=arguments.full),
    ):
        found |= part[0]
        measured |= part[1]
    return found, measured


# -------------------------------------------------------------------------------------- own data


@dataclass(frozen=True)
class Epoch:
    """An epoch of data of one's own, predicted and measured."""

    data: str  # function that makes the data
    loaders: int | str  # loader processes of each worker, as the job has them
    workers: int  # workers
    predicted: float  # seconds
    low: float  # lower end of the 95 % interval
    high: float  # upper end
    without_loading: float  # as `predicted`, of steps that have their images at hand
    measured: float  # seconds, median
    quartiles: tuple[float, float]  # of the measured epochs
    probe_seconds: float  # what measuring took
    reason: str  # what the plan says of loading
    loading_cpu: float  # processor seconds of loader processes in an epoch, of all workers
    noise: float | None  # noise scale of the probe, in samples; `None` if it has none
    noise_trained: float | None  # that of the first epoch; `None` where training measures none

    @property
    def error(self) -> float:
        """Relative, of the prediction."""
        return abs(self.predicted - self.measured) / self.measured

    @property
    def error_without_loading(self) -> float:
        """Of the prediction for steps that have their images at hand."""
        return abs(self.without_loading - self.measured) / self.measured

    @property
    def inside(self) -> bool:
        """Whether the measured epoch is in the interval."""
        return self.low <= self.measured <= self.high


def own_data(arguments: Arguments, folder: Path) -> Found:
    """Predicted against measured epochs of data of one's own."""
    subset = arguments.data / "imagenette2-160" / "train" if arguments.data else None
    os.environ[FOLDER] = str(jpeg_files(folder / "pictures", subset))
    epochs = [
        _epoch(data, loaders, workers, EPOCHS[arguments.full], folder)
        for workers in WORKERS
        for data, loaders in CASES[arguments.full]
    ]
    return own_data_found(epochs), {"own_data": [asdict(one) for one in epochs]}


def own_data_found(epochs: Sequence[Epoch]) -> dict[str, Sequence[float] | Value]:
    """What the measured cases say."""
    errors = [one.error for one in epochs]
    found: dict[str, Sequence[float] | Value] = {
        "own_data_epoch_error": errors,
        "own_data_worst_error": [max(errors)],
        "own_data_coverage": [float(one.inside) for one in epochs],
        "own_data_without_loading": [
            one.error_without_loading for one in epochs if one.data == "pictures"
        ],
    }
    noise = [one.noise / one.noise_trained for one in epochs if one.noise and one.noise_trained]
    if noise:
        furthest = max(noise, key=lambda ratio: max(ratio, 1 / ratio))
        met = 1 / NOISE_GOAL <= furthest <= NOISE_GOAL
        ratio = BENCHMARK["own_data_noise_ratio"].of(noise)
        found[ratio.name] = replace(ratio, value=furthest, goal=NOISE_GOAL, met=met)
    return found


def _epoch(data: str, loaders: int | str, workers: int, epochs: int, folder: Path) -> Epoch:
    say(f"{data}, loaders={loaders}, {workers} worker(s): probe")
    profile = bw.probe(
        data=f"{first_look.OWN_DATA}:{data}",
        network=f"{first_look.OWN_DATA}:network",
        workers=workers,
        loaders=loaders,
        optimizer="sgd",
        learning_rate=0.02,
        base_batch=BATCH,
        precision="float32",
        device="cpu",
    )
    plan = bw.plan(profile, epochs=epochs, global_batch=BATCH)
    say(f"{data}, loaders={loaders}, {workers} worker(s): train")
    summary = _trained(plan, folder / f"{data}-{loaders}-{workers}")
    (stage,) = plan.stages
    predicted = stage.predicted_epoch_seconds
    assert predicted is not None
    later = summary.epochs[1:]
    low, measured, high = quartiles([one.training_seconds for one in later])
    alone = at_hand(profile)
    ratio = _seconds(alone, plan) / _seconds(profile, plan)
    reasons = {one.choice: one.why for one in plan.reasons}
    cpu = [sum(worker.loading_cpu_seconds for worker in one.workers) for one in later]
    return Epoch(
        data=data,
        loaders=loaders,
        workers=workers,
        predicted=predicted.value,
        low=predicted.low,
        high=predicted.high,
        without_loading=predicted.value * ratio,
        measured=measured,
        quartiles=(low, high),
        probe_seconds=profile.probe_seconds,
        reason=reasons.get("loading", ""),
        loading_cpu=quartiles(cpu)[1],
        noise=profile.noise.noise_scale if profile.noise else None,
        noise_trained=summary.epochs[0].noise_scale,
    )


def at_hand(profile: Profile) -> Profile:
    """The profile with the steps' times while nothing is loaded."""
    steps = []
    for one in profile.steps:
        if one.loading:
            alone = {"step_seconds": one.loading.alone_seconds, "visits": (), "loading": None}
            one = one.model_copy(update=alone)
        steps.append(one)
    return profile.model_copy(update={"steps": tuple(steps)})


def _seconds(profile: Profile, plan: Plan) -> float:
    """Of a step of the plan, by a profile's times."""
    (stage,) = plan.stages
    batches = [stage.micro_batch_size]
    return fit_step_time(profile.steps).seconds(stage.workers, stage.resolution, batches)


def _trained(plan: Plan, run: Path) -> RunSummary:
    """What a loop of the user's own under torchrun makes of a plan."""
    path = run.with_suffix(".json")
    write_record(plan, path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    workers = ["--nproc-per-node", str(plan.job.workers)]
    subprocess.run(
        [*torchrun, *workers, "-m", first_look.OWN_DATA, path, run],
        cwd=ROOT,
        env=spinning_shortly(os.environ),  # as docs/loop.md advises
        check=True,
    )
    return read_record(run / "summary.json", RunSummary)


def jpeg_files(folder: Path, subset: Path | None = None) -> Path:
    """`FILES` JPEG files in a folder for each of `CLASSES`, as links to real ones or made up.

    Args:
        folder: Not there yet.
        subset: Folder of real images, with a folder for each class; ``None`` or missing: smooth
            random images of `IMAGE_SIDE` pixels, more or less.

    Returns:
        ``folder``.
    """
    there = subset is not None and subset.is_dir()
    real = sorted(one for one in subset.iterdir() if one.is_dir()) if there else []
    random = np.random.default_rng(0)
    for label in range(CLASSES):
        place = folder / f"class{label}"
        place.mkdir(parents=True)
        names = sorted(real[label].iterdir()) if len(real) > label else []
        for index in range(FILES // CLASSES):
            path = place / f"{index:04d}.jpg"
            if index < len(names):
                path.symlink_to(names[index].resolve())
            else:
                _smooth(random, label).save(path, quality=QUALITY)
    return folder


def _smooth(random: np.random.Generator, label: int) -> Image.Image:
    """Coarse random colours, enlarged, with some noise of a photograph; its class by its tint."""
    side = int(random.integers(IMAGE_SIDE * 3 // 4, IMAGE_SIDE * 5 // 4))
    coarse = random.integers(0, 200, (8, 8, 3), np.uint8)
    coarse[..., label % 3] += 55 * (label // 3 + 1) // 2
    image = Image.fromarray(coarse).resize((side, IMAGE_SIDE), Image.Resampling.BICUBIC)
    noise = random.normal(0, 8, (IMAGE_SIDE, side, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
