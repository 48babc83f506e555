"""Makes the records of a finished run from the lines of a running one; both are drawn alike.

The lines may come from anyone: lines that contradict the plan are left out, and never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from batchwright.records import EpochRecord, Plan, Profile, RoundRecord, RunSummary, WorkerTime
from batchwright.records.lines.flat_lines import completed, places_of
from batchwright.records.lines.lost_lines import lines_that_count
from batchwright.records.lines.run_lines import (
    EpochLine,
    NoteLine,
    RoundLine,
    RunLine,
    SharesLine,
    StepLine,
    WorkerStep,
)
from batchwright.records.text.formatting import percent, shares_between
from batchwright.reporting.data.accounting import epochs_seconds


@dataclass(frozen=True)
class RunLines:
    """Lines of a run by kind, in order; the newest steps, rounds and notes are among them.

    Of what was trained again, after a kill, the last time is here; see `lines_that_count`.

    Attributes:
        epochs: Lines of finished epochs.
        steps: Lines of steps.
        shares: Lines of local batches.
        rounds: Lines of rounds.
        notes: Lines with messages.
        stride: Of the run's epochs every ``stride``-th one is here.
    """

    epochs: Sequence[EpochLine] = ()
    steps: Sequence[StepLine] = ()
    shares: Sequence[SharesLine] = ()
    rounds: Sequence[RoundLine] = ()
    notes: Sequence[NoteLine] = ()
    stride: int = 1

    @classmethod
    def of(cls, lines: Iterable[RunLine], *, stride: int = 1) -> Self:
        """From lines as they were written, some of which may be left out."""
        kept = lines_that_count(lines)
        return cls(
            epochs=[line for line in kept if isinstance(line, EpochLine)],
            steps=[line for line in kept if isinstance(line, StepLine)],
            shares=[line for line in kept if isinstance(line, SharesLine)],
            rounds=[line for line in kept if isinstance(line, RoundLine)],
            notes=[line for line in kept if isinstance(line, NoteLine)],
            stride=stride,
        )


@dataclass(frozen=True)
class WorkerNow:
    """A worker by the newest line: samples per step, and mean seconds of a step."""

    rank: int
    place: str
    local_batch_size: int
    share: float
    compute_seconds: float | None
    wait_seconds: float | None


@dataclass(frozen=True)
class EpochNow:
    """The epoch in progress.

    Attributes:
        epoch: Number of the epoch, zero-based.
        step: Steps done in it; with a parameter server committed samples.
        steps: All its steps, or samples.
        seconds: Seconds of training in it so far; 0 if unknown.
        unit: What is counted: ``step`` or ``sample``.
    """

    epoch: int
    step: int
    steps: int
    seconds: float
    unit: str = "step"

    @property
    def share(self) -> float:
        """Finished share of the epoch, in [0, 1]."""
        return min(1.0, self.step / self.steps)

    @property
    def expected_seconds(self) -> float | None:
        """Seconds of the whole epoch at its speed so far; `None` if that is unknown."""
        return self.seconds / self.share if self.step and self.seconds else None


def summary_so_far(name: str, plan: Plan, profile: Profile | None, lines: RunLines) -> RunSummary:
    """The finished epochs as the summary of a run; ``name`` takes the place of its folder.

    Its wall time is that of these epochs, since the time of the set-up is unknown.
    """
    epochs = _epochs(plan, lines)
    summary = RunSummary(
        run_folder=name,
        plan=plan.as_trained({e.epoch: e.global_batch_size for e in epochs}),
        profile=profile,
        epochs=tuple(epochs),
        setup_seconds=0.0,
        wall_seconds=0.0,
        simulated=plan.job.launcher.simulated,
    )
    return summary.model_copy(update={"wall_seconds": epochs_seconds(summary)})


def forecast_so_far(plan: Plan, lines: RunLines) -> EpochLine | None:
    """The newest evaluated epoch's line, if it holds a forecast of the run's end; else `None`.

    There is no forecast if the plan predicts no accuracy, as after a change of the batch.
    """
    newest = _newest(plan, lines)
    line = next((one for one in reversed(newest) if one.record.top1 is not None), None)
    if line is None or line.epochs != plan.epochs or not any(plan.epoch_accuracy[-1:]):
        return None
    done, end = newest[-1].record.epoch + 1, line.expected_top1
    shares = () if end is None else (end.low, end.value, end.high)
    fits = done < (line.likely_epochs or plan.epochs) <= plan.epochs
    fits = fits and all(0 <= one <= 1 for one in shares)
    return line if fits and forecast_words(line) else None


def forecast_words(line: EpochLine | None, *, brief: bool = False) -> str:
    """The forecast in the last evaluated epoch's line, in words; empty without one.

    With ``brief`` the interval is left out.
    """
    if line is None:
        return ""
    if line.likely_epochs and line.likely_epochs < line.epochs:
        return f"goal.accuracy likely after epoch {line.likely_epochs}"
    end = line.expected_top1
    if end is None:
        return ""
    return f"likely {percent(end.value) if brief else shares_between(end)} at the end"


def epoch_now(plan: Plan, lines: RunLines) -> EpochNow | None:
    """The epoch of the newest step or round; `None` between epochs, and before the first step."""
    if plan.server is not None:
        samples = plan.data.train_samples
        if not lines.rounds or lines.rounds[-1].committed >= plan.epochs * samples:
            return None
        committed = lines.rounds[-1].committed
        epoch, done = divmod(committed, samples)
        return EpochNow(epoch, done, samples, 0.0, "sample")
    newest = _newest_step(lines)
    if newest is None or not newest.steps or newest.epoch >= plan.epochs:
        return None
    if newest.epoch <= max((line.record.epoch for line in lines.epochs), default=-1):
        return None
    step = min(newest.step, newest.steps)
    return EpochNow(newest.epoch, step, newest.steps, newest.training_seconds)


def workers_now(lines: RunLines) -> list[WorkerNow]:
    """The workers by the newest line with their values; empty before such a line."""
    step = _newest_step(lines)
    epoch = lines.epochs[-1].record if lines.epochs else None
    newest: StepLine | EpochRecord | None = step or epoch
    if newest is None:
        return []
    workers: Sequence[WorkerStep | WorkerTime] = newest.workers
    places = places_of(lines.shares, newest)
    if not places and epoch is not None and len(epoch.workers) == len(newest.workers):
        places = tuple(one.place for one in epoch.workers)
    total = sum(one.local_batch_size for one in workers) or 1
    return [
        WorkerNow(
            rank=rank,
            place=places[rank] if places else "",
            local_batch_size=one.local_batch_size,
            share=one.local_batch_size / total,
            compute_seconds=one.compute_seconds if step else None,
            wait_seconds=one.wait_seconds if step else None,
        )
        for rank, one in enumerate(workers)
    ]


def rounds_of(plan: Plan, lines: Iterable[RoundLine]) -> list[RoundRecord]:
    """The rounds whose worker and epoch exist in the plan."""
    records = (line.record for line in lines)
    return [one for one in records if one.worker < plan.workers and one.epoch < plan.epochs]


def _newest_step(lines: RunLines) -> StepLine | None:
    return lines.steps[-1] if lines.steps else None


def _epochs(plan: Plan, lines: RunLines) -> list[EpochRecord]:
    newest = [line.record for line in _newest(plan, lines)]
    return completed(newest, lines.steps, lines.shares)


def _newest(plan: Plan, lines: RunLines) -> list[EpochLine]:
    """The lines of finished epochs of the plan."""
    return [one for one in lines.epochs if one.record.epoch < plan.epochs]
