"""The content of a sweep's charts and tables: means over seeds with standard errors."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev

from pydantic import JsonValue

from batchwright.records import Mean, Sweep, SweepCell, SweepSetting, SweptKey
from batchwright.records.text.formatting import counted, duration, job_value, percent, setting_words
from batchwright.records.text.problems import printable

MAX_PANELS = 12
MAX_LINES = 10
_Z_975 = 1.96  # half of a 95 % interval, in standard errors
_WIDE = 8.0  # largest over smallest value from which on an axis is logarithmic


@dataclass(frozen=True)
class Spot:
    """A mean over seeds.

    Attributes:
        x: Epoch counted from one, or position of a value on its axis.
        mean: Held-out accuracy, in percent.
        error: Standard error, in points; `None` for a single run.
        count: Number of runs in the mean.
    """

    x: float
    mean: float
    error: float | None
    count: int


@dataclass(frozen=True)
class Line:
    """The spots of one value of a key, or of one combination of the other keys' values.

    Attributes:
        number: Number of the value or combination, zero-based, which decides the line's look.
        label: Name in the legend.
        spots: The spots by rising x.
    """

    number: int
    label: str
    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class Panel:
    """Lines over the same axes; there was no room for ``left_out`` more."""

    title: str
    lines: tuple[Line, ...]
    left_out: int = 0


@dataclass(frozen=True)
class Scale:
    """The positions of a key's values on an axis.

    Attributes:
        places: Position of each value.
        logarithmic: Whether the axis is logarithmic.
        numeric: Whether positions are the values themselves; else they are 0, 1, 2, ...
    """

    places: tuple[float, ...]
    logarithmic: bool
    numeric: bool


def varying(sweep: Sweep) -> list[SweptKey]:
    """The keys with several values; if there are none, the first key."""
    return [one for one in sweep.keys if len(one.values) > 1] or [sweep.keys[0]]


def curves(sweep: Sweep, key: str) -> list[Panel]:
    """Accuracy by epoch: a panel for each setting of the other keys, a line for each value.

    A line ends with the shortest of its runs. Where `goal.accuracy` ends runs, the later means
    would be of the slowest runs alone, and fall.
    """
    at, values = _place_of(sweep, key)
    panels = []
    for others in _others(sweep, at):
        lines = []
        for number, value in enumerate(values):
            chosen = (*others[:at], value, *others[at:])
            runs = [cell.accuracies for cell in sweep.runs_of(chosen)]
            by_epoch = (
                _spot(epoch + 1, (run[epoch] for run in runs))
                for epoch in range(min(map(len, runs), default=0))
            )
            spots = tuple(filter(None, by_epoch))
            if spots:
                lines.append(Line(number, f"{key}={value_label(value)}", spots))
        if lines:
            shown = tuple(lines[:MAX_LINES])
            panels.append(Panel(_title(sweep, others, at), shown, len(lines) - len(shown)))
    return panels


def against(sweep: Sweep, key: str) -> Panel:
    """Last accuracy against the values of ``key``: a line for each setting of the other keys."""
    at, values = _place_of(sweep, key)
    scale = scale_of(values)
    lines = []
    for number, others in enumerate(_others(sweep, at)):
        spots = []
        for place, value in zip(scale.places, values, strict=True):
            chosen = (*others[:at], value, *others[at:])
            spot = _spot(place, (cell.accuracy for cell in sweep.runs_of(chosen)))
            spots += [spot] if spot else []
        if spots:
            ordered = tuple(sorted(spots, key=lambda spot: spot.x))
            lines.append(Line(number, _title(sweep, others, at), ordered))
    shown = tuple(lines[:MAX_LINES])
    return Panel(f"last accuracy against {key}", shown, len(lines) - len(shown))


def scale_of(values: Sequence[JsonValue]) -> Scale:
    """The positions of values on an axis: those of numbers are the numbers themselves.

    >>> scale_of([64, 1024]), scale_of(["sqrt", "none"]).places
    (Scale(places=(64.0, 1024.0), logarithmic=True, numeric=True), (0.0, 1.0))
    """
    # True and false are `int` in Python, and no numbers here.
    known = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    numbers = [float(value) for value in known]
    if len(numbers) < len(values):
        return Scale(tuple(map(float, range(len(values)))), logarithmic=False, numeric=False)
    wide = min(numbers) > 0 and max(numbers) / min(numbers) >= _WIDE
    return Scale(tuple(numbers), logarithmic=wide, numeric=True)


def value_label(value: JsonValue) -> str:
    """A value as text for a legend or a tick, unprintable characters escaped."""
    return printable(job_value(value))


def _place_of(sweep: Sweep, key: str) -> tuple[int, tuple[JsonValue, ...]]:
    at = [one.key for one in sweep.keys].index(key)
    return at, sweep.keys[at].values


def _others(sweep: Sweep, at: int) -> list[tuple[JsonValue, ...]]:
    """All combinations of the values of the keys other than the one at index ``at``."""
    return list(product(*(one.values for place, one in enumerate(sweep.keys) if place != at)))


def _title(sweep: Sweep, others: Sequence[JsonValue], at: int) -> str:
    """The other keys' values as a title, without keys that have a single value."""
    keys = [one for place, one in enumerate(sweep.keys) if place != at]
    words = [
        f"{one.key}={value_label(value)}"
        for one, value in zip(keys, others, strict=True)
        if len(one.values) > 1
    ]
    return ", ".join(words) or "all runs"


def _spot(x: float, shares: Iterable[float | None]) -> Spot | None:
    known = [100 * share for share in shares if share is not None]
    if not known:
        return None
    error = stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Spot(x, fmean(known), error, len(known))


def setting_head(sweep: Sweep) -> list[str]:
    """The head of the table of `setting_rows`."""
    keys = [one.key for one in sweep.keys]
    rate = ["rate used"] if _rates_used(sweep) else []
    clock = "simulated training" if _all_simulated(sweep) else "training"
    return [*keys, *rate, "runs", "last accuracy", "best accuracy", clock]


def setting_rows(sweep: Sweep) -> list[list[str]]:
    """A row for each setting in the grid's order: values, runs, means and standard errors."""
    rows, rates = [], _rates_used(sweep)
    for at, one in enumerate(sweep.settings):
        seconds = one.training_seconds
        spent = duration(seconds.value) if seconds else "-"
        if seconds and not _all_simulated(sweep):
            spent += " simulated" * any(cell.simulated for cell in sweep.runs_of(one.values))
        runs = f"{one.done} of {len(sweep.seeds)}" + f", {one.failed} failed" * (one.failed > 0)
        rows.append(
            [
                *map(job_value, one.values),
                *rates[at : at + 1],
                runs,
                mean_words(one.accuracy),
                mean_words(one.best_accuracy),
                spent,
            ]
        )
    return rows


def _rates_used(sweep: Sweep) -> list[str]:
    """The first rate of each setting; empty if it is the one asked for, or the same for all."""
    known = [cell for cell in sweep.cells if cell.learning_rate is not None]
    planned = {json.dumps(cell.values): cell.learning_rate for cell in known}
    rates = [planned.get(json.dumps(one.values)) for one in sweep.settings]
    keys = [one.key for one in sweep.keys]
    at = keys.index("learning_rate") if "learning_rate" in keys else None
    first = next((rate for rate in rates if rate is not None), None)
    asked = [first if at is None else one.values[at] for one in sweep.settings]
    if all(rate in (None, one) for rate, one in zip(rates, asked, strict=True)):
        return []
    return ["-" if rate is None else f"{rate:.4g}" for rate in rates]


def _all_simulated(sweep: Sweep) -> bool:
    return bool(sweep.done) and all(cell.simulated for cell in sweep.done)


def mean_words(mean: Mean | None) -> str:
    """A mean share in percent with its standard error.

    >>> mean_words(Mean(value=0.6871, standard_error=0.0042, count=3)), mean_words(None)
    ('68.71 ± 0.42 %', '-')
    >>> mean_words(Mean(value=0.6871, standard_error=None, count=1))
    '68.71 %'
    """
    if mean is None:
        return "-"
    error = "" if mean.standard_error is None else f" ± {100 * mean.standard_error:.2f}"
    return f"{100 * mean.value:.2f}{error} %"


def best_setting(sweep: Sweep) -> str:
    """The setting with the highest mean last accuracy, in a line; empty if none is known.

    Where `goal.accuracy` ends the runs, the one all of whose runs reached it, in the least mean
    training time, if any did. The line names the best of those that the seeds' errors cannot tell
    from it, and how many runs failed, which are in no mean.
    """
    target, varies = sweep.job.goal.target, any(one.key.startswith("goal.") for one in sweep.keys)
    if target is not None and not varies and len({cell.simulated for cell in sweep.done}) == 1:
        there = [
            (one, one.training_seconds)
            for one in sweep.settings
            if not one.failed
            and all((cell.accuracy or 0.0) >= target for cell in sweep.runs_of(one.values))
        ]
        if quickest := _ranked(sweep, there, sign=-1, say=_seconds_words):
            return f"quickest to goal.accuracy={target:g}: {quickest}"
    best = _ranked(sweep, [(one, one.accuracy) for one in sweep.settings], sign=1, say=mean_words)
    return f"best: {best}" if best else ""


def _ranked(
    sweep: Sweep,
    means: Iterable[tuple[SweepSetting, Mean | None]],
    *,
    sign: int,
    say: Callable[[Mean], str],
) -> str:
    """The setting with the highest mean times ``sign``, and what cannot be told from it."""
    keys = [one.key for one in sweep.keys]
    known = [(one, mean) for one, mean in means if mean is not None]
    known.sort(key=lambda pair: -sign * pair[1].value)
    if not known:
        return ""
    (_, best), *others = known
    told = [
        f"{setting_words(keys, one.values)}, {say(mean)}"
        + f" ({counted(one.failed, 'run')} failed)" * (one.failed > 0)
        for one, mean in known
    ]
    level = [
        words for words, (_, mean) in zip(told[1:], others, strict=True) if _as_good(mean, best)
    ]
    if best.standard_error is None and others:
        return f"{told[0]}; single runs do not tell what of that is chance: give more --seeds"
    if not level:
        return told[0]
    more = f" and {len(level) - 1} more" if len(level) > 1 else ""
    return f"{told[0]}; the seeds cannot tell it from {level[0]}{more}"


def _seconds_words(mean: Mean) -> str:
    error = "" if mean.standard_error is None else f" ± {duration(mean.standard_error)}"
    return f"{duration(mean.value)}{error} of training"


def _as_good(one: Mean, best: Mean) -> bool:
    r"""Whether the seeds cannot tell two means apart; not known for single runs, so `False`.

    .. math:: \lvert x_1 - x_2 \rvert \le 1.96 \sqrt{u_1^2 + u_2^2}

    The normal law takes errors as known; two or three seeds tell two settings apart less surely.
    """
    if one.standard_error is None or best.standard_error is None:
        return False
    error = math.hypot(one.standard_error, best.standard_error)
    return abs(one.value - best.value) <= _Z_975 * error


def run_words(keys: Sequence[str], values: Sequence[JsonValue], seed: int) -> str:
    """A run of a sweep as on the command line: ``scaling=sqrt warmup_epochs=5 seed=0``.

    Unlike the name of its folder, which may hold no commas within a value.
    """
    return setting_words([*keys, "seed"], [*values, seed])


def progress_words(sweep: Sweep) -> str:
    """The numbers of finished, failed and remaining runs."""
    left = len(sweep.cells) - len(sweep.done) - len(sweep.failed)
    words = [f"{len(sweep.done)} of {counted(len(sweep.cells), 'run')} done"]
    if sweep.failed:
        words.append(f"{len(sweep.failed)} failed")
    if left:
        words.append(f"{left} to go")
    return ", ".join(words)


def cell_words(cell: SweepCell) -> str:
    """How a run ended, in words."""
    if cell.state == "failed":
        return f"failed: {cell.error}"
    if cell.state != "done":
        return cell.state
    reached = "not evaluated" if cell.accuracy is None else f"accuracy {percent(cell.accuracy)}"
    seconds = cell.training_seconds or 0.0
    return f"{reached}, {duration(seconds)} of training{', simulated' * cell.simulated}"


def sweep_csv(sweep: Sweep) -> str:
    """The runs as comma-separated values with a head line; numbers are not rounded."""
    columns = [
        *("seed", "state", "accuracy", "best_accuracy", "best_epoch", "train_loss", "noise_scale"),
        *("training_seconds", "simulated", "workers", "global_batch_size", "learning_rate"),
        *("warmup_epochs", "error"),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # A swept key may have a column's name: its column holds the given value, the other the planned.
    taken = {"warmup_epochs", "learning_rate", "workers"}
    planned = [f"planned_{name}" if name in taken else name for name in columns]
    writer.writerow(["run", *(one.key for one in sweep.keys), *planned])
    for cell in sweep.cells:
        facts = [getattr(cell, name) for name in columns]
        cells = ["" if fact is None else fact for fact in facts]
        writer.writerow([cell.name, *map(job_value, cell.values), *cells])
    return text.getvalue()
