"""The chart of a worker's memory against its micro-batch."""

from __future__ import annotations

from batchwright.records import Plan, Prediction, Profile
from batchwright.records.text.formatting import number
from batchwright.records.text.plan_text import is_chosen, planned_sizes
from batchwright.reporting.charts.chart import (
    LOOKS,
    Band,
    Chart,
    Point,
    Series,
    batch_axis,
    heights,
    linear_axis,
)
from batchwright.reporting.data.worker_curves import spread

_MIB = 2**20
_MAX_POINTS = 200  # measured points


def memory_chart(plan: Plan, profile: Profile | None) -> Chart | None:
    """Predicted peak of tensors on one worker with its interval, and measured points.

    There is a line for each resolution, of the candidates with the plan's number of workers, and a
    line at the memory limit. `None` with fewer than two batches.
    """
    found: dict[tuple[int, int], Prediction] = {}
    for one in plan.considered:
        if one.workers == plan.workers:
            found.setdefault((one.resolution, one.micro_batch_size), one)
    if len({batch for _, batch in found}) < 2:
        return None
    sides = sorted({side for side, _ in found})
    series: list[Series] = []
    bands: list[Band] = []
    for side, (style, marker) in zip(sides, LOOKS, strict=False):
        ones = [found[key] for key in sorted(found) if key[0] == side]
        words = f" at {side} px" * (len(sides) > 1)
        points = tuple(
            Point(
                one.micro_batch_size,
                one.peak_bytes.value / _MIB,
                f"{one.micro_batch_size} samples{words}: {number(one.peak_bytes.value / _MIB)} MiB",
            )
            for one in ones
        )
        edges = tuple(
            (float(one.micro_batch_size), one.peak_bytes.low / _MIB, one.peak_bytes.high / _MIB)
            for one in ones
        )
        series.append(Series(f"predicted{words}", style, points, marker))
        bands.append(Band("95 % interval", style, edges))
    planned = planned_sizes(plan)
    measured = tuple(
        Point(
            one.local_batch_size,
            one.peak_bytes / _MIB,
            f"{one.local_batch_size} samples at {one.resolution} px: "
            f"{number(one.peak_bytes / _MIB)} MiB measured",
        )
        for one in spread(profile.memory if profile else (), _MAX_POINTS)
        if one.resolution in sides and one.workers == plan.workers
    )
    chosen = tuple(
        Point(one.micro_batch_size, one.peak_bytes.value / _MIB, "chosen")
        for one in found.values()
        if is_chosen(plan, one, planned)
    )
    series += [
        Series("measured", "red", measured, "diamond", line=False),
        Series("chosen", "ink", chosen, "ring", line=False),
    ]
    batches = [batch for _, batch in found] + [int(point.x) for point in measured]
    x = batch_axis("samples at once on a worker", batches, [int(point.x) for point in chosen])
    limit, top = plan.job.goal.memory, max(heights(series, bands))
    if limit is not None and limit / _MIB <= 2 * top:
        ends = tuple(Point(end, limit / _MIB) for end in (x.low, x.high))
        series.append(Series("goal.memory", "grey", ends, "none", dashed=True))
    return Chart(
        "Memory against batch",
        x,
        linear_axis("peak of tensors (MiB)", heights(series, bands)),
        series,
        bands,
    )
