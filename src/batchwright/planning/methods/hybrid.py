"""`hybrid`: two local batch sizes at each resolution, resolutions in turn."""

from __future__ import annotations

from batchwright.planning.methods.dual_batch import two_groups
from batchwright.planning.methods.layout import Layout
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.resolution import schedule_of
from batchwright.records import Job, Reason


def lay_out(job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...]) -> Layout:
    """Lay out the plan's table: two groups of workers at each resolution of each stage."""
    return two_groups(job, times, schedule_of(job), optimizer)
