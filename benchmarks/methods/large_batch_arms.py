"""What `benchmarks.methods.large_batch` trains: tasks, arms, and the plan of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.records import Plan
from benchmarks.harness.images import smaller_cifar100, smaller_folder
from benchmarks.harness.kept_runs import TRAIN, Wanted
from benchmarks.harness.plans import (
    ONE_WORKER,
    Opened,
    job_from,
    opened,
    planned,
    quick_precision,
    with_rates,
)

Keys = Mapping[str, Any]  # of a job

PARTS = 8  # parts of a large batch that go through the network one by one
WARMUP = 0.1  # of the epochs, where an arm has a warm-up
SEEDS, CHOOSING_SEEDS = range(5), (0, 1)
LARS_RATE = 5.0  # below batch 8,192: reference ResNet-50 of MLPerf 0.6
LAMB_RATE, LAMB_BATCH = 4 / 800, 512  # You et al. 2019, table of ResNet-50 on ImageNet


@dataclass(frozen=True)
class Task:
    """Images, network and batches of a task."""

    data: str  # ``digits``, ``cifar100`` or ``imagenette``; the last two are copied
    network: str  # as in a job
    side: int  # of the images, in pixels
    images: int  # training images
    epochs: int  # of every arm
    small: int  # batch, in samples
    large: int  # batch, in samples
    rate: float  # of SGD at the small batch: the best of those tried there, in factors of 2


TASKS = {
    "digits": Task("digits", "resnet8", 8, 1437, 5, small=32, large=479, rate=0.1),
    "cifar-resnet8": Task("cifar100", "resnet8", 16, 20_480, 8, small=64, large=2048, rate=0.2),
    "cifar-vgg8": Task("cifar100", "vgg8", 16, 20_480, 8, small=64, large=1024, rate=0.05),
    "imagenette-resnet8": Task(
        "imagenette", "resnet8", 64, 1920, 10, small=32, large=960, rate=0.1
    ),
}


# ------------------------------------------------------------------------------------------- arms


@dataclass(frozen=True)
class Arm:
    """A way to train."""

    keys: Keys = field(default_factory=dict)  # keys of the job, besides those of the task
    # module and first words of the command that trains; `kept_runs.TRAIN` follows the plan
    words: tuple[str, ...] = TRAIN
    rate_factor: float = 1.0  # factor of all rates of the plan


SMALL = ("small-half", "small", "small-double")
SMALL_MUON = ("small-muon-half", "small-muon", "small-muon-double")
PLAIN = ("unscaled", "linear")
UNTUNED = (*PLAIN, "linear-warmup", "sqrt-warmup", "lars", "lamb", "adascale")
AGS = ("ags-norm", "ags-gain", "ags-gain-none")
PICKED = ("picked-low", "picked", "picked-high")
RATE_SPAN = 3.0  # highest rate of `PICKED` over the lowest


def arms_of(task: Task) -> dict[str, Arm]:
    """All arms of a task, by name, in the order in which they are made."""
    sgd: Keys = {
        "optimizer": "sgd",
        "learning_rate": task.rate,
        "base_batch": task.small,
        "scaling": "none",
        "warmup_epochs": 0,
        "decay": "cosine",
        "ags": {"mode": "off"},
    }
    muon: Keys = {"optimizer": "muon", "learning_rate": "auto", "base_batch": task.small}
    large: Keys = {"global_batch": task.large, "micro_batch": -(-task.large // PARTS)}
    small: Keys = {"global_batch": task.small}
    warm: Keys = {"warmup_epochs": WARMUP * task.epochs}
    lars = LARS_RATE * task.small / task.large
    lamb = LAMB_RATE * (task.small / LAMB_BATCH) ** 0.5

    def tuned(names: tuple[str, str, str], keys: Keys) -> dict[str, Arm]:
        factors = zip(names, (0.5, 1.0, 2.0), strict=True)
        return {name: Arm(keys, rate_factor=one) for name, one in factors}

    return {
        **tuned(SMALL, {**sgd, **small}),
        "unscaled": Arm({**sgd, **large}),
        "linear": Arm({**sgd, **large, "scaling": "linear"}),
        "ags-norm": Arm({**sgd, **large, **warm, "scaling": "sqrt", "ags": {"mode": "norm"}}),
        "ags-gain": Arm({**sgd, **large, **warm, "scaling": "sqrt", "ags": {"mode": "gain"}}),
        "ags-gain-none": Arm({**sgd, **large, "ags": {"mode": "gain"}}),
        "picked": Arm(large),
        "linear-warmup": Arm({**sgd, **large, **warm, "scaling": "linear"}),
        "sqrt-warmup": Arm({**sgd, **large, **warm, "scaling": "sqrt"}),
        "adascale": Arm({**sgd, **large, "scaling": "gain"}),
        "lars": Arm(
            {**sgd, **large, **warm, "scaling": "linear", "learning_rate": lars},
            words=("benchmarks.methods.other_optimizers", "lars", f"{task.rate:g}"),
        ),
        "lamb": Arm(
            {**sgd, **large, **warm, "scaling": "sqrt", "learning_rate": lamb},
            words=("benchmarks.methods.other_optimizers", "lamb"),
        ),
        "muon": Arm({**muon, **large}),
        **tuned(SMALL_MUON, {**muon, **small, "scaling": "none", "warmup_epochs": 0}),
        "picked-low": Arm(large, rate_factor=RATE_SPAN**-0.5),
        "picked-high": Arm(large, rate_factor=RATE_SPAN**0.5),
    }


# ------------------------------------------------------------------------------------------ plans


def open_task(task: Task, data: Path | None, folder: Path) -> Opened:
    """Open a task's data after making a smaller copy in the folder; digits need no copy."""
    place = "digits"
    if task.data != "digits":
        copy = folder / f"{task.data}-{task.images}"
        cifar = task.data == "cifar100"
        if not copy.exists():
            original = data if cifar else data / "imagenette2-160"
            (smaller_cifar100 if cifar else smaller_folder)(original, task.images, copy)
        place = f"{'cifar100' if cifar else 'imagefolder'}:{copy}"
    return opened(place, task.network, task.side)


def plan_of(task: Task, arm: Arm, seed: int, known: Opened) -> Plan:
    """The plan of an arm: one worker, evaluated after the last epoch only."""
    job = job_from(
        f"{ONE_WORKER} network={task.network} precision={precision_of(task)} "
        f"resolutions={task.side} epochs={task.epochs} evaluate_epochs={task.epochs} seed={seed}",
        **{"data": known.data, **arm.keys},
    )
    plan = planned(job, known)
    return plan if arm.rate_factor == 1 else with_rates(plan, arm.rate_factor)


def precision_of(task: Task) -> str:
    """Bfloat16 where the processor computes in it; a step of digits is mostly overhead anyway."""
    return "float32" if task.data == "digits" else quick_precision()


def wanted(name: str, task: Task, arm_name: str, seed: int, known: Opened) -> Wanted:
    """The run of an arm of the task called ``name``."""
    arm = arms_of(task)[arm_name]
    return Wanted(f"{name}-{arm_name}", seed, plan_of(task, arm, seed, known), arm.words)
