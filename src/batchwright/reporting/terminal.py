"""Tables of rich: names from outside are made printable, and markup in them is not interpreted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def stacked(*tables: Table) -> RenderableType:
    """The tables that have rows, one below the other."""
    from rich.console import Group

    return Group(*(table for table in tables if table.row_count))


def new_table(title: str, columns: list[str]) -> Table:
    """An empty table with these columns, numbers to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=name in ("seconds", "step"))
    return table


def new_facts(title: str) -> Table:
    """An empty table of words and their values."""
    table = new_table(title, ["", ""])
    table.show_header = False
    for column in table.columns:
        column.justify = "left"
    return table


def add(table: Table, *cells: str, style: str | None = None) -> None:
    """A row of text that is only text."""
    from rich.text import Text

    table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
