"""The report's part on the workers: local batch, compute, wait and communication by epoch.

Up to five workers have a line each. Of more workers the five that differ most have a line, and a
band covers all; the table below a chart lists sixteen.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import RunSummary
from batchwright.records.text.formatting import duration, local_batches, number, percent
from batchwright.reporting.charts.workers import batches_chart, part_chart
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.worker_curves import (
    Part,
    WorkerCurve,
    changes,
    most_different,
    recorded_parts,
    spread,
    worker_curves,
)
from batchwright.reporting.pages import markup

_MAX_COLUMNS = 16  # of a table, one for each of the workers that differ most
_MAX_ROWS = 100  # of a table: a long run changes its shares very often


def workers_charts(summary: RunSummary) -> str:
    """Charts of the workers over the epochs, each with a table; empty for a single worker."""
    curves = worker_curves(summary)
    if len(curves) < 2:
        return ""
    clock = simulated_word(summary)
    titles: dict[Part, str] = {"compute": "Compute", "communication": "Communication and wait"}
    if "wait" in recorded_parts(summary):
        titles = {
            "compute": "Compute",
            "wait": "Waiting for slower workers",
            "communication": "Communication",
        }
    shown = most_different(curves, _MAX_COLUMNS)
    charts, same = [], []
    if any(len(changes(one.shares)) > 1 for one in curves):
        charts = [markup.figure(batches_chart(curves), _batches_table(shown))]
    else:
        batches = tuple(one.epochs[-1].local_batch_size for one in curves)
        same.append(f"local batches {local_batches(batches)}")
    for part, title in titles.items():
        values = {epoch.seconds(part) for one in curves for epoch in one.epochs}
        if len(values) == 1 and len(curves[0].epochs) > 1:
            same.append(f"{title.lower()} {duration(values.pop())} an epoch")
        else:
            chart = part_chart(part, title, curves, clock)
            columns = [
                (one.label, {e.epoch + 1: e.seconds(part) for e in one.epochs}) for one in shown
            ]
            caption, where = f"{title}, {clock}seconds", "; all are in summary.json"
            table = markup.by_epoch(caption, columns, number, _MAX_ROWS, where)
            charts.append(markup.figure(chart, table))
    words = f"<p>Throughout: {markup.safe(', '.join(same))}.</p>" if same else ""
    return f"<h3>Worker by worker</h3>{words}" + markup.pairs(charts)


def _batches_table(curves: Sequence[WorkerCurve]) -> str:
    """A row for each change of any worker's local batch, at most `_MAX_ROWS`."""
    by_start = [{(share.epoch, share.step): share for share in one.shares} for one in curves]
    rows: list[list[str]] = []
    for at in sorted({at for one in by_start for at in one}):
        shares = [one.get(at) for one in by_start]
        cells = [
            "-" if one is None else f"{one.local_batch_size:,} ({percent(one.share)})"
            for one in shares
        ]
        if not rows or rows[-1][2:] != cells:
            rows.append([str(at[0] + 1), str(at[1] + 1), *cells])
    more = markup.left_out(rows, _MAX_ROWS, "; all are in summary.json")
    return markup.table(
        f"Local batches, and their share{more}",
        ["from epoch", "step", *(one.label for one in curves)],
        spread(rows, _MAX_ROWS),
    )
