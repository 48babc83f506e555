"""Charts of several runs: accuracy against epochs, time and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from batchwright.records.text.formatting import percent
from batchwright.reporting.charts.chart import (
    Chart,
    Point,
    Series,
    linear_axis,
    log_axis,
    look,
    ratio_axis,
)
from batchwright.reporting.data.comparison import ComparedRun, RunComparison
from batchwright.reporting.data.plan_curves import time_unit
from batchwright.reporting.data.spending import hourly_price
from batchwright.reporting.data.worker_curves import spread

_MAX_MARKS = 12  # on one line; their shapes distinguish the runs, too
_MAX_POINTS = 300
_EPOCHS = "epochs"  # the label of an axis that stays linear

Place = tuple[int, float, float]  # epoch, seconds, accuracy


def comparison_charts(
    comparison: RunComparison, *, costs: bool = True
) -> Iterator[tuple[Chart, list[ComparedRun]]]:
    """Each chart with its runs: accuracy by epochs, and by real or simulated time.

    With ``costs`` also by cost: the price of the training time, or worker-hours if a price is
    missing.
    """
    every = list(comparison.runs)
    yield _chart(comparison, every, _EPOCHS, "Accuracy against epochs", lambda _, at: at[0]), every
    for simulated in (False, True):
        runs = comparison.of_clock(simulated=simulated)
        if not any(one.curve for one in runs):
            continue
        unit, name = time_unit(max(one.seconds for one in runs))
        clock, kind = ("simulated ", "simulated") if simulated else ("", "real")
        label, title = f"{clock}{name} of training", f"Accuracy against {kind} time"
        yield _chart(comparison, runs, label, title, lambda _, at, unit=unit: at[1] / unit), runs  # type: ignore[misc]
        if costs:
            yield _cost_chart(comparison, runs, clock), runs


def _cost_chart(comparison: RunComparison, runs: Sequence[ComparedRun], clock: str) -> Chart:
    priced = all(hourly_price(one.summary.plan)[1] for one in runs)
    rates = {
        id(one): hourly_price(one.summary.plan)[0] if priced else float(one.summary.plan.workers)
        for one in runs
    }
    if priced:
        seconds, label = 3600.0, "cost of training, in the price's currency"
    else:
        seconds, name = time_unit(max(one.seconds * rates[id(one)] for one in runs))
        label = f"{clock}worker-{name} of training"
    title = f"Accuracy against {clock}cost"
    return _chart(comparison, runs, label, title, lambda one, at: rates[id(one)] * at[1] / seconds)


def _chart(
    comparison: RunComparison,
    runs: Sequence[ComparedRun],
    label: str,
    title: str,
    across: Callable[[ComparedRun, Place], float],
) -> Chart:
    series = []
    for one in runs:
        style, marker = look(one.setting)
        points = [
            Point(across(one, at), 100 * at[2], f"{one.name}, epoch {at[0]}: {percent(at[2])}")
            for at in spread(one.curve, _MAX_POINTS)
        ]
        marks = tuple(spread(points, _MAX_MARKS))
        series += [
            Series(one.label, style, tuple(points), "none"),
            Series(one.label, style, marks, marker, line=False),
        ]
    drawn = [point for one in series for point in one.points]
    places = [point.x for point in drawn]
    # Of runs whose lengths differ by large factors the short ones would have no room.
    lengths = ratio_axis("", [one.points[-1].x for one in series if one.points])
    far = lengths.logarithmic and min(places) > 0 and label != _EPOCHS
    x = (log_axis if far else linear_axis)(label, places)
    y = linear_axis("held-out accuracy (%)", [point.y for point in drawn], from_zero=False)
    if comparison.common is not None:
        ends = tuple(Point(at, 100 * comparison.common) for at in (x.low, x.high))
        words = f"{percent(comparison.common)}, reached by all"
        series.append(Series(words, "grey", ends, "none", only="file"))
    return Chart(title, x, y, series)
