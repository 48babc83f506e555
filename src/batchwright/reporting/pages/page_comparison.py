"""The page of several runs: accuracy against epochs and time, and a row for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from batchwright.records.text.formatting import percent
from batchwright.reporting.data.axes import linear_axis
from batchwright.reporting.data.comparison import (
    ComparedRun,
    RunComparison,
    comparison_rows,
    setting_rows,
    time_unit,
)
from batchwright.reporting.live.spending import hourly_price
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Marker, Point, Series
from batchwright.storage.files import make_folder, write_whole

_STYLES = ("blue", "red", "green", "purple", "orange")
_MARKERS: tuple[Marker, ...] = ("circle", "square", "diamond")
_MOST_MARKS = 40  # on one line
_LONGEST = 60  # letters of a name in a legend

_Place = tuple[int, float, float]  # epoch, seconds, accuracy


def write_comparison_page(told: RunComparison, path: Path) -> None:
    """Write the comparison to ``path``, usually ``comparison.html``; folders on the way are made.

    Raises:
        FileError: The file cannot be written.
    """
    make_folder(path.parent)
    write_whole(path, comparison_page(told).encode())


def comparison_page(told: RunComparison) -> str:
    """The comparison as an HTML document."""
    body = [
        f'<header><p class="kicker">Batchwright comparison</p>'
        f"<h1>{markup.safe(told.title)}</h1>{clock_note(told)}</header>",
        *comparison_parts(told),
    ]
    return markup.document(f"{told.title} - Batchwright comparison", "\n".join(body))


def comparison_parts(told: RunComparison, *, by_run: bool = False) -> list[str]:
    """The comparison's sections: charts, run by run, setting by setting where seeds differ.

    Args:
        told: The runs.
        by_run: Whether each run has a colour of its own, or each setting.
    """
    drawn = told
    if by_run:
        runs_alone = [
            replace(one, setting=at, label=one.name[:_LONGEST]) for at, one in enumerate(told.runs)
        ]
        drawn = replace(told, runs=tuple(runs_alone))
    head, *rows = comparison_rows(told)
    means_head, *means = setting_rows(told)
    runs = markup.table("Runs; training time is without evaluation", head, rows)
    parts = [
        markup.section("Accuracy", _charts(drawn)),
        markup.section("Run by run", runs + _common_words(told)),
    ]
    if means:
        table = markup.table("Runs that differ in the seed alone", means_head, means)
        parts.append(markup.section("Setting by setting", table))
    return parts


def clock_note(told: RunComparison) -> str:
    """What kinds of time are on the page, if not only real ones."""
    simulated, real = (told.of_clock(simulated=kind) for kind in (True, False))
    if not simulated:
        return ""
    if not real:
        words = "All training times on this page are those of simulated clusters."
    else:
        names = ", ".join(one.name for one in simulated)
        words = (
            f"The training times of {names} are those of simulated clusters, the others are real: "
            "they have charts of their own, and no time of one is comparable with the other's."
        )
    return f'<p class="note">{markup.safe(words)}</p>'


def _common_words(told: RunComparison) -> str:
    if told.common is None:
        return "<p>A run was never evaluated, so no accuracy is common to all.</p>"
    return (
        f"<p>{markup.safe(percent(told.common))} is the highest held-out accuracy that every run "
        "reached; the last column says after how much training for the first time.</p>"
    )


def _charts(told: RunComparison) -> str:
    charts = [_chart(told, told.runs, "epochs", "Accuracy against epochs", lambda _, at: at[0])]
    for simulated in (False, True):
        runs = told.of_clock(simulated=simulated)
        if not any(one.curve for one in runs):
            continue
        unit, name = time_unit(max(one.seconds for one in runs))
        kind = "simulated" if simulated else "real"
        clock = "simulated " if simulated else ""
        charts += [
            _chart(
                told,
                runs,
                f"{clock}{name} of training",
                f"Accuracy against {kind} time",
                lambda _, at, unit=unit: at[1] / unit,  # type: ignore[misc]
            ),
            _cost_chart(told, runs, clock),
        ]
    charts += [""] * (len(charts) % 2)
    return "".join(markup.pair(*charts[at : at + 2]) for at in range(0, len(charts), 2))


def _cost_chart(told: RunComparison, runs: Sequence[ComparedRun], clock: str) -> str:
    """Against price times time of training; where a price is missing, against hours of work."""
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
    return _chart(
        told,
        runs,
        label,
        f"Accuracy against {'simulated ' if clock else ''}cost",
        lambda one, at: rates[id(one)] * at[1] / seconds,
    )


def _chart(
    told: RunComparison,
    runs: Sequence[ComparedRun],
    label: str,
    title: str,
    across: Callable[[ComparedRun, _Place], float],
) -> str:
    series = []
    for one in runs:
        style, marker = _look(one.setting)
        stride = -(-len(one.curve) // _MOST_MARKS)
        line = tuple(Point(across(one, at), 100 * at[2], "") for at in one.curve)
        marks = tuple(
            Point(across(one, at), 100 * at[2], f"{one.name}, epoch {at[0]}: {percent(at[2])}")
            for at in one.curve[::-1][:: stride or 1]
        )
        series += [
            Series(one.label, style, line, "none"),
            Series(one.label, style, marks, marker, line=False),
        ]
    points = [point for one in series for point in one.points]
    head, *rows = comparison_rows(told)
    return markup.xy_figure(
        title,
        linear_axis(label, [point.x for point in points]),
        linear_axis("held-out accuracy (%)", [point.y for point in points], from_zero=False),
        series,
        [],
        markup.table("Runs", head, rows) + _curves_table(runs),
    )


def _curves_table(runs: Sequence[ComparedRun]) -> str:
    """The accuracy of every evaluated epoch."""
    by_epoch = [{epoch: share for epoch, _, share in one.curve} for one in runs]
    epochs = sorted({epoch for one in by_epoch for epoch in one})
    return markup.table(
        "Held-out accuracy",
        ["epoch", *(one.name for one in runs)],
        [
            [str(epoch), *(percent(one[epoch]) if epoch in one else "-" for one in by_epoch)]
            for epoch in epochs
        ],
    )


def _look(setting: int) -> tuple[str, Marker]:
    """Colour and mark of a setting: colours first, then the next mark."""
    return _STYLES[setting % len(_STYLES)], _MARKERS[setting // len(_STYLES) % len(_MARKERS)]
