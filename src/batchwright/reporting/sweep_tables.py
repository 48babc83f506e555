"""The table of a sweep for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import Sweep
from batchwright.reporting.sweep_words import setting_head, setting_rows
from batchwright.reporting.terminal import add, new_table

if TYPE_CHECKING:
    from rich.table import Table


def sweep_table(sweep: Sweep) -> Table:
    """A row for each setting: means over its seeds, with standard errors."""
    head, rows = setting_head(sweep), setting_rows(sweep)
    table = new_table("held-out accuracy, mean ± standard error over seeds", head)
    for at, column in enumerate(table.columns):  # a key cut short would not be told from another
        column.min_width = max(len(word) for row in (head, *rows) for word in row[at].split(" "))
    for row in rows:
        add(table, *row)
    return table
