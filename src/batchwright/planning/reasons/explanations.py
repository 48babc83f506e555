"""Why the predicted choices are what they are, with their numbers and what else there was.

The planner decides; nothing here does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp, inf

from batchwright.planning.candidates.choice import FAR, Choice, Progress
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.learnt import Learnt
from batchwright.planning.candidates.local_batches import largest_shares
from batchwright.planning.candidates.table import Row, mebibytes
from batchwright.planning.reasons import alternatives
from batchwright.prediction.accuracy.quality import EPOCHS_NOTE
from batchwright.prediction.collective import fit_collectives
from batchwright.records import Goal, Job, OptimizerName, Prediction, Reason, Source, Stage
from batchwright.records.text.formatting import counted, counted_points, size

FAR_OFF = 2.0
"""Times the largest or smallest measured batch from which on a prediction is far from it."""

_FEW_LEVEL = 4  # level candidates that are named
_FEW_WORKERS = 8  # up to so many local batches are listed one by one


# --------------------------------------------------------------------------------------- workers


def workers(job: Job, choice: Choice, *, named: bool, mixing: str) -> Reason:
    """How many, of which kinds.

    Args:
        job: As given; its ``workers`` may be asked for.
        choice: What was chosen.
        named: Whether there are kinds to name.
        mixing: Why kinds are not mixed, in a sentence; empty if they are or there is one.
    """
    row = choice.row
    why, source = _why_workers(job, choice)
    sizes = {one.mix.workers: None for one in choice.level if one.mix is not row.mix}
    level = _level_words([counted(count, "worker") for count in sizes], job.goal)
    texts = [why, level, _exchange(row.mix), _stated(row.mix), mixing]
    return Reason(
        choice="workers",
        value=str(row.mix) if named else str(row.mix.workers),
        why=" ".join(text for text in texts if text),
        source=source,
        alternatives=(
            *alternatives.sizes(choice, named=named),
            *alternatives.objectives(choice, named=named),
        ),
    )


def _why_workers(job: Job, choice: Choice) -> tuple[str, Source]:
    goal = job.goal
    if job.launcher.one_worker:
        return "launch=in-process is one worker.", "asked"
    if job.workers != "auto":
        if {count for kind, _ in choice.row.mix.members for count in kind.measured} == {
            job.workers
        }:
            return "The number that was measured.", "measured"
        return f"Asked for.{_instead(choice)}", "asked"
    if len(choice.sizes) == 1:
        return "The only number of workers there is to choose within the limits.", "measured"
    if goal.objective != "knee":
        return f"That of the {_best_words(goal)} ({_objective(goal)}).", "predicted"
    if all(one.cost is not None for one in choice.sizes):
        return (
            "The least product of time and cost, each cluster at its knee: beyond it, one percent "
            "more cost buys less than one percent of the time.",
            "predicted",
        )
    return _why_size(choice, goal), "predicted"


def _best_words(goal: Goal) -> str:
    if goal.objective == "auto":
        within = counted_points(goal.accuracy_tolerance)
        return f"quickest candidate within {within} of the most accurate"
    return "most accurate candidate" if goal.objective == "accuracy" else "best candidate"


def _level_words(others: Sequence[str], goal: Goal, *, batches: bool = False) -> str:
    """What measurements cannot tell from the choice, in a sentence; empty if nothing.

    Args:
        others: Their names.
        goal: Says what is to be told.
        batches: Whether they differ in the batch, and so in accuracy.
    """
    if not others:
        return ""
    more = [f"{len(others) - _FEW_LEVEL} more"] if len(others) > _FEW_LEVEL else []
    named = " and ".join([*others[:_FEW_LEVEL], *more])
    mends = "a larger probe.budget may"
    if batches and goal.objective == "auto":
        mends = "a larger probe.budget may for their times, probe.learning for their accuracy"
    if goal.objective == "target-accuracy":
        mends = "finished runs of several batches, or a larger probe.budget, may"
    return f"Level with {named}: what was measured does not tell which is better; {mends}."


def _why_size(choice: Choice, goal: Goal) -> str:
    row = choice.row
    larger = [one for one in choice.sizes if one.mix.workers > row.mix.workers]
    if not larger:
        return (
            f"Each size up to here, at its own knee, saves more than {goal.doubling_gain:.1%} of "
            "the training time; there are no more workers within the limits."
        )
    step = min(larger, key=lambda one: (one.mix.workers, one.train_seconds))
    gain = 1 - step.train_seconds / row.train_seconds
    says = f"save {gain:.1%}" if gain > 0 else f"take {-gain:.1%} more"
    return (
        f"The smallest number whose next size up saves at most {goal.doubling_gain:.1%} of the "
        f"training time: {step.mix.workers} would {says} of {row.train_seconds:.3g} s."
    )


def _instead(choice: Choice) -> str:
    """What the plan would have chosen, and how it compares."""
    free, row = choice.free, choice.row
    if (free.mix, free.batch) == (row.mix, row.batch):
        return " The plan would choose the same."
    return (
        f" The plan itself would choose {free.mix.workers} worker(s) with global batch "
        f"{free.batch}: {alternatives.compared(free, row)}."
    )


def _objective(goal: Goal) -> str:
    return f"goal.objective={goal.objective}"


def _exchange(mix: ClusterOption) -> str:
    """What exchanging gradients takes, in a sentence."""
    kind, _ = mix.members[0]
    count, profile = mix.workers, kind.profile
    if count == 1:
        return "One worker has no gradients to exchange."
    if mix.assumed and kind.times.assumed(count):
        return f"More than the {kind.measured[-1]} that were measured: from the stated link."
    reduced = [one.workers for one in profile.collectives if one.operation == "all-reduce"]
    if max(reduced, default=0) < count:
        return ""
    size = profile.network.trained_bytes
    seconds = fit_collectives(profile.collectives).seconds(size, count)
    return f"Exchanging {mebibytes(size)} of gradients takes {1e3 * seconds:.1f} ms alone."


def _stated(mix: ClusterOption) -> str:
    stated = "; ".join(kind.stated for kind, _ in mix.members if kind.stated)
    return f"Assumed: {stated}." if stated else ""


# --------------------------------------------------------------------------------------- batches


def global_batch(job: Job, choice: Choice, bend: KneeFit | None, progress: Progress) -> Reason:
    """The global batch: asked for, the best, or the knee."""
    row, goal = choice.row, job.goal
    source: Source = "predicted"
    if job.global_batch != "auto":
        why, source = _why_asked(choice, goal), "asked"
    elif goal.objective == "knee":
        why = _why_knee(row, bend, goal)
    elif goal.objective == "target-accuracy":
        why = _why_target(row, goal, progress)
    elif goal.objective in ("auto", "accuracy"):
        why = _why_accurate(row, goal, progress)
    else:
        what = "time" if goal.objective == "time" else "cost"
        why = (
            f"The least predicted {what} of the candidates within the limits ({_objective(goal)})."
        )
    others = [str(one.batch) for one in choice.level if one.mix is row.mix]
    level = _level_words(others, goal, batches=True)
    return Reason(
        choice="global batch",
        value=f"{row.batch} samples",
        why=" ".join(text for text in (why, _less_accurate(job, choice), level) if text),
        source=source,
        alternatives=alternatives.batches(row, bend),
    )


def _why_accurate(row: Row, goal: Goal, progress: Progress) -> str:
    reached = progress.reached(row.batch)
    told = "" if reached is None else f": {reached.value:.1%}"
    if goal.objective == "accuracy":
        return (
            f"The most accurate of the candidates within the limits{told} held out, and of those "
            f"that are shown as equal the quickest ({_objective(goal)})."
        )
    return (
        "The least predicted time of the candidates within the limits that are as accurate as the "
        f"best within goal.accuracy_tolerance={goal.accuracy_tolerance:g}{told} held out "
        f"({_objective(goal)})."
    )


def _less_accurate(job: Job, choice: Choice) -> str:
    """What the choice gives up of accuracy, in a sentence; empty if little, or if not known."""
    best, row, goal = choice.accurate, choice.row, job.goal
    if best is None or best.accuracy is None or row.accuracy is None:
        return ""
    if best.accuracy - row.accuracy <= goal.accuracy_tolerance:
        return ""
    advice = "leave global_batch to the plan"
    if goal.objective != "auto":
        advice = "give goal.objective=auto"
    return (
        f"It is predicted to reach {row.accuracy:.1%} where {best.accuracy:.1%} is to be had in "
        f"{alternatives.share(best.train_seconds, row.train_seconds, 'time')}: {advice}."
    )


def _why_asked(choice: Choice, goal: Goal) -> str:
    row = choice.row
    why = f"Asked for; leaves {row.steps} steps an epoch"
    if row.steps < goal.least_steps:
        why += f", fewer than goal.least_steps={goal.least_steps}"
    return f"{why}.{_instead(choice)}"


def _how_sure(batch: int, progress: Progress) -> str:
    """With which probability the epochs that the plan trains reach the target, in words."""
    asked = f"{progress.confidence:g} (goal.confidence)"
    if progress.needed(batch) is not None:
        return f"the fewest that reach it with probability {asked}"
    chance = f"with probability {progress.chance(batch):.2g}"
    return f"the most that may be trained: they reach it {chance}, not {asked}"


def _why_target(row: Row, goal: Goal, progress: Progress) -> str:
    epochs = progress.epochs(row.batch)
    aim = f"goal.accuracy={goal.accuracy:g}"
    missed = progress.model(row.batch).missed
    more = f" Of those given, {missed}." if missed else ""
    if progress.chooses:
        return (
            f"The least predicted {goal.least} to {aim}: {counted(row.epochs, 'epoch')} of "
            f"{row.epoch_seconds:.3g} s, {_how_sure(row.batch, progress)}.{more}"
        )
    if epochs is not None:
        return (
            f"The least predicted time to goal.accuracy={goal.accuracy:g}: {epochs.value:.3g} "
            f"epochs ({epochs.low:.3g} to {epochs.high:.3g}) of {row.epoch_seconds:.3g} s.{more}"
        )
    if progress.relative_epochs(row.batch) == inf:
        return (
            f"No batch within the limits is known to reach goal.accuracy={goal.accuracy:g}: the "
            f"least time for the job's epochs.{more}"
        )
    return (
        f"The least predicted time to any accuracy, so to goal.accuracy={goal.accuracy:g}: epoch "
        "time over progress per sample (efficiency). No run with such a batch reached it, so the "
        "number of epochs is not known: seconds to the target are for as much progress as an epoch "
        f"with the base batch makes.{more}"
    )


def _why_knee(row: Row, bend: KneeFit | None, goal: Goal) -> str:
    if bend is None:
        return "The only candidate."
    texts = [_one_candidate(bend)] if len(bend.rows) == 1 else []
    texts.append(_knee_or_not(row, bend, goal))
    texts.append(_line_says(bend))
    texts.append(_kneedle_says(row, bend))
    return " ".join(text for text in texts if text)


def _one_candidate(bend: KneeFit) -> str:
    return f"There is one candidate only, {bend.rows[0].batch}."


def _knee_or_not(row: Row, bend: KneeFit, goal: Goal) -> str:
    share = f"{goal.doubling_gain:.1%}"
    if bend.row is None:
        return (
            f"There is no knee: each doubling up to here saves more than {share} of the time per "
            f"image; this is the largest batch that fits the memory and leaves at least "
            f"{goal.least_steps} steps an epoch."
        )
    if bend.line is not None and bend.line[0] == 0:
        return (
            "There is no knee: a step takes time in proportion to its batch, so a larger one saves "
            "nothing; this is the smallest candidate."
        )
    knee = bend.row
    saves = 1 - bend.per_sample(2 * knee.batch) / knee.per_sample
    says = f"saves at most {share} of the time per image: {2 * knee.batch} would save {saves:.1%}"
    if row.batch == knee.batch:
        return f"The smallest batch whose doubling {says}."
    missed = " and ".join(miss.text for miss in knee.misses)
    return (
        f"The nearest within the limits to the knee {knee.batch}, whose doubling {says}, but which "
        f"{missed}."
    )


def _line_says(bend: KneeFit) -> str:
    if not bend.closed_form:
        return ""
    return (
        f"The step time is a straight line in the batch, which puts the knee at "
        f"{bend.closed_form:.0f} samples."
    )


def _kneedle_says(row: Row, bend: KneeFit) -> str:
    if len(bend.rows) < 3:
        return ""
    if bend.kneedle is None:
        return "Kneedle over log2 of the same batches finds no knee."
    if bend.kneedle == row.batch:
        return "Kneedle over log2 of the same batches says the same."
    return (
        f"Kneedle over log2 of the same batches says {bend.kneedle}; its answer moves with the "
        "range of candidates."
    )


def local_batches(stage: Stage, mix: ClusterOption, totals: Sequence[int]) -> Reason:
    """Equal shares, or equal times, in one go or accumulated."""
    shares = "Equal shares"
    if len(mix.members) > 1:
        shares = "Shares with which all kinds take equal time, within the memory of each"
    passes = stage.accumulation_steps
    why = f"{shares}, each in one pass."
    if passes > 1:
        why = (
            f"{shares}, each in {passes} passes of at most {stage.micro_batch_size} images "
            "whose gradients are added up."
        )
    parts = zip(mix.members, largest_shares(mix, totals), strict=True)
    value = " + ".join(f"{count} x {share}" for (_, count), share in parts)
    if mix.workers <= _FEW_WORKERS:
        value = "+".join(map(str, stage.local_batch_sizes))
    return Reason(
        choice="local batches",
        value=f"{value} samples",
        why=why,
        source="predicted" if len(mix.members) > 1 else "assumed",
    )


# ---------------------------------------------------------------------------------------- memory


def memory(row: Row, prediction: Prediction, goal: Goal) -> tuple[Reason, ...]:
    """The predicted peak against the limit, and the largest batch under it."""
    kind, _ = row.mix.members[0]
    whose = "goal.memory" if goal.memory else "what the device has free for one worker"
    notes = [f"{note[0].upper()}{note[1:]}." for note in kind.memory.notes]
    peak = Reason(
        choice="memory",
        value=f"{mebibytes(prediction.peak_bytes.value)} per worker",
        why=" ".join(
            [
                f"At most {mebibytes(prediction.peak_bytes.high)} predicted for "
                f"{prediction.micro_batch_size} images at once; the limit is "
                f"{mebibytes(kind.limit)}, {whose}.",
                *notes,
            ]
        ),
        source="predicted",
    )
    largest = [
        f"{kind.largest(row.mix.workers, row.resolution)}"
        + (f" ({kind.name})" if len(row.mix.members) > 1 else "")
        for kind, _ in row.mix.members
    ]
    per_sample = kind.memory.bytes_per_sample(row.resolution)
    most = Reason(
        choice="largest local batch",
        value=f"{', '.join(largest)} samples",
        why=f"Up to there the upper end of the predicted peak stays within the limit, or it is all "
        f"the data; an image takes {size(per_sample)}.",
        source="predicted",
    )
    return peak, most


# ------------------------------------------------------------------------------------------ time


def epoch_time(row: Row, prediction: Prediction) -> Reason:
    """How the time was predicted, and how well that describes the measurements."""
    texts = [_described(row, index) for index in range(len(row.mix.members))]
    if prediction.extrapolated:
        texts.append("Batch, resolution or workers lie outside what was measured.")
    estimate = prediction.epoch_seconds
    return Reason(
        choice="epoch time",
        value=f"{estimate.value:.3g} s ({estimate.low:.3g} to {estimate.high:.3g})",
        why=" ".join(texts),
        source="assumed" if prediction.assumed else "predicted",
    )


def _described(row: Row, index: int) -> str:
    kind, _ = row.mix.members[index]
    whose = f"{kind.name}: " if len(row.mix.members) > 1 else ""
    counts = [n for n in kind.measured if n <= row.mix.workers] or [kind.measured[0]]
    side = min(
        kind.times.resolutions(counts[-1]), key=lambda side: (abs(side - row.resolution), side)
    )
    curve = kind.times.curve(counts[-1], side)
    measured = f"the {len(curve.batches)} measured batches"
    worst = f"{curve.line.largest_residual:.0%} away from one of them"
    how = (
        f"{whose}read off between {measured}, since no straight line fits them: the best one is "
        f"{worst}"
    )
    if curve.linear:
        how = (
            f"{whose}by the straight line that fits {measured} best; at its worst it is {worst}, "
            "which the interval allows for"
        )
    texts = [how, *([curve.caveat] if curve.caveat else []), *kind.times.notes]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)


def extrapolations(mix: ClusterOption, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """Which of a plan's steps are far larger or smaller than any that was measured there.

    Numbers of workers and resolutions that were not measured at all are told of elsewhere.
    """
    found: dict[tuple[int, str], Reason] = {}
    for stage in stages:
        first = 0
        for kind, count in mix.members:
            sizes = stage.local_batch_sizes[first : first + count]
            first += count
            measured = [
                point.local_batch_size
                for point in kind.profile.steps
                if (point.workers, point.resolution) == (mix.workers, stage.resolution)
            ]
            most, least = (min(end(sizes), stage.micro_batch_size) for end in (max, min))
            if measured and most >= FAR_OFF * max(measured):
                size, bound, edge = most, "at most", max(measured)
            elif measured and least <= min(measured) / FAR_OFF:
                size, bound, edge = least, "at least", min(measured)
            else:
                continue
            found[stage.resolution, kind.name] = Reason(
                choice="extrapolation",
                value=f"{counted(size, 'image')} at once on a worker, at {stage.resolution} px",
                why=f"Far from what was measured there, {bound} {edge} with "
                f"{counted(mix.workers, 'worker')}: its time, and what is chosen by it, may be far "
                "off. Probe with a larger probe.budget.",
                source="predicted",
            )
    return tuple(found.values())


def training_time(job: Job, prediction: Prediction) -> Reason:
    """The whole training and what it costs, against the limits."""
    time, cost = prediction.train_seconds, prediction.cost
    value = "" if time is None else f"{time.value:.3g} s ({time.low:.3g} to {time.high:.3g})"
    why = f"{counted(job.epochs, 'epoch')}, and the evaluations among them."
    if job.goal.deadline is not None:
        why += f" goal.deadline={job.goal.deadline:g} s holds for the upper end."
    if cost is not None:
        value += f", cost {cost.value:.3g} ({cost.low:.3g} to {cost.high:.3g})"
    else:
        why += " No price was given, so no cost."
    if job.goal.max_cost is not None:
        why += f" goal.max_cost={job.goal.max_cost:g} holds for the upper end."
    return Reason(choice="training time", value=value, why=why, source="predicted")


# -------------------------------------------------------------------------------------- progress


def progress_of(
    job: Job, batch: int, progress: Progress, in_training: str = ""
) -> tuple[Reason, ...]:
    """What the batch means for progress per sample, for epochs and for accuracy.

    Args:
        job: Resolved.
        batch: Global batch, in samples.
        progress: By what is known.
        in_training: What is to be said of the noise scale besides, in a sentence.
    """
    return (
        *_noise_scale(job, batch, progress, in_training),
        *_epochs(job, batch, progress),
        _accuracy(job, batch, progress),
    )


def _noise_scale(job: Job, batch: int, progress: Progress, in_training: str) -> tuple[Reason, ...]:
    model = progress.model(batch)
    scale = model.noise_scale
    by_trials = progress.by_trials(batch) and progress.epochs(batch) is not None
    told = [one for one in model.notes if not (by_trials and one.startswith(EPOCHS_NOTE))]
    notes = " ".join(f"{note[0].upper()}{note[1:]}." for note in told)
    notes = f"{notes} {in_training}".strip()
    if scale is None:
        return (
            Reason(choice="gradient noise scale", value="not known", why=notes, source="assumed"),
        )
    share = 1 / (1 + batch / scale.value)
    made = f"a sample makes about {share:.0%} of the progress that it makes at tiny batches"
    if batch > 2 * scale.value:
        why = f"The batch is well above it: {made}, and a larger batch costs more of it."
    elif batch > scale.value / 2:
        why = f"The batch is about as large: {made}."
    else:
        why = f"The batch is well below it, so little progress per sample is lost: {made}."
    efficiency = progress.efficiency(batch)
    if efficiency is not None:
        why += (
            f" At the planned rate that is {efficiency.value:.0%} of what a sample makes in a "
            f"batch of {job.base_batch} (base_batch)."
        )
    return (
        Reason(
            choice="gradient noise scale",
            value=f"{scale.value:.3g} samples ({scale.low:.3g} to {scale.high:.3g})",
            why=f"{why} {notes}".rstrip(),
            source="measured",
        ),
    )


def _epochs(job: Job, batch: int, progress: Progress) -> tuple[Reason, ...]:
    epochs = progress.epochs(batch)
    if epochs is None:
        return ()
    most = FAR * progress.planned
    whence = "as the trials tell" if progress.by_trials(batch) else "from the runs given"
    why = f"To goal.accuracy={job.goal.accuracy:g}, {whence}."
    if progress.chooses:
        why += (
            f" The plan trains {counted(job.epochs, 'epoch')} of epochs={progress.planned} at "
            f"most, {_how_sure(batch, progress)}; training ends with the first evaluation that "
            "reaches it."
        )
    elif epochs.value > job.epochs:
        enough = f"give epochs={ceil(epochs.value)}" if epochs.value <= most else "far too few"
        why += f" The job trains only {job.epochs}: {enough}."

    def told(count: float) -> str:
        if count > most:
            return f"more than {most}"
        return "less than 1" if count < 1 else f"{count:.3g}"

    value = told(epochs.value)
    if epochs.value <= most:
        value += f" ({told(epochs.low)} to {told(epochs.high)})"
    return (Reason(choice="epochs to target", value=value, why=why, source="predicted"),)


def _by_trials(job: Job, learnt: Learnt) -> str:
    trials = len(learnt.model.observed) - learnt.runs
    runs = f" and {counted(learnt.runs, 'run')} given" if learnt.runs else ""
    told = (
        f"Held out, after {counted(job.epochs, 'epoch')}: {counted(trials, 'trial')}, short "
        f"trainings of up to {learnt.longest:,} images{runs}, continued by the law of learning and "
        "by what other tasks showed. The interval is for one seed."
    )
    return f"{told} {learnt.note}".rstrip()


def rates_tried(job: Job, batch: int, optimizer: OptimizerName, learnt: Learnt | None) -> str:
    """What trials told of an optimizer's rate; empty where they had the usual one alone."""
    if learnt is None:
        return ""
    model, planned = learnt.model, learnt.candidate(optimizer, batch, job.epochs)
    scales = sorted({exp(one.offset) for one in model.observed if one.optimizer == optimizer})
    if len({1.0, *scales}) == 1:
        return ""
    best, usual = (model.accuracy(one).value for one in (planned, planned._replace(offset=0.0)))
    whence = "Trials and runs" if learnt.runs else "Trials"
    told = (
        f"{whence} at {', '.join(f'{one:.3g}' for one in scales)} times the usual rate, continued "
        f"by the law of learning: {exp(planned.offset):.3g} times it reaches {best:.1%}, "
        f"the usual one {usual:.1%}."
    )
    if (failing := model.least_failing(optimizer)) < inf:
        told += f" At {exp(failing):.3g} times it nothing was learnt."
    return told


def _accuracy(job: Job, batch: int, progress: Progress) -> Reason:
    accuracy = progress.accuracy(batch, job.epochs)
    if accuracy is None:
        return Reason(
            choice="accuracy",
            value="not known",
            why=f"{progress.unknown} Finished runs of this task would tell, also those of a loop "
            "of your own: `batchwright plan --run RUN`.",
            source="assumed",
        )
    if progress.law is not None:
        why = _by_trials(job, progress.law)
    else:
        why = (
            f"Held out, after {counted(job.epochs, 'epoch')}, by the runs given at equal progress."
        )
    until = progress.accuracy_until(batch, job.epochs)
    if until is not None:
        why += (
            f" They ended after as much as {until:.3g} epochs: that is what they reached by then, "
            "and how far more epochs go is assumed."
        )
    return Reason(
        choice="accuracy",
        value=f"{accuracy.value:.1%} ({accuracy.low:.1%} to {accuracy.high:.1%})",
        why=why,
        source="predicted",
    )
