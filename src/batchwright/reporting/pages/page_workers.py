"""The page's part on the workers: local batch, compute, wait and communication over the epochs.

Up to five workers have a line each. Of more, five that differ most do, and a band holds them all;
every worker is in the table behind the chart.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import RunSummary
from batchwright.records.text.formatting import number, percent
from batchwright.reporting.charts.workers import batches_chart, part_chart
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.worker_curves import (
    Part,
    WorkerCurve,
    spread,
    told_parts,
    worker_curves,
)
from batchwright.reporting.pages import markup

_MOST_ROWS = 100  # of a table: a long run changes its shares more often than anyone reads


def workers_charts(summary: RunSummary) -> str:
    """Charts of the workers over the epochs, a table behind each; empty for one worker."""
    curves = worker_curves(summary)
    if len(curves) < 2:
        return ""
    clock = simulated_word(summary)
    titles: dict[Part, str] = {"compute": "Compute", "communication": "Communication and wait"}
    if "wait" in told_parts(summary):
        titles = {
            "compute": "Compute",
            "wait": "Waiting for slower workers",
            "communication": "Communication",
        }
    charts = [markup.figure(batches_chart(curves), _batches_table(curves))]
    for part, title in titles.items():
        chart = part_chart(part, title, curves, clock)
        charts.append(markup.figure(chart, _times_table(part, f"{title}, {clock}seconds", curves)))
    return "<h3>Worker by worker</h3>" + markup.pairs(charts)


def _batches_table(curves: Sequence[WorkerCurve]) -> str:
    """A row for each change of any worker's local batch, of many changes some."""
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
    more = markup.left_out(rows, _MOST_ROWS, "; all are in summary.json")
    return markup.table(
        f"Local batches, and their share{more}",
        ["from epoch", "step", *(one.label for one in curves)],
        spread(rows, _MOST_ROWS),
    )


def _times_table(part: Part, caption: str, curves: Sequence[WorkerCurve]) -> str:
    by_epoch = [{one.epoch: number(one.seconds(part)) for one in each.epochs} for each in curves]
    return markup.table(
        caption,
        ["epoch", *(one.label for one in curves)],
        [
            [str(epoch + 1), *(one.get(epoch, "-") for one in by_epoch)]
            for epoch in sorted({epoch for one in by_epoch for epoch in one})
        ],
    )
