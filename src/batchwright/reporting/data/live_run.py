"""A run that goes on, as far as its lines tell: the records of a finished one, made from them.

What draws a finished run then draws one that goes on. The lines may come from anyone: what does not
fit the plan is left out, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchwright.records import EpochRecord, Plan, Profile, RoundRecord, RunSummary, WorkerTime
from batchwright.records.lines.flat_lines import completed, places_of
from batchwright.records.lines.run_lines import (
    EpochLine,
    NoteLine,
    RoundLine,
    SharesLine,
    StepLine,
    WorkerStep,
)
from batchwright.records.text.formatting import percent, shares_between


@dataclass(frozen=True)
class RunLines:
    """Lines of a run by kind, each kind in order; the newest step is among them, and the newest
    rounds and notes.

    Attributes:
        stride: Every so many of the epochs is here.
    """

    epochs: Sequence[EpochLine] = ()
    steps: Sequence[StepLine] = ()
    shares: Sequence[SharesLine] = ()
    rounds: Sequence[RoundLine] = ()
    notes: Sequence[NoteLine] = ()
    stride: int = 1


@dataclass(frozen=True)
class WorkerNow:
    """A worker at the newest line: samples per step, and means of a step's seconds."""

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
        epoch: Zero-based.
        step: Steps done in it; under a parameter server samples that were committed.
        steps: Of how many.
        seconds: Of training in it so far; 0 where nothing tells.
        unit: What is counted: ``step`` or ``sample``.
    """

    epoch: int
    step: int
    steps: int
    seconds: float
    unit: str = "step"

    @property
    def share(self) -> float:
        """How much of it is done, in [0, 1]."""
        return min(1.0, self.step / self.steps)

    @property
    def expected_seconds(self) -> float | None:
        """What the whole epoch would take at its pace so far; `None` before there is one."""
        return self.seconds / self.share if self.step and self.seconds else None


def summary_so_far(name: str, plan: Plan, profile: Profile | None, lines: RunLines) -> RunSummary:
    """The finished epochs as the summary of a run.

    Its wall time is that of these epochs: nothing tells how long the set-up took.

    Args:
        name: Stands for the run folder.
        plan: What is followed.
        profile: What it was made from, if known.
        lines: What the run has told.
    """
    epochs = _epochs(plan, lines)
    wall = sum(e.training_seconds + e.evaluation_seconds + e.checkpoint_seconds for e in epochs)
    return RunSummary(
        run_folder=name,
        plan=plan,
        profile=profile,
        epochs=tuple(epochs),
        setup_seconds=0.0,
        wall_seconds=wall,
        simulated=plan.job.launcher.simulated,
    )


def forecast_so_far(plan: Plan, lines: RunLines) -> EpochLine | None:
    """The newest evaluated epoch, if it tells how a run by this plan is likely to end; else `None`.

    Nothing is told of the end by a plan that predicts none: so after a batch that was changed.
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
    """What an epoch's line expects of the rest of its run; empty where it tells nothing.

    Args:
        line: Of the last evaluated epoch.
        brief: Whether the interval is left out.
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
    """The epoch that the newest step or round is of; `None` between epochs, and without such."""
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
    """The workers by the newest line that tells of them; none where nothing does."""
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
    """The rounds of workers and epochs that the plan has."""
    told = (line.record for line in lines)
    return [one for one in told if one.worker < plan.workers and one.epoch < plan.epochs]


def _newest_step(lines: RunLines) -> StepLine | None:
    return lines.steps[-1] if lines.steps else None


def _epochs(plan: Plan, lines: RunLines) -> list[EpochRecord]:
    newest = [line.record for line in _newest(plan, lines)]
    return completed(newest, lines.steps, lines.shares)


def _newest(plan: Plan, lines: RunLines) -> list[EpochLine]:
    """The lines of finished epochs; of one that was told twice, as after a resume, the newest."""
    by_epoch = {one.record.epoch: one for one in lines.epochs if one.record.epoch < plan.epochs}
    return [one for _, one in sorted(by_epoch.items())]
