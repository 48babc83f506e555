"""Takes the values that a simulation has searched into the plan, each with its reason."""

from __future__ import annotations

from collections.abc import Callable

from batchwright.errors import ArgumentError
from batchwright.planning.chosen import Chosen
from batchwright.planning.methods.layout import method_reason
from batchwright.planning.validation import idle_keys
from batchwright.records import Alternative, Plan, Reason, Simulation
from batchwright.records.clusters.simulation import Scenario, Search, Tried
from batchwright.records.job import as_written, check_job
from batchwright.records.text.formatting import between, duration, number

CHOICES = {
    "checkpoint_seconds": "checkpoint interval",  # replaces the reason for Daly's interval
    "rebalance_steps": "steps between rebalancings",
    "spares": "spare workers",
    "workers_per_host": "workers of a host",
}
"""Keys that a plan takes, with what their reasons are called in it."""
_OTHER_TRAINING = ("epochs", "samples", "global_batch")
"""Keys of a scenario that simulate another training than the plan's."""


def with_searched(plan: Plan, found: Simulation) -> Plan:
    """The plan with the best values that a simulation of it has found.

    `workflows.simulating` describes the verb.

    Raises:
        ArgumentError: Nothing was searched, or the simulation was of another plan, cluster or
            training.
        JobError: The job cannot have such a value.
    """
    _refuse_another(plan, found)
    (search,) = found.searches
    best = dict(zip(search.keys, search.best, strict=True))
    whole = {key: one if key == "checkpoint_seconds" else int(one) for key, one in best.items()}
    keys = {key: value for key, value in whole.items() if key in type(plan.job).model_fields}
    job = plan.job.model_copy(update=keys)
    check_job(job)
    if idle := next((line for line in idle_keys(job) if line not in idle_keys(plan.job)), ""):
        raise ArgumentError(idle)
    new = [_reason(plan, search, key, found.scenario) for key in search.keys]
    replaced = {one.choice for one in new}
    kept = [one for one in plan.reasons if one.choice not in replaced]
    before, after = method_reason(plan.job), method_reason(job)  # they may name rebalance_steps
    reasons = [after[0] if one in before else one for one in kept]
    return plan.model_copy(update={"job": job, "reasons": (*reasons, *new)})


def _refuse_another(plan: Plan, found: Simulation) -> None:
    for key, of_plan in (("network", plan.network.name), ("data", plan.data.name)):
        if getattr(found, key) != of_plan:
            raise ArgumentError(
                f"the simulation is of {key} {getattr(found, key)}, and the plan of {of_plan}: "
                "simulate this plan"
            )
    if not found.searches:
        raise ArgumentError(
            "nothing was searched that a plan could take: give --search KEY=V1,V2,..., as "
            "checkpoint_seconds=60,300,900"
        )
    for one in found.searches:
        if one.workers != plan.workers:
            raise ArgumentError(
                f"workers={one.workers}: the plan is for {plan.workers}, and takes no values that "
                f"were searched with others: leave workers= out, or plan with workers={one.workers}"
            )
    for key in _OTHER_TRAINING:
        if (value := getattr(found.scenario, key)) is not None:
            raise ArgumentError(
                f"{key}={value}: the plan takes no values that were searched for another training: "
                "leave it out, or plan with it"
            )


def _reason(plan: Plan, search: Search, key: str, scenario: Scenario) -> Reason:
    """The reason for the value of a key."""
    choice = CHOICES[key]
    tried = search.along(key)
    ((value, best),) = (one for one in tried if one[1].values == search.best)
    least = "time" if best.cost is None else "cost"
    took = duration(best.seconds.value)
    took += "" if best.cost is None else f", cost {between(best.cost)}"
    usual = Scenario()
    stated = " ".join(
        f"{name}={as_written(stated)}"
        for name, stated in scenario
        if stated != getattr(usual, name) and name not in search.keys
    )
    what = f"{len(search.tried)} values of {key}"
    if others := search.with_the_best(key):
        what = f"{len(search.tried)} combinations, with {others},"
    why = (
        f"Least {least} of {what} simulated with {stated or 'nothing stated'}, "
        f"{scenario.repeats} times each: {took}."
    )
    if earlier := next((one for one in plan.reasons if one.choice == choice), None):
        why += f" Predicted times are still those of {earlier.value} ({earlier.source})."
    alternatives = tuple(
        Alternative(value=_shown(key, other), loss=_loss(one, search))
        for other, one in tried
        if one is not best
    )
    shown = _shown(key, value)
    return Chosen(shown, why, "predicted", alternatives=alternatives).reason(choice)


def _shown(key: str, value: float) -> str:
    return duration(value) if key == "checkpoint_seconds" else f"{value:g}"


def _loss(one: Tried, search: Search) -> str:
    more, what = one.over_best, "time" if one.cost is None else "cost"
    shown: Callable[[float], str] = duration if one.cost is None else number
    value, low, high = map(shown, (more.value, more.low, more.high))
    level = ", may be as good" if one.values in search.level else ""
    return f"{value} more {what} ({low} to {high}){level}"
