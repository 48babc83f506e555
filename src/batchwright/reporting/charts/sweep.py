"""Charts of a sweep: accuracy epoch by epoch, and last accuracy against a key's values."""

from __future__ import annotations

from collections.abc import Mapping

from batchwright.records import Sweep, SweptKey
from batchwright.records.text.formatting import number
from batchwright.reporting.charts.chart import (
    Axis,
    Band,
    Chart,
    Point,
    Series,
    apart,
    cut,
    epochs_axis,
    linear_axis,
    log_axis,
    look,
)
from batchwright.reporting.data.sweep_curves import (
    MAX_PANELS,
    Line,
    Panel,
    Spot,
    against,
    curves,
    scale_of,
    value_label,
)

_LETTERS = 48  # of all ticks of an axis together


def against_chart(sweep: Sweep, key: SweptKey) -> Chart:
    """Last accuracy against a key's values: a line for each setting of the other keys."""
    title, joined = f"Last accuracy against {key.key}", scale_of(key.values).numeric
    panel = against(sweep, key.key)
    return _chart(title, panel, _value_axis(key), value_words(key), joined=joined)


def epochs_charts(sweep: Sweep, key: SweptKey) -> list[Chart]:
    """Accuracy by epoch: a chart for each setting of the other keys, at most `MAX_PANELS`."""
    panels = curves(sweep, key.key)
    charts = []
    for panel in panels[:MAX_PANELS]:
        epochs = max(int(spot.x) for line in panel.lines for spot in line.spots)
        title = "Accuracy epoch by epoch" + (f", {panel.title}" if len(panels) > 1 else "")
        charts.append(_chart(title, panel, epochs_axis(epochs), {}))
    return charts


def value_words(key: SweptKey) -> dict[float, str]:
    """A key's values as text, by their places on the axis."""
    return dict(zip(scale_of(key.values).places, map(value_label, key.values), strict=True))


def _value_axis(key: SweptKey) -> Axis:
    """An axis with ticks at the values, or at round numbers if there are too many values."""
    scale = scale_of(key.values)
    places = scale.places
    if not scale.numeric:
        most = max(4, _LETTERS // len(places))
        ticks = tuple((at, cut(words, most)) for at, words in value_words(key).items())
        return Axis(key.key, -0.5, len(places) - 0.5, ticks)
    if scale.logarithmic:
        axis = log_axis(key.key, places)
    else:
        axis = linear_axis(key.key, places, from_zero=False)
    if len(places) > 6:
        return axis
    words = [f"{v:,}" if isinstance(v, int) else value_label(v) for v in key.values]
    named = list(zip(places, words, strict=True))
    # A letter is a fiftieth of the axis wide, and words are centred.
    kept = apart([(axis.share(at), 0.01 * (len(text) + 1)) for at, text in named])
    shown = tuple(named[number] for number in kept)
    return Axis(axis.label, axis.low, axis.high, shown, axis.logarithmic)


def _chart(
    title: str, panel: Panel, x: Axis, words: Mapping[float, str], *, joined: bool = True
) -> Chart:
    """Means with standard errors: as a band along a curve, or as whiskers at single points."""
    series, bands = [], []
    for line in panel.lines:
        style, marker = look(line.number)
        points = tuple(Point(s.x, s.mean, _words(line, s, words)) for s in line.spots)
        series.append(Series(line.label, style, points, marker, line=joined))
        edges = tuple(
            (s.x, s.mean - s.error, s.mean + s.error) for s in line.spots if s.error is not None
        )
        if joined and len(edges) > 1:
            bands.append(Band("± one standard error", style, edges))
        else:
            ends = tuple(Point(at, (low + high) / 2, up=(low, high)) for at, low, high in edges)
            series.append(Series("", style, ends, "none", line=False))
    spots = [spot for line in panel.lines for spot in line.spots]
    reach = [spot.mean + sign * (spot.error or 0.0) for spot in spots for sign in (-1, 1)]
    y = linear_axis("held-out accuracy (%)", reach, from_zero=False)
    return Chart(title, x, y, series, bands)


def _words(line: Line, spot: Spot, words: Mapping[float, str]) -> str:
    error = "" if spot.error is None else f" ± {number(spot.error)}"
    return f"{line.label}, {words.get(spot.x, f'{spot.x:g}')}: {spot.mean:.2f}{error} %"
