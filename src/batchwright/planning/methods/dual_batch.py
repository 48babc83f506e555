"""`dual-batch` and `hybrid`: two local batch sizes at once, through a parameter server."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.planning.candidates.table import in_memory
from batchwright.planning.chosen import Chosen
from batchwright.planning.learning_rates import rate_at_top
from batchwright.planning.methods.group_reasons import group_reasons
from batchwright.planning.methods.layout import Layout, laid_out
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.methods.two_groups import (
    large_batches_of,
    refuse_too_many,
    served_in_time,
    served_level,
)
from batchwright.planning.resolution import resolution_reason, schedule_of, sides
from batchwright.records import Job, Reason, Source, Stage
from batchwright.records.text.formatting import between


def lay_out(job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...]) -> Layout:
    """Lay out the plan's table: two groups of workers at each resolution.

    Arguments are those of `layout.lay_out`.

    A method that cycles goes through the resolutions of its schedule, others stay at the highest.

    Raises:
        PlanError: There are too many workers, or as `served_in_time` raises.
    """
    refuse_too_many(job.method, times.workers)
    schedule = schedule_of(job) if job.method_spec.cycles else None
    samples = times.data.train_samples
    levels = sides(job) if schedule is not None else (max(sides(job)),)
    top = times.large_batch()
    large = large_batches_of(job, levels, top, samples / times.workers, times.fitting)
    pace = times.pace(large.value[-1])
    deadline, allowed = job.goal.deadline, None
    if deadline is not None:
        allowed = times.losses.work(deadline) - times.other_seconds(job.epochs)
    found = served_in_time(
        job,
        pace,
        sides=levels,
        large_batches=large,
        samples=samples,
        epochs=(job.epochs,) if schedule is None else schedule.epochs_of_levels,
        allowed=allowed,
    )
    rows = []
    for side, groups, batch in zip(levels, found.groups, large.value, strict=True):
        micro = times.micro_batch(side, groups.local_batch_sizes)
        peak = times.peak(side, micro, max(groups.local_batch_sizes))
        ends = pace.spread(side, batch)
        rows.append(served_level(groups, found.rule, side, micro_batch=micro, ends=ends, peak=peak))
    rule, rates = rate_at_top(job, large.value[-1], times.network)
    stages = laid_out(job, rule, rows, schedule)
    scheduled: tuple[Reason, ...] = (resolution_reason(levels[-1], times.data),)
    if schedule is not None:
        scheduled = schedule.reasons(job, times.data)
    why = (
        *scheduled,
        *group_reasons(
            found,
            pace,
            levels,
            samples=samples,
            measured=times.measured,
            rounding=job.dual.rounding,
        ),
        *_memory(stages, times.limit),
        *_round_time(job, stages),
        *optimizer,
        *rates,
    )
    return Layout(stages, rule, why, found.rule)


def _round_time(job: Job, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """The reason for the time of a round at the highest resolution; empty if not predicted."""
    top = max(stages, key=lambda stage: stage.resolution)
    one = top.predicted_epoch_seconds
    if one is None:
        return ()
    value = between(one, " s")
    why = (
        f"At {top.resolution} px, until the last worker has ended its samples, the exchange with "
        "the server included."
    )
    source: Source = "assumed" if job.launcher.simulated else "predicted"
    return (Chosen(value, why, source).reason("round time"),)


def _memory(stages: Sequence[Stage], limit: int) -> tuple[Reason, ...]:
    """The reason for the largest predicted peak of a worker; empty if not predicted."""
    peaks = [stage.predicted_bytes for stage in stages if stage.predicted_bytes is not None]
    if not peaks:
        return ()
    peak = max(peaks, key=lambda one: one.high)
    why = (
        f"At most {in_memory(peak.high)} predicted, on a worker with the largest batch; the limit "
        f"is {in_memory(limit)}."
    )
    return (Chosen(f"{in_memory(peak.value)} per worker", why, "predicted").reason("memory"),)
