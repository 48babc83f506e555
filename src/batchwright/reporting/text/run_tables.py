"""Tables for a terminal: how a run went, by the plan's stages, not by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import EpochRecord, RunSummary
from batchwright.records.text.formatting import duration, number, percent
from batchwright.reporting.data.comparison import RunComparison, comparison_rows, setting_rows
from batchwright.reporting.data.reading import (
    SIMULATED,
    accuracy,
    accuracy_words,
    compared_rows,
    last_evaluated,
    measured_word,
    memory_measured,
    memory_note,
    simulated_word,
    whole_accounting,
    worker_rows,
)
from batchwright.reporting.data.rounds_words import round_facts, round_rows
from batchwright.reporting.text.terminal import add, new_facts, new_table, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def summary_table(summary: RunSummary) -> RenderableType:
    """How the run went: predicted against measured, accuracy, where the time went."""
    tables = [_predicted(summary), _accuracies(summary), _time(summary)]
    if summary.rounds:
        return stacked(*tables, _rounds(summary), _round_workers(summary))
    return stacked(*tables, _workers(summary))


def comparison_table(told: RunComparison) -> RenderableType:
    """Several runs beside each other, and the means of those that differ in the seed alone."""
    head, *rows = comparison_rows(told)
    runs = new_table(told.title, head)
    runs.columns[0].justify = "left"
    for cells in rows:
        add(runs, *cells)
    head, *rows = setting_rows(told)
    settings = new_table("runs that differ in the seed alone", head)
    for cells in rows:
        add(settings, *cells)
    return stacked(runs, settings)


def _predicted(summary: RunSummary) -> Table:
    """Seconds per epoch and peak memory."""
    head, *rows = compared_rows(summary)
    table = new_table(f"predicted and {measured_word(summary)}", head)
    table.columns[0].justify = "left"
    if not summary.simulated:
        table.columns[-1].justify = "left"
    for cells in rows:
        add(table, *cells)
    if summary.simulated:
        table.caption = SIMULATED
    elif not memory_measured(summary):
        table.caption = memory_note(summary)
    return table


def _accuracies(summary: RunSummary) -> Table:
    table = new_table("held-out accuracy", ["", "epoch", "accuracy", "loss"])
    for word, epoch in (("last", last_evaluated(summary)), ("best", summary.best_epoch)):
        add(table, word, _epoch_word(summary, epoch), accuracy(epoch), _loss(epoch))
    table.caption = accuracy_words(summary) or None
    return table


def _epoch_word(summary: RunSummary, epoch: EpochRecord | None) -> str:
    return "" if epoch is None else f"{epoch.epoch + 1} of {summary.plan.epochs}"


def _loss(epoch: EpochRecord | None) -> str:
    return "" if epoch is None or epoch.val_loss is None else number(epoch.val_loss)


def _time(summary: RunSummary) -> Table:
    parts = whole_accounting(summary)
    total = sum(seconds for _, seconds in parts)
    table = new_table(f"where the {simulated_word(summary)}time went", ["part", "time", "share"])
    table.columns[0].justify = "left"
    for name, seconds in parts:
        add(table, name, duration(seconds), percent(seconds / total if total else 0.0))
    table.add_section()
    add(table, "all", duration(total), "")
    if summary.simulated:
        add(table, "computing it, real time", duration(summary.wall_seconds), "")
    return table


def _workers(summary: RunSummary) -> Table:
    head, *rows = worker_rows(summary)
    table = new_table(f"per worker{', simulated time' * summary.simulated}", head)
    for cells in rows:
        add(table, *cells)
    return table


def _rounds(summary: RunSummary) -> Table:
    table = new_facts("rounds with the parameter server")
    for word, value in round_facts(summary):
        add(table, word, value)
    return table


def _round_workers(summary: RunSummary) -> Table:
    head, *rows = round_rows(summary)
    table = new_table(f"rounds per worker{', simulated time' * summary.simulated}", head)
    for cells in rows:
        add(table, *cells)
    return table
