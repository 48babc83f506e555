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
    table = new_table("held-out accuracy, mean ± standard error over seeds", setting_head(sweep))
    for row in setting_rows(sweep):
        add(table, *row)
    return table
