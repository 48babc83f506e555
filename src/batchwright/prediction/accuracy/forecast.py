r"""Predicts the rest of a running training from its own evaluations.

The learning curve (`learning`) is fitted to the run: other tasks give its likely slope, and the
run gives the rest. An evaluation while the rate is still high counts as one of a whole training of
as many samples whose logit u is :math:`d (f - f_E)` higher (`falls_short`).

The first usable evaluation and the last one are fitted. The distance by which evaluations at a high
rate fall short is much the same in all of them, so intervals by all of them would be too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from batchwright.prediction.accuracy.learning import falls_short, fit_learning
from batchwright.prediction.accuracy.trainings import MIN_STEPS, Candidate, Observed
from batchwright.records import EpochRecord, Estimate, Plan
from batchwright.records.run import is_over
from batchwright.records.text.formatting import percent

REACH = 4
"""Samples of the longest training that is predicted, over those seen so far: further on the curve
bends. Its intervals were checked with trainings four times as long (`FORM_ERROR`); of ends twelve
times as far, few lay inside (docs/log.md)."""


class Forecast(NamedTuple):
    """The prediction of the rest of a training."""

    # Held-out accuracy after the last epoch, a share; `None` where the end is too far ahead, where
    # `goal.accuracy` is likely to end the training sooner, and with `goal.accuracy` after a single
    # evaluation.
    end: Estimate | None = None
    # Epochs that the training is likely to take, where `goal.accuracy` may end it; `None` where
    # that is too far ahead, and after a single evaluation, which does not show how steeply this
    # task learns.
    epochs: int | None = None


def forecast(plan: Plan, factors: Sequence[float], epochs: Sequence[EpochRecord]) -> Forecast:
    """Predict the rest of a run from its own evaluations.

    There is no prediction if the last epoch was not evaluated, or is the end of the training;
    before `MIN_STEPS` steps, and as long as the rate rises; and for plans that predict no accuracy,
    as the curve does not cover such trainings.

    Args:
        plan: The plan that the run follows.
        factors: Rate at the end of each epoch of the plan, as a share of the peak.
        epochs: The finished epochs, in order; at least one.
    """
    done, batches = epochs[-1].epoch + 1, {stage.global_batch_size for stage in plan.stages}
    over = done >= plan.epochs or is_over(plan, epochs)
    if over or len(batches) > 1 or not any(plan.epoch_accuracy[-1:]):
        return Forecast()
    (batch,), of_epoch = batches, plan.data.train_samples
    first = max(MIN_STEPS * batch / of_epoch, plan.learning_rate.warmup_epochs)
    averaged = plan.average_epochs is not None
    short = [falls_short(factor, factors[-1], averaged=averaged) for factor in factors]
    usable = [
        Observed(
            plan.update,
            batch,
            of_epoch * (one.epoch + 1),
            one.top1,
            one.val_count,
            short=short[one.epoch],
        )
        for one in epochs
        if one.epoch + 1 >= first
        and one.val_count is not None
        and one.top1 is not None
        and one.top1 <= 1  # a loop of the user's own may have another measure
    ]
    if not usable or usable[-1].samples < of_epoch * done:
        return Forecast()
    seen, held_out = usable[:1] + usable[1:][-1:], usable[-1].held_out
    curve = fit_learning(seen, classes=plan.data.even_classes, optimizers=(plan.update,))

    def after(epoch: int) -> Estimate:
        training = Candidate(plan.update, batch, of_epoch * epoch)
        return curve.evaluated(training, short[epoch - 1], held_out)

    furthest, target = min(plan.epochs, REACH * done), plan.job.goal.target
    end = after(plan.epochs) if furthest == plan.epochs else None
    if target is None:
        return Forecast(end)
    if len(seen) == 1:
        return Forecast()
    evaluated = (one for one in range(done + 1, furthest + 1) if plan.evaluates_after(one - 1))
    reaching = next((one for one in evaluated if after(one).value >= target), None)
    if reaching is not None and reaching < plan.epochs:
        return Forecast(epochs=reaching)
    return Forecast(end, plan.epochs if end else None)


def straying(plan: Plan, epochs: Sequence[EpochRecord], end: Estimate | None = None) -> str:
    """A line on an accuracy outside its predicted interval; empty if the last epoch's is inside.

    Of several epochs on the same side of their intervals only the first has a line.

    Args:
        plan: The plan that the run follows.
        epochs: The finished epochs, in order; at least one.
        end: The accuracy at the end that is predicted now; `None`: there is none yet.
    """
    side = _side(plan, epochs[-1])
    if not side or any(_side(plan, one) == side for one in epochs[:-1]):
        return ""
    last, planned = epochs[-1], plan.epoch_accuracy[-1]
    expected, measured = plan.epoch_accuracy[last.epoch], last.top1
    if expected is None or planned is None or measured is None:
        return ""
    low, high = percent(expected.low), percent(expected.high)
    line = (
        f"held-out accuracy after epoch {last.epoch + 1} is {percent(measured)}, "
        f"{side} the {low} to {high} that the plan predicted"
    )
    if end is None:
        near = range(ceil(plan.epochs / REACH), plan.epochs)
        first = next((one for one in near if plan.evaluates_after(one - 1)), 0)
        if first <= last.epoch + 1 or plan.job.goal.target is not None:  # a target ends it
            return line
        return f"{line}; what is expected at the end is told from epoch {first} on"
    now, then = percent(end.value), percent(planned.value)
    return f"{line}; at the end about {now} is expected now, not {then}"


def _side(plan: Plan, epoch: EpochRecord) -> str:
    """Whether an accuracy is ``below`` or ``above`` its interval; empty if inside or not known."""
    predicted = plan.epoch_accuracy
    expected = predicted[epoch.epoch] if epoch.epoch < len(predicted) else None
    if expected is None or epoch.top1 is None or expected.low <= epoch.top1 <= expected.high:
        return ""
    return "below" if epoch.top1 < expected.low else "above"
