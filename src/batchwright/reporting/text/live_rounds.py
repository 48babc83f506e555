"""The rounds of a run that goes on: how far it is, and each worker's last round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchwright.records import Plan
from batchwright.records.text.formatting import number
from batchwright.reporting.data.round_curves import large_workers
from batchwright.reporting.text.terminal import note_left_out, without_room

if TYPE_CHECKING:
    from rich.table import Table

_WIDTHS = {"worker": 8, "batch": 6, "samples": 9, "round": 9, "wait": 8, "lead": 4}
_GIVING_WAY = ("samples", "lead", "wait")  # the least important column first
_GAPS = 2


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
        """A row for each worker, of more than ``most`` the slowest; columns as ``width`` allows.

        A line below names the columns that are left out.

        ``None`` for fewer than two workers, and where there is no room for two.
        """
        left_out = without_room(_WIDTHS, _GIVING_WAY, width, gap=_GAPS)
        most -= bool(left_out)
        last = dict(self._last)  # another thread may take a line meanwhile
        if len(last) < 2 or most < 2:
            return None
        slowest = sorted(last, key=lambda rank: -last[rank]["time/compute_s"])
        shown = slowest if len(slowest) <= most else slowest[: most - 1]
        kept = [name for name in _WIDTHS if name not in left_out]
        table = _empty_table(kept)
        note_left_out(table, left_out)
        for rank in sorted(shown):
            cells = self._cells(rank, last[rank])
            table.add_row(*(cells[name] for name in kept))
        if len(shown) < len(slowest):
            table.add_row(f"and {len(slowest) - len(shown):,} others")
        return table

    def _cells(self, rank: int, line: Mapping[str, Any]) -> dict[str, str]:
        kind = "large" if rank < self._large else "small"
        return {
            "worker": f"{rank} {kind}",
            "batch": f"{line['batch/local']:,}",
            "samples": f"{self._trained[rank]:,}",
            "round": f"{number(line['time/compute_s'])} s",
            "wait": f"{number(line['time/wait_s'])} s",
            "lead": str(line["lead"]),
        }


def _empty_table(names: list[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="", padding=(0, _GAPS, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
    return table
