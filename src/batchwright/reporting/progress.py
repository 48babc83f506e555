"""Progress for the person who waits: a live display on a terminal, plain lines elsewhere.

Both say the same. Elsewhere (a file, a pipe, a log) there is a line per epoch and, inside a long
epoch, one every `LINE_SECONDS` at most; and one whenever the workers' local batches change. On a
terminal, from two workers on, a small table of them stands below the bar. Everything goes to the
console given, by default standard error, so that standard output stays free for JSON. Rich honours
``NO_COLOR`` and ``TERM=dumb``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from batchwright.records.words import duration, number, percent, printable
from batchwright.reporting.live_workers import LiveWorkers

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
REDRAW_SECONDS = 0.05
REFRESH_SECONDS = 0.25  # between two pictures of a run, whose lines come every half second
OTHER_LINES = 6  # of a terminal, beside the workers: bar, head of the table, room to write


def progress(console: Console | None = None, *, epochs: int) -> RunProgress:
    """Progress of a training run of ``epochs`` epochs; a context manager with ``update``."""
    return RunProgress(console or _standard_error(), epochs)


def steps(console: Console | None = None) -> StepsProgress:
    """Progress of countable work; a context manager called as ``(done, total, what)``."""
    return StepsProgress(console or _standard_error())


class RunProgress:
    """Shows the lines of ``metrics.jsonl`` as they come."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs
        self._workers = LiveWorkers()
        self._bar: Progress | None = _bar(console) if _is_live(console) else None
        self._live: Live | None = _live(console, self._picture) if self._bar else None
        self._task: TaskID | None = None
        self._epoch_seconds: float | None = None
        self._shown = (-1, 0.0)

    def __enter__(self) -> RunProgress:
        if self._live and self._bar:
            self._live.start()
            self._task = self._bar.add_task("starting the workers", total=None, text="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Take one line: ``step``, ``shares``, ``epoch`` or ``note``; others are passed over.

        Epochs are zero-based in the lines and counted from one on the screen. A value that is
        missing or null is left out.
        """
        kind = record.get("kind")
        self._workers.take(record)
        if kind == "step":
            self._step(record)
        elif kind == "shares":
            self._shares(record)
        elif kind == "epoch":
            self._epoch(record)
        elif kind == "note":
            self._say(str(record.get("text", "")))

    def _step(self, record: Mapping[str, Any]) -> None:
        epoch, step, most = record["epoch"], record["step"], record["steps"]
        text = ", ".join(_step_words(record) + self._time_left(record))
        if self._bar:
            self._draw(epoch, step, most, text)
            return
        seconds = record.get("time/train_s") or 0.0
        if epoch != self._shown[0]:
            self._shown = (epoch, 0.0)
        if seconds - self._shown[1] >= LINE_SECONDS:
            self._shown = (epoch, seconds)
            self._say(f"epoch {epoch + 1}/{self._epochs}, step {step}/{most}: {text}")

    def _shares(self, record: Mapping[str, Any]) -> None:
        """A line for local batches that are not those of the line before."""
        changed = self._workers.change(record)
        if changed:
            place = f"epoch {record['epoch'] + 1}/{self._epochs}, step {record['step'] + 1}"
            self._say(f"{place}/{record['steps']}: {changed}")

    def _epoch(self, record: Mapping[str, Any]) -> None:
        spent = (record.get("time/epoch_s") or 0.0) + (record.get("time/eval_s") or 0.0)
        self._epoch_seconds = spent or None
        words = _epoch_words(record, brief=self._bar is not None)
        left = spent * (self._epochs - record["epoch"] - 1)
        if left:
            words.append(_left(left))
        self._say(f"epoch {record['epoch'] + 1}/{self._epochs}: {', '.join(words)}")
        self._draw(record["epoch"], 1, 1, "")

    def _picture(self) -> RenderableType:
        """What the terminal shows at this moment: the bar, and the workers below it."""
        from rich.console import Group

        assert self._bar is not None  # noqa: S101 - drawn only with a bar; tells the type checker
        table = self._workers.table(most=self._console.height - OTHER_LINES)
        return Group(self._bar, table) if table else self._bar

    def _draw(self, epoch: int, done: int, total: int, text: str) -> None:
        if self._bar and self._task is not None:
            name = f"epoch {epoch + 1}/{self._epochs}"
            self._bar.update(self._task, description=name, total=total, completed=done, text=text)

    def _time_left(self, record: Mapping[str, Any]) -> list[str]:
        """The rest of the run: at the last epoch's pace, in the first epoch at its own so far."""
        done = record["step"] / record["steps"] if record["steps"] else 0.0
        seconds = self._epoch_seconds
        if seconds is None:
            if not done or not record.get("time/train_s"):
                return []
            seconds = record["time/train_s"] / done
        return [_left(seconds * (self._epochs - record["epoch"] - done))]

    def _say(self, text: str) -> None:
        _print(self._console, text)


class StepsProgress:
    """Shows how far countable work has come, one piece of work after another."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: Progress | None = _bar(console) if _is_live(console) else None
        self._task: TaskID | None = None
        self._piece = (0, -1)
        self._shown = 0.0

    def __enter__(self) -> StepsProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Say that ``done`` of ``total`` things are done, and ``what`` is being done to them.

        A new total, or a count that falls, begins a new piece of work. Cheap enough to be called
        for every image: most calls return at once.
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
            _print(self._console, f"{what}: {done:,} of {total:,}")

    def _draw(self, done: int, total: int, what: str, *, new: bool) -> None:
        assert self._bar is not None  # noqa: S101 - only called with a bar; tells the type checker
        if new or self._task is None:
            self._task = self._bar.add_task("", total=total, text="")
        count = f"{done:,} of {total:,}"
        self._bar.update(
            self._task, description=printable(what), completed=done, total=total, text=count
        )


def _left(seconds: float) -> str:
    """Time left, in whole seconds: more figures would only flicker."""
    return f"{seconds:.0f} s left" if seconds < 59.5 else f"{duration(seconds)} left"


def _step_words(record: Mapping[str, Any]) -> list[str]:
    return _words(
        record,
        ("throughput/samples_per_sec", lambda v: f"{number(v)} images/s"),
        ("train/loss", lambda v: f"loss {number(v)}"),
        ("lr", lambda v: f"rate {v:.3g}"),
    )


def _epoch_words(record: Mapping[str, Any], *, brief: bool) -> list[str]:
    """What an epoch was like; ``brief`` to fit a terminal of 80 columns."""
    shown: list[tuple[str, Callable[[float], str]]] = [
        ("train/loss", lambda v: f"loss {number(v)}"),
        ("val/loss", lambda v: f"held-out loss {number(v)}"),
        ("val/top1", lambda v: f"accuracy {percent(v)}"),
        ("throughput/samples_per_sec", lambda v: f"{number(v)} images/s"),
        ("time/epoch_s", duration),
    ]
    if brief:
        return _words(record, *(one for one in shown if one[0] != "val/loss"))
    words = _words(record, *shown)
    if record.get("time/epoch_s") and record.get("plan/predicted_epoch_s"):
        words[-1] += f" (predicted {duration(record['plan/predicted_epoch_s'])})"
    return words


def _words(record: Mapping[str, Any], *shown: tuple[str, Callable[[float], str]]) -> list[str]:
    return [say(record[key]) for key, say in shown if record.get(key) is not None]


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _live(console: Console, picture: Callable[[], RenderableType]) -> Live:
    """Draws ``picture`` again and again, and takes it away at the end."""
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
        BarColumn(bar_width=16),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
    )


def _print(console: Console, text: str) -> None:
    """One line as it is: no markup, no colour for numbers, no wrapping."""
    console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)


def _standard_error() -> Console:
    from rich.console import Console

    return Console(stderr=True)
