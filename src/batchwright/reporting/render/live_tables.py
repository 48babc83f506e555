"""The workers of a running training, or their rounds with a parameter server, as small tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from batchwright.records import EpochRecord, Plan, RoundRecord
from batchwright.records.lines.run_lines import EpochLine, RoundLine, RunLine, SharesLine, StepLine
from batchwright.records.text.formatting import local_batches, number, percent
from batchwright.records.text.problems import printable
from batchwright.reporting.data.round_curves import large_workers

if TYPE_CHECKING:
    from rich.table import Table

MAX_LISTED = 8  # most workers whose numbers are listed in a line
_GAPS = 2


class _WorkerState(NamedTuple):
    """Local batch, place, and seconds of computing and waiting in a step, each by rank."""

    sizes: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    times: tuple[tuple[float, float], ...] = ()


class LiveWorkers:
    """The newest values of each worker from a run's lines."""

    def __init__(self) -> None:
        self._announced: tuple[int, ...] = ()
        self._state = _WorkerState()  # replaced as a whole: another thread draws it

    def take(self, line: RunLine) -> None:
        """Keep the values of a line; not the times of an epoch's line, which are not of a step."""
        record = line.record if isinstance(line, EpochLine) else line
        if not isinstance(record, EpochRecord | StepLine | SharesLine) or not record.workers:
            return
        sizes = tuple(one.local_batch_size for one in record.workers)
        before = self._state if len(sizes) == len(self._state.sizes) else _WorkerState()
        state = before._replace(sizes=sizes)
        if isinstance(record, SharesLine):
            state = state._replace(places=tuple(one.place for one in record.workers))
        elif isinstance(record, StepLine):
            times = tuple((one.compute_seconds, one.wait_seconds) for one in record.workers)
            state = state._replace(times=times)
        self._state = state

    def change(self, line: SharesLine) -> str:
        """New local batches in words, with speeds if known.

        Empty if they have not changed, or for fewer than two workers.
        """
        before, sizes = self._announced, line.sizes
        self._announced = sizes
        if len(sizes) < 2 or sizes == before:
            return ""
        speeds = [one.speed for one in line.workers if one.speed is not None]
        words = f"local batches {_sizes_words(sizes)}"
        if before:
            words += f", were {_sizes_words(before)}"
        if not speeds:
            return words
        texts = [number(speed) for speed in speeds]
        if len(texts) > MAX_LISTED:
            texts = [f"{number(min(speeds))} to {number(max(speeds))}"]
        return f"{words} ({', '.join(texts)} images/s)"

    def table(self, *, most: int, width: int = 80) -> Table | None:
        """A row for each worker, see `_slowest`."""
        from rich.table import Table

        sizes, places, times = self._state
        widths = {"worker": 6, "place": 15, "local batch": 11, "share": 7}
        widths |= {"compute/step": 12, "wait/step": 9}

        def cells(rank: int) -> dict[str, str]:
            return {
                "worker": str(rank),
                "place": printable(places[rank]) if places else "",
                "local batch": f"{sizes[rank]:,}",
                "share": percent(sizes[rank] / (sum(sizes) or 1)),
                "compute/step": _milliseconds(times[rank][0] if times else None),
                "wait/step": _milliseconds(times[rank][1] if times else None),
            }

        table = Table(box=None, pad_edge=False, header_style="")
        left_out = without_room(widths, ("place", "share", "wait/step"), width)
        for name in (one for one in widths if one not in left_out):
            if name == "place":  # the column that may be cut off on a narrow terminal
                table.add_column(name if places else "", no_wrap=True)
            else:
                table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        seconds = {rank: times[rank][0] if times else 0.0 for rank in range(len(sizes))}
        return _slowest(table, left_out, seconds, cells, most)


class LiveRounds:
    """The newest round of each worker under a parameter server, from lines of kind ``round``."""

    def __init__(self, plan: Plan) -> None:
        self._large, self._samples = large_workers(plan), plan.data.train_samples
        self._epochs = plan.epochs
        self._last: dict[int, RoundRecord] = {}
        self._trained: dict[int, int] = {}
        self.committed = 0

    def take(self, line: RoundLine) -> None:
        """Keep the values of a line."""
        record = line.record
        self._last[record.worker] = record
        self._trained[record.worker] = self._trained.get(record.worker, 0) + record.samples
        self.committed = line.committed

    @property
    def place(self) -> tuple[int, int, int]:
        """The zero-based epoch, its committed samples, and all its samples."""
        epoch = min(self.committed // self._samples, self._epochs - 1)
        return epoch, self.committed - epoch * self._samples, self._samples

    def table(self, *, most: int, width: int) -> Table | None:
        """A row for each worker, see `_slowest`; seconds are those of its newest round."""
        from rich.table import Table

        last = dict(self._last)  # another thread may take a line meanwhile
        widths = {"worker": 8, "batch": 6, "samples": 9, "round": 9, "wait": 8, "lead": 4}

        def cells(rank: int) -> dict[str, str]:
            one = last[rank]
            return {
                "worker": f"{rank} {'large' if rank < self._large else 'small'}",
                "batch": f"{one.local_batch_size:,}",
                "samples": f"{self._trained[rank]:,}",
                "round": f"{number(one.compute_seconds)} s",
                "wait": f"{number(one.wait_seconds)} s",
                "lead": str(one.lead),
            }

        table = Table(box=None, pad_edge=False, header_style="", padding=(0, _GAPS, 0, 0))
        left_out = without_room(widths, ("samples", "lead", "wait"), width)
        for name in (one for one in widths if one not in left_out):
            table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
        seconds = {rank: one.compute_seconds for rank, one in last.items()}
        return _slowest(table, left_out, seconds, cells, most)


def _slowest(
    table: Table,
    left_out: Sequence[str],
    seconds: Mapping[int, float],
    cells: Callable[[int], dict[str, str]],
    most: int,
) -> Table | None:
    """Fill a table with a row for each worker, or if they do not fit ``most`` rows, the slowest.

    The caption names the columns for which there is no room.

    Returns:
        The table; ``None`` for fewer than two workers, or if there is no room for two rows.
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
    """The columns of ``giving_way`` that are left out, first to last, so that others fit ``room``.

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


def _sizes_words(sizes: Sequence[int]) -> str:
    if len(sizes) > MAX_LISTED or len(set(sizes)) == 1:
        return local_batches(tuple(sizes))
    return " + ".join(f"{size:,}" for size in sizes)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{number(1000 * seconds)} ms"
