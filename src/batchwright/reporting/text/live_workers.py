"""The workers of a run that goes on: local batch, share, compute and wait per step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchwright.records.text.formatting import local_batches, number, percent
from batchwright.records.text.problems import printable
from batchwright.reporting.text.terminal import note_left_out, without_room

if TYPE_CHECKING:
    from rich.table import Table

MOST_LISTED = 8  # workers whose numbers stand one by one in a line

_WIDTHS = {
    "worker": 6,
    "place": 15,
    "local batch": 11,
    "share": 7,
    "compute/step": 12,
    "wait/step": 9,
}
_GIVING_WAY = ("place", "share", "wait/step")  # the least important column first
_GAPS = 2

_KINDS = ("place", "compute_s", "wait_s")
_KEY = re.compile(
    r"(?P<kind>batch/local|place|speed)/(?P<rank>\d+)|time/rank(?P<worker>\d+)/(?P<time>\w+)"
)


class LiveWorkers:
    """What the lines of ``metrics.jsonl`` have told of each worker, by rank; times in seconds."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._announced: tuple[int, ...] = ()
        self._told: dict[str, dict[int, Any]] = {kind: {} for kind in _KINDS}

    def take(self, record: Mapping[str, Any]) -> None:
        """Keep what a line tells; of an epoch's line not the times: they are not of a step."""
        values = _by_rank(record)
        sizes = _sizes(values)
        if len(sizes) != len(self._sizes):  # other workers
            self._told = {kind: {} for kind in _KINDS}
        self._sizes = sizes or self._sizes
        for kind in _KINDS[:1] if record.get("kind") == "epoch" else _KINDS:
            self._told[kind].update(values[kind])

    def change(self, record: Mapping[str, Any]) -> str:
        """What a line of kind ``shares`` tells, in words.

        Empty if its local batches are those of the one before, and for fewer than two workers.
        """
        values = _by_rank(record)
        before, sizes = self._announced, _sizes(values)
        self._announced = sizes
        if len(sizes) < 2 or sizes == before:
            return ""
        return _change_words(before, sizes, values["speed"])

    def table(self, *, most: int, width: int = 80) -> Table | None:
        """A row for each worker; of more than ``most`` those that others wait for.

        A line below names the columns for which ``width`` has no room.

        ``None`` for fewer than two workers, and where there is no room for two.
        """
        left_out = without_room(_WIDTHS, _GIVING_WAY, width, gap=_GAPS)
        most -= bool(left_out)
        sizes, told = self._sizes, self._told  # another thread may take a line meanwhile
        if len(sizes) < 2 or most < 2:
            return None
        busy = told["compute_s"]
        slowest = sorted(range(len(sizes)), key=lambda rank: -busy.get(rank, 0.0))
        shown = slowest if len(slowest) <= most else slowest[: most - 1]
        kept = [name for name in _WIDTHS if name not in left_out]
        table = _empty_table(kept, known_places=bool(told["place"]))
        note_left_out(table, left_out)
        for rank in sorted(shown):
            cells = {
                "worker": str(rank),
                "place": printable(str(told["place"].get(rank, ""))),
                "local batch": f"{sizes[rank]:,}",
                "share": percent(sizes[rank] / (sum(sizes) or 1)),
                "compute/step": _milliseconds(busy.get(rank)),
                "wait/step": _milliseconds(told["wait_s"].get(rank)),
            }
            table.add_row(*(cells[name] for name in kept))
        if len(shown) < len(slowest):
            words = f"and {len(slowest) - len(shown):,} others"
            table.add_row(*([""] if "place" in kept else []), words)
        return table


def _by_rank(record: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """The values of a line that are one worker's: kind, then rank; nulls are left out."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for key, value in record.items():
        match = _KEY.fullmatch(key)
        if match and value is not None:
            kind, rank = match["kind"] or match["time"], match["rank"] or match["worker"]
            found[kind][int(rank)] = value
    return found


def _sizes(values: Mapping[str, Mapping[int, int]]) -> tuple[int, ...]:
    return tuple(size for _, size in sorted(values.get("batch/local", {}).items()))


def _change_words(before: Sequence[int], sizes: Sequence[int], speeds: Mapping[int, float]) -> str:
    """Local batches, those before, and the speeds they follow."""
    words = f"local batches {_sizes_words(sizes)}"
    if before:
        words += f", were {_sizes_words(before)}"
    if not speeds:
        return words
    told = [number(speed) for _, speed in sorted(speeds.items())]
    if len(told) > MOST_LISTED:
        told = [f"{number(min(speeds.values()))} to {number(max(speeds.values()))}"]
    return f"{words} ({', '.join(told)} images/s)"


def _sizes_words(sizes: Sequence[int]) -> str:
    if len(sizes) > MOST_LISTED or len(set(sizes)) == 1:
        return local_batches(tuple(sizes))
    return " + ".join(f"{size:,}" for size in sizes)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{number(1000 * seconds)} ms"


def _empty_table(names: Sequence[str], *, known_places: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for name in names:
        if name == "place":  # the one that is cut on a narrow terminal
            table.add_column(name if known_places else "", no_wrap=True)
        else:
            table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    return table
