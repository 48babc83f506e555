"""Progress of a sweep: a bar for all runs with a row for each running one, or plain lines.

On a terminal the bar counts epochs of all runs, and the rows below it show the state of the running
ones. Elsewhere a line is printed when a run ends. Everything goes to standard error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from batchwright.records import SweepCell
from batchwright.records.lines.run_lines import EpochLine, RunLine, StepLine
from batchwright.records.text.formatting import counted, percent
from batchwright.records.text.problems import printable
from batchwright.reporting.data.sweep_curves import cell_words
from batchwright.reporting.render.progress import (
    BAR_WIDTH,
    Pace,
    is_live,
    left_words,
    live_picture,
    print_line,
    standard_error,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_OTHER_LINES = 4  # lines of a terminal that the rows of running cells leave free


class SweepProgress:
    """Shows the progress of a sweep's runs; a context manager.

    Args:
        total: Number of runs in the sweep.
        done: Number of runs that had finished before.
        words: How each run is called, by the name of its folder.
        console: Where to print; unset: standard error.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        *,
        total: int,
        done: int,
        words: Mapping[str, str],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or standard_error()
        self._clock, self._pace = clock, Pace()
        self._total, self._before, self._words = total, done, words
        self._ended = self._failed = 0
        self._epochs: dict[str, int] = {}
        self._reached: dict[str, float] = {}  # finished epochs of each cell, with fractions
        self._running: dict[str, str] = {}
        live = is_live(self._console)
        self._live: Live | None = live_picture(self._console, self.picture) if live else None

    def __enter__(self) -> SweepProgress:
        if self._live:
            self._live.start()
        if self._before:
            self._say(f"{counted(self._before, 'run')} of {self._total} done before")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def expect(self, epochs: Mapping[str, int]) -> None:
        """Set the number of epochs of each run that is still to come, by name."""
        self._epochs = dict(epochs)
        self._pace.left(0.0, sum(self._epochs.values()), self._clock())

    def began(self, name: str, epochs: int) -> None:
        """A run has started or continues."""
        self._epochs[name] = epochs
        self._running[name] = "starting"

    def wrote(self, name: str, line: RunLine) -> None:
        """A run has written a line of its metrics."""
        epochs = self._epochs.get(name, 0)
        if isinstance(line, EpochLine):
            record = line.record
            self._reached[name] = record.epoch + 1
            words = f"epoch {record.epoch + 1}/{epochs}"
            if record.top1 is not None:
                words += f", accuracy {percent(record.top1)}"
            self._running[name] = words
        elif isinstance(line, StepLine) and line.steps:
            self._reached[name] = line.epoch + line.step / line.steps
            parts = self._running.get(name, "").partition(", accuracy")
            self._running[name] = f"epoch {line.epoch + 1}/{epochs}{''.join(parts[1:])}"

    def ended(self, cell: SweepCell) -> None:
        """A run has ended."""
        self._running.pop(cell.name, None)
        if cell.state == "stopped":
            self._say(f"{self._words[cell.name]}: stopped")
            return
        self._ended += 1
        self._failed += cell.state == "failed"
        self._reached[cell.name] = self._epochs.get(cell.name, 0)
        place = f"{self._before + self._ended} of {self._total}"
        self._say(f"{place}, {self._words[cell.name]}: {cell_words(cell)}{self._left()}")

    def picture(self) -> RenderableType:
        """The current picture for the terminal."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = sum(self._epochs.values()) or 1
        head = Table.grid(padding=(0, 1))
        failed = f", {self._failed} failed" if self._failed else ""
        words = f"{self._before + self._ended} of {self._total} runs{failed}{self._left()}"
        bar = ProgressBar(total=total, completed=sum(self._reached.values()), width=BAR_WIDTH)
        head.add_row(Text("sweep"), bar, Text(words))
        rows = Table.grid(padding=(0, 1))
        shown = list(self._running.items())[: max(1, self._console.height - _OTHER_LINES)]
        for name, state in shown:
            rows.add_row(
                Text(f"  {printable(self._words[name])}", overflow="ellipsis", no_wrap=True),
                Text(state),
            )
        return Group(head, rows)

    def _left(self) -> str:
        done, total = sum(self._reached.values()), sum(self._epochs.values())
        if done < len(self._running) / 2:  # so far most of the time went into starting
            return ""
        left = self._pace.left(done, total, self._clock())
        return f", {left_words(left)}" if left else ""

    def _say(self, text: str) -> None:
        print_line(self._console, text)
