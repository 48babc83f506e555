"""Which candidate to train with: limits first, then the objective."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from batchwright.errors import PlanError
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.level import RowError
from batchwright.planning.candidates.objectives import (
    MIN_SAVING,
    OBJECTIVES,
    Objective,
    target_seconds,
    tolerance,
)
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Row, in_memory
from batchwright.planning.chosen import Chosen
from batchwright.planning.refusals import (
    OF_LENGTH,
    Trained,
    best_to_be_had,
    check_progress,
    target_miss,
    why_none,
)
from batchwright.prediction.collective import fit_collectives
from batchwright.records import Alternative, Goal, Job, Reason, Source
from batchwright.records.text.formatting import counted, percent, significant

_MIN_POINTS = 0.05  # hundredths of a share
_MANY_TIMES = 3.0  # of something, from which on a ratio reads better than a share
_MAX_SIZES = 8  # of a long list of clusters, those nearest to the chosen one


@dataclass(frozen=True)
class Choice:
    """What is trained, and what else could have been.

    Attributes:
        objective: By which it was taken.
        row: The candidate.
        free: What would be chosen if neither batch nor workers were asked for.
        sizes: The best candidate of each cluster by the objective, small to large, at the chosen
            resolution.
        others: What the other objectives would choose, by name.
        level: Candidates that measurements cannot tell from it, as far as they were free to choose.
        accurate: The quickest of the most accurate, were batch and workers free and accuracy the
            aim; `None` where nothing tells, or where the epochs are chosen to reach an accuracy.
        passed: One with a smaller value that was passed over, since it is far from what was
            measured, which does not tell the two apart; `None`: none was.
        dearer: One that costs more and saves so little time that it was passed over; `None`: none.
    """

    objective: Objective
    row: Row
    free: Row
    sizes: tuple[Row, ...]
    others: dict[str, Row]
    level: tuple[Row, ...]
    accurate: Row | None = None
    passed: Row | None = None
    dearer: Row | None = None


def settled_goal(goal: Goal, progress: Progress) -> Goal:
    """The goal with an objective that can be followed.

    In place of `auto` with an accuracy to reach it is `target-accuracy`, as far as anything tells
    how progress depends on the batch.
    """
    if goal.objective == "auto" and goal.accuracy is not None and progress.compares:
        return goal.model_copy(update={"objective": "target-accuracy"})
    return goal


def aimed(goal: Goal, row: Row, progress: Progress, trained: Trained) -> Row:
    """A candidate with its accuracy, and its time to the target if that is the objective.

    Where the plan chooses the epochs they are those that the target takes or, if the limits allow
    fewer, these.
    """
    most = row.epochs
    if progress.chooses:
        longest = trained(row, progress.planned) if progress.assumed else row
        most = _epochs_within(longest, trained)
        if (progress.least or 1) <= most < row.epochs:
            row = trained(row, most)
    reached, full = (progress.reached(row.batch, n) for n in (row.epochs, max(row.epochs, most)))
    # A chance that rests on other tasks is no share of tries to divide the time by.
    to_target = goal.objective == "target-accuracy" and not progress.assumed
    return replace(
        row,
        accuracy=None if reached is None else reached.value,
        full_accuracy=None if full is None else full.value,
        assumed=progress.assumed,
        target_seconds=target_seconds(row, progress) if to_target else None,
        misses=(*row.misses, *target_miss(row, progress)),
    )


def _epochs_within(row: Row, trained: Trained) -> int:
    """The most epochs, up to its own, in which a candidate keeps all limits."""
    over = {miss.limit for miss in row.misses}
    if not over:
        return row.epochs
    # Time and cost go with the epochs, so fewer may keep them.
    if not over <= OF_LENGTH:
        return 0
    return bisect_left(range(1, row.epochs), True, key=lambda n: bool(trained(row, n).misses))


def choose(
    job: Job,
    rows: Sequence[Row],
    knees: Sequence[KneeFit],
    progress: Progress,
    error: RowError,
    trained: Trained,
    far_off: Callable[[Row], bool],
) -> Choice:
    """The candidate to train with.

    Args:
        job: Resolved; a global batch or number of workers it asks for is kept.
        rows: All candidates, from `aimed`.
        knees: The knee of each cluster and resolution.
        progress: What a batch means for progress.
        error: Standard error of a candidate's time, as a share of it.
        trained: What it would be with another number of epochs.
        far_off: Whether a candidate is far from what was measured.

    Raises:
        PlanError: No candidate is within the limits, and the message names the nearest; or nothing
            tells what the objective needs to know.
    """
    side = max(row.resolution for row in rows)  # `plain` trains at the highest
    here = [row for row in rows if row.resolution == side]
    knees = [knee for knee in knees if knee.resolution == side]
    workers = 1 if job.launcher.one_worker else job.workers
    mine = [row for row in here if workers in ("auto", row.cluster.workers)]
    asked = [row for row in mine if job.global_batch in ("auto", row.batch)]
    if not asked:
        raise PlanError(
            f"no candidate has workers={job.workers} and global_batch={job.global_batch}: leave "
            "one of them to the plan"
        )
    progress = replace(progress, smallest=min(row.batch for row in mine))
    check_progress(job, progress)
    allowed = [row for row in asked if not row.misses]
    if not allowed:
        refusal = best_to_be_had(job.goal, asked, progress, trained)
        if refusal and job.global_batch != "auto" and any(not row.misses for row in mine):
            refusal += ", or leave global_batch to the plan"
        raise PlanError(refusal or why_none(job, asked, trained))
    free = [row for row in here if not row.misses and not row.asked] or allowed
    by = {name: kind(job.goal, knees, progress) for name, kind in OBJECTIVES.items()}
    objective = by[job.goal.objective]

    def taken(aim: Objective, rows: Sequence[Row]) -> tuple[Row, Row, Row]:
        """The best, that near to what was measured, and that which costs less and is as good."""
        best = aim.best(rows)
        near = aim.known(best, rows, far_off, error)
        return best, near, aim.thrifty(near, rows, far_off, error)

    least, near, row = taken(objective, allowed)
    if row.epochs != progress.trained(row.batch):  # the limits allow no more
        objective = replace(objective, progress=progress.within(row.epochs))
    told = not progress.chooses and progress.tells_accuracy
    others = {name: taken(by[name], allowed)[-1] for name in _others(job.goal, allowed, progress)}
    return Choice(
        objective=objective,
        row=row,
        free=taken(objective, free)[-1],
        sizes=tuple(objective.sizes(allowed)),
        others={name: other for name, other in others.items() if other is not row},
        level=objective.level(row, allowed, error),
        accurate=by["auto"].best(free) if told else None,
        passed=least if least is not near else None,
        dearer=near if near is not row else None,
    )


def _others(goal: Goal, rows: Sequence[Row], progress: Progress) -> list[str]:
    """Other objectives that could be followed."""
    if progress.chooses:  # each candidate has its own epochs, which mean nothing else
        return []
    names = ["knee", "time"]
    if progress.tells_accuracy:
        names += ["auto"] if progress.assumed else ["auto", "accuracy"]
    if all(row.cost is not None for row in rows):
        names.append("cost")
    if progress.compares:
        names.append("target-accuracy")
    return [name for name in names if name != goal.objective]


# -------------------------------------------------------------------------------------- in words


def workers_reason(
    job: Job, choice: Choice, threads: int | None, *, named: bool, apart: bool
) -> Reason:
    """How many workers, of which kinds.

    ``threads``: of each, as measured, if that is known; ``named``: whether there are kinds to name;
    ``apart``: whether there are several that cannot be mixed.
    """
    row = choice.row
    why, source = _why_workers(job, choice)
    dearer = ""
    if choice.dearer is not None:
        other = f"{_named(choice.dearer, named=named)} ({compared(choice.dearer, row)})"
        dearer = (
            f"Passed over: {other}, by which less than {percent(MIN_SAVING, 0)} of the time is "
            "saved, no more than measurements may be off."
        )
    sizes = {one.cluster.workers: None for one in choice.level if one.cluster is not row.cluster}
    level = choice.objective.level_words([counted(count, "worker") for count in sizes])
    stated = "; ".join(kind.stated for kind, _ in row.cluster.members if kind.stated)
    if threads is not None and threads > 1:
        why += f" Each with {threads} compute threads, as it was timed."
    texts = [why, dearer, level, _exchange(row.cluster), f"Assumed: {stated}." if stated else ""]
    if apart:
        texts.append(
            "Kinds are not mixed: they were not measured together, and link.latency and "
            "link.bandwidth are not given."
        )
    others = [one for one in choice.sizes if one.cluster is not row.cluster]
    near = sorted(others, key=lambda one: abs(one.cluster.workers - row.cluster.workers))[
        :_MAX_SIZES
    ]
    alternatives = [(_named(one, named=named), one) for one in others if one in near]
    aims: dict[Row, list[str]] = {}
    for name, one in sorted(choice.others.items()):
        aims.setdefault(one, []).append(name)
    alternatives += [
        (f"{_named(one, named=named)} (goal.objective={' or '.join(names)})", one)
        for one, names in aims.items()
    ]
    return Chosen(
        str(row.cluster) if named else str(row.cluster.workers),
        " ".join(filter(None, texts)),
        source,
        alternatives=compared_with(row, alternatives),
    ).reason("workers")


def _why_workers(job: Job, choice: Choice) -> tuple[str, Source]:
    if job.launcher.one_worker:
        return "launch=in-process is one worker.", "asked"
    if job.workers != "auto":
        if {n for kind, _ in choice.row.cluster.members for n in kind.measured} == {job.workers}:
            return "The number that was measured.", "measured"
        return f"Asked for.{_instead(choice)}", "asked"
    if len(choice.sizes) == 1:
        return "The only number of workers there is to choose within the limits.", "measured"
    return choice.objective.why_size(choice.row, choice.sizes), choice.objective.source


def _instead(choice: Choice) -> str:
    """What the plan would have chosen, and how it compares."""
    free, row = choice.free, choice.row
    if (free.cluster, free.batch) == (row.cluster, row.batch):
        return " The plan would choose the same."
    return (
        f" The plan itself would choose {counted(free.cluster.workers, 'worker')} with "
        f"global batch {free.batch}: {compared(free, row)}."
    )


def _exchange(cluster: ClusterOption) -> str:
    """What exchanging gradients takes, in a sentence."""
    kind, _ = cluster.members[0]
    count, profile = cluster.workers, kind.profile
    if count == 1:
        return "One worker has no gradients to exchange."
    if cluster.assumed and kind.times.assumed(count):
        known = "measured" if any(one.between == "hosts" for one in profile.links) else "stated"
        return f"More than the {kind.measured[-1]} that were measured: from the {known} link."
    reduced = [one.workers for one in profile.collectives if one.operation == "all-reduce"]
    if max(reduced, default=0) < count:
        return ""
    size = profile.network.trained_bytes
    seconds = fit_collectives(profile.collectives).seconds(size, count)
    return f"Exchanging {in_memory(size)} of gradients takes {1e3 * seconds:.1f} ms alone."


def batch_reason(job: Job, choice: Choice, knee: KneeFit | None) -> Reason:
    """The global batch; ``knee`` is the knee of its cluster."""
    row, goal = choice.row, job.goal
    source: Source = choice.objective.source
    why = choice.objective.why_batch(row, knee)
    if job.global_batch != "auto":
        why, source = f"Asked for; leaves {row.steps} steps an epoch", "asked"
        if row.steps < goal.least_steps:
            why += f", fewer than goal.least_steps={goal.least_steps}"
        why += f".{_instead(choice)}"
    passed = ""
    if choice.passed is not None:  # a candidate is said to be better
        passed = (
            f"Passed over: {choice.passed.batch} samples ({compared(choice.passed, row)}), a "
            "prediction far from what was measured, which does not tell the two apart."
        )
    others = [str(one.batch) for one in choice.level if one.cluster is row.cluster]
    texts = [why, passed, _less_accurate(goal, choice)]
    texts.append(choice.objective.level_words(others, batches=True))
    rows = knee.rows if knee else ()  # those beyond a limit, too
    next_ = [one for one in rows if one.batch < row.batch][-1:]
    next_ += [one for one in rows if one.batch > row.batch][:1]
    alternatives = compared_with(row, [(f"{one.batch} samples", one) for one in next_])
    value = f"{row.batch} samples"
    found = Chosen(row.batch, " ".join(filter(None, texts)), source, alternatives=alternatives)
    return found.reason("global batch", value)


def _less_accurate(goal: Goal, choice: Choice) -> str:
    """What the choice gives up of accuracy, in a sentence; empty if little, or if not known."""
    best, row = choice.accurate, choice.row
    if best is None or best.accuracy is None or row.accuracy is None:
        return ""
    if best.accuracy - row.accuracy <= tolerance(goal, choice.objective.progress):
        return ""
    if choice.objective.progress.assumed:  # no reason to tell anybody what to do
        if goal.objective == "auto":  # `_instead` says what it would be
            return ""
        return (
            f"It is expected to reach {percent(row.accuracy)} where {percent(best.accuracy)} is in "
            f"{_share(best.train_seconds, row.train_seconds, 'time')}."
        )
    advice = "leave global_batch to the plan"
    if goal.objective != "auto":
        advice = "give goal.objective=auto"
        if goal.accuracy is not None:  # with it that is `target-accuracy`
            advice += " without goal.accuracy"
    return (
        f"It is predicted to reach {percent(row.accuracy)} where {percent(best.accuracy)} is to be "
        f"had in {_share(best.train_seconds, row.train_seconds, 'time')}: {advice}."
    )


def other_resolutions(chosen: Row, rows: Sequence[Row]) -> tuple[Alternative, ...]:
    """Candidates with the chosen workers and batch at the other resolutions."""
    others = [
        (f"{row.resolution} px", row)
        for row in rows
        if (row.cluster, row.batch) == (chosen.cluster, chosen.batch)
        and row.resolution != chosen.resolution
    ]
    return compared_with(chosen, others)


def compared_with(chosen: Row, others: Iterable[tuple[str, Row]]) -> tuple[Alternative, ...]:
    """What other candidates, each by its name, would lose by prediction."""
    return tuple(Alternative(value=name, loss=compared(row, chosen)) for name, row in others)


def compared(other: Row, chosen: Row) -> str:
    """Time and cost of one candidate against another, as shares.

    Of all the job's epochs or, where that is the objective and runs do not speak against both,
    to the target accuracy.

    Example: ``12.3 % more time, 4.0 % less cost``.
    """
    if chosen.target_seconds is not None and not isfinite(chosen.seconds):
        other, chosen = (replace(row, target_seconds=None) for row in (other, chosen))
    aim = "" if chosen.target_seconds is None else " to the accuracy"
    if not isfinite(other.seconds):
        texts = ["not known to reach the accuracy"]
    else:
        texts = [_share(other.seconds, chosen.seconds, f"time{aim}")]
        if other.price is not None and chosen.price is not None:
            texts.append(_share(other.price, chosen.price, f"cost{aim}"))
        elif other.cluster.workers != chosen.cluster.workers:
            texts.append(_share(other.expense, chosen.expense, f"worker-hours{aim}"))
    if chosen.target_seconds is None and None not in (other.accuracy, chosen.accuracy):
        texts.append(_points(other, chosen))
    elif chosen.target_seconds is None and other.epochs != chosen.epochs:
        texts.append(f"but {counted(other.epochs, 'epoch')}, not {chosen.epochs}")
    if other.misses:
        texts.append("but " + " and ".join(miss.text for miss in other.misses))
    return ", ".join(texts)


def _points(other: Row, chosen: Row) -> str:
    apart = 100 * ((other.accuracy or 0.0) - (chosen.accuracy or 0.0))
    told = "expected" if chosen.assumed else "predicted"
    if abs(apart) < _MIN_POINTS:
        return f"as much accuracy {told}"
    return f"{abs(apart):.1f} points {'more' if apart > 0 else 'less'} accuracy {told}"


def _share(other: float, chosen: float, what: str) -> str:
    """How much more of something another takes, in words."""
    change = other / chosen - 1
    if abs(change) < 0.0005:
        return f"the same {what}"
    if change >= _MANY_TIMES - 1:
        return f"{significant(other / chosen)} times the {what}"
    return f"{percent(abs(change))} {'more' if change > 0 else 'less'} {what}"


def _named(row: Row, *, named: bool) -> str:
    workers = str(row.cluster) if named else counted(row.cluster.workers, "worker")
    return f"{workers}, global batch {row.batch}"
