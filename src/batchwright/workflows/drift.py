"""Measured seconds of a run's epochs beside the plan's prediction. Needs no planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from batchwright.records import EpochRecord, Estimate, Plan, Stage
from batchwright.records.text.formatting import between, duration

LOOK_BACK = 3
"""Newest epochs whose median is compared, so that a single disturbed epoch has no effect."""

MIN_EPOCHS = 2
"""Fewest epochs to compare. A stage's first epoch is never compared: loaders start, caches are
cold."""


@dataclass(frozen=True)
class EpochTime:
    """Seconds of an epoch of training.

    Attributes:
        seconds: The whole training of the epoch, without evaluation and checkpoints.
        computing_seconds: Computing, input included, of the worker that computed longest. The rest
            is exchanging and waiting.
    """

    seconds: float
    computing_seconds: float


def time_of(epoch: EpochRecord) -> EpochTime:
    """The time of a finished epoch; all of it counts as computing if workers' times are unknown."""
    seconds = epoch.training_seconds
    computed = [one.input_seconds + one.compute_seconds for one in epoch.workers]
    return EpochTime(seconds, min(seconds, max(computed, default=0.0) or seconds))


@dataclass(frozen=True)
class Drift:
    """Measured and predicted seconds per epoch, over the newest epochs of the current stage.

    Attributes:
        stage: The plan's stage that the run is in.
        times: Times of the newest epochs.
        measured: Median of these epochs, in seconds.
        predicted: Predicted seconds per epoch.
        tolerance: Relative error of the prediction that is tolerated.
        done: Number of finished epochs.
    """

    stage: Stage
    times: tuple[EpochTime, ...]
    measured: float
    predicted: Estimate
    tolerance: float
    done: int

    @property
    def error(self) -> float:
        """Relative error, (predicted - measured) / measured."""
        return (self.predicted.value - self.measured) / self.measured

    @property
    def beyond(self) -> bool:
        """Whether the error exceeds the tolerance."""
        return abs(self.error) > self.tolerance

    def __str__(self) -> str:
        far = self.measured / self.predicted.value - 1
        return (
            f"epochs take {duration(self.measured)} where {between(self.predicted)} s were "
            f"predicted, {100 * abs(far):.0f} % {'more' if far > 0 else 'less'} (median of the "
            f"last {len(self.times)})"
        )


def drift_of(plan: Plan, epochs: Sequence[EpochRecord]) -> Drift | None:
    """The drift of a run; `None` if too few epochs are finished, or nothing was predicted.

    Args:
        plan: The plan that the run follows now.
        epochs: The finished epochs, each once, in order.
    """
    plan = plan.as_trained({one.epoch: one.global_batch_size for one in epochs})
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
