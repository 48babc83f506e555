"""The page's part on the workers: local batch, compute, wait and communication over the epochs.

Up to five workers have a line each. Of more, five that differ most do, and a band holds them all;
every worker is in the table behind the chart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from batchwright.records import RunSummary
from batchwright.records.text.formatting import number, percent
from batchwright.reporting.data.axes import Axis, linear_axis
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.worker_curves import (
    Part,
    Share,
    WorkerCurve,
    WorkerEpoch,
    changes,
    most_different,
    spread,
    step_lines,
    told_parts,
    worker_curves,
)
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Band, Marker, Point, Series

_LOOKS: tuple[tuple[str, Marker], ...] = (
    ("blue", "circle"),
    ("red", "square"),
    ("green", "diamond"),
    ("purple", "circle"),
    ("orange", "square"),
)
_MOST_MARKS = 24  # on one line: more would hide it
_MOST_ROWS = 100  # of a table: a long run changes its shares more often than anyone reads

_Look = tuple[WorkerCurve, str, Marker]


def workers_charts(summary: RunSummary) -> str:
    """Charts of the workers over the epochs, a table behind each; empty for one worker."""
    curves = worker_curves(summary)
    if len(curves) < 2:
        return ""
    x = _epochs(curves)
    drawn = most_different(curves, len(_LOOKS))
    looks = [(one, *look) for one, look in zip(drawn, _LOOKS, strict=False)]
    clock = simulated_word(summary)

    def chart(part: Part, title: str) -> str:
        return _part_chart(part, title, curves, looks, x, clock)

    batches = _batches_chart(curves, looks, x)
    compute = chart("compute", "Compute")
    if "wait" not in told_parts(summary):
        exchange = chart("communication", "Communication and wait")
        return _TITLE + markup.pair(batches, compute) + markup.pair(exchange, "")
    wait = chart("wait", "Waiting for slower workers")
    exchange = chart("communication", "Communication")
    return _TITLE + markup.pair(batches, compute) + markup.pair(wait, exchange)


_TITLE = "<h3>Worker by worker</h3>"


def _epochs(curves: Sequence[WorkerCurve]) -> Axis:
    """From the start of the first epoch to the end of the last, with at most ten ticks."""
    found = [epoch.epoch for one in curves for epoch in one.epochs]
    first, last = min(found), max(found) + 1
    powers = (10**power for power in count())
    rounds = (factor * power for power in powers for factor in (1, 2, 5))
    step = next(one for one in rounds if last - first <= 9 * one)
    ticks = tuple((float(at), str(at)) for at in range(-(-first // step) * step, last + 1, step))
    return Axis("epochs", first, last, ticks)


# ------------------------------------------------------------------------------- the local batches


def _batches_chart(curves: Sequence[WorkerCurve], looks: Sequence[_Look], x: Axis) -> str:
    series: list[Series] = []
    for one, style, marker in looks:
        for line in step_lines(one.shares):
            points = tuple(Point(at, size, "") for at, size in line)
            series.append(Series(one.label, style, points, "none"))
        told = changes(one.shares)
        marks = tuple(_change(one, told[index]) for index in spread(len(told), _MOST_MARKS))
        series.append(Series(one.label, style, marks, marker, line=False))
    sizes = [float(share.local_batch_size) for one in curves for share in one.shares]
    return markup.xy_figure(
        "Local batch",
        x,
        linear_axis("samples per step", sizes),
        series,
        _band(curves, looks, [_steps(one) for one in curves]),
        _batches_table(curves),
    )


def _change(one: WorkerCurve, share: Share) -> Point:
    words = (
        f"{one.label}: {share.local_batch_size} samples ({percent(share.share)}) from epoch "
        f"{share.epoch + 1}, step {share.step + 1}"
    )
    return Point(share.start, share.local_batch_size, words)


def _batches_table(curves: Sequence[WorkerCurve]) -> str:
    """A row for each change of any worker's local batch, of many changes some."""
    by_start = [{(share.epoch, share.step): share for share in one.shares} for one in curves]
    rows: list[list[str]] = []
    for at in sorted({at for one in by_start for at in one}):
        cells = [_share_words(one.get(at)) for one in by_start]
        if not rows or rows[-1][2:] != cells:
            rows.append([str(at[0] + 1), str(at[1] + 1), *cells])
    kept = [rows[index] for index in spread(len(rows), _MOST_ROWS)]
    more = f" ({len(kept)} of {len(rows):,}; all are in summary.json)"
    return markup.table(
        "Local batches, and their share" + (more if len(kept) < len(rows) else ""),
        ["from epoch", "step", *(one.label for one in curves)],
        kept,
    )


def _share_words(share: Share | None) -> str:
    return "-" if share is None else f"{share.local_batch_size:,} ({percent(share.share)})"


# ---------------------------------------------------------------------------------------- the times


def _part_chart(
    part: Part,
    title: str,
    curves: Sequence[WorkerCurve],
    looks: Sequence[_Look],
    x: Axis,
    clock: str,
) -> str:
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
                for epoch in one.epochs
            ),
            marker,
        )
        for one, style, marker in looks
    ]
    seconds = [epoch.seconds(part) for one in curves for epoch in one.epochs]
    bands = _band(
        curves,
        looks,
        [[(epoch.epoch + 0.5, epoch.seconds(part)) for epoch in one.epochs] for one in curves],
    )
    return markup.xy_figure(
        title,
        x,
        linear_axis(f"{clock}seconds per epoch", seconds),
        series,
        bands,
        _epochs_table(
            f"{title}, {clock}seconds", curves, lambda epoch: number(epoch.seconds(part))
        ),
    )


def _epochs_table(
    caption: str, curves: Sequence[WorkerCurve], words: Callable[[WorkerEpoch], str]
) -> str:
    by_epoch = [{epoch.epoch: words(epoch) for epoch in one.epochs} for one in curves]
    return markup.table(
        caption,
        ["epoch", *(one.label for one in curves)],
        [
            [str(epoch + 1), *(one.get(epoch, "-") for one in by_epoch)]
            for epoch in sorted({epoch for one in by_epoch for epoch in one})
        ],
    )


# ----------------------------------------------------------------------------------------- the band


def _steps(one: WorkerCurve) -> list[tuple[float, float]]:
    """The local batch at both ends of every stretch."""
    ends = ((share.start, share.end, float(share.local_batch_size)) for share in one.shares)
    return [(at, size) for start, end, size in ends for at in (start, end)]


def _band(
    curves: Sequence[WorkerCurve],
    looks: Sequence[_Look],
    heights: Sequence[Sequence[tuple[float, float]]],
) -> list[Band]:
    """From the lowest to the highest of all workers, if not all of them have a line."""
    if len(looks) == len(curves):
        return []
    found: dict[tuple[float, int], list[float]] = {}
    for places in heights:
        before: float | None = None
        for at, height in places:
            found.setdefault((at, int(at == before)), []).append(height)
            before = at
    edges = tuple((at, min(ones), max(ones)) for (at, _), ones in sorted(found.items()))
    return [Band(f"all {len(curves)} workers", "grey", edges)]
