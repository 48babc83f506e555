"""Tasks, plans and training loops of `methods.cyclic` and `speed.data_path`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import batchwright as bw
from batchwright.records import Job, Plan
from batchwright.records.run_folder import read_summary
from batchwright.training.loop import accuracy_and_loss
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import ImageData, open_data
from batchwright.workload.host import prepare_process, usable_cores
from batchwright.workload.loss import build_loss
from batchwright.workload.task import build_network, build_optimizer
from benchmarks.harness.plans import (
    ONE_WORKER,
    facts_of,
    fixed_plan,
    image_pipeline,
    job_from,
    quick_precision,
)
from benchmarks.harness.turns import Turns

RATE = 0.1


@dataclass(frozen=True)
class Row:
    """A row of a plan: epochs at a resolution, with a learning rate relative to `RATE`."""

    epochs: int
    resolution: int
    rate: float = 1.0


@dataclass(frozen=True)
class Task:
    """Images, resolutions and batch of a training."""

    data: str  # as in a job
    sides: tuple[int, ...]  # resolutions, low to high, in pixels
    batch: int  # samples per step
    images: int = 0  # training images, drawn evenly from the data in their order; 0: all
    held_out: int = 0  # held-out images, drawn in the same way; 0: all


def job_of(task: Task, seed: int) -> Job:
    """The job of a task: one CPU worker, SGD, `resnet8`."""
    return job_from(
        f"{ONE_WORKER} network=resnet8 augment=crop-flip optimizer=sgd momentum=0.9 "
        f"weight_decay=5e-4 learning_rate={RATE} base_batch={task.batch} scaling=none "
        f"warmup_epochs=0 decay=none seed={seed} precision={quick_precision()} method=cyclic "
        "checkpoint_seconds=1e9",
        data=task.data,
        resolutions=task.sides,
    )


def subset(store: ImageStore, count: int) -> ImageStore:
    """A store of ``count`` images, evenly spaced over ``store`` so that all classes take part."""
    if not count or count >= len(store):
        return store
    chosen = torch.arange(count) * len(store) // count
    pixels = torch.cat([store.image(int(i)).reshape(-1) for i in chosen])
    return ImageStore(pixels, store.labels[chosen], store.sizes[chosen])


def open_task(task: Task, seed: int) -> tuple[ImageData, ImageStore, ImageStore]:
    """A task's data, its training images and its held-out images."""
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
    """A plan with these rows for ``samples`` images; each epoch is evaluated, or the last alone."""
    epochs = sum(row.epochs for row in rows)
    job = job_of(task, seed).model_copy(
        update={"epochs": epochs, **({"evaluate_epochs": epochs} if evaluate_last else {})}
    )
    facts = data.facts.model_copy(update={"train_samples": samples})
    network = facts_of(job.network, len(facts.classes), max(task.sides))
    changes = (
        {"epochs": row.epochs, "resolution": row.resolution, "learning_rate": RATE * row.rate}
        for row in rows
    )
    return fixed_plan(job, facts, network, *changes, batches=(task.batch,))


@dataclass(frozen=True)
class Trained:
    """A whole training: seconds, and held-out accuracy at its end as a share.

    ``copying``: seconds to make the smaller copies, once for a data set, before training.
    """

    training: float
    evaluation: float
    copying: float
    accuracy: float


def train_whole(task: Task, rows: Sequence[Row], seed: int, run_folder: Path) -> Trained:
    """Train by the rows, and evaluate after every epoch at the highest resolution."""
    with training(task, rows, seed, run_folder) as (session, step, held_out, copying):
        for _ in session.epochs():
            for pixels, labels in session.batches():
                step(pixels, labels)
            scores = session.evaluate(held_out, accuracy_and_loss)
    records = read_summary(run_folder).epochs
    return Trained(
        sum(record.training_seconds for record in records),
        sum(record.evaluation_seconds for record in records),
        copying,
        scores["top1"],
    )


def train_at(turns: Turns, task: Task, resolution: int, run_folder: Path) -> None:
    """Train endlessly at one of the task's resolutions, in turns with other processes."""
    rows = (Row(10**9, resolution), Row(1, max(task.sides)))
    with training(task, rows, 0, run_folder, prepared=(resolution,)) as (session, step, *_):
        turns.ready()
        for _ in session.epochs():
            for pixels, labels in session.batches():
                step(pixels, labels)
                turns.step_done(task.batch)


@contextmanager
def training(
    task: Task,
    rows: Sequence[Row],
    seed: int,
    run_folder: Path,
    prepared: Sequence[int] | None = None,
) -> Iterator[tuple[bw.Session, Callable[[Tensor, Tensor], object], ImagePipeline, float]]:
    """A session, a function that does a step of it, the held-out images, and seconds of copying.

    Smaller copies are made for the ``prepared`` resolutions; ``None``: those of the rows.
    """
    prepare_process(usable_cores())
    data, images, held_out = open_task(task, seed)
    plan = plan_of(task, rows, data, len(images), seed)
    top = max(task.sides)
    network = build_network(plan.job.network, classes=len(data.facts.classes), side=top, seed=seed)
    loss, optimizer = build_loss(plan.job), build_optimizer(network, plan.job, RATE)
    fed, judged = (image_pipeline(plan, data, store) for store in (images, held_out))
    before = time.perf_counter()
    fed.prepare(set(prepared or (row.resolution for row in rows)))
    copying = time.perf_counter() - before
    with bw.Session(network, optimizer, fed, plan=plan, run_folder=run_folder) as session:
        yield session, lambda x, y: session.step(loss(network(x), y)), judged, copying
