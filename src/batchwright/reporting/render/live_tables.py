"""The workers of a run that goes on, or their rounds with a parameter server, as small tables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchwright.records import Plan
from batchwright.records.text.formatting import local_batches, number, percent
from batchwright.records.text.problems import printable
from batchwright.reporting.data.round_curves import large_workers

if TYPE_CHECKING:
    from rich.table import Table

MOST_LISTED = 8  # workers whose numbers stand one by one in a line
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
        """A row for each worker, as `_slowest` says."""
        from rich.table import Table

        sizes, told = self._sizes, self._told  # another thread may take a line meanwhile
        busy = told["compute_s"]
        widths = {"worker": 6, "place": 15, "local batch": 11, "share": 7}
        widths |= {"compute/step": 12, "wait/step": 9}

        def cells(rank: int) -> dict[str, str]:
            return {
                "worker": str(rank),
                "place": printable(str(told["place"].get(rank, ""))),
                "local batch": f"{sizes[rank]:,}",
                "share": percent(sizes[rank] / (sum(sizes) or 1)),
                "compute/step": _milliseconds(busy.get(rank)),
                "wait/step": _milliseconds(told["wait_s"].get(rank)),
            }

        table = Table(box=None, pad_edge=False, header_style="")
        left_out = without_room(widths, ("place", "share", "wait/step"), width)
        for name in (one for one in widths if one not in left_out):
            if name == "place":  # the one that is cut on a narrow terminal
                table.add_column(name if told["place"] else "", no_wrap=True)
            else:
                table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        seconds = {rank: busy.get(rank, 0.0) for rank in range(len(sizes))}
        return _slowest(table, left_out, seconds, cells, most)


class LiveRounds:
    """What lines of kind ``round`` have told, by rank; seconds are the plan's, real or simulated.

    Args:
        plan: With a parameter server.
    """

    def __init__(self, plan: Plan) -> None:
        self._large, self._samples = large_workers(plan), plan.data.train_samples
        self._epochs = plan.epochs
        self._last: dict[int, Mapping[str, Any]] = {}
        self._trained: dict[int, int] = {}
        self.committed = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Keep what a line of kind ``round`` tells."""
        worker = record["worker"]
        self._last[worker] = record
        self._trained[worker] = self._trained.get(worker, 0) + record["samples"]
        self.committed = record["committed"]

    @property
    def place(self) -> tuple[int, int, int]:
        """Zero-based epoch, and how many of how many of its samples are committed."""
        epoch = min(self.committed // self._samples, self._epochs - 1)
        return epoch, self.committed - epoch * self._samples, self._samples

    def table(self, *, most: int, width: int) -> Table | None:
        """A row for each worker, as `_slowest` says; seconds are those of its last round."""
        from rich.table import Table

        last = dict(self._last)  # another thread may take a line meanwhile
        widths = {"worker": 8, "batch": 6, "samples": 9, "round": 9, "wait": 8, "lead": 4}

        def cells(rank: int) -> dict[str, str]:
            line = last[rank]
            return {
                "worker": f"{rank} {'large' if rank < self._large else 'small'}",
                "batch": f"{line['batch/local']:,}",
                "samples": f"{self._trained[rank]:,}",
                "round": f"{number(line['time/compute_s'])} s",
                "wait": f"{number(line['time/wait_s'])} s",
                "lead": str(line["lead"]),
            }

        table = Table(box=None, pad_edge=False, header_style="", padding=(0, _GAPS, 0, 0))
        left_out = without_room(widths, ("samples", "lead", "wait"), width)
        for name in (one for one in widths if one not in left_out):
            table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
        seconds = {rank: line["time/compute_s"] for rank, line in last.items()}
        return _slowest(table, left_out, seconds, cells, most)


def _slowest(
    table: Table,
    left_out: Sequence[str],
    seconds: Mapping[int, float],
    cells: Callable[[int], dict[str, str]],
    most: int,
) -> Table | None:
    """The table with a row for each worker; of more than ``most`` those that others wait for.

    A line below names the columns for which there is no room. ``None`` for fewer than two workers,
    and where there is no room for two.
    """
    from rich.text import Text

    most -= bool(left_out)
    if len(seconds) < 2 or most < 2:
        return None
    if left_out:
        table.caption, table.caption_justify = Text(f"no room for {', '.join(left_out)}"), "left"
    slowest = sorted(seconds, key=lambda rank: -seconds[rank])
    shown = slowest if len(slowest) <= most else slowest[: most - 1]
    for rank in sorted(shown):
        kept = {name: cell for name, cell in cells(rank).items() if name not in left_out}
        table.add_row(*kept.values())
    if len(shown) < len(slowest):
        table.add_row(*[""] * ("place" in kept), f"and {len(slowest) - len(shown):,} others")
    return table


def without_room(widths: Mapping[str, int], giving_way: Sequence[str], room: int) -> list[str]:
    """The columns of ``giving_way`` to leave out, first to last, until the others fit ``room``.

    >>> without_room({"worker": 6, "place": 9, "wait": 4}, ["place", "wait"], 14)
    ['place']
    """
    left_out: list[str] = []
    needed = sum(widths.values()) + _GAPS * (len(widths) - 1)
    for name in giving_way:
        if needed > room and name in widths:
            left_out.append(name)
            needed -= widths[name] + _GAPS
    return left_out


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
