"""What a simulation has searched, taken into the plan, each value with its reason."""

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

_CHOICES = {
    "checkpoint_seconds": "checkpoint interval",  # as by Daly's formula, in whose place it comes
    "rebalance_steps": "steps between rebalancings",
    "spares": "spare workers",
    "workers_per_host": "workers of a host",
}
_OTHERWISE = ("epochs", "samples", "global_batch")  # with these it was another training


def with_searched(plan: Plan, found: Simulation) -> Plan:
    """A plan with the best values that its simulation has found; `workflows.simulating` has more.

    Raises:
        ArgumentError: Nothing was searched, or on a cluster or training that is not the plan's.
        JobError: The job cannot have such a value.
    """
    _refuse_another(plan, found)
    best = {one.key: one.best for one in found.searches}
    whole = {key: one if key == "checkpoint_seconds" else int(one) for key, one in best.items()}
    keys = {key: value for key, value in whole.items() if key in type(plan.job).model_fields}
    job = plan.job.model_copy(update=keys)
    check_job(job)
    if idle := next((line for line in idle_keys(job) if line not in idle_keys(plan.job)), ""):
        raise ArgumentError(idle)
    new = [
        _reason(plan, one, found.scenario, tuple(key for key in best if key != one.key))
        for one in found.searches
    ]
    replaced = {one.choice for one in new}
    kept = [one for one in plan.reasons if one.choice not in replaced]
    before, after = method_reason(plan.job), method_reason(job)  # it may name the steps
    told = [after[0] if one in before else one for one in kept]
    return plan.model_copy(update={"job": job, "reasons": (*told, *new)})


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
    for key in _OTHERWISE:
        if (value := getattr(found.scenario, key)) is not None:
            raise ArgumentError(
                f"{key}={value}: the plan takes no values that were searched for another training: "
                "leave it out, or plan with it"
            )


def _reason(
    plan: Plan, search: Search, scenario: Scenario, others_searched: tuple[str, ...]
) -> Reason:
    """Why a value is the one that is taken."""
    choice = _CHOICES[search.key]
    (best,) = (one for one in search.tried if one.value == search.best)
    least = "time" if best.cost is None else "cost"
    took = duration(best.seconds.value)
    took += "" if best.cost is None else f", cost {between(best.cost)}"
    usual = Scenario()
    stated = " ".join(
        f"{key}={as_written(value)}"
        for key, value in scenario
        if value != getattr(usual, key) and key != search.key
    )
    why = (
        f"Least {least} of {len(search.tried)} values of {search.key} simulated with "
        f"{stated or 'nothing stated'}, {scenario.repeats} times each: {took}."
    )
    if others_searched:
        why += f" It was searched apart from {as_written(others_searched)}."
    if earlier := next((one for one in plan.reasons if one.choice == choice), None):
        why += f" Predicted times are still those of {earlier.value} ({earlier.source})."
    others = tuple(
        Alternative(value=_shown(search.key, one.value), loss=_loss(one, search))
        for one in search.tried
        if one is not best
    )
    value = _shown(search.key, search.best)
    return Chosen(value, why, "predicted", alternatives=others).reason(choice)


def _shown(key: str, value: float) -> str:
    return duration(value) if key == "checkpoint_seconds" else f"{value:g}"


def _loss(one: Tried, search: Search) -> str:
    more, what = one.over_best, "time" if one.cost is None else "cost"
    shown: Callable[[float], str] = duration if one.cost is None else number
    value, low, high = map(shown, (more.value, more.low, more.high))
    level = ", level with it" if one.value in search.level else ""
    return f"{value} more {what} ({low} to {high}){level}"
