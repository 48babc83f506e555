"""`simulate`: a plan's training on clusters that you do not have. Needs no torch."""

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
from batchwright.records.documents import pairs_of, record_of, texts_of
from batchwright.records.job import as_written
from batchwright.records.text.job_keys import unknown_key
from batchwright.records.text.job_values import plain
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
        profile: The plan's profile, or one for each kind of worker: step times, their scatter, and
            measured exchanges. Without it the plan's own figures are used.
        search: Values to compare by key, such as ``{"checkpoint_seconds": [60, 600]}``. With
            several keys all combinations are tried.
        keys: Properties of the clusters, such as ``workers=(8, 64), hours=24``; see `Scenario`.

    Returns:
        Time and cost with their intervals on each cluster, with the best of the searched values.

    Raises:
        ArgumentError: A key or a value is wrong.
        PlanError: The plan cannot be trained on such a cluster, or its training would never end.
    """
    plan = record_of(plan, Plan, "simulate")
    several = isinstance(profile, Sequence) and not isinstance(profile, str)
    given: Sequence[Any] = profile if several else [profile]  # type: ignore[assignment]
    profiles = [record_of(one, Profile, "simulate", "profile") for one in given]
    values = {key: plain(value) for key, value in keys.items()}
    texts = pairs_of(
        texts_of(overrides),
        lambda text: ArgumentError(f"{text!r} is no key of simulate: write key=value, as hours=24"),
    )
    values |= {key: None if text in ("null", "~") else text for key, text in texts.items()}
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
    """The plan with the best values that a simulation has found, with a reason for each.

    Values of job keys (``checkpoint_seconds``, ``rebalance_steps``) are set in the plan's job. For
    properties of a cluster (``spares``, ``workers_per_host``) there is only a reason. The plan's
    predicted times and costs stay unchanged.

    Args:
        plan: The simulated plan, or the path of its file.
        found: The result of `simulate` with ``search``, or the path of its file.

    Raises:
        ArgumentError: Nothing was searched, or the simulation is of another cluster or training.
        JobError: The job cannot have such a value.
    """
    given = record_of(plan, Plan, "take_searched")
    return with_searched(given, record_of(found, Simulation, "take_searched", "found"))


def scenario_of(values: Mapping[str, Any]) -> Scenario:
    """The scenario of some keys, whose values may be texts as on the command line.

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
    """The values of ``8,16,32``, of ``8-64`` (8, 16, 32, 64), or a single value as a tuple."""
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
    """The values of ``KEY=V1,V2,...`` texts, by key.

    Raises:
        ArgumentError: A text is malformed.
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
        ArgumentError: A key cannot be searched, a value is wrong or comes twice, or there are too
            many combinations.
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
    # Some keys need particular values, as links inside a host need several workers per host: it is
    # enough if they suit one combination.
    conflicts = [next(one.conflicts(), "") for one in found]
    if all(conflicts):
        raise ArgumentError(f"simulate: {conflicts[0]}")
    return found
