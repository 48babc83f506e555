"""Charts of a simulation: its course, and time and cost against the number of workers."""

from __future__ import annotations

from batchwright.records import Estimate, Simulation
from batchwright.records.clusters.simulation import Search
from batchwright.records.text.formatting import counted, duration, number
from batchwright.reporting.charts.chart import (
    Box,
    Chart,
    Lane,
    Lanes,
    Point,
    Series,
    batch_axis,
    exact_axis,
    linear_axis,
    ratio_axis,
)
from batchwright.reporting.data.plan_curves import time_unit

_STYLES = {
    "training": "part-compute",
    "checkpoint": "part-checkpoints",
    "lost work": "part-communication",
    "restart": "part-set-up",
    "waiting for a worker": "part-wait",
}
_STEP_NAMES = (
    ("computing", "part-compute"),
    ("waiting for slower workers", "part-wait"),
    ("exchange", "part-exchange"),
)


def course_chart(found: Simulation) -> Lanes:
    """The first repeat on the first cluster: training, checkpoints, lost work, restarts."""
    timeline = found.timeline
    unit, name = time_unit(timeline.spans[-1].end)
    lanes = []
    for part, style in _STYLES.items():
        boxes = [
            Box(
                f"box {style}",
                one.start / unit,
                one.end / unit,
                f"{part}, {duration(one.end - one.start)} from {duration(one.start)} on",
            )
            for one in timeline.spans
            if one.part == part
        ]
        if boxes:
            lanes.append(Lane(part, boxes))
    words = "its first part" if timeline.cut else "all of it"
    x = exact_axis(f"simulated {name} since training began", 0.0, timeline.spans[-1].end / unit)
    names = [(lane.name, _STYLES[lane.name]) for lane in lanes]
    title = f"One training of {counted(timeline.workers, 'worker')}: {words}"
    return Lanes(title, x, lanes, names)


def steps_chart(found: Simulation) -> Lanes | None:
    """The first steps of the fastest, the median and the slowest worker; `None` with a server."""
    steps = found.timeline.steps
    if not steps:
        return None
    ends = [
        start + slowest + one.exchange
        for one in steps
        for start, slowest in zip(one.starts, one.slowest, strict=True)
    ]
    lanes = []
    for one in steps:
        boxes = []
        for start, own, slowest in zip(one.starts, one.computing, one.slowest, strict=True):
            edges = (start, start + own, start + slowest, start + slowest + one.exchange)
            for (name, style), at, until in zip(_STEP_NAMES, edges, edges[1:], strict=False):
                if until > at:
                    words = f"worker {one.worker}: {name} {duration(until - at)}"
                    boxes.append(Box(f"box {style}", at, until, words))
        lanes.append(Lane(f"worker {one.worker}", boxes))
    x = exact_axis("simulated seconds", 0.0, max(ends))
    return Lanes("First steps: fastest, median and slowest worker", x, lanes, list(_STEP_NAMES))


def workers_charts(found: Simulation) -> list[Chart]:
    """Time, and cost where there is a price, against the number of workers."""
    unit, name = time_unit(max(one.seconds.value for one in found.clusters))
    label = f"simulated {name} of training"
    charts = [_against_workers(found, "Time against workers", label, "seconds", unit)]
    if all(one.cost is not None for one in found.clusters):
        label = "cost, in the price's currency"
        charts.append(_against_workers(found, "Cost against workers", label, "cost"))
    return charts


def _against_workers(
    found: Simulation, title: str, label: str, key: str, unit: float = 1.0
) -> Chart:
    points, ends = [], []
    for one in sorted(found.clusters, key=lambda one: one.workers):
        estimate: Estimate = getattr(one, key)
        value, low, high = (end / unit for end in (estimate.value, estimate.low, estimate.high))
        ends += [value, low, high]
        words = (
            f"{counted(one.workers, 'worker')}: {number(value)} ({number(low)} to {number(high)})"
        )
        points.append(Point(one.workers, value, words, up=(low, high)))
    y = ratio_axis(label, ends)
    x = batch_axis("workers", [one.workers for one in found.clusters])
    return Chart(title, x, y, [Series("", "blue", tuple(points), "circle")])


def search_chart(search: Search, key: str) -> Chart:
    """Time or cost of each value of a key minus the best one's, with other keys at their best."""
    values = search.along(key)
    label = f"{search.unit} over the best"
    points = [
        Point(
            value,
            one.over_best.value,
            f"{key}={value:g}: {number(one.over_best.value)} more",
            up=(one.over_best.low, one.over_best.high),
        )
        for value, one in sorted(values, key=lambda pair: pair[0])
    ]
    y = linear_axis(
        label, [e for _, one in values for e in (one.over_best.low, one.over_best.high)]
    )
    title = f"{key}, {counted(search.workers, 'worker')}"
    title += f", {search.with_the_best(key)}" * (len(search.keys) > 1)
    x = ratio_axis(key, [value for value, _ in values], from_zero=False)
    return Chart(title, x, y, [Series("", "red", tuple(points), "square")])
