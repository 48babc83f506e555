"""Tables of rich for names from outside: unprintable characters are escaped, markup is ignored.

Nothing is cut off: text wraps, and columns for which a terminal has no room follow in a second
block below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from batchwright.records.text.formatting import column_blocks
from batchwright.records.text.problems import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

_EDGES, _GAP = 4, 3  # characters at the edges of a table, and between two of its columns


def stacked(*tables: Table, keys: int = 1) -> RenderableType:
    """The tables that have rows, below each other, each at most as wide as the terminal.

    What has no room follows in a second block, which begins with the first ``keys`` columns again,
    or with the first one if these take too much room.
    """
    from rich.console import Group

    return Group(*(_Fitted(table, keys) for table in tables if table.row_count))


def table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]] = (), *, left: Iterable[int] = ()
) -> Table:
    """A table of plain text; columns are aligned right, those in ``left`` to the left."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=Text(printable(title), style="bold"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in head:
        made.add_column(name, justify="right", overflow="fold")
    for column in left:
        made.columns[column].justify = "left"
    rows_below(made, rows)
    return made


def facts(title: str, rows: Iterable[Sequence[str]]) -> Table:
    """A table of (name, value) rows without a head."""
    made = table(title, ["", ""], rows, left=[0, 1])
    made.show_header = False
    return made


def rows_below(made: Table, rows: Iterable[Sequence[str]]) -> None:
    """Add rows of plain text to a table."""
    from rich.text import Text

    for cells in rows:
        made.add_row(*(Text(printable(cell)) for cell in cells))


class _Fitted:
    """Draws a table in as many blocks as it needs to fit; arguments are those of `stacked`."""

    def __init__(self, table: Table, keys: int) -> None:
        self._table, self._keys = table, keys

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        room = options.max_width - _EDGES
        columns = [[str(column.header), *map(str, column.cells)] for column in self._table.columns]
        words = [
            max(len(word) for text in texts for word in (*text.split(), "")) for texts in columns
        ]
        widths = [max(map(len, texts)) for texts in columns]
        least = [min(width, room // 2) for width in words]
        keys = self._keys
        if sum(least[:keys]) + _GAP * keys + max(least[keys:], default=0) > room:
            keys = 1
        for number, block in enumerate(column_blocks(least, room, keys=keys, gap=_GAP)):
            # Columns get the width of their text; then the widest shrinks until all fit.
            wide = [widths[at] for at in block]
            while sum(wide) + _GAP * (len(wide) - 1) > room:
                spare = [(width, at) for at, width in enumerate(wide) if width > least[block[at]]]
                if not spare:
                    break
                wide[max(spare)[1]] -= 1
            yield self._part(block, wide, continued=number > 0)

    def _part(self, block: list[int], widths: list[int], *, continued: bool) -> Table:
        whole = self._table
        part = table("", [])
        part.title, part.show_header = whole.title, whole.show_header
        if continued:
            part.title = f"{whole.title} (continued)"
        for at, width in zip(block, widths, strict=True):
            column = whole.columns[at]
            part.add_column(column.header, justify=column.justify, overflow="fold", width=width)
        cells = [list(whole.columns[at].cells) for at in block]
        for row, values in zip(whole.rows, zip(*cells, strict=True), strict=True):
            part.add_row(*values, style=row.style, end_section=row.end_section)
        part.caption = whole.caption if 0 in block and block[-1] == len(whole.columns) - 1 else None
        return part
