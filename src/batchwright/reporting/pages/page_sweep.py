"""The page of a sweep: what came of each setting, charts for each key, a row for each run."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from batchwright.records import Sweep, SweptKey
from batchwright.records.text.formatting import job_value, number, percent
from batchwright.reporting.data.axes import Axis, epochs_axis, linear_axis, log_axis
from batchwright.reporting.data.sweep_curves import (
    MOST_PANELS,
    Line,
    Panel,
    against,
    curves,
    scale_of,
    value_label,
    varying,
)
from batchwright.reporting.data.sweep_words import (
    best_setting,
    cell_words,
    progress_words,
    setting_head,
    setting_rows,
)
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Band, Marker, Point, Series
from batchwright.storage.files import make_folder, write_whole

_STYLES = ("blue", "red", "green", "purple", "orange")
_MARKERS: tuple[Marker, ...] = ("circle", "square", "diamond")
_LABEL = "held-out accuracy (%)"


def write_sweep_page(sweep: Sweep, path: Path) -> None:
    """Write the sweep to ``path``, usually ``sweep.html``; folders on the way are made.

    Raises:
        FileError: The file cannot be written.
    """
    make_folder(path.parent)
    write_whole(path, sweep_page(sweep).encode())


def sweep_page(sweep: Sweep) -> str:
    """The sweep as an HTML document."""
    title = f"{sweep.job.network} on {sweep.data.name if sweep.data else sweep.job.data}"
    lines = [progress_words(sweep), best_setting(sweep)]
    told = "".join(f"<p>{markup.safe(line)}</p>" for line in lines if line)
    table = markup.table("Mean ± standard error", setting_head(sweep), setting_rows(sweep))
    body = [
        f'<header><p class="kicker">Batchwright sweep</p><h1>{markup.safe(title)}</h1>{told}'
        "</header>",
        markup.section("Setting by setting", table),
        *(markup.section(one.key, _charts(sweep, one)) for one in varying(sweep)),
        markup.section("Run by run", _runs(sweep)),
    ]
    return markup.document(f"{title} - Batchwright sweep", "\n".join(body))


def _charts(sweep: Sweep, key: SweptKey) -> str:
    panels = curves(sweep, key.key)
    if not panels:
        return "<p>No run was evaluated.</p>"
    charts = [_against_chart(sweep, key)]
    for panel in panels[:MOST_PANELS]:
        epochs = max(int(spot.x) for line in panel.lines for spot in line.spots)
        rest = f", {panel.title}" if len(panels) > 1 else ""
        charts.append(_chart(f"Accuracy epoch by epoch{rest}", panel, epochs_axis(epochs)))
    charts += [""] * (len(charts) % 2)
    pairs = (markup.pair(*charts[at : at + 2]) for at in range(0, len(charts), 2))
    return "".join(pairs)


def _against_chart(sweep: Sweep, key: SweptKey) -> str:
    panel = against(sweep, key.key)
    title = f"Last accuracy against {key.key}"
    return _chart(title, panel, _value_axis(key), joined=scale_of(key.values).numeric)


def _value_axis(key: SweptKey) -> Axis:
    """An axis with ticks at the values, or round ones where there are too many."""
    scale = scale_of(key.values)
    places = scale.places
    if not scale.numeric:
        ticks = tuple((at, value_label(v)) for at, v in zip(places, key.values, strict=True))
        return Axis(key.key, -0.5, len(places) - 0.5, ticks)
    if scale.logarithmic:
        axis = log_axis(key.key, places)
    else:
        axis = linear_axis(key.key, places, from_zero=False)
    if len(places) > 6:
        return axis
    ticks = tuple((at, _tick(v)) for at, v in zip(places, key.values, strict=True))
    return Axis(axis.label, axis.low, axis.high, ticks, axis.logarithmic)


def _tick(value: JsonValue) -> str:
    return f"{value:,}" if isinstance(value, int) else value_label(value)


def _chart(title: str, panel: Panel, x: Axis, *, joined: bool = True) -> str:
    series, bands = [], []
    for line in panel.lines:
        style, marker = _look(line.number)
        points = tuple(Point(s.x, s.mean, _words(line, at)) for at, s in enumerate(line.spots))
        series.append(Series(line.label, style, points, marker, line=joined))
        edges = tuple((s.x, s.mean - s.error, s.mean + s.error) for s in line.spots if s.error)
        if joined and len(edges) > 1:
            bands.append(Band("± one standard error", style, edges))
    spots = [spot for line in panel.lines for spot in line.spots]
    heights = [spot.mean + sign * (spot.error or 0.0) for spot in spots for sign in (-1, 1)]
    numbers = markup.table("Mean ± standard error (%)", *_numbers(panel, x.label))
    y = linear_axis(_LABEL, heights, from_zero=False)
    return markup.xy_figure(title, x, y, series, bands, numbers)


def _words(line: Line, at: int) -> str:
    spot = line.spots[at]
    error = "" if spot.error is None else f" ± {number(spot.error)}"
    return f"{line.label}, {spot.x:g}: {spot.mean:.2f}{error} %"


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
        shares = [_share(cell.accuracy), _share(cell.best_accuracy)]
        rows.append([*map(job_value, cell.values), str(cell.seed), *shares, cell_words(cell)])
    return markup.table("Runs; their folders are under cells/", head, rows)


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _look(index: int) -> tuple[str, Marker]:
    return _STYLES[index % len(_STYLES)], _MARKERS[index // len(_STYLES) % len(_MARKERS)]
