"""Compares several runs on the same data: accuracy by epochs and by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from batchwright.errors import FileError
from batchwright.records import RunSummary
from batchwright.records.text.formatting import duration, percent
from batchwright.records.text.problems import printable
from batchwright.reporting.data.plan_words import local_range, range_words
from batchwright.reporting.data.reading import training_clock, training_words

_UNLIKE = {
    *("seed", "port", "timeout", "restarts"),
    *("checkpoint_epochs", "checkpoint_seconds", "checkpoint_steps"),
}
"""Job keys in which runs of one setting may differ."""


@dataclass(frozen=True)
class ComparedRun:
    """One run.

    Attributes:
        name: Name of its folder.
        setting: Number of its setting, zero-based; runs of one setting differ in the seed alone.
        label: Name of its setting.
        summary: The run's summary.
        reached: Seconds of training until the common accuracy, real or simulated; `None` if there
            is no common accuracy.
    """

    name: str
    setting: int
    label: str
    summary: RunSummary
    reached: float | None

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        """Evaluated epochs: (epoch counted from one, training seconds at its end, accuracy)."""
        clock = training_clock(self.summary)
        return [
            (epoch.epoch + 1, seconds, epoch.top1)
            for epoch, seconds in zip(self.summary.epochs, clock, strict=True)
            if epoch.top1 is not None
        ]

    @property
    def seconds(self) -> float:
        """Seconds of training, without evaluation; real or simulated."""
        return next(reversed(training_clock(self.summary)), 0.0)


@dataclass(frozen=True)
class RunComparison:
    """Several runs to compare.

    Attributes:
        runs: Two or more runs, in the given order.
        common: The highest held-out accuracy that every run reached; `None` if a run was never
            evaluated.
    """

    runs: tuple[ComparedRun, ...]
    common: float | None

    @property
    def title(self) -> str:
        """Names of the networks and of the data."""
        networks = dict.fromkeys(one.summary.plan.network.name for one in self.runs)
        return f"{', '.join(networks)} on {self.runs[0].summary.plan.data.name}"

    def of_clock(self, *, simulated: bool) -> list[ComparedRun]:
        """The runs whose time is simulated, or those whose time is real."""
        return [one for one in self.runs if one.summary.simulated is simulated]


def compared(summaries: Sequence[RunSummary]) -> RunComparison:
    """Compare runs.

    Raises:
        FileError: There are fewer than two runs, or they were not trained and evaluated on the same
            images.
    """
    if len(summaries) < 2:
        raise FileError("a comparison needs at least two runs: name their folders")
    first = summaries[0]
    for other in summaries[1:]:
        if _data(other) != _data(first):
            raise FileError(
                f"{other.run_folder} holds a run on other data ({_data_words(other)}) than "
                f"{first.run_folder} ({_data_words(first)}): compare runs of the same data and "
                "the same held-out images"
            )
    bests = [one.best_epoch.top1 if one.best_epoch else None for one in summaries]
    known = [best for best in bests if best is not None]
    common = min(known) if len(known) == len(bests) else None
    settings = _settings(summaries)
    labels = _labels(summaries, settings)
    names = _names(summaries)
    return RunComparison(
        tuple(
            ComparedRun(name, setting, labels[setting], one, _reached(one, common))
            for name, setting, one in zip(names, settings, summaries, strict=True)
        ),
        common,
    )


def comparison_rows(comparison: RunComparison) -> list[list[str]]:
    """The runs as table rows: the head, then a row for each run."""
    common = "common accuracy" if comparison.common is None else percent(comparison.common)
    rows = [["run", "method", "global batch", "workers x local", "epochs"]]
    rows[0] += ["last", "best", "training", f"to {common}"]
    for one in comparison.runs:
        summary, plan = one.summary, one.summary.plan
        best = summary.best_epoch
        rows.append(
            [
                one.name,
                plan.method,
                range_words(stage.global_batch_size for stage in plan.stages),
                f"{plan.workers} x {local_range(plan)}",
                done_words(summary),
                _share(summary.accuracy),
                _share(best.top1 if best else None),
                training_words(summary, one.seconds),
                "-" if one.reached is None else training_words(summary, one.reached),
            ]
        )
    return rows


def setting_rows(comparison: RunComparison) -> list[list[str]]:
    """Mean and extremes of the last accuracy of settings with several ended runs, as table rows.

    The first row is the head. Runs that go on or stopped early are left out: they would lower the
    mean.
    """
    rows = [["setting", "runs", "mean of last", "lowest", "highest", "training, mean"]]
    for setting in sorted({one.setting for one in comparison.runs}):
        ones = [one for one in comparison.runs if one.setting == setting and one.summary.ended]
        lasts = [one.summary.accuracy for one in ones]
        known = [last for last in lasts if last is not None]
        if len(ones) < 2 or not known:
            continue
        clock = " simulated" if ones[0].summary.simulated else ""
        rows.append(
            [
                ones[0].label,
                str(len(ones)),
                *(percent(value) for value in (fmean(known), min(known), max(known))),
                f"{duration(fmean(one.seconds for one in ones))}{clock}",
            ]
        )
    return rows


def done_words(summary: RunSummary) -> str:
    """Number of a run's epochs so far; if it has not ended, of how many."""
    done = summary.epochs[-1].epoch + 1 if summary.epochs else 0
    return f"{done:,}" if summary.ended else f"{done:,} of {summary.plan.epochs:,}"


def unended(comparison: RunComparison) -> list[str]:
    """Names of the runs that have not trained all their epochs."""
    return [one.name for one in comparison.runs if not one.summary.ended]


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _reached(summary: RunSummary, common: float | None) -> float | None:
    if common is None:
        return None
    clock = training_clock(summary)
    return next(
        (
            seconds
            for epoch, seconds in zip(summary.epochs, clock, strict=True)
            if epoch.top1 is not None and epoch.top1 >= common
        ),
        None,
    )


def _data(summary: RunSummary) -> tuple[str, str, int]:
    data = summary.plan.data
    return data.digest, data.split, data.val_samples


def _data_words(summary: RunSummary) -> str:
    data = summary.plan.data
    return f"{data.name}, {data.digest[:8]}, {data.val_samples:,} held out"


def _settings(summaries: Sequence[RunSummary]) -> list[int]:
    """Number of each run's setting, in order of appearance."""
    found: list[object] = []
    numbers = []
    for one in summaries:
        job = one.plan.job.model_dump(exclude=_UNLIKE)
        if job not in found:
            found.append(job)
        numbers.append(found.index(job))
    return numbers


def _labels(summaries: Sequence[RunSummary], settings: Sequence[int]) -> list[str]:
    """Label of each setting: its method, with its first run's name if several have this method."""
    firsts = [settings.index(number) for number in range(max(settings) + 1)]
    methods = [str(summaries[at].plan.method) for at in firsts]
    names = _names(summaries)
    return [
        method if methods.count(method) == 1 else f"{method} ({names[at]})"
        for method, at in zip(methods, firsts, strict=True)
    ]


def _names(summaries: Sequence[RunSummary]) -> list[str]:
    """The folders' names, with as many parent folders as needed to distinguish them."""
    paths = [Path(one.run_folder).absolute() for one in summaries]
    names: list[str] = []
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [printable(name) for name in names]
