"""The learning rate of a plan as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import RateSchedule, SchedulePoint
from batchwright.records.text.formatting import local_batches
from batchwright.reporting.charts.chart import evenly
from batchwright.reporting.data.schedule_words import fact_rows
from batchwright.reporting.text.terminal import add, new_facts, new_table, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType

EVENLY = 12
"""Rows of the table besides those where something happens."""


def schedule_table(schedule: RateSchedule) -> RenderableType:
    """Rate, batch, warm-up and decay with their sources, and the rate over the epochs."""
    facts = new_facts(f"the learning rate of {schedule.name}")
    for word, value in fact_rows(schedule):
        add(facts, word, value)
    gains = any(row.most > 1 for row in schedule.rows)
    columns = ["epochs", "samples", "step", "rate", "side", "batch", ""]
    if gains:
        columns[4:4] = ["at most"]
    table = new_table("by then, and from there on", columns)
    table.columns[-1].justify = "left"
    for one in shown_points(schedule):
        row = schedule.rows[one.row]
        cells = [
            f"{one.epoch:.4g}",
            f"{one.samples:,}",
            "-" if one.step is None else f"{one.step:,}",
            f"{one.learning_rate:.4g}",
            f"{row.resolution} px",
            local_batches(row.local_batch_sizes) if schedule.served else str(row.global_batch_size),
            one.what,
        ]
        if gains:
            cells[4:4] = [f"{row.most * one.learning_rate:.4g}"]
        add(table, *cells)
    return stacked(facts, table)


def shown_points(schedule: RateSchedule) -> list[SchedulePoint]:
    """Those where something happens, and some evenly between that are not close to them."""
    points = schedule.points
    told = [one for one in points if one.what]
    apart = schedule.epochs / (2 * EVENLY)
    between = [
        points[index]
        for index in evenly(range(len(points)), EVENLY)
        if all(abs(points[index].epoch - one.epoch) >= apart for one in told)
    ]
    return sorted([*told, *between], key=lambda one: one.epoch)
