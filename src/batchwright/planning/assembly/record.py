"""The plan as a record: its rows, and a reason for each choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchwright.planning.assembly.found import Found
from batchwright.planning.assembly.known import Known
from batchwright.planning.averaging import averaged_epochs, averaging_reasons, schedule_reasons
from batchwright.planning.candidates.choice import batch_reason, other_resolutions, workers_reason
from batchwright.planning.candidates.cluster_options import may_mix
from batchwright.planning.candidates.knees import knee_record
from batchwright.planning.candidates.optimizer import chosen_optimizer, optimizer_reason
from batchwright.planning.candidates.prediction_records import (
    MAX_SHOWN,
    extrapolations,
    held_out,
    training_time,
)
from batchwright.planning.candidates.preemptions import spot_reasons
from batchwright.planning.candidates.progress import progress_reasons
from batchwright.planning.chosen import Chosen
from batchwright.planning.compiling import compilation
from batchwright.planning.gradient_scaling import ags_rule, check_parts, unmeasured_noise
from batchwright.planning.gradient_scaling import reasons as scaling_reasons
from batchwright.planning.learning_rates import rate_of
from batchwright.planning.measurements import (
    fewer_cores,
    graphs,
    loading,
    machine,
    measured_precision,
    recomputation,
    threads_of_all,
)
from batchwright.planning.methods.batch_growth import growth_reasons, growth_rows
from batchwright.planning.methods.layout import (
    Layout,
    laid_out,
    lay_out,
    link_reason,
    method_reason,
)
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.resolution import resolution_reason
from batchwright.planning.validation import least_local, precision_of
from batchwright.records import Job, OptimizerName, Plan, Reason, Stage
from batchwright.records.job import as_written
from batchwright.records.text.formatting import counted


def with_one_row(asked: Job, known: Known, found: Found) -> Plan:
    """The plan of a method whose steps are all alike."""
    job, times, choice, row = found.job, found.times, found.choice, found.choice.row
    settled, chosen, progress = times.job, times.chosen, times.progress
    batch, data, network = chosen.global_batch_size, times.data, times.network
    update = chosen_optimizer(known.job, batch, known.compared)
    rule, rates = rate_of(
        settled, batch, data, network, update, known.learnt, by_runs=asked.scaling == "auto"
    )
    layout = Layout(
        laid_out(settled, rule, [times.only_level()]), rule, train_seconds=chosen.train_seconds
    )
    stage = layout.stages[0]
    growth = growth_rows(times, stage)
    of_batch, of_time = times.batch_reasons(stage)
    knee = next(
        (
            one
            for one in found.knees
            if (one.cluster, one.resolution) == (row.cluster, row.resolution)
        ),
        None,
    )
    in_training = unmeasured_noise(layout.stages, least_local(network), served=False)
    explained = (
        _workers_reason(known, found),
        resolution_reason(stage.resolution, data, other_resolutions(row, found.rows)),
        *_measured_reasons(known, found),
        *method_reason(settled),
        batch_reason(job, choice, knee, named=known.named),
        *of_batch,
        *of_time,
        training_time(job, chosen),
        *(times.losses.reasons(chosen.train_seconds) if chosen.train_seconds else ()),
        *known.recipe,
        *optimizer_reason(settled, batch, known.compared),
        *rates,
        *growth_reasons(job, growth, update),
        *progress_reasons(progress, batch, in_training),
        *schedule_reasons(row.epochs, found.scheduled),
        *link_reason(settled),
    )
    by_epoch = progress.by_epoch(
        batch, found.scheduled, rule, averaged=averaged_epochs(job) is not None
    )
    return _measured_plan(
        asked,
        known,
        found,
        layout,
        explained,
        growth=growth,
        epoch_accuracy=by_epoch,
        end_loss=progress.end_loss(batch),
    )


def with_rows_of_method(asked: Job, known: Known, found: Found) -> Plan:
    """The plan of a method with several rows, or two groups of workers."""
    settled, batch = found.times.job, found.times.chosen.global_batch_size
    layout = lay_out(settled, found.times)
    explained = (
        _workers_reason(known, found),
        *_measured_reasons(known, found),
        *layout.reasons,
        *known.recipe,
        *optimizer_reason(settled, batch, known.compared),
    )
    return _measured_plan(asked, known, found, layout, explained)


def _threads(found: Found) -> int | None:
    """Compute threads of each worker; `None` on a virtual cluster, and where they differ."""
    virtual = found.job.launcher.simulated
    return None if virtual else threads_of_all(found.choice.row.cluster)


def _workers_reason(known: Known, found: Found) -> Reason:
    job, apart = found.job, len(known.kinds) > 1 and not may_mix(known.kinds, found.job)
    return workers_reason(job, found.choice, _threads(found), named=known.named, apart=apart)


def _measured_reasons(known: Known, found: Found) -> tuple[Reason, ...]:
    """Reasons for what the probe itself settled."""
    own = known.profile_of(found.choice.row.cluster)
    return (
        measured_precision(own, precision_of(found.job)),
        *recomputation(own),
        *compilation(own, found.job),
        *graphs(known.merged),
    )


def _measured_plan(
    asked: Job,
    known: Known,
    found: Found,
    layout: Layout,
    explained: Sequence[Reason],
    **predicted: Any,
) -> Plan:
    """The plan as a record; ``predicted`` has further fields: predictions of its method."""
    job, row, kinds, stages = found.job, found.choice.row, known.kinds, layout.stages
    cluster, threads, own = row.cluster, _threads(found), known.profile_of(row.cluster)
    virtual = job.launcher.simulated  # loading and held-out steps are of this machine's own time
    work = known.table.work(row, row.epochs)
    return assembled(
        found.times,
        layout,
        (
            *machine(known.merged, cluster.workers),
            *extrapolations(cluster, stages),
            *explained,
            *spot_reasons(known.job, cluster, kinds, work),
            *(() if virtual else loading(own, stages)),
        ),
        chosen_optimizer(known.job, found.times.chosen.global_batch_size, known.compared),
        ags_by_runs=asked.ags.mode == "auto",
        considered=found.considered,
        max_epochs=asked.epochs if found.scheduled < asked.epochs else None,
        target_epochs=row.epochs if row.epochs < found.scheduled else None,
        knees=tuple(
            knee_record(
                knee, job.goal.doubling_gain, named=known.named, ends=len(found.rows) <= MAX_SHOWN
            )
            for knee in found.knees
        ),
        held_out=() if virtual else held_out(kinds),
        kinds=cluster.kinds if known.named else (),
        threads=threads,
        cores=threads and fewer_cores(own, stages, threads),
        **predicted,
    )


def assembled(
    times: Measured | Stated,
    layout: Layout,
    explained: Sequence[Reason],
    update: OptimizerName | None = None,
    *,
    ags_by_runs: bool = False,
    **predicted: Any,
) -> Plan:
    """The plan as a record, with the reasons that follow from its stages.

    Args:
        times: Step times, and the job as it was settled.
        layout: Stages and learning rate.
        explained: Reasons that come first.
        update: The optimizer; unset: the job's own for the largest batch.
        ags_by_runs: Whether runs decided for the job's `ags.mode`, if it is not `auto`.
        predicted: Further fields of the plan: predictions.

    Raises:
        JobError: Bounds of gradient scaling contradict each other.
        PlanError: A batch cannot be cut into the parts that it takes.
    """
    job, stages, rule, server = times.job, layout.stages, layout.rule, layout.server
    least = least_local(times.network)
    check_parts(job, stages, least)
    if update is None:
        update = chosen_optimizer(job, max(stage.global_batch_size for stage in stages))
    assert job.method != "auto"  # noqa: S101 - settled before
    return Plan(
        job=job,
        data=times.data,
        network=times.network,
        method=job.method,
        update=update,
        ags=ags_rule(job),
        average_epochs=averaged_epochs(job),
        judged_from=sum(row.epochs for row in stages[:-1]),
        precision=precision_of(job),
        learning_rate=rule,
        merge="parameter server" if server else "sample-weighted all-reduce",
        server=server,
        stages=stages,
        train_seconds=layout.train_seconds,
        reasons=(
            *explained,
            *scaling_reasons(job, stages, least, rule, update, by_runs=ags_by_runs),
            *averaging_reasons(job),
            *_normalization_reasons(job),
            *_patience_reasons(job, stages),
        ),
        **predicted,
    )


def _normalization_reasons(job: Job) -> tuple[Reason, ...]:
    """What images are normalized by; empty where it is open, so by the training images' own."""
    if job.normalize == "auto":
        return ()
    why = "Mean and standard deviation of the training images, as asked."
    if job.normalize != "data":
        why = (
            "Means of red, green and blue, then standard deviations: those that the weights at the "
            "start were trained with, unless the job was given others. normalize=data takes those "
            "of the training images."
        )
    return (Chosen(as_written(job.normalize), why, "asked").reason("normalization"),)


def _patience_reasons(job: Job, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """When training may end before its last epoch for want of progress; empty if it never does."""
    if job.goal.patience is None:
        return ()
    times, only = counted(job.goal.patience, "evaluation"), ""
    if len(stages) > 1:
        only = "Only those of the last row count, as accuracy moves with resolution and rate. "
    why = (
        "Training ends once so many in a row have brought no held-out accuracy above the best one "
        f"before. {only}When that will be is not predicted: the plan's times and costs are of all "
        "epochs, so they are upper bounds."
    )
    return (Chosen(times, why, "asked").reason("patience"),)
