"""Plans that nothing was measured for, and what they need to know of data and network."""

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
    """Data and network, as a plan wants to know them."""

    data: str  # as in a job
    facts: DataFacts  # of these data
    network: NetworkFacts  # of the network


def opened(data: str, network: str, side: int) -> Opened:
    """Open what a job names."""
    facts = open_data(Job(data=data, resolutions=(side,))).facts
    return Opened(data, facts, facts_of(network, len(facts.classes), side))


def facts_of(network: str, classes: int, side: int) -> NetworkFacts:
    """What a plan wants to know of a network."""
    return network_facts(network, build_network(network, classes=classes, side=side), side)


def made_up_data(name: str, samples: int, classes: int, side: int, held_out: int = 0) -> DataFacts:
    """Facts of data that are nowhere."""
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
    """A job by ``key=value`` words, as a command line has them, and by keys that are no text."""
    return change_job(change_job(Job(), overrides=words.split()), keys)


def planned(job: Job, known: Opened) -> Plan:
    """The plan of a job: what it leaves open is as a plan without profile has it."""
    return plan_without_profile(resolve(job, known.facts), known.facts, known.network)


def quick_precision() -> Literal["float32", "bfloat16"]:
    """Bfloat16 where the processor computes in it; all runs that are compared have the same."""
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
    """What feeds stored images to a training as the plan says, cropped and flipped at random."""
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
    """A plan that nothing is chosen in: SGD at the job's rate, as the job says all else.

    Args:
        job: Names rate, its batch, decay, precision, augmentation and the highest resolution.
        facts: Of the data.
        network: Of the network.
        rows: Of the plan, by what is not as the job has it throughout.
        batches: Local batch of each worker.
        more: Other parts of the plan.
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
