"""The table of a sweep for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import Sweep
from batchwright.reporting.data.sweep_words import setting_head, setting_rows
from batchwright.reporting.text.terminal import add, new_table, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType


def sweep_table(sweep: Sweep) -> RenderableType:
    """A row for each setting: means over its seeds, with standard errors."""
    head, rows = setting_head(sweep), setting_rows(sweep)
    table = new_table("held-out accuracy, mean ± standard error over seeds", head)
    for row in rows:
        add(table, *row)
    return stacked(table)
