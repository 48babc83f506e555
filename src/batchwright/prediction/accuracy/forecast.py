r"""What a run's own evaluations tell of its end, while it trains.

By the law of learning (`learning`): other tasks tell how steep it is likely to be, the run tells
the rest. An evaluation while the rate is still high counts as one of a whole training of as many
samples whose logit u is :math:`d (f - f_E)` higher (`falls_short`).

The first evaluation that tells anything and the last one are taken. What is missing while the rate
is high is much the same in all of them, so by all together intervals would come out too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchwright.prediction.accuracy.learning import falls_short, fit_learning
from batchwright.prediction.accuracy.trainings import MIN_STEPS, Candidate, Observed
from batchwright.records import EpochRecord, Estimate, Plan
from batchwright.records.run import reached_epoch


class Forecast(NamedTuple):
    """What is expected of the rest of a training.

    Attributes:
        end: Held-out accuracy after the last epoch, a share.
        epochs: After which `goal.accuracy` is reached, by the middle of what is expected; `None`
            without such a goal, beyond the last epoch, and after a single evaluation, which tells
            nothing of how steeply this task learns.
    """

    end: Estimate
    epochs: int | None


def forecast(
    plan: Plan, factors: Sequence[float], epochs: Sequence[EpochRecord]
) -> Forecast | None:
    """The rest of a run by its own evaluations.

    Args:
        plan: That it follows.
        factors: Share of the peak rate at the end of each epoch of the plan.
        epochs: That have finished, in order; at least one.

    Returns:
        `None` where the last of them was not evaluated, came after too few steps, or is the end;
        and where the plan predicts no accuracy, as the law tells nothing of such a training.
    """
    done, batches = epochs[-1].epoch + 1, {stage.global_batch_size for stage in plan.stages}
    over = done >= plan.epochs or reached_epoch(plan, epochs) is not None
    if over or len(batches) > 1 or not any(plan.epoch_accuracy[-1:]):
        return None
    (batch,), of_epoch = batches, plan.data.train_samples
    averaged = plan.average_epochs is not None
    short = [falls_short(factor, factors[-1], averaged=averaged) for factor in factors]
    told = [
        Observed(
            plan.update,
            batch,
            of_epoch * (one.epoch + 1),
            one.top1,
            one.val_count,
            short=short[one.epoch],
        )
        for one in epochs
        if one.top1 is not None
        and one.val_count is not None
        and of_epoch * (one.epoch + 1) >= MIN_STEPS * batch
    ]
    if not told or told[-1].samples < of_epoch * done:
        return None
    seen, held_out = told[:1] + told[1:][-1:], told[-1].held_out
    law = fit_learning(seen, classes=len(plan.data.classes), optimizers=(plan.update,))

    def after(epoch: int) -> Estimate:
        training = Candidate(plan.update, batch, of_epoch * epoch)
        return law.counted(training, short[epoch - 1], held_out)

    target, reached = plan.job.goal.target, None
    if target is not None and len(seen) > 1:
        later = (one for one in range(done + 1, plan.epochs + 1) if plan.evaluates_after(one - 1))
        reached = next((one for one in later if after(one).value >= target), None)
    return Forecast(after(plan.epochs), reached)
