"""A plan that trains as asked, where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.errors import PlanError
from batchwright.planning import reasons
from batchwright.planning.assembly import assemble, stage_of
from batchwright.planning.inputs import (
    check_batch,
    check_bounds,
    check_micro_batches,
    check_side,
    least_local,
    resolved,
    sides,
)
from batchwright.planning.kinds import cut
from batchwright.planning.learning_rate import make_rule
from batchwright.planning.partition import apportion
from batchwright.records import DataFacts, Job, NetworkFacts, Plan


def plan_without_profile(
    job: Job,
    data: DataFacts,
    network: NetworkFacts,
    *,
    local_batch_sizes: Sequence[int] | None = None,
) -> Plan:
    """A plan that trains as asked, where nothing was measured: it predicts nothing.

    What the job leaves open is assumed: one worker, float32, the base batch or, where the data is
    too small for it, the largest batch that leaves ``goal.least_steps`` steps per epoch.

    Args:
        job: What to train; its ``workers`` must fit ``local_batch_sizes`` if both are given.
        data: The data set.
        network: The network.
        local_batch_sizes: Samples per step of each worker, in rank order; unset: equal shares of
            the global batch.

    Raises:
        PlanError: Batches, workers and data do not fit together.
        JobError: The warm-up asked for is longer than the training.
    """
    local = tuple(local_batch_sizes or ())
    workers = len(local) if job.workers == "auto" and local else job.workers
    workers = 1 if workers == "auto" else workers
    if local and len(local) != workers:
        raise PlanError(f"{len(local)} local batches {list(local)} for workers={workers}")
    least = least_local(network)
    if job.global_batch == "auto":
        most = data.train_samples // job.goal.least_steps
        batch = sum(local) or max(workers * least, min(job.base_batch, most))
    else:
        batch = job.global_batch
    if local and sum(local) != batch:
        raise PlanError(f"local batches {list(local)} do not add up to global_batch={batch}")
    check_batch(batch, workers, least, data)
    local = local or tuple(apportion([1] * workers, batch))
    if min(local) < least:
        raise PlanError(f"local batches {list(local)}: each worker needs at least {least}")
    check_bounds(job, local)
    precision = job.precision if job.precision != "auto" else "float32"
    job = resolved(job, data, precision=precision, workers=workers)
    side = max(sides(job))
    check_side(side, network)
    rule = make_rule(job, batch, job.epochs)
    stage = stage_of(job, side, rule, local)
    if job.micro_batch != "auto":
        check_micro_batches(max(local), job.micro_batch, least)
        micro = max(cut(max(local), job.micro_batch))
        stage = stage.model_copy(update={"micro_batch_size": micro})
    return assemble(
        job,
        data,
        network,
        rule,
        stage,
        reasons=(
            reasons.unmeasured_batch(job, stage, given=local_batch_sizes is not None),
            reasons.resolution(side, data),
            *reasons.method(job),
            *reasons.learning_rate(job, rule, stage),
        ),
    )
