"""A batch that grows with the gradient noise: the rows that later epochs may have, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from batchwright.algorithms.learning_rate import scaled_rate
from batchwright.planning.chosen import Chosen
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.records import Job, OptimizerName, Reason, Stage
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.text.formatting import between

FACTORS = (2, 4, 8)
LEAST_STEPS = 16
"""Steps of an epoch that the largest batch leaves. This bound and the largest factor are those of
the trainings that show what growth saves (docs/decisions/0098)."""


def growth_rows(times: Measured | Stated, planned: Stage) -> tuple[Stage, ...]:
    """The planned row with two, four and eight times its batch.

    They end before an epoch would have too few steps, or doubling the batch would save less than
    `goal.doubling_gain` of its time.

    Args:
        times: Step times; its job says how the rate follows the batch.
        planned: The row that training begins with.
    """
    return tuple(_larger(times, planned))


def _larger(times: Measured | Stated, planned: Stage) -> Iterator[Stage]:
    job, first, row = times.job, planned.global_batch_size, planned
    if job.batch_growth == "off":
        return
    for factor in FACTORS:
        batch = factor * first
        if batch * LEAST_STEPS > times.data.train_samples:
            return
        rate = scaled_rate(planned.learning_rate, first, batch, job.rate_scaling)
        level = {**times.level(planned.resolution, batch), "learning_rate": rate}
        before, row = row, planned.model_copy(update=level)
        if _saved(row, before) < job.goal.doubling_gain or _beyond_bounds(job, row):
            return
        yield row


def _saved(row: Stage, other: Stage) -> float:
    """Share of the other row's predicted epoch that a row saves; infinite where that is unknown."""
    one, than = row.predicted_epoch_seconds, other.predicted_epoch_seconds
    return inf if one is None or than is None else 1 - one.value / than.value


def _beyond_bounds(job: Job, row: Stage) -> bool:
    """Whether `most_local_batch` leaves no way to share the row's batch."""
    most = job.most_local_batch if job.method_spec.takes("most_local_batch") else None
    return most is not None and most * row.workers < row.global_batch_size


def growth_reasons(job: Job, rows: Sequence[Stage], update: OptimizerName) -> tuple[Reason, ...]:
    """How far the batch may grow, and what an epoch then takes; empty where it stays."""
    if job.batch_growth == "off":
        return ()
    if not rows:
        value = "none"
        why = (
            f"Asked for, but twice the batch leaves fewer than {LEAST_STEPS} steps an epoch, saves "
            f"less than goal.doubling_gain={job.goal.doubling_gain:g} of the time, or is more than "
            "most_local_batch allows."
        )
    else:
        value = f"to at most {rows[-1].global_batch_size} samples"
        seconds = [row.predicted_epoch_seconds for row in rows]
        what = ", ".join(
            f"{row.global_batch_size}" + (f" ({between(one)} s an epoch)" if one else "")
            for row, one in zip(rows, seconds, strict=True)
        )
        why = (
            f"Asked for. Later epochs have a batch of {what}, once the gradient noise scale has "
            "grown as much since the first epoch. Predicted times and accuracy are those of a "
            "batch that stays, so the times are upper bounds."
        )
        if OPTIMIZERS[update].follows_gradients:
            why += (
                " It is made for muon: with sgd trainings of three other tasks lost 1.5 points "
                "each where their batch grew (docs/log.md)."
            )
    return (Chosen(value, why, "asked").reason("growth of the batch"),)
