"""A plan's training on clusters that nobody here has, as a function. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchwright.errors import ArgumentError
from batchwright.planning.simulation.searched import with_searched
from batchwright.planning.simulation.simulate import simulate as simulate_plan
from batchwright.records import Plan, Profile, Scenario, Simulation
from batchwright.records.documents import pairs_of, plain, record_of, texts_of
from batchwright.records.job import as_written
from batchwright.records.text.job_keys import unknown_key
from batchwright.records.text.problems import described, first_problem

_LISTS = ("workers", "speeds")
_KEYS = tuple(Scenario.model_fields)
_SEARCHED = ("rebalance_steps", "checkpoint_seconds", "spares", "workers_per_host")
_MAX_COMBINATIONS = 1000
_RANGE = re.compile(r"\s*([0-9]{1,9})\s*-\s*([0-9]{1,9})\s*")  # of workers


def simulate(
    plan: Plan | str | Path,
    overrides: Iterable[str] = (),
    *,
    profile: Profile | str | Path | Sequence[Profile | str | Path] = (),
    search: Mapping[str, Sequence[float]] | None = None,
    **keys: Any,
) -> Simulation:
    """Simulate a plan's training on other clusters: time, cost, and where the time goes.

    Args:
        plan: From `plan`, or the path of its file.
        overrides: ``key=value`` texts, as on the command line.
        profile: What the plan was made from, one or more: times of each kind of worker, how they
            scatter, and measured exchanges. Without it, what the plan itself tells.
        search: By key, values to compare, such as ``{"checkpoint_seconds": [60, 600]}``. Of
            several keys all combinations are tried.
        keys: What the clusters are like, such as ``workers=(8, 64), hours=24``; see `Scenario`.

    Returns:
        Time and cost with their intervals on each cluster, with the best of what was searched.

    Raises:
        ArgumentError: A key or a value is wrong.
        PlanError: The plan cannot be trained there, or would never end.
    """
    plan = record_of(plan, Plan, "simulate")
    several = isinstance(profile, Sequence) and not isinstance(profile, str)
    given: Sequence[Any] = profile if several else [profile]  # type: ignore[assignment]
    profiles = [record_of(one, Profile, "simulate", "profile") for one in given]
    values = {key: plain(value) for key, value in keys.items()}
    told = pairs_of(
        texts_of(overrides),
        lambda text: ArgumentError(f"{text!r} is no key of simulate: write key=value, as hours=24"),
    )
    values |= {key: None if raw in ("null", "~") else raw for key, raw in told.items()}
    if not search:
        return simulate_plan(plan, scenario_of(values), profiles)
    if not isinstance(search, Mapping):
        raise ArgumentError(
            f"simulate: search is {described(search)}: give a dictionary of values by key, such as "
            '{"spares": [0, 1, 2]}'
        )
    grid = _grid(values, {key: plain(some) for key, some in search.items()})
    return simulate_plan(plan, _read(values), profiles, tuple(search), grid)


def take_searched(plan: Plan | str | Path, found: Simulation | str | Path) -> Plan:
    """The plan with the best values that its simulation has found, and where each came from.

    What a job has a key for (``checkpoint_seconds``, ``rebalance_steps``) is set; what only a
    cluster can have (``spares``, ``workers_per_host``) is told among the reasons. Times and costs
    that the plan predicts stay as its formulas have them.

    Args:
        plan: What was simulated, or the path of its file.
        found: By `simulate` with ``search``, or the path of its file.

    Raises:
        ArgumentError: Nothing was searched, or on a cluster or training that is not the plan's.
        JobError: The job cannot have such a value.
    """
    given = record_of(plan, Plan, "take_searched")
    return with_searched(given, record_of(found, Simulation, "take_searched", "found"))


def scenario_of(values: Mapping[str, Any]) -> Scenario:
    """What some keys say; texts as on the command line.

    Raises:
        ArgumentError: A key or a value is wrong, or two contradict each other.
    """
    scenario = _read(values)
    if conflict := next(scenario.conflicts(), ""):
        raise ArgumentError(f"simulate: {conflict}")
    return scenario


def _read(values: Mapping[str, Any]) -> Scenario:
    read = {}
    for key, value in values.items():
        if key not in _KEYS:
            raise ArgumentError(unknown_key(key, _KEYS).replace("job key", "key of simulate"))
        if key in _LISTS:
            value = () if value is None else _listed(key, value)
        read[key] = value
    try:
        return Scenario.model_validate(read)
    except ValidationError as error:
        raise ArgumentError(first_problem(error, "simulate: ")) from None


def _listed(key: str, value: Any) -> Any:
    """``8,16,32``, ``8-64`` for 8, 16, 32, 64, or a single value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str):
        return value
    if key == "workers" and (ends := _RANGE.fullmatch(value)):
        first, last = map(int, ends.groups())
        if not 1 <= first <= last:
            raise ArgumentError(f"simulate: workers={value}: give a range as 8-1024, low to high")
        doublings = [first << n for n in range(64) if first << n < last]
        return (*doublings, last)
    return tuple(part.strip() for part in value.split(",") if part.strip())


def searches_of(words: Iterable[str]) -> dict[str, list[str]]:
    """``KEY=V1,V2,...`` texts by key.

    Raises:
        ArgumentError: A text is something else.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        listed = [one.strip() for one in values.split(",") if one.strip()]
        if not equals or not listed:
            raise ArgumentError(
                f"--search {word}: write KEY=V1,V2,..., as checkpoint_seconds=60,300,900"
            )
        found.setdefault(key.strip(), []).extend(listed)
    return found


def _grid(values: Mapping[str, Any], search: Mapping[str, Sequence[Any]]) -> list[Scenario]:
    """The scenario with each combination of the values that are searched.

    Raises:
        ArgumentError: A key cannot be searched, a value is wrong or there twice, or too many.
    """
    for key, some in search.items():
        if key not in _SEARCHED:
            raise ArgumentError(f"--search {key}: search one of {', '.join(_SEARCHED)}")
        if isinstance(some, str) or not isinstance(some, Sequence) or not some or None in some:
            raise ArgumentError(f"--search {key}: give its values, as {key}=1,2,4")
        read = [getattr(_read({**values, key: value}), key) for value in some]
        if twice := [one for one in read if read.count(one) > 1]:
            raise ArgumentError(f"--search {key} names {twice[0]:g} twice")
    if (count := prod(len(some) for some in search.values())) > _MAX_COMBINATIONS:
        raise ArgumentError(
            f"--search: {count:,} combinations of {as_written(tuple(search))}: give fewer values, "
            f"{_MAX_COMBINATIONS:,} combinations at most"
        )
    found = [
        _read({**values, **dict(zip(search, one, strict=True))})
        for one in product(*search.values())
    ]
    # What is stated may concern some values only, as a host's links do with several workers.
    conflicts = [next(one.conflicts(), "") for one in found]
    if all(conflicts):
        raise ArgumentError(f"simulate: {conflicts[0]}")
    return found
