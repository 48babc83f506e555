"""Chooses the candidate to train with: limits first, then the objective."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from batchwright.algorithms.batch_size import as_compared
from batchwright.errors import PlanError
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.objectives import OBJECTIVES
from batchwright.planning.candidates.objectives.comparisons import MIN_SAVING, target_seconds
from batchwright.planning.candidates.objectives.objective import Objective
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Row, Table, in_memory
from batchwright.planning.chosen import Chosen
from batchwright.planning.refusals import (
    OF_LENGTH,
    best_to_be_had,
    check_progress,
    target_miss,
    why_none,
)
from batchwright.prediction.collective import fit_collectives
from batchwright.records import Alternative, Goal, Job, Reason, Source
from batchwright.records.text.formatting import counted, percent, significant

_MIN_POINTS = 0.05  # percentage points of accuracy; a smaller difference is shown as none
_MANY_TIMES = 3.0  # from this ratio on, "3 times" reads better than "200 % more"
_MAX_SIZES = 8  # clusters shown beside the chosen one: those nearest in size


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, and what else could have been chosen."""

    objective: Objective  # the objective by which it was chosen
    row: Row  # the chosen candidate
    free: Row  # what would be chosen if the job asked for neither batch nor workers
    # The best candidate of each cluster by the objective, small to large, at the chosen resolution.
    sizes: tuple[Row, ...]
    others: dict[str, Row]  # what the other objectives would choose, by their names and remarks
    # Candidates that measurements cannot tell from the chosen one, among those allowed.
    level: tuple[Row, ...]
    # What `objective=auto` would choose if batch and workers were free; `None` where accuracy is
    # not known, or where the epochs are chosen to reach a target.
    accurate: Row | None = None
    # A candidate with a smaller value that was passed over because it is far from what was
    # measured, and measurements do not tell the two apart; `None`: there is none.
    passed: Row | None = None
    # A candidate that was passed over because it costs more and saves little time; `None`: there is
    # none.
    dearer: Row | None = None


def settled_goal(goal: Goal, progress: Progress) -> Goal:
    """The goal, with `target-accuracy` in place of `auto` if it has an accuracy to reach.

    The goal is returned unchanged if it is not known how progress depends on the batch.
    """
    if goal.objective == "auto" and goal.accuracy is not None and progress.compares:
        return goal.model_copy(update={"objective": "target-accuracy"})
    return goal


def aimed(table: Table, row: Row, progress: Progress) -> Row:
    """A candidate with its accuracy, and with its time to the target if that is the objective.

    Where the plan chooses the epochs, the candidate has as many as the target takes, or as the
    limits allow if these are fewer.

    Args:
        table: Predicts the candidates.
        row: The candidate.
        progress: What a batch means for progress.
    """
    most = row.epochs
    if progress.chooses:
        longest = table.trained(row, progress.planned) if progress.assumed else row
        most = _epochs_within(table, longest)
        if (progress.least or 1) <= most < row.epochs:
            row = table.trained(row, most)
    reached, full = (progress.reached(row.batch, n) for n in (row.epochs, max(row.epochs, most)))
    # Time over the chance of success is the mean time of several tries. That does not hold where
    # the chance rests on other tasks: all tries are of the same task.
    to_target = table.job.goal.objective == "target-accuracy" and not progress.assumed
    return replace(
        row,
        accuracy=None if reached is None else reached.value,
        full_accuracy=None if full is None else full.value,
        assumed=progress.assumed,
        target_seconds=target_seconds(row, progress) if to_target else None,
        misses=(*row.misses, *target_miss(row, progress)),
    )


def _epochs_within(table: Table, row: Row) -> int:
    """Most epochs, up to the candidate's own, with which it keeps all limits; 0 without any."""
    over = {miss.limit for miss in row.misses}
    if not over:
        return row.epochs
    # Fewer epochs take less time and cost; they do not help with the other limits.
    if not over <= OF_LENGTH:
        return 0
    return bisect_left(range(1, row.epochs), True, key=lambda n: bool(table.trained(row, n).misses))


def asked_for(job: Job, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Candidates with the job's number of workers; and those that have its global batch, too."""
    workers = 1 if job.launcher.one_worker else job.workers
    mine = [row for row in rows if workers in ("auto", row.cluster.workers)]
    return mine, [row for row in mine if job.global_batch in ("auto", row.batch)]


def choose(
    table: Table, rows: Sequence[Row], knees: Sequence[KneeFit], progress: Progress
) -> Choice:
    """The candidate to train with.

    Args:
        table: Predicts the candidates; a global batch or number of workers that its job asks for is
            kept.
        rows: All candidates, from `aimed`.
        knees: The knee of each cluster and resolution.
        progress: What a batch means for progress.

    Raises:
        PlanError: No candidate is within the limits, and the message names the nearest; or the
            objective needs a prediction that there is not.
    """
    job, side = table.job, max(row.resolution for row in rows)  # `plain` trains at the highest
    here = [row for row in rows if row.resolution == side]
    knees = [knee for knee in knees if knee.resolution == side]
    mine, asked = asked_for(job, here)
    if not asked:
        raise PlanError(
            f"no candidate has workers={job.workers} and global_batch={job.global_batch}: leave "
            "one of them to the plan"
        )
    progress = replace(progress, smallest=min(row.batch for row in mine))
    check_progress(job, progress)
    allowed = [row for row in asked if not row.misses]
    if not allowed:
        refusal = best_to_be_had(table, asked, progress)
        if refusal and job.global_batch != "auto" and any(not row.misses for row in mine):
            refusal += ", or leave global_batch to the plan"
        raise PlanError(refusal or why_none(table, asked))
    free = [row for row in here if not row.misses and not row.asked] or allowed
    by = {name: kind(table, knees, progress) for name, kind in OBJECTIVES.items()}
    objective = by[job.goal.objective]

    def taken(aim: Objective, rows: Sequence[Row]) -> tuple[Row, Row, Row]:
        """The best candidate, its replacement near measurements, and the cheaper one as good."""
        best = aim.best(rows)
        near = aim.known(best, rows)
        return best, near, aim.thrifty(near, rows)

    least, near, row = taken(objective, allowed)
    if row.epochs != progress.trained(row.batch):  # the limits allow no more
        objective = replace(objective, progress=progress.within(row.epochs))
    accuracy_known = not progress.chooses and progress.tells_accuracy
    others = {}
    for name in _others(job.goal, allowed, progress):
        first, instead, other = taken(by[name], allowed)
        others[name + ", near what was measured" * (instead is not first)] = other
    return Choice(
        objective=objective,
        row=row,
        free=taken(objective, free)[-1],
        sizes=tuple(objective.sizes(allowed)),
        others={name: other for name, other in others.items() if other is not row},
        level=objective.level(row, allowed),
        accurate=by["auto"].best(free) if accuracy_known else None,
        passed=least if least is not near else None,
        dearer=near if near is not row else None,
    )


def _others(goal: Goal, rows: Sequence[Row], progress: Progress) -> list[str]:
    """Names of the other objectives that these candidates can be judged by."""
    if progress.chooses:  # candidates have different epochs, which other objectives do not suit
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
    """The reason for the number and kinds of workers.

    Args:
        job: Resolved.
        choice: The choice.
        threads: Compute threads of each worker, as measured; `None`: not known.
        named: Whether workers are of named kinds.
        apart: Whether there are several kinds that cannot be mixed.
    """
    row = choice.row
    why, source = _why_workers(job, choice)
    dearer = ""
    if choice.dearer is not None:
        other = f"{_named(choice.dearer, named=named)} ({compared(choice.dearer, row)})"
        dearer = (
            f"Not taken: {other}. It would save less than {percent(MIN_SAVING, 0)} of the time, no "
            "more than measurements may be off."
        )
    sizes = [_size(one, named=named) for one in choice.level if one.cluster is not row.cluster]
    level = choice.objective.level_words(list(dict.fromkeys(sizes)))
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
        return "launch=in-process trains with one worker.", "asked"
    if job.workers != "auto":
        if {n for kind, _ in choice.row.cluster.members for n in kind.measured} == {job.workers}:
            return "The number that was measured.", "measured"
        return f"Asked for.{_instead(choice)}", "asked"
    if len(choice.sizes) == 1:
        return "The only number of workers there is to choose within the limits.", "measured"
    return choice.objective.why_size(choice.row, choice.sizes), choice.objective.source


def _instead(choice: Choice) -> str:
    """What the plan itself would have chosen, and how it compares, in a sentence."""
    free, row = choice.free, choice.row
    if (free.cluster, free.batch) == (row.cluster, row.batch):
        return " The plan would choose the same."
    return (
        f" The plan itself would choose {counted(free.cluster.workers, 'worker')} with "
        f"global batch {free.batch}: {compared(free, row)}."
    )


def _exchange(cluster: ClusterOption) -> str:
    """The time of exchanging gradients, in a sentence; empty where it was not measured."""
    kind, _ = cluster.members[0]
    count, profile = cluster.workers, kind.profile
    if count == 1:
        return "One worker has no gradients to exchange."
    if cluster.assumed and kind.times.assumed(count):
        known = "measured" if any(one.between == "hosts" for one in profile.links) else "stated"
        return (
            f"More workers than the {kind.measured[-1]} that were measured: the time of their "
            f"exchange is predicted from the {known} link."
        )
    reduced = [one.workers for one in profile.collectives if one.operation == "all-reduce"]
    if max(reduced, default=0) < count:
        return ""
    size = profile.network.trained_bytes
    seconds = fit_collectives(profile.collectives).seconds(size, count)
    return f"Exchanging {in_memory(size)} of gradients takes {1e3 * seconds:.1f} ms alone."


def batch_reason(job: Job, choice: Choice, knee: KneeFit | None, *, named: bool) -> Reason:
    """The reason for the global batch.

    Args:
        job: Resolved.
        choice: The choice.
        knee: That of the chosen cluster.
        named: Whether workers are of named kinds.
    """
    row, goal = choice.row, job.goal
    source: Source = choice.objective.source
    why = choice.objective.why_batch(row, knee)
    if job.global_batch != "auto":
        why, source = f"Asked for; leaves {counted(row.steps, 'step')} an epoch", "asked"
        if row.steps < goal.least_steps:
            why += f", fewer than goal.least_steps={goal.least_steps}"
        why += f".{_instead(choice)}"
    passed = ""
    if (far := choice.passed) is not None:
        on = "" if far.cluster is row.cluster else f" on {_size(far, named=named)}"
        passed = (
            f"Not taken: {far.batch} samples{on} ({compared(far, row)}). That lies far beyond what "
            "was measured, and its prediction is too uncertain to prefer it."
        )
    others = [str(one.batch) for one in choice.level if one.cluster is row.cluster]
    texts = [why, passed, _less_accurate(goal, choice)]
    texts.append(choice.objective.level_words(others, batches=True))
    rows = knee.rows if knee else ()  # including candidates beyond a limit
    next_ = [one for one in rows if one.batch < row.batch][-1:]
    next_ += [one for one in rows if one.batch > row.batch][:1]
    alternatives = compared_with(row, [(f"{one.batch} samples", one) for one in next_])
    value = f"{row.batch} samples"
    found = Chosen(row.batch, " ".join(filter(None, texts)), source, alternatives=alternatives)
    return found.reason("global batch", value)


def _less_accurate(goal: Goal, choice: Choice) -> str:
    """The accuracy that the choice gives up, in a sentence; empty if little, or if not known."""
    best, row = choice.accurate, choice.row
    if best is None or best.accuracy is None or row.accuracy is None:
        return ""
    if as_compared(best.accuracy - row.accuracy) <= choice.objective.tolerance:
        return ""
    if choice.objective.progress.assumed:  # too uncertain to advise another goal
        if goal.objective == "auto":  # `_instead` names what the plan would choose
            return ""
        return (
            f"It is expected to reach {percent(row.accuracy)}, and a more accurate candidate "
            f"{percent(best.accuracy)} in "
            f"{_share(best.train_seconds, row.train_seconds, 'time')}."
        )
    advice = "leave global_batch to the plan"
    if goal.objective != "auto":
        advice = "give goal.objective=auto"
        if goal.accuracy is not None:  # with an accuracy, `auto` becomes `target-accuracy`
            advice += " without goal.accuracy"
    return (
        f"It is predicted to reach {percent(row.accuracy)}, and a more accurate candidate "
        f"{percent(best.accuracy)} in {_share(best.train_seconds, row.train_seconds, 'time')}. To "
        f"take that one, {advice}."
    )


def other_resolutions(chosen: Row, rows: Sequence[Row]) -> tuple[Alternative, ...]:
    """Candidates with the chosen workers and batch at other resolutions, as alternatives."""
    others = [
        (f"{row.resolution} px", row)
        for row in rows
        if (row.cluster, row.batch) == (chosen.cluster, chosen.batch)
        and row.resolution != chosen.resolution
    ]
    return compared_with(chosen, others)


def compared_with(chosen: Row, others: Iterable[tuple[str, Row]]) -> tuple[Alternative, ...]:
    """Other candidates, each with its name, as alternatives: how they compare by prediction."""
    return tuple(Alternative(value=name, loss=compared(row, chosen)) for name, row in others)


def compared(other: Row, chosen: Row) -> str:
    """Time, cost and accuracy of one candidate against the chosen one, in words.

    Time and cost are those to the target accuracy where that is the objective, unless the chosen
    candidate is not known to reach it; else those of all epochs.

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
    known = "expected" if chosen.assumed else "predicted"
    if abs(apart) < _MIN_POINTS:
        return f"as much accuracy {known}"
    return f"{abs(apart):.1f} points {'more' if apart > 0 else 'less'} accuracy {known}"


def _share(other: float, chosen: float, what: str) -> str:
    """How much more of ``what`` the other takes than the chosen one, in words."""
    change = other / chosen - 1
    if abs(change) < 0.0005:
        return f"the same {what}"
    if change >= _MANY_TIMES - 1:
        return f"{significant(other / chosen)} times the {what}"
    return f"{percent(abs(change))} {'more' if change > 0 else 'less'} {what}"


def _named(row: Row, *, named: bool) -> str:
    return f"{_size(row, named=named)}, global batch {row.batch}"


def _size(row: Row, *, named: bool) -> str:
    return str(row.cluster) if named else counted(row.cluster.workers, "worker")
