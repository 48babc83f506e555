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

REACH = 4
"""Nothing is told of more than so many times the samples that were seen: the law is a straight line
that bends. Trainings four times as long are what its intervals were checked by (`FORM_ERROR`); of
ends twelve times as far, few lay inside (docs/log.md)."""


class Forecast(NamedTuple):
    """What is expected of the rest of a training.

    Attributes:
        end: Held-out accuracy after the last epoch, a share; `None` where it is too far ahead, and
            where `goal.accuracy` is likely to end the training sooner, or may after a single
            evaluation.
        epochs: That the training takes, by the middle of what is expected, where `goal.accuracy`
            may end it; `None` where that is not told: too far ahead, or after a single evaluation,
            which says nothing of how steeply this task learns.
    """

    end: Estimate | None = None
    epochs: int | None = None


def forecast(plan: Plan, factors: Sequence[float], epochs: Sequence[EpochRecord]) -> Forecast:
    """The rest of a run by its own evaluations; nothing where these do not tell it.

    That is where the last epoch was not evaluated, or is the end; before `MIN_STEPS` steps, and as
    long as the rate rises; and where the plan predicts no accuracy, as the law knows nothing of
    such a training.

    Args:
        plan: That it follows.
        factors: Share of the peak rate at the end of each epoch of the plan.
        epochs: That have finished, in order; at least one.
    """
    done, batches = epochs[-1].epoch + 1, {stage.global_batch_size for stage in plan.stages}
    over = done >= plan.epochs or reached_epoch(plan, epochs) is not None
    if over or len(batches) > 1 or not any(plan.epoch_accuracy[-1:]):
        return Forecast()
    (batch,), of_epoch = batches, plan.data.train_samples
    first = max(MIN_STEPS * batch / of_epoch, plan.learning_rate.warmup_epochs)
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
        if one.epoch + 1 >= first
        and one.val_count is not None
        and one.top1 is not None
        and one.top1 <= 1  # a loop of the user's own may count otherwise
    ]
    if not told or told[-1].samples < of_epoch * done:
        return Forecast()
    seen, held_out = told[:1] + told[1:][-1:], told[-1].held_out
    law = fit_learning(seen, classes=plan.data.even_classes, optimizers=(plan.update,))

    def after(epoch: int) -> Estimate:
        training = Candidate(plan.update, batch, of_epoch * epoch)
        return law.counted(training, short[epoch - 1], held_out)

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
