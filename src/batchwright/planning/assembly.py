"""Puts what was decided into the records of a plan."""

from __future__ import annotations

from typing import Any

from batchwright.planning.candidates.optimizer import chosen_optimizer
from batchwright.planning.gradient_scaling import ags_rule, check_parts
from batchwright.planning.gradient_scaling import reasons as scaling_reasons
from batchwright.planning.methods.update_rule import no_factors
from batchwright.planning.validation import least_local, precision_of
from batchwright.records import (
    DataFacts,
    Job,
    LearningRateRule,
    NetworkFacts,
    OptimizerName,
    Plan,
    Reason,
    ServerRule,
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
    stages: tuple[Stage, ...],
    *,
    server: ServerRule | None = None,
    update: OptimizerName | None = None,
    reasons: tuple[Reason, ...],
    **predicted: Any,
) -> Plan:
    """The plan; ``predicted`` are its fields of that kind, and ``update`` what runs say, if any.

    Raises:
        JobError: Bounds of gradient scaling contradict each other.
        PlanError: A batch cannot be cut into the parts that it takes.
    """
    least = least_local(network)
    check_parts(job, stages, least)
    largest = max(stage.global_batch_size for stage in stages)
    of_a_step = max(max(stage.local_batch_sizes) for stage in stages) if server else largest
    update = update or chosen_optimizer(job, largest)
    assert job.method != "auto"  # noqa: S101 - settled before
    return Plan(
        job=job,
        data=data,
        network=network,
        method=job.method,
        update=update,
        ags=ags_rule(job),
        precision=precision_of(job),
        learning_rate=rule,
        merge="parameter server" if server else "sample-weighted all-reduce",
        server=server,
        stages=stages,
        reasons=(
            *reasons,
            *scaling_reasons(job, stages, least, rule, update),
            *no_factors(job, update, of_a_step),
        ),
        **predicted,
    )
