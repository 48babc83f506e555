"""The candidates of a job, and the choice among them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchwright.planning.assembly.known import Known
from batchwright.planning.averaging import scheduled_epochs
from batchwright.planning.candidates.choice import Choice, aimed, asked_for, choose
from batchwright.planning.candidates.knees import KneeFit, knee_fits_of
from batchwright.planning.candidates.prediction_records import kept_rows, predictions
from batchwright.planning.candidates.preemptions import settled_checkpoints
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Row, Table
from batchwright.planning.methods.time_models import Measured
from batchwright.planning.refusals import OF_LENGTH
from batchwright.records import Job, Prediction
from batchwright.records.job import check_job


@dataclass(frozen=True)
class Found:
    """All candidates, and the chosen one."""

    rows: list[Row]  # the candidates
    knees: list[KneeFit]  # the batches beyond which a larger one saves too little
    choice: Choice  # the chosen candidate
    considered: tuple[Prediction, ...]  # records of the candidates that the plan shows
    times: Measured  # step times at the chosen one, with the job as it was settled
    scheduled: int  # epochs of the schedule, which may be longer than the training

    @property
    def job(self) -> Job:
        """The job for which candidates were searched, with the epochs of the chosen one."""
        return self.times.table.job.model_copy(update={"epochs": self.choice.row.epochs})


def found_in(known: Known, asked: Job) -> Found:
    """Choose a candidate, and settle the job for it.

    Raises:
        PlanError: No candidate is within the limits.
    """
    table = known.table
    table.check_asked()
    rows, knees, choice = _chosen(table, known.progress)
    unknown = known.unknown + choice.objective.without_accuracy
    progress = replace(choice.objective.progress, unknown=unknown)
    kept, row = kept_rows(rows, knees, choice), choice.row
    considered = predictions(table, rows, kept, choice, progress, named=known.named)
    chosen = considered[kept.index(row)]
    # The schedule may be longer than the training: as long as the limits allow.
    longer = range(row.epochs + 1, scheduled_epochs(known.job, row.epochs) + 1)
    scheduled = row.epochs + bisect_left(
        longer, True, key=lambda epochs: bool(table.trained(row, epochs).misses)
    )
    settled = asked.model_copy(
        update={
            "workers": chosen.workers,
            "scaling": known.job.scaling,
            "ags": known.job.ags,
            "epochs": scheduled,
            **settled_checkpoints(known.job, table.losses(row.cluster)),
        }
    )
    check_job(settled)
    times = Measured(settled, table, choice, chosen, progress)
    return Found(rows, knees, choice, considered, times, scheduled)


def _chosen(table: Table, progress: Progress) -> tuple[list[Row], list[KneeFit], Choice]:
    """The candidates, their knees and the choice among them, made as for `plain`."""
    job = table.job
    rows = [aimed(table, row, progress) for row in table.rows()]
    free = job.workers == "auto" and not job.launcher.one_worker
    if job.method_spec.served and free:  # two groups take two workers or more
        rows = [row for row in rows if row.cluster.workers > 1] or rows
    if not job.method_spec.same_steps:
        rows = _without_limits_of_plain(job, rows)
    knees = knee_fits_of(rows, job.goal.doubling_gain, table.surplus)
    choice = choose(table, rows, knees, progress)
    return rows, knees, choice


def _without_limits_of_plain(job: Job, rows: Sequence[Row]) -> list[Row]:
    """The candidates of a method with other steps, without the limits that none of them keeps.

    Such a method may keep a deadline or a cost that `plain` misses: low resolutions are quicker,
    and workers of a server exchange less. So the deadline, the cost or both are left out, and
    `lay_out` checks them.
    """
    top = max(row.resolution for row in rows)
    _, asked = asked_for(job, [row for row in rows if row.resolution == top])
    missed = [{miss.limit for miss in row.misses} for row in asked]
    left_out = next(
        (
            limits
            for limits in (set[str](), {"goal.deadline"}, {"goal.max_cost"})
            if any(one <= limits for one in missed)
        ),
        OF_LENGTH,
    )
    return [
        replace(row, misses=tuple(miss for miss in row.misses if miss.limit not in left_out))
        for row in rows
    ]
