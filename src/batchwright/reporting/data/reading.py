"""What a summary says, as plain numbers and words: the one source of tables, figures and page."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from batchwright.records import Check, EpochRecord, Estimate, Plan, RunSummary, Stage
from batchwright.records.run import reached_epoch
from batchwright.records.text.formatting import (
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
from batchwright.reporting.data.worker_curves import Part, WorkerCurve, told_parts, worker_curves

SIMULATED = (
    "This cluster was simulated: gradients, losses and accuracies are real. Times of training are "
    "computed from the step times that the plan predicts with, so they do not test its prediction."
)


def simulated_word(summary: RunSummary) -> str:
    """``simulated `` before the seconds of a simulated cluster, nothing before real ones."""
    return "simulated " if summary.simulated else ""


def measured_word(summary: RunSummary) -> str:
    """What the seconds of the run's epochs are: ``measured`` or ``simulated``."""
    return "simulated" if summary.simulated else "measured"


def training_words(summary: RunSummary, seconds: float) -> str:
    """Seconds of training in words, those of a simulated cluster named so."""
    return f"{duration(seconds)}{' simulated' if summary.simulated else ''}"


# ------------------------------------------------------------------------------------ where it went


def worker_rows(summary: RunSummary) -> list[list[str]]:
    """The workers over all epochs in words: head first, then a row for each.

    The local batch is that of the last epoch in which the worker took part. Processor time of
    loader processes goes by beside the other times, and stands last where there is any.
    """
    curves = worker_curves(summary)
    loaded = any(one.loading_cpu_seconds for one in curves)
    parts = told_parts(summary)
    last = "exchange" if "wait" in parts else "exchange and wait"
    head = ["worker", "local batch", "samples", *parts[:-1], last]
    rows = [[*head, "loaders (CPU)"] if loaded else head]
    return rows + [
        [
            one.label,
            f"{one.epochs[-1].local_batch_size:,}",
            f"{one.samples:,}",
            *(duration(one.seconds(part)) for part in parts),
            *([duration(one.loading_cpu_seconds)] if loaded else []),
        ]
        for one in curves
    ]


def accounting(summary: RunSummary, worker: WorkerCurve | None = None) -> list[tuple[str, float]]:
    """Where the wall time went, as (part, seconds): parts that sum to ``wall_seconds``.

    Input, compute, wait and communication are, epoch by epoch, the mean over the workers, or those
    of ``worker`` alone. ``wait`` is missing where the records count it as communication. ``other``
    is what no clock claims, epochs without the worker among it. Clocks that claim more than the
    wall time (epochs from before a resume are not part of it) leave ``other`` at 0, and the parts
    then sum to the claims.

    Of a simulated cluster only its own seconds are told, those of training: they are never added
    to real ones.
    """
    of_workers = [_mean_seconds(summary, part, worker) for part in told_parts(summary)]
    if summary.simulated:
        total = sum(epoch.training_seconds for epoch in summary.epochs)
        parts: list[tuple[str, float]] = list(zip(told_parts(summary), of_workers, strict=True))
        return [*parts, ("other", max(0.0, total - sum(of_workers)))]
    claims: list[tuple[str, float]] = [
        ("set-up", summary.setup_seconds),
        *zip(told_parts(summary), of_workers, strict=True),
        ("evaluation", sum(epoch.evaluation_seconds for epoch in summary.epochs)),
        ("checkpoints", sum(epoch.checkpoint_seconds for epoch in summary.epochs)),
    ]
    claimed = sum(seconds for _, seconds in claims)
    return [*claims, ("other", max(0.0, summary.wall_seconds - claimed))]


def whole_accounting(summary: RunSummary) -> list[tuple[str, float]]:
    """`accounting`, and around it what the command did besides training: all that was waited for.

    Of a run that was continued that is only what the last command did, and its parts say so. Of a
    simulated cluster the same as `accounting`.
    """
    parts = accounting(summary)
    if summary.simulated:
        return parts
    whose = " (last command)" if summary.resumed else ""
    before, after = (
        [(one.name + whose, one.seconds) for one in told]
        for told in (summary.before, summary.after)
    )
    return [*before, *parts, *after]


def accounting_rows(summary: RunSummary) -> list[list[str]]:
    """Part, time and share of `whole_accounting`; last, of all together."""
    parts = whole_accounting(summary)
    total = sum(seconds for _, seconds in parts)
    return [
        *([name, duration(s), percent(s / total if total else 0.0)] for name, s in parts),
        ["all", duration(total), ""],
    ]


def _mean_seconds(summary: RunSummary, part: Part, worker: WorkerCurve | None) -> float:
    if worker is not None:
        return worker.seconds(part)
    name = f"{part}_seconds"
    return sum(
        fmean(getattr(one, name) for one in epoch.workers)
        for epoch in summary.epochs
        if epoch.workers
    )


# -------------------------------------------------------------------- predicted against measured

_MANY_TIMES = 1.5
"""From this ratio on either way, what was measured is so many times what was predicted."""


@dataclass(frozen=True)
class Comparison:
    """What was predicted for a stage beside what was measured: seconds an epoch, or bytes.

    With `is_share` an accuracy in [0, 1], whose error is told in points.
    """

    stage: int
    predicted: Estimate | None
    measured: float | None
    fastest: float | None
    slowest: float | None
    is_share: bool = False

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: above 1 it took more than was predicted."""
        if self.predicted is None or self.measured is None or not self.predicted.value:
            return None
        return self.measured / self.predicted.value

    @property
    def points(self) -> float | None:
        """100 (measured - predicted), of shares."""
        if self.predicted is None or self.measured is None:
            return None
        return 100 * (self.measured - self.predicted.value)

    @property
    def inside(self) -> bool | None:
        """Whether what was measured lies inside the predicted interval."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted.low <= self.measured <= self.predicted.high

    def against(self, more: str = "more", less: str = "less") -> str:
        """What was measured, counted from what was predicted: `5.3 % more`, `2.4 times as long`."""
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
        """How right the prediction was, in a few words: `5.3 % more, inside the 95 % interval`."""
        told = self.against()
        if self.inside is None:
            return told
        return f"{told}, {'inside' if self.inside else 'outside'} the 95 % interval"


def memory_comparisons(summary: RunSummary) -> list[Comparison]:
    """Peak tensor bytes of the worker that took the most, one comparison per stage of the plan."""
    found = []
    for index, (stage, epochs) in enumerate(_stages(summary)):
        peaks = [one.peak_bytes for epoch in epochs for one in epoch.workers if one.peak_bytes]
        peak = max(peaks, default=None)
        found.append(Comparison(index, stage.predicted_bytes, peak, None, None))
    return found


def _stages(summary: RunSummary) -> list[tuple[Stage, list[EpochRecord]]]:
    """Each stage of the plan with the epochs that were trained by it."""
    ends = list(accumulate(stage.epochs for stage in summary.plan.stages))
    found: list[list[EpochRecord]] = [[] for _ in ends]
    for epoch in summary.epochs:
        if epoch.epoch < ends[-1]:
            found[bisect_right(ends, epoch.epoch)].append(epoch)
    return list(zip(summary.plan.stages, found, strict=True))


def accuracy_comparison(summary: RunSummary) -> Comparison:
    """Held-out accuracy after the last epoch: of the plan, or the one that reached its target.

    Where a run went on for more epochs than were planned, it is that after the planned ones.
    """
    plan, chosen = summary.plan, summary.plan.chosen
    told, epochs = plan.epoch_accuracy, len(summary.epochs)
    if 0 < len(told) < epochs:
        measured = summary.epochs[len(told) - 1].top1
        return Comparison(0, told[-1], measured, None, None, is_share=True)
    early = ended_at_its_target(summary) and 0 < epochs <= len(told)
    reached = summary.accuracy if early or epochs == plan.epochs else None
    at_end = told[epochs - 1 if early else -1] if told else None
    predicted = at_end or (chosen.accuracy if chosen else None)
    return Comparison(0, predicted, reached, None, None, is_share=True)


def ended_at_its_target(summary: RunSummary) -> bool:
    """Whether training ended before the plan's last epoch, as an evaluation reached the target."""
    few = len(summary.epochs) < summary.plan.epochs
    return few and reached_epoch(summary.plan, summary.epochs) is not None


def epoch_accuracies(summary: RunSummary) -> dict[int, Comparison]:
    """Predicted and measured held-out accuracy of evaluated epochs, where something was predicted.

    By epoch, zero-based.
    """
    told = summary.plan.epoch_accuracy
    return {
        epoch.epoch: Comparison(0, told[epoch.epoch], epoch.top1, None, None, is_share=True)
        for epoch in summary.epochs
        if epoch.top1 is not None and epoch.epoch < len(told) and told[epoch.epoch] is not None
    }


def accuracy_words(summary: RunSummary) -> str:
    """A target that was missed, and how right accuracy was that was predicted epoch by epoch."""
    told, missed = epoch_accuracies(summary), _missed_target(summary)
    if not told:
        return missed
    worst = max(told, key=lambda epoch: abs(told[epoch].points or 0.0))
    inside = sum(bool(one.inside) for one in told.values())
    return missed + (
        f"Accuracy lay inside its predicted interval in {inside} of {counted(len(told), 'epoch')}; "
        f"furthest off, after epoch {worst + 1}, it was {told[worst].verdict}."
    )


def _missed_target(summary: RunSummary) -> str:
    """That a training which is over did not reach its target, in a sentence; else empty."""
    target = summary.plan.job.goal.target
    if target is None or not summary.ended or reached_epoch(summary.plan, summary.epochs):
        return ""
    best = summary.best_accuracy
    reached = "it was never evaluated" if best is None else f"the best is {percent(best)}"
    return f"goal.accuracy={target:g} was not reached: {reached}. "


def learnt_words(summary: RunSummary) -> str:
    """What a later plan can learn of accuracy, in a sentence; empty if it came as predicted."""
    reached = accuracy_comparison(summary)
    if reached.inside is not False:
        return ""
    return (
        f"Accuracy was {reached.verdict} of the prediction. A later plan learns from this run with "
        "`batchwright plan PROFILE.json --run RUN`; its choice then rests on the held-out images, "
        "too, so accuracy on them is no longer that on unseen ones."
    )


def memory_measured(summary: RunSummary) -> bool:
    """Whether a step of any stage was weighed."""
    return any(one.measured for one in memory_comparisons(summary))


def memory_note(summary: RunSummary) -> str:
    """What the measured memory is, or why there is none, in a sentence."""
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
    """One comparison per stage of the plan.

    Measured is the median over the stage's whole epochs, the first left out if there are more (it
    pays for what is done once), as in `RunSummary.measured_epoch_seconds`.
    """
    found = []
    for index, (stage, epochs) in enumerate(_stages(summary)):
        seconds = [epoch.training_seconds for epoch in epochs if epoch.whole]
        steady = seconds[1:] or seconds
        found.append(
            Comparison(
                stage=index,
                predicted=stage.predicted_epoch_seconds,
                measured=median(steady) if steady else None,
                fastest=min(steady, default=None),
                slowest=max(steady, default=None),
            )
        )
    return found


def compared_rows(summary: RunSummary, *, naming_epoch: bool = False) -> list[list[str]]:
    """Seconds per epoch, accuracy if predicted, peak memory if measured: head first, then rows.

    Of a simulated cluster nothing is said of how right the prediction was: it is what it goes by.

    Args:
        summary: Of the run.
        naming_epoch: Say after which epoch the accuracy is also where that is the plan's last.
    """
    plan, measured = summary.plan, measured_word(summary)

    def row(word: str, one: Comparison, shown: str, value: Callable[[float], str]) -> list[str]:
        stage = f", stage {stage_word(plan, one.stage)}" if len(plan.stages) > 1 else ""
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
    if (told := learnt.predicted) is not None:
        early = ended_at_its_target(summary) and learnt.measured is not None
        word = "held-out accuracy"
        if early or naming_epoch:
            planned = len(plan.epoch_accuracy) or plan.epochs
            word += f", epoch {len(summary.epochs) if early else planned}"
        times.append(row(word, learnt, shares_between(told), percent))
    if summary.simulated:
        return [cells[:-1] for cells in (head, *times)]
    peaks = [
        row("peak memory", one, in_bytes(one.predicted), size)
        for one in memory_comparisons(summary)
    ]
    return [head, *times, *(peaks if memory_measured(summary) else [])]


def pace_words(summary: RunSummary) -> tuple[str, str]:
    """The measured epoch against the predicted one: in a word or two, and with the figures."""
    whole = overall(summary)
    if whole.predicted is None:
        return whole.verdict, "the plan holds no prediction"
    predicted = f"{number(whole.predicted.value)} s an epoch predicted"
    if whole.measured is None:
        return whole.verdict, predicted
    told = f"{predicted}, {number(whole.measured)} s {measured_word(summary)} (median)"
    if summary.simulated:
        return "not tested", f"{told} from the same step times"
    mean = ", mean of all stages" if len(summary.plan.stages) > 1 else ""
    inside = "inside" if whole.inside else "outside"
    return whole.against("longer", "shorter"), f"{told}{mean}, {inside} the 95 % interval"


def overall(summary: RunSummary) -> Comparison:
    """The mean epoch of all stages that have both, predicted and measured, in one comparison.

    Of one stage it is that of `comparisons`. The interval is that of errors which all go the same
    way. Nothing is predicted or measured where no stage has both.
    """
    told = comparisons(summary)
    if len(told) == 1:
        return told[0]
    stages = summary.plan.stages
    both = [
        (stages[one.stage].epochs, one.predicted, one.measured)
        for one in told
        if one.predicted is not None and one.measured is not None
    ]
    epochs = sum(count for count, _, _ in both)
    if not epochs:
        some = next((one for one in told if one.predicted is not None), told[0])
        return Comparison(0, some.predicted, None, None, None)
    value, low, high, measured = (
        sum(count * seconds for count, seconds in column) / epochs
        for column in (
            [(count, one.value) for count, one, _ in both],
            [(count, one.low) for count, one, _ in both],
            [(count, one.high) for count, one, _ in both],
            [(count, seconds) for count, _, seconds in both],
        )
    )
    return Comparison(0, Estimate(value=value, low=low, high=high), measured, None, None)


def held_out_loss(plan: Plan | None) -> str:
    """What the held-out loss is called; it is cross entropy whatever loss is trained with."""
    own = plan is not None and plan.job.loss != "cross_entropy"
    return "held-out cross entropy" if own else "held-out loss"


def check_words(check: Check) -> str:
    """How right a plan's predictions were, in a sentence or two."""
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
    told = "".join(
        f"The plan's own step ({one.workers} x {one.local_batch_size}, {one.resolution} px) was "
        f"predicted {percent(abs(one.error))} too {'high' if one.error > 0 else 'low'}. "
        for one in times
        if one.planned
    )
    which = ", with the plan's own," if told else ""
    verdict = "more than" if check.missed else "within"
    inside = f"{sum(one.inside for one in times)} of {counted(len(times), 'step time')}"
    if peaks:
        inside += f" and {sum(one.inside for one in peaks)} of {counted(len(peaks), 'memory peak')}"
    return (
        f"{told}Predicted step times{which} miss the measured ones by "
        f"{percent(check.median_error)} in the median, {verdict} the {percent(check.tolerance)} of "
        f"goal.tolerance, and by {percent(max(abs(one.error) for one in times))} at worst; "
        f"{inside} lie inside their 95 % interval." + rounds
    )


def refit_words(summary: RunSummary) -> str:
    """What the measured epochs would have changed, in a sentence; empty if nothing was refitted."""
    refit = summary.refit
    if refit is None:
        return ""
    stage = summary.plan.stages[0]
    choice = f"{counted(refit.workers, 'worker')} with global batch {refit.global_batch_size:,}"
    same = (refit.workers, refit.global_batch_size) == (stage.workers, stage.global_batch_size)
    side = "below" if refit.error < 0 else "above"
    return (
        f"The predicted seconds per epoch are {percent(abs(refit.error))} {side} the measured "
        f"ones, more than the {percent(refit.tolerance)} of goal.tolerance. Fitted again with what "
        "was measured, an epoch takes "
        f"{in_seconds(refit.refitted)} s, and the plan "
        + (f"stays at {choice}." if same else f"becomes {choice}.")
    )


def training_clock(summary: RunSummary) -> list[float]:
    """Seconds of training by the end of each epoch."""
    clock, seconds = [], 0.0
    for epoch in summary.epochs:
        seconds += epoch.training_seconds
        clock.append(seconds)
    return clock


def accuracy(epoch: EpochRecord | None) -> str:
    """An epoch's held-out accuracy with the counts behind it."""
    if epoch is None or epoch.top1 is None:
        return "not evaluated"
    return f"{percent(epoch.top1)} ({epoch.val_correct:,} of {epoch.val_count:,})"


def last_evaluated(summary: RunSummary) -> EpochRecord | None:
    """The last epoch with a held-out accuracy."""
    return next((epoch for epoch in reversed(summary.epochs) if epoch.top1 is not None), None)
