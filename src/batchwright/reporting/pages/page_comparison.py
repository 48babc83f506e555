"""The page that compares several runs: accuracy by epochs and time, and a row for each run."""

from __future__ import annotations

from dataclasses import replace

from batchwright.records.text.formatting import percent
from batchwright.reporting.charts.comparison import comparison_charts
from batchwright.reporting.data.comparison import (
    RunComparison,
    comparison_rows,
    setting_rows,
    unended,
)
from batchwright.reporting.pages import markup

_LONGEST = 60  # letters of a name in a legend
_MAX_ROWS = 100  # of a table


def comparison_page(comparison: RunComparison) -> str:
    """The comparison as an HTML document."""
    return markup.document(
        "comparison", comparison.title, clock_note(comparison), comparison_parts(comparison)
    )


def comparison_parts(comparison: RunComparison, *, by_run: bool = False) -> list[str]:
    """The comparison's sections: charts, run by run, setting by setting where seeds differ.

    Args:
        comparison: The runs.
        by_run: Whether each run has a colour of its own, or each setting.
    """
    drawn = comparison
    if by_run:
        runs_alone = [
            replace(one, setting=at, label=one.name[:_LONGEST])
            for at, one in enumerate(comparison.runs)
        ]
        drawn = replace(comparison, runs=tuple(runs_alone))
    head, *rows = comparison_rows(comparison)
    means_head, *means = setting_rows(comparison)
    runs = markup.table("Runs; training time is without evaluation", head, rows, cards=True)
    words = "A run was never evaluated, so no accuracy is common to all."
    if comparison.common is not None:
        words = (
            f"{percent(comparison.common)} is the highest held-out accuracy that every run "
            "reached; the last column says after how much training for the first time."
        )
        if going := unended(comparison):
            words += f" Not all epochs are trained of {', '.join(going)}: their figures may change."
    parts = [
        markup.section("Accuracy", _charts(drawn)),
        markup.section("Run by run", f"{runs}<p>{markup.safe(words)}</p>"),
    ]
    if means:
        caption = "Runs that differ in the seed alone and have trained all their epochs"
        table = markup.table(caption, means_head, means, cards=True)
        parts.append(markup.section("Setting by setting", table))
    return parts


def clock_note(comparison: RunComparison) -> str:
    """A note on simulated times on the page; empty if all times are real."""
    simulated, real = (comparison.of_clock(simulated=kind) for kind in (True, False))
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


def _charts(comparison: RunComparison) -> str:
    head, *rows = comparison_rows(comparison)
    runs, drawn = markup.table("Runs", head, rows), []
    for chart, of in comparison_charts(comparison):
        curves = [(one.name, {epoch: share for epoch, _, share in one.curve}) for one in of]
        table = markup.by_epoch("Held-out accuracy", curves, percent, _MAX_ROWS)
        drawn.append(markup.figure(chart, runs + table))
    return markup.pairs(drawn)
