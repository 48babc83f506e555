"""The page of a sweep: results of each setting, charts for each key, and a row for each run."""

from __future__ import annotations

from batchwright.records import Sweep, SweptKey
from batchwright.records.text.formatting import job_value, percent
from batchwright.reporting.charts.sweep import against_chart, epochs_charts
from batchwright.reporting.data.sweep_curves import (
    Panel,
    against,
    best_setting,
    cell_words,
    curves,
    progress_words,
    setting_head,
    setting_rows,
    varying,
)
from batchwright.reporting.pages import markup


def sweep_page(sweep: Sweep) -> str:
    """The sweep as an HTML document."""
    title = f"{sweep.job.network} on {sweep.data.name if sweep.data else sweep.job.data}"
    lines = [progress_words(sweep), best_setting(sweep)]
    lines_html = "".join(f"<p>{markup.safe(line)}</p>" for line in lines if line)
    table = markup.table("Mean ± standard error", setting_head(sweep), setting_rows(sweep))
    body = [
        markup.section("Setting by setting", table),
        *(markup.section(one.key, _charts(sweep, one)) for one in varying(sweep)),
        markup.section("Run by run", _runs(sweep)),
    ]
    return markup.document("sweep", title, lines_html, body)


def _charts(sweep: Sweep, key: SweptKey) -> str:
    panels = curves(sweep, key.key)
    if not panels:
        return "<p>No run was evaluated.</p>"
    charts = [against_chart(sweep, key), *epochs_charts(sweep, key)]
    return markup.pairs(
        [
            markup.figure(
                chart, markup.table("Mean ± standard error (%)", *_numbers(panel, chart.x.label))
            )
            for chart, panel in zip(charts, [against(sweep, key.key), *panels], strict=False)
        ]
    )


def _numbers(panel: Panel, across: str) -> tuple[list[str], list[list[str]]]:
    places = sorted({spot.x for line in panel.lines for spot in line.spots})
    by_line = [{spot.x: spot for spot in line.spots} for line in panel.lines]
    rows = []
    for place in places:
        cells = [f"{place:g}"]
        for spots in by_line:
            spot = spots.get(place)
            error = f" ± {spot.error:.2f}" if spot and spot.error is not None else ""
            cells.append(f"{spot.mean:.2f}{error}" if spot else "-")
        rows.append(cells)
    return [across, *(line.label for line in panel.lines)], rows


def _runs(sweep: Sweep) -> str:
    head = [*(one.key for one in sweep.keys), "seed", "last", "best", "how it ended"]
    rows = []
    for cell in sweep.cells:
        shares = [markup.or_dash(one, percent) for one in (cell.accuracy, cell.best_accuracy)]
        rows.append([*map(job_value, cell.values), str(cell.seed), *shares, cell_words(cell)])
    return markup.table("Runs; their folders are under cells/", head, rows)
