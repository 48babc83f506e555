"""A sweep in rows: a setting each for a person, a run each for a spreadsheet."""

from __future__ import annotations

import csv
import io

from batchwright.records import Mean, Sweep, SweepCell
from batchwright.records.text.formatting import counted, duration, job_value, percent


def setting_head(sweep: Sweep) -> list[str]:
    """What the columns of `setting_rows` are."""
    keys = [one.key for one in sweep.keys]
    clock = "simulated training" if _all_simulated(sweep) else "training"
    return [*keys, "runs", "last accuracy", "best accuracy", clock]


def setting_rows(sweep: Sweep) -> list[list[str]]:
    """A row for each setting, in the order of the grid: values, runs, means and standard errors."""
    rows = []
    for one in sweep.settings:
        seconds = one.training_seconds
        spent = duration(seconds.value) if seconds else "-"
        if seconds and not _all_simulated(sweep):
            spent += " simulated" * any(cell.simulated for cell in sweep.runs_of(one.values))
        runs = f"{one.done} of {len(sweep.seeds)}" + f", {one.failed} failed" * (one.failed > 0)
        rows.append(
            [
                *map(job_value, one.values),
                runs,
                mean_words(one.accuracy),
                mean_words(one.best_accuracy),
                spent,
            ]
        )
    return rows


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
    """The setting with the highest mean of the last accuracy, in a line; empty if none is known."""
    known = [one for one in sweep.settings if one.accuracy is not None]
    if not known:
        return ""
    best = max(known, key=lambda one: one.accuracy.value if one.accuracy else 0.0)
    return f"best: {values_words(sweep, best.values)}, {mean_words(best.accuracy)}"


def values_words(sweep: Sweep, values: tuple[object, ...]) -> str:
    """Values with their keys, as on the command line."""
    keys = [one.key for one in sweep.keys]
    return " ".join(f"{k}={job_value(v)}" for k, v in zip(keys, values, strict=True))


def progress_words(sweep: Sweep) -> str:
    """How many runs there are, and how they ended."""
    left = len(sweep.cells) - len(sweep.done) - len(sweep.failed)
    words = [f"{len(sweep.done)} of {counted(len(sweep.cells), 'run')} done"]
    if sweep.failed:
        words.append(f"{len(sweep.failed)} failed")
    if left:
        words.append(f"{left} to go")
    return ", ".join(words)


def cell_words(cell: SweepCell) -> str:
    """How a run ended."""
    if cell.state == "failed":
        return f"failed: {cell.error}"
    if cell.state != "done":
        return cell.state
    reached = "not evaluated" if cell.accuracy is None else f"accuracy {percent(cell.accuracy)}"
    seconds = cell.training_seconds or 0.0
    return f"{reached}, {duration(seconds)} of training{', simulated' * cell.simulated}"


def sweep_csv(sweep: Sweep) -> str:
    """The runs as comma-separated values, a head line first; shares and seconds in full."""
    columns = [
        *("seed", "state", "accuracy", "best_accuracy", "best_epoch", "train_loss", "noise_scale"),
        *("training_seconds", "simulated", "workers", "global_batch_size", "learning_rate"),
        *("warmup_epochs", "error"),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # A swept key may have a column's name: it is the value asked for, the other what was planned.
    taken = {"warmup_epochs", "learning_rate", "workers"}
    planned = [f"planned_{name}" if name in taken else name for name in columns]
    writer.writerow(["run", *(one.key for one in sweep.keys), *planned])
    for cell in sweep.cells:
        facts = [getattr(cell, name) for name in columns]
        told = ["" if fact is None else fact for fact in facts]
        writer.writerow([cell.name, *map(job_value, cell.values), *told])
    return text.getvalue()
