r"""Whether accuracy strays from its prediction while a training goes on, and what that means.

What the prediction does not know, such as the task's level, is common to all epochs: an epoch whose
logit is off by r moves that of the end by

.. math:: r \, \min(1, \sigma_E^2 / \sigma_e^2)

with the standard errors of the end and of the epoch; the rest of :math:`\sigma_e` is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from batchwright.prediction.accuracy.trainings import MIN_LEARNT, above_guessing, with_guessing
from batchwright.records import EpochRecord, Estimate, Plan
from batchwright.records.text.formatting import percent


def straying(plan: Plan, epochs: Sequence[EpochRecord]) -> str:
    """What to say of the accuracy of the last epoch, in a line; empty if it is as predicted.

    Of several epochs on the same side of their intervals only the first is worth a line. They are
    all that have finished, in order.
    """
    side = _side(plan, epochs[-1])
    if not side or any(_side(plan, one) == side for one in epochs[:-1]):
        return ""
    last, end = epochs[-1], plan.epoch_accuracy[-1]
    expected, measured = plan.epoch_accuracy[last.epoch], last.top1
    if expected is None or end is None or measured is None:
        return ""
    low, high = percent(expected.low), percent(expected.high)
    told = (
        f"held-out accuracy after epoch {last.epoch + 1} is {percent(measured)}, "
        f"{side} the {low} to {high} that the plan predicted"
    )
    now = _moved(end, expected, measured, len(plan.data.classes))
    if now is None or last.epoch + 1 == plan.epochs:
        return told
    return f"{told}; at the end about {percent(now)} is expected now, not {percent(end.value)}"


def _side(plan: Plan, epoch: EpochRecord) -> str:
    """``below`` or ``above`` its interval; empty inside, or where one of both is not known."""
    told = plan.epoch_accuracy
    expected = told[epoch.epoch] if epoch.epoch < len(told) else None
    if expected is None or epoch.top1 is None or expected.low <= epoch.top1 <= expected.high:
        return ""
    return "below" if epoch.top1 < expected.low else "above"


def _moved(end: Estimate, expected: Estimate, measured: float, classes: int) -> float | None:
    """Accuracy at the end, a share, by what an epoch was off; `None` if that tells nothing."""
    off = _logit(measured, classes) - _logit(expected.value, classes)
    wide, wider = (_logit(one.high, classes) - _logit(one.low, classes) for one in (end, expected))
    if not wider:  # guessing was expected, whose logit may be anything
        return None
    at = _logit(end.value, classes) + off * min(1.0, (wide / wider) ** 2)
    return with_guessing(1 / (1 + exp(-at)), classes)


def _logit(accuracy: float, classes: int) -> float:
    """Logit of accuracy freed of guessing."""
    unit = above_guessing(accuracy, classes, 1 - MIN_LEARNT**2)
    return log(unit / (1 - unit))
