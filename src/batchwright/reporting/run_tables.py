"""Tables for a terminal: how a run went, by the plan's stages, not by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import EpochRecord, RunSummary
from batchwright.records.words import duration, in_seconds, number, percent
from batchwright.reporting.comparison import RunComparison, comparison_rows, setting_rows
from batchwright.reporting.plan_words import stage_word
from batchwright.reporting.reading import (
    Comparison,
    accuracy,
    comparisons,
    last_evaluated,
    measured_word,
    simulated_word,
    whole_accounting,
    worker_rows,
)
from batchwright.reporting.rounds_words import round_facts, round_rows
from batchwright.reporting.terminal import add, new_facts, new_table, stacked

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
    kept = [at for at, word in enumerate(head) if word not in ("global batch", "workers")]
    runs = new_table(told.title, [head[at] for at in kept])  # the others for want of room
    runs.columns[0].justify, runs.columns[0].overflow = "left", "fold"
    runs.padding, runs.pad_edge = (0, 1, 0, 0), False  # for the same want
    for at, column in zip(kept[1:], runs.columns[1:], strict=True):  # only names are cut anywhere
        column.min_width = max(len(word) for row in (head, *rows) for word in row[at].split())
    for cells in rows:
        add(runs, *(cells[at] for at in kept))
    head, *rows = setting_rows(told)
    settings = new_table("runs that differ in the seed alone", head)
    for cells in rows:
        add(settings, *cells)
    return stacked(runs, settings)


def _predicted(summary: RunSummary) -> Table:
    """Seconds per epoch; of several stages with the accuracy that each came to."""
    measured = measured_word(summary)
    several = len(summary.plan.stages) > 1
    columns = ["stage", "predicted (95 %)", f"{measured} (median)", "the prediction was"]
    if several:
        columns[1:3] = ["predicted", measured, "accuracy"]
    table = new_table(f"{simulated_word(summary)}seconds per epoch of training", columns)
    table.columns[-1].justify = "left"
    for one in comparisons(summary):
        found = f"not {measured}" if one.measured is None else number(one.measured)
        name = stage_word(summary.plan, one.stage)
        if several:
            value = number(one.predicted.value) if one.predicted else "-"
            verdict = one.verdict.replace(" the 95 % interval", "")
            add(table, name, value, found, _reached(summary, one), verdict)
        else:
            add(table, name, in_seconds(one.predicted), found, one.verdict)
    return table


def _reached(summary: RunSummary, one: Comparison) -> str:
    """The last held-out accuracy of a stage."""
    told = [
        epoch.top1
        for epoch in summary.epochs
        if epoch.top1 is not None and summary.plan.stage_of(epoch.epoch) == one.stage
    ]
    return percent(told[-1]) if told else "-"


def _accuracies(summary: RunSummary) -> Table:
    table = new_table("held-out accuracy", ["", "epoch", "accuracy", "loss"])
    for word, epoch in (("last", last_evaluated(summary)), ("best", summary.best_epoch)):
        add(table, word, _epoch_word(summary, epoch), accuracy(epoch), _loss(epoch))
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
