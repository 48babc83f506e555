"""Pieces of HTML pages; all text from outside is escaped here."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape

from batchwright.records.text.formatting import number
from batchwright.records.text.problems import printable
from batchwright.reporting.charts.chart import Chart, Lanes
from batchwright.reporting.data.worker_curves import spread
from batchwright.reporting.pages.style import STYLE
from batchwright.reporting.render import svg
from batchwright.storage.version import VERSION


def safe(text: str) -> str:
    """The text escaped for HTML, unprintable characters made visible."""
    return escape(printable(text))


def prose(text: str) -> str:
    """Sentences escaped for HTML; what stands in backticks becomes code.

    >>> prose("`a --b` > c")
    '<code>a --b</code> &gt; c'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", safe(text))


def document(kind: str, title: str, head: str, body: Iterable[str]) -> str:
    """A page that opens without a network: only its inline style is allowed, by its hash.

    Args:
        kind: Kind of page, in a word, such as ``report``.
        title: Title of the page; the window's title also has the kind.
        head: Markup below the title.
        body: Markup of the page's parts.
    """
    kind = f"Batchwright {kind}"
    parts = "\n".join(body)
    style_hash = b64encode(sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{safe(f"{title} - {kind}")}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><p class="kicker">{kind}</p><h1>{safe(title)}</h1>{head}</header>
{parts}
</main>
<footer>
Batchwright {safe(VERSION)}. Intervals are meant to hold 95 times in 100.
</footer>
</body>
</html>
"""


def section(title: str, content: str) -> str:
    """A titled part of the page."""
    return f"<section><h2>{safe(title)}</h2>\n{content}\n</section>"


def pair(left: str, right: str) -> str:
    """Two pieces of markup side by side; on a phone below each other."""
    return f'<div class="pair">{left}{right}</div>'


def pairs(parts: Sequence[str]) -> str:
    """Any number of pieces of markup in pairs."""
    even = [*parts, *[""] * (len(parts) % 2)]
    return "".join(pair(*even[at : at + 2]) for at in range(0, len(even), 2))


def table(
    caption: str,
    head: Sequence[str] | None,
    rows: Iterable[Sequence[str]],
    *,
    cards: bool = False,
) -> str:
    """A table that scrolls sideways if it does not fit; each row's first cell is its heading.

    Args:
        caption: Caption above the table.
        head: Column titles, for a table of numbers; a column ``remarks`` holds text. `None`: a list
            of facts in words.
        rows: Cells of each row.
        cards: Whether each row becomes a small list on a phone, so that nothing has to scroll. ARIA
            roles are then written out, since browsers drop them when a table has another layout.
    """
    header, remarks = "", {at for at, name in enumerate(head or ()) if name == "remarks"}
    labels = [f' data-label="{safe(name)}"' if cards else "" for name in head or ()]
    role = {name: f' role="{name}"' if cards else "" for name in _ROLES}
    if head is not None:
        cells = "".join(f'<th scope="col"{role["columnheader"]}>{safe(name)}</th>' for name in head)
        header = f"<thead{role['rowgroup']}><tr{role['row']}>{cells}</tr></thead>"
    body = "\n".join(
        f'<tr{role["row"]}><th scope="row"{role["rowheader"]}>{safe(row[0])}</th>'
        + "".join(
            f"<td{role['cell']}{' class=remark' * (at in remarks)}"
            f"{labels[at] if at < len(labels) else ''}>{safe(cell)}</td>"
            for at, cell in enumerate(row[1:], 1)
        )
        + "</tr>"
        for row in rows
    )
    kind = "facts" if head is None else "numbers cards" if cards else "numbers"
    return (
        f'<div class="scroll" role="group" tabindex="0" aria-label="{safe(caption)}">'
        f'<table class="{kind}"{role["table"]}><caption>{safe(caption)}</caption>{header}'
        f"<tbody{role['rowgroup']}>{body}</tbody></table></div>"
    )


_ROLES = ("table", "rowgroup", "row", "columnheader", "rowheader", "cell")


def folded(title: str, content: str) -> str:
    """Content that a click on its title shows; empty without content."""
    return f"<details><summary>{safe(title)}</summary>{content}</details>" if content else ""


def figure(chart: Chart | Lanes, numbers: str) -> str:
    """A chart with its legend, and folded below it the table ``numbers``."""
    items = "".join(f"<li>{mark}{safe(name)}</li>" for name, mark in svg.legend(chart))
    return (
        f'<figure><figcaption>{safe(chart.title)}</figcaption><ul class="legend">{items}</ul>'
        f"{svg.drawn(chart)}<details><summary>The numbers</summary>{numbers}</details></figure>"
    )


def by_epoch(
    caption: str,
    columns: Sequence[tuple[str, Mapping[int, float]]],
    say: Callable[[float], str],
    most: int,
    where: str = "",
) -> str:
    """A table with a row for each epoch, at most ``most``; a column is its title and values."""
    epochs = sorted({epoch for _, values in columns for epoch in values})
    rows = [
        [str(epoch), *(say(values[epoch]) if epoch in values else "-" for _, values in columns)]
        for epoch in spread(epochs, most)
    ]
    caption += left_out(epochs, most, where)
    return table(caption, ["epoch", *(title for title, _ in columns)], rows)


def left_out(rows: Sequence[object], most: int, where: str = "") -> str:
    """A caption's note that a table shows only ``most`` of the rows; empty if it shows all."""
    return f" ({most} of {len(rows):,}{where})" if len(rows) > most else ""


def or_dash(value: float | None, say: Callable[[float], str] = number) -> str:
    """A number as text, or a dash for `None`."""
    return "-" if value is None else say(value)
