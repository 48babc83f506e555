"""The workers of a run that goes on: local batch, share, compute and wait per step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchwright.records.problems import printable
from batchwright.records.words import local_batches, number, percent

if TYPE_CHECKING:
    from rich.table import Table

MOST_LISTED = 8  # workers whose numbers stand one by one in a line

WITH_PLACES = 70  # characters of a terminal that has room for places

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

        A terminal narrower than `WITH_PLACES` has no room for places.

        ``None`` for fewer than two workers, and where there is no room for two.
        """
        sizes, told = self._sizes, self._told  # another thread may take a line meanwhile
        if len(sizes) < 2 or most < 2:
            return None
        busy = told["compute_s"]
        slowest = sorted(range(len(sizes)), key=lambda rank: -busy.get(rank, 0.0))
        shown = slowest if len(slowest) <= most else slowest[: most - 1]
        places = width >= WITH_PLACES
        table = _empty_table(("place" if told["place"] else "") if places else None)
        for rank in sorted(shown):
            seconds = (told[kind].get(rank) for kind in ("compute_s", "wait_s"))
            table.add_row(
                str(rank),
                *([printable(str(told["place"].get(rank, "")))] if places else []),
                f"{sizes[rank]:,}",
                percent(sizes[rank] / (sum(sizes) or 1)),
                *("-" if value is None else f"{number(1000 * value)} ms" for value in seconds),
            )
        if len(shown) < len(slowest):
            words = f"and {len(slowest) - len(shown):,} others"
            table.add_row(*([""] if places else []), words)
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


def _empty_table(place: str | None) -> Table:
    """The columns; ``place`` heads the one of places, ``None`` leaves it out."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    columns = ("worker", *(() if place is None else (place,)))
    for name in (*columns, "local batch", "share", "compute/step", "wait/step"):
        if name == place:  # the one that gives way on a narrow terminal
            table.add_column(name, no_wrap=True)
        else:
            table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    return table
