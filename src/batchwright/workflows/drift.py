"""What the epochs of a run took, against what its plan predicted. Needs no planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from batchwright.records import EpochRecord, Estimate, Plan, Stage
from batchwright.records.text.formatting import between, duration

LOOK_BACK = 3
"""Newest epochs whose median counts: one that something disturbed moves nothing."""

MIN_EPOCHS = 2
"""Fewer tell nothing, as a row's first epoch does not: loaders start in it, caches are cold."""


@dataclass(frozen=True)
class EpochTime:
    """What an epoch of training took."""

    seconds: float  # all of it, without evaluation and checkpoints
    # Of the worker that computed longest, preparing its images included; the rest went into
    # exchanging and waiting.
    computing_seconds: float


def time_of(epoch: EpochRecord) -> EpochTime:
    """What a finished epoch took; all of it computing where its workers tell no times."""
    seconds = epoch.training_seconds
    computed = [one.input_seconds + one.compute_seconds for one in epoch.workers]
    return EpochTime(seconds, min(seconds, max(computed, default=0.0) or seconds))


@dataclass(frozen=True)
class Drift:
    """Measured against predicted, over the newest epochs of the row that a run is in.

    Attributes:
        stage: The row.
        times: Of the newest epochs.
        measured: Their median, in seconds.
        predicted: Seconds per epoch, by the plan.
        tolerance: Share of the measured time by which the prediction may miss it.
        done: Epochs finished.
    """

    stage: Stage
    times: tuple[EpochTime, ...]
    measured: float
    predicted: Estimate
    tolerance: float
    done: int

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted.value - self.measured) / self.measured

    @property
    def beyond(self) -> bool:
        """Whether the prediction misses by more than the job tolerates."""
        return abs(self.error) > self.tolerance

    def __str__(self) -> str:
        far = self.measured / self.predicted.value - 1
        return (
            f"epochs take {duration(self.measured)} where {between(self.predicted)} s were "
            f"predicted, {100 * abs(far):.0f} % {'more' if far > 0 else 'less'} (median of the "
            f"last {len(self.times)})"
        )


def drift_of(plan: Plan, epochs: Sequence[EpochRecord]) -> Drift | None:
    """Measured against predicted; `None` while there is too little to compare.

    Args:
        plan: What the run follows now.
        epochs: Those that it has finished, each once, in order.
    """
    finished = max((one.epoch for one in epochs), default=-1)
    if not 0 <= finished < plan.epochs:
        return None
    index = plan.stage_of(finished)
    stage = plan.stages[index]
    start = sum(row.epochs for row in plan.stages[:index])
    times = [time_of(one) for one in epochs if one.epoch >= start and one.training_seconds]
    newest = tuple(times[1:][-LOOK_BACK:])
    if len(newest) < MIN_EPOCHS or stage.predicted_epoch_seconds is None:
        return None
    return Drift(
        stage=stage,
        times=newest,
        measured=median(time.seconds for time in newest),
        predicted=stage.predicted_epoch_seconds,
        tolerance=plan.job.goal.tolerance,
        done=finished + 1,
    )
