"""Chooses the method for `method=auto`: the least predicted time to the accuracy of `plain`.

Each method is planned as if the job asked for it. Only methods that are known to learn as much as
`plain` are compared: because runs showed it, because they take the same steps, or because trainings
of other tasks showed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot, inf
from pkgutil import resolve_name

from batchwright.algorithms.batch_size import as_compared
from batchwright.errors import JobError, PlanError
from batchwright.planning.candidates.objectives.comparisons import MIN_SAVING
from batchwright.planning.chosen import Chosen
from batchwright.planning.run_history import experience_of
from batchwright.records import (
    Alternative,
    Estimate,
    Goal,
    Job,
    Plan,
    Profile,
    RunSummary,
)
from batchwright.records.base import Method
from batchwright.records.registries.methods import METHODS, PLAIN
from batchwright.records.text.formatting import counted, counted_points, duration, shares_between
from batchwright.records.text.plan_text import chosen_candidate

_SAVING = f"{100 * MIN_SAVING:g} %"


@dataclass(frozen=True)
class PlannedMethod:
    """The plan of one method, and how it compares with `plain`."""

    plan: Plan  # the method's plan
    seconds: float  # predicted seconds of the whole training
    accuracy: Estimate | None  # held-out accuracy at the end, a share; `None`: not known
    # Lower bound of its accuracy less that of `plain`, a share; `None`: not known.
    least: float | None
    source: str  # what the bound rests on, in words

    @property
    def accuracy_words(self) -> str:
        """The accuracy with its interval, in words."""
        return "not known" if self.accuracy is None else shares_between(self.accuracy)

    @property
    def words(self) -> str:
        """Time, accuracy and source, in words."""
        return f"{duration(self.seconds)}, accuracy {self.accuracy_words}: {self.source}"

    def against(self, best: PlannedMethod, goal: Goal) -> str:
        """Time and accuracy, and why ``best`` was taken instead."""
        why = f"saves less than {_SAVING}"
        if self.least is None:
            why = "not known to learn as much"
        elif self.least < -goal.accuracy_tolerance:
            why = "may lose more than goal.accuracy_tolerance"
        elif as_compared(self.value(goal)) > as_compared(best.value(goal)):
            why = "costs more" if goal.by_cost else "takes longer"
        return f"{self.words}; {why}"

    def value(self, goal: Goal) -> float:
        """The value that the goal minimizes: seconds of the whole training, or its cost."""
        one = chosen_candidate(self.plan)
        if not goal.by_cost or one.cost is None or one.train_seconds is None:
            return self.seconds
        return self.seconds * one.cost.value / one.train_seconds.value


def plan_of_best(
    job: Job, profile: Profile, runs: Sequence[RunSummary], make: Callable[[Method], Plan]
) -> Plan:
    """The plan of the method that is chosen for a job with `method=auto`, with the reason.

    Args:
        job: The job, with `method=auto`.
        profile: What was measured; of several kinds of workers the first.
        runs: Finished runs of the same task.
        make: Plans the job with a method.

    Raises:
        PlanError: `plain` cannot be planned, nor any method known to learn as much.
    """
    problems: dict[Method, JobError | PlanError] = {}
    plans: dict[Method, Plan] = {}
    for method, spec in METHODS.own.items():
        try:
            made = make(method)
            if spec.served and made.workers == 1:
                raise PlanError("two batches at once take 2 workers or more")
            plans[method] = made
        except (JobError, PlanError) as error:
            problems[method] = error
    plain = plans.get(PLAIN.name)
    planned = {method: _planned(one, plain, profile, runs) for method, one in plans.items()}
    alike = {
        method: one
        for method, one in planned.items()
        if one.least is not None and one.least >= -job.goal.accuracy_tolerance
    }
    if not alike:
        raise problems[PLAIN.name]
    values = {method: as_compared(one.value(job.goal)) for method, one in alike.items()}
    best = min(values, key=values.__getitem__)
    if values[best] > (1 - MIN_SAVING) * values.get(PLAIN.name, inf):
        best = PLAIN.name
    others = tuple(
        Alternative(value=method, loss=planned[method].against(planned[best], job.goal))
        if method in planned
        else Alternative(value=method, loss=f"not possible: {problems[method]}")
        for method in sorted(METHODS.own, key=lambda name: METHODS[name].served)
        if method != best
    )
    plan, tolerance = planned[best].plan, counted_points(job.goal.accuracy_tolerance)
    described = next((one.why for one in plan.reasons if one.choice == "method"), "")
    least = "cost" if job.goal.by_cost else "time"
    why = (
        f"{planned[best].words}. The method with the least predicted {least} is taken of those "
        f"known to be at most {tolerance} less accurate than plain, and plain itself where they "
        f"save less than {_SAVING}. {described.removeprefix('Asked for. ')}"
    )
    reason = Chosen(plan.method, why.strip(), "predicted", "", others).reason("method")
    rest = tuple(one for one in plan.reasons if one.choice != "method")
    return plan.model_copy(update={"reasons": (reason, *rest)})


def beside_plain(
    plan: Plan, profile: Profile, runs: Sequence[RunSummary], make: Callable[[Method], Plan]
) -> Plan:
    """The plan with a reason that says what `plain` would reach, if no run had its own method.

    Args:
        plan: A plan with another method than `plain`.
        profile: What was measured; of several kinds of workers the first.
        runs: Finished runs of the same task.
        make: Plans the same job with another method.
    """
    if _by_runs(plan, profile, runs) is not None:
        return plan
    try:
        plain = make(PLAIN.name)
    except (JobError, PlanError) as error:
        if plan.job.goal.target is None:  # `plain` misses a limit that this plan keeps
            return plan
        own = _planned(plan, None, profile, runs)
        why = (
            f"method={plan.method} takes {own.words}. It is not known whether it reaches "
            f"goal.accuracy, and method=plain has no plan that does: {error}."
        )
        reason = Chosen("not known", why, "predicted").reason("accuracy")
        return plan.model_copy(update={"reasons": (*plan.reasons, reason)})
    usual = _planned(plain, plain, profile, runs)
    if usual.accuracy is None:
        return plan
    own = _planned(plan, plain, profile, runs)
    why = (
        f"method={plan.method} takes {own.words}. With method=plain "
        f"{counted(plain.likely_epochs(), 'epoch')} are predicted to take "
        f"{duration(usual.seconds)} and to reach {usual.accuracy_words}."
    )
    reason = Chosen(own.accuracy_words, why, "predicted").reason("accuracy")
    return plan.model_copy(update={"reasons": (*plan.reasons, reason)})


def _planned(
    plan: Plan, plain: Plan | None, profile: Profile, runs: Sequence[RunSummary]
) -> PlannedMethod:
    """A method's plan compared with that of `plain`, which is `None` where it cannot be planned."""
    rule = plan.method_spec
    assert plan.train_seconds is not None  # noqa: S101 - steps were measured
    seconds = plan.train_seconds.value
    usual = chosen_candidate(plain).accuracy if plain else None
    if rule.saves:
        saved = resolve_name(rule.saves)(plan, runs)
        source = f"{rule.told}; no worker is known to be slower than others"
        if saved:
            source = f"{rule.told}; even shares would take {duration(seconds)}"
        return PlannedMethod(plan, seconds - saved, usual, 0.0, source)
    if rule.same_steps:
        return PlannedMethod(plan, seconds, usual, 0.0, rule.told)
    own = _by_runs(plan, profile, runs)
    if own is not None:
        return PlannedMethod(plan, seconds, own, *_apart_by_runs(plan, plain, profile, runs))
    if rule.apart is None:
        return PlannedMethod(plan, seconds, None, None, rule.told)
    if plain is not None and plan.update != plain.update:
        source = f"it trains with {plan.update}, plain with {plain.update}"
        return PlannedMethod(plan, seconds, None, None, source)
    value, low, high = rule.apart
    source = f"{value:+.1f} points beside plain ({low:+.1f} to {high:+.1f}), {rule.told}"
    if usual is not None:
        usual = Estimate(
            value=max(0.0, usual.value + value / 100),
            low=max(0.0, usual.low + low / 100),
            high=min(1.0, usual.high + high / 100),
        )
    return PlannedMethod(plan, seconds, usual, low / 100, source)


def _apart_by_runs(
    plan: Plan, plain: Plan | None, profile: Profile, runs: Sequence[RunSummary]
) -> tuple[float | None, str]:
    """Lower bound of the accuracy less that of `plain`, by runs with the method; and its source.

    A difference that may be chance counts as none, as it does between optimizers.
    """
    source = "by the runs given"
    own = _by_runs(plan, profile, runs, of_mean=True)
    usual = _by_runs(plain, profile, runs, of_mean=True) if plain else None
    if usual is None and plain is not None:
        usual = chosen_candidate(plain).accuracy
    if own is None or usual is None:
        return None, source
    apart = own.value - usual.value
    if apart >= -plan.job.goal.accuracy_tolerance:
        return apart, source
    chance = hypot(own.high - own.value, usual.value - usual.low)
    if -apart > chance:
        return apart, source
    return 0.0, (
        f"{source}, {-100 * apart:.1f} points below plain, which may be chance (give or take "
        f"{100 * chance:.1f}), so time decides"
    )


def _by_runs(
    plan: Plan, profile: Profile, runs: Sequence[RunSummary], *, of_mean: bool = False
) -> Estimate | None:
    """Held-out accuracy at the end, by runs with the plan's method; `None` without such runs.

    ``of_mean``: As for `ProgressModel.accuracy`.
    """
    model = experience_of(profile, plan.job, runs).progress(profile.noise, plan.update)
    return model.accuracy(plan.stages[-1].global_batch_size, plan.epochs, of_mean=of_mean)
