"""`cyclic`: all workers alike, resolution by resolution."""

from __future__ import annotations

from batchwright.planning.chosen import Chosen
from batchwright.planning.learning_rates import rate_at_top
from batchwright.planning.methods.layout import Layout, laid_out
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.resolution import cycle_batches, schedule_of
from batchwright.records import Job, Reason


def lay_out(job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...]) -> Layout:
    """Lay out the plan's table: a row for each resolution of each stage; arguments as `lay_out`."""
    schedule = schedule_of(job)
    resolutions = schedule.resolutions
    batches = cycle_batches(job, times.data) or Chosen(
        (times.batch,) * len(resolutions),
        "The same at all: the one chosen at the highest.",
        "assumed",
    )
    levels = [times.level(*each) for each in zip(resolutions, batches.value, strict=True)]
    rule, rates = rate_at_top(job, batches.value[-1], times.network)
    stages = laid_out(job, rule, levels, schedule)
    of_batch, of_time = times.batch_reasons(stages[-1])
    values = [f"{n} at {side} px" for n, side in zip(batches.value, resolutions, strict=True)]
    each = batches.reason("batch at each resolution", ", ".join(values))
    why = (*schedule.reasons(job, times.data), *of_batch, each, *of_time, *optimizer, *rates)
    return Layout(stages, rule, why)
