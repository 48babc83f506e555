"""Plans without a probe, and the facts of data and network that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from batchwright.planning.planner import plan_without_profile
from batchwright.records import DataFacts, Job, LearningRateRule, NetworkFacts, Plan, Stage
from batchwright.records.documents import change_job
from batchwright.workflows.prepare_job import resolve
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import ImageData, open_data
from batchwright.workload.host import computes_in_bfloat16, dtype_of
from batchwright.workload.task import build_network, network_facts

CPU = torch.device("cpu")
ENDLESS = 1_000_000  # epochs, and seconds between checkpoints
ONE_WORKER = "device=cpu launch=in-process workers=1"  # keys of a job, see `job_from`


@dataclass(frozen=True)
class Opened:
    """Facts of data and network, for a plan."""

    data: str  # the data's name in a job
    facts: DataFacts  # of the data
    network: NetworkFacts  # of the network


def opened(data: str, network: str, side: int) -> Opened:
    """Facts of the data and the network that a job would name."""
    facts = open_data(Job(data=data, resolutions=(side,))).facts
    return Opened(data, facts, facts_of(network, len(facts.classes), side))


def facts_of(network: str, classes: int, side: int) -> NetworkFacts:
    """Facts of a network, for a plan."""
    return network_facts(network, build_network(network, classes=classes, side=side), side)


def made_up_data(name: str, samples: int, classes: int, side: int, held_out: int = 0) -> DataFacts:
    """Facts of data that do not exist."""
    return DataFacts(
        name=name,
        digest="0" * 64,
        train_samples=samples,
        val_samples=held_out,
        split="made up",
        classes=tuple(map(str, range(classes))),
        side=side,
    )


def job_from(words: str, **keys: Any) -> Job:
    """A job from ``key=value`` words, as on a command line, and from keys with other values."""
    return change_job(change_job(Job(), overrides=words.split()), keys)


def planned(job: Job, known: Opened) -> Plan:
    """The plan of a job without a profile."""
    return plan_without_profile(resolve(job, known.facts), known.facts, known.network)


def quick_precision() -> Literal["float32", "bfloat16"]:
    """bfloat16 if the processor computes in it, else float32; equal for all compared runs."""
    return "bfloat16" if computes_in_bfloat16(CPU) else "float32"


def with_rates(plan: Plan, factor: float) -> Plan:
    """The plan with all its rates times ``factor``."""
    rule = plan.learning_rate
    rates = {"base": rule.base * factor, "peak": rule.peak * factor}
    stages = tuple(
        stage.model_copy(update={"learning_rate": stage.learning_rate * factor})
        for stage in plan.stages
    )
    update = {"learning_rate": rule.model_copy(update=rates), "stages": stages}
    return plan.model_copy(update=update)


def image_pipeline(plan: Plan, data: ImageData, store: ImageStore) -> ImagePipeline:
    """The pipeline of stored images for a plan, with random crops and flips."""
    return ImagePipeline(
        store,
        device=CPU,
        side=plan.top_resolution,
        mean=data.mean,
        std=data.std,
        augmentation="crop-flip",
        seed=plan.job.seed,
        dtype=dtype_of(plan.precision),
    )


def fixed_plan(
    job: Job,
    facts: DataFacts,
    network: NetworkFacts,
    *rows: Mapping[str, Any],
    batches: Sequence[int],
    **more: Any,
) -> Plan:
    """A plan without any choice: SGD at the job's rate, all else from the job.

    Args:
        job: Names rate, its batch, decay, precision, augmentation and the highest resolution.
        facts: Facts of the data.
        network: Facts of the network.
        rows: Stages of the plan, each by the fields that differ from the job's.
        batches: Local batch of each worker.
        more: Other fields of the plan.
    """
    rate = float(job.learning_rate)
    usual = {
        "epochs": job.epochs,
        "resolution": max(job.resolutions),
        "learning_rate": rate,
        "dropout": 0.0,
        "augmentation": job.augment,
        "local_batch_sizes": tuple(batches),
        "micro_batch_size": max(batches),
    }
    return Plan(
        job=job,
        data=facts,
        network=network,
        update="sgd",
        precision=job.precision,
        learning_rate=LearningRateRule(
            base=rate,
            base_batch=job.base_batch,
            scaling="none",
            peak=rate,
            warmup_epochs=0.0,
            decay=job.decay,
        ),
        stages=tuple(Stage(**{**usual, **row}) for row in rows or ({},)),
        **{"method": job.method, **more},
    )
