"""Puts what was decided into the records of a plan."""

from __future__ import annotations

from typing import Any

from batchwright.planning.inputs import precision_of
from batchwright.records import (
    DataFacts,
    Job,
    LearningRateRule,
    NetworkFacts,
    Plan,
    Reason,
    Stage,
)


def stage_of(
    job: Job, side: int, rule: LearningRateRule, local: tuple[int, ...], **predicted: Any
) -> Stage:
    """The only stage of a `plain` plan; each local batch in one pass unless said otherwise."""
    fields = {"micro_batch_size": max(local), **predicted}
    return Stage(
        epochs=job.epochs,
        resolution=side,
        learning_rate=rule.peak,
        dropout=job.dropout,
        augmentation=job.augmentation,
        local_batch_sizes=local,
        **fields,
    )


def assemble(
    job: Job,
    data: DataFacts,
    network: NetworkFacts,
    rule: LearningRateRule,
    stage: Stage,
    *,
    reasons: tuple[Reason, ...],
    **predicted: Any,
) -> Plan:
    """The plan; ``predicted`` are its fields of that kind."""
    return Plan(
        job=job,
        data=data,
        network=network,
        method=job.method,
        update=job.optimizer,
        precision=precision_of(job),
        learning_rate=rule,
        stages=(stage,),
        reasons=reasons,
        **predicted,
    )
