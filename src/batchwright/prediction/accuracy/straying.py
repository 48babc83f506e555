"""Whether accuracy strays from its prediction while a training goes on, and what that means."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from batchwright.prediction.accuracy.forecast import REACH
from batchwright.records import EpochRecord, Estimate, Plan
from batchwright.records.text.formatting import percent


def straying(plan: Plan, epochs: Sequence[EpochRecord], end: Estimate | None = None) -> str:
    """What to say of the accuracy of the last epoch, in a line; empty if it is as predicted.

    Of several epochs on the same side of their intervals only the first is worth a line. They are
    all that have finished, in order; ``end`` is what is expected now of the accuracy at the end.
    """
    side = _side(plan, epochs[-1])
    if not side or any(_side(plan, one) == side for one in epochs[:-1]):
        return ""
    last, planned = epochs[-1], plan.epoch_accuracy[-1]
    expected, measured = plan.epoch_accuracy[last.epoch], last.top1
    if expected is None or planned is None or measured is None:
        return ""
    low, high = percent(expected.low), percent(expected.high)
    told = (
        f"held-out accuracy after epoch {last.epoch + 1} is {percent(measured)}, "
        f"{side} the {low} to {high} that the plan predicted"
    )
    if end is None:
        return f"{told}{_from_when_on(plan, last.epoch + 1)}"
    now, then = percent(end.value), percent(planned.value)
    return f"{told}; at the end about {now} is expected now, not {then}"


def _from_when_on(plan: Plan, done: int) -> str:
    """From which epoch on a run tells its end, in words; empty if it should, or a target ends it.

    So soon the end is too far ahead (`REACH`), and further epochs on the same side say nothing.
    """
    near = range(ceil(plan.epochs / REACH), plan.epochs)
    first = next((one for one in near if plan.evaluates_after(one - 1)), done)
    if first <= done or plan.job.goal.target is not None:
        return ""
    return f"; what is expected at the end is told from epoch {first} on"


def _side(plan: Plan, epoch: EpochRecord) -> str:
    """``below`` or ``above`` its interval; empty inside, or where one of both is not known."""
    told = plan.epoch_accuracy
    expected = told[epoch.epoch] if epoch.epoch < len(told) else None
    if expected is None or epoch.top1 is None or expected.low <= epoch.top1 <= expected.high:
        return ""
    return "below" if epoch.top1 < expected.low else "above"
