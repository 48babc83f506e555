"""A global batch that grows with the gradient noise: which rows of a plan are in reach.

The noise scale B_noise is the batch at which a gradient's noise equals its signal; it rises while a
network learns. A batch that keeps its ratio to it takes fewer steps at the same progress a sample.

Smith et al. 2018, arXiv 1711.00489 (a batch that grows in place of a rate that falls); McCandlish
et al. 2018, arXiv 1812.06162 (the noise scale). What it saves: docs/decisions/0098.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchwright.records import Plan


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
