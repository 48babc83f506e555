"""Progress of a run or of countable work: a live display on a terminal, plain lines elsewhere.

Elsewhere (a file, a pipe, a log) a line is printed per epoch, at most every `LINE_SECONDS` inside a
long epoch, and whenever the workers' local batches change. A terminal shows a bar and, from two
workers on, a small table of them below it; what a narrow terminal has no room for is left out, the
least important first. Everything goes to the given console, by default standard error, so that
standard output stays free for JSON. Rich honours ``NO_COLOR`` and ``TERM=dumb``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from statistics import median
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO, cast

from batchwright.records import EpochRecord, Plan
from batchwright.records.lines.run_lines import (
    EpochLine,
    NoteLine,
    RoundLine,
    RunLine,
    SharesLine,
    StepLine,
)
from batchwright.records.run import is_over
from batchwright.records.text.formatting import duration, number, percent
from batchwright.records.text.problems import printable
from batchwright.reporting.data.live_run import forecast_words
from batchwright.reporting.data.reading import held_out_loss
from batchwright.reporting.render.live_tables import LiveRounds, LiveWorkers

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0  # least time between two lines elsewhere
REDRAW_SECONDS = 0.05  # least time between two updates of a bar
PACE_EPOCHS = 5  # newest epochs from which the time left is computed
REFRESH_SECONDS = 0.25  # between two pictures of a run, whose lines come every half second
BAR_WIDTH = 16  # in characters
OTHER_LINES = 6  # lines of a terminal besides the workers': bar, table head, room to write


def progress(
    console: Console | None = None, *, epochs: int, plan: Plan | None = None
) -> RunProgress:
    """Progress of a training run of ``epochs`` epochs; a context manager with ``update``.

    With the run's ``plan`` it also shows changing resolutions and rounds with a parameter server,
    and marks simulated time.
    """
    return RunProgress(console or standard_error(), epochs, plan)


def steps(console: Console | None = None) -> StepsProgress:
    """Progress of countable work; a context manager called as ``(done, total, what)``."""
    return StepsProgress(console or standard_error())


class RunProgress:
    """Shows the lines of ``metrics.jsonl`` as they come."""

    def __init__(
        self,
        console: Console,
        epochs: int,
        plan: Plan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._epochs = epochs
        self._plan = plan
        self._clock, self._begun, self._pace = clock, clock(), Pace()
        self._simulated = plan is not None and plan.job.launcher.simulated
        self._rounds = LiveRounds(plan) if plan is not None and plan.server is not None else None
        self._workers = LiveWorkers()
        self._bar: Progress | None = _bar(console) if is_live(console) else None
        self._live: Live | None = live_picture(console, self._picture) if self._bar else None
        self._task: TaskID | None = None
        self._epoch_seconds: deque[float] = deque(maxlen=PACE_EPOCHS)
        self._paced_by: tuple[int, int] | None = None  # resolution and batch of `_epoch_seconds`
        self._likely_epochs: int | None = None
        self._records: list[EpochRecord] = []  # since this start: they never show an end too early
        self._shown = (-1, 0.0)

    def __enter__(self) -> RunProgress:
        if self._live and self._bar:
            self._live.start()
            self._task = self._bar.add_task("starting the workers", total=None, text="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, line: RunLine) -> None:
        """Show one line; epochs are counted from one, and unknown values left out."""
        self._workers.take(line)
        if isinstance(line, StepLine):
            self._step(line)
        elif isinstance(line, RoundLine) and self._rounds:
            self._round(line, self._rounds)
        elif isinstance(line, SharesLine):
            self._shares(line)
        elif isinstance(line, EpochLine):
            self._epoch(line)
        elif isinstance(line, NoteLine):
            self._say(line.text)

    def _step(self, line: StepLine) -> None:
        epoch, step, most = line.epoch, line.step, line.steps
        words = self._side(epoch)
        words += step_words(
            line.train_loss, line.learning_rate, line.samples_per_second, simulated=self._simulated
        )
        words += self._time_left(line)
        if self._bar:
            self._draw(epoch, step, most, words)
            return
        seconds = line.training_seconds
        if self._simulated:
            seconds = self._clock() - self._begun
        elif epoch != self._shown[0]:
            self._shown = (epoch, 0.0)
        self._say_inside(epoch, f"step {step}/{most}", words, seconds)

    def _round(self, line: RoundLine, rounds: LiveRounds) -> None:
        rounds.take(line)
        epoch, done, total = rounds.place
        words = [*self._side(line.record.epoch), *step_words(line.record.loss, line.learning_rate)]
        now = self._clock()
        words += self._paced(epoch + done / total, now)
        if self._bar:
            self._draw(epoch, done, total, words)
        else:
            self._say_inside(epoch, percent(done / total), words, now - self._begun)

    def _say_inside(self, epoch: int, place: str, words: list[Word], seconds: float) -> None:
        """Print a line inside an epoch, unless the last one was printed less than 10 s ago."""
        if seconds - self._shown[1] >= LINE_SECONDS:
            self._shown = (epoch, seconds)
            self._say(f"epoch {epoch + 1}/{self._epochs}, {place}: {joined(words)}")

    def _side(self, epoch: int) -> list[Word]:
        """The resolution of an epoch, if the plan has several."""
        plan = self._plan
        if plan is None or len({stage.resolution for stage in plan.stages}) < 2:
            return []
        return [(1, f"{plan.stages[plan.stage_of(epoch)].resolution} px")]

    def _shares(self, line: SharesLine) -> None:
        """Print local batches that have changed."""
        changed = self._workers.change(line)
        if changed:
            place = f"epoch {line.epoch + 1}/{self._epochs}, step {line.step + 1}"
            self._say(f"{place}/{line.steps}: {changed}")

    def _epoch(self, line: EpochLine) -> None:
        record, epoch, brief = line.record, line.record.epoch, self._bar is not None
        paced_by = record.resolution, record.global_batch_size
        if paced_by != self._paced_by:
            self._paced_by = paced_by
            self._epoch_seconds.clear()
        spent = record.training_seconds + record.evaluation_seconds
        if spent and record.whole:
            self._epoch_seconds.append(spent)
        if record.top1 is not None:
            self._likely_epochs = line.likely_epochs
        words = self._side(epoch)
        held_out = held_out_loss(self._plan)
        words += epoch_words(line, brief=brief, simulated=self._simulated, held_out=held_out)
        left = (self._seconds() or 0.0) * (self._likely(epoch + 1) - epoch - 1)
        self._records.append(record)
        ends = self._plan is not None and is_over(self._plan, self._records)
        if not ends and (self._simulated or self._rounds):
            words += self._paced(epoch + 1, self._clock())
        elif not ends and left:
            words.append((1, left_words(left)))
        name = f"epoch {epoch + 1}/{self._epochs}: "
        text = name + joined(words)
        for part in wrap(text, self._console.width, subsequent_indent="  ") if brief else [text]:
            self._say(part)
        if self._rounds is None:
            self._draw(epoch, 1, 1, [])

    def _seconds(self) -> float | None:
        """Seconds of an epoch: median of the newest, as one of them may have been disturbed."""
        return median(self._epoch_seconds) if self._epoch_seconds else None

    def _picture(self) -> RenderableType:
        """The current picture for the terminal: the bar, and the workers below it."""
        from rich.console import Group

        assert self._bar is not None  # noqa: S101 - only called with a bar
        shown = self._rounds or self._workers
        table = shown.table(most=self._console.height - OTHER_LINES, width=self._console.width)
        return Group(self._bar, table) if table else self._bar

    def _draw(self, epoch: int, done: int, total: int, words: list[Word]) -> None:
        if self._bar and self._task is not None:
            name = f"epoch {epoch + 1}/{self._epochs}"
            text = joined(words, self._console.width - len(name) - BAR_WIDTH - 2)
            self._bar.update(self._task, description=name, total=total, completed=done, text=text)

    def _paced(self, done: float, now: float) -> list[Word]:
        """Time left by a real clock, after ``done`` epochs."""
        left = self._pace.left(done, self._likely(int(done)), now)
        return [(0, left_words(left))] if left else []

    def _time_left(self, line: StepLine) -> list[Word]:
        """Time left at the speed of the newest epochs, or in the first epoch at its own so far."""
        done = line.step / line.steps if line.steps else 0.0
        if self._simulated:
            return self._paced(line.epoch + done, self._clock())
        seconds = self._seconds()
        if seconds is None:
            if not done or not line.training_seconds:
                return []
            seconds = line.training_seconds / done
        return [(0, left_words(seconds * (self._likely(line.epoch) - line.epoch - done)))]

    def _likely(self, done: int) -> int:
        """Epochs that the run is likely to take in all, after ``done`` epochs."""
        if self._likely_epochs is not None and self._likely_epochs > done:
            return self._likely_epochs
        return self._epochs if self._plan is None else self._plan.likely_epochs(done)

    def _say(self, text: str) -> None:
        print_line(self._console, text)


class StepsProgress:
    """Shows the progress of countable work, one piece of work after another."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: Progress | None = _bar(console) if is_live(console) else None
        self._task: TaskID | None = None
        self._piece = (0, -1)
        self._shown = 0.0

    def __enter__(self) -> StepsProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show that ``done`` of ``total`` items of the work ``what`` are done.

        A new total, or a smaller count, begins a new piece of work. It may be called for every
        image: most calls return at once.
        """
        last_done, last_total = self._piece
        new = total != last_total or done < last_done
        self._piece = (done, total)
        now = self._clock()
        pause = REDRAW_SECONDS if self._bar else LINE_SECONDS
        if not new and done < total and now - self._shown < pause:
            return
        self._shown = now
        if self._bar:
            self._draw(done, total, what, new=new)
        else:
            print_line(self._console, f"{what}: {done:,} of {total:,}")

    def _draw(self, done: int, total: int, what: str, *, new: bool) -> None:
        assert self._bar is not None  # noqa: S101 - only called with a bar
        if new or self._task is None:
            self._task = self._bar.add_task("", total=total, text="")
        count = f"{done:,} of {total:,}"
        self._bar.update(
            self._task, description=printable(what), completed=done, total=total, text=count
        )


def is_live(console: Console) -> bool:
    """Whether the console is a terminal that can redraw a picture."""
    return console.is_terminal and not console.is_dumb_terminal


def live_picture(console: Console, picture: Callable[[], RenderableType]) -> Live:
    """A display that redraws ``picture`` every `REFRESH_SECONDS` and removes it at the end."""
    from rich.live import Live

    return Live(
        console=console,
        get_renderable=picture,
        transient=True,
        refresh_per_second=1 / REFRESH_SECONDS,
    )


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=BAR_WIDTH),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
    )


def print_line(console: Console, text: str) -> None:
    """Print a line literally: without markup, coloured numbers or wrapping."""
    console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)


class _Lasting:
    """A stream that drops what it cannot write: no training is to end because nobody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def standard_error() -> Console:
    """A console that prints on standard error, as long as that can be written."""
    from rich.console import Console

    return Console(file=cast("TextIO", _Lasting(sys.stderr)), stderr=True)


Word = tuple[int, str]  # rank and text; the text of the highest rank is left out first


def left_words(seconds: float) -> str:
    """Time left in whole seconds, since more figures would only flicker."""
    return f"{seconds:.0f} s left" if seconds < 59.5 else f"{duration(seconds)} left"


def step_words(
    loss: float | None, rate: float, speed: float | None = None, *, simulated: bool = False
) -> list[Word]:
    """Speed, loss and rate inside an epoch."""
    clock = "simulated images/s" if simulated else "images/s"
    return _words(
        (speed, 3, lambda v: f"{number(v)} {clock}"),
        (loss, 2, lambda v: f"loss {number(v)}"),
        (rate, 4, lambda v: f"rate {v:.3g}"),
    )


def epoch_words(
    line: EpochLine, *, brief: bool, simulated: bool, held_out: str = "held-out loss"
) -> list[Word]:
    """Results of an epoch beside predictions; ``brief``, for a terminal, leaves some out."""
    clock, record, predicted = " simulated" if simulated else "", line.record, line.predicted_top1
    expected = took = ""
    if predicted and not brief:
        expected = f" (predicted {percent(predicted.low)} to {percent(predicted.high)})"
    if ahead := forecast_words(line, brief=brief):
        expected += f", {ahead}"
    if record.training_seconds and line.predicted_seconds and not brief:
        took = f" (predicted {duration(line.predicted_seconds)})"
    return _words(
        (record.train_loss, 3, lambda v: f"loss {number(v)}"),
        (None if brief else record.val_loss, 6, lambda v: f"{held_out} {number(v)}"),
        (record.top1, 0, lambda v: f"accuracy {percent(v)}{expected}"),
        (record.samples_per_second, 5, lambda v: f"{number(v)}{clock} images/s"),
        (record.training_seconds, 2, lambda v: f"{duration(v)}{clock}{took}"),
    )


def _words(*shown: tuple[float | None, int, Callable[[float], str]]) -> list[Word]:
    return [(rank, say(value)) for value, rank, say in shown if value is not None]


def joined(words: Iterable[Word], room: int | None = None) -> str:
    """The texts in order, without those of the highest ranks if they do not fit ``room``."""
    kept = list(words)
    while room is not None and len(kept) > 1 and len(joined(kept)) > room:
        kept.remove(max(kept))
    return ", ".join(text for _, text in kept)


class Pace:
    """The speed of epochs by a real clock, whatever times the records hold."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left(self, done: float, total: float, now: float) -> float | None:
        """Seconds until ``total`` epochs are done, at the speed since the first call."""
        if self._first is None or done <= self._first[0]:
            self._first = self._first or (done, now)
            return None
        before, then = self._first
        return (now - then) / (done - before) * (total - done)
