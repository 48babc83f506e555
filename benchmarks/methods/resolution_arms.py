"""What `methods.cyclic` and `speed.data_path` train: plans with rows, and the loops."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import batchwright as bw
from batchwright.records import Job, LearningRateRule, Plan, Stage
from batchwright.records.run_folder import read_summary
from batchwright.training.loop import accuracy_and_loss
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import ImageData, open_data
from batchwright.workload.host import computes_in_bfloat16, prepare_process, usable_cores
from batchwright.workload.task import build_loss, build_network, build_optimizer, network_facts
from benchmarks.harness.turns import Turns

ENDLESS = 10**9
RATE = 0.1
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """A row of a plan: so many epochs at a resolution, at a rate relative to the first."""

    epochs: int
    resolution: int
    rate: float = 1.0


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        data: As in a job.
        sides: Resolutions, low to high, in pixels.
        batch: Samples per step.
        images: Training images, drawn evenly from the data in their order; 0: all.
        held_out: The same of the held-out images.
    """

    data: str
    sides: tuple[int, ...]
    batch: int
    images: int = 0
    held_out: int = 0


def precision() -> str:
    """What ``precision=auto`` comes to here; the same for all arms."""
    return "bfloat16" if computes_in_bfloat16(CPU) else "float32"


def job_of(task: Task, seed: int) -> Job:
    """One CPU worker, SGD, `resnet8`."""
    return Job.model_validate(
        {
            "data": task.data,
            "network": "resnet8",
            "augment": "crop-flip",
            "optimizer": "sgd",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "learning_rate": RATE,
            "base_batch": task.batch,
            "scaling": "none",
            "warmup_epochs": 0,
            "decay": "none",
            "seed": seed,
            "precision": precision(),
            "method": "cyclic",
            "device": "cpu",
            "workers": 1,
            "launch": "in-process",
            "resolutions": task.sides,
            "checkpoint_seconds": ENDLESS,
        }
    )


def subset(store: ImageStore, count: int) -> ImageStore:
    """``count`` images, evenly spaced over the store so that all classes have their part."""
    if not count or count >= len(store):
        return store
    chosen = torch.arange(count) * len(store) // count
    pixels = torch.cat([store.image(int(i)).reshape(-1) for i in chosen])
    return ImageStore(pixels, store.labels[chosen], store.sizes[chosen])


def open_task(task: Task, seed: int) -> tuple[ImageData, ImageStore, ImageStore]:
    """The data, and the images that are trained on and evaluated."""
    data = open_data(job_of(task, seed), verify=False)
    assert isinstance(data.train, ImageStore)
    assert isinstance(data.val, ImageStore)
    return data, subset(data.train, task.images), subset(data.val, task.held_out)


def plan_of(
    task: Task,
    rows: Sequence[Row],
    data: ImageData,
    samples: int,
    seed: int,
    *,
    evaluate_last: bool = False,
) -> Plan:
    """A plan with these rows for the first so many ``samples``.

    Args:
        task: What is trained.
        rows: Of the plan.
        data: As opened.
        samples: Training images.
        seed: Of weights, order and augmentation.
        evaluate_last: Whether to evaluate after the last epoch only, not after each.
    """
    top = max(task.sides)
    epochs = sum(row.epochs for row in rows)
    job = job_of(task, seed).model_copy(
        update={"epochs": epochs, **({"evaluate_epochs": epochs} if evaluate_last else {})}
    )
    network = build_network(job.network, classes=len(data.facts.classes), side=top)
    return Plan(
        job=job,
        data=data.facts.model_copy(update={"train_samples": samples}),
        network=network_facts(job.network, network, top),
        method="cyclic",
        update="sgd",
        precision=precision(),  # type: ignore[arg-type] # one of the two
        learning_rate=LearningRateRule(
            base=RATE,
            base_batch=task.batch,
            scaling="none",
            peak=RATE,
            warmup_epochs=0.0,
            decay="none",
        ),
        stages=tuple(
            Stage(
                epochs=row.epochs,
                resolution=row.resolution,
                learning_rate=RATE * row.rate,
                dropout=0.0,
                augmentation="crop-flip",
                local_batch_sizes=(task.batch,),
                micro_batch_size=task.batch,
            )
            for row in rows
        ),
    )


def feed(store: ImageStore, task: Task, data: ImageData, seed: int) -> ImagePipeline:
    """What feeds a session."""
    return ImagePipeline(
        store,
        device=CPU,
        side=max(task.sides),
        mean=data.mean,
        std=data.std,
        augmentation="crop-flip",
        seed=seed,
        dtype=torch.bfloat16 if precision() == "bfloat16" else torch.float32,
    )


@dataclass(frozen=True)
class Trained:
    """A whole training: seconds, and held-out accuracy at its end as a share.

    ``copying`` is spent once for a data set, before training: making the smaller copies.
    """

    training: float
    evaluation: float
    copying: float
    accuracy: float


def train_whole(task: Task, rows: Sequence[Row], seed: int, run_folder: Path) -> Trained:
    """Train as the rows say, evaluating after every epoch at the highest resolution."""
    prepare_process(usable_cores())
    data, images, held_out = open_task(task, seed)
    plan = plan_of(task, rows, data, len(images), seed)
    network = build_network(
        plan.job.network, classes=len(data.facts.classes), side=max(task.sides), seed=seed
    )
    loss = build_loss(plan.job)
    optimizer = build_optimizer(network, plan.job, RATE)
    training = feed(images, task, data, seed)
    before = time.perf_counter()
    training.prepare({row.resolution for row in rows})
    copying = time.perf_counter() - before
    tested = feed(held_out, task, data, seed)
    with bw.Session(network, optimizer, training, plan=plan, run_folder=run_folder) as session:
        for _ in session.epochs():
            for pixels, labels in session.batches():
                session.step(loss(network(pixels), labels))
            scores = session.evaluate(tested, accuracy_and_loss)
    records = read_summary(run_folder).epochs
    return Trained(
        sum(record.training_seconds for record in records),
        sum(record.evaluation_seconds for record in records),
        copying,
        scores["top1"],
    )


def train_at(turns: Turns, task: Task, resolution: int, run_folder: Path) -> None:
    """Train without end at one of the task's resolutions, a turn at a time."""
    prepare_process(usable_cores())
    data, images, _ = open_task(task, 0)
    rows = (Row(ENDLESS, resolution), Row(1, max(task.sides)))
    plan = plan_of(task, rows, data, len(images), 0)
    network = build_network(
        plan.job.network, classes=len(data.facts.classes), side=max(task.sides), seed=0
    )
    loss = build_loss(plan.job)
    optimizer = build_optimizer(network, plan.job, RATE)
    training = feed(images, task, data, 0)
    training.prepare((resolution,))
    with bw.Session(network, optimizer, training, plan=plan, run_folder=run_folder) as session:
        turns.ready()
        for _ in session.epochs():
            for pixels, labels in session.batches():
                session.step(loss(network(pixels), labels))
                turns.step_done(task.batch)
