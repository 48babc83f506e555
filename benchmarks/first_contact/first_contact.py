"""First contact: data and a network of one's own, the first command, and busy machines.

Own data (`own_data_`): predicted against measured seconds of an epoch. A network with LayerNorm is
trained by a user's own loop on a session, under torchrun, as `docs/loop.md` describes it: the data
set is probed and planned for a global batch of 64, and the loop trains 4 epochs with --quick, 11
with --full, of which the first does not count. Each case is measured with one worker and with two:

    pictures   2,000 JPEG files of about 160 px, decoded and resized to 64 px by a
               `torch.utils.data.Dataset`, with the default of two loader processes; with --full
               also with one and with none
    tensors    small images in memory, with the default; with --full also with no loader process

The files are every so many-th of the ImageNet subset if there is a data folder, else smooth random
images. The measured value is the median of the epochs; their quartiles, relative to it, are in the
report and show how steady the machine was. The error is |predicted - measured| / measured.
`own_data_without_loading` is the error that a plan would have if it took steps whose images are at
hand, over the cases with files: it shows what modelling the loading gains. The noise ratio is the
probe's gradient noise scale over that of the first epoch, in the cases with two workers, whose
training measures it. The ratio furthest from 1 counts, and is to be within a factor of 3 of it, up
or down; its spread is the range.

The number format (`precision_`): for five networks on both forms of data, the probe's choice
between float32 and bfloat16 is made in the time that a probe has for it, and then both are timed in
turns at the planned batch.

The first command: `batchwright run` on digits, from the shell; median.

Busy machines: probes beside one program that never waits, beside two, and alone, in turns; three
each with --quick, ten with --full.
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
"""Cases by --full: a function of `own_data`, and the job's `loaders`."""

NOISE_GOAL = 3.0
CLASSES, FILES = 4, 2000  # of the JPEG files
IMAGE_SIDE, QUALITY = 160, 78

BENCHMARK = Benchmark(
    "first_contact",
    "Data and a network of one's own",
    "An error is |predicted - measured| / measured. Spread: quartiles over the cases; of the "
    "largest, and of shares, that one value",
    (
        Figure("own_data_epoch_error", "share", "median", "error of the predicted seconds of an "
               "epoch, JPEG files and tensors through a data set of one's own, one and two "
               "workers, median", at_most=0.10),
        Figure("own_data_worst_error", "share", "mean", "error of the predicted seconds of an "
               "epoch with a data set of one's own, largest"),
        Figure("own_data_coverage", "share", "share", "share of the epochs with a data set of "
               "one's own that lie in the predicted 95 % interval", at_least=0.9),
        Figure("own_data_without_loading", "share", "median", "error of the predicted seconds of "
               "an epoch with JPEG files if the plan ignored loading, median"),
        Figure("own_data_noise_ratio", "ratio", "mean", "gradient noise scale of the probe over "
               "that of the first epoch, furthest from 1"),
        Figure("precision_regret", "ratio", "mean", "step time with the number format that the "
               "probe chose over that with the other, five networks on two forms of data, largest",
               at_most=1.03),
        Figure("precision_regret_median", "ratio", "median", "step time with the number format "
               "that the probe chose over that with the other, median"),
        Figure("first_command_seconds", "s", "median",
               "seconds of `batchwright run` on digits, from the shell", at_most=20.0),
        Figure("explained_share", "share", "median", "share of the seconds of `batchwright run` "
               "that its report accounts for", at_least=0.97),
        Figure("busy_told", "share", "share", "share of the probes beside busy programs that warn "
               "of a busy machine", at_least=1.0),
        Figure("quiet_called_busy", "share", "share", "share of the probes on a quiet machine that "
               "warn of a busy machine", at_most=0.0),
    ),
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Measure part by part."""
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
    """A case: an epoch with a data set of one's own, predicted and measured."""

    data: str  # function that makes the data
    loaders: int | str  # loader processes of each worker, as the job has them
    workers: int
    predicted: float  # seconds
    low: float  # lower end of the 95 % interval
    high: float  # upper end
    without_loading: float  # as `predicted`, if steps had their images at hand
    measured: float  # seconds, median of the epochs
    quartiles: tuple[float, float]  # of the measured epochs
    probe_seconds: float
    reason: str  # what the plan says of loading
    loading_cpu: float  # processor seconds of loader processes in an epoch, of all workers
    noise: float | None  # noise scale of the probe, in samples; `None` if not measured
    noise_trained: float | None  # noise scale of the first epoch; `None` where it is not measured

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted - self.measured) / self.measured

    @property
    def error_without_loading(self) -> float:
        """Relative error of the prediction for steps that have their images at hand."""
        return abs(self.without_loading - self.measured) / self.measured

    @property
    def inside(self) -> bool:
        """Whether the measured epoch is in the interval."""
        return self.low <= self.measured <= self.high


def own_data(arguments: Arguments, folder: Path) -> Found:
    """Predict and measure epochs of data sets of one's own."""
    subset = arguments.data / "imagenette2-160" / "train" if arguments.data else None
    os.environ[FOLDER] = str(jpeg_files(folder / "pictures", subset))
    epochs = [
        _epoch(data, loaders, workers, EPOCHS[arguments.full], folder)
        for workers in WORKERS
        for data, loaders in CASES[arguments.full]
    ]
    return own_data_found(epochs), {"own_data": [asdict(one) for one in epochs]}


def own_data_found(epochs: Sequence[Epoch]) -> dict[str, Sequence[float] | Value]:
    """The figures of own data, by name, from all cases."""
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
    """The profile with step times as they are without loading."""
    steps = []
    for one in profile.steps:
        if one.loading:
            alone = {"step_seconds": one.loading.alone_seconds, "visits": (), "loading": None}
            one = one.model_copy(update=alone)
        steps.append(one)
    return profile.model_copy(update={"steps": tuple(steps)})


def _seconds(profile: Profile, plan: Plan) -> float:
    """Seconds of a step of the plan, predicted from a profile."""
    (stage,) = plan.stages
    step = stage.workers, stage.resolution, stage.micro_batch_size
    return fit_step_time(profile.steps).seconds(*step)


def _trained(plan: Plan, run: Path) -> RunSummary:
    """Train by a plan in a user's own loop under torchrun, and read the summary."""
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
    """Make `FILES` JPEG files, in a folder for each of `CLASSES`: links to real ones, or made up.

    Args:
        folder: Folder to create.
        subset: Folder of real images, with a folder for each class; ``None`` or missing: smooth
            random images of about `IMAGE_SIDE` pixels.

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
    """An image of coarse random colours, enlarged, with a photograph's noise; tinted by class."""
    side = int(random.integers(IMAGE_SIDE * 3 // 4, IMAGE_SIDE * 5 // 4))
    coarse = random.integers(0, 200, (8, 8, 3), np.uint8)
    coarse[..., label % 3] += 55 * (label // 3 + 1) // 2
    image = Image.fromarray(coarse).resize((side, IMAGE_SIDE), Image.Resampling.BICUBIC)
    noise = random.normal(0, 8, (IMAGE_SIDE, side, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
