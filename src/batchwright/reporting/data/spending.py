"""Time and cost of a run: planned, so far, and expected at its end."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records import Estimate, Plan, RunSummary
from batchwright.reporting.data.accounting import epochs_seconds
from batchwright.reporting.data.live_run import EpochNow
from batchwright.reporting.data.reading import overall


@dataclass(frozen=True)
class Spending:
    """Seconds of a run, and their cost.

    Attributes:
        planned: Predicted seconds of the whole training; `None` without a prediction.
        so_far: Seconds until now.
        expected: Seconds of the whole training at the speed so far, in the epochs that it is likely
            to take; `None` while the speed is unknown.
        epochs: Epochs that the run is likely to take.
        hourly: Price of all workers for an hour; without prices the number of workers.
        priced: Whether `hourly` is a price.
    """

    planned: Estimate | None
    so_far: float
    expected: float | None
    epochs: int
    hourly: float
    priced: bool

    def cost(self, seconds: float) -> float:
        """Cost of a number of seconds; without prices worker-hours."""
        return self.hourly * seconds / 3600


def spending(
    summary: RunSummary,
    now: EpochNow | None = None,
    stride: int = 1,
    likely_epochs: int | None = None,
) -> Spending:
    """Time and cost of a run.

    The seconds are those of training, evaluation and checkpoints. For a simulated cluster they are
    those of training alone, since the others are real seconds.

    Args:
        summary: The run, or its finished epochs.
        now: The epoch in progress.
        stride: Of the run's epochs every ``stride``-th is in ``summary``; the others are assumed to
            be alike.
        likely_epochs: Epochs that the run itself expects to take; unset: those of the plan.
    """
    plan, epochs = summary.plan, summary.epochs
    trained = sum(one.training_seconds for one in epochs)
    total = trained if summary.simulated else epochs_seconds(summary)
    count = epochs[-1].epoch + 1 if stride > 1 and epochs else len(epochs)
    so_far = total * count / len(epochs) if epochs else 0.0
    hourly, priced = hourly_price(plan)
    expected = None
    done = epochs[-1].epoch + 1 if epochs else 0
    likely = likely_epochs or plan.likely_epochs(done)
    left = range(done, likely)
    if epochs:
        spent = (total - trained) / len(epochs)
        expected = so_far + _left_seconds(summary, left) + spent * len(left)
    elif now is not None and now.expected_seconds is not None:
        expected = now.expected_seconds * likely
    going = now.seconds if now else 0.0
    return Spending(plan.whole_seconds, so_far + going, expected, likely, hourly, priced)


def hourly_price(plan: Plan) -> tuple[float, bool]:
    """Price of the plan's workers for an hour, and true; without prices their number, and false."""
    goal = plan.job.goal
    prices = {one.kind: one.price for one in goal.kinds}
    counts = [(one.kind, one.count) for one in plan.kinds] or [("", plan.workers)]
    found = [(count, prices.get(kind) or goal.price) for kind, count in counts]
    if any(price is None for _, price in found):
        return float(plan.workers), False
    return sum(count * (price or 0.0) for count, price in found), True


def _left_seconds(summary: RunSummary, left: range) -> float:
    """Training seconds of the remaining epochs: predicted ones times the error factor so far."""
    plan, whole = summary.plan, overall(summary)
    mean = sum(one.training_seconds for one in summary.epochs) / len(summary.epochs)
    measured = summary.measured_epoch_seconds or mean
    if whole.predicted is None or not whole.measured or not whole.predicted.value:
        return measured * len(left)
    factor = whole.measured / whole.predicted.value
    found, start = 0.0, 0
    for stage in plan.stages:
        count = len(range(max(start, left.start), min(left.stop, start + stage.epochs)))
        predicted = stage.predicted_epoch_seconds
        found += count * (factor * predicted.value if predicted else measured)
        start += stage.epochs
    return found
