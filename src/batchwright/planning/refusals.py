"""Error messages for jobs that no candidate satisfies: which limits are missed, what to change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, floor, inf, log10
from operator import attrgetter

from batchwright.algorithms.batch_size import as_compared
from batchwright.errors import PlanError
from batchwright.planning.candidates.learnt import ACCURACY_TAKES
from batchwright.planning.candidates.objectives.comparisons import EQUAL, by_time
from batchwright.planning.candidates.progress import FAR, Progress, fewest_epochs
from batchwright.planning.candidates.table import Miss, Row, Table
from batchwright.planning.gradient_scaling import OF_NOISE
from batchwright.prediction.drift import least_share
from batchwright.records import Estimate, Goal, Job
from batchwright.records.text.formatting import counted, duration, percent, shares_between

_ADVICE = {
    "goal.max_workers": "raise goal.max_workers, or measure fewer workers",
    "goal.least_steps": "give goal.least_steps={value}{less}{fewer}",
    "least_local_batch": "give a smaller least_local_batch{fewer}",
    "most_local_batch": "raise most_local_batch",
    "goal.memory": "raise {memory}, or train a smaller network or resolution",
    "loaders": "give more shared memory (docker: --shm-size=1g), or loaders=0, and probe again",
    "goal.deadline": "raise goal.deadline",
    "goal.max_cost": "raise goal.max_cost",
    "goal.preemptions_per_hour": "plan for workers that are not spot, or for a quicker restart "
    "(goal.restart_seconds){fewer}",
    **{key: f"give global_batch={{value}} or more, or leave {key} out" for key in OF_NOISE},
    "goal.accuracy": "give a lower goal.accuracy, or more epochs",
    "epochs": "give more epochs, or a smaller batch",
}
_NARROWER = ", or measure more for a narrower interval (a larger probe.budget)"
_QUIET = ", or probe again while the machine is quiet, for a narrower interval"
MIN_CHANCE = 0.1
"""Least probability of reaching the target with which a training is not refused."""

OF_LENGTH = {"goal.deadline", "goal.max_cost"}
"""Limits that a training with fewer epochs may keep."""


def check_progress(job: Job, progress: Progress) -> None:
    """Refuse an objective that needs a prediction of accuracy or progress where there is none.

    Raises:
        PlanError: The network's answers have no accuracy; neither a noise scale or trials nor runs
            are there; or all trainings are too short.
    """
    aim = "goal.objective=accuracy" if job.goal.objective == "accuracy" else ""
    if job.goal.target is not None:
        aim = f"goal.accuracy={job.goal.target:g}"
    if aim and not progress.judged and not progress.by_runs:  # runs may count by another measure
        raise PlanError(
            f"{aim} needs accuracy, which takes {ACCURACY_TAKES}: give goal.objective=knee, time "
            "or cost, or finished runs of a loop of your own, which counts by its own measure"
        )
    # An expectation from other tasks alone does not justify accuracy at any price.
    tells = progress.tells_accuracy and not progress.assumed
    if job.goal.objective == "accuracy" and not tells:
        if progress.curve is not None and progress.curve.observed:
            raise PlanError(
                "goal.objective=accuracy needs to know accuracy, which is not predicted for "
                f"trainings with fewer than {progress.predictable_steps} steps: give "
                f"epochs={progress.fewest(progress.smallest)}"
            )
        raise PlanError(
            "goal.objective=accuracy needs to know accuracy, but the profile holds no trials of "
            "such a training and no run was given: probe again with a larger probe.learning, or "
            "give a finished run"
        )
    if job.goal.objective == "target-accuracy" and not progress.compares:
        raise PlanError(
            "goal.objective=target-accuracy needs to know how progress depends on the batch, but "
            "the profile holds no gradient noise scale and no run was given: probe again with a "
            "larger probe.budget, or give a finished run"
        )


def target_miss(row: Row, progress: Progress) -> tuple[Miss, ...]:
    """The miss of a candidate whose epochs are too few for the target, or for a prediction.

    Empty for other candidates, and where the prediction rests on other tasks alone.
    """
    if not progress.chooses or progress.assumed or may_reach(progress, row.batch, row.epochs):
        return ()
    epochs = counted(row.epochs, "epoch")
    if progress.too_short(row.batch, row.epochs):
        fewest = progress.predictable_steps
        text = f"has too few steps in {epochs}: accuracy is predicted from {fewest} on"
        return (Miss("epochs", text, progress.fewest(row.batch) / row.epochs),)
    reached, target = progress.reached(row.batch, row.epochs), progress.target or 0.0
    text = (
        f"has no chance of {percent(MIN_CHANCE, 0)} to reach goal.accuracy={target:g} in {epochs}"
    )
    times = max(1.0, target / reached.value) if reached and reached.value else inf
    return (Miss("goal.accuracy", text, times),)


def may_reach(progress: Progress, batch: int, epochs: int) -> bool:
    """Whether so many epochs reach the target with a probability of `MIN_CHANCE` or more."""
    sure = progress.needed(batch, epochs) is not None
    return sure or progress.chance(batch, epochs) >= MIN_CHANCE


def best_to_be_had(table: Table, rows: Sequence[Row], progress: Progress) -> str:
    """The refusal where no candidate reaches the target: names the most accurate one in the limits.

    Args:
        table: Predicts the candidates.
        rows: Candidates, all of which miss some limit.
        progress: What a batch means for progress.

    Returns:
        The message; empty where the plan does not choose the epochs, or where no candidate is
        within the other limits.
    """
    if not progress.chooses:
        return ""

    def shortened_by(row: Row) -> set[str]:
        """The limits that the candidate would miss with all epochs that it needs."""
        return {miss.limit for miss in table.trained(row, progress.trained(row.batch)).misses}

    found = [
        (reached, row, shortened_by(row))
        for row in rows
        if {miss.limit for miss in row.misses} == {"goal.accuracy"}
        and (reached := progress.reached(row.batch, row.epochs)) is not None
    ]
    if not found:
        return _none_long_enough(table, rows, progress)
    least = max(reached.value for reached, *_ in found) - EQUAL
    best, row, limited = min(
        (one for one in found if one[0].value >= least),
        key=lambda one: by_time(one[1]),
    )
    # With these limits raised some candidate has a chance; it need not be the best one so far.
    raised = next(
        (limits for _, one, limits in found if may_reach(progress, one.batch, progress.planned)),
        set[str](),
    )
    enough = progress.needed(row.batch, FAR * progress.planned)
    advice = _lower(best, progress)
    if raised:
        advice += f", or raise {' and '.join(sorted(raised))}"
    elif enough is None:
        beyond = [f" and raise {limit}" for limit in sorted(limited)]
        advice += f", or more epochs{''.join(beyond)}"
    else:
        beyond = [f" and raise {miss.limit}" for miss in table.trained(row, enough).misses]
        advice += f", or epochs={enough}{''.join(beyond)}"
    limits = sorted({limit for *_, limits in found for limit in limits})
    within = [
        f"epochs={progress.planned}",
        *(f"{one}={_value_of(table.job.goal, one):g}" for one in limits),
    ]
    return (
        f"no candidate has a chance of {percent(MIN_CHANCE, 0)} to reach "
        f"goal.accuracy={progress.target:g} within {' and '.join(within)}; "
        f"{_to_be_had(best, row, progress)}: give {advice}"
    )


def _lower(reached: Estimate, progress: Progress) -> str:
    """Advice on a lower target, in words.

    It names no number where runs were given: of a lower target these may say how many epochs it
    takes, and then nothing else counts.
    """
    lower = floor(1000 * reached.value) / 1000
    if progress.by_runs or not lower:
        return "a lower goal.accuracy"
    return f"goal.accuracy={lower:g} or less"


def _to_be_had(reached: Estimate, row: Row, progress: Progress) -> str:
    return (
        f"the best to be had is {shares_between(reached)}, "
        f"with {progress.optimizer(row.batch)}, global batch {row.batch} and "
        f"{counted(row.cluster.workers, 'worker')} in {counted(row.epochs, 'epoch')}, "
        f"{duration(row.train_seconds)}"
    )


def _none_long_enough(table: Table, rows: Sequence[Row], progress: Progress) -> str:
    """The refusal where the limits leave every candidate too few steps for a prediction.

    It names the candidate that needs the least more time, cost or epochs. Empty where no candidate
    is within the other limits.
    """
    goal, found = table.job.goal, []
    for row in rows:
        fewest = progress.fewest(row.batch)
        if progress.assumed and fewest > progress.planned:
            continue  # such a candidate is not refused for its few steps
        shortest, reached = table.trained(row, fewest), progress.accuracy(row.batch, fewest)
        over = {miss.limit: miss.times for miss in shortest.misses}
        if fewest > progress.planned:
            over["epochs"] = fewest / progress.planned
        if reached is not None and over and over.keys() <= {"epochs", *OF_LENGTH}:
            found.append((max(over.values()), reached, shortest))
    if not found:
        return ""
    _, reached, row = min(found, key=lambda one: (as_compared(one[0]), *by_time(one[2])))
    longer = row.epochs > progress.planned

    def enough(row: Row) -> str:
        """The limits that the candidate exceeds, with the values that it needs."""
        given = [f"epochs={row.epochs}"] if longer else []
        for miss in row.misses:
            value = _rounded_up(miss.times * _value_of(goal, miss.limit))
            given.append(f"{miss.limit}={value:g}")
        return " and ".join(given)

    advice = enough(row)
    if target_miss(row, progress):
        needed = progress.needed(row.batch, FAR * row.epochs if longer else None)
        advice += f" and {_lower(reached, progress)}"
        advice += "" if needed is None else f", or {enough(table.trained(row, needed))}"
    short = longer or any({miss.limit for miss in one.misses} == {"epochs"} for one in rows)
    within = [f"epochs={progress.planned}"] if short else []
    within += [f"{miss.limit}={_value_of(goal, miss.limit):g}" for miss in row.misses]
    what = counted(row.epochs, "epoch")
    if short:
        # Candidates with larger batches may have as many epochs, but fewer steps.
        what = f"the {progress.predictable_steps} steps from which on accuracy is predicted"
    why = "".join(f", which {miss.text}" for miss in row.misses if miss.unsure)
    return (
        f"no candidate is trained for {what} within {' and '.join(within)}; with the least more "
        f"than that, {_to_be_had(reached, row, progress)}{why}: give {advice}"
    )


def _value_of(goal: Goal, limit: str) -> float:
    return float(attrgetter(limit.removeprefix("goal."))(goal))


def _rounded_up(value: float) -> float:
    """``value`` rounded up to three digits: at most one percent larger. It is positive."""
    unit = 10.0 ** (floor(log10(value)) - 2)
    return float(f"{ceil(value / unit) * unit:.3g}")


def why_none(table: Table, rows: Sequence[Row]) -> str:
    """The refusal where no candidate keeps all limits: the nearest candidate, and what to change.

    Args:
        table: Predicts the candidates.
        rows: Candidates, all of which miss some limit.
    """
    job = table.job

    def beyond(row: Row) -> float:
        return as_compared(max(miss.times for miss in row.misses))

    nearest = min(rows, key=lambda row: (len(row.misses), beyond(row), *by_time(row)))
    fewest = fewest_epochs(job)
    kept = OF_LENGTH - {miss.limit for miss in table.trained(nearest, fewest).misses}

    def too_long(epochs: int) -> bool:
        return any(miss.limit in kept for miss in table.trained(nearest, epochs).misses)

    most = fewest - 1 + bisect_left(range(fewest, nearest.epochs), True, key=too_long)
    fewer = f"give epochs={most}" + " or less" * (most > fewest)
    members = [kind for kind, _ in nearest.cluster.members]
    busy = any(least_share(kind.profile) < 1 for kind in members)
    names = {kind.name for kind in members}
    stated = any(kind.memory for kind in job.goal.kinds if kind.kind in names)
    memory = "the memory of goal.kinds" if stated else "goal.memory"
    advice = "; ".join(
        _ADVICE[miss.limit].format(
            value=miss.value,
            less=" or less" if miss.value > 1 else "",
            memory=memory,
            fewer=", or fewer workers" if nearest.cluster.workers > 1 else "",
        )
        + ((_QUIET if busy else _NARROWER) if miss.unsure else "")
        + (f", or {fewer}" if miss.limit in kept else "")
        for miss in nearest.misses
    )
    what = " and ".join(miss.text for miss in nearest.misses)
    return (
        f"no candidate is within the limits; the nearest, global batch {nearest.batch} on "
        f"{counted(nearest.cluster.workers, 'worker')} at {nearest.resolution} px, {what}: {advice}"
    )
