"""Figures and texts of a run's summary: the common source of tables, figures and pages.

Where the time went is in `accounting`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from batchwright.records import Check, EpochRecord, Estimate, Plan, RunSummary, Stage
from batchwright.records.base import sum_of
from batchwright.records.run import is_over, reached_epoch, stalled_words
from batchwright.records.text.formatting import (
    between,
    counted,
    duration,
    in_bytes,
    in_seconds,
    number,
    percent,
    shares_between,
    size,
)
from batchwright.reporting.data.plan_words import stage_word

SIMULATED = (
    "This cluster was simulated: gradients, losses and accuracies are real. Times of training are "
    "computed from the step times that the plan predicts with, so they do not test its prediction."
)


def simulated_word(summary: RunSummary) -> str:
    """``simulated `` for the seconds of a simulated cluster; empty for real ones."""
    return "simulated " if summary.simulated else ""


def measured_word(summary: RunSummary) -> str:
    """``measured`` or ``simulated``, for the seconds of the run's epochs."""
    return "simulated" if summary.simulated else "measured"


def training_words(summary: RunSummary, seconds: float) -> str:
    """Seconds of training as text, marked if they are those of a simulated cluster."""
    return f"{duration(seconds)}{' simulated' if summary.simulated else ''}"


_MANY_TIMES = 1.5
"""Ratio of measured to predicted from which on (or below its inverse) it is given as a factor."""


@dataclass(frozen=True)
class Comparison:
    """A prediction for a stage beside the measurement: seconds per epoch, or bytes.

    With `is_share` it is an accuracy in [0, 1], whose error is given in points.
    """

    stage: int
    predicted: Estimate | None
    measured: float | None
    is_share: bool = False

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; `None` if one of them is missing."""
        if self.predicted is None or self.measured is None or not self.predicted.value:
            return None
        return self.measured / self.predicted.value

    @property
    def points(self) -> float | None:
        """Measured minus predicted share, in points; `None` if one of them is missing."""
        if self.predicted is None or self.measured is None:
            return None
        return 100 * (self.measured - self.predicted.value)

    @property
    def inside(self) -> bool | None:
        """Whether the measurement lies inside the predicted interval; `None` if one is missing."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted.low <= self.measured <= self.predicted.high

    def against(self, more: str = "more", less: str = "less") -> str:
        """The measurement relative to the prediction: `5.3 % more`, `2.4 times as long`."""
        if self.predicted is None:
            return "nothing was predicted"
        if self.is_share and self.points is not None:
            return f"{abs(self.points):.1f} points {less if self.points < 0 else more}"
        if self.ratio is None:
            return "nothing was measured"
        if not 1 / _MANY_TIMES < self.ratio < _MANY_TIMES:
            much = {"longer": "long", "shorter": "long"}.get(more, "much")
            return f"{number(self.ratio)} times as {much}"
        return f"{100 * abs(self.ratio - 1):.1f} % {less if self.ratio < 1 else more}"

    @property
    def verdict(self) -> str:
        """How accurate the prediction was, in words: `5.3 % more, inside the 95 % interval`."""
        words = self.against()
        if self.inside is None:
            return words
        return f"{words}, {'inside' if self.inside else 'outside'} the 95 % interval"


def memory_comparisons(summary: RunSummary) -> list[Comparison]:
    """Peak tensor bytes of the worker with the most, one comparison per stage of the plan."""
    found = []
    for index, (stage, epochs) in enumerate(_stages(summary)):
        peaks = [one.peak_bytes for epoch in epochs for one in epoch.workers if one.peak_bytes]
        peak = max(peaks, default=None)
        found.append(Comparison(index, stage.predicted_bytes, peak))
    return found


def _stages(summary: RunSummary) -> list[tuple[Stage, list[EpochRecord]]]:
    """Each stage of the plan with its trained epochs."""
    ends = list(accumulate(stage.epochs for stage in summary.plan.stages))
    found: list[list[EpochRecord]] = [[] for _ in ends]
    for epoch in summary.epochs:
        if epoch.epoch < ends[-1]:
            found[bisect_right(ends, epoch.epoch)].append(epoch)
    return list(zip(summary.plan.stages, found, strict=True))


def accuracy_comparison(summary: RunSummary) -> Comparison:
    """Held-out accuracy after the plan's last epoch, or after the one that ended training.

    If a run went on for more epochs than were planned, it is the accuracy after the planned ones.
    """
    plan, chosen = summary.plan, summary.plan.chosen
    predictions, epochs = plan.epoch_accuracy, len(summary.epochs)
    if 0 < len(predictions) < epochs:
        measured = summary.epochs[len(predictions) - 1].top1
        return Comparison(0, predictions[-1], measured, is_share=True)
    early = ended_early(summary) and 0 < epochs <= len(predictions)
    reached = summary.accuracy if early or epochs == plan.epochs else None
    at_end = predictions[epochs - 1 if early else -1] if predictions else None
    predicted = at_end or (chosen.accuracy if chosen else None)
    return Comparison(0, predicted, reached, is_share=True)


def loss_comparison(summary: RunSummary) -> Comparison:
    """Held-out loss after the plan's last epoch.

    Nothing counts as predicted with a target accuracy, as training ends where it is reached, and
    where an evaluation ended training early.
    """
    plan, epochs = summary.plan, summary.epochs
    ends = plan.job.goal.target is None and not ended_early(summary)
    measured = epochs[-1].val_loss if len(epochs) == plan.epochs else None
    return Comparison(0, plan.end_loss if ends else None, measured)


def ended_early(summary: RunSummary) -> bool:
    """Whether an evaluation ended training before the plan's last epoch."""
    return len(summary.epochs) < summary.plan.epochs and is_over(summary.plan, summary.epochs)


def epoch_accuracies(summary: RunSummary) -> dict[int, Comparison]:
    """Predicted and measured held-out accuracy by zero-based epoch, for epochs that have both."""
    predictions = summary.plan.epoch_accuracy
    return {
        at: Comparison(0, predictions[at], epoch.top1, is_share=True)
        for at, epoch in ((one.epoch, one) for one in summary.epochs)
        if epoch.top1 is not None and at < len(predictions) and predictions[at] is not None
    }


def accuracy_words(summary: RunSummary) -> str:
    """What ended training, a missed target, and the errors of single epochs, in sentences."""
    compared, stalled = epoch_accuracies(summary), stalled_words(summary.plan, summary.epochs)
    missed = f"{stalled}. " if stalled else ""
    target, best = summary.plan.job.goal.target, summary.best_accuracy
    if target is not None and summary.ended and not reached_epoch(summary.plan, summary.epochs):
        reached = "it was never evaluated" if best is None else f"the best is {percent(best)}"
        missed += f"goal.accuracy={target:g} was not reached: {reached}. "
    if not compared:
        return missed
    worst = max(compared, key=lambda epoch: abs(compared[epoch].points or 0.0))
    inside = sum(bool(one.inside) for one in compared.values())
    return missed + (
        f"Accuracy lay inside its predicted interval in {inside} of "
        f"{counted(len(compared), 'epoch')}; furthest off, after epoch {worst + 1}, it was "
        f"{compared[worst].verdict}."
    )


def learnt_words(summary: RunSummary) -> str:
    """How a later plan can learn from a mispredicted accuracy; empty if it was inside.

    It is empty, too, if `goal.patience` ended the run before its last epoch, or its batch changed:
    plans do not learn from such a run.
    """
    reached = accuracy_comparison(summary)
    stalled = ended_early(summary) and not reached_epoch(summary.plan, summary.epochs)
    batches = {one.global_batch_size for one in summary.epochs}
    if stalled or reached.inside is not False or len(batches) > 1:
        return ""
    return (
        f"Accuracy was {reached.verdict} of the prediction. A later plan learns from this run with "
        "`batchwright plan PROFILE.json --run RUN`; its choice then rests on the held-out images, "
        "too, so accuracy on them is no longer that on unseen ones."
    )


def memory_measured(summary: RunSummary) -> bool:
    """Whether the memory of any stage was measured."""
    return any(one.measured for one in memory_comparisons(summary))


def memory_note(summary: RunSummary) -> str:
    """What the measured memory includes, or why it was not measured, in a sentence."""
    if memory_measured(summary):
        return (
            "Memory is what the tensors of one worker take at most: of all workers the largest. "
            "Python, its libraries and the images of the data set come on top."
        )
    if summary.simulated:
        return "The memory of simulated workers is not known: all of them run in one process."
    return (
        "Memory was not measured in this run. On the CPU it takes PyTorch's profiler: a loop of "
        "your own turns it on with Session(profile_memory=True), and `batchwright check` measures "
        "the plan's own step."
    )


def comparisons(summary: RunSummary) -> list[Comparison]:
    """Predicted and measured seconds per epoch, one comparison per stage of the plan.

    Measured is the median over the stage's whole epochs. The first one is left out if there are
    more, since it includes one-time work, as in `RunSummary.measured_epoch_seconds`.
    """
    found = []
    for index, (stage, epochs) in enumerate(_stages(summary)):
        seconds = [epoch.training_seconds for epoch in epochs if epoch.whole]
        steady = seconds[1:] or seconds
        measured = median(steady) if steady else None
        found.append(Comparison(index, stage.predicted_epoch_seconds, measured))
    return found


def compared_rows(
    summary: RunSummary, *, naming_epoch: bool = False, running: bool = False
) -> list[list[str]]:
    """Seconds per epoch, accuracy and loss if predicted, and memory if measured, as table rows.

    The first row is the head. For a simulated cluster the column of errors is left out, since its
    times are computed from the predictions.

    Args:
        summary: The run's summary.
        naming_epoch: Name the epoch of accuracy and loss also if it is the plan's last one.
        running: The run goes on, so what was not measured may still be.
    """
    plan, measured = summary.plan, measured_word(summary)
    several = len(plan.stages) > 1

    def row(
        word: str,
        one: Comparison,
        shown: str,
        value: Callable[[float], str],
        *,
        whole: bool = False,
    ) -> list[str]:
        # Accuracy and loss are those of the whole training.
        stage = f", stage {stage_word(plan, one.stage)}" if several and not whole else ""
        if one.measured is None and running:
            return [word + stage, shown, "not yet", "not yet"]
        found = f"not {measured}" if one.measured is None else value(one.measured)
        return [
            word + stage,
            shown,
            found,
            one.verdict.replace("the 95 % interval", "the interval"),
        ]

    head = ["figure", "predicted (95 %)", measured, f"{measured} was"]
    times = [
        row("seconds per epoch", one, in_seconds(one.predicted), number)
        for one in comparisons(summary)
    ]
    learnt = accuracy_comparison(summary)
    if (estimate := learnt.predicted) is not None:
        early = ended_early(summary) and learnt.measured is not None
        word = "held-out accuracy"
        if early or naming_epoch:
            planned = len(plan.epoch_accuracy) or plan.epochs
            word += f", epoch {len(summary.epochs) if early else planned}"
        times.append(row(word, learnt, shares_between(estimate), percent, whole=True))
    loss = loss_comparison(summary)
    if loss.predicted is not None:
        word = held_out_loss(plan) + (f", epoch {plan.epochs}" if naming_epoch else "")
        times.append(row(word, loss, between(loss.predicted), number, whole=True))
    if summary.simulated:
        return [cells[:-1] for cells in (head, *times)]
    peaks = [
        row("peak memory", one, in_bytes(one.predicted), size)
        for one in memory_comparisons(summary)
    ]
    return [head, *times, *(peaks if memory_measured(summary) else [])]


def pace_words(summary: RunSummary) -> tuple[str, str]:
    """The measured epoch relative to the predicted one: in a few words, and with the figures."""
    whole = overall(summary)
    if whole.predicted is None:
        return whole.verdict, "the plan holds no prediction"
    predicted = f"{number(whole.predicted.value)} s an epoch predicted"
    if whole.measured is None:
        return whole.verdict, predicted
    words = f"{predicted}, {number(whole.measured)} s {measured_word(summary)} (median)"
    if summary.simulated:
        return "not tested", f"{words} from the same step times"
    mean = ", mean of all stages" if len(summary.plan.stages) > 1 else ""
    inside = "inside" if whole.inside else "outside"
    return whole.against("longer", "shorter"), f"{words}{mean}, {inside} the 95 % interval"


def overall(summary: RunSummary) -> Comparison:
    """Predicted and measured seconds of the mean epoch, over all stages that have both.

    For a single stage it is that stage's comparison. If no stage has both, nothing counts as
    measured.
    """
    found = comparisons(summary)
    if len(found) == 1:
        return found[0]
    stages = summary.plan.stages
    both = [
        (stages[one.stage].epochs, one.predicted, one.measured)
        for one in found
        if one.predicted is not None and one.measured is not None
    ]
    epochs = sum(count for count, _, _ in both)
    if not epochs:
        some = next((one for one in found if one.predicted is not None), found[0])
        return Comparison(0, some.predicted, None)
    measured = sum(count * seconds for count, _, seconds in both) / epochs
    return Comparison(0, sum_of(((count, one) for count, one, _ in both), epochs), measured)


def held_out_loss(plan: Plan | None) -> str:
    """The name of the held-out loss, which is cross entropy whatever the training loss is."""
    own = plan is not None and plan.job.loss != "cross_entropy"
    return "held-out cross entropy" if own else "held-out loss"


def check_words(check: Check) -> str:
    """How accurate a plan's predictions were, in a sentence or two."""
    times = [one for one in check.points if one.quantity == "step_seconds"]
    peaks = [one for one in check.points if one.quantity != "step_seconds"]
    rounds = ""
    if check.rounds:
        worst = max(check.rounds, key=lambda one: abs(one.difference))
        rounds = (
            f" Rounds of local batches {worst.pair.large_batch} and {worst.pair.small_batch}, "
            f"planned to end together, differ by {percent(abs(worst.difference))}"
            + (" at worst." if len(check.rounds) > 1 else ".")
        )
    if check.median_error is None:
        return "No step could be measured." + rounds
    own = "".join(
        f"The plan's own step ({one.workers} x {one.local_batch_size}, {one.resolution} px) was "
        f"predicted {percent(abs(one.error))} too {'high' if one.error > 0 else 'low'}. "
        for one in times
        if one.planned
    )
    which = ", with the plan's own," if own else ""
    verdict = "more than" if check.missed else "within"
    inside = f"{sum(one.inside for one in times)} of {counted(len(times), 'step time')}"
    if peaks:
        inside += f" and {sum(one.inside for one in peaks)} of {counted(len(peaks), 'memory peak')}"
    return (
        f"{own}Predicted step times{which} miss the measured ones by "
        f"{percent(check.median_error)} in the median, {verdict} the {percent(check.tolerance)} of "
        f"goal.tolerance, and by {percent(max(abs(one.error) for one in times))} at worst; "
        f"{inside} lie inside their 95 % interval." + rounds
    )


def refit_words(summary: RunSummary) -> str:
    """What a refit with the measured epochs changes, in a sentence; empty without a refit."""
    refit = summary.refit
    if refit is None:
        return ""
    stage = summary.plan.stages[0]
    choice = f"{counted(refit.workers, 'worker')} with global batch {refit.global_batch_size:,}"
    same = (refit.workers, refit.global_batch_size) == (stage.workers, stage.global_batch_size)
    # As in the table beside it, the prediction is the base; the tolerance has the other base.
    missed = Comparison(0, refit.predicted, refit.measured).against()
    return (
        f"Epochs missed their prediction: they took {missed} time, beyond goal.tolerance "
        f"({percent(refit.tolerance)} of the measured time). Fitted again with what was measured, "
        "an epoch takes "
        f"{in_seconds(refit.refitted)} s, and the plan "
        + (f"stays at {choice}." if same else f"becomes {choice}.")
    )


def training_clock(summary: RunSummary) -> list[float]:
    """Seconds of training until the end of each epoch.

    Where epochs before another one are left out, as on the page of a long run, they count as many
    seconds as that one.
    """
    clock, seconds, last = [], 0.0, -1
    for epoch in summary.epochs:
        count = epoch.epoch - last
        seconds, last = seconds + count * epoch.training_seconds, epoch.epoch
        clock.append(seconds)
    return clock


def accuracy(epoch: EpochRecord | None) -> str:
    """An epoch's held-out accuracy with its counts of images."""
    if epoch is None or epoch.top1 is None:
        return "not evaluated"
    return f"{percent(epoch.top1)} ({epoch.val_correct:,} of {epoch.val_count:,})"


def last_evaluated(summary: RunSummary) -> EpochRecord | None:
    """The last epoch with a held-out accuracy."""
    return next((epoch for epoch in reversed(summary.epochs) if epoch.top1 is not None), None)
