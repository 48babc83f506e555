"""Several runs of the same data beside each other: accuracy against epochs and against time."""

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

_UNLIKE = {"seed", "port", "timeout", "restarts", "checkpoint_seconds", "checkpoint_steps"}
"""Job keys in which runs of one setting may differ."""


@dataclass(frozen=True)
class ComparedRun:
    """One run.

    Attributes:
        name: Of its folder.
        setting: Runs of one setting differ in the seed alone; zero-based.
        label: What its setting is called.
        summary: The run.
        reached: Seconds of training until the common accuracy, real or simulated; `None` if it has
            never been reached.
    """

    name: str
    setting: int
    label: str
    summary: RunSummary
    reached: float | None

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        """The evaluated epochs: (counted from one, seconds of training by its end, accuracy)."""
        clock = training_clock(self.summary)
        return [
            (epoch.epoch + 1, seconds, epoch.top1)
            for epoch, seconds in zip(self.summary.epochs, clock, strict=True)
            if epoch.top1 is not None
        ]

    @property
    def seconds(self) -> float:
        """Seconds of training, evaluation aside; real or simulated."""
        return sum(epoch.training_seconds for epoch in self.summary.epochs)


@dataclass(frozen=True)
class RunComparison:
    """The runs in the order in which they were given.

    Attributes:
        runs: Two or more.
        common: The highest held-out accuracy that every run reached; `None` if one was never
            evaluated.
    """

    runs: tuple[ComparedRun, ...]
    common: float | None

    @property
    def title(self) -> str:
        """Networks and data."""
        networks = dict.fromkeys(one.summary.plan.network.name for one in self.runs)
        return f"{', '.join(networks)} on {self.runs[0].summary.plan.data.name}"

    def of_clock(self, *, simulated: bool) -> list[ComparedRun]:
        """The runs whose time is simulated, or those whose time is real."""
        return [one for one in self.runs if one.summary.simulated is simulated]


def compared(summaries: Sequence[RunSummary]) -> RunComparison:
    """Put runs beside each other.

    Raises:
        FileError: Fewer than two, or they were not trained and evaluated on the same images.
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


def comparison_rows(told: RunComparison) -> list[list[str]]:
    """The runs in words: head first, then a row for each."""
    common = "common accuracy" if told.common is None else percent(told.common)
    rows = [["run", "method", "global batch", "workers x local", "epochs"]]
    rows[0] += ["last", "best", "training", f"to {common}"]
    for one in told.runs:
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


def setting_rows(told: RunComparison) -> list[list[str]]:
    """Settings with several runs that have ended: mean and ends of the last accuracy; else the head
    alone. A run that goes on, or stopped early, would pull them down.
    """
    rows = [["setting", "runs", "mean of last", "lowest", "highest", "training, mean"]]
    for setting in sorted({one.setting for one in told.runs}):
        ones = [one for one in told.runs if one.setting == setting and one.summary.ended]
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
    """How many epochs a run has done, of how many where it has not ended."""
    done = summary.epochs[-1].epoch + 1 if summary.epochs else 0
    return f"{done:,}" if summary.ended else f"{done:,} of {summary.plan.epochs:,}"


def unended(told: RunComparison) -> list[str]:
    """Names of the runs that have not trained all their epochs."""
    return [one.name for one in told.runs if not one.summary.ended]


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
    """The number of each run's setting, as they come."""
    found: list[object] = []
    numbers = []
    for one in summaries:
        job = one.plan.job.model_dump(exclude=_UNLIKE)
        if job not in found:
            found.append(job)
        numbers.append(found.index(job))
    return numbers


def _labels(summaries: Sequence[RunSummary], settings: Sequence[int]) -> list[str]:
    """Each setting's method; where several have the same, the name of its first run besides."""
    firsts = [settings.index(number) for number in range(max(settings) + 1)]
    methods = [str(summaries[at].plan.method) for at in firsts]
    names = _names(summaries)
    return [
        method if methods.count(method) == 1 else f"{method} ({names[at]})"
        for method, at in zip(methods, firsts, strict=True)
    ]


def _names(summaries: Sequence[RunSummary]) -> list[str]:
    """The folders' names, with as many of those above as tell them apart."""
    paths = [Path(one.run_folder).absolute() for one in summaries]
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [printable(name) for name in names]
