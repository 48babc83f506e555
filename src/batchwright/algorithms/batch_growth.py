"""A global batch that grows with the gradient noise: which row of a plan an epoch is trained with.

The noise scale B_noise is the batch at which a gradient's noise equals its signal; it rises while a
network learns. A batch that keeps its ratio to it takes fewer steps at the same progress a sample.

Smith et al. 2018, arXiv 1711.00489 (a batch that grows in place of a rate that falls); McCandlish
et al. 2018, arXiv 1812.06162 (the noise scale). What it saves: docs/decisions/0098.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from batchwright.records import EpochRecord, Plan, Stage


def rows_in_reach(plan: Plan, noise: Iterable[float | None]) -> int:
    r"""How many of the plan's growth rows are in reach of the gradient noise.

    With :math:`B_0` the batch of the first row and :math:`N_e` the noise scale after epoch e, a row
    of batch B is in reach once

    .. math:: \max_e N_e / N_{first} \ge B / B_0

    where first is the first epoch with a known noise scale. So the batch never shrinks.

    Args:
        plan: Its ``growth`` has the rows, small to large.
        noise: Noise scale after each epoch so far, in samples; `None`: not known.

    Returns:
        A number of rows, from the smallest on; 0 where no noise scale is known.
    """
    known = [one for one in noise if one]
    if not known:
        return 0
    most = max(known) / known[0] * plan.stages[0].global_batch_size
    return sum(row.global_batch_size <= most for row in plan.growth)


def grown(planned: Stage, rows: Sequence[Stage]) -> Stage:
    """The row with the largest batch of a planned one and growth rows that are in reach."""
    return max((planned, *rows), key=lambda row: row.global_batch_size)


def row_of(plan: Plan, epoch: int, batch: int) -> Stage:
    """The row that a zero-based epoch was trained with, by its global batch in samples."""
    in_reach = [row for row in plan.growth if row.global_batch_size <= batch]
    return grown(plan.stages[plan.stage_of(epoch)], in_reach)


def as_trained(plan: Plan, epochs: Iterable[EpochRecord]) -> Plan:
    """The plan with the rows that its epochs were trained with; itself if it has no growth rows.

    Epochs that are still to come have the row of the last one.

    Args:
        plan: The plan as it was made.
        epochs: The finished epochs.
    """
    if not plan.growth:
        return plan
    batches = {one.epoch: one.global_batch_size for one in epochs}
    rows, batch = [], 0
    for epoch in range(plan.epochs):
        batch = batches.get(epoch, batch)
        rows.append(row_of(plan, epoch, batch).model_copy(update={"epochs": 1}))
    stages = (row.model_copy(update={"epochs": len(list(alike))}) for row, alike in groupby(rows))
    return plan.model_copy(update={"stages": tuple(stages)})
