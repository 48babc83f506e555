"""Charts of the workers over the epochs: local batch, compute, wait and communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from batchwright.records import RunSummary
from batchwright.records.text.formatting import duration, number, percent
from batchwright.reporting.charts.chart import (
    LOOKS,
    Axis,
    Band,
    Box,
    Chart,
    Lane,
    Lanes,
    Marker,
    Point,
    Series,
    heights,
    linear_axis,
)
from batchwright.reporting.charts.run import bars
from batchwright.reporting.data.live_run import WorkerNow
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.worker_curves import (
    PARTS,
    Part,
    Share,
    WorkerCurve,
    changes,
    most_different,
    recorded_parts,
    spread,
    step_lines,
    worker_curves,
)

MAX_PANELS = 16
_MAX_MARKS = 24  # on one line: more would hide it
_MAX_POINTS = 160  # of one line over the epochs
_MAX_STEPS = 800  # points of one step line
_MAX_LINES = 40  # of one worker, with gaps between them

_Look = tuple[WorkerCurve, str, Marker]


# --------------------------------------------------------------------------------------- for a page


def batches_chart(curves: Sequence[WorkerCurve]) -> Chart:
    """Local batch of each worker, or of the five that differ most over a band of all workers."""
    looks = _looks(curves)
    series: list[Series] = []
    for one, style, marker in looks:
        for line in spread(step_lines(one.shares), _MAX_LINES):
            points = tuple(Point(at, size) for at, size in spread(line, _MAX_STEPS))
            series.append(Series(one.label, style, points, "none"))
        marks = tuple(_change(one, at) for at in spread(changes(one.shares), _MAX_MARKS))
        series.append(Series(one.label, style, marks, marker, line=False))
    sizes = [float(share.local_batch_size) for one in curves for share in one.shares]
    ends = [
        [
            (at, float(s.local_batch_size))
            for s in spread(one.shares, _MAX_POINTS)
            for at in (s.start, s.end)
        ]
        for one in curves
    ]
    y = linear_axis("samples per step", sizes)
    return Chart("Local batch", _epochs(curves), y, series, _band(looks, ends))


def _change(one: WorkerCurve, share: Share) -> Point:
    words = (
        f"{one.label}: {share.local_batch_size} samples ({percent(share.share)}) from epoch "
        f"{share.epoch + 1}, step {share.step + 1}"
    )
    return Point(share.start, share.local_batch_size, words)


def part_chart(part: Part, title: str, curves: Sequence[WorkerCurve], clock: str) -> Chart:
    """Seconds of a part of each epoch: a line for each worker, as in `batches_chart`.

    ``clock`` is ``simulated `` for simulated seconds, else empty.
    """
    looks = _looks(curves)
    series = [
        Series(
            one.label,
            style,
            tuple(
                Point(
                    epoch.epoch + 0.5,
                    epoch.seconds(part),
                    f"{one.label}, epoch {epoch.epoch + 1}: {number(epoch.seconds(part))} {clock}s",
                )
                for epoch in spread(one.epochs, _MAX_POINTS)
            ),
            marker,
        )
        for one, style, marker in looks
    ]
    places = [
        [(one.epoch + 0.5, one.seconds(part)) for one in spread(each.epochs, _MAX_POINTS)]
        for each in curves
    ]
    y = linear_axis(f"{clock}seconds per epoch", [high for ones in places for _, high in ones])
    return Chart(title, _epochs(curves), y, series, _band(looks, places))


def _looks(curves: Sequence[WorkerCurve]) -> list[_Look]:
    drawn = most_different(curves, len(LOOKS))
    return [(one, *look) for one, look in zip(drawn, LOOKS, strict=False)]


def _epochs(curves: Sequence[WorkerCurve]) -> Axis:
    """The x axis, first epoch to last, with at most ten ticks."""
    found = [epoch.epoch for one in curves for epoch in one.epochs]
    first, last = min(found), max(found) + 1
    powers = (10**power for power in count())
    rounds = (factor * power for power in powers for factor in (1, 2, 5))
    step = next(one for one in rounds if last - first <= 9 * one)
    ticks = tuple((float(at), str(at)) for at in range(-(-first // step) * step, last + 1, step))
    return Axis("epochs", first, last, ticks)


def _band(looks: Sequence[_Look], lines: Sequence[Sequence[tuple[float, float]]]) -> list[Band]:
    """The range of all workers' values, if not all workers have a line."""
    if len(looks) == len(lines):
        return []
    found: dict[tuple[float, int], list[float]] = {}
    for places in lines:
        before: float | None = None
        for at, height in places:
            found.setdefault((at, int(at == before)), []).append(height)
            before = at
    edges = tuple((at, min(ones), max(ones)) for (at, _), ones in sorted(found.items()))
    return [Band(f"all {len(lines)} workers", "grey", edges)]


def now_chart(workers: Sequence[WorkerNow], clock: str) -> Lanes:
    """Compute and wait of a step of each worker, by the newest line."""
    lanes = []
    for one in workers:
        compute, wait = one.compute_seconds or 0.0, one.wait_seconds or 0.0
        who, end = f"worker {one.rank}", compute + wait
        boxes = [
            Box("part-compute", 0.0, compute, f"{who}, compute: {duration(compute)}"),
            Box("part-wait", compute, end, f"{who}, wait: {duration(wait)}"),
        ]
        lanes.append(Lane(str(one.rank), boxes))
    title = "A step now, worker by worker"
    return bars(title, f"{clock}seconds per step", lanes, ["compute", "wait"])


# --------------------------------------------------------------------------------------- for a file


def worker_panels(summary: RunSummary) -> list[tuple[Chart, Chart]]:
    """Local batch and times of each worker, or of the `MAX_PANELS` that differ most.

    Each panel of batches also shows those of all other workers in grey, so that panels are read in
    the same way for any number of workers. Times are stacked bars, one epoch wide; they are pale if
    part of the epoch ran before a resume.
    """
    curves, clock = worker_curves(summary), simulated_word(summary)
    shown, x = most_different(curves, MAX_PANELS), _epochs(curves)
    lines = [
        Series("of the others", "pale", tuple(Point(*at) for at in line), "none")
        for one in curves
        for line in step_lines(one.shares)
    ]
    size = linear_axis("local batch", [1.05 * height for height in heights(lines)])
    found = []
    for one in shown:
        own = [
            Series("local batch", "blue", tuple(Point(*at) for at in line), "none")
            for line in step_lines(one.shares)
        ]
        boxes = []
        for epoch in one.epochs:
            foot = 0.0
            for part in PARTS:
                top = foot + epoch.seconds(part)
                style = f"part-{part}{' pale' * (not epoch.whole)}"
                boxes.append(Box(style, epoch.epoch + 0.03, epoch.epoch + 0.97, "", foot, top))
                foot = top
        found.append((one.label, own, boxes))
    tops = [1.05 * box.high for _, _, boxes in found for box in boxes]
    seconds = linear_axis(f"{clock}s / epoch", tops)
    used = {box.style for _, _, boxes in found for box in boxes if box.high > box.low}
    exchange = "communication" if "wait" in recorded_parts(summary) else "communication and wait"
    names = [
        *((exchange if part == "communication" else part, f"part-{part}") for part in PARTS),
        ("compute, resumed inside", "part-compute pale"),
    ]
    names = [(name, style) for name, style in names if style in used]
    return [
        (Chart(label, x, size, [*lines, *own]), Chart("", x, seconds, [], (), boxes, names))
        for label, own, boxes in found
    ]
