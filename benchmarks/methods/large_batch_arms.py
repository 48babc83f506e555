"""What `benchmarks.methods.large_batch` trains: tasks, arms, and the plan of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchwright.planning.planner import plan_without_profile
from batchwright.records import DataFacts, Job, NetworkFacts, Plan
from batchwright.workflows.prepare_job import resolve
from batchwright.workload.data.sources import open_data
from batchwright.workload.task import build_network, network_facts
from benchmarks.harness.kept_runs import TRAIN, Wanted, quick_precision
from benchmarks.harness.smaller import smaller_cifar100, smaller_folder

Keys = Mapping[str, Any]  # of a job

PARTS = 8  # of a large batch, each through the network by itself
WARMUP = 0.1  # of the epochs, where an arm has a warm-up
SEEDS, CHOOSING_SEEDS = tuple(range(5)), (0, 1)
LARS_RATE = 5.0  # below batch 8,192: reference ResNet-50 of MLPerf 0.6
LAMB_RATE, LAMB_BATCH = 4 / 800, 512  # You et al. 2019, table of ResNet-50 on ImageNet


@dataclass(frozen=True)
class Task:
    """What is trained, and at which batches.

    Attributes:
        data: ``digits``, or ``cifar100`` or ``imagenette``, of which copies are made.
        network: As in a job.
        side: Of the images, in pixels.
        images: Training images.
        epochs: Of every arm.
        small: Batch, in samples.
        large: Batch, in samples.
        rate: Of SGD at the small batch: the best of those tried there, in factors of 2.
    """

    data: str
    network: str
    side: int
    images: int
    epochs: int
    small: int
    large: int
    rate: float


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
    """A way to train.

    Attributes:
        keys: Of the job, besides those of the task.
        words: The command that trains; `kept_runs.TRAIN` follows the plan as it is.
        rate_factor: All rates of the plan are multiplied by it.
    """

    keys: Keys = field(default_factory=dict)
    words: tuple[str, ...] = TRAIN
    rate_factor: float = 1.0


SMALL = ("small-half", "small", "small-double")
SMALL_MUON = ("small-muon-half", "small-muon", "small-muon-double")
PLAIN = ("unscaled", "linear")
UNTUNED = (*PLAIN, "linear-warmup", "sqrt-warmup", "lars", "lamb", "adascale")
AGS = ("ags-norm", "ags-gain", "ags-gain-none")
PICKED = ("picked-low", "picked", "picked-high")
RATE_SPAN = 3.0  # of the highest of `PICKED` over the lowest


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


@dataclass(frozen=True)
class Opened:
    """A task's data and network, as a plan wants to know them.

    Attributes:
        data: As in a job.
        facts: Of these data.
        network: Of the network.
    """

    data: str
    facts: DataFacts
    network: NetworkFacts


def open_task(task: Task, data: Path | None, folder: Path) -> Opened:
    """Make the smaller copy of a task's data, if it needs one, and open it.

    Args:
        task: What is trained.
        data: Holds ``cifar-100-python/`` and ``imagenette2-160/``; ``None`` will do for digits.
        folder: Takes the copies.
    """
    place = "digits"
    if task.data != "digits":
        assert data is not None
        copy = folder / f"{task.data}-{task.images}"
        cifar = task.data == "cifar100"
        if not copy.exists():
            original = data if cifar else data / "imagenette2-160"
            (smaller_cifar100 if cifar else smaller_folder)(original, task.images, copy)
        place = f"{'cifar100' if cifar else 'imagefolder'}:{copy}"
    facts = open_data(Job(data=place, resolutions=(task.side,))).facts
    network = build_network(task.network, classes=len(facts.classes), side=task.side)
    return Opened(place, facts, network_facts(task.network, network, task.side))


def plan_of(task: Task, arm: Arm, seed: int, opened: Opened) -> Plan:
    """The plan of an arm: one worker, evaluated after the last epoch only.

    Args:
        task: What is trained.
        arm: How.
        seed: Of weights, order and augmentation.
        opened: The task's data and network.
    """
    job = Job.model_validate(
        {
            "data": opened.data,
            "network": task.network,
            "precision": precision_of(task),
            "device": "cpu",
            "launch": "in-process",
            "workers": 1,
            "resolutions": (task.side,),
            "epochs": task.epochs,
            "evaluate_epochs": task.epochs,
            "seed": seed,
            **arm.keys,
        }
    )
    plan = plan_without_profile(resolve(job, opened.facts), opened.facts, opened.network)
    return plan if arm.rate_factor == 1 else with_rates(plan, arm.rate_factor)


def precision_of(task: Task) -> Literal["float32", "bfloat16"]:
    """Bfloat16 where the processor computes in it; a step of digits is mostly overhead anyway."""
    return "float32" if task.data == "digits" else quick_precision()


def with_rates(plan: Plan, factor: float) -> Plan:
    """The plan with all its rates times ``factor``."""
    rule = plan.learning_rate
    return plan.model_copy(
        update={
            "learning_rate": rule.model_copy(
                update={"base": rule.base * factor, "peak": rule.peak * factor}
            ),
            "stages": tuple(
                stage.model_copy(update={"learning_rate": stage.learning_rate * factor})
                for stage in plan.stages
            ),
        }
    )


def wanted(name: str, task: Task, arm_name: str, seed: int, opened: Opened) -> Wanted:
    """The run of an arm of the task called ``name``."""
    arm = arms_of(task)[arm_name]
    return Wanted(f"{name}-{arm_name}", seed, plan_of(task, arm, seed, opened), arm.words)
