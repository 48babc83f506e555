"""The page of a sweep: results of each setting, charts for each key, and a row for each run."""

from __future__ import annotations

from collections.abc import Mapping

from batchwright.records import Sweep, SweptKey
from batchwright.records.text.formatting import counted, job_value, percent
from batchwright.reporting.charts.chart import Chart
from batchwright.reporting.charts.sweep import against_chart, epochs_charts, value_words
from batchwright.reporting.data.sweep_curves import (
    MAX_PANELS,
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
    rows = setting_rows(sweep)
    table = markup.table("Mean ± standard error", setting_head(sweep), rows, cards=True)
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
    last = against(sweep, key.key)
    drawn = [_figure(against_chart(sweep, key), last, value_words(key))]
    shown = zip(epochs_charts(sweep, key), panels, strict=False)
    drawn += [_figure(chart, panel, {}) for chart, panel in shown]
    left_out = (
        (last.left_out, "line", " of the first chart"),
        (max(one.left_out for one in panels), "line", " of each other chart"),
        (len(panels) - MAX_PANELS, "chart", ""),
    )
    words = [f"{counted(count, what)}{where}" for count, what, where in left_out if count > 0]
    more = f"<p>There is no room to draw {', '.join(words)}.</p>" if words else ""
    return markup.pairs(drawn) + more


def _figure(chart: Chart, panel: Panel, words: Mapping[float, str]) -> str:
    numbers = _numbers(panel, chart.x.label, words)
    return markup.figure(chart, markup.table("Mean ± standard error (%)", *numbers))


def _numbers(
    panel: Panel, across: str, words: Mapping[float, str]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows; ``words`` are those of places that are more than numbers."""
    places = sorted({spot.x for line in panel.lines for spot in line.spots})
    by_line = [{spot.x: spot for spot in line.spots} for line in panel.lines]
    rows = []
    for place in places:
        cells = [words.get(place, f"{place:g}")]
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
    return markup.table("Runs; their folders are under cells/", head, rows, cards=True)
